"""Flags of activation recompute, and the settings that they imply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.config.interval import LAYERS, POSITIVE, SIZE

FULL, SELECTIVE = "full", "selective"
BALANCED = "balanced"
UNIFORM, BLOCK = "uniform", "block"
CORE_ATTN, NORM, MLP_ACT, WHOLE_MLP = "core_attn", "norm", "mlp_act", "mlp"
MLA_UP_PROJ = "mla_up_proj"  # of latent attention
# Of layers with experts, which have no other MLP.
SHARED_EXPERTS, MOE_ACT, WHOLE_MOE = "shared_experts", "moe_act", "moe"
DENSE_MODULES, MOE_MODULES = (MLP_ACT, WHOLE_MLP), (SHARED_EXPERTS, MOE_ACT, WHOLE_MOE)
# The parts of a layer, in the order in which they run.
RECOMPUTE_MODULES = (CORE_ATTN, MLA_UP_PROJ, NORM, *DENSE_MODULES, *MOE_MODULES)
_OTHER_NAMES = {"layernorm": NORM}  # Megatron-LM's


_BALANCED = Need(
    lambda run: run.recompute.recompute_policy == BALANCED,
    "nothing is chosen by measuring",
    "add --recompute-policy balanced",
)
_WHOLE_LAYERS = Need(
    lambda run: run.recompute.is_full, "whole layers are not recomputed", "give --recompute-granularity full"
)


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Recompute of whole layers (full), or of parts of all layers."""

    recompute_granularity: str | None = flag(
        None,
        "recompute in backward: whole layers (full), or the --recompute-modules of every layer (selective)",
        choices=(FULL, SELECTIVE),
    )
    recompute_method: str | None = flag(
        None,
        "which layers of a stage, with full: all, in groups of --recompute-num-layers that keep one input each "
        "(uniform), or the first --recompute-num-layers, one by one (block)",
        choices=(UNIFORM, BLOCK),
        needs=_WHOLE_LAYERS,
    )
    recompute_num_layers: int | None = flag(
        None,
        "layers of a group (uniform), or of a stage (block); a stage that has fewer recomputes all of its layers",
        within=LAYERS,
        needs=_WHOLE_LAYERS,
    )
    recompute_modules: tuple[str, ...] | None = flag(
        None,
        "parts of a layer, with selective: attention between its projections (core_attn), the projections from latents "
        "to queries, keys and values (mla_up_proj), the norms before attention and MLP (norm), the MLP's activation "
        "(mlp_act), the whole MLP (mlp); of layers with experts the experts' activation (moe_act), the shared experts "
        "(shared_experts), router and all experts (moe); norm, mlp_act and moe_act recompute no GEMM; default core_attn",
        choices=(*RECOMPUTE_MODULES, *_OTHER_NAMES),
        nargs="+",
        metavar="MODULE",
        needs=Need(
            lambda run: run.recompute.recompute_granularity == SELECTIVE or run.recompute.recompute_activations,
            lambda run: "layers are recomputed whole" if run.recompute.is_full else "nothing is recomputed by parts",
            "give --recompute-granularity selective",
        ),
    )
    recompute_activations: bool = flag(False, "the same as --recompute-granularity selective")
    recompute_policy: str | None = flag(
        None,
        "balanced: measure at start the cost and the saving of recomputing each part of a layer, and choose per layer "
        "what to keep, recompute or offload: the fastest plan within --activation-memory-budget",
        choices=(BALANCED,),
    )
    mlp_chunk_size: int | None = flag(
        None,
        "tokens of a microbatch for which a recomputed MLP, or the experts of a layer with their exchange, are "
        "computed at a time, forward and backward, so that inner tensors exist for one chunk only; default all",
        metavar="TOKENS",
        within=SIZE,
        needs=Need(
            lambda run: run.recompute.is_full or bool(run.recompute.modules & {WHOLE_MLP, WHOLE_MOE}),
            "the MLP is not recomputed",
            "give --recompute-granularity full, or selective with --recompute-modules mlp, or moe for experts",
        ),
    )
    activation_memory_budget: float | None = flag(
        None,
        "limit of the activations on a rank: bytes, or up to 1 the fraction of those without recompute",
        metavar="BYTES|SHARE",
        within=POSITIVE,
        needs=_BALANCED,
    )
    activation_memory_plot: str | None = flag(
        None, "draw memory against time of --recompute-policy balanced here, as a PNG", metavar="FILE", needs=_BALANCED
    )
    kaimm_recompute_norm: bool = flag(False, "adds norm to --recompute-modules")
    kaimm_recompute_mlp_activation_func: bool = flag(False, "adds mlp_act to --recompute-modules")

    @property
    def is_full(self) -> bool:
        """Whether whole layers are recomputed."""
        return self.recompute_granularity == FULL

    @property
    def modules(self) -> frozenset[str]:
        """The parts of every layer that are recomputed, a subset of RECOMPUTE_MODULES."""
        modules = set[str]()
        if self.recompute_granularity == SELECTIVE or self.recompute_activations:
            modules |= {_OTHER_NAMES.get(name, name) for name in self.recompute_modules or (CORE_ATTN,)}
        if self.kaimm_recompute_norm:
            modules.add(NORM)
        if self.kaimm_recompute_mlp_activation_func:
            modules.add(MLP_ACT)
        return frozenset(modules)

    def parts_of(self, layer: int) -> frozenset[str]:
        """Returns `modules`, which is the same for every layer."""
        return self.modules

    def groups(self, layers: Sequence[int]) -> list[tuple[Sequence[int], bool]]:
        """Returns the layers of a stage in order, divided into (layers, whether they are recomputed as one)."""
        if not self.is_full:
            return [(layers, False)]
        assert self.recompute_num_layers
        if self.recompute_method == BLOCK:
            recomputed, saved = layers[: self.recompute_num_layers], layers[self.recompute_num_layers :]
            return [((number,), True) for number in recomputed] + [(saved, False)] * bool(saved)
        size = self.recompute_num_layers
        return [(layers[start : start + size], True) for start in range(0, len(layers), size)]

    def __str__(self) -> str:
        """Returns the text for the start-up table."""
        chunks = f", MLP in chunks of {self.mlp_chunk_size} tokens" if self.mlp_chunk_size else ""
        if self.recompute_policy == BALANCED:
            return f"balanced, budget {self.activation_memory_budget:g}"
        if self.is_full:
            number = self.recompute_num_layers
            position = f"in groups of {number}" if self.recompute_method == UNIFORM else f"first {number} of a stage"
            return f"layers, {position}{chunks}"
        return " ".join(name for name in RECOMPUTE_MODULES if name in self.modules) + chunks or "off"


@dataclass(frozen=True)
class LayerChoices:
    """The recompute of each layer, by number, if layers differ; it is used like a RecomputeConfig.

    Layers that are not listed keep everything. `offloaded` are the layers whose saved activations are all offloaded.
    """

    of_layer: Mapping[int, RecomputeConfig]
    offloaded: frozenset[int] = frozenset()
    mlp_chunk_size: None = None

    def parts_of(self, layer: int) -> frozenset[str]:
        """Returns the parts of one layer that are recomputed, a subset of RECOMPUTE_MODULES."""
        return self.of_layer.get(layer, KEEP_ALL).modules

    def groups(self, layers: Sequence[int]) -> list[tuple[Sequence[int], bool]]:
        """Returns each layer as a group, see RecomputeConfig."""
        return [((number,), self.of_layer.get(number, KEEP_ALL).is_full) for number in layers]


KEEP_ALL = RecomputeConfig()
