"""The process of one host for context_parallel.py: a decoder layer on a sequence sharded over all hosts.

It runs the attention with several methods, and communicates like worker.py: JSON lines on stdin and stdout.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cluster.peer_ring import TorchRing, silent_ring
from benchmarks.cluster.stdio import run_worker
from megatron.base.launch import launch_environment
from megatron.base.mesh import Mesh
from megatron.config.model import ModelConfig
from megatron.core.comm.collectives import Handle, barrier
from megatron.core.context_parallel import all_gather, layout, ring, ulysses
from megatron.core.context_parallel.ring import RingAttention
from megatron.core.groups import Group, Groups, connect, create_groups, disconnect
from megatron.core.parameter import initialize, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.block import TransformerLayer
from megatron.core.transformer.context import Build, Positions
from megatron.kernels.choose import Kernels, choose_kernels
from megatron.kernels.ops.attention_lse import BlockKernel
from megatron.kernels.ops.attention_rule import Rule
from megatron.kernels.ops.attention_scores import Scores

TIMEOUT_SECONDS = 600.0
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
CPU = torch.device("cpu")
SEQUENCE, MICRO_BATCH, HIDDEN, HEADS = 8192, 1, 128, 4
SCORES = Scores(1.0 / math.sqrt(HIDDEN / HEADS))
SHAPE: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 352,
    "num_attention_heads": HEADS,
    "vocab_size": 128,
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
OURS = ("p2p", "all_gather", "a2a")
PEERS = {"torch-alltoall": "torch ring, alltoall", "torch-allgather": "torch ring, allgather"}
WAYS = {**{kind: f"--cp-comm-type {kind}" for kind in OURS}, **PEERS}


class Counter:
    """Counts the attention FLOPs of a kernel: 4 d per visible pair and head forward, 10 d backward."""

    def __init__(self) -> None:
        self.flops = 0

    def wrap(self, kernels: Kernels) -> Kernels:
        """Wraps kernels with counting."""
        blocks, whole = kernels.block_attention, kernels.attention

        def forward(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
            self._add(4, q, k, rule)
            return blocks.forward(q, k, v, rule)

        def backward(
            grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
        ) -> tuple[Tensor, Tensor, Tensor]:
            self._add(10, q, k, rule)
            return blocks.backward(grad, q, k, v, out, lse, rule)

        def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            self._add(14, q, k, Rule(SCORES, 0))  # its backward is torch's
            return whole(q, k, v, **options)

        fields = {**vars(kernels), "attention": attention, "block_attention": BlockKernel(forward, backward)}
        return Kernels(**fields)

    def _add(self, factor: int, q: Tensor, k: Tensor, rule: Rule) -> None:
        s, b, n, d = q.shape
        mask = rule.mask(s, len(k), q.device)
        pairs = s * len(k) if mask is None else int(mask.sum())
        self.flops += factor * d * pairs * b * n


def make_layer(groups: Groups, name: str, kernels: Kernels) -> TransformerLayer:
    """Returns the decoder layer with one of WAYS; the weights are the same in all."""
    config = ModelConfig(**SHAPE)
    kind = name if name in OURS else "p2p"
    build = Build(config, groups, False, kernels, RngTracker(1, groups, CPU), CPU, cp_comm_types=(kind,))
    layer = TransformerLayer(build, 0)
    if name in PEERS:
        layer.self_attention.core = TorchRing(groups.cp, name.removeprefix("torch-"))
    initialize(local_parameters(layer), 1)
    return layer


def step(layer: TransformerLayer, x: Tensor) -> float:
    """Runs forward and backward; returns the loss of this rank's tokens."""
    x.grad = None
    layer.zero_grad()
    loss = layer(x, Positions((), None)).square().mean()
    loss.backward()
    return float(loss.detach())


