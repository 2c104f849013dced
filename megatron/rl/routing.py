"""The experts that the sampler chose for its answers: taken to the replicas that train on them, counted and replayed.

[Note: routing replay] Sampler and trainer compute the same scores up to rounding, so a token whose scores are nearly
equal may go to other experts, and then its log-probability jumps. With --moe-enable-routing-replay the trainer takes
the experts of the sampler, in its forwards and its training steps (Ma et al., arXiv 2510.11370). Their weights are
those of the current router, whose gradient passes. The reference is another model and chooses by itself.

The sampler has read all tokens of a sequence but its last one. No log-probability depends on that token, which goes to
no expert in a replay, like padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.comm.all_to_all import all_to_all_v
from megatron.core.groups import Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.rl.answers import PackedAnswers, Response
from megatron.training.batch import Batch

# (number of a prompt, number of an answer to it) -> experts of the tokens that the sampler has read, int16
# [tokens, layers of this rank, k]
ExpertsByAnswer = dict[tuple[int, int], Tensor]


def expert_layers(model: GPTModel, groups: Groups) -> list[int]:
    """Returns the numbers of the layers with experts on this rank, which has one stage."""
    return [number for number in model.layers_of(groups.pp.rank) if model.layers_with_experts[number]]


def exchange_experts(
    sampled: Mapping[tuple[int, int], Tensor],
    replicas: Sequence[Sequence[Response]],
    groups: Groups,
    shape: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """Returns the experts of the answers of this replica, one answer after the other [tokens, layers, k].

    sampled: holds those of the answers that this rank has sampled. replicas: the answers that each will train on.
    shape: (layers, k). Communication: one all-to-all over dp x cp of layers x k x 2 bytes per token.
    """
    group, cp = groups.dp_cp, groups.cp.size
    pieces, send = [torch.zeros(0, *shape, dtype=torch.int16)], []
    for rank in range(group.size):
        wanted = [answer for answer in replicas[rank // cp] if answer.sampler_rank == group.rank]
        pieces += [sampled[answer.prompt, answer.number] for answer in wanted]
        send.append(sum(answer.inputs for answer in wanted))
    local = replicas[groups.dp.rank]
    receive = [sum(answer.inputs for answer in local if answer.sampler_rank == rank) for rank in range(group.size)]
    # As bytes, because NCCL has no integers of 16 bits.
    sent = torch.cat(pieces).to(device).view(torch.uint8)
    received = all_to_all_v(sent, send, receive, group).view(torch.int16)
    order = sorted(range(len(local)), key=lambda number: local[number].sampler_rank)  # in which they have arrived
    parts = dict(zip(order, received.split([local[number].inputs for number in order]), strict=True))
    return torch.cat([received[:0], *(parts[number] for number in range(len(local)))])


@dataclass(frozen=True)
class ExpertRecord:
    """The experts that the sampler chose for packed answers: [rows, s, layers, k], int16.

    layers: their numbers. is_recorded [rows, s], bool: False for padding and the last token of each answer.
    """

    layers: Sequence[int]
    experts: Tensor
    is_recorded: Tensor

    @classmethod
    def of(cls, packed: PackedAnswers, experts: Tensor, layers: Sequence[int]) -> ExpertRecord:
        """experts: [tokens, layers, k], answer after answer."""
        is_recorded = packed.at_inputs(torch.ones(len(experts), dtype=torch.bool, device=experts.device))
        return cls(layers, packed.at_inputs(experts), is_recorded)

    def with_experts(self, batches: Sequence[Batch]) -> list[Batch]:
        """Returns the microbatches of these rows, which are to take the experts of the sampler."""
        sizes = [len(batch.tokens) for batch in batches]
        return [
            dataclasses.replace(batch, routed=routed, experts=dict(zip(self.layers, experts.unbind(2), strict=True)))
            for batch, routed, experts in zip(
                batches, self.is_recorded.split(sizes), self.experts.split(sizes), strict=True
            )
        ]

    def flips(self, routings: Sequence[MicrobatchRouting]) -> Tensor:
        """Returns, fp64 [2], how many assignments of this rank's tokens were other ones in a forward than in the
        sampler, and how many there are. Of two choices of the same experts the order does not matter.

        routings: those of the microbatches, with the choices of the forward.
        """
        counts = torch.zeros(2, dtype=torch.float64, device=self.experts.device)
        samples = [routing.routed.shape[1] for routing in routings if routing.routed is not None]
        parts = zip(self.experts.split(samples), self.is_recorded.split(samples), routings, strict=True)
        for experts, is_recorded, routing in parts:
            assert routing.choices is not None and routing.routed is not None
            counted = (is_recorded[:, routing.places].t() & routing.routed).reshape(-1, 1)
            for number, sampled in zip(self.layers, experts.unbind(2), strict=True):
                before, now = routing.of_tokens(sampled), routing.choices[number]
                flips = (before.unsqueeze(2) != now.unsqueeze(1)).all(dim=2)
                counts += torch.stack([(flips & counted).sum(), counted.sum() * now.shape[1]])
        return counts
