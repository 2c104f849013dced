"""Multi-head latent attention as a part of the model (DeepSeek-V2, arXiv 2405.04434): keys and values, and queries if
asked, are projected up from a few channels per token that all heads share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.config.interval import NOT_NEGATIVE, POSITIVE, SIZE

_LATENT = Need(
    lambda run: run.model.multi_latent_attention,
    "keys and values are projected from the hidden states",
    "add --multi-latent-attention",
)
_YARN_OF_LATENTS = Need(
    lambda run: run.model.multi_latent_attention and run.model.position_embedding_type == "yarn",
    lambda run: (
        f"--position-embedding-type is {run.model.position_embedding_type}"
        if run.model.multi_latent_attention
        else "keys and values are projected from the hidden states"
    ),
    "give --multi-latent-attention --position-embedding-type yarn",
)


@dataclass(frozen=True, kw_only=True)
class LatentAttentionModel:
    """Fields of ModelConfig. A head has qk_head_dim + qk_pos_emb_head_dim channels of queries and keys, of which the
    last are rotated and, of keys, shared by all heads; and v_head_dim channels of values.
    """

    multi_latent_attention: bool = flag(
        False, "latent attention (MLA): keys and values are projected up from --kv-lora-rank channels per token"
    )
    q_lora_rank: int | None = flag(
        None,
        "channels per token from which queries are projected up; default: they are projected from the hidden states",
        within=SIZE,
        needs=_LATENT,
    )
    kv_lora_rank: int | None = flag(
        None, "channels per token from which keys and values are projected up", within=SIZE, needs=_LATENT
    )
    qk_head_dim: int = flag(
        128, "channels of a head's queries and keys that are not rotated", within=SIZE, needs=_LATENT
    )
    qk_pos_emb_head_dim: int = flag(
        64,
        "further channels of a head's queries and keys, which are rotated, neighbours as a pair; all heads share those "
        "of keys",
        within=SIZE,
        needs=_LATENT,
    )
    v_head_dim: int = flag(128, "channels of a head's values", within=SIZE, needs=_LATENT)
    latent_norm_epsilon: float | None = flag(
        None,
        "epsilon of the norms of latents with --qk-layernorm; default that of the other norms",
        within=POSITIVE,
        needs=_LATENT,
    )
    indexer_topk: int | None = flag(
        None,
        "keys that the model's indexer chooses for each query, as in DeepSeek-V3.2 and GLM-5: no sequence is longer, "
        "and so attention to all keys is the model's; the indexer is not trained",
        within=SIZE,
        needs=_LATENT,
    )
    mscale: float = flag(
        1.0,
        "yarn with latent attention: cos and sin are multiplied by m(this) / m(--mscale-all-dim), with m(x) = "
        "0.1 x ln(scaling factor) + 1",
        within=NOT_NEGATIVE,
        needs=_YARN_OF_LATENTS,
    )
    mscale_all_dim: float = flag(
        0.0,
        "yarn with latent attention: products of queries and keys are multiplied by m(this)^2, see --mscale",
        within=NOT_NEGATIVE,
        needs=_YARN_OF_LATENTS,
    )

    @property
    def latent_projections(self) -> tuple[str, ...]:
        """The projections of latent attention, by transformers' names."""
        queries = ("q_proj",) if self.q_lora_rank is None else ("q_a_proj", "q_b_proj")
        return (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")

    @property
    def latent_qk_dim(self) -> int:
        """Channels of a head's queries and keys with latent attention."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


def yarn_temperature(stretch: float, mscale: float) -> float:
    """DeepSeek's factor m of YaRN for contexts `stretch` times as long as the original one."""
    return 0.1 * mscale * math.log(stretch) + 1.0 if stretch > 1 else 1.0
