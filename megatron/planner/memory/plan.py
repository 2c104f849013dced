"""The memory of a run before it starts: every rank's use, by kind, at the moment when it is largest.

A step is replayed. First comes the state that is always there, then the rank's own list of actions, each of which takes
and frees the bytes of its profile (stage.py), then the update. So the peak has a place: an action of the schedule, and
a layer within it. All figures are bytes that tensors request. The memory that an allocator adds by rounding and keeps
free, and that libraries take in addition (CUDA's context, NCCL, gloo), is not included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.base.errors import ConfigError
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings, resolve
from megatron.planner.memory.model_states import StateMemory, state_memory
from megatron.planner.memory.moments import enough_microbatches
from megatron.planner.memory.offloaded_activations import OffloadTrace, offloaded_by
from megatron.planner.memory.sizes import batch_bytes, sizes_of
from megatron.planner.memory.stage import LayerProfiles, stage_memory
from megatron.schedule.partition import Stage
from megatron.schedule.schedule import COMPUTE, COPIES, RECEIVES, SENDS, Action, Kind
from megatron.schedule.spec import ScheduleSizes
from megatron.schedule.validate import memory_in_flight
from megatron.spec.decoder import decoder_spec
from megatron.spec.memory.trace import (
    ACTIVATIONS,
    BATCH,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    QUANTIZED,
    WORK,
    MemoryTrace,
    Profile,
)
from megatron.spec.sizes import Sizes, Target

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward (input)",
    Kind.WEIGHT_GRAD: "backward (weights)",
}


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one pipeline rank; ranks that differ only in tp, cp or dp need the same.

    at_peak: bytes by kind at the moment with the highest total, which `moment` names. start: bytes between steps.
    per_microbatch: bytes of activations that one microbatch leaves behind in all stages of the rank. in_flight: the
    most (stage, microbatch) pairs whose activations exist at once. host: bytes of optimizer state, weights and
    activations in host memory. disk: bytes of state in files.
    """

    rank: int
    stages: tuple[Stage, ...]
    parameters: int
    at_peak: Mapping[str, int]
    moment: str
    start: int
    per_microbatch: int
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


def plan_memory(run: RunConfig, settings: RunSettings, target: Target, imbalance: float = 1.0) -> list[RankMemory]:
    """Returns the memory of each pipeline rank of a run, whose `settings` are those that the run itself uses.

    imbalance: rows of each expert of the fullest rank in units of the mean over all experts. With
    --dynamic-context-parallel every microbatch is planned as the longest that fits, on the largest group, and their
    number as that of samples without padding. `config.rules.check` has accepted the run. Raises ConfigError for runs
    that are not planned: with adapters, or with a vocabulary whose size only a tokenizer knows.
    """
    check_planned(run)
    model = dataclasses.replace(
        run.model, max_position_embeddings=run.model.max_position_embeddings or run.data.seq_length
    )
    read = _samples_read(run, settings)
    run, settings = with_largest_groups(run, settings)
    seq_length, micro_batch_size, offload = run.data.seq_length, run.train.micro_batch_size, run.activation_offload
    assert seq_length and micro_batch_size
    spec = decoder_spec(model)
    sizes = sizes_of(
        model,
        settings,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        loss_chunk=run.train.cross_entropy_chunk_size,
        mlp_chunk=run.recompute.mlp_chunk_size,
        documents=run.data.separate_documents,
        target=target,
        moe=run.moe,
        imbalance=imbalance,
        fp8=run.fp8,
    )
    microbatches = settings.batches.final_num_microbatches
    played = _played(settings, target)
    moves = offload.kind == "ratio" and bool(offload.ratio)
    schedule = settings.pipeline.schedule_of(played, offload=moves, checked=False)
    in_flight = memory_in_flight(schedule)
    profiles = LayerProfiles(spec, sizes, run.recompute.modules)
    ranks = []
    for rank in range(settings.pipeline.placement.num_ranks):
        stages = settings.pipeline.stages_of(rank)
        state = state_memory(spec, stages, settings, run.optimizer, sizes, offload.offloaded_weight_layers)
        whole = by_layer = {
            stage.number: stage_memory(spec, sizes, stage, run.recompute, offload, state.offloaded, profiles=profiles)
            for stage in stages
        }
        if offload.kind is not None:
            whole = {
                stage.number: stage_memory(
                    spec, sizes, stage, run.recompute, offload, state.offloaded, by_layer=False, profiles=profiles
                )
                for stage in stages
            }
        trace = MemoryTrace()
        _take_state(trace, state)
        start = sum(trace.now.values())
        if settings.pipeline.pairs:  # a forward waits inside a layer while the backward that is played runs
            tops = (profiles.of(number).forward.top for stage in stages for number in stage.layers)
            trace.take(WORK, max((sum(top.values()) for top in tops), default=0))
        trace.take(
            BATCH, microbatches * batch_bytes(sizes) + batch_bytes(dataclasses.replace(sizes, s=read, b=1, cp=1))
        )
        activations = OffloadTrace(trace, offloaded_by(offload, schedule, rank), whole, by_layer)
        _replay_step(trace, schedule.actions[rank], activations, state, sizes, played, microbatches)
        in_files = run.optimizer_offload.offload_dir is not None
        ranks.append(
            RankMemory(
                rank=rank,
                stages=stages,
                parameters=state.numel,
                at_peak=dict(trace.top),
                moment=trace.moment,
                start=start,
                per_microbatch=sum(_activations(whole[stage.number].forward) for stage in stages),
                in_flight=in_flight[rank].activations,
                host=state.optimizer.host + activations.most + (0 if in_files else state.offloaded_slices),
                disk=state.optimizer.disk + (state.offloaded_slices if in_files else 0),
            )
        )
    return ranks


