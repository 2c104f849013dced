"""Low-rank adapters of the linear layers (LoRA, Hu et al., arXiv 2106.09685) as a part of the model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.config.interval import BELOW_ONE, POSITIVE, SIZE
from megatron.config.layers import LORA_TARGETS

_ADAPTERS = Need(lambda run: run.model.lora_rank is not None, "there are no adapters", "give --lora-rank")


@dataclass(frozen=True, kw_only=True)
class LoraModel:
    """Fields of ModelConfig."""

    lora_rank: int | None = flag(
        None, "train low-rank adapters (LoRA) of this rank for the linear layers, and nothing else", within=SIZE
    )
    lora_alpha: float = flag(16.0, "adapters' outputs are multiplied by this / rank", within=POSITIVE, needs=_ADAPTERS)
    lora_dropout: float = flag(0.0, "dropout on adapters' inputs", within=BELOW_ONE, needs=_ADAPTERS)
    lora_target_modules: tuple[str, ...] = flag(
        ("all-linear",),
        "projections that get an adapter",
        choices=LORA_TARGETS,
        nargs="+",
        metavar="NAME",
        needs=_ADAPTERS,
    )
