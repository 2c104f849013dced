"""Which boundaries of a pipeline are inside of a node, compared with the ranks of the mesh one by one."""

import dataclasses
import itertools

import pytest

from megatron.base.mesh import Mesh
from megatron.planner.time.boundaries import NEARBY, boundaries, chain_in_node, end_of_chain
from megatron.planner.time.constants import Constants
from megatron.planner.time.hardware import Place, built_in
from megatron.planner.time.software import Software
from megatron.planner.time.step_time import StepModel
from megatron.tooling.profile.messages import pipeline_places
from tests.unit.planner.test_step_time import run_of

H100 = built_in("h100")
MESHES = [
    (24, 8, {"tp": tp, "pp": pp}) for tp, pp in ((1, 24), (2, 4), (2, 12), (3, 4), (4, 6), (8, 3), (1, 8), (1, 2))
]
MESHES += [(16, 4, {"cp": 2, "pp": 4}), (8, 2, {"pp": 8}), (8, 1, {"pp": 4}), (12, 6, {"tp": 4, "pp": 3})]


def alike(world, node, sizes):
    """(mesh, place of each boundary, whether both of its ranks share a node in all of the pipelines)."""
    mesh = Mesh.create(world, **sizes)
    chain = chain_in_node(mesh, dataclasses.replace(H100, node=node))
    rank_of = [*range(mesh.pp), *reversed(range(mesh.pp))]
    near = [
        all(group[a] // node == group[b] // node for group in mesh.groups("pp")) for a, b in itertools.pairwise(rank_of)
    ]
    return mesh, chain, boundaries(chain, rank_of), near


@pytest.mark.parametrize(("world", "node", "sizes"), MESHES)
def test_a_boundary_is_in_a_node_if_all_its_ranks_are(world, node, sizes):
    mesh, chain, places, near = alike(world, node, sizes)
    turn = mesh.pp - 1  # where a rank hands over to itself
    assert places[turn] == Place(1, 1)
    found = [place == NEARBY for place in places]
    if node % (world // mesh.pp) == 0 or chain == mesh.pp:
        assert found[:turn] + found[turn + 1 :] == near[:turn] + near[turn + 1 :]
    else:  # pipelines differ, and the slowest one counts
        assert not any(found)
    assert {place for place in places if place.nodes > 1} <= {end_of_chain(chain)}


@pytest.mark.parametrize(("world", "node", "sizes"), MESHES)
def test_a_profile_measures_where_pipelines_send(world, node, sizes):
    _, _, places, _ = alike(world, node, sizes)
    measured = {place for _, place in pipeline_places(world, node)}
    assert {place for place in places if place.size > 1} <= measured


def test_only_messages_between_nodes_wait_for_a_slow_network():
    """Four stages in a row, of which none, every second or every boundary is between nodes."""

    def seconds(node):
        cluster = dataclasses.replace(H100, node=node, network=H100.network / 100)
        model = StepModel(*run_of(4, {"pipeline_model_parallel_size": 4}), cluster, Software())
        return model.time(model.clock(Constants())).parts.get("pp", 0.0)

    inside, two, four = seconds(4), seconds(2), seconds(1)
    assert inside < two < four
