"""Takes the profile of a machine: all measurements in order, joined over the ranks."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import statistics
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import psutil
import torch

from megatron.base.launch import launch_environment
from megatron.base.log import get_logger
from megatron.command_line.exits import check_output
from megatron.command_line.flag_parser import FlagParser, path_word, within
from megatron.config.interval import POSITIVE, RANKS, SIZE
from megatron.config.run import RunConfig
from megatron.core.comm.collectives import gather_objects
from megatron.core.device import choose_device, set_cpu_threads
from megatron.core.groups import Group, disconnect
from megatron.planner.search.layout import Layout
from megatron.planner.time.profile_file import (
    FORMAT,
    AttentionRow,
    EndRow,
    LayerRow,
    MachineProfile,
    MessageRow,
    ProductRow,
    shape_of,
    write_profile,
)
from megatron.planner.time.profiled_run import run_in
from megatron.tooling.plan.run import settings_of
from megatron.tooling.profile.budget import Budget
from megatron.tooling.profile.layers import check_measurable, layouts, measure_layers, simulated_build
from megatron.tooling.profile.messages import measure_messages
from megatron.tooling.profile.step import StepRates, measure_step
from megatron.tooling.profile.tables import bytes_per_second, measure_attention, measure_products
from megatron.training.process import start_process

log = get_logger(__name__)

SECONDS = 150.0
# Parts of the time after which no further row is begun.
_LAYERS, _TABLES, _MESSAGES = 0.5, 0.62, 0.95
_MOST_TP = 8  # by default, on a device that may have neighbours which this job does not use

_Row = TypeVar("_Row", LayerRow, EndRow, ProductRow, AttentionRow)


@dataclasses.dataclass(frozen=True)
class _Local:
    """What a rank measures without others."""

    layers: list[LayerRow]
    ends: list[EndRow]
    products: list[ProductRow]
    attention: list[AttentionRow]
    bytes_per_second: float
    rates: StepRates


def add_flags(parser: FlagParser) -> None:
    """Adds the flags of tools/profile_machine.py other than the run's own."""
    add = parser.add_argument
    add("--out", type=path_word, required=True, metavar="FILE", help="JSON file to write")
    add(
        "--seconds",
        type=within(float, POSITIVE),
        default=SECONDS,
        metavar="X",
        help=f"time to measure, next to starting up; what does not fit is left out (default {SECONDS:g})",
    )
    sizes: dict[str, Any] = {"type": within(int, RANKS), "nargs": "+", "metavar": "N"}
    add("--tensor-parallel-sizes", **sizes, help="sizes of tp whose layers are measured (default: powers of two)")
    add("--context-parallel-sizes", **sizes, help="the same of cp (default: 1, and powers of two up to the ranks)")
    add(
        "--micro-batch-sizes",
        type=within(int, SIZE),
        nargs="+",
        metavar="N",
        help="micro batch sizes to measure (default: the run's own, and twice of it)",
    )


