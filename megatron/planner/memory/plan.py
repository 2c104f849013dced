"""The memory of a run before it starts: every rank's use, by kind, at the moment when it is largest.

First comes the state that is always there, then the computations of a step (step.py), each of which takes and frees the
bytes of its profile (stage.py), then the update. So the peak has a place: a computation of the schedule, and a layer
within it. All figures are bytes that tensors request. The memory that an allocator adds by rounding and keeps
free, and that libraries take in addition (CUDA's context, NCCL, gloo), is not included.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.base.errors import ConfigError
from megatron.config.checkpoint import MEMORY
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings, resolve
from megatron.planner.memory.learning import TRAINING, PhaseMemory, learning_memory, learning_phases
from megatron.planner.memory.model_states import StateMemory, rank_buckets, rank_state
from megatron.planner.memory.parts import DecoderProfiles
from megatron.planner.memory.sizes import batch_bytes, sizes_of
from megatron.planner.memory.stage import stage_events, stage_memory
from megatron.planner.memory.staging import staged_bytes
from megatron.planner.memory.step import step_memory
from megatron.schedule.partition import Stage
from megatron.spec.decoder import DecoderSpec, decoder_spec
from megatron.spec.memory.trace import (
    ACTIVATIONS,
    BATCH,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    QUANTIZED,
    REFERENCE,
    WORK,
    Profile,
    profile_of,
)
from megatron.spec.sizes import Sizes, Target


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one pipeline rank; ranks that differ only in tp, cp or dp need the same.

    at_peak: bytes by kind at the moment with the highest total, which `moment` names. start: bytes between steps.
    per_microbatch: bytes of activations that one microbatch leaves behind in all stages of the rank. in_flight: the
    most (stage, microbatch) pairs whose activations exist at once. host: bytes of optimizer state, weights, activations,
    copies for a background save and local checkpoints in host memory; staged: of these copies. local_files: of local
    checkpoints, in memory or on a disk. disk: bytes of state and of local checkpoints in files.
    phases: of a run that learns from rewards or preferences, in their order; else none.
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
    staged: int = 0
    local_files: int = 0
    phases: tuple[PhaseMemory, ...] = ()

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
    that are not planned: those with a vocabulary whose size only a tokenizer knows.
    """
    check_planned(run)
    model = planned_model(run)
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
    profiles = DecoderProfiles(spec, sizes, run.recompute, offload)
    microbatches = settings.batches.final_num_microbatches
    batch = microbatches * batch_bytes(sizes) + batch_bytes(dataclasses.replace(sizes, s=read, b=1, cp=1))
    ranks = []
    for rank in range(settings.pipeline.placement.num_ranks):
        stages = settings.pipeline.stages_of(rank)
        state = rank_state(spec, stages, settings, run.optimizer, sizes, offload.offloaded_weight_layers)
        by_layer, whole = (
            [
                stage_memory(
                    stage_events(stage, run.recompute, offload, profiles, state.offloaded, by_layer=moves), profile_of
                )
                for stage in stages
            ]
            for moves in (True, False)
        )
        start = Counter({PARAMETERS: state.memory.parameters, GRADIENTS: state.memory.gradients})
        start.update({OPTIMIZER: state.memory.optimizer, COMMUNICATION: state.memory.blocks})
        always = Counter(start)
        always[BATCH] += batch
        if settings.pipeline.pairs:  # a forward waits inside a layer while the backward that is planned runs
            layers = (profiles.layer(number).forward.peak for stage in stages for number in stage.layers)
            always[WORK] += max(layers, default=0)
        step = step_memory(
            settings.pipeline,
            rank,
            by_layer,
            whole,
            (offload.ratio or 0.0) if offload.kind == "ratio" else 0.0,
            sizes,
            staging=state.memory.staging,
            microbatches=microbatches,
        )
        peak = max(_peaks(state.memory, step.peak, sizes.residual), key=lambda profile: profile.peak)
        always.update(peak.top)
        in_files = run.optimizer_offload.offload_dir is not None
        planned = RankMemory(
            rank=rank,
            stages=stages,
            parameters=state.numel,
            at_peak=always,
            moment=peak.moment,
            start=start.total(),
            per_microbatch=sum(_activations(stage.forward) for stage in whole),
            in_flight=step.in_flight,
            host=state.host + step.host + (0 if in_files else state.memory.offloaded_slices),
            disk=state.disk + (state.memory.offloaded_slices if in_files else 0),
        )
        ranks.append(
            _with_phases(planned, spec, run, settings, sizes, start, state.trained, imbalance)
            if run.data.perform_rl_step
            else planned
        )
    saves_in_background = run.checkpoint.async_save or run.checkpoint.non_persistent_save_interval is not None
    return _with_staging(ranks, spec, run, settings, sizes) if saves_in_background else ranks


