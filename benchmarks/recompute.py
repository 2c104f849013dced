"""The cost and the savings of recompute: steps of a small Llama with every mode, and the result of `balanced`.

  python -m benchmarks.recompute

A step is forward, loss, backward, clipping and update. On the CPU rounds alternate between all modes, so that all have
the same conditions; the ratio is the median over rounds of a mode's time to that of the step without recompute in the
same round, by wall-clock time and by the process's CPU time, which other load on the machine disturbs less. On CUDA
each mode has the device to itself, and a row has the peak of a step in allocated memory, including all state. Saved
bytes are counted: distinct storages that autograd keeps for one microbatch, without parameters and without offloaded
tensors. All modes train the same model on the same batch, and their losses must be equal.

The second table shows the balanced policy: its prediction, the measurement, and the time that fixed choices would take
for the same bytes: on the straight line between the two nearest of the Pareto-optimal modes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from benchmarks.recompute_trial import Trial
from megatron.config.data import DataConfig
from megatron.config.recompute import BALANCED, RecomputeConfig
from megatron.core.device import choose_device, synchronize
from megatron.planner.memory.balance import Option, not_beaten
from megatron.planner.memory.rank_choice import RankChoice
from megatron.training.batch import Batch, make_batch

NONE, BUDGETS = "none", (0.9, 0.6, 0.35)
Times = tuple[float, float]  # wall-clock seconds, and CPU seconds of the process on all cores


def _parts(*names: str) -> RecomputeConfig:
    return RecomputeConfig(recompute_granularity="selective", recompute_modules=names)


def _full(method: str, number: int) -> RecomputeConfig:
    return RecomputeConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=number)


def _balanced(share: float) -> RecomputeConfig:
    return RecomputeConfig(recompute_policy=BALANCED, activation_memory_budget=share)


def modes(layers: int) -> dict[str, RecomputeConfig]:
    """Returns the rows of the table for a model with so many layers."""
    return {
        NONE: RecomputeConfig(),
        "norm": _parts("norm"),
        "mlp_act": _parts("mlp_act"),
        "norm mlp_act (GEMM-last)": _parts("norm", "mlp_act"),
        "core_attn": _parts("core_attn"),
        "core_attn norm mlp_act": _parts("core_attn", "norm", "mlp_act"),
        "mlp": _parts("mlp"),
        "norm mlp": _parts("norm", "mlp"),
        "full, uniform 1": _full("uniform", 1),
        "full, block, half": _full("block", layers // 2),
        **{f"balanced, {share:g}": _balanced(share) for share in BUDGETS},
    }


@dataclasses.dataclass(frozen=True)
class Row:
    """The measurements of one mode. `saved` in bytes; `loss` of the first step; `peak` in bytes, on CUDA."""

    saved: int
    loss: float
    times: Sequence[Times]
    peak: int | None
    balanced: RankChoice | None


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    device = choose_device(args.device, 0)
    print(
        f"{args.layers} layers, hidden {args.hidden}, ffn {args.ffn}, heads {args.heads}/{args.kv_heads}, vocabulary "
        f"{args.vocab}, batch {args.batch} x {args.seq} tokens, {args.dtype}, {device.type}, {torch.get_num_threads()} "
        f"threads, torch {torch.__version__}, {args.rounds} rounds\n"
    )
    ids = torch.randint(0, args.vocab, (args.batch, args.seq + 1), device=device)
    batch = make_batch(ids, args.vocab, DataConfig(seq_length=args.seq))
    rows = measure(args, modes(args.layers), batch, device)
    assert rows, "nothing fits on the device"
    losses = {name: row.loss for name, row in rows.items()}
    assert len(set(losses.values())) == 1, f"losses differ: {losses}"
    report(rows)
    report_balanced(rows)


def measure(
    args: argparse.Namespace, wanted: Mapping[str, RecomputeConfig], batch: Batch, device: torch.device
) -> dict[str, Row]:
    """Returns one row per mode. On CUDA modes run one after the other, without those that do not fit on the device."""
    if device.type != "cuda":
        return measure_in_turn(args, wanted, batch, device)
    rows: dict[str, Row] = {}
    for name, recompute in wanted.items():
        try:
            rows |= measure_in_turn(args, {name: recompute}, batch, device)
        except torch.OutOfMemoryError:
            print(f"{name}: does not fit")
        gc.collect()  # a model and its hooks refer to each other
        torch.cuda.empty_cache()
    return rows


def measure_in_turn(
    args: argparse.Namespace, wanted: Mapping[str, RecomputeConfig], batch: Batch, device: torch.device
) -> dict[str, Row]:
    """Returns one row per mode; all of them are in memory together."""
    trials = {name: Trial(args, recompute, batch, device) for name, recompute in wanted.items()}
    losses = {name: trial.step() for name, trial in trials.items()}  # warm-up
    saved = {name: trial.saved() for name, trial in trials.items()}
    times: dict[str, list[Times]] = {name: [] for name in trials}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(args.rounds):
        for name, trial in trials.items():
            synchronize(device)
            started, used = time.perf_counter(), time.process_time()
            trial.step()
            synchronize(device)
            times[name].append((time.perf_counter() - started, time.process_time() - used))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {name: Row(saved[name], losses[name], times[name], peak, trials[name].balanced) for name in trials}


def report(rows: Mapping[str, Row]) -> None:
    """Prints the first table. Ratios are to the first row, which is `none` if that fits."""
    base = next(iter(rows.values()))
    peaks = base.peak is not None
    print("| recomputed | saved, MB | of none | step, ms | ratio |" + (" peak, MB |" if peaks else " CPU ratio |"))
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        wall, cpu = (
            statistics.median(mine[which] / none[which] for mine, none in zip(row.times, base.times, strict=True))
            for which in (0, 1)
        )
        last = f"{row.peak / 1e6:.0f}" if row.peak is not None else f"{cpu:.3f}"
        median = 1e3 * statistics.median(seconds for seconds, _ in row.times)
        share = row.saved / base.saved
        print(f"| {name} | {row.saved / 1e6:.1f} | {share:.0%} | {median:.0f} | {wall:.3f} | {last} |")


def report_balanced(rows: Mapping[str, Row]) -> None:
    """Prints the second table, if there is a step without recompute."""
    if NONE not in rows:
        return
    none = rows[NONE]
    fixed = {name: row for name, row in rows.items() if row.balanced is None}
    # a GPU runs asynchronously to the process
    clocks = ("by the clock", "CPU time")[: 1 if none.peak is not None else 2]
    measured = " | ".join(f"{clock} | fixed choices" for clock in clocks)
    print(f"\n| | layers | saved, MB: predicted | measured | added, ms: predicted | {measured} |")
    print("|---|---|---|---|---|" + "---|---|" * len(clocks))
    for name, row in rows.items():
        if row.balanced is None:
            continue
        predicted = none.saved - row.balanced.keep + row.balanced.choice.nbytes
        cells = [name, str(row.balanced), f"{predicted / 1e6:.1f}", f"{row.saved / 1e6:.1f}"]
        cells.append(f"{1e3 * row.balanced.choice.seconds:.1f}")
        for which in range(len(clocks)):
            points = [Option(key, each.saved, added(each, none, which)) for key, each in fixed.items()]
            there = on_the_line(points, row.saved)
            cells.append(f"{1e3 * added(row, none, which):.1f}")
            cells.append("none keeps as little" if there is None else f"{1e3 * there:.1f}")
        print(f"| {' | '.join(cells)} |")


def added(row: Row, none: Row, which: int) -> float:
    """Returns the additional seconds of a step compared with no recompute: the median over rounds."""
    return statistics.median(mine[which] - base[which] for mine, base in zip(row.times, none.times, strict=True))


def on_the_line(points: Sequence[Option], nbytes: int) -> float | None:
    """Returns the seconds at `nbytes` on the line through the Pareto-optimal points; None below the smallest of
    them."""
    line = not_beaten(points)
    if nbytes >= line[0].nbytes:
        return line[0].seconds
    for wide, lean in itertools.pairwise(line):
        if nbytes >= lean.nbytes:
            part = (wide.nbytes - nbytes) / (wide.nbytes - lean.nbytes)
            return wide.seconds + part * (lean.seconds - wide.seconds)
    return None


if __name__ == "__main__":
    main()
