import pytest

from megatron.base.errors import ConfigError
from megatron.config.flag import flag_of
from megatron.config.flag_table import read_flags
from megatron.config.model import RUNTIME_FIELDS
from megatron.config.rules import check as rules
from megatron.config.rules.needs import notes, unneeded
from megatron.config.run import flag_fields, flag_name
from tests.unit.config.dynamic_cases import DYNAMIC
from tests.unit.config.fp8_cases import FP8_NEEDS
from tests.unit.config.moe_cases import MOE_NEEDS
from tests.unit.config.rl_cases import RL_NEEDS
from tests.unit.config.runs import make_run

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ROPE = {"position_embedding_type": "rope"}
LLAMA31 = {**ROPE, "use_rope_scaling": True}
YARN = {"position_embedding_type": "yarn"}
LONGROPE = {
    "position_embedding_type": "longrope",
    "short_factor": "1,2,3,4,5,6,7,8",
    "long_factor": "2,3,4,5,6,7,8,9",
}
MLA = {"multi_latent_attention": True, "kv_lora_rank": 32, "add_bias_linear": False}
GDN = {"experimental_attention_variant": "gdn", "linear_attention_freq": "2"}
GQA = {"group_query_attention": True}
RAMP = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.2}
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4}
WSD_SAMPLES = {"lr_decay_style": "WSD", "lr_wsd_decay_samples": 4, "train_iters": None, "train_samples": 100}
CONSTANT = {"lr_decay_style": "constant"}
FILES = {"mock_data": None, "data_path": ("a",)}
SPLITS = {"mock_data": None, "train_data_path": ("a",)}
GPT2 = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v", "merge_file": "m"}
TIKTOKEN = {"tokenizer_type": "TikTokenizer", "tokenizer_model": "t"}
HF = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "t"}
GRAPHS = {"cuda_graph_impl": "local", "hidden_dropout": 0.0, "attention_dropout": 0.0}
SAVE = {"save": "d", "save_interval": 5}
LOCAL = {**SAVE, "load": "d", "non_persistent_save_interval": 2}
LOAD = {"load": "d"}
LORA = {**LOAD, "lora_rank": 4}
PRETRAINED = {"pretrained_checkpoint": "d"}
SHARDED = {"use_distributed_optimizer": True}
CP = {"context_parallel_size": 2, "attention_dropout": 0.0}
PIPELINE = {"pipeline_model_parallel_size": 2, "num_layers": 8}
INTERLEAVED = {**PIPELINE, "num_virtual_stages_per_pipeline_rank": 2}
OVERLAPPED = {"overlapped_distributed_optimizer": True}
DEEP = {"num_layers": 4}
TP = {"tp_comm_overlap": True}
SP = {"sequence_parallel": True}
TP_SP = {**TP, **SP}
CPU_OFFLOAD = {"optimizer_cpu_offload": True}
AUTO_OFFLOAD = {**CPU_OFFLOAD, "optimizer_offload_policy": "auto"}
OFFLOADED_WEIGHTS = {"cpu_offloading_weights": True, "cpu_offloading_num_layers": 1}
HYBRID = {"optimizer": "hybridadam"}
STATES = {"offload_optimizer_states": True}
NO_FRACTION = {**CPU_OFFLOAD, "optimizer_offload_fraction": 0.0}
LOW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
AG_OFF = {"tp_comm_overlap_ag": False}
RS_OFF = {"tp_comm_overlap_rs": False}

