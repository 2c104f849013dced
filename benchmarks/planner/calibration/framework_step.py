"""The step of a run in another framework: the planner's model with that framework's operations, sums and kernels."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from benchmarks.planner.calibration.framework import FLASH_1, FLASH_3, TORCH, Framework
from benchmarks.planner.calibration.framework_replicas import FrameworkReplicas
from benchmarks.planner.calibration.framework_work import PLAIN, as_framework
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.time.constants import Constants, Number
from megatron.planner.time.data_sheet import DataSheetClock
from megatron.planner.time.hardware import Cluster
from megatron.planner.time.kernels import attention_rate, attention_seconds
from megatron.planner.time.operations import Computation, FusedAttention, LayerWork, Traffic
from megatron.planner.time.step_time import StepModel


class FrameworkStep(StepModel):
    """The step of a run in another framework. Raises ConfigError as StepModel does."""

    def __init__(self, run: RunConfig, settings: RunSettings, cluster: Cluster, framework: Framework) -> None:
        super().__init__(run, settings, cluster, framework.software)
        self.cluster, self.framework = cluster, framework
        self.work = as_framework(self.work, run.recompute, framework)
        ours = self.replicas
        self.replicas = FrameworkReplicas(
            dataclasses.replace(ours.settings, reduce_in_bf16=ours.settings.reduce_in_bf16 or framework.half_on_wire),
            ours.places,
            ours.held,
            ours.rank_of,
            ours.parameter_bytes,
            ours.shared_by_ends,
            framework=framework,
        )

        if framework.blocking_pipeline:
            self.shape = dataclasses.replace(self.shape, overlap=False, blocking=True)

    def clock(self, constants: Constants) -> FrameworkClock:
        """Returns the clock of the run's own cluster and framework."""
        return FrameworkClock(constants, self.cluster, self.framework)


@dataclass(frozen=True)
class FrameworkClock(DataSheetClock):
    """The formulas of the data sheet for a framework's own kernels."""

    framework: Framework

    def computation(self, operation: Computation) -> Number:
        """Returns the time of kernels on the device."""
        if isinstance(operation, FusedAttention):
            return attention_seconds(
                self.constants, self._attention_rate, operation.operations, operation.keys, operation.head_dim
            )
        if isinstance(operation, Traffic) and operation.kind == PLAIN:
            return self.constants.unfused * self.traffic(operation.nbytes)
        return super().computation(operation)

    def queueing(self, work: LayerWork) -> Number:
        """Returns the time that the host needs to queue the kernels of a layer's forward."""
        fused = self.framework.fused_norm and self.framework.fused_pointwise
        return super().queueing(work) if fused or work.experts else self.constants.host_unfused

    @cached_property
    def _attention_rate(self) -> Number:
        constants, attention = self.constants, self.framework.attention
        if attention != FLASH_3:
            constants = dataclasses.replace(constants, attention_third=constants.attention_hopper)
        of_kernel = {FLASH_1: constants.attention_first, TORCH: constants.attention_torch}.get(attention, 1.0)
        return attention_rate(constants, self.cluster.device) * of_kernel
