"""The rule about CUDA graphs, which repeat the same kernels on the same memory for every microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron.config.data_parallel import LAST, splits_backward
from megatron.config.recompute import BALANCED
from megatron.config.rules.rule import ConfigRule
from megatron.config.run import RunConfig


def layers_can_be_captured(run: RunConfig) -> str | None:
    """--cuda-graph-impl goes with layers whose shapes, addresses and kernels are the same in every microbatch."""
    if run.train.cuda_graph_impl == "none":
        return None
    obstacles = list(_obstacles(run))
    return (
        f"--cuda-graph-impl {run.train.cuda_graph_impl} cannot repeat {'; nor '.join(obstacles)}" if obstacles else None
    )


def _obstacles(run: RunConfig) -> Iterator[str]:
    model, parallel, offload = run.model, run.parallel, run.activation_offload
    if model.num_experts:
        yield "layers with experts, whose rows differ in number; give --cuda-graph-impl none"
    if model.has_delta_net:
        yield "gated delta nets, which have not been captured yet; give --cuda-graph-impl none"
    if model.llama_4_scaling_beta is not None:
        yield "factors of queries by their position, which have not been captured yet; give --cuda-graph-impl none"
    if model.hidden_dropout or model.attention_dropout:
        yield "dropout, which draws other numbers each time; give --hidden-dropout 0 --attention-dropout 0"
    if model.lora_rank:
        yield "adapters, whose layers hold frozen weights: their graphs are not supported; give --cuda-graph-impl none"
    if run.fp8.fp8_format is not None:
        yield "FP8 products, whose weights are quantized once per step; remove --fp8-format"
    if parallel.dynamic_context_parallel:
        yield "sequences of --dynamic-context-parallel, whose lengths differ; give --cuda-graph-impl none"
    elif run.data.separate_documents:
        yield "documents inside a sample, whose lengths differ; remove --reset-attention-mask, or use pretrain_gpt.py"
    if run.optimizer.main_grads_dtype != "fp32":
        yield "gradients that are rounded at random, with other bits each time; give --main-grads-dtype fp32"
    if parallel.context_parallel_size > 1:
        yield "messages of context parallelism, which the host posts; remove --context-parallel-size"
    if parallel.tp_comm_overlap:
        yield "chunks of products, whose order the host follows; remove --tp-comm-overlap"
    if splits_backward(parallel):
        yield "a backward in two halves; give --pipeline-schedule 1f1b or interleaved"
    if run.recompute.is_full:
        yield "recompute of whole layers; give --recompute-granularity selective"
    if run.recompute.recompute_policy == BALANCED:
        budget = "" if run.recompute.activation_memory_budget is None else " and --activation-memory-budget"
        yield f"recompute that is chosen by layer; remove --recompute-policy{budget}"
    settings = run.data_parallel_settings()
    if settings.shards == "optim_grads_params":
        yield "parameters whose memory moves; give --data-parallel-sharding-strategy optim"
    elif settings.mode != LAST:
        yield "gradients whose memory moves; give --grad-reduce-mode last-microbatch"
    if offload.kind is not None:
        yield f"copies of activations to host memory ({offload.kind}); remove the flags of activation offload"
    if offload.cpu_offloading_weights:
        yield "weights whose memory moves; remove --cpu-offloading-weights"


def rules(run: RunConfig) -> list[ConfigRule]:
    """Returns the rule."""
    return [partial(layers_can_be_captured, run)]
