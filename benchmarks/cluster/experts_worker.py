"""The process of one host for experts.py: a model whose experts are shared by all hosts.

Its microbatches run one after the other, or a forward together with the backward of another microbatch. It
communicates like worker.py: JSON lines on stdin and stdout.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cluster.stdio import run_worker
from megatron.base.launch import launch_environment
from megatron.base.mesh import Mesh
from megatron.config.model import ModelConfig
from megatron.core.comm.collectives import barrier
from megatron.core.comm.pipeline_messages import Mailbox
from megatron.core.groups import Groups, connect, create_groups, disconnect, with_experts
from megatron.core.models.gpt import GPTModel
from megatron.core.parameter import initialize, local_parameters
from megatron.core.pipeline_parallel.engine import PipelineEngine
from megatron.core.streams.streams import Streams
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.timeline import Timeline
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.schedule.registry import SCHEDULES

TIMEOUT_SECONDS = 600.0
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
CPU = torch.device("cpu")
SEQUENCE, MICROBATCHES = 1024, 16
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "num_experts": 8,
    "moe_router_topk": 2,
    "vocab_size": 256,
    "max_position_embeddings": SEQUENCE,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
WAYS = {"alone": "one after the other", "together": "--overlap-moe-expert-parallel-comm"}


class Experts:
    """The model as a Program of the engine, and the schedules of a step."""

    def __init__(self, groups: Groups) -> None:
        self._groups, self._streams = groups, Streams(CPU, Timeline(CPU))
        self._mailbox = Mailbox(groups, self._streams)
        config = ModelConfig(**SHAPE)
        rng, kernels = RngTracker(1, groups, CPU), choose_kernels(config, CPU)
        build = Build(config, groups, False, kernels, rng, CPU, yield_turn=self._streams.turns.yield_turn)
        self._model = GPTModel(build)
        initialize(local_parameters(self._model), 1)
        generator = torch.Generator().manual_seed(groups.rank)
        self._tokens = torch.randint(256, (MICROBATCHES, 1, SEQUENCE), generator=generator)
        self.loss = 0.0

    def step(self, way: str) -> None:
        """Computes the gradients of all microbatches."""
        self._model.zero_grad()
        self.loss = 0.0
        schedule = SCHEDULES["1f1b"].build(1, MICROBATCHES, pairs=way == "together")
        PipelineEngine(schedule, 0, self, self._mailbox, torch.float32, self, turns=self._streams.turns).run()

    @property
    def gradient(self) -> float:
        """The norm of a gradient, to compare the two orders."""
        return float(sum(p.grad.norm() for p in self._model.parameters() if p.grad is not None))

    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        """See Program."""
        tokens = self._tokens[microbatch]
        loss = self._model(tokens, torch.arange(SEQUENCE).unsqueeze(0), labels=tokens.roll(-1, 1))
        assert isinstance(loss, Tensor)
        self.loss += float(loss.detach().mean())
        return loss.mean()

    def backward(self, stage: int, microbatch: int, run: Callable[[], None], *, last: bool) -> None:
        """See Gradients."""
        run()

    def input_grad(self, stage: int, microbatch: int, run: Callable[[], None]) -> None:
        """Not called: the backward is whole."""
        raise AssertionError

    def weight_grad(self, stage: int, microbatch: int, *, last: bool) -> None:
        """Not called: the backward is whole."""
        raise AssertionError

    def shape(self, microbatch: int) -> tuple[int, ...]:
        """Not called: there is one stage."""
        raise AssertionError


def serve(lines: Iterable[str], answer: Callable[[dict[str, object]], None], names: Sequence[str]) -> None:
    """Joins the world, builds the model, and answers every line, {"rounds": n}, with name -> seconds, bytes, loss and
    gradient of every step, alternating."""
    rank, world_size, _ = launch_environment()
    heartbeat = connect(rank, world_size, backend="gloo", timeout_seconds=TIMEOUT_SECONDS)
    mesh = Mesh.create(world_size, ep=world_size)
    groups = with_experts(create_groups(mesh, rank, heartbeat, TIMEOUT_SECONDS), TIMEOUT_SECONDS)
    experts = Experts(groups)
    answer({"ready": {name: WAYS[name] for name in names}})
    for line in lines:
        request = json.loads(line)
        steps: dict[str, dict[str, list[float]]] = {
            name: {field: [] for field in ("seconds", "sent", "loss", "gradient")} for name in names
        }
        for number, name in itertools.product(range(request["rounds"]), names):
            answer({"progress": f"round {number + 1}/{request['rounds']} {name}"})
            barrier(groups.world)
            sent, started = int(SENT.read_text()), time.perf_counter()
            experts.step(name)
            steps[name]["seconds"].append(time.perf_counter() - started)
            barrier(groups.world)
            steps[name]["sent"].append(int(SENT.read_text()) - sent)
            steps[name]["loss"].append(experts.loss)
            steps[name]["gradient"].append(experts.gradient)
        answer({"measured": steps})
    disconnect(heartbeat)


if __name__ == "__main__":
    run_worker(__doc__, serve)
