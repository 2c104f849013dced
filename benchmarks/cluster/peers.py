"""Torch's own data parallelism with the same model, each system in the fastest setting found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cluster.systems import (
    BETAS,
    CLIP,
    EPS,
    FP32,
    LR,
    WEIGHT_DECAY,
    System,
    make_model,
    mean_loss,
    share,
    storage_bytes,
)
from megatron.core.groups import Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.parameter import local_parameters
from megatron.training.batch import Batch

ADAM: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "fused": True}


class DDP(System):
    """DistributedDataParallel with its default buckets of 25 MB, and torch's fused AdamW."""

    title = "torch DDP"
    bucket_mb = 25.0

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        model = plain_model(groups)
        self._numel = sum(p.numel() for p in model.parameters())
        self._model = DistributedDataParallel(model, bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True)
        self._optimizer = self._make_optimizer(decay_groups(model))

    def _make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, **ADAM)

    def step(self, batches: Sequence[Batch]) -> float:
        """Reduces gradients in the last microbatch's backward."""
        total = 0.0
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            with contextlib.nullcontext() if last else self._model.no_sync():
                loss = mean_loss(self._model, batch)
                (loss / len(batches)).backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)  # gradients are views of DDP's buckets and stay
        return total / len(batches)

    def memory(self) -> int:
        """Bytes of buckets and optimizer state."""
        grads = storage_bytes(p.grad for p in self._model.parameters() if p.grad is not None)
        return grads + state_bytes(self._optimizer)

    def wire_bytes(self, accumulation: int) -> float:
        """One all-reduce of all gradients."""
        return 2 * share(self.groups) * FP32 * self._numel


class DDPSmallBuckets(DDP):
    """DDP with buckets of 4 MB: communication starts earlier in the backward."""

    title = "torch DDP, 4 MB buckets"
    bucket_mb = 4.0


class DDPZero(DDP):
    """DDP with the optimizer state sharded by parameter: every rank updates its parameters, then broadcasts them."""

    title = "DDP + ZeroRedundancyOptimizer"

    def _make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        adam = {key: value for key, value in ADAM.items() if key != "lr"}
        return ZeroRedundancyOptimizer(
            groups, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, lr=LR, **adam
        )

    def memory(self) -> int:
        """Bytes of buckets and this rank's part of the state."""
        assert isinstance(self._optimizer, ZeroRedundancyOptimizer)
        grads = storage_bytes(p.grad for p in self._model.parameters() if p.grad is not None)
        return grads + state_bytes(self._optimizer.optim)

    def wire_bytes(self, accumulation: int) -> float:
        """One all-reduce of all gradients and a broadcast of each rank's part."""
        return 3 * share(self.groups) * FP32 * self._numel


class FSDP(System):
    """FSDP2 with one group per layer; parameters are kept from the forward to the end of the backward.

    Gradients are reduced in the last microbatch's backward only, as with DDP; until then they are unsharded.
    """

    title = "FSDP2"
    reshard = False

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        # FSDP2 replaces the model's parameters by its own; the layers read the slot of a gradient buffer from each.
        nn.Parameter.slot = None  # type: ignore[attr-defined]
        self._model = plain_model(groups)
        self._numel = sum(p.numel() for p in self._model.parameters())
        decayed = {name for name, p in local_parameters(self._model).items() if p.info.spec.decay}
        mesh = init_device_mesh("cpu", (groups.dp_cp.size,))
        for layer in self._model.decoder.layers.children():
            fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard)
        fully_shard(self._model, mesh=mesh, reshard_after_forward=self.reshard)
        named = dict(self._model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for n, p in named.items() if n in decayed], "weight_decay": WEIGHT_DECAY},
                {"params": [p for n, p in named.items() if n not in decayed], "weight_decay": 0.0},
            ],
            **ADAM,
        )
        self._accumulates = False

    def step(self, batches: Sequence[Batch]) -> float:
        """Runs one step. With `reshard` every microbatch's gradients are reduced, so that they are never held
        unsharded.
        """
        total = 0.0
        self._accumulates = len(batches) > 1 and not self.reshard
        root: Any = self._model  # fully_shard has changed its class
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            root.set_requires_gradient_sync(last or self.reshard)
            root.set_reshard_after_backward(last or self.reshard)
            loss = mean_loss(self._model, batch)
            (loss / len(batches)).backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total / len(batches)

    def memory(self) -> int:
        """Bytes of sharded gradients (as large as the shards) and state, and the accumulated unsharded gradient, if
        any.
        """
        return (
            _storage_of(self._model.parameters())
            + state_bytes(self._optimizer)
            + (FP32 * self._numel if self._accumulates else 0)
        )

    def wire_bytes(self, accumulation: int) -> float:
        """An all-gather and a reduce-scatter per step; with `reshard` two and one per microbatch."""
        passes = 3 * accumulation if self.reshard else 2
        return passes * share(self.groups) * FP32 * self._numel


class FSDPReshard(FSDP):
    """FSDP2 with parameters freed after the forward and gathered again in the backward."""

    title = "FSDP2, reshard"
    reshard = True


def plain_model(groups: Groups) -> GPTModel:
    """Returns the model with every weight as a matrix, so that the first dim divides evenly for sharding."""
    model = make_model(groups)
    for parameter in model.parameters():
        if parameter.ndim > 2:
            parameter.data = parameter.data.flatten(0, -2)
    return model


def decay_groups(model: GPTModel) -> list[dict[str, Any]]:
    """Returns optimizer groups: matrices decay, norms do not."""
    parameters = list(local_parameters(model).values())
    return [
        {"params": [p for p in parameters if p.info.spec.decay], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if not p.info.spec.decay], "weight_decay": 0.0},
    ]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of the optimizer's state on this rank."""
    return _storage_of(t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))


def _storage_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of plain or sharded tensors on this rank."""
    return storage_bytes(t.to_local() if isinstance(t, DTensor) else t for t in tensors)