def with_largest_groups(run: RunConfig, settings: RunSettings) -> tuple[RunConfig, RunSettings]:
    """Returns the run and its settings, with --dynamic-context-parallel those of a run that has the longest
    microbatches on all ranks: `dynamic_context.longest` tokens on the largest group."""
    sizes = settings.dynamic_context
    if sizes is None:
        return run, settings
    assert run.data.seq_length
    mesh = dataclasses.replace(settings.mesh, cp=sizes.largest, dp=sizes.ranks // sizes.largest)
    count = -(-settings.batches.final_global_batch_size * run.data.seq_length // (sizes.ranks * sizes.tokens))
    parallel = dataclasses.replace(
        run.parallel,
        context_parallel_size=sizes.largest,
        dynamic_context_parallel=False,
        max_seqlen_per_dp_cp_rank=None,
    )
    train = dataclasses.replace(
        run.train,
        micro_batch_size=1,
        global_batch_size=count * mesh.dp,
        rampup_batch_size=None,
        step_batch_size_schedule=None,
    )
    data = dataclasses.replace(run.data, seq_length=sizes.longest)
    run = dataclasses.replace(run, parallel=parallel, train=train, data=data)
    return run, resolve(run, mesh)


def _samples_read(run: RunConfig, settings: RunSettings) -> int:
    """Returns the tokens of the samples that a replica reads in a step and hands on to other ranks."""
    if settings.dynamic_context is None:
        return 0
    assert run.data.seq_length
    return settings.batches.final_global_batch_size // settings.mesh.dp * run.data.seq_length


def _played(settings: RunSettings, target: Target) -> int:
    """The number of microbatches to replay, so that every rank's peak is that of all of them, and at the same
    moment."""
    pipeline, microbatches = settings.pipeline, settings.batches.final_num_microbatches
    if settings.data_parallel.overlap_reduce and (target.cpu or settings.data_parallel.reduce_in_bf16):
        return microbatches  # reductions need memory in the last one
    p = pipeline.placement.num_ranks
    sizes = ScheduleSizes(p, pipeline.placement.num_stages // p, microbatches, pipeline.group or p, pipeline.pairs)
    return enough_microbatches(pipeline.schedule, sizes).m


def check_planned(run: RunConfig) -> None:
    """Raises ConfigError for runs whose memory is not planned, see `plan_memory`."""
    if run.model.vocab_size is None:
        raise ConfigError("the size of the vocabulary decides about memory; give --vocab-size")
    if run.model.lora_rank:
        raise ConfigError(f"--lora-rank {run.model.lora_rank}: the memory of adapters is not planned; leave it out")


def _take_state(trace: MemoryTrace, state: StateMemory) -> None:
    """Takes the memory that is in use between steps."""
    trace.take(PARAMETERS, state.parameters)
    trace.take(GRADIENTS, state.gradients)
    trace.take(OPTIMIZER, state.optimizer.device + state.optimizer.staging)
    trace.take(COMMUNICATION, state.blocks)


def _replay_step(
    trace: MemoryTrace,
    actions: Sequence[Action],
    activations: OffloadTrace,
    state: StateMemory,
    sizes: Sizes,
    played: int,
    microbatches: int,
) -> None:
    """Replays a step of one rank: its actions, then the reduction of gradients and the update.

    played: microbatches of the actions, of so many of the step; those in the middle are left out, and names skip them.
    """
    trace.take(COMMUNICATION, state.gathered)
    trace.take(QUANTIZED, state.quantized)
    last = {action.stage: action for action in actions if action.kind in COMPUTE}
    sent = 0  # bytes of the last message: freed when the next one leaves, or at once by the thread that sends with gloo
    for action in actions:
        if action.kind in SENDS:
            trace.free(COMMUNICATION, sizes.residual if sizes.target.cpu else sent)
            sent = sizes.residual
        elif action.kind in COPIES:
            activations.move(action)
        elif action.kind in RECEIVES:
            trace.take(COMMUNICATION, sizes.residual)
        elif action.kind in COMPUTE:
            staging = state.staging if last[action.stage] == action else 0
            number = action.microbatch + (microbatches - played if action.microbatch >= played // 2 else 0)
            with trace.doing(f"{_NAMES[action.kind]} of microbatch {number}"):
                head, backward = activations.profiles(action)
                trace.replay(head)
                trace.take(COMMUNICATION, staging)
                trace.replay(backward)
                trace.free(COMMUNICATION, staging)
                if (
                    action.stage == 0 and action.kind is not Kind.FORWARD
                ):  # next to the gradient of the embedding's output
                    trace.use(COMMUNICATION, state.late_blocks + (sizes.residual if state.late_blocks else 0))
            activations.after(action)
    trace.free(COMMUNICATION, 0 if sizes.target.cpu else sent)
    trace.free(COMMUNICATION, state.gathered)
    trace.free(QUANTIZED, state.quantized)
    with trace.doing("reduction of gradients"):
        trace.use(COMMUNICATION, state.at_end)
    with trace.doing("update"):
        trace.use(WORK, state.norm)
        trace.use(COMMUNICATION, state.prefetched)


def _activations(forward: Profile) -> int:
    """Bytes of activations that the forward of a stage leaves behind."""
    return sum(forward.net.get(kind, 0) for kind in ACTIVATIONS)
