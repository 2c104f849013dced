"""Which ranks keep replicas of each other's files."""

import pytest

from megatron.core.dist_checkpointing.replication import replication_groups


@pytest.mark.parametrize(
    ("world", "jump", "factor", "groups"),
    [
        (8, 4, 2, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (8, 2, 2, [(0, 2), (4, 6), (1, 3), (5, 7)]),
        (4, 1, 4, [(0, 1, 2, 3)]),
        (6, 2, 2, [(0, 2, 4), (1, 3, 5)]),
        (5, 2, 2, [(0, 2, 4), (1, 3)]),
        (4, 4, 2, [(0,), (1,), (2,), (3,)]),
        (3, 2, 2, [(0, 2), (1,)]),
        (4, 2, 1, [(0,), (2,), (1,), (3,)]),
        (2, 8, 2, [(0,), (1,)]),
    ],
)
def test_groups(world, jump, factor, groups):
    assert replication_groups(world, jump, factor) == groups


def test_every_rank_is_in_one_group_with_ranks_of_other_hosts():
    for hosts in range(2, 12):
        for factor in range(2, hosts + 1):
            groups = replication_groups(4 * hosts, 4, factor)
            assert sorted(rank for group in groups for rank in group) == list(range(4 * hosts))
            for group in groups:
                assert factor <= len(group) < 2 * factor and len({rank // 4 for rank in group}) == len(group)
