"""Flags of activation and weight offload, and the settings that they imply."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.config.interval import COUNT_OR_NONE

AUTO = "auto"
# The last layers of a stage stay on the device. Offloading them saves nothing: the copy of the last layer but two is
# still under way when the last one runs, and backward needs the last two first.
RESIDENT_LAYERS = 2
# The parts of a layer, in the order in which they run.
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2")


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadConfig:
    """The activations that move to host memory until their backward, in one of three ways, and the offloaded
    weights."""

    pipeline_offload_ratio: str | None = flag(
        None,
        "fraction of the activations, 0 to 1, that is offloaded to host memory until its backward; overlapped as the "
        "pipeline's schedule permits, or layer by layer; auto is the largest that costs no time, measured in the "
        "first steps",
        aliases=("--kaimm-offload-activation-ratio",),
        metavar="X|auto",
    )
    cpu_offloading: bool = flag(
        False, "keep all activations of each stage's first --cpu-offloading-num-layers layers in host memory"
    )
    cpu_offloading_weights: bool = flag(
        False,
        "keep the weights of each stage's first --cpu-offloading-num-layers layers in host memory, and copy each "
        "layer's weights to the device for forward, backward and update",
    )
    cpu_offloading_num_layers: int = flag(
        0,
        "number of layers per stage that --cpu-offloading and --cpu-offloading-weights offload",
        within=COUNT_OR_NONE,
        needs=Need(
            lambda run: run.activation_offload.cpu_offloading or run.activation_offload.cpu_offloading_weights,
            "no layer is offloaded",
            "add --cpu-offloading or --cpu-offloading-weights",
        ),
    )
    fine_grained_activation_offloading: bool = flag(
        False, "offload the activations of --offload-modules, in all layers of a stage but the last two"
    )
    offload_modules: tuple[str, ...] | None = flag(
        None,
        "parts of a layer whose activations are offloaded",
        choices=OFFLOAD_MODULES,
        nargs="+",
        metavar="PART",
        needs=Need(
            lambda run: run.activation_offload.fine_grained_activation_offloading,
            "no part of a layer is offloaded",
            "add --fine-grained-activation-offloading",
        ),
    )

    @property
    def kind(self) -> str | None:
        """The way of offloading: "ratio", "layers" or "modules"; None without offload. Rules reject conflicting
        flags."""
        if self.cpu_offloading:
            return "layers"
        if self.fine_grained_activation_offloading:
            return "modules"
        return "ratio" if self.pipeline_offload_ratio is not None and self.ratio != 0.0 else None

    @property
    def offloaded_weight_layers(self) -> int:
        """Number of layers of a stage, from the first on, whose weights are in host memory."""
        return self.cpu_offloading_num_layers if self.cpu_offloading_weights else 0

    @property
    def ratio(self) -> float | None:
        """--pipeline-offload-ratio as a number; None for auto. Raises ValueError for any other text."""
        text = self.pipeline_offload_ratio
        return None if text == AUTO else float(text or 0.0)
