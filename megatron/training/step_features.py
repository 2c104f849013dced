"""The optional features of a run that take part in its training steps, and their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron.core.offload.activations import ActivationOffload
from megatron.schedule.schedule import Schedule
from megatron.training.expert_load import ExpertLoad
from megatron.training.fp8 import Fp8Layers
from megatron.training.graphs import StepGraphs
from megatron.training.microbatches import Microbatches
from megatron.training.offload import StepOffload


class StepPart(Protocol):
    """A feature that does something before the first forward of every training step, and after its last backward."""

    def begin_step(self, schedule: Schedule, microbatches: Microbatches) -> None:
        """Prepares a step. schedule: the one that this step runs."""
        ...

    def end_step(self) -> None:
        """Finishes a step. Its gradients may still be being reduced."""
        ...


@dataclass(frozen=True)
class StepFeatures:
    """The features that this rank's steps have; None for a feature that the run does not have."""

    fp8: Fp8Layers | None = None
    graphs: StepGraphs | None = None
    offload: StepOffload | None = None  # of activations
    experts: ExpertLoad | None = None

    @property
    def parts(self) -> tuple[StepPart, ...]:
        """The features of this run, in the order in which they begin and end a step."""
        # A capture of graphs runs the layers, so FP8 layers have forgotten the weights of the step before by then. It
        # also allocates memory, so it comes before the features that hold tensors of this step.
        features: tuple[StepPart | None, ...] = (self.fp8, self.graphs, self.offload, self.experts)
        return tuple(feature for feature in features if feature is not None)

    @property
    def offloads_by_schedule(self) -> bool:
        """Whether the schedule of the next step holds offload actions."""
        return self.offload is not None and self.offload.in_schedule

    @property
    def offload_actions(self) -> ActivationOffload | None:
        """The offload and reload of a microbatch's activations, as a schedule asks for them."""
        return None if self.offload is None else self.offload.actions


NO_FEATURES = StepFeatures()
