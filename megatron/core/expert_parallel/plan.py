"""Which rows go where: from the experts of each token to the rows that ranks exchange, and to the rows of each expert.

E experts are divided into equal runs over ep; etp ranks share each run. A rank gets a token once, however many of its
experts the token has: an assignment names an expert by its place in the order, a row and a weight. With k of E experts
chosen evenly, a token goes to ep (1 - C(E - E/ep, k) / C(E, k)) runs of experts (`expected_ranks` in
spec/expert_rows.py): for 8 of 128 experts over 8 ranks to 5.4 instead of 8.

Everything here is made from the indices without a value that the host would have to wait for, except the counts, which
it reads once: at once for an exchange, whose buffers need them, and when they are first needed where a rank has all
experts and every assignment stands. Sorting is stable and sums are of integers, so a plan depends on the indices alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from megatron.core.streams.host_copy import HostCopy
from megatron.kernels.ops.assignments import Assign, Assignments, sort_by_expert

ReadCounts = Callable[[Tensor, int], Any]  # `read_counts`, or a function with its contract


@dataclass(frozen=True)
class LocalPlan:
    """The assignments of a rank that has the rows already.

    positions: [A] int64, the place of each assignment in the flattened indices [rows * k].
    """

    positions: Tensor
    assignments: Assignments


@dataclass(frozen=True)
class Outgoing:
    """What a rank has to send, before the host knows how much: only the first entries of a tensor have a meaning.

    tokens: [T * min(k, ep)] int64, the token of each row, by (ep rank, token).
    positions: [T * k] int64, the place of each assignment in the flattened indices, by (ep rank, expert, token).
    rows: [T * k] int32, the row of each assignment among those for the same ep rank.
    counts: [ep, E / ep + 1] int32, for each ep rank the assignments of each expert, and the rows.
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Plan:
    """What a rank sends and receives. Ranks are those of etp_ep, n of them; lists have a number for each.

    tokens: [S] int64, the token of each row that is sent, by (rank, token).
    positions, rows: [A], as in Outgoing; all ranks of etp get the same.
    order: [M_a] int64, the place among the received assignments, which come by (rank, expert, row), of each one by
    (expert, rank, row).
    offsets: [M_a] int64, the first row from the rank of each one by (expert, rank, row).
    ends, sizes: the assignments of each local expert, as in Assignments.
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    order: Tensor
    offsets: Tensor
    ends: Tensor
    sizes: list[int]
    send_rows: list[int]
    receive_rows: list[int]
    send_assignments: list[int]
    receive_assignments: list[int]

    def assignments(self, received: Tensor) -> Assignments:
        """From the rows of the received assignments [M_a], each counted among those from its rank."""
        return Assignments(received.index_select(0, self.order).long() + self.offsets, self.ends, self.sizes)


class LateCounts(Sequence[int]):
    """Numbers of a device tensor [n], which the host reads, and waits for, when it first needs one of them."""

    def __init__(self, counts: Tensor, tokens: int, read: ReadCounts) -> None:
        self._counts, self._tokens, self._read = counts, tokens, read
        self._values: list[int] | None = None

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Returns a number or some of them."""
        if self._values is None:
            self._values = self._read(self._counts, self._tokens)
        return self._values[index]

    def __len__(self) -> int:
        """Returns n, which the host knows."""
        return len(self._counts)


def local_plan(
    indices: Tensor, first: int, experts: int, assign: Assign, read: ReadCounts, *, whole: bool = False
) -> LocalPlan:
    """indices [rows, k] of any experts, or -1 -> the assignments of experts `first` to `first + experts - 1`.

    whole: every index is that of one of these experts, so their number is known. Else the host waits for the device
    once, in `read`.
    """
    assigned = assign(indices, first, experts)
    if whole:
        late = LateCounts(assigned.counts, len(indices), read)
        return LocalPlan(assigned.positions, Assignments(assigned.rows, assigned.ends, late, assigned.by_row))
    sizes: list[int] = read(assigned.counts, len(indices))
    total, by_row = sum(sizes), assigned.by_row
    by_row = None if by_row is None else by_row._replace(order=by_row.order[:total])
    return LocalPlan(assigned.positions[:total], Assignments(assigned.rows[:total], assigned.ends, sizes, by_row))