# field, value that was typed, fields beside which it has no effect, fields beside which it has one, part of the message
CASES = [
    *MOE_NEEDS,
    ("mtp_loss_scaling_factor", 0.3, {}, {**ROPE, "mtp_num_layers": 1}, "give --mtp-num-layers"),
    *FP8_NEEDS,
    *RL_NEEDS,
    ("optimizer_offload_policy", "auto", STATES, CPU_OFFLOAD, "the device updates"),
    ("optimizer_offload_policy", "static", {}, HYBRID, "the device updates"),
    ("optimizer_offload_fraction", 0.5, {}, CPU_OFFLOAD, "the device updates"),
    ("optimizer_offload_fraction", 0.5, AUTO_OFFLOAD, CPU_OFFLOAD, "is auto"),
    ("optimizer_offload_fraction", 0.5, HYBRID, {**HYBRID, "optimizer_offload_policy": "static"}, "is auto"),
    ("optimizer_offload_auto_threshold", 1000, CPU_OFFLOAD, AUTO_OFFLOAD, "is static"),
    ("optimizer_offload_auto_threshold", 1000, {}, HYBRID, "the device updates"),
    ("overlap_cpu_optimizer_d2h_h2d", True, NO_FRACTION, CPU_OFFLOAD, "fraction is 0"),
    ("overlap_cpu_optimizer_d2h_h2d", True, STATES, HYBRID, "the device updates"),
    ("offload_dir", "d", {}, CPU_OFFLOAD, "nothing is offloaded"),
    ("offload_dir", "d", NO_FRACTION, STATES, "nothing is offloaded"),
    ("offload_dir", "d", {"pipeline_offload_ratio": "0"}, {"pipeline_offload_ratio": "0.5"}, "nothing is offloaded"),
    ("offload_dir", "d", {}, OFFLOADED_WEIGHTS, "nothing is offloaded"),
    ("optimizer_offload_chunk_size", 640, {}, STATES, "into chunks"),
    ("optimizer_offload_chunk_size", 640, NO_FRACTION, LOW, "into chunks"),
    ("use_precision_aware_optimizer", True, {}, LOW, "all state is fp32"),
    ("use_precision_aware_optimizer", True, STATES, CPU_OFFLOAD, "all state is fp32"),
    ("recompute_method", "uniform", {}, FULL, "--recompute-granularity full"),
    ("recompute_num_layers", 1, {"recompute_activations": True}, FULL, "not recomputed"),
    ("recompute_modules", ("mlp",), {}, {"recompute_granularity": "selective"}, "by parts"),
    (
        "mlp_chunk_size",
        64,
        {},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        "MLP is not recomputed",
    ),
    ("mlp_chunk_size", 64, {"recompute_granularity": "selective"}, FULL, "MLP is not recomputed"),
    (
        "mlp_chunk_size",
        64,
        {"num_experts": 8, "recompute_granularity": "selective", "recompute_modules": ("moe_act",)},
        {"num_experts": 8, "recompute_granularity": "selective", "recompute_modules": ("moe",)},
        "MLP is not recomputed",
    ),
    ("activation_memory_budget", 0.5, {}, {"recompute_policy": "balanced"}, "by measuring"),
    (
        "activation_memory_plot",
        "p.png",
        {},
        {"recompute_policy": "balanced", "activation_memory_budget": 0.5},
        "measuring",
    ),
    ("recompute_modules", ("mlp",), {"kaimm_recompute_norm": True}, {"recompute_activations": True}, "by parts"),
    ("recompute_modules", ("norm",), FULL, {"recompute_granularity": "selective"}, "recomputed whole"),
    ("num_query_groups", 2, {}, GQA, "--group-query-attention"),
    ("rotary_base", 1e6, {}, ROPE, "learned_absolute"),
    ("rotary_base_local", 1e4, ROPE, {**ROPE, "window_size": "3,0"}, "no layer has a window"),
    ("rotary_base_local", 1e4, {"window_size": "3,0"}, {**ROPE, "window_size": "3,0"}, "learned_absolute"),
    ("rotary_percent", 0.5, {"position_embedding_type": "none"}, YARN, "is none"),
    ("no_rope_freq", "2", {"position_embedding_type": "none"}, ROPE, "is none"),
    ("rotary_seq_len_interpolation_factor", 2.0, {}, ROPE, "learned_absolute"),
    ("use_rope_scaling", True, None, ROPE, ""),  # without rope a contradiction: rules_model.one_rotary_scaling
    ("rope_scaling_factor", 4.0, ROPE, LLAMA31, "without --use-rope-scaling"),
    ("rope_scaling_factor", 4.0, {}, YARN, "learned_absolute"),
    ("rope_scaling_original_max_position_embeddings", 64, ROPE, YARN, "without --use-rope-scaling"),
    ("rope_scaling_low_freq_factor", 2.0, YARN, LLAMA31, "not scaled"),
    ("rope_scaling_high_freq_factor", 8.0, ROPE, LLAMA31, "not scaled"),
    ("yarn_beta_fast", 16.0, ROPE, YARN, "is rope"),
    ("yarn_beta_slow", 2.0, LLAMA31, YARN, "is rope"),
    ("yarn_correction_range_round_to_int", False, LLAMA31, YARN, "is rope"),
    ("yarn_mscale", 1.0, {}, YARN, "learned_absolute"),
    ("llama_4_scaling_beta", 0.1, ROPE, YARN, "is rope"),
    ("linear_attention_freq", "2", {}, GDN, "all layers have attention"),
    ("linear_conv_kernel_dim", 3, {}, GDN, "all layers have attention"),
    ("linear_key_head_dim", 24, {}, GDN, "all layers have attention"),
    ("linear_value_head_dim", 24, {}, GDN, "all layers have attention"),
    ("linear_num_key_heads", 8, {}, GDN, "all layers have attention"),
    ("linear_num_value_heads", 16, {}, GDN, "all layers have attention"),
    ("q_lora_rank", 24, {}, MLA, "projected from the hidden states"),
    ("kv_lora_rank", 24, {}, MLA, "projected from the hidden states"),
    ("qk_head_dim", 24, {}, MLA, "projected from the hidden states"),
    ("qk_pos_emb_head_dim", 24, {}, MLA, "projected from the hidden states"),
    ("v_head_dim", 24, {}, MLA, "projected from the hidden states"),
    ("latent_norm_epsilon", 1e-6, {}, MLA, "projected from the hidden states"),
    ("indexer_topk", 64, {}, MLA, "projected from the hidden states"),
    ("mscale", 0.7, YARN, {**MLA, **YARN}, "projected from the hidden states"),
    ("mscale_all_dim", 0.7, {**MLA, **ROPE}, {**MLA, **YARN}, "is rope"),
    ("rope_scaling_original_max_position_embeddings", 64, ROPE, LONGROPE, "without --use-rope-scaling"),
    ("short_factor", "1,1,1,1,1,1,1,1", YARN, LONGROPE, "is yarn"),
    ("long_factor", "1,1,1,1,1,1,1,1", ROPE, LONGROPE, "is rope"),
    ("longrope_mscale", 1.5, YARN, LONGROPE, "is yarn"),
    ("dynamic_ntk_factor", 2.0, {}, ROPE, "is learned_absolute"),
    ("qk_layernorm_after_rope", True, ROPE, {**ROPE, "qk_layernorm": True}, "not normalized"),
    ("qk_layernorm_after_rope", True, {"qk_layernorm": True}, {**ROPE, "qk_layernorm": True}, "not rotated"),
    ("window_size", "7,0", {"window_attn_skip_freq": "1"}, {"window_attn_skip_freq": "2"}, "every layer full"),
    ("window_size", "7,0", {"window_attn_skip_freq": "[0,0]"}, {}, "[0,0] gives"),
    ("window_size", "-1,0", None, {}, ""),  # no limit asks for what happens anyway
    ("window_attn_skip_freq", "2", {}, {"window_size": "7,0"}, "full attention"),
    ("window_attn_skip_freq", "2", {"window_size": "-1,0"}, {"window_size": "0,0"}, "--window-size"),
    ("lora_alpha", 8.0, {}, LORA, "--lora-rank"),
    ("lora_dropout", 0.1, {}, LORA, "--lora-rank"),
    ("lora_target_modules", ("q_proj",), {}, LORA, "--lora-rank"),
    ("add_qkv_bias", True, {}, {"add_bias_linear": False}, "biases already"),
    ("add_attn_proj_bias", True, {}, {"add_bias_linear": False}, "biases already"),
    ("add_mlp_bias", True, {}, {"add_bias_linear": False}, "biases already"),
    (
        *("qk_layernorm_weight_per_head", True, {"norm_parameters": "weight"}),
        *({"norm_parameters": "weight", "qk_layernorm": True}, "--qk-layernorm"),
    ),
    ("shared_norm", True, {}, {"parallel_residual": True}, "--parallel-residual"),
    ("alibi_bias_max", 4.0, {}, {"position_embedding_type": "alibi"}, "--position-embedding-type alibi"),
    ("scale_alibi_bias", True, {}, {"position_embedding_type": "alibi"}, "--position-embedding-type alibi"),
    ("glu_linear_offset", 1.0, {}, {"quick_geglu": True}, "no gate"),
    ("activation_func_clamp_value", 7.0, {"squared_relu": True}, {"swiglu": True}, "no gate"),
    ("fp32_residual_connection", True, {}, {"bf16": True}, "--bf16"),
    (
        "qk_layernorm_across_heads",
        True,
        {"normalization": "RMSNorm"},
        {"qk_layernorm": True, "normalization": "RMSNorm"},
        "not normalized",
    ),
    ("reset_position_ids", True, {"position_embedding_type": "none"}, {}, "is none"),
    ("adam_beta1", 0.8, {"optimizer": "sgd"}, {}, "sgd"),
    ("adam_beta2", 0.9, {"optimizer": "sgd"}, {}, "sgd"),
    ("adam_eps", 1e-6, {"optimizer": "sgd"}, {}, "sgd"),
    ("sgd_momentum", 0.5, {}, {"optimizer": "sgd"}, "adam"),
    ("weight_decay", 0.1, RAMP, {}, "linear"),
    ("start_weight_decay", 0.1, None, RAMP, ""),  # without a ramp a contradiction: rules_training
    ("end_weight_decay", 0.2, None, RAMP, ""),
    ("loss_scale", 128.0, {"bf16": True}, {"fp16": True}, "bfloat16"),
    ("initial_loss_scale", 128.0, {}, {"fp16": True}, "float32"),
    ("min_loss_scale", 2.0, {"fp16": True, "loss_scale": 64.0}, {"fp16": True}, "at 64"),
    ("loss_scale_window", 10, {"bf16": True}, {"fp16": True}, "bfloat16"),
    ("hysteresis", 1, {"fp16": True, "loss_scale": 64.0}, {"fp16": True}, "at 64"),
    ("check_for_nan_in_loss_and_grad", False, {"fp16": True}, {"bf16": True}, "overflows"),
    ("check_for_nan_in_loss_and_grad", False, {"fp16": True}, {"fp16": True, "loss_scale": 8.0}, "overflows"),
    ("min_lr", 1e-5, CONSTANT, {}, "constant"),
    ("decoupled_lr", 1e-4, LORA, LOAD, "adapters only"),
    ("decoupled_min_lr", 1e-5, {}, {"decoupled_lr": 1e-4}, "--decoupled-lr is not given"),
    ("decoupled_min_lr", 1e-5, {**CONSTANT, "decoupled_lr": 1e-4}, {"decoupled_lr": 1e-4}, "constant"),
    ("lr_decay_iters", 8, CONSTANT, {}, "constant"),
    ("lr_decay_iters", 8, CONSTANT, {**CONSTANT, "lr_warmup_fraction": 0.1}, "constant"),
    (
        "lr_decay_samples",
        80,
        {**CONSTANT, "train_iters": None, "train_samples": 100},
        {"train_iters": None, "train_samples": 100},
        "constant",
    ),
    ("lr_wsd_decay_style", "linear", {}, WSD, "linear, not WSD"),
    ("lr_wsd_decay_iters", 4, {}, {"lr_decay_style": "WSD"}, "not WSD"),
    ("lr_wsd_decay_samples", 4, {"train_iters": None, "train_samples": 100}, WSD_SAMPLES, "not WSD"),
    ("lr_warmup_init", 1e-6, {}, {"lr_warmup_iters": 3}, "no warm-up"),
    ("override_model_fields", ("norm_epsilon",), {}, LOAD, "nothing is loaded"),
    ("override_opt_param_scheduler", True, {}, LOAD, "nothing is loaded"),
    ("override_opt_param_scheduler", True, {**LOAD, "finetune": True}, LOAD, "--finetune"),
    ("use_checkpoint_opt_param_scheduler", True, {}, {**LOAD, "load_optim": False}, "nothing is loaded"),
    ("tp_comm_overlap", True, RS_OFF, SP, "all it could overlap is turned off"),
    ("tp_comm_overlap", True, {**SP, **AG_OFF, **RS_OFF}, {**SP, **RS_OFF}, "--no-tp-comm-overlap-rs"),
    ("tp_comm_overlap_rs", False, SP, TP_SP, "cut into pieces"),
    ("tp_comm_overlap_ag", False, SP, TP_SP, "cut into pieces"),
    ("tp_comm_overlap_ag", False, TP, TP_SP, "nothing is gathered"),
    ("tp_comm_bulk_dgrad", False, TP, SP, "--sequence-parallel"),
    ("overlap_param_gather", True, {}, SHARDED, "updates all parameters"),
    ("overlap_param_gather", True, {"data_parallel_sharding_strategy": "no_shard"}, OVERLAPPED, "updates all"),
    ("num_distributed_optimizer_instances", 1, {}, SHARDED, "--use-distributed-optimizer"),
    ("grad_reduce_mode", "every-microbatch", {}, SHARDED, "keeps the whole gradient"),
    ("grad_reduce_mode", "auto", {"overlap_grad_reduce": True}, OVERLAPPED, "keeps the whole gradient"),
    ("grad_reduce_mode", "last-microbatch", None, {}, ""),  # what happens anyway is no contradiction
    ("cp_comm_type", ("p2p",), {}, CP, "--context-parallel-size is 1"),
    ("cp_comm_type", ("p2p",), {}, DYNAMIC, "--context-parallel-size is 1"),
    ("max_seqlen_per_dp_cp_rank", 32, {}, DYNAMIC, "add --dynamic-context-parallel"),
    ("min_dynamic_context_parallel_size", 1, {}, DYNAMIC, "add --dynamic-context-parallel"),
    ("hierarchical_context_parallel_sizes", (1, 2), CP, {**CP, "cp_comm_type": ("a2a+p2p",)}, "a2a+p2p"),
    ("pipeline_schedule", "gpipe", {}, PIPELINE, "--pipeline-model-parallel-size is 1"),
    ("num_layers_per_virtual_pipeline_stage", 2, {}, PIPELINE, "--pipeline-model-parallel-size is 1"),
    ("num_virtual_stages_per_pipeline_rank", 1, {}, PIPELINE, "--pipeline-model-parallel-size is 1"),
    ("pipeline_model_parallel_layout", "Et|tL", {}, {**PIPELINE, "num_layers": 2}, "is 1"),
    ("overlap_p2p_communication", False, {}, PIPELINE, "--pipeline-model-parallel-size is 1"),
    ("decoder_first_pipeline_num_layers", 3, None, PIPELINE, ""),  # without stages a contradiction
    ("decoder_last_pipeline_num_layers", 3, None, PIPELINE, ""),
    ("dry_run_world_size", 1, {}, {"dry_run": True}, "the launcher sets the number of processes"),
    ("account_for_embedding_in_pipeline_split", True, {}, {**PIPELINE, "num_layers": 7}, "is 1"),
    (
        "account_for_loss_in_pipeline_split",
        True,
        {**PIPELINE, "pipeline_model_parallel_layout": "Et*4|t*4L"},
        {**PIPELINE, "num_layers": 7},
        "writes the stages out",
    ),
    ("microbatch_group_size_per_virtual_pipeline_stage", 2, None, INTERLEAVED, ""),  # under others a contradiction
    ("cpu_offloading_num_layers", 1, {}, {"cpu_offloading": True}, "--cpu-offloading"),
    ("cpu_offloading_num_layers", 1, {}, {"cpu_offloading_weights": True}, "--cpu-offloading-weights"),
    ("offload_modules", ("core_attn",), {}, {**DEEP, "fine_grained_activation_offloading": True}, "--fine-grained"),
    ("split", "9,1,0", {}, FILES, "--mock-data"),
    ("split", "9,1,0", SPLITS, FILES, "its own data path"),
    ("data_cache_path", "c", {}, FILES, "--mock-data"),
    ("dataloader_type", "cyclic", {}, FILES, "--mock-data"),
    ("data_order", "megatron", {}, FILES, "--mock-data reads no files"),
    ("data_order", "megatron", {**FILES, "sft": True}, FILES, "an order of their own"),
    ("data_sharding", False, FILES, {**FILES, "data_order": "megatron", "dataloader_type": "cyclic"}, "consecutive"),
    ("sft_packing", False, FILES, {**FILES, "sft": True}, "cut from documents"),
    ("train_data_path", ("b",), {}, {"mock_data": None}, "--mock-data"),
    ("train_data_path", ("b",), FILES, {"mock_data": None}, "--data-path is given"),
    ("valid_data_path", ("b",), {}, SPLITS, "--mock-data"),
    ("test_data_path", ("b",), FILES, SPLITS, "--data-path is given"),
    ("eod_mask_loss", True, {**FILES, "sft": True}, {}, "conversations"),
    ("valid_data_path", ("b",), {**SPLITS, "eval_iters": 0}, SPLITS, "never evaluates"),
    ("test_data_path", ("b",), {**SPLITS, "eval_iters": 0}, SPLITS, "never evaluates"),
    ("tokenizer_model", "t", {}, HF, "NullTokenizer"),
    ("tokenizer_model", "t", GPT2, TIKTOKEN, "GPT2BPETokenizer"),
    ("vocab_file", "v", HF, GPT2, "HuggingFaceTokenizer"),
    ("merge_file", "m", {}, GPT2, "NullTokenizer"),
    ("tiktoken_pattern", "v1", HF, TIKTOKEN, "not TikTokenizer"),
    ("tiktoken_num_special_tokens", 10, {}, TIKTOKEN, "not TikTokenizer"),
    ("trust_remote_code", True, TIKTOKEN, HF, "TikTokenizer"),
    ("trust_remote_code", True, {}, {**HF, "tokenizer_type": "PretrainedFromHF"}, "NullTokenizer"),
    ("chat_template", "chatml", TIKTOKEN, HF, "TikTokenizer"),
    ("cuda_graph_warmup_steps", 5, {}, GRAPHS, "--cuda-graph-impl local"),
    ("manual_gc_interval", 5, {}, {"manual_gc": True}, "--manual-gc"),
    ("eval_interval", 5, {"eval_iters": 0}, {}, "--eval-iters 0"),
    ("eval_interval", 5, SPLITS, {**SPLITS, "valid_data_path": ("b",)}, "no validation data"),
    ("save_interval", 5, {}, SAVE, "--save"),
    ("save_hf", "hf", {}, SAVE, "--save"),
    ("save_retain", 2, {}, SAVE, "--save"),
    ("ckpt_failure", "stop", {}, SAVE, "--save"),
    ("async_save", True, {}, SAVE, "--save"),
    ("non_persistent_save_interval", 2, {"load": "d"}, {**SAVE, "load": "d"}, "--save"),
    ("non_persistent_save_interval", 2, SAVE, {**SAVE, "load": "d"}, "--load"),
    ("non_persistent_ckpt_type", "in_memory", SAVE, LOCAL, "--non-persistent-save-interval"),
    ("non_persistent_local_ckpt_dir", "disk", LOCAL, {**LOCAL, "non_persistent_ckpt_type": "local"}, "in memory"),
    ("replication", True, SAVE, LOCAL, "--non-persistent-save-interval"),
    ("replication_factor", 3, LOCAL, {**LOCAL, "replication": True}, "--replication"),
    ("replication_jump", 8, LOCAL, {**LOCAL, "replication": True}, "--replication"),
    ("save_optim", False, {}, SAVE, "--save"),
    ("save_rng", False, {}, SAVE, "--save"),
    ("log_progress", True, {}, SAVE, "--save"),
    ("log_straggler", True, {"skip_train": True}, {"skip_train": False}, "no step"),
    ("straggler_minmax_count", 2, {}, {"log_straggler": True}, "no rank is measured"),
    ("plan", "machine.json", {"skip_train": True}, {"skip_train": False}, "no step"),
    ("ckpt_step", 5, {}, LOAD, "--load"),
    ("exit_on_missing_checkpoint", True, {}, LOAD, "--load"),
    ("finetune", True, {}, LOAD, "--load"),
    ("load_optim", False, {}, LOAD, "--load"),
    ("load_rng", False, {}, LOAD, "--load"),
    ("use_checkpoint_args", True, {}, LOAD, "--load"),
    ("load_optim", False, {}, PRETRAINED, "--pretrained-checkpoint"),
    ("load_rng", False, {}, PRETRAINED, "--pretrained-checkpoint"),
    ("use_checkpoint_args", True, {}, PRETRAINED, "--pretrained-checkpoint"),
    ("override_opt_param_scheduler", True, {}, PRETRAINED, "nothing is loaded"),
    ("tensorboard_log_interval", 5, {}, {"tensorboard_dir": "t"}, "--tensorboard-dir"),
    ("tensorboard_log_interval", 5, {}, {"wandb_project": "p"}, "--tensorboard-dir"),
    ("profile_step_start", 2, {}, {"profile_timeline": "t"}, "no timeline"),
    ("profile_step_end", 9, {}, {"profile_timeline": "t"}, "--profile-timeline"),
    ("wandb_exp_name", "e", {}, {"wandb_project": "p"}, "--wandb-project"),
    ("wandb_entity", "e", {}, {"wandb_project": "p"}, "--wandb-project"),
    ("wandb_save_dir", "e", {}, {"wandb_project": "p"}, "--wandb-project"),
    ("skip_spiky_iterations", True, {}, {"check_for_spiky_loss": True}, "no step is computed again"),
    ("skip_spiky_iterations", True, {"rerun_mode": "validate_results"}, {"check_for_large_grads": True}, "examined"),
    ("error_injection_rate", 8, {"rerun_mode": "disabled"}, {}, "no step is computed again"),
    ("error_injection_type", "persistent_error", {}, {"error_injection_rate": 8}, "no error is injected"),
]