def _with_staging(
    ranks: Sequence[RankMemory], spec: DecoderSpec, run: RunConfig, settings: RunSettings, sizes: Sizes
) -> list[RankMemory]:
    """Returns the ranks with the copies for a background save in host memory, and the files of local checkpoints there or
    on the disk of the host: of the last one and the one that is being written, with replicas of other ranks."""
    checkpoint = run.checkpoint
    files = 0 if checkpoint.non_persistent_save_interval is None else 2 * checkpoint.replicas
    in_memory, on_disk = (files, 0) if checkpoint.non_persistent_ckpt_type in MEMORY else (0, files)
    optimizer = run.optimizer if run.checkpoint.save_optim else None
    offloaded_layers = run.activation_offload.offloaded_weight_layers
    result = []
    for rank in ranks:
        buckets = rank_buckets(spec, rank.stages, offloaded_layers)
        staged = staged_bytes(spec, rank.stages, buckets, settings, optimizer, width=sizes.e, is_first=rank.rank == 0)
        result.append(
            dataclasses.replace(
                rank,
                host=rank.host + (1 + in_memory) * staged,
                staged=staged,
                local_files=files * staged,
                disk=rank.disk + on_disk * staged,
            )
        )
    return result


def _with_phases(
    rank: RankMemory,
    spec: DecoderSpec,
    run: RunConfig,
    settings: RunSettings,
    sizes: Sizes,
    start: Mapping[str, int],
    trained: int,
    imbalance: float,
) -> RankMemory:
    """Returns the memory of a rank of train_rl.py, from that of its training step. start: bytes between steps.
    trained: bytes of trained weights. imbalance: as for `plan_memory`."""
    memory = learning_memory(run, settings, sizes, trained)
    training, held = Counter(rank.at_peak), memory.reference if sizes.target.cpu else 0
    training.update({BATCH: memory.waiting, REFERENCE: held})
    phases = (
        *learning_phases(spec, rank.stages, run, settings, sizes, start, memory, rank.parameters * sizes.e, imbalance),
        PhaseMemory(TRAINING, training, rank.moment),
    )
    largest = max(phases, key=lambda phase: phase.peak)
    host = rank.host + (0 if sizes.target.cpu else 2 * memory.reference)
    if run.rl.rl_offload_optimizer_during_inference and not sizes.target.cpu:
        host += start[OPTIMIZER]
    return dataclasses.replace(
        rank, at_peak=largest.at_peak, moment=largest.moment, start=rank.start + held, host=host, phases=phases
    )


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


def planned_model(run: RunConfig) -> ModelConfig:
    """Returns the model with the number of its positions."""
    positions = run.model.max_position_embeddings or run.data.seq_length
    return dataclasses.replace(run.model, max_position_embeddings=positions)


def _samples_read(run: RunConfig, settings: RunSettings) -> int:
    """Returns the tokens of the samples that a replica reads in a step and hands on to other ranks."""
    if settings.dynamic_context is None:
        return 0
    assert run.data.seq_length
    return settings.batches.final_global_batch_size // settings.mesh.dp * run.data.seq_length


def check_planned(run: RunConfig) -> None:
    """Raises ConfigError for runs whose memory is not planned, see `plan_memory`."""
    if run.model.vocab_size is None:
        raise ConfigError("the size of the vocabulary decides about memory; give --vocab-size")


def _peaks(state: StateMemory, step: Profile, residual: int) -> Iterator[Profile]:
    """The most that each part of a step takes, on top of the state between steps. step: the computations alone.
    residual: bytes of the residual stream of a microbatch."""
    top = Counter(step.top)
    top.update({COMMUNICATION: state.gathered, QUANTIZED: state.quantized})
    yield Profile({}, top, step.moment, {})
    if state.late_blocks:
        late = state.gathered + state.late_blocks + residual
        yield Profile({}, {COMMUNICATION: late, QUANTIZED: state.quantized}, "gradient of the embedding", {})
    yield Profile({}, {COMMUNICATION: state.at_end}, "reduction of gradients", {})
    yield Profile({}, {WORK: state.norm}, "update", {})
    yield Profile({}, {COMMUNICATION: state.prefetched}, "update", {})


def _activations(forward: Profile) -> int:
    """Bytes of activations that the forward of a stage leaves behind."""
    return sum(forward.net.get(kind, 0) for kind in ACTIVATIONS)
