"""Suspicious steps of one process, where no other replica can compute them, and the price of looking for them."""

import collections
import logging
import random
import socket

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.base.errors import RESUME_EXIT_CODE, VALIDATION_EXIT_CODE, ResultError
from megatron.core.dist_checkpointing.folders import find
from megatron.tooling.host_reads import host_reads
from megatron.training.callbacks import Checkpoint, Exit
from megatron.training.loop import fit
from megatron.training.result_rule import STEPS
from megatron.training.signals import StopRelay
from tests import pool
from tests.unit.training.test_late_numbers import DENSE, NEVER, digest, made

CHECKS = {"check_for_spiky_loss": True, "check_for_large_grads": True}
RATE = 4


def injected(kind, **changes):
    return {**DENSE, "error_injection_rate": RATE, "error_injection_type": kind, **changes}


def iterations(rank=0, last=6):
    return [i for i in range(1, last + 1) if random.Random(f"1234 {i} {rank}").randrange(RATE) == 0]


def trained(fields):
    trainer = made(fields)
    fit(trainer, [Checkpoint(NEVER, lambda trainer: None)])
    return trainer


def ended(fields):
    """The error with which a run ends."""
    with pytest.raises(ResultError) as caught:
        trained(fields)
    return caught.value


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def test_injected_errors_of_one_computation(warnings):
    trainer = trained(injected("transient_error"))
    assert digest(trainer) == digest(trained(DENSE))
    faults = [text for text in warnings() if "a transient fault of rank 0" in text]
    assert [int(text.split()[1][:-1]) for text in faults] == iterations() and iterations()


def test_injected_errors_of_the_data(warnings):
    """Without --save nothing can be asked from another machine: the run goes on. Of two in a row one is computed
    again."""
    trainer = trained(injected("correct_result", error_injection_rate=1))
    assert digest(trainer) == digest(trained(DENSE))
    texts = warnings()
    assert "rank 0" in texts[0] and "computed the same loss again (inf)" in texts[1] and len(texts) == 2 + 5
    assert all(text.endswith("not finite, too") for text in texts[2:])


@pytest.mark.parametrize("kind", ["correct_result", "persistent_error"])
def test_a_restart_on_another_machine_answers(kind, tmp_path, monkeypatch, warnings):
    first = iterations()[0]
    saving = injected(kind, save=str(tmp_path), load=str(tmp_path))
    error = ended(saving)
    assert error.exit_code == RESUME_EXIT_CODE and f"iteration {first}: rank 0 ({socket.gethostname()})" in str(error)
    assert find(tmp_path, None).name == f"iter_{first - 1:07d}"
    again = ended(saving)
    assert again.exit_code == RESUME_EXIT_CODE and f"is on {socket.gethostname()} again" in str(again)
    home = socket.gethostname()
    monkeypatch.setattr(socket, "gethostname", lambda: "node-2")
    if kind == "persistent_error":
        fault = ended(saving)
        assert fault.exit_code == VALIDATION_EXIT_CODE and f"iteration {first}: {home} is at fault" in str(fault)
    else:
        later = ended(saving)  # the next step with an injected error that does not follow another one
        assert later.exit_code == RESUME_EXIT_CODE and f"iteration {iterations()[-1]}: rank 0 (node-2)" in str(later)
        assert any(f"iteration {first}: node-2 computed the same as {home}" in text for text in warnings())
    trainer = trained({**saving, "error_injection_rate": 0})
    assert digest(trainer) == digest(trained(DENSE))


def test_determinism_is_reported(caplog):
    caplog.set_level(logging.INFO)
    trainer = trained({**DENSE, "rerun_mode": "report_stats", "hidden_dropout": 0.1, "log_interval": 3})
    reports = [record.getMessage() for record in caplog.records if "determinism" in record.getMessage()]
    assert len(reports) == 2 and reports[0].startswith(
        "determinism of 3 steps that were computed twice | loss: 3 equal"
    )
    assert trainer.results.noise == (0.0, 0.0, 0.0)
    assert digest(trainer) == digest(trained({**DENSE, "hidden_dropout": 0.1}))


