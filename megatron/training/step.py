"""One optimizer step, and one evaluation: the only place where losses are weighed and summed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.base.log import get_logger
from megatron.config.pipeline import ONE_STAGE, PipelineSettings
from megatron.core.comm.collectives import all_gather, all_reduce, gather_objects
from megatron.core.comm.pipeline_messages import Mailbox
from megatron.core.context_parallel.layout import to_natural_order
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Group, Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import Optimizer, Update
from megatron.core.pipeline_parallel.engine import PipelineEngine
from megatron.core.streams.host_copy import HostCopy
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.schedule.schedule import Action, Kind
from megatron.training.balanced_documents import BalancedDocuments
from megatron.training.batch import Batch
from megatron.training.expert_load import routing_of
from megatron.training.logging.timers import Timers
from megatron.training.microbatches import Microbatches, Targets, cut, local_batches, one_token_later
from megatron.training.step_features import NO_FEATURES, StepFeatures

log = get_logger(__name__)

# [Note: gradient scale]
# The objective of a step is  L = sum over all tokens t of the global batch of  w_t * loss_t,  with
#     w_t = mask_t / (number of unmasked tokens in the global batch)           (--calculate-per-token-loss)
#     w_t = mask_t / (unmasked tokens in t's sample * samples in the batch)    (default: every sample counts alike)
# or, of instruction data, where a sample may hold several conversations and fill the rest:
#     w_t = mask_t / (unmasked tokens in t's conversation * conversations in the batch)
# or, in reinforcement learning, the weights that the batch brings (megatron/rl/), which may be negative.
# Each depth of multi-token prediction adds a sum of its own, with the mask of its labels, whose weights are times
# --mtp-loss-scaling-factor / depths.
# The weights depend on the global batch alone. So the gradient is a plain sum over microbatches and over dp x cp: no
# averaging anywhere, and the same number under every layout. fp16's loss scale multiplies w and is divided out again
# inside the optimizer's kernel.


@dataclass(frozen=True)
class Objective:
    """L of a step, summed over all replicas, in a tensor that the host need not know yet.

    numbers: fp64 [4 + 2 x depths]: L, the parameters of all replicas that got no gradient; then the sum of loss_t over
    all unmasked tokens, and their number, of the next token and of each depth of multi-token prediction. local: this
    rank's terms of the sum of loss_t and of the number of tokens, fp64 [], zero without a last stage. without: names of
    the parameters without a gradient here.
    """

    numbers: Tensor
    local: tuple[Tensor, Tensor]
    without: list[str]
    replicas: Group

    def value(self, numbers: Sequence[float]) -> float:
        """Returns L from the numbers as the host has read them.

        Raises UserError when the replicas do not agree on which parameters are used. Communication: if some parameter
        got no gradient, one gather of their names over dp x cp.
        """
        total, missing, *_ = numbers
        if missing:
            check_same_parameters(gather_objects(self.without, self.replicas), self.replicas)
        return total

    @staticmethod
    def means(numbers: Sequence[float]) -> list[float | None]:
        """Returns the mean loss per unmasked token of the global batch, None if there is none: of the next token, and
        then of each depth of multi-token prediction.

        It is what Megatron-LM prints, whatever the weights w_t are: they leave out what a sample without a token to
        learn would count.
        """
        _, _, *pairs = numbers
        return [total / tokens if tokens else None for total, tokens in zip(pairs[::2], pairs[1::2], strict=True)]

    def read(self) -> float:
        """Returns `value` of the numbers, for which the host waits."""
        return self.value(self.numbers.tolist())


class TrainStep:
    """An optimizer step: `forward_backward` over the microbatches with the reduction of gradients, then `update`."""

    def __init__(
        self,
        model: GPTModel,
        data_parallel: DataParallel,
        optimizer: Optimizer,
        groups: Groups,
        timers: Timers,
        *,
        per_token: bool,
        further_weight: float = 0.0,
        count_zeros: bool = False,
        pipeline: PipelineSettings = ONE_STAGE,
        features: StepFeatures = NO_FEATURES,
        documents: BalancedDocuments | None = None,
    ) -> None:
        """further_weight: of the losses of multi-token prediction, all depths together. documents: assigns those of the
        global batch to ranks; None: each replica computes its samples."""
        self._further_weight = further_weight
        self._model, self._data_parallel, self._optimizer = model, data_parallel, optimizer
        self._groups, self._timers, self._pipeline = groups, timers, pipeline
        self._per_token, self._count_zeros, self.features = per_token, count_zeros, features
        self._documents = documents
        self._mailbox = Mailbox(groups, data_parallel.streams)

    def forward_backward(self, batches: Sequence[Batch], iteration: int | None = None) -> Objective:
        """Leave the global batch's gradient (times the loss scale) in the buckets; return the objective.

        iteration: see `DataParallel.begin_step`.

        The host waits for the device only where experts exchange tokens: it needs the numbers of rows.
        """
        heartbeat, timers, features = self._groups.heartbeat, self._timers, self.features
        microbatches = self._microbatches(batches)
        self._data_parallel.begin_step(len(microbatches.whole), iteration)
        schedule = self._pipeline.schedule_of(len(microbatches.whole), offload=features.offloads_by_schedule)
        for part in features.parts:
            part.begin_step(schedule, microbatches)
        program = TrainProgram(self._model, self._data_parallel, timers, microbatches, features)
        engine = PipelineEngine(
            schedule,
            self._groups.pp.rank,
            program,
            self._mailbox,
            self._model.hidden_dtype,
            program,
            features.offload_actions,
            self._data_parallel.streams.turns,
        )
        with timers("forward-backward", level=1), heartbeat.phase("forward-backward"):
            engine.run(before=lambda actions: heartbeat.move_to(_phase(actions)), timed=program.timed)
        with timers("all-grads-sync", level=1), heartbeat.phase("all-grads-sync"):
            objective = self._over_replicas(program, microbatches.loss_scale)
            for part in features.parts:
                part.end_step()
            self._data_parallel.finish_reduction()
        return objective

    def update(self, lr: float, weight_decay: float, decoupled_lr: float | None = None) -> Update:
        """Update the parameters by the gradient in the buckets. See Optimizer.step."""
        with self._timers("optimizer", level=1), self._groups.heartbeat.phase("optimizer"):
            return self._optimizer.step(lr, weight_decay, decoupled_lr=decoupled_lr, count_zeros=self._count_zeros)

    def _microbatches(self, batches: Sequence[Batch]) -> Microbatches:
        """Returns the batches with the weights of their tokens. Communication: see `token_weights`, for each depth, and
        `BalancedDocuments.shared_out`."""
        groups, scale, depths = self._groups, self._optimizer.loss_scale.value, self._model.num_predictions
        targets: list[list[Targets]] = [[] for _ in batches]
        of_depth, factor = list(batches), scale
        for depth in range(1 + depths):
            if depth:
                factor = scale * (self._further_weight / depths)
                of_depth = [one_token_later(batch) for batch in of_depth]
            weights = token_weights(of_depth, groups, self._per_token)
            for number, (batch, weight) in enumerate(zip(of_depth, weights, strict=True)):
                whole = Targets(batch.labels, batch.loss_mask, weight * factor)
                targets[number].append(whole)
        microbatches: Sequence[Batch] = batches
        if self._documents is not None:
            microbatches, targets = self._documents.shared_out(batches, targets)
        return cut(batches, microbatches, targets, scale, groups, self._model.sequence_shards)

    def _over_replicas(self, program: ForwardProgram, scale: Tensor) -> Objective:
        """Sum over dp x cp, on all stages, without the loss scale.

        Communication: one sum all-reduce of four numbers over dp x cp and one over pp, where only the last stage has
        losses; of two more for each depth of multi-token prediction.
        """
        without, device = self._data_parallel.without_gradient(), self._data_parallel.device
        weighted, *sums = program.sums(1 + self._model.num_predictions, device)
        missing = torch.full_like(weighted, len(without))
        numbers = torch.stack([weighted / scale, missing, *sums])
        all_reduce(numbers, self._groups.dp_cp)
        return Objective(all_reduce(numbers, self._groups.pp), (sums[0], sums[1]), without, self._groups.dp_cp)


class ForwardProgram:
    """The stages of a model on some microbatches, whose tokens shall predict `targets`: a Program of the engine."""

    def __init__(
        self,
        model: GPTModel,
        batches: Sequence[Batch],
        targets: Sequence[Sequence[Targets]],
        routings: Sequence[MicrobatchRouting] | None = None,
    ) -> None:
        """targets: of each microbatch, of the next token and of further ones, which are predicted if they are there.
        routings: of the microbatches, for a model with experts."""
        self._model, self._batches, self._targets, self._routings = model, batches, targets, routings
        # Per token [b, s], of the targets of the microbatches that have passed the last stage.
        self._losses: dict[int, list[Tensor]] = {}

    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        """Sum over the microbatch of weights [b, s] x loss per token;
        hidden states from a stage before the last one."""
        batch, (targets, *further) = self._batches[microbatch], self._targets[microbatch]
        with self._around_forward(stage, microbatch, received) as hidden:
            out = self._model(
                batch.tokens,
                batch.positions,
                labels=targets.labels,
                further_labels=[of_depth.labels for of_depth in further],
                segments=batch.segments,
                lengths=batch.length,
                context=batch.context,
                routing=None if self._routings is None else self._routings[microbatch],
                stage=stage,
                received=hidden,
                loss_in_backward=True,
            )
            if not self._model.stages[stage].head:
                return out
            losses = [out] if isinstance(out, Tensor) else list(out)
            self._losses[microbatch] = [of_depth.detach() for of_depth in losses]
            terms = [(loss * of.weights).sum() for loss, of in zip(losses, self._targets[microbatch], strict=True)]
            return functools.reduce(torch.add, terms)

    def losses_of(self, microbatch: int) -> Tensor | None:
        """Returns the losses of the next token [b, s], of this context-parallel rank's part of the microbatch; None
        where this rank has no last stage."""
        losses = self._losses.get(microbatch)
        return None if losses is None else losses[0]

    def labels_of(self, microbatch: int) -> Tensor:
        """Returns the labels [b, s] of this context-parallel rank's part of the microbatch."""
        return self._targets[microbatch][0].labels

    def sums(self, depths: int, device: torch.device) -> list[Tensor]:
        """Returns fp64 sums over the microbatches that have passed the last stage, in a training step also its
        backward: of weights x losses; and for each of `depths` targets of a microbatch, of the losses of unmasked
        tokens, and the number of these. Sums are zero without a last stage."""
        weighted: list[Tensor] = []
        by_depth: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(depths)]
        for number in sorted(self._losses):
            for loss, of, (losses, counts) in zip(self._losses[number], self._targets[number], by_depth, strict=True):
                weighted.append((loss * of.weights).sum())
                losses.append((loss * of.mask).sum())
                counts.append(of.mask.sum())
        return [_sum(values, device) for values in (weighted, *itertools.chain(*by_depth))]

    def shape(self, microbatch: int) -> tuple[int, ...]:
        """See Program."""
        return self._model.hidden_shape(*self._batches[microbatch].tokens.shape)

    def _around_forward(
        self, stage: int, microbatch: int, received: Tensor | None
    ) -> AbstractContextManager[Tensor | None]:
        """A context of a forward, which yields the tensor to use instead of `received`."""
        return contextlib.nullcontext(received)


