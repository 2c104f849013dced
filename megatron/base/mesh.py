"""Pure rank arithmetic: axis sizes -> coordinates and rank lists, without torch and without processes.

The dense axes are, from fastest to slowest, tp, cp, dp, pp. The expert view of the same ranks is etp, ep, edp, pp.
Neighbours along tp have neighbouring ranks, so tensor parallelism stays inside a host.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

from megatron.base.errors import ConfigError

DENSE, EXPERT = "dense", "expert"
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
# The ranks that hold copies of a parameter, and sum its gradients, vary along these axes.
COPY_AXES = {DENSE: ("cp", "dp"), EXPERT: ("edp",)}


@dataclass(frozen=True)
class Mesh:
    """The axis sizes of a job. `dp` and `edp` are the world size divided by the product of the other axes of their
    view.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int

    @classmethod
    def create(
        cls, world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None
    ) -> Mesh:
        """Returns the mesh of `world_size` ranks; `etp` defaults to `tp`, as in Megatron-LM.

        Raises ConfigError with the sizes if they do not divide the world size.
        """
        etp = tp if etp is None else etp
        if world_size < 1:
            raise ConfigError(f"a job has at least 1 process, got a world size of {world_size}")
        for name, size in (("tp", tp), ("cp", cp), ("pp", pp), ("ep", ep), ("etp", etp)):
            if size < 1:
                raise ConfigError(f"{name} size must be at least 1, got {size}")
        dense, expert = tp * cp * pp, etp * ep * pp
        if world_size % dense:
            raise ConfigError(
                f"world size {world_size} is not divisible by tp {tp} x cp {cp} x pp {pp} = {dense}; "
                f"start a multiple of {dense} processes or lower a size"
            )
        if world_size % expert:
            raise ConfigError(
                f"world size {world_size} is not divisible by etp {etp} x ep {ep} x pp {pp} = {expert}; "
                f"start a multiple of {expert} processes or lower a size"
            )
        return cls(tp, cp, world_size // dense, pp, etp, ep, world_size // expert)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along every axis of both views."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the position of `rank` on every axis of both views."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside the world of {self.world_size} ranks")
        position: dict[str, int] = {}
        for axes in (EXPERT_AXES, DENSE_AXES):
            quotient = rank
            for axis in axes:
                quotient, position[axis] = divmod(quotient, self.size(axis))
        return position

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Returns all rank lists that vary along `axes` (of one view) and are fixed on the other axes of that view.

        Each list is ordered with the fastest axis of the view first, so `groups("cp", "dp")` and `groups("dp", "cp")`
        agree.
        """
        view = EXPERT_AXES if set(axes) & {"etp", "ep", "edp"} else DENSE_AXES
        if not set(axes) <= set(view):
            raise ConfigError(f"axes {axes} mix the dense view {DENSE_AXES} and the expert view {EXPERT_AXES}")
        strides = {a: math.prod(self.size(b) for b in view[: view.index(a)]) for a in view}
        offsets = self._offsets([a for a in view if a in axes], strides)
        bases = self._offsets([a for a in view if a not in axes], strides)
        return [tuple(base + offset for offset in offsets) for base in bases]

    @property
    def views(self) -> tuple[str, ...]:
        """The views that share parameters differently: only the dense one where etp is tp and ep is 1."""
        return (DENSE,) if self.etp == self.tp and self.ep == 1 else (DENSE, EXPERT)

    def view(self, axis: str | None) -> str:
        """Returns the view of `views` whose ranks share a parameter that is sharded along `axis`.

        A parameter without an axis is on every rank, and dense.
        """
        return EXPERT if axis in ("etp", "ep") and EXPERT in self.views else DENSE

    def copies(self, view: str) -> int:
        """Returns how many ranks hold copies of a parameter of this view."""
        return math.prod(self.size(axis) for axis in COPY_AXES[view])

    def optimizer_groups(self, instances: int | None, view: str = DENSE) -> dict[str, list[tuple[int, ...]]]:
        """Returns the rank lists of "shard", "gather" and "replicas" for `instances` of the sharded optimizer.

        An instance is a run of neighbours among the ranks that hold copies, dp x cp or edp; None makes every rank one.
        Raises ConfigError if `instances` does not divide their number.
        """
        whole = self.groups(*COPY_AXES[view])
        instances = len(whole[0]) if instances is None else instances
        if len(whole[0]) % instances:
            sizes = f"dp {self.dp} x cp {self.cp}" if view == DENSE else f"edp {self.edp}"
            raise ConfigError(
                f"{instances} optimizer instances do not divide {sizes}; "
                "give --num-distributed-optimizer-instances a divisor of it"
            )
        size = len(whole[0]) // instances
        shards = [ranks[i : i + size] for ranks in whole for i in range(0, len(ranks), size)]
        replicas = [ranks[i::size] for ranks in whole for i in range(size)]
        return {"shard": shards, "gather": shards, "replicas": replicas}

    def tensor_groups(self, inner: int) -> list[tuple[int, ...]]:
        """Returns the rank lists of "tp_inner": runs of `inner` neighbours of tp, which `inner` divides."""
        assert self.tp % inner == 0
        return [line[i : i + inner] for line in self.groups("tp") for i in range(0, self.tp, inner)]

    def context_groups(self, inner: int) -> dict[str, list[tuple[int, ...]]]:
        """Returns the rank lists of "cp_inner", runs of `inner` neighbours of cp, and "cp_outer", ranks of equal
        position in them.

        Raises ConfigError if `inner` does not divide cp.
        """
        if self.cp % inner:
            raise ConfigError(f"{inner} neighbours do not divide cp {self.cp}; give a divisor of it")
        lines = self.groups("cp")
        runs = [line[i : i + inner] for line in lines for i in range(0, self.cp, inner)]
        return {"cp_inner": runs, "cp_outer": [line[i::inner] for line in lines for i in range(inner)]}

    def sized_groups(self, size: int) -> list[tuple[int, ...]]:
        """Returns the runs of `size` neighbours among the ranks of dp x cp, which `size` divides."""
        assert self.dp * self.cp % size == 0
        return [line[i : i + size] for line in self.groups("cp", "dp") for i in range(0, len(line), size)]

    def pipeline_groups(self) -> dict[str, list[tuple[int, ...]]]:
        """Returns the rank lists of "up" and "down" (those of pp) and of "ends": first and last stage, other stages
        alone.
        """
        lines = self.groups("pp")
        ends = [(line[0], line[-1]) if len(line) > 1 else line for line in lines]
        between = [(rank,) for line in lines for rank in line[1:-1]]
        return {"up": lines, "down": lines, "ends": ends + between}

    def size(self, axis: str) -> int:
        """Returns the number of ranks along an axis."""
        return int(getattr(self, axis))

    def _offsets(self, axes: list[str], strides: dict[str, int]) -> list[int]:
        steps = [[i * strides[a] for i in range(self.size(a))] for a in reversed(axes)]
        return [sum(step) for step in itertools.product(*steps)]
