import pytest

from megatron.base.errors import ConfigError
from megatron.config.rules import check as rules
from megatron.config.rules import files as rules_files
from megatron.config.rules import layout as rules_layout
from megatron.config.rules import model as rules_model
from megatron.config.rules import prediction as rules_prediction
from megatron.config.rules import recompute as rules_recompute
from megatron.config.rules import sources as rules_sources
from megatron.config.rules import training as rules_training
from megatron.config.rules.needs import own_flags_have_an_effect
from megatron.config.rules.ranges import numbers_are_in_range, values_are_known
from tests.unit.config.attention_cases import ATTENTION_CASES, CP2, LATENT
from tests.unit.config.dynamic_cases import DYNAMIC, DYNAMIC_CASES
from tests.unit.config.fp8_cases import FP8, FP8_CASES
from tests.unit.config.invariant_cases import INVARIANT_CASES, INVARIANT_EXPERTS
from tests.unit.config.memory_cases import MEMORY_CASES
from tests.unit.config.moe_cases import MOE, MOE_CASES
from tests.unit.config.position_cases import POSITION_CASES
from tests.unit.config.rl_cases import RL, RL_CASES
from tests.unit.config.runs import make_run
from tests.unit.config.training_cases import TRAINING_CASES

FILES = {"mock_data": None, "data_path": ("a",)}
PREDICTION = {
    "mtp_num_layers": 1,
    "position_embedding_type": "rope",
    "pipeline_model_parallel_size": 2,
    "num_layers": 2,
}
PP2 = {"pipeline_model_parallel_size": 2, "num_layers": 8}
HF = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "t"}

