"""The size of a run's microbatches on one rank."""

from __future__ import annotations

from megatron.config.context_parallel import attention_comm_types, inner_size
from megatron.config.data_parallel import splits_backward
from megatron.config.run import RunConfig
from megatron.spec.sizes import FP32, Sizes, Target


def sizes_of(run: RunConfig, target: Target) -> Sizes:
    """Sizes of a valid run. The first layer's kind of context parallelism stands for all: they need about equal memory."""
    model, parallel = run.model, run.parallel
    assert model.num_layers and model.hidden_size and run.data.seq_length and run.train.micro_batch_size
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    sp = tp if parallel.sequence_parallel else 1
    step = 2 * cp * sp if cp > 1 else 1  # sequences are padded to a multiple of it
    e = FP32 if model.dtype_name == "float32" else 2
    return Sizes(
        target=target,
        s=-(-run.data.seq_length // step) * step // cp,
        b=run.train.micro_batch_size,
        h=model.hidden_size,
        e=e,
        r=FP32 if model.fp32_residual_connection else e,
        tp=tp,
        sp=sp,
        cp=cp,
        comm_type=attention_comm_types(parallel, model.num_layers)[0],
        cp_inner=inner_size(parallel),
        unfused_attention=model.attention_backend == "unfused",
        fused_weight_grad=model.gradient_accumulation_fusion,
        split_backward=splits_backward(parallel),
    )
