"""The communication of each layer's attention, and the groups that share sequences, as the flags of context parallelism
imply them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.base.errors import ConfigError
from megatron.base.mesh import Mesh
from megatron.config.parallel import ParallelConfig


@dataclass(frozen=True)
class GroupSizes:
    """The groups that may share a sequence under --dynamic-context-parallel.

    ranks: those of dp x cp. smallest, largest: ranks of a group, powers of two that divide `ranks`. tokens: the most
    that a rank holds of a sequence, a multiple of 2 x `shards`. shards: parts into which sequence parallelism divides a
    rank's tokens.
    """

    ranks: int
    smallest: int
    largest: int
    tokens: int
    shards: int = 1

    @property
    def all(self) -> tuple[int, ...]:
        """The sizes, rising."""
        return tuple(size for k in range(self.largest.bit_length()) if (size := 2**k) >= self.smallest)

    @property
    def longest(self) -> int:
        """Tokens of the longest document that fits."""
        return self.tokens * self.largest

    def multiple(self, size: int) -> int:
        """Returns what the tokens of a sequence of `size` ranks are padded to a multiple of."""
        return self.shards * (2 * size if size > 1 else 1)


def group_sizes(parallel: ParallelConfig, mesh: Mesh) -> GroupSizes | None:
    """Returns the groups of flags that `config/rules/dynamic_context.py` accepts; None where all sequences have cp
    ranks, and without the length."""
    if not parallel.dynamic_context_parallel or parallel.max_seqlen_per_dp_cp_rank is None:
        return None
    ranks = mesh.dp * mesh.cp
    return GroupSizes(
        ranks,
        parallel.min_dynamic_context_parallel_size,
        ranks & -ranks,  # the largest power of two that divides it
        parallel.max_seqlen_per_dp_cp_rank,
        mesh.tp if parallel.sequence_parallel else 1,
    )


def context_sizes(parallel: ParallelConfig, mesh: Mesh) -> tuple[int, ...]:
    """Returns the sizes of the groups that share sequences in place of cp, if there are any."""
    sizes = group_sizes(parallel, mesh)
    return () if sizes is None else sizes.all


def attention_comm_types(parallel: ParallelConfig, num_layers: int) -> tuple[str, ...]:
    """Returns p2p, all_gather, a2a or a2a+p2p for each layer. Raises ConfigError unless there is one value or one per
    layer.
    """
    types = tuple("all_gather" if kind == "allgather" else kind for kind in parallel.cp_comm_type)
    if len(types) not in (1, num_layers):
        raise ConfigError(
            f"--cp-comm-type has {len(types)} values for {num_layers} layers; give one for all of them, or one per "
            "layer"
        )
    return types * num_layers if len(types) == 1 else types


def inner_size(parallel: ParallelConfig) -> int:
    """Returns the number of neighbouring ranks that exchange heads in a2a+p2p; 1 without the hierarchical sizes.

    Raises ConfigError for sizes whose product is not cp.
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
    """Returns how often each key and value head is sent, so that each of `size` ranks gets whole heads with their
    queries.

    Heads are counted per rank, after tensor parallelism. Raises ConfigError if no number works.
    """
    if query_heads % size == 0 and key_heads % size == 0:
        return 1
    if query_heads % size == 0 and size % key_heads == 0:
        return size // key_heads
    raise ConfigError(
        f"--cp-comm-type a2a or a2a+p2p cannot share {query_heads} query heads and {key_heads} key/value heads (of a "
        f"tensor-parallel rank) between {size} ranks: {size} has to divide the query heads, and to divide the "
        "key/value heads or be a multiple of them; use --cp-comm-type p2p or all_gather, or another size"
    )
