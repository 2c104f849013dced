"""The host reads the numbers of a step once, when the next step is under way; nothing else depends on when it reads."""

import hashlib
import math

import pytest
import torch

from megatron.base.errors import TrainingError
from megatron.tooling.host_reads import host_reads
from megatron.training.callbacks import Checkpoint, Exit
from megatron.training.expert_load import ExpertLoad
from megatron.training.loop import Callback, fit
from megatron.training.not_finite import NotFinite
from megatron.training.setup import build
from megatron.training.signals import ExitSignals, StopRelay, StopRequest
from tests import pool
from tests.unit.config.runs import SHORT_RUN, make_run
from tests.unit.models.builds import CPU

DENSE = {
    **SHORT_RUN,
    "num_layers": 1,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 6,
    "eval_iters": 0,
    "clip_grad": 1.0,
}
EXPERTS = {
    **DENSE,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": (0.01,),
}
# The scale of the first steps is too large.
OVERFLOWS = {"fp16": True, "initial_loss_scale": 2.0**19, "hysteresis": 1}
NEVER = StopRequest(ExitSignals(enabled=False), None, 0.0, 0)


def made(fields, *, late=True):
    trainer = build(make_run(**fields), pool.groups(), CPU)
    trainer.reads_late = late
    return trainer


class Recorder(Callback):
    """What `after_step` is told, with the number of the last step that was queued by then."""

    def __init__(self, due=()):
        self._due, self.found = due, []

    def is_due(self, trainer):
        return trainer.state.iteration in self._due

    def after_step(self, trainer, report):
        self.found.append((trainer.state.iteration, report))


def seen(report):
    """All but times, as text, in which NaN equals NaN."""
    return repr({name: value for name, value in vars(report).items() if name not in ("seconds", "timers")})


def digest(trainer):
    found = hashlib.sha256()
    for tensors in ((p.detach() for p in trainer.model.parameters()), (t for _, _, t in trainer.optimizer.pieces())):
        for tensor in tensors:
            found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(
    "fields",
    [{"bf16": True}, {"fp16": True}, {"fp16": True, "loss_scale": 8.0}, {}],
    ids=["bf16", "fp16", "fixed", "fp32"],
)
def test_one_read_per_step(fields):
    """With clipping, and with everything else that a log line may show."""
    trainer = made({**DENSE, **fields, "log_params_norm": True, "log_num_zeros_in_grad": True})
    trainer.stop_wanted = lambda: False
    trainer.queue_step()
    for _ in range(2):
        with host_reads() as reads:
            trainer.queue_step()
        assert [read.partition(":")[0] for read in reads] == ["core/streams/host_copy.py"], reads


def test_experts_read_the_rows_of_each_exchange():
    """Once more per layer and microbatch: buffers and kernels depend on the number of rows."""
    trainer = made({**EXPERTS, "num_layers": 2, "bf16": True})
    trainer.queue_step()
    with host_reads() as reads:
        trainer.queue_step()
    layers, microbatches = 2, 2
    assert len(reads) == 1 + layers * microbatches, reads


@pytest.mark.parametrize(
    "read",
    [
        lambda router: router.expert_bias.sum().item(),
        lambda router: bool(router.expert_bias.sum() > 0),
        lambda router: router.expert_bias.tolist(),
        lambda router: router.expert_bias.cpu(),
        lambda router: router.expert_bias[router.expert_bias > 0],
        lambda router: router.expert_bias.nonzero(),
    ],
)
def test_every_kind_of_read_is_found(read, monkeypatch):
    """In the code of the package; here in that of experts."""
    trainer = made({**EXPERTS, "bf16": True})
    plain = ExpertLoad._follow

    def follow(self, router, counts, applied):
        plain(self, router, counts, applied)
        read(router)

    trainer.queue_step()
    with host_reads() as before:
        trainer.queue_step()
    monkeypatch.setattr(ExpertLoad, "_follow", follow)
    with host_reads() as reads:
        trainer.queue_step()
    assert len(reads) == len(before) + 1, reads


