"""The process of one host for tensor_parallel.py: decoder layers sharded over all hosts.

It runs their communication with several methods, and communicates like worker.py: JSON lines on stdin and stdout.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cluster.stdio import run_worker
from megatron.base.launch import launch_environment
from megatron.base.mesh import Mesh
from megatron.config.data_parallel import DataParallelSettings
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.core.comm.collectives import Handle, barrier
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Group, Groups, connect, create_groups, disconnect
from megatron.core.parameter import initialize, local_parameters
from megatron.core.streams.streams import Streams
from megatron.core.tensor_parallel.overlap import Plain, choose_overlap
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.timeline import Timeline
from megatron.core.transformer.block import TransformerLayer
from megatron.core.transformer.context import Build, Positions
from megatron.kernels.choose import choose_kernels
from megatron.kernels.ops.linear import LinearKernel, OutputGrad

TIMEOUT_SECONDS = 600.0
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
CPU = torch.device("cpu")
LAYERS, SEQUENCE, MICRO_BATCH, HIDDEN = 2, 512, 2, 1024
SHAPE: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 2816,
    "num_attention_heads": 16,
    "vocab_size": 128,
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
# Name -> (title, flags); compute only has none.
WAYS: dict[str, tuple[str, dict[str, bool] | None]] = {
    "compute": ("compute only", None),
    "serial": ("no overlap", {"tp_comm_bulk_dgrad": False, "tp_comm_bulk_wgrad": False}),
    "bulk": ("bulk only (no flag)", {}),
    "pieces": ("--tp-comm-overlap", {"tp_comm_overlap": True}),
}


class Silent(Plain):
    """The same GEMMs of the same shapes on local tensors, without communication."""

    def gather_linear(self, kernel: LinearKernel, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group) -> Tensor:
        """See Plain."""
        return kernel.output(_repeated(x, tp), weight, bias)

    def linear_sum(self, kernel: LinearKernel, x: Tensor, weight: Tensor, tp: Group, *, scatter: bool) -> Tensor:
        """See Plain."""
        return kernel.output(x, weight)[: x.shape[0] // tp.size]

    def gather_input_grad(
        self, kernel: LinearKernel, grad: Tensor, weight: Tensor, tp: Group, *, for_weight: bool
    ) -> tuple[OutputGrad, Tensor]:
        """See Plain."""
        full = kernel.prepare(_repeated(grad, tp), for_weight=for_weight)
        return full, kernel.input_grad(full, weight)

    def input_grad_sum(
        self, kernel: LinearKernel, grad: OutputGrad, weight: Tensor, tp: Group, *, scatter: bool
    ) -> tuple[Tensor, list[Handle]]:
        """See Plain."""
        return kernel.input_grad(grad, weight)[: grad.tensor.shape[0] // tp.size], []

    def gather_input(self, x: Tensor, tp: Group) -> tuple[Tensor, list[Handle]]:
        """See Plain."""
        return _repeated(x, tp), []


class Layers(nn.Module):
    """Decoder layers under sequence parallelism, in sequence."""

    def __init__(self, groups: Groups, flags: dict[str, bool] | None) -> None:
        super().__init__()
        config, parallel = ModelConfig(**SHAPE), ParallelConfig(sequence_parallel=True, **(flags or {}))
        overlap, _ = choose_overlap(parallel, groups.tp, "gloo", Streams(CPU, Timeline(CPU)))
        if flags is None:
            overlap = Silent(parallel)
        build = Build(config, groups, True, choose_kernels(config, CPU), RngTracker(1, groups, CPU), CPU, overlap)
        self.layers = nn.ModuleList(TransformerLayer(build, number) for number in range(LAYERS))
        initialize(local_parameters(self), 1)
        self.data_parallel = DataParallel(self, groups, DataParallelSettings(), CPU)

    def step(self, x: Tensor) -> float:
        """Runs forward and backward; returns the loss of this rank's rows."""
        self.data_parallel.begin_step(1)
        self.data_parallel.begin_backward(last=True)
        for layer in self.layers:
            x = layer(x, Positions((), None))
        loss = x.square().mean()
        loss.backward()
        self.data_parallel.end_backward(last=True)
        return float(loss.detach())


def _repeated(x: Tensor, tp: Group) -> Tensor:
    return torch.cat([x] * tp.size)


def measure(
    ways: dict[str, Layers], rounds: int, x: Tensor, world: Group, tell: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Returns name -> seconds and bytes of every step, alternating between methods. Collective over `world`."""
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "sent": [], "loss": 0.0} for name in ways}
    for number, (name, layers) in itertools.product(range(rounds), ways.items()):
        tell(f"round {number + 1}/{rounds} {name}")
        barrier(world)
        sent, started = int(SENT.read_text()), time.perf_counter()
        found[name]["loss"] = layers.step(x)
        found[name]["seconds"].append(time.perf_counter() - started)
        barrier(world)  # wait until all data of this rank is sent
        found[name]["sent"].append(int(SENT.read_text()) - sent)
    return found


def serve(lines: Iterable[str], answer: Callable[[dict[str, object]], None], names: Sequence[str]) -> None:
    """Joins the world, builds, and measures for every line: {"rounds": n, "ways": [names]}."""
    rank, world_size, _ = launch_environment()
    heartbeat = connect(rank, world_size, backend="gloo", timeout_seconds=TIMEOUT_SECONDS)
    groups = create_groups(Mesh.create(world_size, tp=world_size), rank, heartbeat, TIMEOUT_SECONDS)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(SEQUENCE // world_size, MICRO_BATCH, HIDDEN, generator=generator).requires_grad_()
    ways = {}
    for name in names:
        answer({"progress": f"building {name}"})
        ways[name] = Layers(groups, WAYS[name][1])
        ways[name].step(x)
    answer({"ready": {name: WAYS[name][0] for name in names}})
    for line in lines:
        request = json.loads(line)
        chosen = {name: ways[name] for name in request["ways"]}
        found = measure(chosen, request["rounds"], x, groups.world, lambda text: answer({"progress": text}))
        answer({"measured": found})
    disconnect(heartbeat)


if __name__ == "__main__":
    run_worker(__doc__, serve)