@contextlib.contextmanager
def silent(size: int) -> Iterator[None]:
    """Replaces communication by local tensors of the same shapes, so that only the computations remain."""

    def gathered(x: Tensor, group: Group) -> tuple[Tensor, Handle]:
        return x.repeat(size, *[1] * (x.dim() - 1)), Handle("all_gather", group, None, ())

    def reduced(x: Tensor, group: Group) -> tuple[Tensor, Handle]:
        return x[: len(x) // size], Handle("reduce_scatter", group, None, ())

    def same(x: Tensor, group: Group, tag: int = 0) -> tuple[Tensor, Handle]:
        return x, Handle("shift", group, None, ())

    with (
        mock.patch.object(ring, "shift_async", same),
        mock.patch.object(ulysses, "all_to_all_async", same),
        mock.patch.multiple(all_gather, all_gather_async=gathered, reduce_scatter_async=reduced),
        silent_ring(size),
    ):
        yield


def measure(
    layers: dict[str, TransformerLayer], rounds: int, x: Tensor, world: Group, tell: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Returns name -> seconds and bytes of every step, and seconds without communication, alternating. Collective."""
    fields = ("seconds", "alone", "sent")
    found: dict[str, dict[str, Any]] = {name: {field: [] for field in fields} for name in layers}
    for number, (name, layer) in itertools.product(range(rounds), layers.items()):
        tell(f"round {number + 1}/{rounds} {name}")
        barrier(world)
        sent, started = int(SENT.read_text()), time.perf_counter()
        found[name]["loss"] = step(layer, x)
        found[name]["seconds"].append(time.perf_counter() - started)
        found[name]["gradient"] = float(x.grad.norm()) if x.grad is not None else 0.0
        barrier(world)  # wait until all data of this rank is sent
        found[name]["sent"].append(int(SENT.read_text()) - sent)
        with silent(world.size):
            started = time.perf_counter()
            step(layer, x)
            found[name]["alone"].append(time.perf_counter() - started)
    return found


def ring_step_seconds(groups: Groups, kernels: Kernels, rounds: int) -> list[float]:
    """Returns the seconds of the attention of one ring step, forward, without communication. Collective."""
    attention = RingAttention(groups.cp, kernels.block_attention)
    q, k, v = torch.randn(3, SEQUENCE // groups.cp.size, MICRO_BATCH, HEADS, HIDDEN // HEADS).unbind()
    seconds = []
    for _ in range(rounds):
        barrier(groups.world)
        with silent(groups.cp.size), torch.no_grad():
            started = time.perf_counter()
            attention(q, k, v, scores=SCORES, segments=None, window=None, dropout=0.0)
            seconds.append((time.perf_counter() - started) / groups.cp.size)
    return seconds


def counted(groups: Groups, kernels: Kernels, x: Tensor) -> dict[str, int]:
    """Returns the attention FLOPs of this rank's step, by method of this program. Collective."""
    found = {}
    for name in OURS:
        counter = Counter()
        step(make_layer(groups, name, counter.wrap(kernels)), x)
        found[name] = counter.flops
    return found


def serve(lines: Iterable[str], answer: Callable[[dict[str, object]], None], names: Sequence[str]) -> None:
    """Joins the world, builds the layers, and answers every line: {"flops": true}, {"ring": rounds} or {"rounds":
    n}."""
    rank, world_size, _ = launch_environment()
    heartbeat = connect(rank, world_size, backend="gloo", timeout_seconds=TIMEOUT_SECONDS)
    groups = create_groups(Mesh.create(world_size, cp=world_size), rank, heartbeat, TIMEOUT_SECONDS)
    whole = torch.randn(SEQUENCE, MICRO_BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
    x = layout.take(whole, 0, rank, world_size).requires_grad_()
    kernels = choose_kernels(ModelConfig(**SHAPE), CPU)
    layers = {name: make_layer(groups, name, kernels) for name in names}
    answer({"ready": {name: WAYS[name] for name in names}})
    for line in lines:
        request = json.loads(line)
        if "flops" in request:
            answer({"measured": counted(groups, kernels, x)})
        elif "ring" in request:
            answer({"measured": {"seconds": ring_step_seconds(groups, kernels, request["ring"])}})
        else:
            found = measure(layers, request["rounds"], x, groups.world, lambda text: answer({"progress": text}))
            answer({"measured": found})
    disconnect(heartbeat)


if __name__ == "__main__":
    run_worker(__doc__, serve)