class TrainProgram(ForwardProgram):
    """A ForwardProgram that is also differentiated: Gradients of the engine. Its weights are times the loss scale."""

    def __init__(
        self,
        model: GPTModel,
        data_parallel: DataParallel,
        timers: Timers,
        microbatches: Microbatches,
        features: StepFeatures,
    ) -> None:
        experts = features.experts
        super().__init__(model, microbatches.local, microbatches.targets, None if experts is None else experts.routings)
        self._data_parallel, self._timers = data_parallel, timers
        self._offload, self._experts = features.offload, experts
        self._deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}

    def backward(self, stage: int, microbatch: int, run: Callable[[], None], *, last: bool) -> None:
        """See Gradients."""
        with self._reading(Kind.BACKWARD, stage):
            self._data_parallel.begin_backward(stage, last=last)
            run()
            self._data_parallel.end_backward(last=last)
        self._free_routing(stage, microbatch)

    def input_grad(self, stage: int, microbatch: int, run: Callable[[], None]) -> None:
        """See Gradients."""
        with self._reading(Kind.INPUT_GRAD, stage), self._data_parallel.deferred_weight_grads() as jobs:
            run()
        self._deferred[stage, microbatch] = jobs
        self._free_routing(stage, microbatch)

    def weight_grad(self, stage: int, microbatch: int, *, last: bool) -> None:
        """See Gradients."""
        with self._reading(Kind.WEIGHT_GRAD, stage):
            self._data_parallel.begin_backward(stage, last=last)
            for job in self._deferred.pop((stage, microbatch)):
                job()
            self._data_parallel.end_backward(last=last)

    @contextlib.contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        """A context of a computation, or of a part of it, whose time counts and is drawn."""
        kind, stage, microbatch = action
        what = {Kind.FORWARD: "forward", Kind.INPUT_GRAD: "input gradient", Kind.WEIGHT_GRAD: "weight gradient"}
        of_stage = f" of stage {stage}" if stage or not self._model.is_whole else ""
        name = f"{what.get(kind, 'backward')} {microbatch}{of_stage}"
        timer = "forward-compute" if kind is Kind.FORWARD else "backward-compute"
        with self._timers(timer, level=2), self._data_parallel.timeline.span("compute", name):
            yield

    def _around_forward(
        self, stage: int, microbatch: int, received: Tensor | None
    ) -> AbstractContextManager[Tensor | None]:
        """Under activation offload its saved tensors are watched."""
        if self._offload is None:
            return super()._around_forward(stage, microbatch, received)
        return self._offload.forward(stage, microbatch, received)

    def _free_routing(self, stage: int, microbatch: int) -> None:
        """The gradients of the logits are there, which are the last to read the choices."""
        if self._experts is not None and self._routings is not None:
            self._experts.take(self._routings[microbatch], self._model.layers_of(stage))

    def _reading(self, kind: Kind, stage: int) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._offload is None else self._offload.backward(kind, stage)


