"""The bytes that each host of a cluster sends in a step, counted from what the planner knows about a run's messages.

On the CPU collectives are direct messages between pairs of ranks (core/comm/pairwise.py): a rank sends each other one
the slice that this one needs, so the bytes on the wire are those for ranks of other hosts. The counters of an interface
add 66 bytes of headers to each packet of up to 64 KB, and the acknowledgements of what it receives: 0.1 to 0.3 %.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.config.data_parallel import EVERY
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.memory.model_states import rank_buckets
from megatron.planner.time.model_work import ModelWork, model_work
from megatron.planner.time.operations import LayerMessage, LayerOperation, LayerWork
from megatron.planner.time.software import Software
from megatron.spec.collectives import ALL_GATHER, ALL_REDUCE, SHIFT, Collective
from megatron.spec.sizes import FP32


def sent_by_hosts(run: RunConfig, settings: RunSettings, ranks_per_host: int) -> list[float]:
    """Returns the bytes of a step that each host sends to others. The run is in fp32."""
    counter = _Counter(run, settings, ranks_per_host)
    world = settings.mesh.world_size
    each = [counter.of_rank(rank) for rank in range(world)]
    return [sum(each[first : first + ranks_per_host]) for first in range(0, world, ranks_per_host)]


class _Counter:
    def __init__(self, run: RunConfig, settings: RunSettings, ranks_per_host: int) -> None:
        self._run, self._settings, self._ranks_per_host = run, settings, ranks_per_host
        self._work: ModelWork = model_work(run, settings, Software())
        self._microbatches = settings.batches.final_num_microbatches

    def of_rank(self, rank: int) -> float:
        """Bytes to other hosts."""
        pipeline, place = self._settings.pipeline, self._settings.mesh.coordinates(rank)["pp"]
        mine = [number for number, owner in enumerate(pipeline.placement.rank_of) if owner == place]
        layers = sum(self._of_stage(rank, number) for number in mine)
        return self._microbatches * layers + self._of_replicas(rank, mine)

    def _of_stage(self, rank: int, number: int) -> float:
        """A microbatch in one stage: its layers, and the messages to the stages before and after it."""
        pipeline, work = self._settings.pipeline, self._work
        stage, rank_of = pipeline.stages[number], pipeline.placement.rank_of
        total = 0.0
        for group, full in self._run.recompute.groups(stage.layers):
            for layer in group:
                total += self._of_work(rank, work.layer(layer), full=full)
        for present, end in ((stage.embedding, work.embedding), (stage.head, work.head)):
            if present:
                total += self._of_work(rank, end, full=False)
        for neighbour in (number - 1, number + 1):
            if 0 <= neighbour < len(rank_of) and not self._near(rank, self._at_place(rank, rank_of[neighbour])):
                total += work.sizes.residual
        return total

    def _of_work(self, rank: int, work: LayerWork, *, full: bool) -> float:
        again = work.forward if full else work.again
        return sum(self._of_messages(rank, part) for part in (work.forward, work.input_grad, work.weight_grad, again))

    def _of_messages(self, rank: int, operations: Iterable[LayerOperation]) -> float:
        calls = (operation.call for operation in operations if isinstance(operation, LayerMessage))
        return sum(self._of_call(rank, call) for call in calls)

    def _of_call(self, rank: int, call: Collective) -> float:
        group = self._group(rank, *call.group.split("_")[:1])
        if call.op == SHIFT:
            following = group[(group.index(rank) + 1) % len(group)]
            return 0.0 if self._near(rank, following) else call.nbytes
        if call.op == ALL_GATHER:
            return call.nbytes * self._far(rank, group)
        return call.nbytes / len(group) * self._far(rank, group) * (2 if call.op == ALL_REDUCE else 1)

    def _of_replicas(self, rank: int, mine: list[int]) -> float:
        """Sums of gradients and gathers of parameters, of the buckets of a rank."""
        settings, mesh = self._settings.data_parallel, self._settings.mesh
        stages = [self._settings.pipeline.stages[number] for number in mine]
        buckets = rank_buckets(self._work.spec, stages).of(mesh, settings).sizes.tolist()
        group = self._group(rank, "cp", "dp")
        all_numel = sum(buckets)
        sums = self._microbatches if settings.mode == EVERY and settings.shards != "no_shard" else 1
        if settings.shards == "optim_grads_params":
            gathered = self._gathered(buckets, all_numel, len(stages))
        else:  # an all-reduce is a reduce-scatter and an all-gather
            gathered = all_numel
        return FP32 * (sums * all_numel + gathered) / len(group) * self._far(rank, group)

    def _gathered(self, buckets: list[int], all_numel: int, stages: int) -> int:
        """ZeRO-3: backward still holds what forward read last, and with one stage forward what backward read last.

        buckets: elements of each.
        """
        kept = buckets[-1] if stages == 1 else 0
        forward, backward = all_numel * self._microbatches, (all_numel - buckets[0]) * self._microbatches
        return forward + backward - kept * (self._microbatches - 1)

    def _group(self, rank: int, *axes: str) -> tuple[int, ...]:
        return next(group for group in self._settings.mesh.groups(*axes) if rank in group)

    def _at_place(self, rank: int, pp: int) -> int:
        """The rank at another place of the pipeline."""
        group = self._group(rank, "pp")
        return group[pp]

    def _near(self, rank: int, other: int) -> bool:
        return rank // self._ranks_per_host == other // self._ranks_per_host

    def _far(self, rank: int, group: tuple[int, ...]) -> int:
        """How many ranks of the group are on other hosts."""
        return sum(not self._near(rank, other) for other in group)
