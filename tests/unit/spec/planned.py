"""The memory that the description of a decoder predicts, for tests that measure it."""

import dataclasses

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.mesh import mesh_of, smallest_world
from megatron.config.settings import resolve
from megatron.planner.memory.parts import DecoderProfiles
from megatron.planner.memory.sizes import sizes_of
from megatron.planner.memory.stage import stage_events
from megatron.schedule.partition import Stage
from megatron.spec.decoder import decoder_spec
from megatron.spec.memory.layer import LayerMemory
from megatron.spec.memory.trace import profile_of
from megatron.spec.sizes import Sizes, Target

CPU, CUDA, WIDE = Target(cpu=True), Target(cpu=False), Target(cpu=True, wide=True)


def sizes_for(config, target, tokens, samples, tp=1, *, sequence_parallel=False, documents=False):
    """A microbatch of `samples` sequences of `tokens`."""
    e = 4 if config.dtype_name == "float32" else 2
    return Sizes(
        target=target,
        s=tokens,
        b=samples,
        h=config.hidden_size,
        e=e,
        r=4 if config.fp32_residual_connection else e,
        tp=tp,
        sp=tp if sequence_parallel else 1,
        unfused_attention=config.attention_backend == "unfused",
        documents=documents,
        fused_weight_grad=config.gradient_accumulation_fusion,
    )


def sizes_of_run(run, target):
    """A microbatch of a run on as few processes as its layout allows."""
    settings = resolve(run, mesh_of(run.parallel, smallest_world(run.parallel)))
    return sizes_of(
        run.model,
        settings,
        seq_length=run.data.seq_length,
        micro_batch_size=run.train.micro_batch_size,
        loss_chunk=run.train.cross_entropy_chunk_size,
        mlp_chunk=run.recompute.mlp_chunk_size,
        documents=run.data.sft or run.data.reset_attention_mask,
        target=target,
        moe=run.moe,
    )


def layer_memory(config, sizes, modules=frozenset()):
    """A layer that computes `modules` again in backward."""
    return LayerMemory(decoder_spec(config).layers[0], sizes, modules)


def kept_by_layers(config, sizes, recompute, layers):
    """Bytes that these layers of a stage keep for backward, without the rotary tables."""
    spec = decoder_spec(dataclasses.replace(config, num_layers=max(layers) + 1))
    stage = Stage(0, layers, embedding=False, head=False)
    tables = sum(2 * sizes.s * (rotary.channels // 2) * sizes.e for rotary in spec.rotaries)
    offload = ActivationOffloadConfig()
    events = stage_events(stage, recompute, offload, DecoderProfiles(spec, sizes, recompute, offload))
    return profile_of(events.forward).kept - tables