def evaluate(
    model: GPTModel,
    read: Callable[[], Sequence[Batch]],
    iterations: int,
    groups: Groups,
    pipeline: PipelineSettings = ONE_STAGE,
    stop_wanted: Callable[[], bool] | None = None,
) -> float | None:
    """Returns the mean loss per unmasked token over `iterations` global batches, NaN without any; the model's mode is
    restored.

    Returns None if `stop_wanted` on a rank before the last batches: then the rest is left out. The host reads the
    answer of all ranks one global batch late, when the device has long found it.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    mailbox = Mailbox(groups, Streams(device, Timeline(device)))
    total = torch.zeros(2, dtype=torch.float64, device=device)
    answers: deque[HostCopy] = deque()
    stopped = False
    with torch.no_grad():
        for _ in range(iterations):
            if stop_wanted is not None:
                flag = torch.full((1,), float(stop_wanted()), device=device)
                answers.append(HostCopy(all_reduce(flag, groups.world, "max")))
                if len(answers) > 1 and answers.popleft().read()[0]:
                    stopped = True
                    break
            program = _run_forward(model, read(), groups, pipeline, mailbox)
            _, *sums = program.sums(1, device)
            total += torch.stack(sums)
    model.train(was_training)
    if stopped:
        return None
    all_reduce(total, groups.dp_cp)
    loss_sum, count = all_reduce(total, groups.pp).tolist()
    if not count:
        log.warning("all labels of the %d batches of an evaluation are masked, so it has no loss", iterations)
    return float(loss_sum / count) if count else math.nan


@torch.no_grad()
def log_probabilities(
    model: GPTModel,
    batches: Sequence[Batch],
    groups: Groups,
    pipeline: PipelineSettings = ONE_STAGE,
    routings: Sequence[MicrobatchRouting] | None = None,
) -> list[Tensor]:
    """Returns the natural log-probability of every label, fp32 [b, s] of whole sequences for each microbatch, on all
    ranks of the replica; the model's mode is restored.

    routings: of the microbatches, for a caller that reads their choices; None: new ones.

    Communication: that of an evaluation, one all-gather over cp and one all-reduce over pp for each microbatch.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    mailbox = Mailbox(groups, Streams(device, Timeline(device)))
    program = _run_forward(model, batches, groups, pipeline, mailbox, routings)
    model.train(was_training)
    cp, whole = groups.cp, []
    for number, batch in enumerate(batches):
        losses = program.losses_of(number)
        local = torch.zeros_like(program.labels_of(number), dtype=torch.float32) if losses is None else losses
        parts = to_natural_order(all_gather(local.t().contiguous(), cp), 0, cp.size)[: batch.length].t()
        # Stages without the head hold zeros.
        whole.append(all_reduce(parts.contiguous().neg_(), groups.pp))
    return whole