def profile(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Measures and writes the profile. Collective over the job. Raises UserErrors."""
    rank, world_size, local_rank = launch_environment()
    run, _ = settings_of(flags, 1, description="The run whose layers are measured.")
    check_measurable(run)
    if rank == 0:
        check_output("--out", args.out)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = choose_device(run.parallel.device, local_rank)
    set_cpu_threads(device, local_world_size)
    budget = Budget(args.seconds)
    chosen = _layouts(run, args, world_size, device)
    mine = _measure_alone(run, device, chosen, budget)
    groups, _ = start_process(run.parallel, rank, world_size, local_rank, local_world_size)
    messages = measure_messages(
        groups.world,
        local_world_size,
        device,
        getattr(torch, run.model.dtype_name),
        _hidden_sizes(run, chosen),
        budget,
        _MESSAGES,
    )
    measured = _joined(run, mine, messages, groups.world, local_world_size, device, budget)
    if rank == 0:
        write_profile(measured, args.out)
        log.info(
            "%s written: %d layers, %d products, %d messages in %.0f s; %d figures left out",
            args.out,
            len(measured.layers),
            len(measured.products),
            len(measured.messages),
            measured.profile_seconds,
            len(measured.left_out),
        )
    disconnect(groups.heartbeat)


def _layouts(run: RunConfig, args: argparse.Namespace, world_size: int, device: torch.device) -> list[Layout]:
    most = max(world_size, _MOST_TP if device.type == "cuda" else 1)
    b = run.train.micro_batch_size or 1
    tps, cps = args.tensor_parallel_sizes or _powers(most), args.context_parallel_sizes or _powers(world_size)
    return layouts(run, tps, cps, args.micro_batch_sizes or (b, 2 * b))


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _measure_alone(run: RunConfig, device: torch.device, chosen: Sequence[Layout], budget: Budget) -> _Local:
    rates = measure_step(run, device)
    layers, ends = measure_layers(run, device, chosen, budget, _LAYERS)
    with simulated_build(run_in(run, chosen[0]), device) as build:
        rate = bytes_per_second(run, build, budget)
        attention = measure_attention(run, build, chosen, budget, _TABLES)
        products = measure_products(run, build, chosen, budget, _TABLES)
    return _Local(layers, ends, products, attention, rate, rates)


def _hidden_sizes(run: RunConfig, chosen: Sequence[Layout]) -> list[int]:
    """Bytes of the hidden states that layers and stages send."""
    assert run.data.seq_length and run.model.hidden_size
    width = getattr(torch, run.model.dtype_name).itemsize * run.model.hidden_size * run.data.seq_length
    return sorted({width * layout.micro_batch // layout.cp for layout in chosen})


def _joined(
    run: RunConfig,
    mine: _Local,
    messages: Sequence[MessageRow],
    world: Group,
    node: int,
    device: torch.device,
    budget: Budget,
) -> MachineProfile:
    """Medians over the ranks, of the rows that all of them have."""
    ranks = gather_objects(mine, world)
    left_out = sorted({name for names in gather_objects(budget.left_out, world) for name in names})
    on_cuda = device.type == "cuda"
    rates = {
        field.name: statistics.median(getattr(part.rates, field.name) for part in ranks)
        for field in dataclasses.fields(StepRates)
    }
    return MachineProfile(
        format=FORMAT,
        project=_version("megatron-patched"),
        torch=torch.__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        device=torch.cuda.get_device_name(device) if on_cuda else "cpu",
        dtype=run.model.dtype_name,
        world_size=world.size,
        devices_per_node=node,
        hosts=tuple(sorted(set(gather_objects(socket.gethostname(), world)))),
        threads=torch.get_num_threads(),
        processors=torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else os.cpu_count() or 1,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory
        if on_cuda
        else psutil.virtual_memory().total // node,
        shape=shape_of(run.model),
        profile_seconds=budget.used,
        left_out=tuple(left_out),
        bytes_per_second=statistics.median(part.bytes_per_second for part in ranks),
        layers=_medians([part.layers for part in ranks]),
        ends=_medians([part.ends for part in ranks]),
        products=_medians([part.products for part in ranks]),
        attention=_medians([part.attention for part in ranks]),
        messages=tuple(messages),
        **rates,
    )


def _medians(ranks: Sequence[Sequence[_Row]]) -> tuple[_Row, ...]:
    """Rows of the same subject are one row; one that a rank had no time for is left out."""
    tables = [{_subject(row): row for row in rows} for rows in ranks]
    medians = []
    for subject, row in tables[0].items():
        if not all(subject in table for table in tables):
            continue
        alike = [table[subject] for table in tables]
        changed = {
            field.name: _median([getattr(measured, field.name) for measured in alike])
            for field in dataclasses.fields(row)
            if _is_measured(field.name)
        }
        medians.append(dataclasses.replace(row, **changed))
    return tuple(medians)


def _is_measured(name: str) -> bool:
    return name.endswith("_seconds") or name in ("seconds", "spread")


def _subject(row: Any) -> tuple[Any, ...]:
    return tuple(getattr(row, field.name) for field in dataclasses.fields(row) if not _is_measured(field.name))


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: statistics.median(value[name] for value in values) for name in values[0]}
    return statistics.median(values)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
