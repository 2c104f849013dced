"""Dry runs: every feature's CUDA code takes a step on tensors without memory, and takes the memory that was planned."""

import io
import logging

import pytest
import torch

from megatron.base.errors import ConfigError, UserError
from megatron.base.log import LOGGER_NAME
from megatron.command_line.read import parse
from megatron.config.mesh import mesh_of
from megatron.config.rules.check import check
from megatron.config.settings import resolve
from megatron.core.streams.simulated import H100, SimulatedEvent, SimulatedStream, SimulatedStreams, simulated_cuda
from megatron.core.timeline import Timeline
from megatron.planner.memory.plan import plan_memory
from megatron.spec.sizes import FUSED_GPU
from megatron.training.dry_run.main import dry_run
from megatron.training.dry_run.trace import shortened, trace

# Large enough that 512 bytes, to which every tensor is rounded up, hardly matter. One layer for each pipeline stage.
SMALL = (
    "--dry-run --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --seq-length 1024 "
    "--micro-batch-size 2 --vocab-size 4096 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --train-iters 9 --lr 1e-3 --eval-iters 0"
)
BF16 = "--bf16 --num-layers 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2 --cp-comm-type"
SHARDED = "--data-parallel-sharding-strategy"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"

LATENTS = "--multi-latent-attention --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32"
PARTS = "--recompute-granularity selective --recompute-modules"
# name -> (ranks, flags)
RUNS = {
    "one rank": (1, BF16),
    "fp16, dropout, LayerNorm": (
        1, "--fp16 --num-layers 2 --hidden-dropout 0.1 --attention-dropout 0.1 --normalization LayerNorm"
    ),
    "tp": (2, f"{BF16} {TP2}"),
    "tp in chunks": (2, f"{BF16} {TP2} --tp-comm-overlap"),
    "1f1b": (2, f"{BF16} {PP2} --global-batch-size 16"),
    "zb-v, tp, dp": (8, f"--bf16 --num-layers 4 {PP2} {TP2} --pipeline-schedule zb-v --global-batch-size 16"),
    "ring": (2, f"{BF16} {CP2} p2p"),
    "zero-1": (4, f"{BF16} {SHARDED} optim {OVERLAP}"),
    "zero-3": (4, f"{BF16} {SHARDED} optim_grads_params {OVERLAP} --micro-batch-size 8 --global-batch-size 64"),
    "whole layers again": (1, f"{BF16} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "offloaded activations": (1, "--bf16 --num-layers 5 --pipeline-offload-ratio 1"),
    "long sequence": (
        2,
        f"--bf16 --num-layers 8 --vocab-size 1024 --micro-batch-size 1 --seq-length 32768 {CP2} a2a {SHARDED} "
        "optim_grads_params --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--mlp-chunk-size 2048 --pipeline-offload-ratio 1 --optimizer-cpu-offload",
    ),
    "documents": (1, f"{BF16} --reset-attention-mask"),
    "documents, one sample": (1, f"{BF16} --reset-attention-mask --micro-batch-size 1"),
    "documents, all-to-all": (2, f"{BF16} {CP2} a2a --reset-attention-mask"),
    "offloaded states": (1, f"{BF16} --offload-optimizer-states"),
    "fp8, delayed": (1, f"{BF16} --fp8-format hybrid"),
    "fp8 experts": (
        1,
        f"{BF16} --fp8-format e4m3 --fp8-recipe blockwise --num-experts 4 --moe-ffn-hidden-size 256 "
        "--moe-router-force-load-balancing",
    ),
    "latents": (2, f"{BF16} {TP2} --sequence-parallel {LATENTS} --q-lora-rank 48"),
    "latents, projected up again, predictions": (
        2, f"{BF16} {PP2} {LATENTS} {PARTS} mla_up_proj norm --mtp-num-layers 1 --global-batch-size 8",
    ),
    "fp8, blockwise, tp": (2, f"{BF16} {TP2} --fp8-format e4m3 --fp8-recipe blockwise --ffn-hidden-size 1536"),
}  # fmt: skip


# Others do as much.
SLOW = {
    "tp", "zero-1", "whole layers again", "documents, one sample", "offloaded states", "fp8, delayed", "fp8, blockwise, tp",
    "fp8 experts",
}  # fmt: skip


def configured(ranks, flags):
    grouped = "" if LATENTS in flags else "--group-query-attention --num-query-groups 4"
    run = parse(f"{SMALL} {grouped} --world-size {ranks} {flags}".split(), description="")
    check(run, ranks)
    return run


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in RUNS])
def test_a_step_takes_the_planned_memory(name):
    ranks, flags = RUNS[name]
    run = configured(ranks, flags)
    settings = resolve(run, mesh_of(run.parallel, ranks))
    traced = trace(run, ranks, ranks - 1, H100)
    planned = plan_memory(run, settings, FUSED_GPU)[traced.stage]
    assert traced.peak == pytest.approx(planned.peak, rel=0.05)
    exchanges = sum(run.model.moe_layers) if run.model.num_experts else 0  # of its one microbatch
    assert traced.host_reads == 1 + exchanges, "the numbers of the step, and the rows of experts"


