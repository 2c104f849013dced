"""The common parts of all measured systems (model, batches, optimizer settings, interface), and the table of systems.

A system is one way of training the same model on several hosts. It is built on every rank, then asked for steps.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.core.datasets.mock import MockDataset
from megatron.core.groups import Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.parameter import initialize, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.training.batch import Batch, make_batch
from megatron.training.build_model import build_gpt

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.95), 1e-8, 0.01, 1.0
VOCAB, SEQUENCE, MICRO_BATCH, SEED = 4096, 256, 2, 1
SHAPE: dict[str, Any] = {  # about 17M parameters
    "num_layers": 8,
    "hidden_size": 384,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 6,
    "max_position_embeddings": SEQUENCE,
    "vocab_size": VOCAB,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
FP32 = 4  # bytes

# Name -> module:class. A system's packages are imported only if it is measured.
SYSTEMS = {
    "compute": "benchmarks.cluster.ours:ComputeOnly",
    "plain": "benchmarks.cluster.ours:PlainAllReduce",
    "serial": "benchmarks.cluster.ours:Serial",
    "overlapped": "benchmarks.cluster.ours:Overlapped",
    "overlapped-last": "benchmarks.cluster.ours:OverlappedLast",
    "overlapped-every": "benchmarks.cluster.ours:OverlappedEvery",
    "ddp": "benchmarks.cluster.peers:DDP",
    "ddp-small-buckets": "benchmarks.cluster.peers:DDPSmallBuckets",
    "ddp-zero": "benchmarks.cluster.peers:DDPZero",
    "fsdp": "benchmarks.cluster.peers:FSDP",
    "fsdp-reshard": "benchmarks.cluster.peers:FSDPReshard",
    "deepspeed-zero1": "benchmarks.cluster.peer_deepspeed:Zero1",
    "deepspeed-zero2": "benchmarks.cluster.peer_deepspeed:Zero2",
}
NEEDS_DEEPSPEED = ("deepspeed-zero1", "deepspeed-zero2")


class System(abc.ABC):
    """One way to train. All ranks make the same calls in the same order."""

    title: str  # in the table

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    @abc.abstractmethod
    def step(self, batches: Sequence[Batch]) -> float:
        """Trains on these microbatches of this rank; returns their mean loss (of this rank or of all).

        It may return while parameters are still in flight, as long as the next `step` waits for them.
        """

    @abc.abstractmethod
    def memory(self) -> int:
        """Returns the bytes of gradients, optimizer state and buffers, without parameters, that are held through a
        step.
        """

    @abc.abstractmethod
    def wire_bytes(self, accumulation: int) -> float:
        """Returns the bytes that a rank must send in a step of `accumulation` microbatches, by the formula of the
        collectives.

        Reduce-scatter and all-gather of n elements are (N-1)/N n each; an all-reduce is one of each.
        """

    def finish(self) -> None:  # noqa: B027  (most systems leave nothing in flight)
        """Waits for everything that the last step left in flight."""


def build_system(name: str, groups: Groups) -> System:
    """Returns the system of that name."""
    module, _, cls = SYSTEMS[name].partition(":")
    made = getattr(importlib.import_module(module), cls)(groups)
    assert isinstance(made, System)
    return made


def make_model(groups: Groups) -> GPTModel:
    """Returns the measured model with the same weights on every rank. No buffer owns its gradients."""
    run = RunConfig(model=ModelConfig(**SHAPE))
    device = torch.device("cpu")
    rng = RngTracker(SEED, groups, device)
    model = build_gpt(Build(run.model, groups, False, choose_kernels(run.model, device), rng, device))
    initialize(local_parameters(model), SEED)
    return model


def count_parameters() -> int:
    """Returns the number of elements of the measured model."""
    h, f, layers = SHAPE["hidden_size"], SHAPE["ffn_hidden_size"], SHAPE["num_layers"]
    return layers * (4 * h * h + 3 * h * f + 2 * h) + h + 2 * VOCAB * h


def make_batches(rank: int, count: int) -> list[Batch]:
    """Returns `count` microbatches that only this rank sees."""
    samples = MockDataset((rank + 1) * count * MICRO_BATCH, SEQUENCE, VOCAB, SEED)
    data = dataclasses.replace(DataConfig(), seq_length=SEQUENCE)
    first = rank * count * MICRO_BATCH
    ids = torch.stack([torch.from_numpy(samples[first + n]) for n in range(count * MICRO_BATCH)])
    # No token ends a document, so every label counts and means of means are means.
    return [make_batch(piece, VOCAB, data) for piece in ids.view(count, MICRO_BATCH, SEQUENCE + 1)]


def mean_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Returns the mean loss over the microbatch's tokens."""
    per_token: Tensor = model(batch.tokens, batch.positions, labels=batch.labels, segments=batch.segments)
    return per_token.mean()


def share(groups: Groups) -> float:
    """Returns (N-1)/N: the fraction of a buffer that a rank sends in a reduce-scatter or an all-gather."""
    return (groups.dp_cp.size - 1) / groups.dp_cp.size


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors' storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
