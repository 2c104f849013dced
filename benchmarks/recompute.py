"""What recompute costs and saves: steps of a small Llama with every mode, in turn, in one process.

A step is forward, loss, backward, clipping and update. Rounds go through all modes; the ratio is the median over rounds of a
mode's time to that of the step without recompute in the same round, by the wall clock and by the process's own CPU time,
which other work on the machine disturbs less. Saved bytes are counted: distinct storages that autograd keeps for one
microbatch, without parameters. All modes train the same model on the same batch, and their losses have to be equal.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.config.data import DataConfig
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.model import ModelConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import RunConfig
from megatron.core.device import choose_device, synchronize
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import create_groups
from megatron.core.heartbeat import Heartbeat
from megatron.core.mesh import Mesh
from megatron.core.models.gpt import GPTModel
from megatron.core.models.presets import preset
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import initialize, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.kernels.choose import choose_kernels
from megatron.training.batch import Batch, make_batch
from megatron.training.setup import build_model
from megatron.training.step import TrainStep, weighted_loss
from megatron.training.timers import Timers

LR, WEIGHT_DECAY = 1e-4, 0.01


def _parts(*names: str) -> RecomputeConfig:
    return RecomputeConfig(recompute_granularity="selective", recompute_modules=names)


MODES = {
    "none": RecomputeConfig(),
    "norm": _parts("norm"),
    "mlp_act": _parts("mlp_act"),
    "norm mlp_act (GEMM-last)": _parts("norm", "mlp_act"),
    "core_attn": _parts("core_attn"),
    "core_attn norm mlp_act": _parts("core_attn", "norm", "mlp_act"),
    "mlp": _parts("mlp"),
    "norm mlp": _parts("norm", "mlp"),
    "full, uniform 1": RecomputeConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
    "full, block, half": RecomputeConfig(recompute_granularity="full", recompute_method="block"),
}


def main() -> None:
    """Print one table, a row a mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    device = choose_device(args.device, 0)
    ids = torch.randint(0, args.vocab, (args.batch, args.seq + 1), device=device)
    batch = make_batch(ids, args.vocab, dataclasses.replace(DataConfig(), seq_length=args.seq))
    steps, saved = {}, {}
    for name, recompute in MODES.items():
        if recompute.recompute_method == "block":
            recompute = dataclasses.replace(recompute, recompute_num_layers=args.layers // 2)
        model, steps[name] = make(args, recompute, batch, device)
        saved[name] = saved_bytes(model, batch)
    losses = {name: step() for name, step in steps.items()}  # warm-up
    assert len(set(losses.values())) == 1, f"losses differ: {losses}"
    times = measure(steps, args.rounds, device)
    print(
        f"{args.layers} layers, hidden {args.hidden}, ffn {args.ffn}, heads {args.heads}/{args.kv_heads}, vocabulary "
        f"{args.vocab}, batch {args.batch} x {args.seq} tokens, {args.dtype}, {device.type}, {torch.get_num_threads()} "
        f"threads, torch {torch.__version__}, {args.rounds} rounds\n"
    )
    print("| recomputed | saved, MB | of none | step, ms | ratio | CPU ratio |\n|---|---|---|---|---|---|")
    for name in MODES:
        wall, cpu = (
            statistics.median(mine[which] / none[which] for mine, none in zip(times[name], times["none"], strict=True))
            for which in (0, 1)
        )
        median = statistics.median(seconds for seconds, _ in times[name]) * 1000
        share = saved[name] / saved["none"]
        print(f"| {name} | {saved[name] / 1e6:.1f} | {share:.0%} | {median:.0f} | {wall:.3f} | {cpu:.3f} |")


def make(
    args: argparse.Namespace, recompute: RecomputeConfig, batch: Batch, device: torch.device
) -> tuple[GPTModel, Callable[[], float]]:
    """A model, and a step of it, which returns the loss."""
    shape = {
        **preset("llama-tiny"),
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "ffn_hidden_size": args.ffn,
        "num_attention_heads": args.heads,
        "num_query_groups": args.kv_heads,
        "vocab_size": args.vocab,
        "bf16": args.dtype == "bfloat16",
    }
    run = RunConfig(model=ModelConfig(**shape), recompute=recompute)
    groups = create_groups(Mesh.create(1), 0, Heartbeat(0), 60.0)
    model = build_model(run, groups, device, choose_kernels(run.model, device), RngTracker(1, groups, device))
    initialize(local_parameters(model), 1)
    data_parallel = DataParallel(model, groups, data_parallel_settings(run.parallel), device)
    optimizer = Optimizer(run.optimizer, data_parallel, groups, fp16=False)
    step = TrainStep(model, data_parallel, optimizer, groups, Timers(0, lambda: None), per_token=True)
    return model, lambda: step([batch], LR, WEIGHT_DECAY)[0]


def saved_bytes(model: GPTModel, batch: Batch) -> int:
    """Bytes of distinct storages that autograd keeps of a forward, head and loss included."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            found[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = weighted_loss(model, batch, batch.loss_mask)
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def measure(
    steps: dict[str, Callable[[], float]], rounds: int, device: torch.device
) -> dict[str, list[tuple[float, float]]]:
    """Of each mode and round: (seconds by the clock, by the process)."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            synchronize(device)
            started, used = time.perf_counter(), time.process_time()
            step()
            synchronize(device)
            times[name].append((time.perf_counter() - started, time.process_time() - used))
    return times


if __name__ == "__main__":
    main()
