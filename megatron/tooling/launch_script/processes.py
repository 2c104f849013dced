"""Counts the processes that a launch command starts, by its launcher (_OPTIONS) and #SBATCH lines. No torch."""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Iterable, Mapping, Sequence

from megatron.tooling.launch_script.shell.scope import Array
from megatron.tooling.launch_script.shell.unknown import is_known

# The options of a launcher that set the number of processes: (per node, nodes, total).
_OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "torchrun": (("--nproc_per_node", "--nproc-per-node"), ("--nnodes",), ()),
    "deepspeed": (("--num_gpus",), ("--num_nodes",), ()),
    "accelerate": ((), (), ("--num_processes", "--num-processes")),
    "msrun": (("--local_worker_num",), (), ("--worker_num",)),
    "srun": (("--ntasks-per-node",), ("--nodes", "-N"), ("--ntasks", "-n")),
    "mpirun": (("--npernode", "-npernode"), (), ("-np", "--np", "-n", "--n")),
}
_NAMES = {"mpiexec": "mpirun", "orterun": "mpirun", "horovodrun": "mpirun"}
_MODULES = {"torch.distributed.launch", "torch.distributed.run"}
_DIRECTIVE = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)


def world_size(launcher: Sequence[str], variables: Mapping[str, str | Array]) -> int | None:
    """Returns the number of processes of a command, with the words before the program and the variables at that point.

    The innermost launcher counts: in `srun torchrun`, where srun starts one process per node, that is torchrun. A
    command without a launcher has WORLD_SIZE processes if the script sets that, and otherwise one. Returns None if the
    numbers are unknown, or if there is nothing but the program's name.
    """
    for at in reversed(range(len(launcher))):
        word = os.path.basename(launcher[at])
        name = "torchrun" if word in _MODULES else _NAMES.get(word, word)
        if name in _OPTIONS:
            return _count(name, launcher[at + 1 :], variables)
    world = variables.get("WORLD_SIZE")
    if world is not None:
        return _number(world) if isinstance(world, str) else None
    # An unknown word may be a launcher.
    return 1 if launcher and all(map(is_known, launcher)) else None


def elastic_world_sizes(launcher: Sequence[str]) -> dict[int, int]:
    """Returns the number of nodes -> of processes for each size of `torchrun --nnodes MIN:MAX`, with its words.

    Empty for a fixed or unknown number of nodes, and where the processes of a node are unknown.
    """
    if not any(os.path.basename(word) == "torchrun" or word in _MODULES for word in launcher):
        return {}
    per_node, nodes, _ = (_option(launcher, options) for options in _OPTIONS["torchrun"])
    match, each = re.fullmatch(r"(\d+):(\d+)", nodes or ""), _number(per_node or "1")
    if match is None or each is None:
        return {}
    return {count: count * each for count in range(max(1, int(match[1])), int(match[2]) + 1)}


def job_variables(text: str, options: Sequence[str], variables: Mapping[str, str | Array]) -> dict[str, str | Array]:
    """Returns the variables of a script that `sbatch OPTIONS` submits, from those of the caller and of --export."""
    exported = _option(options, ("--export",))
    names = ["ALL"] if exported is None else exported.split(",")
    passed = {name: value for name, value in variables.items() if "ALL" in names or name in names}
    return passed | dict(name.split("=", 1) for name in names if "=" in name) | slurm_variables(text, options)


def slurm_variables(text: str, options: Sequence[str] = ()) -> dict[str, str]:
    """Returns the variables that SLURM sets for a script: by its #SBATCH lines and the options of sbatch, which win."""
    words = [word for line in _DIRECTIVE.findall(text) for word in line.split(" #")[0].split()]
    words += options
    nodes = _option(words, ("--nodes", "-N"))
    tasks = _option(words, ("--ntasks-per-node",))
    gpus = _option(words, ("--gpus-per-node",)) or _option(words, ("--gres",))
    every = _option(words, ("--ntasks", "-n"))
    counts = {
        "SLURM_NNODES": _number(nodes),
        "SLURM_NTASKS_PER_NODE": _number(tasks),
        "SLURM_GPUS_PER_NODE": _number(gpus and gpus.split(":")[-1]),
        "SLURM_CPUS_PER_TASK": _number(_option(words, ("--cpus-per-task", "-c"))),
        "SLURM_NTASKS": _number(every),
    }
    if counts["SLURM_NTASKS"] is None and counts["SLURM_NNODES"] is not None:
        counts["SLURM_NTASKS"] = counts["SLURM_NNODES"] * (counts["SLURM_NTASKS_PER_NODE"] or 1)
    counts["SLURM_NPROCS"] = counts["SLURM_NTASKS"]
    counts["SLURM_JOB_NUM_NODES"] = counts["SLURM_NNODES"]
    counts["SLURM_GPUS_ON_NODE"] = counts["SLURM_GPUS_PER_NODE"]
    return {name: str(count) for name, count in counts.items() if count is not None}


def _count(name: str, words: Sequence[str], variables: Mapping[str, str | Array]) -> int | None:
    per_node, nodes, together = (_option(words, options) for options in _OPTIONS[name])
    if together is not None:
        return _number(together)
    if name == "srun":
        if nodes is None and per_node is None:
            tasks = variables.get("SLURM_NTASKS")
            return _number(tasks) if isinstance(tasks, str) else None
        nodes = nodes or _text(variables.get("SLURM_NNODES"))
        per_node = per_node or _text(variables.get("SLURM_NTASKS_PER_NODE")) or "1"
    elif name == "torchrun":
        nodes, per_node = nodes or "1", per_node or "1"
    elif name == "deepspeed":
        nodes = nodes or "1"
    return _product((nodes, per_node))


def _product(texts: Iterable[str | None]) -> int | None:
    numbers = [_number(text) for text in texts]
    factors = [number for number in numbers if number is not None]
    return math.prod(factors) if len(factors) == len(numbers) else None


def _option(words: Sequence[str], names: tuple[str, ...]) -> str | None:
    """Returns the last value of an option, as `--name value`, `--name=value` or, for one letter, `-nvalue`."""
    value = None
    for at, word in enumerate(words):
        name, equals, inline = word.partition("=")
        short = next(
            (option for option in names if len(option) == 2 and re.fullmatch(re.escape(option) + r"\d+", word)), None
        )
        if name in names:
            value = inline if equals else next(iter(words[at + 1 : at + 2]), None)
        elif short:
            value = word[len(short) :]
    return value


def _number(text: str | None) -> int | None:
    """Returns a positive number; "2:2", torchrun's least and most nodes, is 2, and a range is unknown."""
    match = re.fullmatch(r"\s*(\d+)(?::(\d+))?\s*", text or "")
    if match is None or match[2] not in (None, match[1]) or int(match[1]) == 0:
        return None
    return int(match[1])


def _text(value: str | Array | None) -> str | None:
    return value if isinstance(value, str) else None
