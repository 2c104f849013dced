"""The memory that kernels of plain torch take in addition to this project's own, which the memory plan counts.

Per token and layer, in bytes, counted from what autograd saves:

- A norm in fp32 keeps its input in fp32 (4 h) and the normalized input in bf16 (2 h), for the weight's gradient; a fused
  norm keeps its input in bf16 (2 h). The output is kept by the layer behind either. So a norm keeps 4 h more.
- A gated activation keeps the result of its nonlinearity (2 f), which a fused one computes again. A plain activation keeps
  nothing more, and neither does a rotary embedding, whose angles need no gradient.
- The output of a norm that was gathered over tensor parallelism (2 h), and not only the rank's part of it.

The loss of gathered logits takes, per logit of the whole vocabulary, in bytes: the logits in half precision (2), which
a pipeline's buffers keep from one microbatch to the next, so of two microbatches. In its backward there are the
logarithm of the softmax, its gradient, and the gradient of the logits, each in fp32 (4).
"""

from __future__ import annotations

from benchmarks.planner.calibration.framework import Framework
from megatron.config.recompute import MLP_ACT, NORM, WHOLE_MLP
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.schedule.validate import memory_in_flight

_NORM, _ACTIVATION = 4, 2  # bytes per channel
_NORMS = 2  # of a layer
_LOGITS, _BUFFERS, _LOSS = 2, 2, 3 * 4  # bytes per logit, and microbatches


def plain_kernel_bytes(run: RunConfig, settings: RunSettings, framework: Framework) -> list[int]:
    """Returns bytes that each pipeline rank keeps more at its peak.

    A layer that is recomputed as a whole keeps them only during its own backward. Layers with experts are counted
    without their activation.
    """
    model, mesh, pipeline = run.model, settings.mesh, settings.pipeline
    assert run.data.seq_length and run.train.micro_batch_size
    assert model.num_layers and model.hidden_size and model.ffn_hidden_size
    tokens = run.data.seq_length * run.train.micro_batch_size // mesh.cp
    rows = tokens // mesh.tp if run.parallel.sequence_parallel else tokens
    norm = 0 if framework.fused_norm else _NORMS * _NORM * rows * model.hidden_size
    activation = 0
    if not framework.fused_pointwise and model.swiglu and not model.num_experts:
        activation = _ACTIVATION * tokens * model.ffn_hidden_size // mesh.tp
    gathered = 2 * _NORMS * (tokens - rows) * model.hidden_size if framework.keeps_gathered else 0
    kept = []
    for number in range(model.num_layers):
        again = run.recompute.parts_of(number)
        kept.append((NORM not in again) * norm + gathered + (not {MLP_ACT, WHOLE_MLP} & set(again)) * activation)
    placement = pipeline.placement
    asked = placement.num_stages // placement.num_ranks if pipeline.schedule.virtual_stages is None else None
    microbatches = settings.batches.final_num_microbatches
    schedule = pipeline.schedule.build(placement.num_ranks, microbatches, v=asked, group=pipeline.group)
    most = []
    for rank, in_flight in enumerate(memory_in_flight(schedule)):
        chunk, once = 0, 0
        for stage in placement.stages_of(rank):
            layers = run.recompute.groups(pipeline.stages[stage].layers)
            chunk = max(chunk, sum(kept[number] for group, full in layers if not full for number in group))
            once = max(once, *(norm + gathered + activation if full else 0 for _, full in layers), 0)
        most.append(in_flight.activations * chunk + once)
    return most


def gathered_loss_bytes(logits: int, microbatches: int) -> tuple[int, int]:
    """Returns bytes of so many logits of the whole vocabulary: (those that are kept all the time, more during the
    loss)."""
    return min(_BUFFERS, microbatches) * _LOGITS * logits, _LOSS * logits