# rule, fields that break it, fields that do not, world size, parts of the message
LOCAL = {"save": "d", "load": "d", "save_interval": 5, "non_persistent_save_interval": 2}
CASES = [
    *MEMORY_CASES,
    *DYNAMIC_CASES,
    *RL_CASES,
    *INVARIANT_CASES,
    *ATTENTION_CASES,
    *POSITION_CASES,
    (
        values_are_known,
        {"recompute_granularity": "selective", "recompute_modules": ("mlp", "experts")},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")},
        1,
        ["--recompute-modules", "experts"],
    ),
    (
        numbers_are_in_range,
        {"optimizer_offload_fraction": 1.1},
        {"optimizer_offload_fraction": 1.0},
        1,
        ["--optimizer-offload-fraction", "from 0 to 1", "1.1"],
    ),
    (values_are_known, {"normalization": "BatchNorm"}, {"normalization": "RMSNorm"}, 1, ["BatchNorm", "LayerNorm"]),
    (values_are_known, {"timing_log_level": 3}, {"timing_log_level": 2}, 1, ["--timing-log-level", "3"]),
    (numbers_are_in_range, {"lr": float("nan")}, {"lr": 0.0}, 1, ["--lr", "nan"]),
    (numbers_are_in_range, {"iterations_to_skip": (3, 0)}, {"iterations_to_skip": (3, 1)}, 1, ["got 0"]),
    (rules_model.shape_is_given, {"num_layers": None}, {}, 1, ["--num-layers", "--preset"]),
    (
        rules_sources.batch_shape_is_given,
        {"seq_length": None, "micro_batch_size": None},
        {},
        1,
        ["--seq-length and --mi"],
    ),
    (
        rules_layout.communicators_are_known,
        {"nccl_communicator_config_path": "missing.yaml"},
        {"high_priority_stream_groups": ("dp",)},
        1,
        ["--nccl-communicator-config-path missing.yaml", "No such file"],
    ),
    (
        rules_layout.heads_fit_context_parallelism,
        {**CP2, "cp_comm_type": ("a2a", "p2p", "p2p")},
        {**CP2, "cp_comm_type": ("a2a", "p2p")},
        2,
        ["3 values for 2 layers"],
    ),
    (
        rules_layout.heads_fit_context_parallelism,
        {**CP2, "context_parallel_size": 3, "cp_comm_type": ("a2a",)},
        {**CP2, "context_parallel_size": 3, "cp_comm_type": ("allgather",)},
        3,
        ["4 query heads", "between 3 ranks"],
    ),
    (
        rules_layout.heads_fit_context_parallelism,
        {**CP2, "context_parallel_size": 4, "cp_comm_type": ("a2a+p2p",)},
        {
            **CP2,
            "context_parallel_size": 4,
            "cp_comm_type": ("a2a+p2p",),
            "hierarchical_context_parallel_sizes": (2, 2),
        },
        4,
        ["--hierarchical-context-parallel-sizes"],
    ),
    (
        rules_layout.heads_fit_context_parallelism,
        {
            **CP2,
            "context_parallel_size": 4,
            "cp_comm_type": ("a2a+p2p",),
            "hierarchical_context_parallel_sizes": (2, 3),
        },
        {**CP2, "context_parallel_size": 4},
        4,
        ["2 3", "--context-parallel-size 4"],
    ),
    (rules_layout.world_is_divisible, {"tensor_model_parallel_size": 2}, {}, 3, ["3", "tp 2"]),
    (
        rules_layout.backend_fits_device,
        {"distributed_backend": "nccl", "device": "cpu"},
        {"distributed_backend": "nccl"},
        1,
        ["gloo"],
    ),
    (rules_model.one_half_precision, {"fp16": True, "bf16": True}, {"bf16": True}, 1, ["--fp16", "--bf16"]),
    (rules_model.one_activation, {"swiglu": True, "squared_relu": True}, {"swiglu": True}, 1, ["--swiglu"]),
    (
        rules_model.one_activation,
        {"swiglu": True, "geglu": True},
        {"geglu": True, "openai_gelu": True},
        1,
        ["--swiglu and --geglu"],
    ),
    (rules_model.one_activation, {"xielu": True, "squared_relu": True}, {"xielu": True}, 1, ["--xielu"]),
    (
        rules_model.trained_activation_has_dense_layers,
        {"xielu": True, "num_experts": 4},
        {"xielu": True},
        1,
        ["--xielu", "--num-experts 4"],
    ),
    (rules_model.one_activation, {"openai_gelu": True, "squared_relu": True}, {"openai_gelu": True}, 1, ["--openai"]),
    (rules_model.heads_divide_hidden, {"hidden_size": 66}, {"hidden_size": 66, "kv_channels": 8}, 1, ["66", "4"]),
    (
        rules_model.groups_divide_heads,
        {"group_query_attention": True, "num_query_groups": 3},
        {"group_query_attention": True, "num_query_groups": 2},
        1,
        ["4", "3"],
    ),
    (
        rules_model.parallel_parts_have_norms,
        {"parallel_residual": True, "pre_norm": False, "post_norm": True},
        {"parallel_residual": True, "post_norm": True},
        1,
        ["--no-pre-norm"],
    ),
    (
        rules_model.norms_have_these_parameters,
        {"normalization": "RMSNorm", "norm_parameters": "weight"},
        {"normalization": "RMSNorm", "norm_parameters": "none"},
        1,
        ["--norm-parameters weight", "RMSNorm"],
    ),
    (
        rules_model.norms_have_these_parameters,
        {"apply_layernorm_1p": True, "norm_parameters": "none"},
        {"apply_layernorm_1p": True, "norm_parameters": "weight"},
        1,
        ["--apply-layernorm-1p", "--norm-parameters none"],
    ),
    (
        rules_model.heads_have_weights_alone,
        {"qk_layernorm": True, "qk_layernorm_weight_per_head": True},
        {"qk_layernorm": True, "qk_layernorm_weight_per_head": True, "norm_parameters": "weight"},
        1,
        ["--qk-layernorm-weight-per-head", "biases of LayerNorm"],
    ),
    (
        rules_model.clipped_heads_are_plain,
        {"attention_output_gate": True, "clip_qkv": 8.0},
        {"qk_layernorm": True, "clip_qkv": 8.0},
        1,
        ["--clip-qkv 8.0", "--attention-output-gate"],
    ),
    (
        rules_model.shared_norm_has_dense_layers,
        {"parallel_residual": True, "shared_norm": True, "num_experts": 4},
        {"parallel_residual": True, "shared_norm": True},
        1,
        ["--shared-norm", "--num-experts 4"],
    ),
    (
        rules_recompute.shared_norm_is_computed_once,
        {"parallel_residual": True, "shared_norm": True, "kaimm_recompute_norm": True},
        {"parallel_residual": True, "shared_norm": True, "kaimm_recompute_mlp_activation_func": True},
        1,
        ["--shared-norm", "--kaimm-recompute-norm"],
    ),
    (rules_model.layers_have_norms, {"pre_norm": False}, {"pre_norm": False, "post_norm": True}, 1, ["--post-norm"]),
    (
        rules_model.heads_are_normalized_together,
        {"qk_layernorm": True, "qk_layernorm_across_heads": True},
        {"qk_layernorm": True, "qk_layernorm_across_heads": True, "normalization": "RMSNorm"},
        1,
        ["LayerNorm", "--normalization RMSNorm"],
    ),
    (
        rules_model.mlp_has_a_width,
        {"hidden_size": 16, "swiglu": True},
        {"hidden_size": 16, "swiglu": True, "ffn_hidden_size": 40},
        1,
        ["16", "--ffn-hidden-size"],
    ),
    (
        rules_layout.tp_divides_layers,
        {"tensor_model_parallel_size": 8},
        {"tensor_model_parallel_size": 4},
        8,
        ["--num-attention-heads 4", "8"],
    ),
    (
        rules_layout.tp_divides_layers,
        {
            "tensor_model_parallel_size": 4,
            "num_attention_heads": 12,
            "hidden_size": 96,
            "group_query_attention": True,
            "num_query_groups": 6,
        },
        {"tensor_model_parallel_size": 4, "group_query_attention": True, "num_query_groups": 2},
        4,
        ["-size 4 neither divides the 6 key/value heads", "multiple"],
    ),
    (
        rules_layout.tp_divides_layers,
        {"tensor_model_parallel_size": 4, "ffn_hidden_size": 90},
        {"tensor_model_parallel_size": 2, "ffn_hidden_size": 90},
        4,
        ["--ffn-hidden-size 90"],
    ),
    (
        rules_layout.sequence_parallel_divides_sequence,
        {"sequence_parallel": True, "tensor_model_parallel_size": 4, "seq_length": 30},
        {"sequence_parallel": True, "tensor_model_parallel_size": 2, "seq_length": 30},
        4,
        ["30", "4"],
    ),
    (
        rules_prediction.predictions_have_no_embedding_norm,
        {"mtp_num_layers": 1, "position_embedding_type": "rope", "embed_layernorm": True},
        {"mtp_num_layers": 1, "position_embedding_type": "rope"},
        1,
        ["--mtp-num-layers 1", "--embed-layernorm"],
    ),
    (
        rules_prediction.predictions_have_no_position_table,
        {"mtp_num_layers": 1},
        {"mtp_num_layers": 1, "position_embedding_type": "rope"},
        1,
        ["--mtp-num-layers 1", "--position-embedding-type rope"],
    ),
    (
        rules_prediction.adapters_leave_predictions_out,
        {"mtp_num_layers": 1, "position_embedding_type": "rope", "lora_rank": 4, "load": "d"},
        {"lora_rank": 4, "load": "d"},
        1,
        ["--lora-rank 4", "--mtp-num-layers 1", "remove one"],
    ),
    (
        rules_prediction.layout_has_the_predictions,
        {**PREDICTION, "pipeline_model_parallel_layout": "Et|tmmL"},
        {**PREDICTION, "pipeline_model_parallel_layout": "Et|tmL"},
        2,
        ["has 2 m", "--mtp-num-layers is 1"],
    ),
    (
        rules_layout.tp_divides_vocabulary,
        {"tensor_model_parallel_size": 4, "make_vocab_size_divisible_by": 2, "vocab_size": 1001},
        {"tensor_model_parallel_size": 4, "make_vocab_size_divisible_by": 2, "vocab_size": 1000},
        4,
        ["1002", "--make-vocab-size-divisible-by 8"],
    ),
    (
        rules_layout.tp_divides_vocabulary,
        {"tensor_model_parallel_size": 4, "fixed_padded_vocab_size": 1002},
        {"tensor_model_parallel_size": 4, "fixed_padded_vocab_size": 1004},
        4,
        ["1002", "--padded-vocab-size 1004"],
    ),
    (
        rules_model.padding_holds_vocabulary,
        {"fixed_padded_vocab_size": 999},
        {"fixed_padded_vocab_size": 1000},
        1,
        ["--padded-vocab-size 999", "vocabulary of 1000"],
    ),
    *TRAINING_CASES,
    *MOE_CASES,
    *FP8_CASES,
    (rules_files.one_data_source, {"data_path": ("a",)}, FILES, 1, ["--mock-data and --data-path"]),
    (rules_files.one_data_source, {"mock_data": None}, FILES, 1, ["--data-path"]),
    (
        rules_files.one_data_source,
        {"mock_data": None, "valid_data_path": ("b",)},
        {"mock_data": None, "valid_data_path": ("b",), "skip_train": True},
        1,
        ["--train-data-path"],
    ),
    (
        rules_files.conversations_are_read,
        {"sft": True},
        {**FILES, "sft": True},
        1,
        ["--mock-data", "preprocess_sft.py"],
    ),
    (rules_layout.layers_fill_the_pipeline, {**PP2, "num_layers": 7}, PP2, 2, ["7 layers", "2 pipeline ranks"]),
    (
        rules_layout.layers_fill_the_pipeline,
        {**PP2, "pipeline_schedule": "zb-v", "num_virtual_stages_per_pipeline_rank": 3},
        {**PP2, "pipeline_schedule": "zb-v", "num_virtual_stages_per_pipeline_rank": 2},
        2,
        ["zb-v", "not 3"],
    ),
    (
        rules_layout.layers_fill_the_pipeline,
        {**PP2, "pipeline_schedule": "interleaved"},
        {**PP2, "pipeline_schedule": "interleaved", "num_layers_per_virtual_pipeline_stage": 2},
        2,
        ["2 or more virtual stages"],
    ),
    (
        rules_layout.layers_fill_the_pipeline,
        {**PP2, "num_layers_per_virtual_pipeline_stage": 3},
        {**PP2, "num_layers_per_virtual_pipeline_stage": 1},
        2,
        ["3 on 2 pipeline ranks does not divide 8 layers"],
    ),
    (
        rules_layout.layers_fill_the_pipeline,
        {**PP2, "num_layers_per_virtual_pipeline_stage": 2, "num_virtual_stages_per_pipeline_rank": 2},
        {**PP2, "num_layers_per_virtual_pipeline_stage": 2},
        2,
        ["set the same"],
    ),
    (
        rules_layout.layers_fill_the_pipeline,
        {**PP2, "num_virtual_stages_per_pipeline_rank": 2, "microbatch_group_size_per_virtual_pipeline_stage": 1},
        {**PP2, "num_virtual_stages_per_pipeline_rank": 2, "microbatch_group_size_per_virtual_pipeline_stage": 3},
        2,
        ["--microbatch-group-size-per-virtual-pipeline-stage 1"],
    ),
    (
        rules_layout.layers_fill_the_pipeline,
        {**PP2, "pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et*8||L"},
        {**PP2, "pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et*7|t|L"},
        3,
        ["pipeline rank 1 would hold nothing"],
    ),
    (
        rules_training.pipeline_carries_sharding,
        {**PP2, "data_parallel_sharding_strategy": "optim_grads_params"},
        {**PP2, "data_parallel_sharding_strategy": "optim_grads"},
        2,
        ["optim_grads_params", "--pipeline-model-parallel-size 2"],
    ),
    (
        rules_training.pipeline_carries_sharding,
        {**PP2, "data_parallel_sharding_strategy": "optim_grads", "pipeline_schedule": "zb-h1"},
        {**PP2, "overlapped_distributed_optimizer": True, "pipeline_schedule": "zb-h1"},
        2,
        ["zb-h1", "last-microbatch"],
    ),
    (rules_sources.adapters_have_a_place, {"lora_rank": 4}, {"lora_rank": 4, "load_hf": "a"}, 1, ["--load-hf"]),
    (
        rules_sources.adapters_have_a_place,
        {**LATENT, "q_lora_rank": 8, "lora_rank": 4, "load": "a", "lora_target_modules": ("q_proj",)},
        {**LATENT, "q_lora_rank": 8, "lora_rank": 4, "load": "a", "lora_target_modules": ("q_a_proj", "linear_qkv")},
        1,
        ["--lora-target-modules q_proj", "has q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj"],
    ),
    (
        rules_sources.adapters_have_a_place,
        {"lora_rank": 4, "load": "a", "lora_target_modules": ("gate_proj",)},
        {"lora_rank": 4, "load": "a", "lora_target_modules": ("gate_proj",), "swiglu": True},
        1,
        ["gate_proj", "--swiglu"],
    ),
    (
        rules_files.pretrained_is_only_the_start,
        {"load": "a", "pretrained_checkpoint": "b", "finetune": True},
        {"load": "a", "pretrained_checkpoint": "b"},
        1,
        ["--finetune"],
    ),
    (
        rules_files.pretrained_is_only_the_start,
        {"load_hf": "a", "pretrained_checkpoint": "b"},
        {"pretrained_checkpoint": "b"},
        1,
        ["--load-hf"],
    ),
    (rules_files.data_paths_are_not_empty, {"mock_data": None, "data_path": ()}, FILES, 1, ["--data-path"]),
    (rules_files.split_is_three_shares, {**FILES, "split": "9,x"}, {**FILES, "split": "969, 30, 1"}, 1, ["9,x"]),
    (rules_files.split_is_three_shares, {**FILES, "split": "0,0,0"}, {**FILES, "split": "1"}, 1, ["0,0,0"]),
    (rules_files.split_is_three_shares, {**FILES, "split": "1,1,1,1"}, {**FILES, "split": "0,1"}, 1, ["1,1,1,1"]),
    (rules_files.split_is_three_shares, {**FILES, "split": "2,-1"}, {**FILES, "split": "2,1"}, 1, ["2,-1"]),
    (rules_files.tokenizer_has_its_files, {"tokenizer_type": None}, {}, 1, ["--tokenizer-type"]),
    (
        rules_files.end_of_document_is_an_id,
        {"null_tokenizer_eod_id": 1000},
        {"null_tokenizer_eod_id": 999},
        1,
        ["--null-tokenizer-eod-id 1000", "vocabulary of 1000"],
    ),
    (
        rules_files.end_of_document_is_an_id,
        {**HF, "null_tokenizer_eod_id": 2},
        {"null_tokenizer_eod_id": 0},
        1,
        ["--null-tokenizer-eod-id", "--tokenizer-type is HuggingFaceTokenizer"],
    ),
    (rules_files.tokenizer_has_its_files, {"vocab_size": None}, {**HF, "vocab_size": None}, 1, ["--vocab-size"]),
    (
        rules_files.tokenizer_has_its_files,
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"},
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v", "merge_file": "m"},
        1,
        ["--merge-file"],
    ),
    (rules_files.tokenizer_has_its_files, {"tokenizer_type": "TikTokenizer"}, HF, 1, ["--tokenizer-model"]),
    (rules_files.saves_have_an_interval, {"save": "d"}, {"save": "d", "save_interval": 5}, 1, ["--save-interval"]),
    (
        rules_files.exports_are_not_checkpoints,
        {"save": "d", "save_interval": 5, "save_hf": "./d"},
        {"save": "d", "save_interval": 5, "save_hf": "d/hf"},
        1,
        ["--save d", "--save-hf ./d"],
    ),
    (
        rules_files.local_checkpoints_are_on_the_host,
        {**LOCAL, "non_persistent_ckpt_type": "global"},
        {**LOCAL, "non_persistent_ckpt_type": "in_memory"},
        1,
        ["--non-persistent-ckpt-type global", "--save-retain"],
    ),
    (
        rules_files.local_checkpoints_are_on_the_host,
        {**LOCAL, "non_persistent_ckpt_type": "local"},
        {**LOCAL, "non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": "disk"},
        1,
        ["--non-persistent-local-ckpt-dir"],
    ),
    (
        rules_files.one_schedule_wins,
        {"load": "d", "override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
        {"load": "d", "override_opt_param_scheduler": True},
        1,
        ["--override", "--use-checkpoint"],
    ),
]


@pytest.mark.parametrize(
    ("rule", "bad", "good", "world_size", "words"), CASES, ids=[f"{i}-{c[0].__name__}" for i, c in enumerate(CASES)]
)
def test_a_rule_stops_the_bad_run_and_passes_the_good_one(rule, bad, good, world_size, words):
    broken = make_run(**bad)
    with pytest.raises(ConfigError) as error:
        rules.check(broken, world_size)
    message = str(error.value).splitlines()[0]
    (bound,) = [each for each in rules.rules(broken, world_size) if each.func is rule]
    assert message == bound(), "another rule stopped the run first"
    for word in words:
        assert word in message
    rules.check(make_run(**good), world_size)


def test_every_rule_has_a_row():
    elsewhere = {
        own_flags_have_an_effect,
        rules_sources.one_source_of_shape,
        rules_sources.one_source_of_adapters,
    }  # what was typed matters to these
    variants = ({}, MOE, FP8, DYNAMIC, RL, INVARIANT_EXPERTS)
    runs = [make_run(**fields) for fields in variants]
    assert {rule.func for run in runs for rule in rules.rules(run, 1)} == {case[0] for case in CASES} | elsewhere
