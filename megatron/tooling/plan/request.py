"""The question of a search: the run without its layout, the cluster, and the words of the command line that stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.base.errors import ConfigError
from megatron.command_line.read import parse, words_without
from megatron.config.batch_schedule import BatchSchedule
from megatron.config.rules.ranges import numbers_are_in_range, values_are_known
from megatron.config.run import RunConfig
from megatron.planner.search.layout import FIELDS
from megatron.planner.search.search import Planner
from megatron.planner.time.hardware import Cluster
from megatron.planner.time.software import Software
from megatron.tooling.plan.machine import PlannedMachine
from megatron.tooling.plan.run import check_shape, software_of, with_vocabulary

MOCK_STEPS = 100  # of a command whose length nobody gave


@dataclass(frozen=True)
class SearchRequest:
    """The question of a search.

    run: the run with its vocabulary. flags: the flags as typed. added: flags that a run needs and nobody typed. words:
    both, without the flags that a layout sets. tokens: the tokens of the whole training, None if its length was not
    given. free: the part of a device's memory that a layout leaves free.
    """

    run: RunConfig
    world_size: int
    machine: PlannedMachine
    software: Software
    flags: tuple[str, ...]
    words: tuple[str, ...]
    added: tuple[str, ...]
    tokens: float | None
    free: float

    @property
    def cluster(self) -> Cluster:
        """The cluster of the machine."""
        return self.machine.cluster

    def planner(self, world_size: int) -> Planner:
        """Returns what plans the run on so many ranks, however many devices there are. Raises ConfigError."""
        cluster = self.cluster if world_size == self.world_size else dataclasses.replace(self.cluster, nodes=None)
        return Planner(
            self.run, world_size, cluster, self.software, self.machine.clock(self.run, self.software), self.free
        )


def request_of(
    flags: Sequence[str], machine: PlannedMachine, world_size: int | None, tokens: float | None, free: float
) -> SearchRequest:
    """Returns the question that these flags ask. Raises UserErrors.

    world_size: None for all devices of the machine. tokens: the tokens of the whole training; None to take them from
    the run's length. free: the part of a device's memory that a layout leaves free.
    """
    description = "The layouts of the run with these flags."
    run = parse(flags, description=description)
    broken = values_are_known(run), numbers_are_in_range(run)
    if any(broken):
        raise ConfigError(*filter(None, broken))
    check_shape(run)
    ranks = world_of(machine.cluster, machine.world_size if world_size is None else world_size)
    added = _missing(run, tokens)
    if run.data.seq_length is None:
        raise ConfigError("layouts are compared at one sequence length, which is missing; give --seq-length")
    if run.train.global_batch_size is None and run.train.step_batch_size_schedule is None:
        raise ConfigError("layouts are compared at one batch, which is missing; give --global-batch-size")
    run = with_vocabulary(parse([*flags, *added], description=description))
    if tokens is None and not {"--train-iters", "--train-samples"} & set(added):
        tokens = float(_samples(run) * (run.data.seq_length or 0)) or None
    return SearchRequest(
        run,
        ranks,
        machine,
        software_of(run),
        tuple(flags),
        (*words_without(flags, FIELDS), *added),
        added,
        tokens,
        free,
    )


def world_of(cluster: Cluster, world_size: int | None) -> int:
    """Returns the number of ranks. Raises ConfigError.

    They fill whole nodes, or a part of one: a layout that leaves devices of its nodes idle is not planned.
    """
    node = cluster.node
    if world_size is None:
        raise ConfigError(
            f"--cluster {cluster.device.name} does not say how many nodes there are; give "
            f"{cluster.device.name}:NODESx{node}, or --world-size"
        )
    cluster.check(world_size)
    if world_size > node and world_size % node:
        raise ConfigError(
            f"--world-size {world_size} does not fill nodes of {node} {cluster.device.name}; give "
            f"{world_size // node * node} or {(world_size // node + 1) * node}"
        )
    return world_size


def _missing(run: RunConfig, tokens: float | None) -> tuple[str, ...]:
    """Words for flags without which no run starts, and that do not matter to its layout."""
    words: list[str] = []
    model, data, train = run.model, run.data, run.train
    if not (model.bf16 or model.fp16) and run.parallel.device != "cpu":
        words.append("--bf16")
    if train.train_iters is None and train.train_samples is None:
        whole = tokens is not None and data.seq_length is not None
        words += ["--train-samples", str(round((tokens or 0) / (data.seq_length or 1)))] if whole else []
        words += [] if whole else ["--train-iters", str(MOCK_STEPS)]
    if run.schedule.lr is None:
        words += ["--lr", "1e-4"]
    if not data.mock_data and data.data_path is None and data.train_data_path is None:
        words.append("--mock-data")
    if run.tokenizer.tokenizer_type is None and model.vocab_size is not None:
        words += ["--tokenizer-type", "NullTokenizer"]
    return tuple(words)


def _samples(run: RunConfig) -> int:
    """Returns the samples of the whole training, which do not depend on the layout."""
    return BatchSchedule(dataclasses.replace(run.train, micro_batch_size=1), 1, run.data.seq_length).total_samples
