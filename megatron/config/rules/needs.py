"""No silent flag: one that only matters under a condition is named where the condition does not hold.

A flag of Megatron-LM is a row of the start-up table then, since its users' command lines hold many such flags
(--save-interval without --save). A flag of this program's own is an error, and so is any with --strict-flags.

Only flags that the user typed are judged (`RunConfig.given`): defaults and presets may hold values that this run does
not use. A flag that asks for what the run does anyway is honoured, and so not listed here: --no-load-optim beside
--finetune, say. What depends on the number of processes or on the machine is a row of the start-up table instead
(--sequence-parallel with tp 1). --skip-train asks for less than the script describes, so flags of training may stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from megatron.config.data_parallel import DataParallelSettings, data_parallel_settings
from megatron.config.flag_table import read_flags
from megatron.config.model import RUNTIME_FIELDS, ModelConfig
from megatron.config.note import Note
from megatron.config.optimizer_offload import OFF, offload_settings, policy_of, updates_on_cpu
from megatron.config.pipeline import pipeline_settings
from megatron.config.rules.files import HUGGING_FACE
from megatron.config.run import RunConfig, flag_name


@dataclass(frozen=True)
class Need:
    """`fields` have an effect only where `holds`. `reason` completes "--x has no effect: ..."; `fix` follows "or"."""

    fields: tuple[str, ...]
    holds: Callable[[RunConfig], bool]
    reason: Callable[[RunConfig], str]
    fix: str


def _need(fields: str, holds: Callable[[RunConfig], bool], reason: str | Callable[[RunConfig], str], fix: str) -> Need:
    said = reason if callable(reason) else lambda run: reason
    return Need(tuple(fields.split()), holds, said, fix)


def _positions(run: RunConfig) -> str:
    return f"--position-embedding-type is {run.model.position_embedding_type}"


def _rotary(run: RunConfig) -> bool:
    return run.model.position_embedding_type in ("rope", "yarn")


def _yarn(run: RunConfig) -> bool:
    return run.model.position_embedding_type == "yarn"


def _tokenizer(run: RunConfig) -> str:
    return f"--tokenizer-type is {run.tokenizer.tokenizer_type}"


def _style(run: RunConfig) -> str:
    return f"--lr-decay-style is {run.schedule.lr_decay_style}"


def _warms_up(run: RunConfig) -> bool:
    s = run.schedule
    return bool(s.lr_warmup_iters or s.lr_warmup_samples or s.lr_warmup_fraction)


def _reads_files(run: RunConfig) -> bool:
    return not run.data.mock_data


def _gathers(run: RunConfig) -> bool:
    return run.parallel.sequence_parallel


def _settings(run: RunConfig) -> DataParallelSettings:
    return data_parallel_settings(run.parallel)


def _is_pipeline(run: RunConfig) -> bool:
    return run.parallel.pipeline_model_parallel_size > 1


def _is_interleaved(run: RunConfig) -> bool:
    assert run.model.num_layers
    return pipeline_settings(run.parallel, run.model.num_layers).schedule.takes_groups


def _validates(run: RunConfig) -> bool:
    return run.data.train_data_path is None or run.data.valid_data_path is not None


def _far_updates(run: RunConfig) -> bool:
    return updates_on_cpu(run.optimizer, run.optimizer_offload)


def _offload_policy(run: RunConfig) -> str:
    return policy_of(run.optimizer, run.optimizer_offload)


def _offloads(run: RunConfig) -> bool:
    """Something, or perhaps: the balanced policy decides later."""
    offload = run.activation_offload
    activations = offload.kind is not None or run.recompute.recompute_policy == "balanced"
    return activations or offload.cpu_offloading_weights or _offloads_optimizer(run)


def _offloads_optimizer(run: RunConfig) -> bool:
    return offload_settings(run.optimizer, run.optimizer_offload).mode != OFF


def _low_precision_state(run: RunConfig) -> bool:
    o = run.optimizer
    return "bf16" in (o.exp_avg_dtype, o.exp_avg_sq_dtype, o.main_params_dtype)


def _goes_on(run: RunConfig) -> bool:
    """Whether the run may find progress of its own."""
    return run.checkpoint.load is not None or run.checkpoint.pretrained_checkpoint is not None


_MODEL = (
    _need(
        "num_query_groups",
        lambda run: run.model.group_query_attention,
        "each query head has its own key/value head",
        "add --group-query-attention",
    ),
    _need("rotary_base rotary_percent", _rotary, _positions, "give --position-embedding-type rope"),
    _need(
        "rotary_seq_len_interpolation_factor use_rope_scaling",
        lambda run: run.model.position_embedding_type == "rope",
        _positions,
        "give --position-embedding-type rope",
    ),
    _need(
        "rope_scaling_factor rope_scaling_original_max_position_embeddings",
        lambda run: run.model.use_rope_scaling or _yarn(run),
        lambda run: f"{_positions(run)} without --use-rope-scaling",
        "add --use-rope-scaling, or give --position-embedding-type yarn",
    ),
    _need(
        "rope_scaling_low_freq_factor rope_scaling_high_freq_factor",
        lambda run: run.model.use_rope_scaling,
        "rotary frequencies are not scaled",
        "add --use-rope-scaling",
    ),
    _need("yarn_beta_fast yarn_beta_slow yarn_mscale", _yarn, _positions, "give --position-embedding-type yarn"),
    _need(
        "window_attn_skip_freq",
        lambda run: run.model.window is not None,
        "every layer has full attention",
        "give --window-size",
    ),
    _need(
        "window_size",
        lambda run: run.model.window is None or any(run.model.windows),
        lambda run: f"--window-attn-skip-freq {run.model.window_attn_skip_freq} gives every layer full attention",
        "give another --window-attn-skip-freq",
    ),
    _need(
        "lora_alpha lora_dropout lora_target_modules",
        lambda run: run.model.lora_rank is not None,
        "there are no adapters",
        "give --lora-rank",
    ),
    _need(
        "add_qkv_bias",
        lambda run: not run.model.add_bias_linear,
        "all linear layers have biases already",
        "add --disable-bias-linear",
    ),
    _need(
        "fp32_residual_connection",
        lambda run: run.model.fp16 or run.model.bf16,
        "the whole model is fp32",
        "add --bf16",
    ),
    _need(
        "reset_position_ids",
        lambda run: run.model.position_embedding_type != "none",
        _positions,
        "give another --position-embedding-type",
    ),
)

_OPTIMIZER = (
    _need(
        "adam_beta1 adam_beta2 adam_eps",
        lambda run: run.optimizer.rule == "adam",
        lambda run: f"--optimizer is {run.optimizer.optimizer}",
        "give --optimizer adam",
    ),
    _need(
        "sgd_momentum",
        lambda run: run.optimizer.optimizer == "sgd",
        lambda run: f"--optimizer is {run.optimizer.optimizer}",
        "give --optimizer sgd",
    ),
    _need(
        "weight_decay",
        lambda run: run.optimizer.weight_decay_incr_style == "constant",
        lambda run: (
            f"--weight-decay-incr-style {run.optimizer.weight_decay_incr_style} goes from --start-weight-decay to "
            "--end-weight-decay"
        ),
        "give --weight-decay-incr-style constant",
    ),
    _need(
        "start_weight_decay end_weight_decay",
        lambda run: run.optimizer.weight_decay_incr_style != "constant",
        "the weight decay is constant",
        "give --weight-decay-incr-style linear or cosine",
    ),
    _need(
        "loss_scale",
        lambda run: run.model.fp16,
        lambda run: f"{run.model.dtype_name} training scales no loss",
        "add --fp16",
    ),
    _need(
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        lambda run: run.model.fp16 and run.optimizer.loss_scale is None,
        lambda run: (
            f"--loss-scale fixes it at {run.optimizer.loss_scale:g}"
            if run.model.fp16
            else f"{run.model.dtype_name} training scales no loss"
        ),
        "train in --fp16 without --loss-scale",
    ),
    _need(
        "check_for_nan_in_loss_and_grad",
        lambda run: not run.model.fp16 or run.optimizer.loss_scale is not None,
        "dynamic loss scaling has to find overflows",
        "fix the scale with --loss-scale",
    ),
    _need(
        "min_lr decoupled_min_lr",
        lambda run: run.schedule.lr_decay_style != "constant",
        _style,
        "give another --lr-decay-style",
    ),
    _need(
        "decoupled_min_lr",
        lambda run: run.schedule.decoupled_lr is not None,
        "--decoupled-lr is not given",
        "add --decoupled-lr",
    ),
    _need(
        "decoupled_lr decoupled_min_lr",
        lambda run: run.model.lora_rank is None,
        "--lora-rank trains adapters only",
        "remove --lora-rank",
    ),
    _need(
        "lr_decay_iters lr_decay_samples",
        lambda run: run.schedule.lr_decay_style != "constant" or run.schedule.lr_warmup_fraction is not None,
        _style,
        "give another --lr-decay-style",
    ),
    _need(
        "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
        lambda run: run.schedule.lr_decay_style == "WSD",
        lambda run: f"{_style(run)}, not WSD",
        "give --lr-decay-style WSD",
    ),
    _need("lr_warmup_init", _warms_up, "there is no warm-up", "add --lr-warmup-iters, -samples or -fraction"),
    _need(
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
        lambda run: _goes_on(run) and not run.checkpoint.finetune,
        lambda run: "--finetune loads no schedule" if _goes_on(run) else "nothing is loaded",
        "continue a run with --load",
    ),
)

_PARALLEL = (
    _need(
        "pipeline_schedule num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
        "pipeline_model_parallel_layout overlap_p2p_communication",
        _is_pipeline,
        "--pipeline-model-parallel-size is 1",
        "raise it",
    ),
    _need(
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split "
        "account_for_loss_in_pipeline_split",
        lambda run: _is_pipeline(run) and run.parallel.pipeline_model_parallel_layout is None,
        lambda run: (
            "--pipeline-model-parallel-layout writes the stages out"
            if _is_pipeline(run)
            else "--pipeline-model-parallel-size is 1"
        ),
        "let the layers be shared out between pipeline ranks",
    ),
    _need(
        "microbatch_group_size_per_virtual_pipeline_stage",
        lambda run: _is_pipeline(run) and _is_interleaved(run),
        "the schedule is not interleaved",
        "give several virtual stages a pipeline rank",
    ),
    _need(
        "tp_comm_overlap",
        lambda run: run.parallel.tp_comm_overlap_rs or (_gathers(run) and run.parallel.tp_comm_overlap_ag),
        "all it could overlap is turned off",
        "remove --no-tp-comm-overlap-rs",
    ),
    _need(
        "tp_comm_overlap_rs",
        lambda run: run.parallel.tp_comm_overlap,
        "nothing is cut into pieces",
        "add --tp-comm-overlap",
    ),
    _need(
        "tp_comm_overlap_ag",
        lambda run: run.parallel.tp_comm_overlap and _gathers(run),
        lambda run: "nothing is gathered" if run.parallel.tp_comm_overlap else "nothing is cut into pieces",
        "add --tp-comm-overlap and --sequence-parallel",
    ),
    _need("tp_comm_bulk_dgrad", _gathers, "nothing is gathered", "add --sequence-parallel"),
    _need(
        "overlap_param_gather num_distributed_optimizer_instances",
        lambda run: _settings(run).shards != "no_shard",
        "every rank updates all parameters",
        "add --use-distributed-optimizer",
    ),
    _need(
        "cp_comm_type",
        lambda run: run.parallel.context_parallel_size > 1,
        "--context-parallel-size is 1",
        "raise it",
    ),
    _need(
        "hierarchical_context_parallel_sizes",
        lambda run: run.parallel.context_parallel_size > 1 and "a2a+p2p" in run.parallel.cp_comm_type,
        "no layer uses a2a+p2p",
        "give --cp-comm-type a2a+p2p",
    ),
    _need(
        "grad_reduce_mode",
        lambda run: _settings(run).shards != "no_shard" or run.parallel.grad_reduce_mode == "last-microbatch",
        "every rank keeps the whole gradient",
        "add --use-distributed-optimizer",
    ),
)

_RECOMPUTE = (
    _need(
        "activation_memory_budget activation_memory_plot",
        lambda run: run.recompute.recompute_policy == "balanced",
        "nothing is chosen by measuring",
        "add --recompute-policy balanced",
    ),
    _need(
        "recompute_method recompute_num_layers",
        lambda run: run.recompute.is_full,
        "whole layers are not recomputed",
        "give --recompute-granularity full",
    ),
    _need(
        "recompute_modules",
        lambda run: run.recompute.recompute_granularity == "selective" or run.recompute.recompute_activations,
        lambda run: "layers are recomputed whole" if run.recompute.is_full else "nothing is recomputed by parts",
        "give --recompute-granularity selective",
    ),
)

_OFFLOAD = (
    _need(
        "cpu_offloading_num_layers",
        lambda run: run.activation_offload.cpu_offloading or run.activation_offload.cpu_offloading_weights,
        "no layer is offloaded",
        "add --cpu-offloading or --cpu-offloading-weights",
    ),
    _need(
        "offload_modules",
        lambda run: run.activation_offload.fine_grained_activation_offloading,
        "no part of a layer is offloaded",
        "add --fine-grained-activation-offloading",
    ),
)

_OPTIMIZER_OFFLOAD = (
    _need(
        "optimizer_offload_policy",
        _far_updates,
        "the device updates everything",
        "add --optimizer-cpu-offload",
    ),
    _need(
        "optimizer_offload_fraction",
        lambda run: _far_updates(run) and _offload_policy(run) == "static",
        lambda run: "--optimizer-offload-policy is auto" if _far_updates(run) else "the device updates everything",
        "give --optimizer-cpu-offload and --optimizer-offload-policy static",
    ),
    _need(
        "optimizer_offload_auto_threshold",
        lambda run: _far_updates(run) and _offload_policy(run) == "auto",
        lambda run: "--optimizer-offload-policy is static" if _far_updates(run) else "the device updates everything",
        "give --optimizer-cpu-offload and --optimizer-offload-policy auto",
    ),
    _need(
        "overlap_cpu_optimizer_d2h_h2d",
        lambda run: _far_updates(run) and _offloads_optimizer(run),
        lambda run: "--optimizer-offload-fraction is 0" if _far_updates(run) else "the device updates everything",
        "give --optimizer-cpu-offload with a fraction above 0",
    ),
    _need(
        "offload_dir",
        _offloads,
        "nothing is offloaded",
        "add --optimizer-cpu-offload",
    ),
    _need(
        "optimizer_offload_chunk_size",
        lambda run: _offloads_optimizer(run) or _low_precision_state(run),
        "nothing is cut into chunks",
        "add --optimizer-cpu-offload or --offload-optimizer-states",
    ),
    _need(
        "use_precision_aware_optimizer",
        # Megatron-LM's offload cannot go without it, so scripts give both.
        lambda run: _low_precision_state(run) or _far_updates(run),
        "all state is fp32",
        "give --exp-avg-dtype bf16, --exp-avg-sq-dtype bf16 or --main-params-dtype bf16",
    ),
)

_DATA = (
    _need(
        "split",
        lambda run: run.data.data_path is not None,
        lambda run: "--mock-data has no documents" if run.data.mock_data else "each split has its own data path",
        "give one --data-path",
    ),
    _need(
        "data_cache_path dataloader_type",
        _reads_files,
        "--mock-data reads no files",
        "give --data-path instead of --mock-data",
    ),
    _need(
        "eod_mask_loss",
        lambda run: not run.data.sft,
        "a dataset of conversations marks what has loss",
        "use pretrain_gpt.py",
    ),
    _need(
        "data_order",
        lambda run: _reads_files(run) and not run.data.sft,
        lambda run: "--mock-data reads no files" if run.data.mock_data else "conversations have an order of their own",
        "train on documents of --data-path",
    ),
    _need(
        "data_sharding",
        lambda run: run.data.data_order == "megatron" and run.data.dataloader_type == "cyclic",
        "replicas read consecutive samples",
        "give --data-order megatron and --dataloader-type cyclic",
    ),
    _need("sft_packing", lambda run: run.data.sft, "samples are cut from documents", "use finetune.py"),
    _need(
        "train_data_path valid_data_path test_data_path",
        lambda run: not run.data.mock_data and run.data.data_path is None,
        lambda run: "--mock-data reads no files" if run.data.mock_data else "--data-path is given",
        "remove --data-path",
    ),
    _need(
        "valid_data_path test_data_path",
        lambda run: run.eval.eval_iters > 0,
        "--eval-iters 0 never evaluates",
        "raise --eval-iters",
    ),
    _need(
        "tokenizer_model",
        lambda run: run.tokenizer.tokenizer_type not in (None, "NullTokenizer", "GPT2BPETokenizer"),
        lambda run: f"{_tokenizer(run)}, which does not read it",
        "give another --tokenizer-type",
    ),
    _need(
        "vocab_file merge_file",
        lambda run: run.tokenizer.tokenizer_type == "GPT2BPETokenizer",
        lambda run: f"{_tokenizer(run)}, not GPT2BPETokenizer",
        "give --tokenizer-type GPT2BPETokenizer",
    ),
    _need(
        "tiktoken_pattern tiktoken_num_special_tokens",
        lambda run: run.tokenizer.tokenizer_type == "TikTokenizer",
        lambda run: f"{_tokenizer(run)}, not TikTokenizer",
        "give --tokenizer-type TikTokenizer",
    ),
    _need(
        "trust_remote_code chat_template",
        lambda run: run.tokenizer.tokenizer_type in HUGGING_FACE,
        lambda run: f"{_tokenizer(run)}, not HuggingFaceTokenizer",
        "give --tokenizer-type HuggingFaceTokenizer",
    ),
)

_LOOP = (
    _need("manual_gc_interval", lambda run: run.train.manual_gc, "collection is automatic", "add --manual-gc"),
    _need(
        "eval_interval",
        lambda run: run.eval.eval_iters > 0 and _validates(run),
        lambda run: "--eval-iters 0 never evaluates" if run.eval.eval_iters == 0 else "there is no validation data",
        "raise --eval-iters and give --valid-data-path",
    ),
    _need(
        "save_interval save_retain save_optim save_rng save_hf log_progress",
        lambda run: run.checkpoint.save is not None,
        "nothing is saved",
        "add --save",
    ),
    _need(
        "log_memory", lambda run: not run.model.lora_rank, "the memory of adapters is not planned", "remove --lora-rank"
    ),
    _need(
        "load_optim load_rng use_checkpoint_args",
        _goes_on,
        "nothing is loaded",
        "add --load or --pretrained-checkpoint",
    ),
    _need(
        "ckpt_step exit_on_missing_checkpoint finetune",
        lambda run: run.checkpoint.load is not None,
        "nothing is loaded",
        "add --load",
    ),
    _need(
        "tensorboard_log_interval",
        lambda run: run.logging.tensorboard_dir is not None or run.logging.wandb_project is not None,
        "no TensorBoard events are written",
        "add --tensorboard-dir",
    ),
    _need(
        "profile_step_start profile_step_end",
        lambda run: run.logging.profile_timeline is not None,
        "no timeline is written",
        "add --profile-timeline",
    ),
    _need(
        "wandb_exp_name wandb_entity wandb_save_dir",
        lambda run: run.logging.wandb_project is not None,
        "Weights & Biases is off",
        "add --wandb-project",
    ),
)

# Of all fields of a model's shape, and so apart from NEEDS: Megatron-LM, too, takes the checkpoint's.
SHAPE_NEED = _need(
    " ".join(field.name for field in dataclasses.fields(ModelConfig) if field.name not in RUNTIME_FIELDS),
    lambda run: not run.checkpoint.use_checkpoint_args,
    "--use-checkpoint-args takes the model's shape from the checkpoint",
    "remove --use-checkpoint-args",
)
NEEDS: tuple[Need, ...] = _MODEL + _OPTIMIZER + _PARALLEL + _RECOMPUTE + _OFFLOAD + _OPTIMIZER_OFFLOAD + _DATA + _LOOP


def unneeded(run: RunConfig) -> dict[str, Need]:
    """Fields of flags that were typed and have no effect in this run, with the first thing that they would need."""
    found: dict[str, Need] = {}
    for need in (SHAPE_NEED, *NEEDS):
        for name in need.fields:
            if name in run.given and name not in found and not need.holds(run):
                found[name] = need
    return found


def own_flags_have_an_effect(run: RunConfig, world_size: int) -> str | None:
    """A flag that only this program has, and that was typed, changes what the run does."""
    for name, need in unneeded(run).items():
        if run.logging.strict_flags or flag_name(name) not in read_flags():
            return f"{flag_name(name)} has no effect: {need.reason(run)}; remove it, or {need.fix}"
    return None


def notes(run: RunConfig) -> list[Note]:
    """Megatron-LM's flags that were typed and have no effect in this run: it ignores them, too, and scripts give them."""
    return [
        Note(flag_name(name), _shown(run.value(name)), "unused", need.reason(run))
        for name, need in unneeded(run).items()
        if flag_name(name) in read_flags()
    ]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
