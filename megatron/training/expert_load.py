"""The load of the experts: routing of each microbatch, sums over a step, the bias that follows them, and the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.config.moe_training import MoEConfig
from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.balance import BalanceLosses, TokenCounts
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.core.transformer.moe.router import Router
from megatron.schedule.schedule import Schedule
from megatron.training.batch import Batch, part_of
from megatron.training.microbatches import Microbatches, context_of
from megatron.training.routing_trace import RoutingTrace
from megatron.training.state import ExpertReport


class ExpertLoad:
    """Follows the load of the experts of a model over its steps.

    [Note: bias of experts]
    After every step that was applied, the bias of each expert goes up by --moe-router-bias-update-rate if its load in
    the global batch was below the mean, and down if it was above (Wang et al., arXiv 2408.15664). Assignments that an
    expert's capacity drops are no load, as in Megatron-LM. Loads are integers, so every layout takes the same
    decisions. A bias of a frozen router stays.
    """

    def __init__(self, model: GPTModel, groups: Groups, moe: MoEConfig, device: torch.device) -> None:
        self._routers = {module.number: module for module in model.modules() if isinstance(module, Router)}
        self._groups, self._rate, self._device = groups, moe.moe_router_bias_update_rate, device
        self._losses, self._multiple = BalanceLosses.of(moe), model.sequence_shards
        self._layers = tuple(number for number, has in enumerate(model.layers_with_experts) if has)
        self._places = torch.tensor([self._layers.index(number) for number in sorted(self._routers)], device=device)
        self.trace: RoutingTrace | None = None  # records or forces the choices
        self.routings: list[MicrobatchRouting] = []  # of the microbatches of a step
        self._counts: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._totals: Tensor | None = None  # of the step that has ended, [layers of this stage, experts + losses]

    def begin_step(self, schedule: Schedule, microbatches: Microbatches) -> None:
        """See StepPart. Communication: with padding in the batches one sum all-reduce over dp."""
        self._counts.clear()
        self._values.clear()
        batches = microbatches.samples
        total = torch.stack([routed_tokens(batch).sum() for batch in batches]).sum()
        if any(batch.routed is not None for batch in batches):
            all_reduce(total, self._groups.dp)
        else:
            total = total * self._groups.dp.size
        samples = sum(len(batch.tokens) for batch in batches) * self._groups.dp.size
        self.routings = []
        for batch in microbatches.whole:
            routing = routing_of(batch, self._groups, self._multiple)
            routing.tokens, routing.losses = TokenCounts(routed_tokens(batch), total, samples), self._losses
            routing.scale = microbatches.loss_scale
            self.routings.append(routing)
        if self.trace is not None:
            self.trace.begin_step(microbatches.whole, self.routings)

    def take(self, routing: MicrobatchRouting, layers: Iterable[int]) -> None:
        """Adds the load of a microbatch and frees its choices. Call when these layers need them no more."""
        for number in layers:
            if number not in routing.layers:
                continue
            if self.trace is not None:
                self.trace.record(routing, number)
            previous = self._routers[number].previous_load
            values = routing.values(number, previous)
            counts = routing.layers.pop(number).load
            self._counts[number] = self._counts[number] + counts if number in self._counts else counts
            self._values[number] = self._values[number] + values if number in self._values else values

    def end_step(self) -> None:
        """See StepPart. Adds up the loads and values of this stage, as fp64, which is exact for loads.

        Communication: one sum all-reduce over tp x cp and one over dp, where the stage has experts.
        """
        rows = [torch.cat([self._counts[number].double(), self._values[number]]) for number in sorted(self._routers)]
        self._totals = torch.stack(rows) if rows else None
        if self._totals is not None:
            all_reduce(self._totals, self._groups.tp_cp)
            all_reduce(self._totals, self._groups.dp)
        self.routings = []

    def update_biases(self, *, applied: Tensor) -> Tensor:
        """Updates the biases, unless the step that has ended was not `applied`, bool [].
        Returns the numbers of `report`.

        They are fp64 [layers with experts, 1 + losses], on the device: the host does not wait.
        Communication: one sum all-reduce over pp.
        """
        numbers, size, totals = sorted(self._routers), len(self._losses.names), self._totals
        report = torch.zeros(len(self._layers), 1 + size, dtype=torch.float64, device=self._device)
        if totals is not None:
            counts = totals[:, : totals.shape[1] - size].long()
            for number, row in zip(numbers, counts, strict=True):
                self._follow(self._routers[number], row, applied)
            mean = counts.sum(1).clamp(min=1).double() / counts.shape[1]
            imbalance = (counts.amax(1) / mean).unsqueeze(1)
            rows = torch.cat([imbalance, totals[:, totals.shape[1] - size :]], dim=1)
            report.index_copy_(0, self._places, rows)
        return all_reduce(report, self._groups.pp)

    def report(self, numbers: Sequence[float]) -> ExpertReport:
        """Returns the report of a step from what `update_biases` returned, read by the host, flat."""
        size = 1 + len(self._losses.names)
        imbalance, *losses = (numbers[column::size] for column in range(size))
        named = dict(zip(self._losses.names, map(tuple, losses), strict=True))
        return ExpertReport(self._layers, named, tuple(imbalance))

    def _follow(self, router: Router, counts: Tensor, applied: Tensor) -> None:
        router.previous_load.copy_(torch.where(applied, counts, router.previous_load))
        if router.expert_bias is not None and router.weight.requires_grad:
            moved = router.expert_bias + self._rate * (counts.sum() - counts * len(counts)).sign()
            router.expert_bias.copy_(torch.where(applied, moved, router.expert_bias))


def routing_of(batch: Batch, groups: Groups, multiple: int) -> MicrobatchRouting:
    """Returns the routing, without choices and losses, of a whole microbatch's tokens on this rank.

    multiple: parts into which sequence parallelism divides a sequence.
    """
    s, cp = batch.tokens.shape[1], context_of(batch, groups)

    def part(x: Tensor) -> Tensor:
        """[b, s] of whole sequences -> [s / cp / multiple, b] of this rank."""
        local = part_of(x, cp, multiple).t()
        return (local if multiple == 1 else local.chunk(multiple)[groups.tp.rank]).contiguous()

    places = part(torch.arange(s, device=batch.tokens.device).unsqueeze(0)).reshape(-1)
    padded = -s % (2 * cp.size * multiple) > 0 and cp.size > 1
    routed = batch.routed
    if routed is None and padded:
        routed = torch.ones_like(batch.tokens, dtype=torch.bool)
    routing = MicrobatchRouting(places, s, None if routed is None else part(routed))
    for number, experts in (batch.experts or {}).items():
        routing.forced[number] = routing.of_tokens(experts)
    return routing


def routed_tokens(batch: Batch) -> Tensor:
    """Returns the tokens of each sample that are no padding, int64 [b]."""
    if batch.routed is not None:
        return batch.routed.sum(1)
    return torch.full((len(batch.tokens),), batch.tokens.shape[1], device=batch.tokens.device)
