"""The search of layouts for four models and clusters: how many candidates there are, how few need a bound of their
memory and how few exact work, and the seconds of each part.

Usage: python -m benchmarks.planner.search
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

from megatron.command_line.read import parse
from megatron.config.run import RunConfig
from megatron.planner.search.flags import flags_of
from megatron.planner.search.layout import default_choices
from megatron.planner.search.search import Planner, search
from megatron.planner.search.space import space_of
from megatron.planner.time.constants import fitted
from megatron.planner.time.data_sheet import DataSheetClock
from megatron.planner.time.hardware import GIB, Cluster, built_in, with_device
from megatron.planner.time.software import Software

LLAMA = (
    "--group-query-attention --num-query-groups 8 --swiglu --bf16 --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --mock-data "
    "--train-iters 10 --lr 1e-4"
)
SMALL_DEVICE = with_device(built_in("l40s:1x4"), memory=24 * GIB)
# Name -> (the model and the batch, world size, cluster).
CASES: dict[str, tuple[str, int, Cluster]] = {
    "8B on 8 h100": (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --vocab-size 128256 "
        "--seq-length 8192 --global-batch-size 64",
        8,
        built_in("h100:1x8"),
    ),
    "70B on 256 h100": (
        "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --vocab-size 128256 "
        "--seq-length 8192 --global-batch-size 1024",
        256,
        built_in("h100:32x8"),
    ),
    "405B on 1024 h100": (
        "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --vocab-size 128256 "
        "--seq-length 8192 --global-batch-size 2048",
        1024,
        built_in("h100:128x8"),
    ),
    "7B on 4 x 24 GB": (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --vocab-size 32000 "
        "--seq-length 4096 --global-batch-size 64",
        4,
        SMALL_DEVICE,
    ),
}


def run_of(flags: str) -> RunConfig:
    """Returns the run of a case."""
    return parse([*flags.split(), *LLAMA.split()], description="A case of the benchmark.")


def main() -> None:
    """Searches all cases, or those whose names contain the argument, and prints a table."""
    table = Table(title="Search of layouts")
    columns = (
        "case",
        "candidates",
        "too slow",
        "too large",
        "played",
        "in full",
        "space",
        "time",
        "memory",
        "exact",
        "CPU",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "case" else "right")
    table.add_column("best layout")
    for name, (flags, world_size, cluster) in CASES.items():
        if not any(word in name for word in sys.argv[1:] or [""]):
            continue
        run, software = run_of(flags), Software()
        begun, used = time.perf_counter(), time.process_time()
        candidates = space_of(run, world_size, default_choices(run, world_size))
        spaced = time.perf_counter() - begun
        planner = Planner(run, world_size, cluster, software, DataSheetClock(fitted(), cluster))
        found = search(planner, candidates)
        best = found.best[0] if found.best else found.least
        assert best is not None
        text = f"{best.seconds:.2f} s, {best.memory / GIB:.0f} GiB: {' '.join(flags_of(best.layout, run))}"
        counts = (len(candidates), found.bounded_out, found.out_of_memory, found.simulated, len(found.exact))
        seconds = (spaced, *found.parts.values(), time.process_time() - used)
        table.add_row(name, *(f"{count:,}" for count in counts), *(f"{each:.1f} s" for each in seconds), text)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    main()