@pytest.mark.parametrize(
    "fields",
    [
        {**DENSE, "bf16": True, "iterations_to_skip": (3,)},
        {**DENSE, **OVERFLOWS},
        {**DENSE, **OVERFLOWS, "train_iters": None, "train_samples": 24, "lr_decay_style": "linear"},
        {**EXPERTS, **OVERFLOWS, "initial_loss_scale": 2.0**21},
        {**DENSE, **OVERFLOWS, "optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
    ],
    ids=["bf16", "fp16", "samples", "experts", "CPU optimizer"],
)
def test_the_same_run_late_and_at_once(fields):
    """Reports and weights, to the last bit; steps are skipped on the way."""
    runs = []
    for late in (False, True):
        trainer, recorder = made(fields, late=late), Recorder()
        assert fit(trainer, [recorder]) is None
        runs.append(([seen(report) for _, report in recorder.found], vars(trainer.state), digest(trainer)))
    assert runs[0] == runs[1]
    reports, state, _ = runs[0]
    assert len(reports) == 6 and 0 < state["skipped_iterations"] < 6
    assert state["schedule_position"] == (6 - state["skipped_iterations"]) * (4 if "train_samples" in fields else 1)


def test_when_reports_come():
    """When the next step is queued; at once where a callback is due, and at the end."""
    recorder = Recorder(due=(3,))
    fit(made(DENSE), [recorder])
    assert [(queued, report.iteration) for queued, report in recorder.found] == [
        (2, 1), (3, 2), (3, 3), (5, 4), (6, 5), (6, 6)
    ]  # fmt: skip
    times = [report.seconds for _, report in recorder.found]
    assert all(seconds > 0 for seconds in times)


def test_a_checkpoint_holds_the_state_of_its_step(tmp_path):
    """The same files, whose bytes are those of a run that reads at once."""
    found = []
    for late in (False, True):
        folder = tmp_path / str(late)
        trainer = made({**DENSE, **OVERFLOWS, "save": str(tmp_path / "run"), "save_interval": 2}, late=late)
        fit(trainer, [Checkpoint(NEVER, lambda trainer: None)])
        (tmp_path / "run").rename(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        found.append({path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in files})
    assert len(found[0]) > 3 and found[0] == found[1]


@pytest.mark.parametrize(("late", "stops_after"), [(False, 2), (True, 3)])
def test_a_signal_is_seen_one_step_late(late, stops_after):
    """It arrives before the second step ends."""

    class Signals(ExitSignals):
        received = None

    signals, trainer = Signals(enabled=False), made({**DENSE, "exit_signal_handler": True}, late=late)
    stop = StopRequest(signals, None, 0.0, 0)
    trainer.stop_wanted = lambda: stop.wanted is not None
    queue, recorder, relay = trainer.queue_step, Recorder(), StopRelay(stop, trainer.groups.heartbeat)

    def with_signal():
        if trainer.state.iteration == 1:
            signals.received = "SIGTERM"
        queue()

    trainer.queue_step = with_signal
    assert fit(trainer, [recorder, Exit(stop, relay)]) == "SIGTERM to rank 0"
    assert trainer.state.iteration == stops_after
    assert [report.iteration for _, report in recorder.found] == list(range(1, stops_after + 1))


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_the_step_that_is_not_finite_is_named(tmp_path, late, limit):
    """With its tensor, before anything is saved, and before a step more is taken."""
    fields = {**DENSE, "max_consecutive_nan_iterations": limit, "save": str(tmp_path / "run"), "save_interval": 1}
    trainer = made(fields, late=late)
    queue = trainer.queue_step

    def with_nan():
        if trainer.state.iteration == 2:
            next(iter(trainer.parameters.values())).detach().fill_(math.nan)
        queue()

    trainer.queue_step = with_nan
    with pytest.raises(TrainingError, match=f"the last one {2 + limit}: weight .*is not finite"):
        fit(trainer, [Checkpoint(NEVER, lambda trainer: None), NotFinite()])
    assert trainer.state.iteration == 2 + limit
    assert max(path.name for path in (tmp_path / "run").glob("iter_*")) == "iter_0000002"


def test_an_error_of_reading_ahead_waits_for_its_step():
    """The step before is complete, and its report comes."""
    trainer, recorder = made(DENSE), Recorder(due=(1, 2))
    reader = trainer.readers.train
    plain, taken = reader._next, []

    def fails_at_the_third_step():
        taken.append(0)
        if len(taken) > 4:  # two microbatches per step
            raise OSError("the disk is gone")
        return plain()

    reader._next = fails_at_the_third_step
    with pytest.raises(OSError, match="the disk is gone"):
        fit(trainer, [recorder])
    assert [report.iteration for _, report in recorder.found] == [1, 2]
