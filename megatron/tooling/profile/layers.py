"""Times of decoder layers and of the model's ends, in the layouts of the candidates, without other ranks.

A rank of tp x cp is simulated (core/comm/simulated.py): its layers are the run's own, with the shapes and kernels of
that rank, and their collectives return at once.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.base.errors import ConfigError
from megatron.base.heartbeat import Heartbeat
from megatron.base.log import muted
from megatron.config.mesh import smallest_world
from megatron.config.recompute import CORE_ATTN, KEEP_ALL, MLP_ACT, NORM, WHOLE_MLP
from megatron.config.rules.check import problems
from megatron.config.run import RunConfig
from megatron.core.comm.simulated import simulated_world
from megatron.core.groups import with_shared_heads
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Lap, Timeline
from megatron.core.transformer.context import Build
from megatron.planner.memory.recompute_options import RECOMPUTE_WHOLE_LAYER, parts
from megatron.planner.search.layout import Layout
from megatron.planner.time.profile_file import EMBEDDING, HEAD, WHOLE_LAYER, EndRow, LayerRow, scaled
from megatron.planner.time.profiled_run import run_in, settings_in
from megatron.spec.decoder import decoder_spec
from megatron.tooling.profile.budget import WARM_UPS, Budget, Sample, repeat
from megatron.tooling.profile.reference import Reference, pace
from megatron.training.prepare import prepare
from megatron.training.probe import EndProbe, LayerProbe, PhaseLaps, Probe
from megatron.training.process import groups_of

_MODULES = (CORE_ATTN, NORM, MLP_ACT, WHOLE_MLP)
_TIMEOUT = 600.0


def layouts(run: RunConfig, tps: Sequence[int], cps: Sequence[int], micro_batches: Sequence[int]) -> list[Layout]:
    """Returns the layouts to measure, the most useful first: those that the rules accept.

    Raises ConfigError if they refuse a layer on one rank, with which all others are compared.
    """
    run_size = run.train.micro_batch_size
    least = (
        run_size if run_size is not None and run_size in micro_batches else min(micro_batches)
    )  # of layouts that are measured with one size only
    candidates = [Layout(micro_batch=b) for b in micro_batches]
    candidates += [Layout(tp=t, sequence_parallel=True, micro_batch=b) for b in micro_batches for t in tps if t > 1]
    candidates += [
        Layout(cp=c, cp_kind=kind, micro_batch=least) for kind in ("p2p", "all_gather", "a2a") for c in cps if c > 1
    ]
    candidates += [Layout(tp=t, sequence_parallel=True, tp_overlap=True, micro_batch=least) for t in tps if t > 1]
    candidates += [Layout(tp=t, micro_batch=least) for t in tps if t > 1]
    candidates += [
        Layout(cp=c, cp_kind="p2p", micro_batch=b) for b in micro_batches for c in cps if c > 1 and b != least
    ]
    candidates += [
        Layout(tp=t, sequence_parallel=True, cp=c, cp_kind="p2p", micro_batch=least)
        for t in tps
        for c in cps
        if t > 1 and c > 1
    ]
    alone = run_in(run, candidates[0])
    if refused := problems(alone, smallest_world(alone.parallel)):
        raise ConfigError(f"a profile needs this model's layers on one rank, where {refused[0]}")
    return [
        layout
        for layout in candidates
        if not problems(changed := run_in(run, layout), smallest_world(changed.parallel))
    ]


def measure_layers(
    run: RunConfig, device: torch.device, chosen: Sequence[Layout], budget: Budget, share: float
) -> tuple[list[LayerRow], list[EndRow]]:
    """Returns the rows of these layouts, as far as the share of the budget suffices; those of the first one always."""
    layers: list[LayerRow] = []
    ends: list[EndRow] = []
    reference = Reference(reference_layer(run, device, chosen[0]))
    for layout in chosen:
        if layers and not budget.allows(f"layers of {layout_name(layout)}", share):
            continue
        placed = run_in(run, layout)
        with simulated_build(placed, device) as build:
            layers += [_layer(placed, build, layout, number, budget, reference) for number in _kinds(build)]
            if not layout.tp_overlap and layout.cp_kind == "p2p":
                ends += [_end(placed, build, layout, end, budget, reference) for end in (EMBEDDING, HEAD)]
    return [scaled(row, reference.seconds) for row in layers], [scaled(row, reference.seconds) for row in ends]


def reference_layer(run: RunConfig, device: torch.device, layout: Layout) -> LayerProbe:
    """Returns the first layer of a run in a layout of one rank."""
    placed = run_in(run, layout)
    with simulated_build(placed, device) as build:
        return LayerProbe(placed.data, placed.train, build, 0, KEEP_ALL)


def layout_name(layout: Layout) -> str:
    """Returns a layout in words."""
    words = [f"tp {layout.tp}"]
    if layout.tp > 1:
        words += ["sp"] * layout.sequence_parallel + ["overlap"] * layout.tp_overlap
    words.append(f"cp {layout.cp}" + (f" {layout.cp_kind}" if layout.cp > 1 else ""))
    return " ".join([*words, f"micro batch {layout.micro_batch}"])


@contextlib.contextmanager
def simulated_build(run: RunConfig, device: torch.device) -> Iterator[Build]:
    """In the body layers of rank 0 of such a run can be built."""
    world_size = smallest_world(run.parallel)
    settings = settings_in(run)
    with simulated_world(0, world_size), muted():
        groups = groups_of(run.parallel, world_size, 0, Heartbeat(0))
        holders = decoder_spec(run.model).first_core.group_holders(groups.tp.size)
        groups = with_shared_heads(groups, holders, _TIMEOUT, settings.communicators)
        yield prepare(
            run.model,
            run.moe,
            run.fp8,
            run.parallel,
            run.recompute,
            settings,
            groups,
            Streams(device, Timeline(device)),
            documents=run.data.separate_documents,
            seed=run.train.seed,
            optimizer=run.optimizer,
        ).shared


def check_measurable(run: RunConfig) -> None:
    """Raises ConfigError for layers that cannot be measured without other ranks."""
    if run.model.num_experts:
        raise ConfigError(
            f"--num-experts {run.model.num_experts}: layers with experts cannot be measured without other ranks; "
            "leave --profile out, and the planner takes its constants"
        )
    if run.fp8.enabled:
        raise ConfigError("--fp8-format: profiles hold no FP8 layers; leave the flags of FP8 out")


def _kinds(build: Build) -> list[int]:
    """The first layer of each kind."""
    first: dict[int, int] = {}
    for number, layer in enumerate(build.spec.layers):
        first.setdefault(id(layer), number)
    return list(first.values())


class _Measured:
    """The repeats of a probe. reference: seconds of the reference in the same time."""

    def __init__(self, laps: Sequence[PhaseLaps], reference: float) -> None:
        self._laps, self._reference = laps, reference

    def median(self, of: Callable[[PhaseLaps], float]) -> float:
        """Returns the median of a figure, in units of the reference."""
        return statistics.median(of(lap) for lap in self._laps) / self._reference

    @property
    def spread(self) -> float:
        """The spread of the sums of the phases."""
        return Sample.of([lap.seconds for lap in self._laps]).spread


def _measured(probe: Probe, seconds: float, reference: Reference) -> _Measured:
    probe_laps: list[PhaseLaps] = []
    calls, idle = pace(probe)
    first = len(reference)

    def once() -> None:
        probe_laps.append(_mean([probe.laps(idle) for _ in range(calls)]))
        reference.measure()

    repeat(once, seconds)
    return _Measured(probe_laps[WARM_UPS:], reference.since(first))


def _mean(probe_laps: Sequence[PhaseLaps]) -> PhaseLaps:
    def mean(of: Callable[[PhaseLaps], Lap]) -> Lap:
        phase = [of(laps) for laps in probe_laps]
        return Lap(statistics.fmean(lap.device for lap in phase), statistics.fmean(lap.host for lap in phase))

    return PhaseLaps(
        mean(lambda laps: laps.forward), mean(lambda laps: laps.input_grad), mean(lambda laps: laps.weight_grad)
    )


def _added(probe: Probe, other: Probe, seconds: float) -> float:
    """The part of its time by which the other probe is slower than the first one, measured in pairs."""
    pairs: list[tuple[float, float]] = []
    calls, idle = pace(other)

    def pair() -> None:
        times = [(probe.laps(idle).seconds, other.laps(idle).seconds) for _ in range(calls)]
        pairs.append((statistics.fmean(plain for plain, _ in times), statistics.fmean(changed for _, changed in times)))

    repeat(pair, seconds)
    return max(0.0, statistics.median(changed / plain - 1 for plain, changed in pairs[WARM_UPS:]))


def _layer(run: RunConfig, build: Build, layout: Layout, number: int, budget: Budget, reference: Reference) -> LayerRow:
    probe = LayerProbe(run.data, run.train, build, number, KEEP_ALL)
    plain = _measured(probe, budget.of_one(), reference)
    whole = plain.median(lambda laps: laps.seconds)
    recompute_seconds = {
        name: whole * _added(probe, LayerProbe(run.data, run.train, build, number, config), budget.of_one())
        for name, config in (*((name, parts(name)) for name in _MODULES), (WHOLE_LAYER, RECOMPUTE_WHOLE_LAYER))
    }
    assert run.data.seq_length
    return LayerRow(
        layer=number,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        tp_overlap=layout.tp_overlap,
        cp=layout.cp,
        cp_kind=layout.cp_kind,
        micro_batch=layout.micro_batch,
        seq_length=run.data.seq_length,
        forward_seconds=plain.median(lambda laps: laps.forward.device),
        input_grad_seconds=plain.median(lambda laps: laps.input_grad.device),
        weight_grad_seconds=plain.median(lambda laps: laps.weight_grad.device),
        host_forward_seconds=plain.median(lambda laps: laps.forward.host),
        host_backward_seconds=plain.median(lambda laps: laps.input_grad.host + laps.weight_grad.host),
        again_seconds=recompute_seconds,
        spread=plain.spread,
    )


def _end(run: RunConfig, build: Build, layout: Layout, end: str, budget: Budget, reference: Reference) -> EndRow:
    measured = _measured(EndProbe(run.data, run.train, build, head=end == HEAD), budget.of_one(), reference)
    assert run.data.seq_length
    return EndRow(
        end=end,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        cp=layout.cp,
        micro_batch=layout.micro_batch,
        seq_length=run.data.seq_length,
        forward_seconds=measured.median(lambda laps: laps.forward.device),
        input_grad_seconds=measured.median(lambda laps: laps.input_grad.device),
        weight_grad_seconds=measured.median(lambda laps: laps.weight_grad.device),
        spread=measured.spread,
    )
