"""The sizes of a run's microbatches on one rank."""

from __future__ import annotations

import dataclasses
import math

from megatron.base.mesh import Mesh
from megatron.config.fp8 import OFF, Fp8Config
from megatron.config.model import ModelConfig
from megatron.config.moe_training import ALL_GATHER, SINKHORN, MoEConfig
from megatron.config.settings import RunSettings
from megatron.spec.decoder import decoder_spec
from megatron.spec.expert_rows import expert_rows
from megatron.spec.fp8_sizes import fp8_sizes
from megatron.spec.moe import MoESpec
from megatron.spec.sizes import FP32, INT64, MASK, Sizes, Target


def sizes_of(
    model: ModelConfig,
    settings: RunSettings,
    *,
    seq_length: int,
    micro_batch_size: int,
    loss_chunk: int,
    mlp_chunk: int | None,
    documents: bool,
    target: Target,
    moe: MoEConfig,
    imbalance: float = 1.0,
    fp8: Fp8Config = OFF,
) -> Sizes:
    """Returns the sizes of a microbatch of a run that `config.rules` accept.

    loss_chunk, mlp_chunk: see Sizes. documents: attention stays inside of each. imbalance: of the load of
    experts, see `expert_rows`; --moe-expert-capacity-factor limits it.

    All layers are planned with the context-parallel communication of the first one: the types need about equal memory.
    """
    return microbatch_sizes(
        model,
        settings.mesh,
        sequence_parallel=settings.sequence_parallel,
        comm_type=settings.attention_comm_types[0],
        cp_inner=settings.context_inner,
        split_backward=settings.pipeline.schedule.splits_backward,
        rounds_grads=settings.data_parallel.rounds_grads,
        keeps_weights=settings.data_parallel.shards != "optim_grads_params",
        microbatches=settings.batches.final_num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        loss_chunk=loss_chunk,
        mlp_chunk=mlp_chunk,
        documents=documents,
        target=target,
        moe=moe,
        imbalance=imbalance,
        fp8=fp8,
    )


def microbatch_sizes(
    model: ModelConfig,
    mesh: Mesh,
    *,
    sequence_parallel: bool,
    comm_type: str,
    cp_inner: int,
    split_backward: bool,
    rounds_grads: bool,
    keeps_weights: bool,
    microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    loss_chunk: int,
    mlp_chunk: int | None,
    documents: bool,
    target: Target,
    moe: MoEConfig,
    imbalance: float = 1.0,
    fp8: Fp8Config = OFF,
) -> Sizes:
    """As `sizes_of`, from the settings that sizes depend on.

    comm_type, cp_inner: communication of the first layer's attention. keeps_weights: weights in FP8 are kept during a
    step.
    """
    assert model.hidden_size and model.num_layers
    sp = mesh.tp if sequence_parallel else 1
    step = 2 * mesh.cp * sp if mesh.cp > 1 else 1  # sequences are padded to a multiple of it
    e = FP32 if model.dtype_name == "float32" else FP32 // 2
    sizes = Sizes(
        target=target,
        s=-(-seq_length // step) * step // mesh.cp,
        b=micro_batch_size,
        h=model.hidden_size,
        e=e,
        r=FP32 if model.fp32_residual_connection else e,
        tp=mesh.tp,
        sp=sp,
        cp=mesh.cp,
        comm_type=comm_type,
        cp_inner=cp_inner,
        unfused_attention=model.attention_backend == "unfused",
        documents=documents,
        fused_weight_grad=model.gradient_accumulation_fusion,
        split_backward=split_backward,
        rounds_grads=rounds_grads,
        loss_chunk=loss_chunk,
        mlp_chunk=mlp_chunk,
        predictions=model.mtp_num_layers,
        fp8=fp8_sizes(fp8, model.num_layers, keeps_weights=keeps_weights, microbatches=microbatches),
        lora=decoder_spec(model).lora if model.lora_rank else None,
    )
    routers = (
        [layer.mlp.router for layer in decoder_spec(model).layers if isinstance(layer.mlp, MoESpec)]
        if model.num_experts
        else []
    )
    if not routers:
        return sizes
    capacity = moe.moe_expert_capacity_factor
    load = expert_rows(
        routers[0],  # they are alike
        sizes.rows,
        ep=mesh.ep,
        etp=mesh.etp,
        imbalance=min(imbalance, math.inf if capacity is None else capacity),
        evenly=moe.moe_router_force_load_balancing,
        everywhere=moe.moe_token_dispatcher_type == ALL_GATHER,
    )
    return dataclasses.replace(sizes, load=load, sinkhorn=SINKHORN in moe.moe_router_load_balancing_type)


def batch_bytes(sizes: Sizes) -> int:
    """Bytes of a microbatch: tokens and labels, the loss mask, the loss weights twice, positions; numbers of
    documents; the losses. A further prediction has labels, mask, weights and losses of its own."""
    targets = INT64 + MASK + 2 * FP32
    token = INT64 + targets * (1 + sizes.predictions) + sizes.documents * INT64
    whole = sizes.tokens * token + sizes.s * INT64
    return (whole * (1 + sizes.cp) if sizes.cp > 1 else whole) + sizes.tokens * FP32 * (1 + sizes.predictions)
