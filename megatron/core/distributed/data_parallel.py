"""Data parallelism of one model: reduces gradients as backward writes them, and gathers parameters before they are
read.

[Note: a step]
    begin_step                                  gradients are cleared
    per microbatch: begin_backward, backward, end_backward
                                                with overlap a bucket is reduced when its last gradient is written.
                                                A pipeline rank does so for each of its stages; one that splits its
                                                backward runs it within `deferred_weight_grads`, and the jobs later
    finish_reduction                            every bucket's `grad_shard` holds the sum over all replicas
    the optimizer: a bucket's `param_shard` is written, then `mark_updated`, bucket by bucket in forward order
    end_step                                    without overlap: all parameters are gathered now
With overlap the next forward waits for a bucket when it first reads one of its parameters: see param_gatherer.py, and
param_unsharder.py for parameters that are sharded or offloaded. Code that reads parameters outside of a forward, such
as saving, calls `synchronize` first.

[Note: order] Buckets are reduced in one fixed order, the expected order of backward, even if gradients are computed in
another order. A complete bucket waits until all buckets before it are complete. A bucket that never gets all its
gradients is reduced at the end of backward, with zeros for the missing ones. So ranks can never wait for different
buckets.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from megatron.base.box import flat_boxes
from megatron.base.log import get_logger
from megatron.config.data_parallel import AUTO, EVERY, LAST, DataParallelSettings
from megatron.core.comm.bucket_comm import BucketComm
from megatron.core.comm.collectives import Handle, all_reduce, barrier
from megatron.core.device import headroom, synchronize
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.gradient_pool import GradientPool
from megatron.core.distributed.param_router import ParamRouter
from megatron.core.distributed.reduce_mode import ReduceProfile, choose_mode
from megatron.core.groups import Groups
from megatron.core.offload.weights import WeightOffload
from megatron.core.parameter import Parameter, local_parameters
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from megatron.spec.buckets import GRADIENT_BLOCKS, Piece, default_bucket_size, plan_all

log = get_logger(__name__)

# Steps before --grad-reduce-mode auto decides: memory reaches its peak, and the first backward is slower than others.
_FIRST_STEPS = 2
_PROBES = 3

Arrival = tuple[Bucket, Parameter]  # a parameter whose gradient is complete, and its bucket


class DataParallel:
    """Owns the memory of a model's trainable parameters and gradients, in buckets, and moves it between replicas."""

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        settings: DataParallelSettings,
        device: torch.device,
        stage_of: Mapping[str, int] | None = None,
        streams: Streams | None = None,
        *,
        late_updates: bool = False,
        weight_offload: WeightOffload | None = None,
    ) -> None:
        """Shards over the `shard` groups, which `create_groups` makes for the `optimizer_instances` of the settings.

        stage_of: parameter name -> pipeline stage, for a model that holds several stages. Parameters that several
        stages use are left out, and reduced at the end of the step. Without it all parameters are of stage 0. streams:
        run the communication, and draw it in their timeline; default new ones. late_updates: the optimizer may finish
        the update of a bucket after the step, when its parameters are read. weight_offload: moves the parameters that
        live in host memory, which get buckets of their own.
        """
        self.settings = settings
        self._groups, self.device = groups, device
        self.streams = streams or Streams(device, Timeline(device))
        self.timeline = self.streams.timeline
        reduce_in = torch.bfloat16 if settings.reduce_in_bf16 else torch.float32
        self._comm = BucketComm(reduce_in, self.streams)
        self._blocks = GradientPool(GRADIENT_BLOCKS, device)
        parameters = {n: p for n, p in reversed(local_parameters(model).items()) if p.requires_grad}
        stages = {n: 0 if stage_of is None else stage_of.get(n) for n in parameters}
        offloaded = {name for name in parameters if weight_offload is not None and weight_offload.includes(name)}
        self.buckets = self._make_buckets(parameters, stages, offloaded, settings.bucket_size)
        self.microbatches = 0  # of this step
        self._reducing = False
        self._last = False  # this backward adds the last contribution to the gradients that it reduces
        self._when_reduced: Callable[[Bucket], None] | None = None
        self._stage: int | None = None  # whose backward is under way
        self._left: deque[Bucket] = deque()  # buckets of it that are still to be reduced, in order
        self._unreduced: set[int] = set()  # of this step
        self._reductions: deque[tuple[Tensor | None, Handle]] = deque()  # with the memory that is free afterwards
        self._without: set[str] = set()
        self._captured: list[Arrival] | None = None  # while a backward is captured
        # Waits for copies of the parameters that are under way; called by whoever is about to change them.
        self.before_write: Callable[[], None] | None = None
        # Called with this rank's gradients of a bucket, flat, when their reduction is about to start on the current
        # stream. Once per bucket and step, or per microbatch where gradients are reduced after each.
        self.before_reduce: Callable[[Tensor], None] | None = None
        self._params = ParamRouter(
            model,
            self.buckets,
            self._comm,
            sharded=settings.shards == "optim_grads_params",
            offload=weight_offload,
            overlap=settings.overlap_gather,
            late_updates=late_updates,
        )
        self.sharded_names = self._params.sharded_names  # names of parameters that are empty while they are not in use
        # Without sharding there is no shard that could be kept instead. All ranks of the world agree.
        shared = any(view.shard.size > 1 for view in groups.views.values())
        self._undecided = settings.mode == AUTO and shared
        self.keeps_grads = settings.mode == LAST or not shared
        self._steps, self._backward_seconds, self._waited_seconds = 0, 0.0, 0.0
        for bucket in self.buckets:
            bucket.keep_grads(self.keeps_grads)
            for parameter in bucket.parameters.values():
                # Called when all of backward's contributions to the parameter are in, also when the layer wrote them to
                # the slot itself.
                parameter.register_post_accumulate_grad_hook(_announce)
                assert parameter.slot is not None
                parameter.slot.written = functools.partial(self._arrived, bucket, parameter)

    def when_reduced(self, callback: Callable[[Bucket], None]) -> None:
        """From now on calls `callback(bucket)` once per step, when `grad_shard` holds the sum over all replicas.

        Gradients that are partial over tp, or that both ends of the pipeline share, are not final yet:
        `finish_reduction` sums them. On the CPU a thread of the communication calls it after the sum, on CUDA when the
        sum is queued on the current stream.
        """
        self._when_reduced = callback

    def begin_step(self, microbatches: int, iteration: int | None = None) -> None:
        """Call before the first microbatch of a step.

        iteration: its number in the run, on which random rounding of gradients depends; None: the number of steps that
        this object has seen.

        Communication: none, except once when --grad-reduce-mode auto decides: reductions of a bucket and small
        all-reduces.
        """
        if self._undecided and self._steps == _FIRST_STEPS:
            self._decide(microbatches)
        self._steps += 1
        self.microbatches = microbatches
        self._without.clear()
        self._params.begin_step(microbatches)
        for bucket in self.buckets:
            bucket.clear()
            bucket.rounding.begin_step(self._steps if iteration is None else iteration)
        self._unreduced = {bucket.index for bucket in self.buckets}

    def begin_backward(self, stage: int = 0, *, last: bool) -> None:
        """Call before a microbatch's backward, or before the deferred jobs of a split one.

        last: it is the last one of the step in this stage.
        """
        self._reducing = not self.keeps_grads or (last and self.settings.overlap_reduce)
        self._stage, self._last = stage, last
        self._params.begin_backward()
        self._left = deque(bucket for bucket in self.buckets if bucket.stage == stage)
        for bucket in self._left:
            waiting = [slot.waiting for p in bucket.parameters.values() if (slot := p.slot) is not None]
            # In a split backward the other gradients have been written with the gradient of the input.
            bucket.missing = sum(count > 0 for count in waiting) if any(waiting) else len(waiting)
        if self._undecided:
            synchronize(self.device)
            self._backward_seconds, self._waited_seconds = -time.perf_counter(), 0.0

    def end_backward(self, *, last: bool) -> None:
        """Call after a microbatch's backward: starts the reductions that are due. Communication: see
        `finish_reduction`."""
        if self._undecided:
            synchronize(self.device)
            self._backward_seconds += time.perf_counter() - self._waited_seconds
        if last or not self.keeps_grads:
            while self._left:
                self._reduce(self._left.popleft())
        self._params.end_backward()
        self._reducing, self._stage = False, None

    @contextlib.contextmanager
    def deferred_weight_grads(self) -> Iterator[list[Callable[[], None]]]:
        """Defers the weight gradients of linear layers in a backward of the body: they become jobs of the yielded
        list."""
        jobs: list[Callable[[], None]] = []
        self._defer_weight_grads(jobs)
        self._params.begin_backward()
        yield jobs
        self._params.end_backward()
        self._defer_weight_grads(None)

    def finish_reduction(self) -> None:
        """Waits until every bucket's `grad_shard` holds the sum over all replicas.

        Communication: the reductions that were started before, one per bucket and, unless gradients are kept, per
        microbatch. Then one all-reduce over tp of this rank's slices of the gradients that are partial over tp, one
        over tp_inner of those of keys and values that its ranks share, and one over the two ends of the pipeline if
        they share an embedding.
        """
        self._last = True
        for bucket in self.buckets:
            if bucket.index in self._unreduced:
                self._reduce(bucket)
        while self._reductions:
            self._retire()
        self._sum_over_tp()
        for bucket in self.buckets:
            if bucket.on_both_ends:
                bucket.grad_shard.copy_(all_reduce(bucket.grad_shard.float(), self._groups.ends))
        self._params.synchronize()

    def without_gradient(self) -> list[str]:
        """Names of the parameters without a gradient in some backward of this step, sorted."""
        return sorted(self._without)

    def gradient_bytes(self) -> int:
        """Bytes of gradients: whole buckets or slices of them, and the blocks of the pool."""
        storages = {bucket.grad_shard.untyped_storage() for bucket in self.buckets}
        return sum(storage.nbytes() for storage in storages) + self._blocks.nbytes

    def gradients(self) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
        """Yields the reduced gradients that this rank owns: (parameter, offset in the global tensor, elements)."""
        for bucket in self.buckets:
            for piece in bucket.pieces:
                section, flat, done = bucket.section_of(piece), bucket.grad_shard[piece.at :], 0
                for box in flat_boxes(section.shape, piece.start - section.start, piece.stop - section.start):
                    offset = tuple(a + b for a, b in zip(section.offset, box.offset, strict=True))
                    yield piece.name, offset, flat[done : done + box.numel].view(box.shape)
                    done += box.numel

    def weights(self) -> Iterator[tuple[Piece, Tensor]]:
        """Yields this rank's slices of the parameters: (the part of a parameter, its elements)."""
        for bucket in self.buckets:
            for piece in bucket.pieces:
                yield piece, bucket.param_shard[piece.at : piece.at + piece.stop - piece.start]

    def mark_updated(self, bucket: Bucket, finish: Callable[[], None] | None = None) -> None:
        """Call when the bucket's `param_shard` is updated; all ranks call it. With overlap its gather starts.

        With `finish` the update is deferred: it is complete when `finish` returns, which is called in `end_step` or,
        with `late_updates`, before the bucket is read.
        """
        self._params.mark_updated(bucket, finish)

    def end_step(self) -> None:
        """Call when all buckets are marked as updated. Without overlap it gathers them and waits.

        Communication: one all-gather per bucket.
        """
        self._params.end_step()

    def before_read(self, parameters: Iterable[nn.Parameter]) -> None:
        """Waits until the values of resident parameters are current: for a reader that does not read them by
        attribute."""
        self._params.before_read(parameters)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[list[Arrival]]:
        """For a body that captures a backward in a graph: it adds to the gradients, and reduces nothing.

        Yields the gradients that arrive, in order; `before_replay` and `arrived` take them at each replay.
        """
        slots = [slot for bucket in self.buckets for p in bucket.parameters.values() if (slot := p.slot) is not None]
        fresh = [slot.fresh for slot in slots]
        for slot in slots:
            slot.fresh = False
        self._captured = []
        yield self._captured
        self._captured = None
        for slot, was_fresh in zip(slots, fresh, strict=True):
            slot.fresh = was_fresh

    @torch.no_grad()
    def before_replay(self, arrivals: Sequence[Arrival]) -> None:
        """Call before a captured backward is replayed: the gradients to which it adds are set to zero, if they are
        fresh."""
        slots = [slot for _, p in arrivals if (slot := p.slot) is not None and slot.fresh]
        if slots:
            torch._foreach_zero_([slot.main_grad for slot in slots])
        for slot in slots:
            slot.fresh = False

    def arrived(self, arrivals: Sequence[Arrival]) -> None:
        """Call when a captured backward has been replayed. Communication: the reductions of buckets that are
        complete."""
        for bucket, parameter in arrivals:
            self._complete(bucket, parameter)

    def parameter_of(self, tensor: Tensor) -> Parameter | None:
        """Returns the sharded or offloaded parameter of which a tensor is a view, or None."""
        return self._params.parameter_of(tensor)

    def storages(self) -> list[Tensor]:
        """Returns the flat memory in which this rank holds the trained parameters between steps: of each bucket, or of
        its slice where the bucket is sharded or offloaded. The host may read and write it after `synchronize`."""
        return [bucket.storage for bucket in self.buckets]

    def write_back(self) -> None:
        """Call within `full_parameters` when whole parameters were written: this rank's slices get their values."""
        for bucket in self.buckets:
            bucket.write_back()

    def synchronize(self) -> None:
        """Waits until nothing is in flight, and every parameter is current, or its shard if it is sharded or
        offloaded. The caller may then read and write the parameters."""
        if self.before_write is not None:
            self.before_write()
        self._params.synchronize()

    def full_parameters(self) -> AbstractContextManager[None]:
        """Every parameter is whole on the device and current in the body, for a reader that no hooks announce.

        The body runs no forward of the model itself. Device memory: all parameters of this rank. Communication: one
        all-gather per bucket of parameters that are sharded; no more than `synchronize` for the others.
        """
        return self._params.full_parameters()

    def _arrived(self, bucket: Bucket, parameter: Parameter) -> None:
        assert parameter.slot is not None
        if parameter.grad is not None:  # autograd accumulated it: norm weights, biases
            parameter.slot.add(parameter.grad)
            parameter.grad = None
        if self._captured is None:
            self._complete(bucket, parameter)
        else:
            self._captured.append((bucket, parameter))

    def _complete(self, bucket: Bucket, parameter: Parameter) -> None:
        assert parameter.slot is not None
        self._params.mark_done(bucket)
        if bucket.stage != self._stage or parameter.slot.waiting:
            return
        bucket.missing -= 1
        if self._reducing:
            while self._left and self._left[0].missing == 0:
                self._reduce(self._left.popleft())

    def _defer_weight_grads(self, jobs: list[Callable[[], None]] | None) -> None:
        for bucket in self.buckets:
            for parameter in bucket.parameters.values():
                assert parameter.slot is not None
                parameter.slot.deferred = jobs

    def _reduce(self, bucket: Bucket) -> None:
        self._unreduced.discard(bucket.index)
        self._params.finish_update(bucket)
        self._without.update(bucket.fill_missing())
        then: list[Callable[[], None]] = []
        block = None if self.keeps_grads else bucket.detach()
        if block is not None:
            then.append(functools.partial(bucket.accumulate, block))
        if self._last and self._when_reduced is not None:
            then.append(functools.partial(self._when_reduced, bucket))
        grads = bucket.grads if block is None else block[: bucket.size]
        assert grads is not None
        if self.before_reduce is not None:
            self.before_reduce(grads)
        handle = self._comm.reduce(bucket.view, grads, bucket.label, functools.partial(_run, then) if then else None)
        self._reductions.append((block, handle))

    def _retire(self) -> None:
        """Waits for the oldest reduction."""
        block, handle = self._reductions.popleft()
        handle.wait()
        if block is not None:
            self._blocks.give_back(block)

    def _take_block(self, size: int) -> Tensor:
        """Returns memory for the gradients of one backward pass over a bucket of this size."""
        while self._reductions and (self._blocks.is_exhausted or self._reductions[0][1].is_completed()):
            started = time.perf_counter()
            self._retire()
            self._waited_seconds += time.perf_counter() - started
        return self._blocks.take(size)

    def decided_mode(self) -> str | None:
        """Returns the choice of --grad-reduce-mode auto; None while it still measures, and under another mode.

        The two modes add in different orders, so a continued run must not choose again. Communication: as `begin_step`
        when it decides.
        """
        if self._undecided and self._steps >= _FIRST_STEPS:
            self._decide(self.microbatches)
        if self.settings.mode != AUTO or self._undecided:
            return None
        return LAST if self.keeps_grads else EVERY

    def take_mode(self, mode: str) -> None:
        """Call before the first step of a continued run: --grad-reduce-mode auto keeps the mode that was chosen
        before."""
        if self._undecided:
            self._use(mode)

    def _decide(self, microbatches: int) -> None:
        """Chooses when gradients are reduced; the same on all ranks."""
        mode, why = choose_mode(microbatches, self._measure())
        log.info("--grad-reduce-mode auto: %s (%s)", mode, why)
        self._use(mode)

    def _use(self, mode: str) -> None:
        self._undecided = False
        if self.keeps_grads != (mode == LAST):
            self.keeps_grads = mode == LAST
            self._blocks.clear()
            for bucket in self.buckets:
                bucket.keep_grads(self.keeps_grads)

    def _measure(self) -> ReduceProfile:
        """Returns the profile of this run. Communication: three reductions of the largest bucket, and two small
        all-reduces over the world."""
        largest = max(
            self.buckets, key=lambda bucket: bucket.size, default=None
        )  # none where all of this stage is frozen
        size = sum(bucket.size for bucket in self.buckets)
        reduce_seconds = 0.0 if largest is None else self._probe(largest) * size / largest.size
        blocks = sum(sorted(bucket.size for bucket in self.buckets if bucket.shards > 1)[-GRADIENT_BLOCKS:])
        width = 2 if self.settings.grads_in_bf16 else 4
        saved = width * (size - sum(bucket.size // bucket.shards for bucket in self.buckets)) - 4 * blocks
        slowest = torch.tensor([reduce_seconds, self._backward_seconds], dtype=torch.float64, device=self.device)
        least = torch.tensor([float(headroom(self.device))], dtype=torch.float64, device=self.device)
        reduce_seconds, backward_seconds = all_reduce(slowest, self._groups.world, "max").tolist()
        (free,) = all_reduce(least, self._groups.world, "min").tolist()
        return ReduceProfile(width * size, max(0, saved), reduce_seconds, backward_seconds, int(free))

    def _probe(self, bucket: Bucket) -> float:
        """Returns the seconds that the reduction of as many gradients takes, the median of three."""
        grads = torch.zeros(bucket.size, dtype=bucket.grad_dtype, device=self.device)
        seconds = []
        for _ in range(_PROBES):
            synchronize(self.device)
            barrier(bucket.view.copies)
            started = time.perf_counter()
            self._comm.reduce(bucket.view, grads, "probe").wait()
            synchronize(self.device)
            seconds.append(time.perf_counter() - started)
        return sorted(seconds)[_PROBES // 2]

    def _sum_over_tp(self) -> None:
        groups = {group.size: group for group in (self._groups.tp_inner, self._groups.tp)}
        partial: dict[int, list[Tensor]] = {size: [] for size in groups}
        for bucket in self.buckets:
            for start, stop, holders in bucket.runs(lambda info, section: section.holders if section.partial else 0):
                if holders:
                    partial[holders].append(bucket.grad_shard[start:stop])
        for size, parts in partial.items():
            if parts:
                together = all_reduce(torch.cat(parts).float(), groups[size])
                for part, total in zip(parts, together.split([len(part) for part in parts]), strict=True):
                    part.copy_(total)

    def _make_buckets(
        self,
        parameters: dict[str, Parameter],
        stages: dict[str, int | None],
        offloaded: set[str],
        bucket_size: int | None,
    ) -> list[Bucket]:
        """Buckets in the order in which backward completes them, each of one view, stage and dtype, offloaded or not.

        All parameters of a bucket have the same stage and dtype, and are offloaded or not.

        Parameters on both ends of the pipeline have a bucket of their own, so that both ends divide it alike.
        """
        views = {n: self._groups.view(p.info.spec.axis) for n, p in parameters.items()}
        shards = {n: view.shard.size for n, view in views.items()}
        most = max(view.shard.size for view in self._groups.views.values())
        size = bucket_size or default_bucket_size(sum(p.numel() for p in parameters.values()), most)
        kinds = {
            n: (views[n].name, stages[n], p.dtype, p.info.on_both_ends, n in offloaded) for n, p in parameters.items()
        }
        layouts = plan_all({n: p.numel() for n, p in parameters.items()}, kinds, size, shards)
        return [
            Bucket(
                index,
                {name: parameters[name] for name in layout.offsets},
                layout,
                view=views[next(iter(layout.offsets))],
                take=self._take_block,
                stage=stages[next(iter(layout.offsets))],
                grad_dtype=torch.bfloat16 if self.settings.grads_in_bf16 else torch.float32,
            )
            for index, layout in enumerate(layouts)
        ]


def _run(jobs: list[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def _announce(parameter: Parameter) -> None:
    """The hook of a parameter. It holds no object: torch keeps hooks where Python's garbage collector does not look, so
    a bucket in a hook would keep itself and all memory of the run alive for ever.
    """
    assert parameter.slot is not None
    parameter.slot.written()
