"""Rules about where a run takes its shape from: flags, a checkpoint, a Hugging Face model, an adapter."""

from __future__ import annotations

import dataclasses
from functools import partial

from megatron.base.errors import ConfigError
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.model import OVERRIDABLE_FIELDS, PADDING_FIELDS, RUNTIME_FIELDS, ModelConfig
from megatron.config.rules.rule import ConfigRule
from megatron.config.run import RunConfig, flag_name
from megatron.config.train import TrainConfig


def shape_is_pending(model: ModelConfig, checkpoint: CheckpointConfig) -> bool:
    """Returns whether rules about the shape must wait: the checkpoint of --use-checkpoint-args has not been read
    yet."""
    return checkpoint.use_checkpoint_args and model.num_layers is None


def one_source_of_shape(checkpoint: CheckpointConfig, typed: frozenset[str]) -> str | None:
    """The shape comes from the checkpoint or from a Hugging Face model; flags in addition to the latter would be
    ignored.

    With --use-checkpoint-args Megatron-LM ignores such flags, too: rules/needs.py makes notes of them.
    """
    if checkpoint.use_checkpoint_args and checkpoint.load_hf is not None:
        return "--use-checkpoint-args and --load-hf both give the model's shape; remove one of them"
    own = {*RUNTIME_FIELDS, *PADDING_FIELDS, "mtp_num_layers"}  # a run may leave predictions out
    shape = {f.name for f in dataclasses.fields(ModelConfig)} - own
    if checkpoint.load_hf is None:
        return None
    unused = [name for name in sorted(shape) if name in typed and not checkpoint.takes(name)]
    if unused:
        fix = "remove one of the two"
        if set(unused) <= set(OVERRIDABLE_FIELDS):
            fields = sorted({*unused, *checkpoint.override_model_fields})
            fix += f", or train a model that differs in it: --override-model-fields {' '.join(fields)}"
        flags = ", ".join(map(flag_name, unused))
        return f"{flags} has no effect: --load-hf takes the model's shape from its config.json; {fix}"
    return None


def one_source_of_adapters(checkpoint: CheckpointConfig, typed: frozenset[str]) -> str | None:
    """Rank, alpha and projections come from the adapter's folder or from flags; dropout is each run's own."""
    shape = ("lora_rank", "lora_alpha", "lora_target_modules")
    if checkpoint.load_adapter and (named := [flag_name(name) for name in shape if name in typed]):
        return (
            f"{', '.join(named)} has no effect: --load-adapter takes the adapters' shape from its adapter_config.json; "
            "remove one of the two"
        )
    return None


def adapters_have_a_place(checkpoint: CheckpointConfig, model: ModelConfig) -> str | None:
    """LoRA adapts projections that the model has, of a model with trained weights."""
    try:
        projections = model.lora_projections
    except ConfigError as error:
        return str(error)
    if projections and not (checkpoint.load or checkpoint.pretrained_checkpoint or checkpoint.load_hf):
        flag = (
            f"--load-adapter {checkpoint.load_adapter}" if checkpoint.load_adapter else f"--lora-rank {model.lora_rank}"
        )
        return (
            f"{flag} adapts a model that is trained already; give it with --load-hf, --pretrained-checkpoint or --load"
        )
    return None


def batch_shape_is_given(data: DataConfig, train: TrainConfig) -> str | None:
    """There is no default size of a sample or of a microbatch."""
    required = {"--seq-length": data.seq_length, "--micro-batch-size": train.micro_batch_size}
    missing = [name for name, value in required.items() if value is None]
    return f"{' and '.join(missing)} must be given" if missing else None


def rules(run: RunConfig) -> list[ConfigRule]:
    """Returns the rules about sources: that about projections only once the model's shape is known."""
    flag_rules = [
        partial(one_source_of_shape, run.checkpoint, run.given),
        partial(one_source_of_adapters, run.checkpoint, run.given),
        partial(batch_shape_is_given, run.data, run.train),
    ]
    if shape_is_pending(run.model, run.checkpoint):
        return flag_rules
    return [*flag_rules, partial(adapters_have_a_place, run.checkpoint, run.model)]
