"""Two printed lines about memory: the use of a rank, and the theoretical size of its weights and optimizer.

The theoretical size is computed by planner/memory/footprint.py; planner/memory/plan.py also plans the rest of a step.
"""

from __future__ import annotations

import torch

from megatron.core.device import MemoryReport, memory_report
from megatron.planner.memory.footprint import Footprint

MIB = 1024**2


def reserved_bytes(device: torch.device, report: MemoryReport) -> int:
    """Returns the bytes that the caching allocator holds now. The CPU has none: there it is the memory in use."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else report.allocated


def memory_line(rank: int, iterations: int, device: torch.device) -> str:
    """Returns Megatron-LM's memory line of this rank, now."""
    report = memory_report(device)
    return format_memory(rank, iterations, report, reserved_bytes(device, report))


def format_memory(rank: int, iterations: int, report: MemoryReport, reserved: int) -> str:
    """Formats Megatron-LM's memory line; figures in MB of 1024 x 1024 bytes."""
    figures = {
        "allocated": report.allocated,
        "max allocated": report.peak_allocated,
        "reserved": reserved,
        "max reserved": report.peak_reserved,
    }
    fields = " | ".join(f"{name}: {count / MIB:.2f}" for name, count in figures.items())
    return f"[Rank {rank}] (after {iterations} iterations) memory (MB) | {fields}"


def format_footprint(footprint: Footprint) -> str:
    """Formats Megatron-LM's line of the theoretical footprint, with its parts instead of an estimate of activations."""
    parts = {
        "weights": footprint.weights,
        "main gradients": footprint.main_gradients,
        "master weights": footprint.masters,
        "moments": footprint.moments,
    }
    listed = ", ".join(f"{name}={size / MIB:.2f}" for name, size in parts.items())
    return f"Theoretical memory footprints: weight and optimizer={footprint.total / MIB:.2f} MB ({listed})"
