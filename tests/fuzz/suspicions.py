"""Faults of one rank, and bad data of one replica, that a run notices by its numbers: it has to name the cause.

A gradient of one rank is wrong in one computation of a step, in all of them, or in each another way; an activation is
NaN; the tokens of a replica are garbage; or nothing is wrong. The model has learned data that can be predicted, so that
garbage gives a spiky loss. A run that goes on ends with the same weights as one without the fault.

By hand: `python -m tests.fuzz.suspicions --seed 1 --cases 100`. `python -m tests.fuzz.suspicions clean 2000` trains so
many steps without a fault, and prints the suspicions.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import random
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import VALIDATION_EXIT_CODE, ResultError
from megatron.base.log import LOGGER_NAME
from megatron.config.mesh import mesh_of
from megatron.config.run import RunConfig
from megatron.training.batch import Batch, BatchSource
from megatron.training.result_rule import STEPS
from megatron.training.setup import build
from megatron.training.trainer import Trainer
from tests import pool
from tests.fuzz.campaign import Campaign, Failure, main
from tests.fuzz.drift import EXPERTS, ZERO
from tests.unit.config.runs import SHORT_RUN, make_run

LEARNED, LAST = 12, 16  # the rule takes the losses of a few steps before LEARNED; faults are in later ones
TINY = {
    **SHORT_RUN,
    "num_layers": 2,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": LAST,
    "eval_iters": 0,
    "lr": 1e-2,
    "lr_decay_style": "constant",
}
CHECKS = {"check_for_spiky_loss": True, "check_for_large_grads": True}
TP = {"tensor_model_parallel_size": 2}
# layout -> (processes, fields, whether another replica can compute the microbatches of one)
LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "dp 2": (2, {}, True),
    "dp 4": (4, {}, True),
    "dp 2, dropout": (2, {"hidden_dropout": 0.1}, True),
    "dp 2, tp 2": (4, {**TP, "sequence_parallel": True}, True),
    "dp 2, pp 2": (4, {"pipeline_model_parallel_size": 2}, True),
    "dp 2, cp 2": (4, {"context_parallel_size": 2}, True),
    "dp 2, ep 2": (2, {**EXPERTS, "expert_model_parallel_size": 2}, False),
    "dp 4, ep 2": (4, {**EXPERTS, "expert_model_parallel_size": 2}, True),
    "dp 1, tp 2": (2, TP, False),
    "ZeRO-1, overlap": (2, {**ZERO, "overlap_grad_reduce": True, "overlap_param_gather": True}, True),
    "ZeRO-3": (2, {**ZERO, "data_parallel_sharding_strategy": "optim_grads_params"}, True),
    "CPU optimizer": (2, {**ZERO, "optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}, True),
    "FP8": (2, {"bf16": True, "fp8_format": "hybrid"}, True),
}
FAULTS = ("once", "always", "each time", "nan once", "nan always", "data", "data left out", "none")
TRANSIENT, PERSISTENT, UNSTABLE, REPRODUCED, CONFIRMED, QUIET = (
    "transient",
    "persistent",
    "unstable",
    "reproduced",
    "confirmed",
    "quiet",
)
MESSAGES = {
    TRANSIENT: "a transient fault of ",
    PERSISTENT: "a persistent fault of ",
    UNSTABLE: "computed other numbers each time",
    REPRODUCED: "computed the same",
    CONFIRMED: "another machine computed the same",
}


@dataclass(frozen=True)
class Case:
    """A fault in step `step` of rank `rank`, or of the data of its replica; `seed` chooses the element and the bit."""

    layout: str
    fault: str
    step: int
    rank: int
    seed: int


@dataclass
class Seen:
    """The end of a run, as a rank has seen it."""

    messages: list[str] = field(default_factory=list)
    code: int = 0
    digest: str = ""
    left_out: tuple[int, ...] = ()


def draw(rng: random.Random) -> Case:
    """Any fault under any layout."""
    layout = rng.choice(list(LAYOUTS))
    rank = rng.randrange(LAYOUTS[layout][0])
    return Case(layout, rng.choice(FAULTS), rng.randint(LEARNED + 1, LAST - 1), rank, rng.randrange(1 << 30))


def expected(case: Case) -> str:
    """The expected words of the run."""
    compares = LAYOUTS[case.layout][2]
    return {
        "once": TRANSIENT,
        "nan once": TRANSIENT,
        "always": PERSISTENT if compares else REPRODUCED,
        "nan always": PERSISTENT if compares else REPRODUCED,
        "each time": UNSTABLE,
        "data": CONFIRMED if compares else REPRODUCED,
        "data left out": CONFIRMED if compares else REPRODUCED,
        "none": QUIET,
    }[case.fault]


def check_case(case: Case, folder: Path) -> str:
    """Returns what the run said, which must be `expected` and name the rank or the iteration."""
    world, fields, _ = LAYOUTS[case.layout]
    skips = {"skip_spiky_iterations": True} if case.fault == "data left out" else {}
    run = make_run(**TINY | fields | CHECKS | skips)
    ranks: list[Seen] = pool.run(world, run_with_fault, run, case)
    first, word = ranks[0], expected(case)
    if any(seen.code != first.code for seen in ranks):
        raise Failure(f"ranks do not agree: {ranks}")
    text = " ".join(first.messages)
    if word == QUIET:
        if text:
            raise Failure(f"nothing is wrong, and was said: {text}")
        return word
    if MESSAGES[word] not in text or f"iteration {case.step}:" not in text:
        raise Failure(f"expected {word}, and was said: {text}")
    named = {int(number) for number in re.findall(r"rank (\d+) \(", text)}
    if not case.fault.startswith("data") and case.rank not in named:
        raise Failure(f"rank {case.rank} is not named: {text}")
    if case.fault in ("once", "always", "each time") and "dp" in case.layout and named != {case.rank}:
        raise Failure(f"others than rank {case.rank} are named: {text}")
    if first.code != (VALIDATION_EXIT_CODE if word in (PERSISTENT, UNSTABLE) else 0):
        raise Failure(f"exit code {first.code}: {text}")
    if first.left_out != ((case.step,) if case.fault == "data left out" else ()):
        raise Failure(f"left out were {first.left_out}")
    if word == TRANSIENT or case.fault == "data":
        plain = make_run(**TINY | fields)
        fault = case.fault if case.fault == "data" else "none"
        expected_ranks = pool.run(world, run_with_fault, plain, dataclasses.replace(case, fault=fault))
        if [seen.digest for seen in expected_ranks] != [seen.digest for seen in ranks]:
            raise Failure("the weights are not those of a run without the fault")
    return word


def run_with_fault(rank: int, size: int, run: RunConfig, case: Case) -> Seen:
    """Trains with the fault, until the run ends itself or to its end."""
    mesh = mesh_of(run.parallel, size)
    groups = pool.groups(tp=mesh.tp, pp=mesh.pp, cp=mesh.cp, ep=mesh.ep, etp=mesh.etp)
    trainer = build(run, groups, torch.device("cpu"))
    seen = Seen()
    handler = Messages(seen.messages)
    logger = logging.getLogger(LOGGER_NAME)
    logger.addHandler(handler)
    replica = groups.mesh.coordinates(case.rank)["dp"]
    assert trainer.readers.train is not None
    garbage = case.step if case.fault.startswith("data") and groups.dp.rank == replica else 0
    trainer.readers = dataclasses.replace(trainer.readers, train=Predictable(trainer.readers.train, garbage))
    if case.rank == rank:
        put_fault(trainer, case)
    trainer.model.train()
    try:
        while not trainer.finished:
            if trainer.state.iteration == LEARNED - 3:  # of the first steps the losses are large
                trainer.results.largest = (0.0,) * 3
            if trainer.state.iteration == LEARNED:
                trainer.results.steps = STEPS
            trainer.train_step()
    except ResultError as error:
        seen.code = error.exit_code
        seen.messages.append(str(error))
    finally:
        logger.removeHandler(handler)
        trainer.close()
    trainer.data_parallel.synchronize()
    content = b"".join(
        t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in trainer.data_parallel.storages()
    )
    seen.digest, seen.left_out = hashlib.sha256(content).hexdigest(), trainer.results.left_out
    return seen


class Messages(logging.Handler):
    """Keeps the warnings of a run that are about its numbers."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the line."""
        if record.getMessage().startswith("iteration"):
            self._messages.append(record.getMessage())


