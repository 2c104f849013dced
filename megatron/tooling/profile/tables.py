"""Tables of products and attention around the shapes of the candidates, and the rate of kernels that only move memory.

The planner takes layers of measured shapes as they are, and corrects others by these tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.config.run import RunConfig
from megatron.core.timeline import laps
from megatron.core.transformer.context import Build
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.linear import OutputGrad
from megatron.planner.search.layout import Layout
from megatron.planner.time.model_work import ModelWork, model_work
from megatron.planner.time.operations import Gemm, LayerMessage, LayerWork
from megatron.planner.time.profile_file import AttentionRow, ProductRow
from megatron.planner.time.profiled_run import run_in, settings_in
from megatron.planner.time.software import Software
from megatron.spec.attention import CoreSpec
from megatron.tooling.profile.budget import WARM_UPS, Budget, Sample, calls_of, timed

_IDLE = 2e-3  # seconds, in which the host queues one operation
_AROUND = (0.25, 4.0)  # factors on the tokens of the products of a layer


def measure_products(
    run: RunConfig, build: Build, chosen: Sequence[Layout], budget: Budget, share: float
) -> list[ProductRow]:
    """Returns the products of the layers and heads in these layouts, and with fewer and more tokens."""
    shapes: dict[tuple[int, int, int, bool], None] = {}
    for layout in chosen:
        for gemm in _products(_work(run, layout)):
            shapes[int(gemm.m), int(gemm.n), int(gemm.k), gemm.accumulates] = None
    first = [gemm for gemm in _products(_work(run, chosen[0])) if not gemm.accumulates]
    for gemm, factor in itertools.product(first, _AROUND):
        shapes[max(1, int(gemm.m * factor)), int(gemm.n), int(gemm.k), False] = None
    rows: list[ProductRow] = []
    for m, n, k, accumulates in shapes:
        name = f"product {m} x {n} x {k}"
        if rows and not budget.allows(name, share):
            continue
        sample = timed(_seconds_of(build, _product(build, m, n, k, accumulates=accumulates)), budget.of_one() / 4)
        rows.append(ProductRow(m=m, n=n, k=k, accumulates=accumulates, seconds=sample.median, spread=sample.spread))
    return rows


def measure_attention(
    run: RunConfig, build: Build, chosen: Sequence[Layout], budget: Budget, share: float
) -> list[AttentionRow]:
    """Returns attention of whole sequences with the heads of these layouts, and of shorter sequences."""
    core, seq_length = build.spec.first_core, run.data.seq_length
    assert seq_length
    shapes: dict[tuple[int, int, int], None] = {}
    for layout in chosen:
        shapes[layout.micro_batch, seq_length, layout.tp] = None
    for part in (2, 4):
        shapes[chosen[0].micro_batch, max(1, seq_length // part), 1] = None
    rows: list[AttentionRow] = []
    for b, s, tp in shapes:
        heads, groups = core.heads // tp, core.local_groups(tp)
        if rows and not budget.allows(f"attention of {heads} heads over {s} tokens", share):
            continue
        forward, backward = _attention(build, core, b, s, heads, groups, budget.of_one() / 4)
        rows.append(
            AttentionRow(
                micro_batch=b,
                tokens=s,
                heads=heads,
                groups=groups,
                head_dim=core.head_dim,
                forward_seconds=forward.median,
                backward_seconds=backward.median,
                spread=max(forward.spread, backward.spread),
            )
        )
    return rows


def bytes_per_second(run: RunConfig, build: Build, budget: Budget) -> float:
    """Returns the rate of a residual addition over a microbatch's hidden states, which reads two tensors and writes
    one."""
    assert run.data.seq_length and run.train.micro_batch_size and build.config.hidden_size
    shape = (run.data.seq_length, run.train.micro_batch_size, build.config.hidden_size)
    x, y = (torch.rand(shape, device=build.device).to(build.dtype) for _ in range(2))
    sample = timed(_seconds_of(build, lambda: x + y), budget.of_one() / 4)
    return 3 * x.nbytes / sample.median


def _work(run: RunConfig, layout: Layout) -> ModelWork:
    placed = run_in(run, layout)
    return model_work(placed, settings_in(placed), Software())


def _products(work: ModelWork) -> Iterator[Gemm]:
    for part in (*work.works, work.head):
        yield from _of_layer(part)


def _of_layer(work: LayerWork) -> Iterator[Gemm]:
    for operation in (*work.forward, *work.input_grad, *work.weight_grad):
        if isinstance(operation, Gemm) and operation.count == 1:
            yield operation
        elif isinstance(operation, LayerMessage) and isinstance(operation.behind, Gemm):
            yield operation.behind


def _seconds_of(build: Build, work: Callable[[], object]) -> Callable[[], float]:
    """A repeat of the work: seconds of one call."""
    device = build.device
    work()
    calls = calls_of(device.type == "cuda", laps(device, [work])[0].device)

    def all_calls() -> None:
        for _ in range(calls):
            work()

    return lambda: laps(device, [all_calls], idle=_IDLE)[0].device / calls


def _product(build: Build, m: int, n: int, k: int, *, accumulates: bool) -> Callable[[], object]:
    """The kernel of linear layers: an output, or the gradient of a weight."""
    kernel, device, dtype = build.kernels.linear, build.device, build.dtype
    if not accumulates:
        x, weight = (torch.rand(shape, device=device).to(dtype) for shape in ((m, k), (n, k)))
        return lambda: kernel.output(x, weight)
    grad, x = (torch.rand(shape, device=device).to(dtype) for shape in ((k, m), (k, n)))
    total = torch.zeros((m, n), device=device)
    return lambda: kernel.weight_grad(total, OutputGrad(grad), x, False)


def _attention(
    build: Build, core: CoreSpec, b: int, s: int, heads: int, groups: int, seconds: float
) -> tuple[Sample, Sample]:
    """Forward and backward of the run's kernel."""
    q, k, v = (
        torch.rand((s, b, number, channels), device=build.device).to(build.dtype).requires_grad_()
        for number, channels in ((heads, core.qk_dim), (groups, core.qk_dim), (groups, core.v_dim))
    )
    out: list[torch.Tensor] = []

    def forward() -> None:
        out[:] = [
            build.kernels.attention(
                q,
                k,
                v,
                scores=Scores(core.scale, core.softcap),
                segments=None,
                window=core.window,
                dropout=0.0,
            )
        ]

    def backward() -> None:
        torch.autograd.grad(out[0], (q, k, v), out[0])

    backwards: list[float] = []

    forward()
    calls = calls_of(build.device.type == "cuda", sum(lap.device for lap in laps(build.device, [forward, backward])))

    def both() -> float:
        times = laps(build.device, [forward, backward] * calls, idle=_IDLE)
        backwards.append(sum(lap.device for lap in times[1::2]) / calls)
        return sum(lap.device for lap in times[::2]) / calls

    ahead = timed(both, seconds)
    return ahead, Sample.of(backwards[WARM_UPS:])