# Fields that change every run, or that ask for a state (an axis of size 1, a kernel) the start-up table reports on.
ALWAYS = """
    recompute_policy recompute_granularity recompute_activations kaimm_recompute_norm kaimm_recompute_mlp_activation_func
    optimizer_cpu_offload offload_optimizer_states main_grads_dtype exp_avg_dtype exp_avg_sq_dtype
    main_params_dtype
    pipeline_offload_ratio cpu_offloading cpu_offloading_weights fine_grained_activation_offloading
    batch_invariant_mode fp8_format num_experts num_layers hidden_size num_attention_heads kv_channels group_query_attention
    multi_latent_attention lora_rank mtp_num_layers experimental_attention_variant attention_output_gate
    rotary_interleaved softmax_scale attn_logit_softcapping final_logit_softcapping geglu
    quick_geglu xielu softmax_type norm_parameters clip_qkv
    embedding_multiplier_scale residual_multiplier logits_scaling
    max_position_embeddings position_embedding_type normalization norm_epsilon apply_layernorm_1p swiglu squared_relu
    embedding_multiplier_scale residual_multiplier logits_scaling pre_norm post_norm parallel_residual
    embed_layernorm
    openai_gelu bias_gelu_fusion
    add_bias_linear qk_layernorm
    untie_embeddings_and_output_weights add_output_layer_bias attention_dropout hidden_dropout
    init_method_std init_method_xavier_uniform apply_output_scale_init vocab_size make_vocab_size_divisible_by
    fixed_padded_vocab_size mask_padded_vocabulary fp16 bf16
    attention_backend transformer_impl gradient_accumulation_fusion
    persist_layer_norm bias_swiglu_fusion apply_rope_fusion
    tensor_model_parallel_size sequence_parallel tp_comm_bulk_wgrad pipeline_model_parallel_size context_parallel_size
    dynamic_context_parallel
    ddp_bucket_size device distributed_backend high_priority_stream_groups nccl_communicator_config_path
    use_distributed_optimizer overlap_grad_reduce overlapped_distributed_optimizer data_parallel_sharding_strategy
    grad_reduce_in_bf16
    distributed_timeout_minutes calc_ft_timeouts ft_num_warmup_iters heartbeat_dir elastic_world
    optimizer clip_grad weight_decay_incr_style
    lr lr_decay_style lr_warmup_iters lr_warmup_samples lr_warmup_fraction
    seq_length data_path mock_data num_workers reset_attention_mask sft perform_rl_step
    tokenizer_type tokenizer_hf_include_special_tokens null_tokenizer_eod_id
    micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule
    train_iters train_samples seed cuda_graph_impl calculate_per_token_loss z_loss_coeff
    cross_entropy_chunk_size
    exit_interval exit_duration_in_mins exit_signal_handler skip_train manual_gc deterministic_mode iterations_to_skip
    max_consecutive_nan_iterations check_weight_hash_across_dp_replicas_interval
    check_for_spiky_loss check_for_large_grads rerun_mode
    eval_iters
    log_interval log_throughput log_params_norm log_num_zeros_in_grad log_memory
    log_memory_interval progress_bar timing_log_level
    print_flags strict_flags
    tensorboard_dir wandb_project loss_curve profile_timeline
    save load load_hf load_adapter pretrained_checkpoint
    dry_run
"""


