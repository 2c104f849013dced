"""The rows that a rank exchanges and works on in a layer with experts, under a balanced load and under any other.

T tokens on each of n = ep x etp ranks, E experts of which a token has k. The etp ranks that share some of a token's
experts get its row once each, however many of these experts they have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron.spec.moe import RouterSpec

WORST = math.inf  # as an imbalance: all tokens choose experts of one rank


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """Rows of one rank and microbatch.

    ranks: the number of ranks that exchange tokens; etp of them share each expert. experts: the experts of this rank.
    sent: rows to all ranks, itself included. assigned: (token, expert) pairs of this rank's tokens. received: rows from
    all ranks. worked: (row, expert) pairs that this rank computes. largest: rows of its fullest expert.
    """

    ranks: int
    etp: int
    experts: int
    sent: int
    assigned: int
    received: int
    worked: int
    largest: int

    def part(self, tokens: int, of: int) -> ExpertRows:
        """Returns the rows of `tokens` of the microbatch's tokens, `of` altogether, that are like the others."""
        sent, assigned, received, worked, largest = (
            math.ceil(rows * tokens / of)
            for rows in (self.sent, self.assigned, self.received, self.worked, self.largest)
        )
        return replace(self, sent=sent, assigned=assigned, received=received, worked=worked, largest=largest)


def expert_rows(
    router: RouterSpec,
    tokens: int,
    *,
    ep: int,
    etp: int,
    imbalance: float = 1.0,
    evenly: bool = False,
    everywhere: bool = False,
) -> ExpertRows:
    """The load of the fullest rank.

    tokens: T. imbalance: rows of each expert of this rank in units of the mean over all experts; impossible ones stand
    for the largest that is possible. evenly: experts are chosen in turn (--moe-router-force-load-balancing), else every
    choice is as likely. everywhere: rows go to all ranks (--moe-token-dispatcher-type allgather).
    """
    topk, local, everyone = router.topk, router.experts // ep, tokens * ep * etp
    imbalance = min(imbalance, router.experts / topk)
    copies = ep if everywhere else _ranks_in_turn(router, ep) if evenly else _expected_ranks_of(router, ep)
    sent = round(tokens * etp * copies)
    mean = tokens * topk * etp  # pairs of a rank
    return ExpertRows(
        ranks=ep * etp,
        etp=etp,
        experts=local,
        sent=sent,
        assigned=tokens * topk,
        received=min(everyone, round(sent * imbalance)),
        worked=min(everyone * min(topk, local), round(mean * imbalance)),
        largest=min(everyone, math.ceil(mean / local * imbalance)),
    )


def _expected_ranks_of(router: RouterSpec, ranks: int) -> float:
    return expected_ranks(router.experts, router.topk, ranks, groups=router.groups, chosen=router.group_topk)


def expected_ranks(experts: int, topk: int, ranks: int, *, groups: int = 1, chosen: int = 1) -> float:
    """The mean number of ranks with some of a token's `topk` experts, if every order of the experts' scores is as
    likely.

    `ranks` hold the experts in equal parts. The `chosen` groups are those of the best experts, and a token has one of
    each of them more often than if all choices in any groups were as likely. For groups that are chosen by a sum of
    scores this is an estimate, within 1.5 % in the published shapes.
    """
    experts_per_rank, width = experts // ranks, experts // groups
    if max(ranks, groups) % min(ranks, groups):  # a rank has parts of groups, which this does not follow
        groups, chosen, width = 1, 1, experts
    held = max(1, groups // ranks)  # groups of which this rank has experts
    experts_per_group = experts_per_rank // held

    def without(taken: int, seen: int, mine: int) -> float:
        """The probability that no expert of this rank follows, from the best expert down.

        All `taken` so far are of the `seen` groups, of which this rank has experts of `mine`.
        """
        if taken == topk:
            return 1.0
        if seen == chosen:  # all that follow are any of these groups
            left, remaining = chosen * width - taken, topk - taken
            return math.comb(left - mine * experts_per_group, remaining) / math.comb(left, remaining)
        seen_groups_left = seen * width - taken - mine * experts_per_group
        other, part = (groups - held - seen + mine) * width, (held - mine) * (width - experts_per_group)
        sum_of_all = seen_groups_left * without(taken + 1, seen, mine) if seen_groups_left else 0.0
        sum_of_all += other * without(taken + 1, seen + 1, mine) if other else 0.0
        sum_of_all += part * without(taken + 1, seen + 1, mine + 1) if part else 0.0
        return sum_of_all / (experts - taken)

    return ranks * (1 - without(0, 0, 0))


def _ranks_in_turn(router: RouterSpec, ranks: int) -> int:
    """The number of ranks with experts of a token whose experts are as far apart as the groups permit."""
    if ranks <= router.groups:
        return min(ranks, router.group_topk)
    per_group = -(-router.topk // router.group_topk)
    return min(router.topk, router.group_topk * min(per_group, ranks // router.groups))
