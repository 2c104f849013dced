"""The memory of the answers that train_rl.py samples from the parameters that it trains.

Parameters, gradients and the state of the optimizer stay where they are. On top of them come the cache of the batching
engine, which exists while answers are sampled, and the largest of these moments: prompts are read, a token of every
answer is computed, a token is drawn from the logits, and the columns of the cache are moved.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.memory.forward_only import forward_of_stage
from megatron.planner.memory.sizes import microbatch_sizes
from megatron.schedule.partition import Stage
from megatron.spec.attention import CoreSpec
from megatron.spec.decoder import DecoderSpec, LayerSpec
from megatron.spec.delta_net import DeltaCoreSpec, DeltaNetSpec
from megatron.spec.latent_attention import LatentAttentionSpec
from megatron.spec.memory.attention_kernel import needs_padding
from megatron.spec.memory.linear import LinearMemory
from megatron.spec.memory.trace import CACHE, COMMUNICATION, LOGITS, NORMS, WORK, MemoryTrace, Profile, profile_of
from megatron.spec.moe import MoESpec
from megatron.spec.sizes import FP32, INT64, MASK, Sizes, Target
from megatron.spec.work_space import ATTENTION_MATRIX, CROSS_ENTROPY_BLOCK, PROMPT_TOKENS

_FP64, _INT16 = 8, 2
_DISTRIBUTIONS = 3  # tensors of the size of the logits in fp64 while they become probabilities


@dataclass(frozen=True)
class SamplingShape:
    """The batch that a replica samples.

    answers: of a replica before an update of the policy. slots: those that are sampled at the same time. prompt,
    response: tokens of the longest.
    """

    answers: int
    slots: int
    prompt: int
    response: int

    @property
    def capacity(self) -> int:
        """Columns of the cache."""
        return self.prompt + self.response

    @property
    def prompts_at_once(self) -> int:
        """The longest prompts that are read in one forward."""
        return max(1, min(self.slots, PROMPT_TOKENS // self.prompt))


def samples(run: RunConfig) -> bool:
    """Returns whether a run samples answers."""
    return run.data.perform_rl_step and run.rl.preference_data is None


def sampling_shape(run: RunConfig, settings: RunSettings) -> SamplingShape:
    """Returns the batch of a replica, or of one of its ranks of cp. Held-out prompts count if --eval-prompts says how
    many there are."""
    rl, mesh = run.rl, settings.mesh
    assert run.data.seq_length and rl.rollout_max_response_len
    answers = -(-rl.answers_per_rollout // (mesh.dp * mesh.cp))
    together = max(answers, -(-(rl.eval_prompts or 0) // (mesh.dp * mesh.cp)))
    prompt = rl.rollout_max_prompt_len or run.data.seq_length - rl.rollout_max_response_len
    return SamplingShape(
        answers, min(rl.rl_generation_batch_size or together, together), prompt, rl.rollout_max_response_len
    )


def forward_sizes(
    run: RunConfig, settings: RunSettings, target: Target, *, s: int, b: int, imbalance: float = 1.0
) -> Sizes:
    """Returns the sizes of a forward of the sampler: of b sequences of s tokens, which no rank shares. imbalance: of the
    load of experts, see `expert_rows`."""
    mesh = dataclasses.replace(settings.mesh, cp=1, dp=settings.mesh.dp * settings.mesh.cp)
    return microbatch_sizes(
        run.model,
        mesh,
        sequence_parallel=False,
        comm_type="p2p",
        cp_inner=1,
        split_backward=False,
        rounds_grads=False,
        keeps_weights=True,
        microbatches=1,
        seq_length=s,
        micro_batch_size=b,
        loss_chunk=run.train.cross_entropy_chunk_size,
        mlp_chunk=None,
        documents=False,
        target=target,
        moe=run.moe,
        imbalance=imbalance,
    )


def cache_bytes(spec: DecoderSpec, stage: Stage, sizes: Sizes, shape: SamplingShape) -> int:
    """Returns the bytes of the cache of a stage, of `shape.slots` answers, and of the record of their experts: see
    SlotCache and SlotExperts of the engine."""
    layers = [spec.layers[number] for number in stage.layers]
    cached = sum(layer.attention.cached.cache_bytes(sizes.tp, shape.capacity, sizes.e) for layer in layers)
    return shape.slots * (cached + shape.capacity * sum(map(_recorded_bytes, layers)))


def sampling_memory(
    spec: DecoderSpec,
    stage: Stage,
    run: RunConfig,
    settings: RunSettings,
    target: Target,
    shape: SamplingShape,
    imbalance: float = 1.0,
) -> Profile:
    """Returns the peak of sampling on the first rank of a stage's tp group, on top of the state between steps.

    Prompts and answers have their longest length. Ranks other than the first of a replica draw no tokens.
    """
    reading, decoding = (
        forward_sizes(run, settings, target, s=s, b=b, imbalance=imbalance)
        for s, b in ((shape.prompt, shape.prompts_at_once), (1, shape.slots))
    )
    attends = partial(
        _attention_to_cache,
        spec=spec,
        sizes=decoding,
        columns=shape.capacity,
        unfused=run.model.attention_backend == "unfused",
        absorbs=not run.model.batch_invariant_mode,
    )
    trace = MemoryTrace()
    trace.take(CACHE, cache_bytes(spec, stage, decoding, shape))
    with trace.doing("reading prompts"):
        _forward(trace, spec, stage, reading, lambda layer: 0)
    with trace.doing("decoding"):
        _forward(trace, spec, stage, decoding, attends)
    with trace.doing("moving columns of the cache"):
        trace.use(WORK, max(_moved(spec, stage, decoding, shape)))
    return trace.profile()


def fitting_slots(
    spec: DecoderSpec,
    stages: Sequence[Stage],
    run: RunConfig,
    settings: RunSettings,
    target: Target,
    free: Sequence[float],
) -> int:
    """Returns the most answers that can be sampled at the same time, 0 if none. free: bytes of each stage's rank for
    sampling, on top of the state between steps."""
    shape = sampling_shape(run, settings)

    def fits(slots: int) -> bool:
        smaller = dataclasses.replace(shape, slots=slots)
        peaks = (sampling_memory(spec, stage, run, settings, target, smaller).peak for stage in stages)
        return all(peak <= nbytes for peak, nbytes in zip(peaks, free, strict=True))

    return bisect.bisect_left(range(1, shape.slots + 1), True, key=lambda slots: not fits(slots))


def _forward(
    trace: MemoryTrace, spec: DecoderSpec, stage: Stage, sizes: Sizes, around: Callable[[LayerSpec], int]
) -> None:
    """One forward, and the next token of every sequence."""
    last = dataclasses.replace(sizes, s=1)
    output = LinearMemory(spec.output, last, (NORMS, LOGITS))
    profile = forward_of_stage(spec, stage, sizes, output.forward, around)
    trace.replay(Profile({}, profile.top, profile.moment, {}))
    with trace.doing("drawing a token"):
        trace.replay(Profile({}, profile_of(partial(_draw, spec, stage, last, output.out)).top, "", {}))


def _draw(spec: DecoderSpec, stage: Stage, sizes: Sizes, local: int, trace: MemoryTrace) -> None:
    """From a rank's part of the logits [b, padded vocab / tp], of `local` bytes, to the next tokens."""
    trace.take(LOGITS, local)
    if sizes.tp > 1:
        trace.take(LOGITS, sizes.tp * local)
        trace.use(COMMUNICATION, local)
    if not stage.embedding:  # the first rank of a replica alone draws
        return
    elements = sizes.b * spec.softmax_size
    block = min(elements, CROSS_ENTROPY_BLOCK["cpu" if sizes.target.cpu else "cuda"])
    trace.use(WORK, 0 if sizes.target.fused else FP32 * block)  # log-sum-exps
    trace.use(WORK, elements * (sizes.e + _DISTRIBUTIONS * _FP64))


