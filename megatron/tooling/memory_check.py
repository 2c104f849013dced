"""The measured peak memory of small runs on the CPU, to compare it with the plan.

Every allocation of torch's CPU allocator counts, kernels' temporaries included (kernels/backends/cpu_allocator.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.base.heartbeat import Heartbeat
from megatron.command_line.read import parse
from megatron.config.context_parallel import context_sizes
from megatron.config.mesh import mesh_of
from megatron.config.rules.check import check
from megatron.config.run import RunConfig, with_batch_of_answers
from megatron.config.settings import resolve
from megatron.core.groups import Groups, create_groups
from megatron.kernels.backends.cpu_allocator import CpuMemory
from megatron.planner.memory.plan import RankMemory, plan_memory
from megatron.training.setup import build
from megatron.training.trainer import Trainer

WARM_STEPS = 2  # after them every state of the optimizer exists
# One rank has the same peak in every step; with others, a message that is freed late raises that of some steps.
MEASURED_STEPS_ALONE, MEASURED_STEPS = 1, 5
TIMEOUT = 600.0  # seconds
CPU = torch.device("cpu")

# Flags of small runs, by what they ask for.
COMMON = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --micro-batch-size 2 --vocab-size 1024 "
    "--tokenizer-type NullTokenizer --mock-data --train-iters 9 --lr 1e-3 --eval-iters 0 --num-workers 0 --device cpu "
    "--log-interval 100"
)
LLAMA = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --ffn-hidden-size 704 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
GPT = "--attention-dropout 0 --hidden-dropout 0.1"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
# Offloaded activations; with enough layers that most of them are offloaded.
RATIO = "--num-layers 8 --pipeline-offload-ratio"
LAYERS = "--num-layers 8 --cpu-offloading --cpu-offloading-num-layers"
PARTS = "--num-layers 8 --fine-grained-activation-offloading --offload-modules"
# A short model, so that one layer with experts needs most memory.
EXPERTS = (
    "--num-layers 1 --seq-length 512 --vocab-size 64 --make-vocab-size-divisible-by 8 --optimizer sgd --num-experts 8 "
    "--moe-ffn-hidden-size 192"
)
GEMM_LAST = "--recompute-granularity selective --recompute-modules norm mlp_act"


@dataclass(frozen=True)
class MemoryCheck:
    """The result of one rank.

    pp_rank: its pipeline rank. planned: its planned memory. peak: bytes, the smallest of the peaks of several steps. A
    message that gloo frees a moment late raises the peak of a single step by up to 4 %, and says nothing about the
    plan.
    """

    pp_rank: int
    planned: RankMemory
    peak: int


def configured(flags: str, world_size: int) -> RunConfig:
    """Returns a checked run."""
    common = COMMON.replace("--mock-data", "") if "--perform-rl-step" in flags else COMMON
    run = with_batch_of_answers(parse(f"{common} {flags}".split(), description=""))
    check(run, world_size)
    return run


def measure(
    rank: int,
    world_size: int,
    flags: str,
    prepare: Callable[[Trainer], None] = lambda trainer: None,
    imbalance: float = 1.0,
    builder: Callable[[RunConfig, Groups, torch.device], Trainer] = build,
) -> MemoryCheck:
    """Builds the run, takes some steps, and measures. Collective over the world, which torch.distributed has joined.

    prepare: changes the trainer before the first step. imbalance: the largest load of an expert over the mean, for the
    plan. builder: builds the trainer.
    """
    run = configured(flags, world_size)
    settings = resolve(run, mesh_of(run.parallel, world_size))
    groups = create_groups(
        settings.mesh,
        rank,
        Heartbeat(rank),
        TIMEOUT,
        optimizer_instances=settings.data_parallel.optimizer_instances,
        context_sizes=context_sizes(run.parallel, settings.mesh),
    )
    memory = CpuMemory()
    gc.collect()
    before = memory.allocated
    trainer = builder(run, groups, CPU)
    prepare(trainer)
    for _ in range(WARM_STEPS):
        trainer.train_step()
    peaks = []
    for _ in range(MEASURED_STEPS_ALONE if world_size == 1 else MEASURED_STEPS):
        memory.reset_peak()
        trainer.train_step()
        peaks.append(memory.peak - before)
    planned = plan_memory(run, settings, trainer.target, imbalance)[groups.pp.rank]
    return MemoryCheck(groups.pp.rank, planned, min(peaks))
