"""What the flags of context parallelism together mean: how each layer's attention communicates."""

from __future__ import annotations

import math

from megatron.base.errors import ConfigError
from megatron.config.parallel import ParallelConfig


def attention_comm_types(parallel: ParallelConfig, num_layers: int) -> tuple[str, ...]:
    """p2p, all_gather, a2a or a2a+p2p for each layer. Raises ConfigError when there are neither one nor one a layer."""
    types = tuple("all_gather" if kind == "allgather" else kind for kind in parallel.cp_comm_type)
    if len(types) not in (1, num_layers):
        raise ConfigError(
            f"--cp-comm-type has {len(types)} values for {num_layers} layers; give one for all of them, or one a layer"
        )
    return types * num_layers if len(types) == 1 else types


def inner_size(parallel: ParallelConfig) -> int:
    """Neighbouring ranks of a2a+p2p that exchange heads; 1 without --hierarchical-context-parallel-sizes.

    Raises ConfigError for sizes that do not make up cp.
    """
    sizes, cp = parallel.hierarchical_context_parallel_sizes, parallel.context_parallel_size
    if sizes is None:
        return 1
    if len(sizes) != 2 or math.prod(sizes) != cp:
        raise ConfigError(
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} must be two sizes, neighbours that "
            f"exchange heads and rings between them, whose product is --context-parallel-size {cp}"
        )
    return sizes[0]


def copies_of_keys(query_heads: int, key_heads: int, size: int) -> int:
    """How often each key and value head is sent, so that each of `size` ranks gets whole heads with their queries.

    Heads as a rank holds them, after tensor parallelism. Raises ConfigError when no number does it.
    """
    if query_heads % size == 0 and key_heads % size == 0:
        return 1
    if query_heads % size == 0 and size % key_heads == 0:
        return size // key_heads
    raise ConfigError(
        f"--cp-comm-type a2a or a2a+p2p cannot share {query_heads} query heads and {key_heads} key/value heads (of a "
        f"tensor-parallel rank) between {size} ranks: {size} has to divide the query heads, and to divide the key/value "
        "heads or be a multiple of them; use --cp-comm-type p2p or all_gather, or another size"
    )
