"""The machine that a run is planned for: a cluster by its data sheets, or one whose profile was taken."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.base.errors import ConfigError
from megatron.config.run import RunConfig
from megatron.planner.time.clock import Clock
from megatron.planner.time.cluster_file import read_cluster
from megatron.planner.time.constants import blind_error, fitted
from megatron.planner.time.data_sheet import DataSheetClock
from megatron.planner.time.hardware import Cluster
from megatron.planner.time.profile_file import MachineProfile, read_profile
from megatron.planner.time.profiled import ProfiledClock, check_device, cluster_of
from megatron.planner.time.software import Software


@dataclass(frozen=True)
class PlannedMachine:
    """The machine of a plan, and the source of its times.

    `profile` is None where times come from data sheets and fitted constants; `path` is the file of the profile.
    """

    cluster: Cluster
    profile: MachineProfile | None = None
    path: str = ""

    @property
    def world_size(self) -> int | None:
        """All devices, where their number is known."""
        if self.cluster.nodes is not None:
            return self.cluster.nodes * self.cluster.node
        return None if self.profile is None else self.profile.world_size

    def clock(self, run: RunConfig, software: Software) -> Clock:
        """Returns the clock for all layouts of a run's model. Raises ConfigError for a model that was not measured."""
        if self.profile is None:
            return DataSheetClock(fitted(), self.cluster)
        return ProfiledClock(self.profile, run, software, self.path)

    @property
    def basis(self) -> str:
        """What predictions rest on, for the user."""
        if self.profile is None:
            return (
                "a prediction: of dense runs that Megatron-LM, NeMo and Bridge published, half were within "
                f"{blind_error():g} % by constants that had not seen them"
            )
        taken = self.profile
        return f"a prediction from {self.path}, taken on {taken.world_size} x {taken.device} on {taken.date[:10]}"

    @property
    def peak_name(self) -> str:
        """The name of the rate that MFU is a part of."""
        return "the dense bf16 peak" if self.profile is None else "the best product of the profile"


def machine_of(cluster: str | None, profile: str | None) -> PlannedMachine:
    """Returns the machine of --cluster, of --profile, or of the cluster with the devices of the profile.

    Raises ConfigError if both are missing, or if the profile is one of another device.
    """
    if profile is None:
        if cluster is None:
            raise ConfigError("the machine is not known; give --cluster, such as h100:4x8, or --profile")
        return PlannedMachine(read_cluster(cluster))
    taken = read_profile(profile)
    if cluster is None:
        return PlannedMachine(cluster_of(taken), taken, profile)
    named = read_cluster(cluster)
    check_device(taken, named.device.name, profile)
    return PlannedMachine(named, taken, profile)