def world_of(fields):
    return fields.get("pipeline_model_parallel_size", 1) * fields.get("context_parallel_size", 1)


@pytest.mark.parametrize(
    ("name", "value", "without", "with_", "word"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_a_typed_flag_without_effect_is_named(name, value, without, with_, word):
    """Megatron-LM's in the start-up table, or as a refusal with --strict-flags; this program's own as a refusal."""
    world = world_of(with_)
    held = make_run((name,), **with_, **({} if name in with_ else {name: value}))
    rules.check(held, world)
    assert notes(held) == []
    if without is None:
        return
    idle, world = {**without, name: value}, world_of(without)
    rules.check(make_run((), **idle), world)  # not typed: a default or a preset may hold what the run does not use
    strict = make_run((name,), **idle, strict_flags=True)
    with pytest.raises(ConfigError) as error:
        rules.check(strict, world)
    message = str(error.value)
    assert message.startswith(f"{flag_name(name)} has no effect: ")
    # Without a flag of the model another model would be trained.
    assert ("; remove it, or " in message) == (flag_fields()[name][0] != "model" or name in RUNTIME_FIELDS)
    assert word in message and "\n" not in message
    if flag_name(name) in read_flags():
        loose = make_run((name,), **idle)
        rules.check(loose, world)
        (note,) = notes(loose)
        assert note.flag == flag_name(name) and note.in_effect == "unused" and note.why in message
    else:
        with pytest.raises(ConfigError, match="has no effect"):
            rules.check(make_run((name,), **idle), world)


def test_the_checkpoints_shape_goes_before_flags():
    run = make_run(("num_layers", "make_vocab_size_divisible_by", "bf16"), load="d", use_checkpoint_args=True)
    rules.check(run, 1)
    assert [note.flag for note in notes(run)] == ["--num-layers", "--make-vocab-size-divisible-by"]


@pytest.mark.parametrize("name", ["use_rope_scaling", "start_weight_decay", "end_weight_decay"])
def test_needs_that_another_rule_finds_first(name):
    run = make_run((name,), **{name: True if name == "use_rope_scaling" else 0.1})
    with pytest.raises(ConfigError, match=flag_name(name)):
        rules.check(run, 1)
    assert name in unneeded(run)


def test_every_field_is_judged():
    """A new flag has to be listed here as always in effect, or it says what it needs and has a row above."""
    conditional = {name for name, (_, spec) in flag_fields().items() if flag_of(spec).needs}
    assert conditional == {case[0] for case in CASES}
    always = set(ALWAYS.split())
    assert conditional.isdisjoint(always)
    assert conditional | always == set(flag_fields())
