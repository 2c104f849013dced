"""One optimizer step, and one evaluation: the only place where losses are weighed and summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_reduce
from megatron.core.distributed.grad_buffer import GradBuffer
from megatron.core.groups import Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import Optimizer, Update
from megatron.core.pipeline_parallel.engine import run
from megatron.core.pipeline_parallel.schedule import forward_only, one_forward_one_backward
from megatron.training.batch import Batch
from megatron.training.timers import Timers

# [Note: gradient scale]
# The objective of a step is  L = sum over all tokens t of the global batch of  w_t * loss_t,  with
#     w_t = mask_t / (number of unmasked tokens in the global batch)           (--calculate-per-token-loss)
#     w_t = mask_t / (unmasked tokens in t's sample * samples in the batch)    (default: every sample counts alike)
# The weights depend on the global batch alone. So the gradient is a plain sum over microbatches and over dp x cp: no
# averaging anywhere, and the same number under every layout. fp16's loss scale multiplies w and is divided out again
# inside the optimizer's kernel.


class TrainStep:
    """Forward and backward over the microbatches, gradient reduction, update."""

    def __init__(
        self,
        model: GPTModel,
        buffers: Sequence[GradBuffer],
        optimizer: Optimizer,
        groups: Groups,
        timers: Timers,
        *,
        per_token: bool,
        count_zeros: bool = False,
    ) -> None:
        self._model, self._buffers, self._optimizer = model, buffers, optimizer
        self._groups, self._timers = groups, timers
        self._per_token, self._count_zeros = per_token, count_zeros

    def __call__(self, batches: Sequence[Batch], lr: float, weight_decay: float) -> tuple[float, Update]:
        """(objective of the global batch before the update, what the update did). Synchronises host and device."""
        loss = self.forward_backward(batches)
        with self._timers("optimizer", level=1):
            update = self._optimizer.step(lr, weight_decay, count_zeros=self._count_zeros)
        return loss, update

    def forward_backward(self, batches: Sequence[Batch]) -> float:
        """Leave the global batch's gradient (times the loss scale) in the buffers; return the objective."""
        heartbeat, timers, scale = self._groups.heartbeat, self._timers, self._optimizer.loss_scale.value
        self._optimizer.clear_gradients()
        weights = token_weights(batches, self._groups, self._per_token)
        actions = one_forward_one_backward(self._groups.pp.rank, self._groups.pp.size, len(batches))
        with timers("forward-backward", level=1), heartbeat.phase("forward-backward"):
            losses = run(actions, lambda m: self._objective(batches[m], weights[m] * scale))
        with timers("all-grads-sync", level=1), heartbeat.phase("all-grads-sync"):
            for buffer in self._buffers:
                buffer.reduce()
        return float(all_reduce(torch.stack(losses).sum().double(), self._groups.dp_cp)) / scale

    def _objective(self, batch: Batch, weights: Tensor) -> Tensor:
        with self._timers("forward-compute", level=2):
            return weighted_loss(self._model, batch, weights)


def evaluate(model: GPTModel, read: Callable[[], Sequence[Batch]], iterations: int, groups: Groups) -> float:
    """Mean loss a token over `iterations` global batches; the model is left in the mode it was in."""
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(iterations):
            batches = read()
            losses = run(
                forward_only(groups.pp.rank, len(batches)),
                lambda m: weighted_loss(model, batches[m], batches[m].loss_mask.float()),  # noqa: B023
            )
            total[0] += float(torch.stack(losses).double().sum())
            total[1] += float(sum(batch.loss_mask.sum() for batch in batches))
    model.train(was_training)
    device = next(model.parameters()).device
    loss_sum, count = all_reduce(total.to(device), groups.dp_cp).tolist()
    return float(loss_sum / max(count, 1.0))


def weighted_loss(model: GPTModel, batch: Batch, weights: Tensor) -> Tensor:
    """Sum over the microbatch of weights [b, s] x loss per token."""
    per_token = model(batch.tokens, batch.positions, labels=batch.labels, segments=batch.segments)
    return (per_token * weights).sum()


def token_weights(batches: Sequence[Batch], groups: Groups, per_token: bool) -> list[Tensor]:
    """w_t of the note above, [b, s] a microbatch. Communication: one sum all-reduce of a number over dp x cp."""
    samples = sum(len(batch.tokens) for batch in batches)
    local = torch.stack([batch.loss_mask.sum() for batch in batches]).sum()
    count = torch.stack([local, torch.full_like(local, samples)])
    tokens, samples_in_all = all_reduce(count, groups.dp_cp)
    if per_token:
        return [batch.loss_mask / tokens.clamp(min=1) for batch in batches]
    return [
        batch.loss_mask / (batch.loss_mask.sum(dim=1, keepdim=True).clamp(min=1) * samples_in_all) for batch in batches
    ]
