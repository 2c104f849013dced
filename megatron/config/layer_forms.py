"""Forms of a layer's formulas, which a few families have: attention and MLP in parallel, the parameters of norms and
the place of those of queries and keys, clipped queries, keys and values, the softmax of attention, and the gate or the
trained activation of an MLP."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.config.interval import POSITIVE, SCORE
from megatron.config.positions import ROTARY

VANILLA, OFF_BY_ONE, LEARNABLE = "vanilla", "off-by-one", "learnable"  # values of --softmax-type
ALL, WEIGHT, NONE = "all", "weight", "none"  # values of --norm-parameters
_PARALLEL = Need(
    lambda run: run.model.parallel_residual,
    "the MLP reads the output of attention",
    "give --parallel-residual",
)
_ROTATED_NORMS = Need(
    lambda run: run.model.qk_layernorm and run.model.position_embedding_type in ROTARY,
    lambda run: "queries and keys are not rotated" if run.model.qk_layernorm else "queries and keys are not normalized",
    "give --qk-layernorm and --position-embedding-type rope",
)
_GATED = Need(
    lambda run: run.model.gated,
    "the MLP has no gate",
    "give --quick-geglu, --swiglu or --geglu",
)


@dataclass(frozen=True, kw_only=True)
class LayerForms:
    """Fields of ModelConfig."""

    parallel_residual: bool = flag(
        False,
        "attention and MLP read the same residual stream, each through its norm, and both are added to it (GPT-NeoX): "
        "x + attention(norm(x)) + mlp(norm(x))",
    )
    shared_norm: bool = flag(
        False, "one norm before attention and MLP of a parallel layer, in place of a norm for each", needs=_PARALLEL
    )
    norm_parameters: str = flag(
        ALL,
        "trained parameters of norms: all that --normalization has, which is a weight and for LayerNorm a bias; the "
        "weight only (Command R); or none (OLMo 1)",
        choices=(ALL, WEIGHT, NONE),
    )
    qk_layernorm_weight_per_head: bool = flag(
        False,
        "the norms of queries and keys have a weight for every channel of every head, and not one for every channel "
        "that all heads share (Command R+); each head is still normalized by itself",
        needs=Need(lambda run: run.model.qk_layernorm, "queries and keys are not normalized", "add --qk-layernorm"),
    )
    clip_qkv: float | None = flag(
        None,
        "limit of the absolute values of queries, keys and values, behind the norms of queries and keys if there are "
        "any, and before rotation",
        within=POSITIVE,
    )
    softmax_type: str = flag(
        VANILLA,
        "sum that attention's softmax divides by: over the keys (vanilla), with 1 added (off-by-one), or with the "
        "exponential of a trained number per query head added (learnable: attention sinks, as in gpt-oss)",
        choices=(VANILLA, OFF_BY_ONE, LEARNABLE),
    )
    quick_geglu: bool = flag(False, "gated MLP with GELU's approximation by a sigmoid: gate x sigmoid(1.702 gate) x up")
    glu_linear_offset: float = flag(
        0.0, "number that is added to the part of a gated MLP without activation", within=SCORE, needs=_GATED
    )
    activation_func_clamp_value: float | None = flag(
        None,
        "limit of a gated MLP before its activation: the gate is at most this, and the other part between this and its "
        "negative",
        within=POSITIVE,
        needs=_GATED,
    )
    embed_layernorm: bool = flag(False, "a norm of the token embeddings before the first layer (BLOOM)")
    xielu: bool = flag(
        False,
        "MLP with xIELU, whose two trained numbers bend it above and below zero (Apertus): ap x^2 + x/2 where x is "
        "positive, and an (exp(x) - 1 - x) + x/2 elsewhere",
    )
    qk_layernorm_after_rope: bool = flag(
        False, "normalize queries and keys after their rotation, not before it (Hunyuan)", needs=_ROTATED_NORMS
    )
