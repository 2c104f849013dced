"""The sizes of a run's microbatches on one rank."""

from __future__ import annotations

from megatron.config.model import ModelConfig
from megatron.config.settings import RunSettings
from megatron.spec.sizes import FP32, Sizes, Target


def sizes_of(
    model: ModelConfig,
    settings: RunSettings,
    *,
    seq_length: int,
    micro_batch_size: int,
    documents: bool,
    target: Target,
) -> Sizes:
    """Returns the sizes of a microbatch of a run that `config.rules` accept. documents: attention stays inside of each.

    All layers are planned with the context-parallel communication of the first one: the types need about equal memory.
    """
    assert model.hidden_size
    mesh = settings.mesh
    sp = mesh.tp if settings.sequence_parallel else 1
    step = 2 * mesh.cp * sp if mesh.cp > 1 else 1  # sequences are padded to a multiple of it
    e = FP32 if model.dtype_name == "float32" else FP32 // 2
    return Sizes(
        target=target,
        s=-(-seq_length // step) * step // mesh.cp,
        b=micro_batch_size,
        h=model.hidden_size,
        e=e,
        r=FP32 if model.fp32_residual_connection else e,
        tp=mesh.tp,
        sp=sp,
        cp=mesh.cp,
        comm_type=settings.attention_comm_types[0],
        cp_inner=settings.context_inner,
        unfused_attention=model.attention_backend == "unfused",
        documents=documents,
        fused_weight_grad=model.gradient_accumulation_fusion,
        split_backward=settings.pipeline.schedule.splits_backward,
    )
