"""The order of the rows of gated delta nets, and of queries with gates, in Megatron-LM's tensors.

Ours have the rows of a head together, or of a group of queries. In Megatron-LM's in_proj and conv1d the rows of all
heads of a rank follow each other, part by part; torch_dist has a tensor for each part. A group of its linear_qkv has
the queries of all heads, then their gates, then the key and the value.
"""

from __future__ import annotations

from megatron.spec.attention import AttentionSpec
from megatron.spec.delta_net import DeltaCoreSpec, DeltaNetSpec
from megatron.spec.latent_attention import LatentAttentionSpec

IN_PROJ, CONVOLUTION, DECAY = (f"self_attention.{name}" for name in ("in_proj", "conv1d", "decay"))
OUT_NORM = ".self_attention.out_norm.weight"
DECAYS = ("dt_bias", "A_log")  # in the order of the module that holds them itself
AttentionLayerSpec = AttentionSpec | LatentAttentionSpec | DeltaNetSpec
RowRange = tuple[int, int]  # the first row of a head or a group, and their number


def delta_parts(core: DeltaCoreSpec, path: str) -> dict[str, RowRange]:
    """Returns the parts of a tensor in their order there, each with its rows of a key head of ours.

    path: IN_PROJ or CONVOLUTION.
    """
    values = core.shared * core.v_dim
    widths = {"query": core.qk_dim, "key": core.qk_dim, "value": values}
    if path == IN_PROJ:
        widths |= {"z": values, "beta": core.shared, "alpha": core.shared}
    parts, first = dict[str, RowRange](), 0
    for name, width in widths.items():
        parts[name] = first, width
        first += width
    return parts


def gated_rows(spec: AttentionLayerSpec) -> list[RowRange] | None:
    """Returns the rows of a group of ours in their order there; None without gates, where the order is ours."""
    if not isinstance(spec, AttentionSpec) or not spec.gated:
        return None
    core = spec.core
    query, gate, heads = core.qk_dim, core.v_dim, range(core.heads // core.groups)
    pair = query + gate
    queries = [(head * pair, query) for head in heads]
    gates = [(head * pair + query, gate) for head in heads]
    return [*queries, *gates, (len(heads) * pair, query + core.v_dim)]