class Predictable:
    """Batches of one token, except in step `garbage`, where they are those of the source."""

    def __init__(self, source: BatchSource, garbage: int) -> None:
        self._source, self._garbage, self._step = source, garbage, 0

    def read(self, num_microbatches: int) -> list[Batch]:
        """The next microbatches."""
        self._step += 1
        batches = self._source.read(num_microbatches)
        return (
            batches
            if self._step == self._garbage
            else [
                dataclasses.replace(batch, tokens=torch.ones_like(batch.tokens), labels=torch.ones_like(batch.labels))
                for batch in batches
            ]
        )

    def read_ahead(self, num_microbatches: int) -> None:
        """See BatchSource."""
        self._source.read_ahead(num_microbatches)

    def close(self) -> None:
        """See BatchSource."""
        self._source.close()


def put_fault(trainer: Trainer, case: Case) -> None:
    """Puts the fault of this rank into its gradients, or into an activation."""
    kind, step, rng = case.fault, trainer.step, random.Random(case.seed)
    computations = [0]  # of the step with the fault, and then of all that follow
    plain, observe = step.forward_backward, trainer.data_parallel.before_reduce

    def forward_backward(*arguments: Any) -> Any:
        computations[0] += trainer.state.iteration + 1 >= case.step
        ready[0] = computations[0] > 0 and (computations[0] == 1 or not kind.endswith("once"))
        return plain(*arguments)

    ready = [False]
    step.forward_backward = forward_backward  # type: ignore[method-assign]
    place, stuck = rng.random(), rng.choice((0.0, 1e4))

    def before_reduce(gradients: Tensor) -> None:
        places = gradients.nonzero().flatten()
        if ready[0] and len(places):
            ready[0] = False
            index = places[int(place * len(places))]
            if kind == "each time" or stuck:
                gradients[index] = stuck if kind != "each time" else 10.0 ** rng.uniform(4, 6)
            else:
                gradients.view(torch.int32)[index] ^= 1 << 30  # the highest of the exponent
        assert observe is not None
        observe(gradients)

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        if ready[0]:
            ready[0] = False
            output = output.clone()
            output.view(-1)[int(place * output.numel())] = torch.nan
        return output

    if kind.startswith("nan"):
        next(iter(trainer.model.decoder.layers.values())).mlp.register_forward_hook(spoil)
    elif kind in ("once", "always", "each time"):
        trainer.data_parallel.before_reduce = before_reduce