@pytest.mark.parametrize(("flags", "traced"), [(f"{PP2} --num-layers 4", 4), (f"{PP2} --pipeline-schedule gpipe", 32)])
def test_as_many_microbatches_are_traced_as_a_rank_holds(flags, traced):
    run = configured(2, f"--bf16 --num-layers 2 {flags} --global-batch-size 64")
    short = shortened(run, 2)
    assert short.train.global_batch_size == 2 * traced and short.model == run.model


def test_collectives_are_counted():
    """Tensor parallelism with sequence parallelism gathers and scatters twice per layer in forward and in backward."""
    traced = trace(configured(2, f"{BF16} {TP2}"), 2, 1, H100)
    calls = {op: count for (group, op), (count, _) in traced.traffic.items() if group == "tp"}
    layers = 2
    # In backward the inputs of the two column layers are gathered once more. The head is a column layer, too, and the
    # embedding is scattered.
    assert calls["reduce_scatter"] == 4 * layers + 2 and calls["all_gather"] == 6 * layers + 3


@pytest.fixture
def printed():
    """The output of a run."""
    logger, text = logging.getLogger(LOGGER_NAME), io.StringIO()
    handlers, level = logger.handlers, logger.level
    logger.handlers = [logging.StreamHandler(text)]
    logger.setLevel(logging.INFO)
    yield text
    logger.handlers = handlers
    logger.setLevel(level)


class TestTheAnswer:
    def test_a_run_that_fits(self, printed):
        dry_run(configured(4, f"{BF16} {PP2}"), 4)
        lines = printed.getvalue().splitlines()
        assert any(line.startswith("--dry-run") and "4 x NVIDIA H100" in line for line in lines)
        assert [line.split(",")[0] for line in lines if "operations" in line] == ["rank 0 of 4", "rank 3 of 4"]
        assert lines[-1].startswith("would start: peak 0.")

    def test_a_run_that_does_not_fit(self):
        with pytest.raises(UserError, match=r"rank 0 would run out of memory: it needs \d\d+\.\d GB, .* has 80 GB"):
            dry_run(configured(1, f"{BF16} --attention-backend unfused --seq-length 8192 --micro-batch-size 16"), 1)

    def test_adapters_are_refused(self):
        with pytest.raises(ConfigError, match="--dry-run traces no adapters; remove it, or --lora-rank 4"):
            dry_run(configured(1, f"{BF16} --lora-rank 4 --load x"), 1)


class TestSimulatedStreams:
    def test_the_last_operation_of_a_stream_is_under_way(self):
        stream = SimulatedStream(torch.device("cuda", 0))
        first, second = stream.record_event(), stream.record_event()
        assert (first.query(), second.query()) == (True, False)
        second.synchronize()
        assert second.query()

    def test_an_event_that_was_not_recorded_is_reached(self):
        assert SimulatedEvent().query()

    def test_work_of_the_host_is_left_out(self):
        device, ran = torch.device("cuda", 0), []
        stream = SimulatedStreams(device, Timeline(device)).host_stream("update")
        stream.run(lambda: ran.append(1), "chunk").synchronize()
        assert not ran

    def test_torch_is_as_before_afterwards(self):
        before = dict(vars(torch.cuda)), torch.Generator
        with simulated_cuda(H100, lambda: 0):
            assert torch.cuda.get_device_capability() == (9, 0)
            with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 0))) as _:
                inner = torch.cuda.current_stream()
            assert torch.cuda.current_stream() is not inner
        assert (dict(vars(torch.cuda)), torch.Generator) == before
