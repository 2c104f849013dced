"""The memory of a run before it starts: every rank's use, by kind, at the moment when it is largest.

A step is replayed: state that is always there, then the rank's own list of actions, each of which takes and frees the
bytes of its profile (stage.py), then the update. So the peak has a place: an action of the schedule, a layer, and what
it was doing there. Figures are bytes that tensors ask for; what an allocator rounds and keeps free, and what libraries
take in addition (CUDA's context, NCCL, gloo), come on top.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.base.errors import ConfigError
from megatron.config.mesh import mesh_of
from megatron.config.pipeline import PipelineSettings, pipeline_settings
from megatron.config.run import RunConfig
from megatron.planner.memory.model_states import StateMemory, state_memory
from megatron.planner.memory.offloaded_activations import OffloadTrace, offloaded_by, with_moves
from megatron.planner.memory.sizes import sizes_of
from megatron.planner.memory.stage import StageMemory, stage_memory
from megatron.schedule.partition import Stage
from megatron.schedule.schedule import COMPUTE, COPIES, RECEIVES, SENDS, Action, Kind
from megatron.schedule.validate import memory_in_flight
from megatron.spec.decoder import decoder_spec
from megatron.spec.memory.trace import (
    ACTIVATIONS,
    BATCH,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    WORK,
    MemoryTrace,
    Profile,
)
from megatron.spec.sizes import FP32, INT64, MASK, Sizes, Target

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward (input)",
    Kind.WEIGHT_GRAD: "backward (weights)",
}


@dataclass(frozen=True)
class RankMemory:
    """One pipeline rank; its tp, cp and dp neighbours are alike.

    at_peak: bytes by kind when most are in use; moment: when that is. start: bytes between steps. a_microbatch:
    activations that a microbatch leaves behind in all stages of the rank. in_flight: (stage, microbatch) pairs
    kept at once. host: bytes of optimizer state, weights and activations in host memory; disk: of state in files.
    """

    rank: int
    stages: tuple[Stage, ...]
    parameters: int
    at_peak: Mapping[str, int]
    moment: str
    start: int
    a_microbatch: int
    in_flight: int
    host: int
    disk: int

    @property
    def peak(self) -> int:
        """The most bytes in use at once."""
        return sum(self.at_peak.values())

    @property
    def layers(self) -> int:
        """Number of layers held."""
        return sum(len(stage.layers) for stage in self.stages)


def plan_memory(run: RunConfig, world_size: int, target: Target) -> list[RankMemory]:
    """Returns the memory of each pipeline rank of a run that `config.rules.check` accepts, with its vocabulary known.

    Raises ConfigError for what is not planned: adapters, and a vocabulary that only a tokenizer knows.
    """
    if run.model.vocab_size is None:
        raise ConfigError("the size of the vocabulary decides about memory; give --vocab-size")
    if run.model.lora_rank:
        raise ConfigError(f"--lora-rank {run.model.lora_rank}: the memory of adapters is not planned; leave it out")
    layers = run.model.num_layers
    assert layers
    positions = run.model.max_position_embeddings or run.data.seq_length
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, max_position_embeddings=positions))
    mesh = mesh_of(run.parallel, world_size)
    settings = pipeline_settings(run.parallel, layers)
    sizes, spec = sizes_of(run, target), decoder_spec(run.model)
    states = [state_memory(run, target, settings.stages_of(rank), mesh) for rank in range(settings.placement.num_ranks)]
    whole, by_layer = (
        {
            stage.number: stage_memory(
                spec, sizes, stage, run.recompute, run.activation_offload, state.offloaded, by_layer=moves_by_layer
            )
            for rank, state in enumerate(states)
            for stage in settings.stages_of(rank)
        }
        for moves_by_layer in (False, True)
    )
    return [_rank(run, rank, settings, whole, by_layer, sizes, state, mesh.dp) for rank, state in enumerate(states)]


def num_microbatches(run: RunConfig, dp: int) -> int:
    """Microbatches of a step at the end of a batch ramp or schedule, if there is one."""
    assert run.train.micro_batch_size
    return (run.train.final_global_batch_size or run.train.micro_batch_size * dp) // (run.train.micro_batch_size * dp)


def _rank(
    run: RunConfig,
    rank: int,
    settings: PipelineSettings,
    whole: Mapping[int, StageMemory],
    by_layer: Mapping[int, StageMemory],
    sizes: Sizes,
    state: StateMemory,
    dp: int,
) -> RankMemory:
    microbatches, stages = num_microbatches(run, dp), settings.stages_of(rank)
    schedule = with_moves(run.activation_offload, settings.schedule_of(microbatches))
    trace = MemoryTrace()
    trace.take(PARAMETERS, state.parameters)
    trace.take(GRADIENTS, state.gradients)
    trace.take(OPTIMIZER, state.optimizer.device + state.optimizer.staging)
    trace.take(COMMUNICATION, state.blocks)
    start = sum(trace.now.values())
    trace.take(BATCH, microbatches * _batch(sizes))
    trace.take(COMMUNICATION, state.gathered)
    offload = OffloadTrace(trace, offloaded_by(run.activation_offload, schedule, rank), whole, by_layer)
    last = {action.stage: action for action in schedule.actions[rank] if action.kind in COMPUTE}
    sent = 0  # bytes that have left, and are freed when the next message leaves; gloo's thread does so at once
    for action in schedule.actions[rank]:
        if action.kind in SENDS:
            trace.free(COMMUNICATION, sizes.residual if sizes.target.cpu else sent)
            sent = sizes.residual
            continue
        if action.kind in COPIES:
            offload.move(action)
            continue
        if action.kind in RECEIVES:
            trace.take(COMMUNICATION, sizes.residual)
        elif action.kind in COMPUTE:
            _compute(trace, action, offload.profile(action), state.staging if last[action.stage] == action else 0)
            offload.after(action)
    trace.free(COMMUNICATION, 0 if sizes.target.cpu else sent)
    trace.free(COMMUNICATION, state.gathered)
    with trace.doing("reduction of gradients"):
        trace.use(COMMUNICATION, state.at_end)
    with trace.doing("update"):
        trace.use(WORK, state.norm)
        trace.use(COMMUNICATION, state.prefetched)
    in_files = run.optimizer_offload.offload_dir is not None
    kept = [sum(whole[s.number].forward.net.get(kind, 0) for kind in ACTIVATIONS) for s in stages]
    return RankMemory(
        rank,
        stages,
        state.numel,
        dict(trace.top),
        trace.moment,
        start,
        sum(kept),
        memory_in_flight(schedule)[rank].activations,
        state.optimizer.host + offload.most + (0 if in_files else state.offloaded_slices),
        state.optimizer.disk + (state.offloaded_slices if in_files else 0),
    )


def _compute(trace: MemoryTrace, action: Action, profile: Profile, staging: int) -> None:
    """staging: bytes of reductions that are in flight meanwhile."""
    with trace.doing(f"{_NAMES[action.kind]} of microbatch {action.microbatch}"):
        trace.take(COMMUNICATION, staging)
        trace.replay(profile)
        trace.free(COMMUNICATION, staging)


def _batch(sizes: Sizes) -> int:
    """Bytes of a microbatch: tokens and labels, the mask of the loss, its weights twice, positions."""
    whole = sizes.tokens * (2 * INT64 + MASK + 2 * FP32) + sizes.s * INT64
    return whole * (1 + sizes.cp) if sizes.cp > 1 else whole