def outgoing(indices: Tensor, experts: int, ep: int) -> Outgoing:
    """indices [T, k] int64 of different experts of a token; -1 is none. `ep` divides `experts`."""
    (tokens, k), local = indices.shape, experts // ep
    owners = torch.where(indices < 0, ep, indices // local)
    wanted = torch.zeros(ep + 1, tokens, dtype=torch.bool, device=indices.device)
    wanted = wanted.scatter_(0, owners.t(), True)[:ep]
    numbers = wanted.flatten().cumsum(0) - 1  # of the rows, in order
    row_counts = wanted.sum(1)

    expert, positions, expert_counts = sort_by_expert(indices.flatten(), experts)
    token, owner = positions // k, (expert // local).clamp(max=ep - 1)
    number = numbers.index_select(0, owner * tokens + token)
    rows = number - (row_counts.cumsum(0) - row_counts).index_select(0, owner)
    unused = tokens * min(k, ep)
    of_row = torch.zeros(unused + 1, dtype=torch.int64, device=indices.device)
    of_row.scatter_(0, torch.where(expert < experts, number, unused), token)  # all that write one entry write the same
    counts = torch.cat([expert_counts.view(ep, local), row_counts.unsqueeze(1)], dim=1)
    return Outgoing(of_row[:unused], positions, rows.int(), counts.int())


def make_plan(out: Outgoing, received: Tensor, tokens: int, etp: int, read: ReadCounts) -> Plan:
    """received [n, E / ep + 1] int32: the counts that each rank has for this one. tokens: of this rank.
    The host waits for the device once, in `read`."""
    ep = len(out.counts)
    counts: list[list[int]] = read(torch.cat([out.counts, received]), tokens)
    sent, received_counts = counts[:ep], counts[ep:]
    rows, assignments = [row[-1] for row in sent], [sum(row[:-1]) for row in sent]
    total = sum(sum(row[:-1]) for row in received_counts)
    order, offsets = _by_expert(received, total)
    return Plan(
        tokens=to_all_of_etp(out.tokens[: sum(rows)], rows, etp),
        positions=out.positions[: sum(assignments)],
        rows=out.rows[: sum(assignments)],
        order=order,
        offsets=offsets,
        ends=received[:, :-1].sum(0).cumsum(0).int(),
        sizes=[sum(column) for column in list(zip(*received_counts, strict=True))[:-1]],
        send_rows=[count for count in rows for _ in range(etp)],
        receive_rows=[row[-1] for row in received_counts],
        send_assignments=[count for count in assignments for _ in range(etp)],
        receive_assignments=[sum(row[:-1]) for row in received_counts],
    )


def to_all_of_etp(tensor: Tensor, counts: list[int], etp: int) -> Tensor:
    """[sum of counts, ...], by ep rank -> [etp * sum of counts, ...], by rank of etp_ep:
    each rank's part for all of etp."""
    if etp == 1:
        return tensor
    return torch.cat([part for part in tensor.split(counts) for _ in range(etp)])


def read_counts(counts: Tensor, tokens: int) -> Any:
    """Returns the numbers of a tensor on the host, which waits for the device; nested as `Tensor.tolist`.

    tokens: whose experts this rank counted. Only a trace, whose counts have no values, needs their number.
    """
    return HostCopy(counts).read()


def _by_expert(received: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Returns `order` and `offsets` of a Plan. Each (expert, rank) is a run in both orders,
    so a shift per run is enough."""
    counts = received.long()
    by_rank, rows = counts[:, :-1], counts[:, -1]
    by_expert = by_rank.t().flatten()
    starts = (by_rank.flatten().cumsum(0) - by_rank.flatten()).view(by_rank.shape).t().flatten()
    shifts = starts - (by_expert.cumsum(0) - by_expert)
    run = torch.repeat_interleave(by_expert, output_size=total)
    order = torch.arange(total, device=received.device) + shifts.index_select(0, run)
    return order, (rows.cumsum(0) - rows).index_select(0, run % len(received))
