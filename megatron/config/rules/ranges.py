"""Which numbers a field may hold, whatever the other fields are."""

from __future__ import annotations

from typing import Any

from megatron.config.flag import flag_of
from megatron.config.interval import (
    ABOVE_ONE,
    AT_LEAST_ONE,
    BELOW_ONE,
    COUNT,
    COUNT_OR_NONE,
    FRACTION,
    LAYERS,
    MINUTES,
    NOT_NEGATIVE,
    POSITIVE,
    RANKS,
    SEED,
    SHARE,
    SIZE,
    SIZE_OR_NONE,
    WORKERS_OR_NONE,
    Interval,
)
from megatron.config.run import RunConfig, flag_fields, flag_name

_BY_INTERVAL: dict[Interval, str] = {
    LAYERS: "num_layers recompute_num_layers num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank",
    SIZE: """
        hidden_size num_attention_heads ffn_hidden_size kv_channels num_query_groups lora_rank vocab_size
        make_vocab_size_divisible_by fixed_padded_vocab_size max_position_embeddings
        rope_scaling_original_max_position_embeddings seq_length micro_batch_size global_batch_size rampup_batch_size
    """,
    SIZE_OR_NONE: "tiktoken_num_special_tokens null_tokenizer_eod_id",
    RANKS: """
        tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
        expert_tensor_parallel_size hierarchical_context_parallel_sizes num_distributed_optimizer_instances
    """,
    COUNT: """
        optimizer_offload_chunk_size ddp_bucket_size microbatch_group_size_per_virtual_pipeline_stage
        loss_scale_window hysteresis lr_decay_iters lr_decay_samples train_iters train_samples exit_interval
        iterations_to_skip eval_interval log_interval log_memory_interval tensorboard_log_interval save_interval
        save_retain ckpt_step profile_step_start profile_step_end
    """,
    COUNT_OR_NONE: """
        optimizer_offload_auto_threshold cpu_offloading_num_layers decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples
        manual_gc_interval eval_iters max_consecutive_nan_iterations
    """,
    WORKERS_OR_NONE: "num_workers",
    SEED: "seed",
    MINUTES: "distributed_timeout_minutes exit_duration_in_mins",
    POSITIVE: """
        activation_memory_budget lora_alpha rotary_seq_len_interpolation_factor rope_scaling_low_freq_factor
        rope_scaling_high_freq_factor yarn_beta_fast yarn_beta_slow yarn_mscale norm_epsilon adam_eps loss_scale
        initial_loss_scale min_loss_scale
    """,
    AT_LEAST_ONE: "rope_scaling_factor",
    NOT_NEGATIVE: """
        init_method_std clip_grad weight_decay start_weight_decay end_weight_decay lr min_lr lr_warmup_init
        decoupled_lr decoupled_min_lr
    """,
    BELOW_ONE: "attention_dropout hidden_dropout lora_dropout adam_beta1 adam_beta2 sgd_momentum lr_warmup_fraction",
    FRACTION: "optimizer_offload_fraction",
    SHARE: "rotary_percent",
    ABOVE_ONE: "rotary_base",
}
RANGES: dict[str, Interval] = {name: interval for interval, names in _BY_INTERVAL.items() for name in names.split()}


def numbers_are_in_range(run: RunConfig, world_size: int) -> str | None:
    """Every number lies in its interval of RANGES, and none is infinite or NaN."""
    for name, interval in RANGES.items():
        for value in _values(run, name):
            if not interval.holds(value):
                return f"{flag_name(name)} must be {interval.words}, got {value}"
    return None


def values_are_known(run: RunConfig, world_size: int) -> str | None:
    """Fields with a list of choices hold one of them, wherever the value came from: a preset passes no parser."""
    for name, (_, spec) in flag_fields().items():
        found = flag_of(spec)
        if found is None or found.choices is None:
            continue
        for value in _values(run, name):
            if value not in found.choices:
                return f"{flag_name(name)} must be one of {', '.join(map(str, found.choices))}, got {value}"
    return None


def _values(run: RunConfig, name: str) -> tuple[Any, ...]:
    """The field's value, the elements of a tuple, or nothing when it is not set."""
    value = run.value(name)
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)
