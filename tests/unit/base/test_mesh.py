import itertools

import pytest

from megatron.base.errors import ConfigError
from megatron.base.mesh import DENSE, DENSE_AXES, EXPERT, EXPERT_AXES, Mesh

LAYOUTS = [
    (1, {}),
    (4, {"tp": 2}),
    (8, {"tp": 2, "pp": 2}),
    (12, {"tp": 3, "cp": 2}),
    (16, {"tp": 2, "cp": 2, "pp": 2}),
    (16, {"tp": 2, "pp": 2, "ep": 4, "etp": 1}),
    (24, {"tp": 4, "ep": 3, "etp": 2, "pp": 2}),
]


def test_sizes():
    mesh = Mesh.create(24, tp=2, cp=2, pp=3, ep=2)
    assert (mesh.dp, mesh.etp, mesh.edp, mesh.world_size) == (2, 2, 2, 24)
    assert Mesh.create(24, tp=2, cp=2, pp=3, ep=2, etp=1).edp == 4


def test_hand_made_example():
    """8 ranks, tp 2, dp 2, pp 2: neighbours share a layer, the two halves are the stages."""
    mesh = Mesh.create(8, tp=2, pp=2)
    assert mesh.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.groups("tp", "pp") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert mesh.coordinates(6) == {"tp": 0, "cp": 0, "dp": 1, "pp": 1, "etp": 0, "ep": 0, "edp": 1}
    assert (4, 6) in mesh.groups("dp")


def test_optimizer_groups_by_hand():
    """6 replicas of tp 2. Two instances: each is a run of three neighbours; its copies stand at the same place."""
    mesh = Mesh.create(12, tp=2)
    assert mesh.optimizer_groups(1) == {
        "shard": [(0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11)],
        "gather": [(0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11)],
        "replicas": [(rank,) for rank in (0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11)],
    }
    found = mesh.optimizer_groups(2)
    assert found["shard"] == found["gather"] == [(0, 2, 4), (6, 8, 10), (1, 3, 5), (7, 9, 11)]
    assert found["replicas"] == [(0, 6), (2, 8), (4, 10), (1, 7), (3, 9), (5, 11)]
    every = mesh.optimizer_groups(6)
    assert every["replicas"] == [(0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11)], "nothing is sharded"
    assert every["shard"] == [(rank,) for rank in (0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11)]


@pytest.mark.parametrize("instances", [4, 5, 12])
def test_optimizer_instances_that_do_not_divide(instances):
    with pytest.raises(ConfigError, match=f"{instances} optimizer instances do not divide dp 6 x cp 1"):
        Mesh.create(12, tp=2).optimizer_groups(instances)


