"""The groups of a mesh as one of its ranks sees them, in a single process: for tests of who holds what."""

from unittest import mock

from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.core import groups as module
from megatron.core.groups import Groups, create_groups


def silent_groups(world: int, rank: int, *, instances: int | None = None, **sizes: int) -> Groups:
    """Groups that know their ranks and have no connections: a collective of several ranks fails."""
    with mock.patch.object(module, "_new_group", return_value=None):
        return create_groups(
            Mesh.create(world, **sizes), rank, Heartbeat(rank), timeout_seconds=1.0, optimizer_instances=instances
        )
