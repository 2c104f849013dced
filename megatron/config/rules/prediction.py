"""Rules about multi-token prediction."""

from __future__ import annotations

from functools import partial

from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.rules.rule import ConfigRule
from megatron.config.rules.sources import shape_is_pending
from megatron.config.run import RunConfig
from megatron.schedule.partition import count_predictions


def predictions_have_no_position_table(model: ModelConfig) -> str | None:
    """They embed tokens behind the last layer, where a pipeline has no table of positions."""
    if model.mtp_num_layers and model.position_embedding_type == "learned_absolute":
        return (
            f"--mtp-num-layers {model.mtp_num_layers} needs positions without a table; give --position-embedding-type "
            "rope"
        )
    return None


def predictions_have_no_embedding_norm(model: ModelConfig) -> str | None:
    """The norm is a part of the first stage, and predictions embed tokens on the last one."""
    if model.mtp_num_layers and model.embed_layernorm:
        return f"--mtp-num-layers {model.mtp_num_layers} cannot be used with --embed-layernorm; remove one of them"
    return None


def adapters_leave_predictions_out(model: ModelConfig) -> str | None:
    """Adapters are made for the layers of the decoder."""
    if model.mtp_num_layers and model.lora_rank is not None:
        return (
            f"--lora-rank {model.lora_rank} trains no layer of --mtp-num-layers {model.mtp_num_layers}; remove one of "
            "them"
        )
    return None


def layout_has_the_predictions(model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """A layout that names them names all."""
    layout = parallel.pipeline_model_parallel_layout
    named = 0 if layout is None else count_predictions(layout)
    if named in (0, model.mtp_num_layers):
        return None
    return (
        f"--pipeline-model-parallel-layout {layout} has {named} m (predictions of a further token), but "
        f"--mtp-num-layers is {model.mtp_num_layers}; change one of them"
    )


def rules(run: RunConfig) -> list[ConfigRule]:
    """Returns the rules about multi-token prediction, once the model's shape is known."""
    if shape_is_pending(run.model, run.checkpoint):
        return []
    return [
        partial(predictions_have_no_position_table, run.model),
        partial(predictions_have_no_embedding_norm, run.model),
        partial(adapters_leave_predictions_out, run.model),
        partial(layout_has_the_predictions, run.model, run.parallel),
    ]