def test_expert_view_of_the_same_ranks():
    """tp 4 for attention, but experts are whole on a rank: ep 4 takes the ranks that tp took."""
    mesh = Mesh.create(8, tp=4, ep=4, etp=1)
    assert mesh.groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert mesh.groups("edp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.groups("etp") == [(rank,) for rank in range(8)]


def test_who_has_copies_of_a_parameter():
    """A dense parameter and one of experts, at tp 2 x dp 4: the second has as many copies as etp x ep leaves ranks."""
    mesh = Mesh.create(8, tp=2, etp=1, ep=2)
    assert mesh.views == (DENSE, EXPERT) and [mesh.copies(view) for view in mesh.views] == [4, 4]
    assert [mesh.view(axis) for axis in (None, "tp", "etp", "ep")] == [DENSE, DENSE, EXPERT, EXPERT]
    assert mesh.optimizer_groups(2, EXPERT) == {
        "shard": [(0, 2), (4, 6), (1, 3), (5, 7)],
        "gather": [(0, 2), (4, 6), (1, 3), (5, 7)],
        "replicas": [(0, 4), (2, 6), (1, 5), (3, 7)],
    }
    with pytest.raises(ConfigError, match="3 optimizer instances do not divide edp 4"):
        mesh.optimizer_groups(3, EXPERT)
    assert Mesh.create(8, tp=2, etp=4).copies(EXPERT) == 2
    alike = Mesh.create(8, tp=2)
    assert alike.views == (DENSE,) and alike.view("etp") == DENSE, "the same ranks: nothing to tell apart"


@pytest.mark.parametrize(("world", "sizes"), LAYOUTS)
def test_groups_partition_the_world_and_agree_with_coordinates(world, sizes):
    mesh = Mesh.create(world, **sizes)
    for view in (DENSE_AXES, EXPERT_AXES):
        for count in range(1, 5):
            for axes in itertools.combinations(view, count):
                groups = mesh.groups(*axes)
                assert sorted(itertools.chain(*groups)) == list(range(world))
                assert len({len(ranks) for ranks in groups}) == 1
                for ranks in groups:
                    fixed = {tuple(mesh.coordinates(r)[a] for a in view if a not in axes) for r in ranks}
                    order = [tuple(mesh.coordinates(r)[a] for a in reversed(view) if a in axes) for r in ranks]
                    assert len(fixed) == 1 and order == sorted(order)


@pytest.mark.parametrize(("world", "sizes"), LAYOUTS)
def test_optimizer_groups_cut_the_replicas(world, sizes):
    """Every rank meets every other one of dp x cp exactly once: first inside its instance, then between instances."""
    mesh = Mesh.create(world, **sizes)
    count = mesh.dp * mesh.cp
    for instances in (n for n in range(1, count + 1) if count % n == 0):
        found = mesh.optimizer_groups(instances)
        for name, size in (("shard", count // instances), ("gather", count // instances), ("replicas", instances)):
            assert sorted(itertools.chain(*found[name])) == list(range(world))
            assert {len(ranks) for ranks in found[name]} == {size}
        for rank in range(world):
            (shard,) = (ranks for ranks in found["shard"] if rank in ranks)
            across = {r for ranks in found["replicas"] if set(ranks) & set(shard) for r in ranks}
            assert across == next(set(ranks) for ranks in mesh.groups("dp", "cp") if rank in ranks)
            (copies,) = (ranks for ranks in found["replicas"] if rank in ranks)
            places = {next(s.index(r) for s in found["shard"] if r in s) for r in copies}
            assert places == {shard.index(rank)}, "copies hold the same slice"


@pytest.mark.parametrize(("world", "sizes"), LAYOUTS)
def test_coordinates_are_unique(world, sizes):
    mesh = Mesh.create(world, **sizes)
    for view in (DENSE_AXES, EXPERT_AXES):
        assert len({tuple(mesh.coordinates(r)[a] for a in view) for r in range(world)}) == world


def test_axes_are_taken_in_the_mesh_order():
    mesh = Mesh.create(16, tp=2, cp=2, pp=2)
    assert mesh.groups("cp", "dp") == mesh.groups("dp", "cp")


@pytest.mark.parametrize(
    ("world", "sizes", "words"),
    [
        (6, {"tp": 4}, ["6", "tp 4", "multiple of 4"]),
        (8, {"tp": 2, "ep": 3}, ["8", "ep 3", "multiple of 6"]),
        (4, {"tp": 0}, ["tp size", "0"]),
        (4, {"etp": -1}, ["etp size", "-1"]),
        (0, {}, ["world size of 0"]),
    ],
)
def test_a_world_that_cannot_be_cut(world, sizes, words):
    with pytest.raises(ConfigError) as error:
        Mesh.create(world, **sizes)
    assert all(word in str(error.value) for word in words)


def test_wrong_questions():
    mesh = Mesh.create(4, tp=2)
    with pytest.raises(ConfigError, match="rank 4 is outside the world of 4"):
        mesh.coordinates(4)
    with pytest.raises(ConfigError, match="mix the dense view"):
        mesh.groups("tp", "ep")
