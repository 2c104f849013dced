"""FP8 products of the linear layers: their format, how the scales are chosen, and the layers that stay in bf16."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import Need, flag, on_by_default
from megatron.config.interval import between

E4M3, HYBRID = FORMATS = ("e4m3", "hybrid")
TENSORWISE, DELAYED, MXFP8, BLOCKWISE = RECIPES = ("tensorwise", "delayed", "mxfp8", "blockwise")
MOST_RECENT, MAX = ALGORITHMS = ("most_recent", "max")
LONGEST_HISTORY = 2**16

_FP8 = Need(lambda run: run.fp8.enabled, "all products are in the dtype of the parameters", "give --fp8-format")
_DELAYED = (
    _FP8,
    Need(
        lambda run: run.fp8.fp8_recipe == DELAYED,
        lambda run: f"--fp8-recipe {run.fp8.fp8_recipe} has the scales of the present values",
        "give --fp8-recipe delayed",
    ),
)
_ENDS = (
    _FP8,
    Need(lambda run: run.fp8.first_last_layers_bf16, "no layer stays in bf16", "give --first-last-layers-bf16"),
)


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Which products of the decoder layers' linear layers are taken in FP8, and with which scales."""

    fp8_format: str | None = flag(
        None,
        "take the products of the decoder's linear layers in FP8: e4m3 everywhere, or hybrid, which has e5m2 for the "
        "gradients of outputs; default off",
        choices=FORMATS,
    )
    fp8_recipe: str = flag(
        DELAYED,
        "scales of the quantized tensors: of each whole tensor (tensorwise), of each whole tensor from its largest "
        "values in earlier steps (delayed), of 32 elements (mxfp8), or of 1x128 elements and 128x128 of weights "
        "(blockwise)",
        choices=RECIPES,
        needs=_FP8,
    )
    fp8_margin: int = flag(
        0,
        "scales of --fp8-recipe delayed are divided by 2 to this power, which leaves room for values that grow",
        within=between(0, 8),
        needs=_DELAYED,
    )
    fp8_amax_history_len: int = flag(
        1,
        "steps whose largest values --fp8-recipe delayed keeps for each tensor",
        within=between(1, LONGEST_HISTORY),
        needs=_DELAYED,
    )
    fp8_amax_compute_algo: str = flag(
        MOST_RECENT,
        "the largest value that a scale of --fp8-recipe delayed is made for: that of the last step, or of the history",
        choices=ALGORITHMS,
        needs=_DELAYED,
    )
    fp8_wgrad: bool = on_by_default(
        when_off="take the products for the gradients of weights in the dtype of the parameters, not in FP8", needs=_FP8
    )
    first_last_layers_bf16: bool = flag(
        False, "keep the first and the last layers of the decoder in the dtype of the parameters", needs=_FP8
    )
    num_layers_at_start_in_bf16: int = flag(
        1, "first layers that --first-last-layers-bf16 keeps", within=between(0, 10_000), needs=_ENDS
    )
    num_layers_at_end_in_bf16: int = flag(
        1, "last layers that --first-last-layers-bf16 keeps", within=between(0, 10_000), needs=_ENDS
    )

    @property
    def enabled(self) -> bool:
        """Whether any product is taken in FP8."""
        return self.fp8_format is not None

    @property
    def multiple(self) -> int:
        """Number that divides the inputs and outputs of each layer of a rank: GPUs read 16 bytes, or a block of 32."""
        return 32 if self.fp8_recipe == MXFP8 else 16

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from a history of the largest values."""
        return self.enabled and self.fp8_recipe == DELAYED

    def layers(self, count: int) -> range:
        """Returns the layers, of a decoder with `count` of them, that have FP8 products."""
        if not self.enabled:
            return range(0)
        if not self.first_last_layers_bf16:
            return range(count)
        return range(self.num_layers_at_start_in_bf16, count - self.num_layers_at_end_in_bf16)


OFF = Fp8Config()
