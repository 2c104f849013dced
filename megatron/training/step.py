"""One optimizer step, and one evaluation: the only place where losses are weighed and summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_reduce, gather_objects
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.errors import UserError
from megatron.core.groups import Group, Groups
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
# or, of instruction data, where a sample may hold several conversations and fill the rest:
#     w_t = mask_t / (unmasked tokens in t's conversation * conversations in the batch)
# The weights depend on the global batch alone. So the gradient is a plain sum over microbatches and over dp x cp: no
# averaging anywhere, and the same number under every layout. fp16's loss scale multiplies w and is divided out again
# inside the optimizer's kernel.


class TrainStep:
    """Forward and backward over the microbatches, gradient reduction, update."""

    def __init__(
        self,
        model: GPTModel,
        data_parallel: DataParallel,
        optimizer: Optimizer,
        groups: Groups,
        timers: Timers,
        *,
        per_token: bool,
        count_zeros: bool = False,
    ) -> None:
        self._model, self._data_parallel, self._optimizer = model, data_parallel, optimizer
        self._groups, self._timers = groups, timers
        self._per_token, self._count_zeros = per_token, count_zeros

    def __call__(self, batches: Sequence[Batch], lr: float, weight_decay: float) -> tuple[float, Update]:
        """(objective of the global batch before the update, what the update did). Synchronises host and device."""
        loss = self.forward_backward(batches)
        with self._timers("optimizer", level=1):
            update = self._optimizer.step(lr, weight_decay, count_zeros=self._count_zeros)
        return loss, update

    def forward_backward(self, batches: Sequence[Batch]) -> float:
        """Leave the global batch's gradient (times the loss scale) in the buckets; return the objective."""
        heartbeat, timers, scale = self._groups.heartbeat, self._timers, self._optimizer.loss_scale.value
        self._data_parallel.begin_step(len(batches))
        weights = token_weights(batches, self._groups, self._per_token)
        actions = one_forward_one_backward(self._groups.pp.rank, self._groups.pp.size, len(batches))
        with timers("forward-backward", level=1), heartbeat.phase("forward-backward"):
            losses = run(
                actions,
                lambda m: self._forward(m, batches[m], weights[m] * scale),
                lambda m, objective: self._backward(m, objective, last=m == len(batches) - 1),
            )
        with timers("all-grads-sync", level=1), heartbeat.phase("all-grads-sync"):
            objective = self._over_replicas(torch.stack(losses).sum())
            self._data_parallel.finish_reduction()
        return objective / scale

    def _forward(self, m: int, batch: Batch, weights: Tensor) -> Tensor:
        span = self._data_parallel.timeline.span("compute", f"forward {m}")
        with self._timers("forward-compute", level=2), span:
            return weighted_loss(self._model, batch, weights)

    def _backward(self, m: int, objective: Tensor, *, last: bool) -> None:
        span = self._data_parallel.timeline.span("compute", f"backward {m}")
        with self._timers("backward-compute", level=2), span:
            self._data_parallel.begin_backward(last=last)
            objective.backward()
            self._data_parallel.end_backward(last=last)

    def _over_replicas(self, objective: Tensor) -> float:
        """Sum over dp x cp. Raises UserError when the replicas do not agree on which parameters are used.

        Communication: one sum all-reduce of two numbers; when some parameter got no gradient, their names are gathered.
        """
        without = self._data_parallel.without_gradient()
        numbers = torch.stack([objective.double(), torch.full_like(objective, len(without), dtype=torch.float64)])
        total, missing = all_reduce(numbers, self._groups.dp_cp).tolist()
        if missing:
            check_same_parameters(gather_objects(without, self._groups.dp_cp), self._groups.dp_cp)
        return float(total)


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


def check_same_parameters(without: Sequence[list[str]], group: Group) -> None:
    """Raise UserError unless every rank of the group lists the same parameters as left without a gradient."""
    for names, rank in zip(without, group.ranks, strict=True):
        if differing := sorted(set(names) ^ set(without[0])):
            has, has_not = (group.ranks[0], rank) if differing[0] in names else (rank, group.ranks[0])
            raise UserError(
                f"parameter {differing[0]} got a gradient on rank {has} and none on rank {has_not} in the same step "
                f"({len(differing)} such parameters); every replica must use the same parameters: make the branch that "
                "skips them depend on nothing but the step, or freeze them with requires_grad False"
            )


def weighted_loss(model: GPTModel, batch: Batch, weights: Tensor) -> Tensor:
    """Sum over the microbatch of weights [b, s] x loss per token."""
    per_token = model(batch.tokens, batch.positions, labels=batch.labels, segments=batch.segments)
    return (per_token * weights).sum()


def token_weights(batches: Sequence[Batch], groups: Groups, per_token: bool) -> list[Tensor]:
    """w_t of the note above, [b, s] a microbatch. All dp ranks hold equally many samples.

    Communication: with `per_token`, or conversations, one sum all-reduce of a number over dp x cp, else none.
    """
    if per_token:
        tokens = all_reduce(torch.stack([batch.loss_mask.sum() for batch in batches]).sum(), groups.dp_cp)
        return [batch.loss_mask / tokens.clamp(min=1) for batch in batches]
    if any(batch.by_segment for batch in batches):
        counts = [tokens_by_segment(batch) for batch in batches]
        conversations = all_reduce(torch.stack([count.count_nonzero() for count in counts]).sum(), groups.dp_cp)
        return [
            batch.loss_mask / (count.gather(1, batch.segments).clamp(min=1) * conversations.clamp(min=1))
            for batch, count in zip(batches, counts, strict=True)
            if batch.segments is not None
        ]
    samples = sum(len(batch.tokens) for batch in batches) * groups.dp.size
    return [batch.loss_mask / (batch.loss_mask.sum(dim=1, keepdim=True).clamp(min=1) * samples) for batch in batches]


def tokens_by_segment(batch: Batch) -> Tensor:
    """Unmasked tokens of each segment, int64 [b, s + 1]: a sample of s tokens has at most s segments and its filling."""
    assert batch.segments is not None
    b, s = batch.segments.shape
    counts = torch.zeros(b, s + 1, dtype=torch.int64, device=batch.segments.device)
    return counts.scatter_add_(1, batch.segments, batch.loss_mask.long())
