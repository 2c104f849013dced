"""Where the boundaries between the stages of a pipeline are: inside of a node, between two nodes, or on one rank.

In a mesh whose tensor, context and data parallel ranks fill less than a node, several neighbours along the pipeline
share it. Messages between them pass the node's own link, and only those at the end of such a chain pass the network.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron.base.mesh import Mesh
from megatron.planner.time.hardware import Cluster, Place, stride

NEARBY = Place(2, 2)  # neighbours in a node
_SAME_RANK = Place(1, 1)


def chain_in_node(mesh: Mesh, cluster: Cluster) -> int:
    """Returns how many neighbours along the pipeline share a node; 1 where that is not the same for all of them."""
    step = stride(mesh, "pp")
    if step * mesh.pp <= cluster.node:
        return mesh.pp
    return cluster.node // step if cluster.node % step == 0 else 1


def end_of_chain(chain: int) -> Place:
    """Returns where the last rank of a chain and the next one are."""
    return Place(chain + 1, chain)


def boundary(chain: int, rank: int, other: int) -> Place:
    """Returns where two pipeline ranks are that exchange hidden states."""
    if rank == other:
        return _SAME_RANK
    return NEARBY if rank // chain == other // chain else end_of_chain(chain)


def boundaries(chain: int, rank_of: Sequence[int]) -> list[Place]:
    """Returns the places of the boundaries between neighbouring stages, of which each has a rank."""
    return [boundary(chain, rank, other) for rank, other in itertools.pairwise(rank_of)]