def test_late_numbers_are_reported(warnings):
    """With --rerun-mode disabled the step is applied, and the warning comes one step later."""
    trainer = made({**DENSE, **CHECKS, "rerun_mode": "disabled"})
    trainer.train_step()
    trainer.results.steps, trainer.results.largest = STEPS, (0.1, 1e-3, 1e3)
    trainer.train_step()
    found = warnings()
    assert ["loss of rank 0" in found[0], "gradient norm of rank 0" in found[1], len(found)] == [True, True, 2]
    assert trainer.state.schedule_position == 2


def test_a_diverged_run_that_leaves_steps_out_ends():
    trainer = made({**DENSE, **CHECKS, "skip_spiky_iterations": True, "max_consecutive_nan_iterations": 3})
    trainer.train_step()
    trainer.results.steps, trainer.results.largest = STEPS, (1e-3, 1e3, 1e3)
    before = digest(trainer)
    with pytest.raises(ResultError, match="iteration 5: 3 iterations in a row were left out"):
        fit(trainer, [])
    assert trainer.results.left_out == (2, 3, 4) and digest(trainer) == before
    assert trainer.state.consumed_samples == 4 * 4 and trainer.state.skipped_iterations == 3


def test_a_continued_run_leaves_out_the_same(tmp_path):
    """Also those that are still to come, unless its command line says otherwise."""
    whole = trained({**DENSE, "iterations_to_skip": (2, 5)})
    saving = {**DENSE, "save": str(tmp_path), "load": str(tmp_path)}
    stop = Exit(NEVER, StopRelay(NEVER, pool.groups().heartbeat))
    trainer = made({**saving, "iterations_to_skip": (2, 5), "exit_interval": 3})
    fit(trainer, [Checkpoint(NEVER, lambda trainer: None), stop])
    assert trainer.state.iteration == 3
    resumed = made(saving)
    assert resumed.results.left_out == (2, 5)
    other = made({**saving, "iterations_to_skip": (6,)})
    assert other.results.left_out == (2, 6)
    fit(resumed, [])
    assert digest(resumed) == digest(whole) and resumed.state.skipped_iterations == 2


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def price(fields):
    """(operations beside sums of squares, tensors whose squares are summed, host reads, the trainer) of a step."""
    trainer, summed, nothing = made({**DENSE, **fields}), [], torch.zeros((), dtype=torch.float64)
    for _ in range(2):
        trainer.queue_step()
    if trainer.result_check is not None:
        trainer.result_check._results._square_sum = lambda x: (summed.append(x), nothing)[1]
    with Operations() as operations, host_reads() as reads:
        trainer.queue_step()
    return sum(operations.counts.values()), summed, len(reads), trainer


def test_the_price_of_a_step_is_counted():
    """The table of docs/logging.md."""
    plain, _, reads, _ = price({})
    late, _, late_reads, _ = price({**CHECKS, "rerun_mode": "disabled"})
    examined, summed, examined_reads, trainer = price(CHECKS)
    assert (late - plain, examined - plain) == (19, 20)
    assert (reads, late_reads, examined_reads) == (1, 1, 2)
    buckets = trainer.data_parallel.buckets
    assert sum(x.nbytes for x in summed) == sum(bucket.grads.nbytes + bucket.grad_shard.nbytes for bucket in buckets)
    assert len(summed) == 2 * len(buckets)


def communication(rank, size):
    """Collectives of a step on rank 0, as (name, group, elements)."""
    calls = []
    for fields in ({}, CHECKS):
        trainer = made({**DENSE, **fields})
        trainer.queue_step()
        with trainer.groups.heartbeat.record() as recorded:
            trainer.queue_step()
        calls.append([(call.op, call.group, call.shape) for call in recorded])
    return calls


def test_a_step_has_one_more_collective():
    plain, examined = map(collections.Counter, pool.run(2, communication)[0])
    assert list((examined - plain).elements()) == [("all_gather", "world", (1, 3))] and not plain - examined