def _recorded_bytes(layer: LayerSpec) -> int:
    """Returns the bytes of the numbers of a token's experts."""
    return _INT16 * layer.mlp.router.topk if isinstance(layer.mlp, MoESpec) else 0


def _moved(spec: DecoderSpec, stage: Stage, sizes: Sizes, shape: SamplingShape) -> Iterator[int]:
    """Bytes of the copies of keys or values that are moved: of all columns where answers take the place of others."""
    for number in stage.layers:
        columns = shape.capacity if shape.slots < shape.answers else shape.prompt
        core = spec.layers[number].attention.cached
        if isinstance(core, DeltaCoreSpec):
            continue  # a state has no columns
        if core.cached_columns(shape.capacity) < shape.capacity:
            columns = core.window or 0  # the others stay where they are
        yield columns * shape.slots * core.local_groups(sizes.tp) * max(core.qk_dim, core.v_dim) * sizes.e
    yield 0


def _attention_to_cache(
    layer: LayerSpec, *, spec: DecoderSpec, sizes: Sizes, columns: int, unfused: bool, absorbs: bool
) -> int:
    """Work space of one new query of every sequence that attends to so many columns, with a mask of them.

    absorbs: latents are read as they are, unless an adapter changes the projection to keys and values.
    """
    attention = layer.attention
    if isinstance(attention, DeltaNetSpec):  # states, read and changed
        return 4 * sizes.b * attention.core.state_elements(sizes.tp) * FP32
    core, numbers = attention.core, columns * sizes.b * INT64
    columns = min(columns, core.window or columns)
    keys = columns * sizes.b
    mask = numbers + keys * (3 * MASK + FP32)
    matrix = keys * (core.heads // sizes.tp)
    if not isinstance(attention, LatentAttentionSpec):
        return mask + _read(core, sizes, keys, matrix, unfused=unfused)
    if absorbs and not (spec.lora is not None and spec.lora.adapts(attention.kv_up)):
        return mask + matrix * (2 * FP32 + (sizes.e if sizes.e < FP32 else 0))
    projected = LinearMemory(attention.kv_up, dataclasses.replace(sizes, s=columns), (NORMS, NORMS)).out
    return mask + projected + _read(core, sizes, keys, matrix, unfused=unfused)


def _read(core: CoreSpec, sizes: Sizes, keys: int, matrix: int, *, unfused: bool) -> int:
    """Copies of keys and values that a kernel makes, and probabilities that it keeps. matrix: their number."""
    pairs = keys * core.local_groups(sizes.tp) * (core.qk_dim + core.v_dim) * sizes.e
    repeated = keys * (core.heads // sizes.tp) * (core.qk_dim + core.v_dim) * sizes.e
    if unfused:
        return repeated + 2 * FP32 * matrix
    if core.softcap is not None:
        return (pairs // sizes.e * FP32 if sizes.e < FP32 else 0) + 3 * FP32 * min(matrix, ATTENTION_MATRIX)
    if not sizes.target.cpu:  # torch's kernels that take a mask take no groups
        return repeated if core.local_groups(sizes.tp) < core.heads // sizes.tp else 0
    wide = pairs // sizes.e * FP32 if sizes.target.wide else 0
    return wide + (pairs if needs_padding(core, sizes) else 0)
