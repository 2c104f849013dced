"""Activations and weights that wait in far memory, and what the flags amount to."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.config.interval import COUNT_OR_NONE

AUTO = "auto"
# The last layers of a stage stay on the device. Offloading them saves nothing: the copy of the last layer but two is still
# under way when the last one runs, and backward needs the last two first.
RESIDENT_LAYERS = 2
# Parts of a layer, in the order in which they run.
OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2")


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadConfig:
    """Which of what a forward saves moves to host memory until its backward, in one of three ways; and which weights wait
    there for their forward, backward and update."""

    pipeline_offload_ratio: str | None = flag(
        None,
        "share of the activations, 0 to 1, that waits in host memory for its backward; copied beside compute as the "
        "pipeline's schedule leaves room for, or layer by layer; auto is the largest that costs no time, measured in the "
        "first steps",
        aliases=("--kaimm-offload-activation-ratio",),
        metavar="X|auto",
    )
    cpu_offloading: bool = flag(
        False, "keep all activations of each stage's first --cpu-offloading-num-layers layers in host memory"
    )
    cpu_offloading_weights: bool = flag(
        False,
        "keep the weights of each stage's first --cpu-offloading-num-layers layers in host memory; they visit the device "
        "for their forward, backward and update",
    )
    cpu_offloading_num_layers: int = flag(
        0,
        "how many layers of a stage --cpu-offloading and --cpu-offloading-weights move; the others stay",
        within=COUNT_OR_NONE,
        needs=Need(
            lambda run: run.activation_offload.cpu_offloading or run.activation_offload.cpu_offloading_weights,
            "no layer is offloaded",
            "add --cpu-offloading or --cpu-offloading-weights",
        ),
    )
    fine_grained_activation_offloading: bool = flag(
        False, "keep what --offload-modules save in host memory, in all layers of a stage but the last two"
    )
    offload_modules: tuple[str, ...] | None = flag(
        None,
        "parts of a layer whose activations move",
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
        """ "ratio", "layers" or "modules"; None where nothing moves. Conflicting flags are refused before, by rules."""
        if self.cpu_offloading:
            return "layers"
        if self.fine_grained_activation_offloading:
            return "modules"
        return "ratio" if self.pipeline_offload_ratio is not None and self.ratio != 0.0 else None

    @property
    def far_weight_layers(self) -> int:
        """How many layers of a stage, from the first on, have their weights in host memory."""
        return self.cpu_offloading_num_layers if self.cpu_offloading_weights else 0

    @property
    def ratio(self) -> float | None:
        """--pipeline-offload-ratio as a number; None for auto. Raises ValueError for what is neither."""
        given = self.pipeline_offload_ratio
        return None if given == AUTO else float(given or 0.0)