def simpler(case: Case) -> Iterable[Case]:
    """Nothing: a case is one fault."""
    return ()


def train_clean(rank: int, size: int, steps: int) -> list[str]:
    """Trains without a fault, on data that cannot be predicted; returns the suspicions."""
    run = make_run(**TINY | CHECKS | {"train_iters": steps, "lr": 1e-3, "hidden_dropout": 0.1})
    trainer, messages = build(run, pool.groups(), torch.device("cpu")), list[str]()
    handler = Messages(messages)
    logging.getLogger(LOGGER_NAME).addHandler(handler)
    trainer.model.train()
    while not trainer.finished:
        trainer.train_step()
    logging.getLogger(LOGGER_NAME).removeHandler(handler)
    return messages


def show(case: Case) -> None:
    """Runs a case and prints its outcome."""
    print(check_case(case, Path(".")))


CAMPAIGN = Campaign(
    "suspicions",
    draw,
    check_case,
    simpler,
    lambda case: f'python -c "from tests.fuzz.suspicions import *; show({case!r})"',
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["clean"]:
        found = pool.run(2, functools.partial(train_clean, steps=int(sys.argv[2])), timeout=600.0)
        print(f"{sys.argv[2]} steps on 2 ranks, {len(found[0])} suspicions", *found[0], sep="\n")
    else:
        main(CAMPAIGN)
