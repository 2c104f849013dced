"""DeepSpeed's ZeRO-1 and ZeRO-2 around the same model, on the CPU with gloo. Needs the package `deepspeed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from torch import Tensor

from benchmarks.cluster.peers import decay_groups, plain_model
from benchmarks.cluster.systems import (
    BETAS,
    CLIP,
    EPS,
    FP32,
    LR,
    MICRO_BATCH,
    System,
    mean_loss,
    share,
    storage_bytes,
)
from megatron.core.groups import Groups
from megatron.training.batch import Batch

BUCKET = 2_000_000  # elements; the default of 500 million starts no communication before the end of the backward


class Zero1(System):
    """Stage 1: optimizer state sharded; gradients reduced after the last microbatch."""

    title = "DeepSpeed ZeRO-1"
    stage = 1

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        self._model = plain_model(groups)
        self._numel = sum(p.numel() for p in self._model.parameters())
        optimizer = torch.optim.AdamW(decay_groups(self._model), lr=LR, betas=BETAS, eps=EPS, fused=True)
        self._engine, *_ = deepspeed.initialize(
            model=self._model, optimizer=optimizer, dist_init_required=False, config=self._config()
        )

    def _config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "steps_per_print": 1 << 30,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_scatter": True,
                "reduce_bucket_size": BUCKET,
                "allgather_bucket_size": BUCKET,
            },
        }

    def step(self, batches: Sequence[Batch]) -> float:
        """Runs the engine's own accumulation, clipping and update."""
        engine, total = self._engine, 0.0
        if engine.gradient_accumulation_steps() != len(batches):
            engine.set_train_batch_size(MICRO_BATCH * len(batches) * self.groups.dp_cp.size)
        for batch in batches:
            loss = mean_loss(engine, batch)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        return total / len(batches)

    def memory(self) -> int:
        """Bytes that its optimizer holds between steps, and stage 1's unsharded gradients."""
        own = {p.untyped_storage().data_ptr() for p in self._model.parameters()}
        held = [t for t in tensors_in(vars(self._engine.optimizer), set()) if t.untyped_storage().data_ptr() not in own]
        return storage_bytes(held) + (FP32 * self._numel if self.stage == 1 else 0)

    def wire_bytes(self, accumulation: int) -> float:
        """The formula of ZeRO: a reduce-scatter and an all-gather (stage 2 reduces every microbatch)."""
        reduces = accumulation if self.stage == 2 else 1
        return (reduces + 1) * share(self.groups) * FP32 * self._numel


class Zero2(Zero1):
    """Stage 2: gradients sharded as well, so reduced in every microbatch."""

    title = "DeepSpeed ZeRO-2"
    stage = 2


def tensors_in(value: Any, seen: set[int]) -> list[Tensor]:
    """Tensors inside nested lists, tuples, dictionaries and torch optimizers."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value] + ([value.grad] if value.grad is not None else [])
    if isinstance(value, torch.optim.Optimizer):
        return tensors_in(value.state, seen)
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for item in inner for tensor in tensors_in(item, seen)]
