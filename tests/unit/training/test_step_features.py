"""The features of a run's steps begin before the first forward and end after the last backward, in one order."""

import dataclasses

import torch

from megatron.training.setup import build
from megatron.training.step_features import NO_FEATURES, StepFeatures
from tests import pool
from tests.unit.config.runs import SHORT_RUN, make_run
from tests.unit.models.builds import CPU


class Recorded:
    """A feature that writes its calls to a log."""

    in_schedule, actions = False, None

    def __init__(self, name, log):
        self.name, self.log, self.routings = name, log, None

    def begin_step(self, schedule, microbatches):
        self.log.append(("begin", self.name, len(schedule.actions), len(microbatches.local)))

    def end_step(self):
        self.log.append(("end", self.name))

    def take(self, routing, layers):
        raise AssertionError("a dense model has no routing")


def test_a_run_without_features_has_no_parts():
    assert NO_FEATURES.parts == () and NO_FEATURES.offload_actions is None and not NO_FEATURES.offloads_by_schedule


def test_parts_begin_and_end_around_the_computation():
    trainer, log = build(make_run(**{**SHORT_RUN, "num_layers": 1}), pool.groups(), CPU), []
    assert trainer.step.features == NO_FEATURES
    names = ("experts", "graphs", "fp8")
    trainer.step.features = StepFeatures(**{name: Recorded(name, log) for name in names})
    forward = trainer.model.forward
    trainer.model.forward = lambda *args, **options: (log.append(("forward",)), forward(*args, **options))[1]
    weight = trainer.parameters["decoder.layers.0.self_attention.linear_proj.weight"]
    weight.register_hook(lambda grad: log.append(("backward",)))
    batches = trainer.readers.train.read(2)
    trainer.step.forward_backward(batches)
    begun = [("begin", name, 1, 2) for name in ("fp8", "graphs", "experts")]
    ended = [("end", name) for name in ("fp8", "graphs", "experts")]
    assert log[:3] == begun and log[-3:] == ended
    assert log[3:-3] == [("forward",), ("backward",)] * 2


def test_microbatches_carry_weights_times_the_loss_scale():
    """The weights of all tokens add up to the loss scale, whatever the mask."""
    seen = []

    class Seen(Recorded):
        def begin_step(self, schedule, microbatches):
            seen.append(microbatches)

    trainer = build(
        make_run(**{**SHORT_RUN, "num_layers": 1, "fp16": True, "initial_loss_scale": 64.0}), pool.groups(), CPU
    )
    trainer.step.features = dataclasses.replace(NO_FEATURES, fp8=Seen("fp8", []))
    batches = trainer.readers.train.read(2)
    trainer.step.forward_backward(batches)
    (microbatches,) = seen
    assert microbatches.loss_scale.item() == 64.0 and list(microbatches.whole) == list(batches)
    total = torch.stack([targets.weights.sum() for (targets,) in microbatches.targets]).sum()
    assert total.item() == 64.0
