"""Layouts of a run, and the grids of them under which `layout_parity` compares it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.config.run import RunConfig


@dataclass(frozen=True)
class ParityLayout:
    """The layout of one run of the grid."""

    tp: int
    dp: int
    sequence_parallel: bool = False
    pp: int = 1
    schedule: str | None = None
    chunks: int | None = None  # virtual stages per pipeline rank
    cp: int = 1
    comm_type: str = "p2p"
    ep: int = 1
    etp: int | None = None

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def layers(self) -> int:
        """Number of layers of a small model that has at least one in every stage."""
        return max(2, self.pp * (2 if self.schedule == "zb-v" else self.chunks or 1))

    def __str__(self) -> str:
        schedule = f" {self.schedule}" if self.schedule else ""
        pipeline = f" x PP {self.pp}{schedule}" if self.pp > 1 else ""
        context = f" x CP {self.cp} {self.comm_type}" if self.cp > 1 else ""
        experts = f" x EP {self.ep}" if self.ep > 1 else ""
        experts += "" if self.etp is None else f" x ETP {self.etp}"
        return f"TP {self.tp} x DP {self.dp}{pipeline}{context}{experts}" + (" + SP" if self.sequence_parallel else "")


# The first one is the reference for all others.
GRID = (
    ParityLayout(1, 1),
    ParityLayout(2, 1),
    ParityLayout(2, 1, True),
    ParityLayout(4, 1),
    ParityLayout(4, 1, True),
    ParityLayout(2, 2),
    ParityLayout(2, 2, True),
    ParityLayout(1, 4),
    ParityLayout(1, 1, pp=2),
    ParityLayout(1, 1, cp=2),
    ParityLayout(2, 2, True, pp=2),
    ParityLayout(2, 1, True, pp=2, cp=2),
)


# Of a model with experts, after the reference: ep over dp, over tp and over cp; experts shared by etp ranks; expert
# copies; every kind of context parallelism and every schedule; deep pipelines.
EXPERT_GRID = (
    ParityLayout(1, 1),
    ParityLayout(1, 2),
    ParityLayout(1, 2, ep=2),
    ParityLayout(2, 1, True),
    ParityLayout(2, 1, True, ep=2, etp=1),
    ParityLayout(1, 2, etp=2),
    ParityLayout(1, 1, cp=2, ep=2),
    ParityLayout(1, 4, ep=4),
    ParityLayout(1, 4, ep=2),
    ParityLayout(1, 4, ep=2, etp=2),
    ParityLayout(2, 2, True, ep=4, etp=1),
    ParityLayout(2, 1, True, cp=2, ep=4, etp=1),
    ParityLayout(1, 2, cp=2, comm_type="all_gather", ep=2),
    ParityLayout(1, 1, cp=4, comm_type="a2a+p2p", ep=4),
    ParityLayout(1, 2, pp=2, ep=2),
    ParityLayout(1, 2, pp=2, schedule="gpipe", etp=2),
    ParityLayout(1, 2, pp=2, schedule="zb-h1", ep=2),
    ParityLayout(1, 2, pp=2, schedule="interleaved", chunks=2, ep=2),
    ParityLayout(1, 2, pp=2, schedule="zb-v", ep=2),
    ParityLayout(1, 1, pp=4),
    ParityLayout(2, 2, True, pp=2, ep=4, etp=1),
    ParityLayout(1, 4, pp=2, ep=2),
    ParityLayout(1, 8, ep=8),
    ParityLayout(1, 8, ep=4, etp=2),
    ParityLayout(2, 2, True, cp=2, ep=4, etp=1),
    ParityLayout(1, 2, pp=4, ep=2),
    ParityLayout(1, 2, pp=4, schedule="zb-v", ep=2),
)


def under(run: RunConfig, layout: ParityLayout) -> RunConfig:
    """Returns the run with the layout."""
    parallel = dataclasses.replace(
        run.parallel,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        pipeline_model_parallel_size=layout.pp,
        pipeline_schedule=layout.schedule,
        num_virtual_stages_per_pipeline_rank=layout.chunks,
        context_parallel_size=layout.cp,
        cp_comm_type=tuple(layout.comm_type.split()),
        hierarchical_context_parallel_sizes=(2, layout.cp // 2) if "a2a+p2p" in layout.comm_type else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    return dataclasses.replace(run, parallel=parallel)
