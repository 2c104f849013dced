"""Classifies Megatron-LM's arguments by their effect on the model: core 0.12 to d98e8a6 (2026-08-22).

A checkpoint holds all arguments of the run that wrote it. Those that describe the model are read in arguments.py. Here
are the others: unsupported features, with the values that switch them off (OFF), and arguments without an effect on the
model for any value (NO_PART, and every name that begins with an entry of NO_PART_OF).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron.base.errors import CheckpointError, ConfigError
from megatron.core.models.mcore import moe_arguments

OFF: dict[str, tuple[Any, ...]] = {
    # Other kinds of layers.
    "mtp_use_repeated_layer": (False, None),
    "is_hybrid_model": (False, None),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "hybrid_attention_ratio": (0.0, None),
    "hybrid_mlp_ratio": (0.0, None),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "enable_mhc_connections": (False, None),
    "retro_add_retriever": (False, None),
    "export_num_medusa_heads": (0, None),
    "export_num_eagle_layers": (0, None),
    "export_num_mtp": (0, None),
    "enable_gpt_oss": (False, None),
    "use_legacy_models": (False, None),
    "spec": (None,),
    "yaml_cfg": (None,),
    # Other kinds of attention.
    "softmax_scale": (None,),
    "qk_l2_norm": (False, None),
    "export_qk_l2_norm": (False, None),
    # Other kinds of MLP or residual.
    "apply_residual_connection_post_layernorm": (False, None),
    # Other position embeddings.
    "mrope_section": (None,),
    # Factors on embeddings, attention and logits; values rounded by quantisers inside the model.
    "use_mup": (False, None),
    "export_quant_cfg": (None, "None"),
    "export_real_quant_cfg": (None, "None"),
    "export_kv_cache_quant": (False, None),
}

# Prefixes of names: first of arguments of a feature that OFF switches off (mamba_num_heads without is_hybrid_model),
# then of arguments of parts outside the model. Arguments of experts, which begin with moe_, are in moe_arguments.py.
_EXPERTS = "moe_"
_BEGINNINGS = """
mtp_ mamba_ gdp_ dsa_ linear_ mup_ retro_ mhc_ relative_attention_
adam_ app_tag_ async_ bert_ biencoder_ checkpoint ckpt_ consumed_ cpu_offloading cuda_graph data_ dataloader_ ddp_
dino_ dist_ckpt_ error_injection_ eval_ exit_ export_ fault_injector_ fim_ flight_recorder_ fp4 fp8 fsdp_ grpo_ gtp_
ict_ inference_ inprocess_ kitchen_ langrl_ lion_ load log_ logits_ lr_ manual_gc megatron_fsdp_ muon_ nccl_ no_load_
no_save_ non_persistent_ null_tokenizer_ one_logger_ optimizer otel_ overlap_ profile pytorch_profiler_ recompute_
replication rerun_ retriever_ rl_ save_ straggler_ tensorboard_ tiktoken_ timing_ tokenizer_ torch_fsdp2_ tp_comm_
train_ use_checkpoint_ use_kitchen vision_ wandb_
"""
NO_PART_OF = tuple(_BEGINNINGS.split())

# apply_query_key_layer_scaling divides scores by the layer's number before the mask and multiplies by it in the
# softmax. openai_gelu is parsed, but no model of core reads it. The precision of computations is not part of the model
# either.
_NAMES = """
_is_global_batch_size_explicitly_specified account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
accumulate_allreduce_grads_in_fp32 activation_offload_fraction add_position_embedding adlr_autoresume
adlr_autoresume_interval align_grad_reduce align_param_gather allow_ambiguous_pad_tokens apply_query_key_layer_scaling
apply_rope_fusion apply_wd_to_qk_layernorm attention_backend attention_softmax_in_fp32 auto_detect_ckpt_format
barrier_with_L1_time batch_invariant_backend batch_invariant_mode batch_size bf16 bias_dropout_fusion
bias_swiglu_fusion blendable_index_path block_data_path cache_mla_latents calc_ft_timeouts calculate_per_token_loss
chat_template check_for_large_grads check_for_nan_in_loss_and_grad check_for_spiky_loss
check_weight_hash_across_dp_replicas_interval classes_fraction clip_grad clone_scatter_output_in_embedding
config_logger_dir context_parallel_size cp_comm_type create_all_gather_group create_attention_mask_in_dataloader
cross_entropy_fusion_impl cross_entropy_loss_fusion curr_iteration decode_only_cuda_graphs
decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers decoder_num_layers decoder_seq_length decoupled_lr
decoupled_min_lr decrease_batch_size_if_needed defer_embedding_wgrad_compute delay_offload_until_cuda_graph
delay_wgrad_compute delta_offload_bytes_across_pp_ranks deprecated_use_mcore_models deterministic_mode
disable_bf16_reduced_precision_matmul disable_chunked_prefill disable_jit_fuser disable_mamba_mem_eff_path
disable_msc_deprecated disable_straggler_on_startup disable_symmetric_registration
distrib_optim_fully_reshardable_mem_efficient distribute_saved_activations distributed_backend
distributed_timeout_minutes distributed_timeout_seconds_after_init do_test do_train do_valid
dump_param_to_param_group_map embedding_init_method_std embedding_path empty_unused_memory_level
enable_chunked_prefill enable_cuda_graph enable_experimental enable_ft_package enable_full_sharding_in_hsdp
enable_gloo_process_groups enable_msc enable_one_logger encoder_num_layers encoder_pipeline_model_parallel_size
encoder_seq_length encoder_tensor_model_parallel_size end_weight_decay eod_mask_loss
ep_overlap_early_attn_memory_release evidence_data_path exp_avg_dtype exp_avg_sq_dtype expert_gtp_weight_remat_size
expert_model_parallel_size expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size external_cuda_graph
fake_process_group fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads finetune
first_last_layers_bf16 flash_attention_version flash_decode fp16 fp16_lm_cross_entropy fp32_residual_connection
freeze_all_layers freeze_base_for_mtp ft_num_warmup_iters full_validation fused_residual_rmsnorm global_batch_size
gpu_sniff_test_interval grad_reduce_in_bf16 gradient_accumulation_fusion gradient_reduce_div_fusion head_lr_mult
hierarchical_context_parallel_sizes high_priority_a2a_comm_stream high_priority_stream_groups hybrid_context_parallel
hysteresis img_h img_w indexer_batch_size indexer_log_interval init_model_with_meta_device initial_loss_scale
iter_per_epoch iteration iterations_to_skip keep_fp8_transpose_cache keep_fp8_transpose_cache_when_using_custom_fsdp
lazy_mpu_init legacy_tokenizer local_rank logging_level logit_dtype loss_scale loss_scale_window lr
main_grads_dtype main_params_dtype mask_factor mask_prob mask_type masked_softmax_fusion max_seqlen_per_dp_cp_rank
max_tokens_to_oom memory_snapshot_path merge_file metadata_path micro_batch_size microbatch_group_size_per_vp_stage
mid_level_dataset_surplus min_loss_scale min_lr min_offloaded_tensor_size mla_down_proj_fusion mlp_chunks_for_prefill
mlp_chunks_for_training mmap_bin_files mock_data model_parallel_size model_type modelopt_enabled
multiple_validation_sets no_persist_layer_norm no_weight_decay_cond_type num_channels num_classes
num_dataset_builder_threads num_distributed_optimizer_instances num_floating_point_operations_so_far
num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 num_layers_per_virtual_pipeline_stage num_speculative_tokens
num_virtual_stages_per_pipeline_rank num_workers nvtx_ranges object_storage_cache_path offload_modules
offset_sampling_seed_by_dp_rank onnx_safe openai_gelu outer_dp_sharding_strategy output_bert_embeddings
override_ckpt_iteration override_opt_param_scheduler pad_vocab_size params_dtype patch_dim per_dataset_sequences_path
per_split_data_args_path perform_initialization perform_rl_step phase_transition_iterations pin_cpu_grads
pin_cpu_params pipeline_model_parallel_comm_backend pipeline_model_parallel_layout pipeline_model_parallel_size
pipeline_model_parallel_split_rank pretrained_checkpoint qad_train_target qk_clip qk_clip_alpha
qk_clip_threshold query_in_block_prob rampup_batch_size rank record_memory_history
record_shapes refit_method reset_attention_mask reset_position_ids result_rejected_tracker_filename
reuse_grad_buf_for_mxfp8_param_ag run_workload_inspector_server s3_cache_path sample_rate save
scatter_gather_tensors_in_pipeline seed seq_length sequence_parallel sft sft_tokenizer_prompt_format sgd_momentum
sharp_enabled_group short_seq_prob skip_train skipped_train_samples special_tokens split start_eval_at_iter
start_weight_decay step_batch_size_schedule stream_ckpt_dequant strict_fsdp_dtensor_load
suggested_communication_unit_size swin_backbone_type symmetric_ar_type te_precision_config_file te_rng_tracker
teacher_model_config tensor_model_parallel_size tensor_parallel_num_weight_shards test_data_path test_mode
titles_data_path transformer_impl transformer_pipeline_model_parallel_size trust_remote_code use_cpu_initialization
use_custom_fsdp use_dist_ckpt use_dist_ckpt_deprecated use_distributed_optimizer use_flash_attn
use_fused_weighted_squared_relu use_gigatoken use_gloo_process_groups use_grouped_gemm_for_dense_mlp
use_grouped_gemm_for_shared_expert use_layer_wise_distributed_optimizer use_layer_wise_param_layout
use_legacy_static_engine use_mamba_mem_eff_path use_megatron_fsdp use_mp_args_from_checkpoint_args use_one_sent_docs
use_persistent_ckpt_worker use_precision_aware_optimizer use_pytorch_profiler use_ring_exchange_p2p use_sharp
use_tokenizer_model_from_checkpoint_args use_torch_fsdp2 use_torch_optimizer_for_cpu_offload use_tp_pp_dp_mapping
valid_data_path validation_set_names variable_seq_lengths verify_integrity
virtual_pipeline_model_parallel_size vocab_extra_ids vocab_file warmup weight_decay weight_decay_incr_style
wgrad_deferral_limit world_size
"""
NO_PART = frozenset(_NAMES.split())


def refuse_what_is_not_here(
    arguments: Mapping[str, Any], read: Collection[str], where: str, ignored: Collection[str]
) -> None:
    """Raises CheckpointError naming arguments outside `read` that change the model or may do so.

    `ignored` are names that no table contains and that may have any value; another name raises ConfigError.
    """
    has_experts = arguments.get("num_experts") is not None
    no_part_of = NO_PART_OF if has_experts else (*NO_PART_OF, _EXPERTS)
    off = OFF | moe_arguments.OFF if has_experts else OFF
    recognized = {*read, *off, *NO_PART, *(moe_arguments.NO_PART if has_experts else ())}
    unknown = {name for name in arguments if not (name in recognized or name.startswith(no_part_of))}
    if useless := sorted(set(ignored) - unknown):
        raise ConfigError(
            f"--ignore-arguments {' '.join(useless)}: only arguments of the checkpoint that are not known here can be "
            "ignored; remove it"
        )
    on = {name: arguments[name] for name, values in off.items() if name in arguments and arguments[name] not in values}
    if on:
        raise CheckpointError(f"{where}: {listed(on)}, which is not supported")
    # A switch that is off means the behaviour before the switch was introduced.
    on = {name: arguments[name] for name in sorted(unknown - set(ignored)) if not _is_nothing(arguments[name])}
    if on:
        raise CheckpointError(
            f"{where}: {listed(on)}, which is not known here; if the model does not depend on it, give "
            f"--ignore-arguments {' '.join(on)}"
        )


def listed(arguments: Mapping[str, Any]) -> str:
    """Formats arguments for a message."""
    return ", ".join(f"argument {name} is {value!r}" for name, value in arguments.items())


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, bool | int | float | str | list | tuple | dict) and not value)
