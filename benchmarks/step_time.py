"""Time of one training step compared with a transformers LlamaForCausalLM with torch's fused AdamW.

Both have the same shape and batch, in one process. A step is forward, loss, backward, gradient clipping and update.
Rounds alternate between the two; medians of the times and of the per-round ratios are shown. In bf16 our side also
keeps fp32 masters, moments and gradients, the other side updates bf16 parameters with bf16 moments (the result of
`model.to(bfloat16)`).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.config.data import DataConfig
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.presets import preset
from megatron.config.run import RunConfig
from megatron.core.device import choose_device, synchronize
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import create_groups
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import initialize, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.training.batch import make_batch
from megatron.training.build_model import build_gpt
from megatron.training.logging.timers import Timers
from megatron.training.step import TrainStep

LR, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0


def main() -> None:
    """Prints one table, one row per dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    device = choose_device(args.device, 0)
    print(
        f"{args.layers} layers, hidden {args.hidden}, ffn {args.ffn}, heads {args.heads}/{args.kv_heads}, vocabulary "
        f"{args.vocab}, batch {args.batch} x {args.seq} tokens, {device.type}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {args.rounds} rounds"
    )
    print(f"{'dtype':9}  {'ours ms':>9}  {'transformers ms':>15}  {'ratio':>6}  {'loss':>9}  {'loss there':>10}")
    for dtype in args.dtypes:
        ids = torch.randint(0, args.vocab, (args.batch, args.seq + 1), device=device)
        sides = our_step(args, dtype, ids, device), their_step(args, dtype, ids, device)
        losses = [[step() for step in sides] for _ in range(2)][-1]  # warm-up
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.rounds):
            for step, taken in zip(sides, times, strict=True):
                started = time.perf_counter()
                step()
                synchronize(device)
                taken.append((time.perf_counter() - started) * 1000)
        ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
        ours, theirs = (statistics.median(taken) for taken in times)
        print(f"{dtype:9}  {ours:9.1f}  {theirs:15.1f}  {ratio:6.3f}  {losses[0]:9.5f}  {losses[1]:10.5f}", flush=True)


def our_step(args: argparse.Namespace, dtype: str, ids: Tensor, device: torch.device) -> Callable[[], float]:
    """Returns a step of this project's model and optimizer, which returns the loss."""
    shape = {
        **preset("llama-tiny"),
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "ffn_hidden_size": args.ffn,
        "num_attention_heads": args.heads,
        "num_query_groups": args.kv_heads,
        "vocab_size": args.vocab,
        "bf16": dtype == "bfloat16",
    }
    run = RunConfig(model=ModelConfig(**shape), optimizer=OptimizerConfig(clip_grad=CLIP, weight_decay=WEIGHT_DECAY))
    groups = create_groups(Mesh.create(1), 0, Heartbeat(0), 60.0)
    model = build_gpt(
        Build(run.model, groups, False, choose_kernels(run.model, device), RngTracker(1, groups, device), device)
    )
    initialize(local_parameters(model), 1)
    data_parallel = DataParallel(model, groups, data_parallel_settings(run.parallel), device)
    optimizer = Optimizer(run.optimizer, data_parallel, groups, fp16=False)
    step = TrainStep(model, data_parallel, optimizer, groups, Timers(0, lambda: None), per_token=True)
    batch = make_batch(ids, args.vocab, dataclasses.replace(DataConfig(), seq_length=args.seq))

    def take_step() -> float:
        loss = step.forward_backward([batch]).read()
        step.update(LR, WEIGHT_DECAY)
        return loss

    return take_step


def their_step(args: argparse.Namespace, dtype: str, ids: Tensor, device: torch.device) -> Callable[[], float]:
    """Returns a step of transformers' model with torch's fused AdamW, which returns the loss."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.seq,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(device=device, dtype=getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


if __name__ == "__main__":
    main()