def _run_forward(
    model: GPTModel,
    batches: Sequence[Batch],
    groups: Groups,
    pipeline: PipelineSettings,
    mailbox: Mailbox,
    routings: Sequence[MicrobatchRouting] | None = None,
) -> ForwardProgram:
    """Runs the forward of a replica's microbatches, which keeps the losses of their tokens."""
    local = local_batches(batches, groups, model.sequence_shards)
    targets = [[Targets.of(batch)] for batch in local]
    if routings is None and any(model.layers_with_experts):
        routings = [routing_of(batch, groups, model.sequence_shards) for batch in batches]
    program = ForwardProgram(model, local, targets, routings)
    schedule = pipeline.evaluation_of(len(batches))
    PipelineEngine(schedule, groups.pp.rank, program, mailbox, model.hidden_dtype).run()
    return program


def _sum(losses: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the sum, which is zero without a last stage."""
    return sum((loss.double() for loss in losses), torch.zeros((), dtype=torch.float64, device=device))


def _phase(actions: Sequence[Action]) -> str:
    return f"forward-backward, {' and '.join(map(str, actions))}"


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


def token_weights(batches: Sequence[Batch], groups: Groups, per_token: bool) -> list[Tensor]:
    """Returns w_t of [Note: gradient scale], [b, s] per microbatch. All dp ranks hold equally many samples; cp ranks
    the same.

    Communication: with `per_token`, or conversations, one sum all-reduce of a number over dp, else none; none if the
    batches bring their weights.
    """
    if all(batch.weights is not None for batch in batches):
        return [batch.weights for batch in batches if batch.weights is not None]
    if per_token:
        tokens = all_reduce(torch.stack([batch.loss_mask.sum() for batch in batches]).sum(), groups.dp)
        return [batch.loss_mask / tokens.clamp(min=1) for batch in batches]
    if any(batch.by_segment for batch in batches):
        counts = [tokens_by_segment(batch) for batch in batches]
        conversations = all_reduce(torch.stack([count.count_nonzero() for count in counts]).sum(), groups.dp)
        return [
            batch.loss_mask / (count.gather(1, batch.segments.ids).clamp(min=1) * conversations.clamp(min=1))
            for batch, count in zip(batches, counts, strict=True)
            if batch.segments is not None
        ]
    samples = sum(len(batch.tokens) for batch in batches) * groups.dp.size
    return [batch.loss_mask / (batch.loss_mask.sum(dim=1, keepdim=True).clamp(min=1) * samples) for batch in batches]


def tokens_by_segment(batch: Batch) -> Tensor:
    """Returns the unmasked tokens of each segment, int64 [b, s + 1]: at most s segments per sample, and its padding."""
    assert batch.segments is not None
    ids = batch.segments.ids
    b, s = ids.shape
    counts = torch.zeros(b, s + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(1, ids, batch.loss_mask.long())
