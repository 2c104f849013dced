"""Compares planned and measured peak memory of small runs on the CPU, one row per run and pipeline rank.

Measured is every allocation of torch's CPU allocator, including temporaries of kernels
(kernels/backends/cpu_allocator.py), in the third step of a run. Processes are started once per number of ranks.

python -m benchmarks.memory_report [name ...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from megatron.tooling.memory_check import (
    GEMM_LAST,
    GPT,
    LAYERS,
    LLAMA,
    PARTS,
    PP2,
    RATIO,
    TP2,
    MemoryCheck,
    measure,
)

MIB = 1024**2

# name -> (processes, flags)
RUNS = {
    "llama, fp32": (1, LLAMA),
    "llama, bf16": (1, f"{LLAMA} --bf16"),
    "llama, bf16, fp32 residual, qk norm": (1, f"{LLAMA} --bf16 --fp32-residual-connection --qk-layernorm"),
    "GQA, tied, sequence 1024": (
        1,
        f"{LLAMA.replace('--untie-embeddings-and-output-weights', '')} --group-query-attention --num-query-groups 2 "
        "--seq-length 1024 --micro-batch-size 1",
    ),
    "GPT-2 layer, dropout, tied": (1, GPT),
    "GPT-2 layer, attention dropout, sgd": (1, "--seq-length 128 --optimizer sgd"),
    "squared ReLU, unfused attention": (1, f"{GPT} --squared-relu --attention-backend unfused"),
    "large vocabulary, bf16": (1, f"{LLAMA} --bf16 --vocab-size 16384 --num-layers 1"),
    "4 microbatches": (1, f"{LLAMA} --global-batch-size 8"),
    "GEMM-last": (1, f"{LLAMA} --bf16 {GEMM_LAST}"),
    "core attention again": (1, f"{LLAMA} --recompute-activations --attention-backend unfused"),
    "MLP and norms again": (1, f"{GPT} --recompute-granularity selective --recompute-modules mlp norm"),
    "full recompute, groups of 2": (
        1,
        f"{LLAMA} --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    ),
    "full recompute of 3 layers": (
        1,
        f"{LLAMA} --bf16 --recompute-granularity full --recompute-method block --recompute-num-layers 3",
    ),
    "offload, ratio 0.5": (1, f"{LLAMA} {RATIO} 0.5"),
    "offload, ratio 1, GPT-2, bf16, fp32 residual": (1, f"{GPT} {RATIO} 1 --bf16 --fp32-residual-connection"),
    "offload, ratio 1, GEMM-last": (1, f"{LLAMA} {RATIO} 1 {GEMM_LAST}"),
    "offload, ratio 1, full recompute, groups of 2": (
        1,
        f"{LLAMA} {RATIO} 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    ),
    "offload, ratio 0.5, full recompute of 3 layers": (
        1,
        f"{LLAMA} {RATIO} 0.5 --recompute-granularity full --recompute-method block --recompute-num-layers 3",
    ),
    "offload, ratio 1, core_attn recomputed": (
        1,
        f"{LLAMA} {RATIO} 1 --recompute-granularity selective --recompute-modules core_attn",
    ),
    "offload, 3 layers": (1, f"{LLAMA} {LAYERS} 3"),
    "offload, 6 layers, bf16": (1, f"{LLAMA} {LAYERS} 6 --bf16"),
    "offload, 7 layers and their weights": (1, f"{LLAMA} {LAYERS} 7 --cpu-offloading-weights"),
    "weights of 6 layers, bf16": (
        1,
        f"{LLAMA} --num-layers 8 --bf16 --cpu-offloading-weights --cpu-offloading-num-layers 6",
    ),
    "offload, core_attn attn_norm": (1, f"{LLAMA} {PARTS} core_attn attn_norm"),
    "offload, mlp_fc2 qkv_linear, GEMM-last, bf16": (1, f"{LLAMA} {PARTS} mlp_fc2 qkv_linear {GEMM_LAST} --bf16"),
    "tp 2": (2, f"{LLAMA} {TP2}"),
    "tp 2, sequence parallel, GPT-2, bf16": (2, f"{GPT} {TP2} --sequence-parallel --bf16"),
    "pp 2, 1f1b": (2, f"{LLAMA} {PP2} --global-batch-size 8"),
    "pp 2, gpipe, GEMM-last": (
        2,
        f"{LLAMA} {PP2} --global-batch-size 8 --pipeline-schedule gpipe --kaimm-recompute-norm "
        "--kaimm-recompute-mlp-activation-func",
    ),
    "pp 2, zb-h1": (2, f"{LLAMA} {PP2} --global-batch-size 8 --pipeline-schedule zb-h1"),
    "pp 2, zb-v": (2, f"{LLAMA} {PP2} --global-batch-size 8 --pipeline-schedule zb-v"),
    "pp 2, 2 virtual stages, tied": (
        2,
        f"{GPT} {PP2} --global-batch-size 8 --num-virtual-stages-per-pipeline-rank 2",
    ),
    "dp 2, ZeRO-1, bf16": (2, f"{LLAMA} --bf16 --use-distributed-optimizer"),
    "dp 2, overlapped": (
        2,
        f"{LLAMA} --overlapped-distributed-optimizer --grad-reduce-mode last-microbatch --global-batch-size 8",
    ),
    "dp 2, ZeRO-2": (
        2,
        f"{LLAMA} --data-parallel-sharding-strategy optim_grads --ddp-bucket-size 100000 --num-layers 10",
    ),
    "dp 2, ZeRO-3": (
        2,
        f"{LLAMA} --data-parallel-sharding-strategy optim_grads_params --ddp-bucket-size 100000 --num-layers 10",
    ),
    "tp 2, sequence parallel, offload, ratio 1": (2, f"{GPT} {TP2} --sequence-parallel --bf16 {RATIO} 1"),
    "pp 2, offload, ratio 1": (2, f"{LLAMA} {PP2} --global-batch-size 8 {RATIO} 1"),
    "pp 2, zb-h1, offload, ratio 0.5": (
        2,
        f"{LLAMA} {PP2} --global-batch-size 8 --pipeline-schedule zb-h1 {RATIO} 0.5",
    ),
    "pp 2, gpipe, offload, ratio 0.5": (
        2,
        f"{LLAMA} {PP2} --global-batch-size 8 --pipeline-schedule gpipe {RATIO} 0.5",
    ),
    "pp 2, offload, 2 layers": (2, f"{GPT} {PP2} --global-batch-size 8 {LAYERS} 2"),
    "cp 2": (2, f"{LLAMA} --context-parallel-size 2 --seq-length 512"),
    "pp 4, offload, ratio 1": (
        4,
        f"{LLAMA} --pipeline-model-parallel-size 4 --global-batch-size 16 {RATIO} 1",
    ),
    "tp 2, pp 2, sequence parallel, bf16": (4, f"{LLAMA} {TP2} --sequence-parallel {PP2} --global-batch-size 8 --bf16"),
    "pp 2, dp 2, ZeRO-1, full recompute": (
        4,
        f"{LLAMA} {PP2} --global-batch-size 16 --use-distributed-optimizer --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *RUNS], metavar="name", help="runs, default all of them")
    names = parser.parse_args().names or list(RUNS)
    print("| run | rank | planned MiB | measured MiB | planned / measured - 1 | planned at |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for world_size in sorted({RUNS[name][0] for name in names}):
        chosen = [name for name in names if RUNS[name][0] == world_size]
        for name, ranks in zip(chosen, run_all(world_size, [RUNS[name][1] for name in chosen]), strict=True):
            for found in ranks:
                error = found.planned.peak / found.peak - 1
                worst = max(worst, abs(error))
                print(
                    f"| {name} | {found.pp_rank} | {found.planned.peak / MIB:.2f} | {found.peak / MIB:.2f} | "
                    f"{error:+.2%} | {found.planned.moment} |",
                    flush=True,
                )
    print(f"\n{len(names)} runs; largest difference {worst:.2%}")


def run_all(world_size: int, runs: list[str]) -> list[list[MemoryCheck]]:
    """Returns, for each run, the pipeline ranks, each represented by the neighbour with the largest peak."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(rank, world_size, port, runs, there), daemon=True)
        process.start()
        there.close()  # so that the end of the process closes the pipe
        pipes.append(here)
        processes.append(process)
    found = []
    for _ in runs:
        ranks = [pipe.recv() for pipe in pipes]
        stages = sorted({each.pp_rank for each in ranks})
        found.append([max((e for e in ranks if e.pp_rank == s), key=lambda e: e.peak) for s in stages])
    for process in processes:
        process.join()
    return found


def work(rank: int, world_size: int, port: int, runs: list[str], out: Connection) -> None:
    """Measures all runs on one rank."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    if world_size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    for flags in runs:
        out.send(measure(rank, world_size, flags))
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
