"""The gated delta rule and its convolution over a sequence that is split between the ranks of a group, in the balanced
layout (`layout.py`). All functions take this rank's tokens, its two chunks one behind the other.

[Note: states of parts] The rule takes a state S through a part of the sequence to T S + Z: the transition T
[d_k, d_k] of a head is a product over its tokens of (I - beta k k^T) exp(g), a full matrix, and Z [d_k, d_v] is what
the part makes of a zero state. So each rank computes T and Z of its two chunks, which go through the rule like two
samples, and gathers those of all ranks. It then knows the state before each of its chunks, and computes their outputs.
In backward the gradient of a state goes the other way: with D behind a part, it is T^T D + E before it, and E comes
from the part's own outputs. So there is one more gather, of T and E, and each rank knows D for its chunks.

Let B = 2 * b * n_v * d_k * (d_k + d_v) * 4 be the bytes of T and Z of a rank's chunks, whatever their length. A rank
sends, per layer:
  by states: forward (size - 1) * B, backward the same. All of size * B are held while states are combined.
  by heads: forward (size - 1) / size of its q, k, v, decay, beta and outputs, backward the same.
Kept for the backward, in addition to the arguments of `delta_rule`:
  by states: the states before the two chunks and T, B bytes.
  by heads: nothing; the arguments are those of n_v / size heads and all tokens, as many bytes.
By states, a rank computes the products that go from chunk to chunk twice, and those of the transitions: about 1.4 times
the operations of `delta_rule`. By heads, it computes no more than its share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.core.comm.collectives import all_gather_async
from megatron.core.comm.regions import to_shards
from megatron.core.context_parallel import layout
from megatron.core.context_parallel.transfer_trace import UNTRACED, Trace
from megatron.core.context_parallel.ulysses import to_heads, to_sequence
from megatron.core.groups import Group
from megatron.kernels.ops.causal_conv import causal_conv, last_inputs
from megatron.kernels.ops.delta_rule import SEPARATE_PASS, DeltaChunks, StatePass, delta_rule

CHUNK = 64
# (q, k, v, decay, beta, the starts of the whole sequence's documents) -> outputs: see `delta_rule`
DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def context_parallel_delta_rule(
    comm_type: str, group: Group, trace: Trace = UNTRACED, state_pass: StatePass = SEPARATE_PASS
) -> DeltaRule:
    """Returns the rule for a type of `--cp-comm-type`: by heads for a2a, by states for those that keep a rank's tokens.

    It is called with this rank's part of q, k, v [s / size, b, heads, d], decay and beta, as in `delta_rule`, and with
    the starts [b, s] of the whole sequence; it returns outputs [s / size, b, n_v, d_v]. trace: draws the transfers.
    state_pass: as in `delta_rule`.
    """
    if group.size == 1:
        return functools.partial(_on_one_rank, state_pass=state_pass)
    rule = _by_heads if comm_type == "a2a" else _by_states
    return functools.partial(rule, group=group, trace=trace, state_pass=state_pass)


def _on_one_rank(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None, *, state_pass: StatePass
) -> Tensor:
    return delta_rule(q, k, v, decay, beta, chunk_size=CHUNK, starts=starts, state_pass=state_pass)[0]


def context_parallel_conv(x: Tensor, weight: Tensor, starts: Tensor | None, group: Group) -> Tensor:
    """`causal_conv` of this rank's part x [s / size, b, c]. starts [b, s]: of the whole sequence.

    Communication: an all-gather of the last k - 1 inputs of both chunks, in backward a reduce-scatter of as many.
    """
    if group.size == 1:
        return causal_conv(x, weight, starts=starts)
    halves, width = _as_samples(x), weight.shape[2]
    length, b = len(halves), x.shape[1]
    tail = min(width - 1, length)
    ends = halves[length - tail :].unflatten(1, (2, b)).movedim(1, 0)  # [2, tail, b, c]
    every = layout.to_natural_order(to_shards(ends, group, sequence_parallel=True), 0, group.size)
    windows = []
    for number in layout.chunks_of(group.rank, group.size):
        end = number * length
        before = every[:number].flatten(0, 1)[max(number * tail - (width - 1), 0) :]
        first = None if starts is None else starts[:, end - len(before) : end]
        windows.append(last_inputs(before, width, starts=first))
    out = causal_conv(halves, weight, window=torch.cat(windows, 1), starts=_starts_of_samples(starts, group))
    return _as_tokens(out)


def _by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    starts: Tensor | None,
    *,
    group: Group,
    trace: Trace,
    state_pass: StatePass,
) -> Tensor:
    size, heads = group.size, (k.shape[2], v.shape[2])
    if heads[0] % size:
        raise ConfigError(
            f"--cp-comm-type a2a cannot share {heads[0]} key heads of linear attention (of a tensor-parallel rank) "
            f"between {size} ranks; use --cp-comm-type p2p or all_gather, or a size that divides them"
        )
    q, k, v = to_heads([q, k, v], group, trace)
    channels = decay.dim() == 4
    # In fp32, so in a message of their own.
    decay, rates = to_heads(
        [decay.float() if channels else decay.float().unsqueeze(3), beta.float().unsqueeze(3)], group, trace
    )
    out, _ = delta_rule(
        q, k, v, decay if channels else decay.squeeze(3), rates.squeeze(3),
        chunk_size=CHUNK, starts=starts, state_pass=state_pass,
    )  # fmt: skip
    return to_sequence(out.flatten(2), group, trace).unflatten(2, heads[1:] + (-1,))


def _by_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    starts: Tensor | None,
    *,
    group: Group,
    trace: Trace,
    state_pass: StatePass,
) -> Tensor:
    samples = [_as_samples(x) for x in (q, k, v, decay, beta)]
    out: Tensor = _PassStates.apply(*samples, _starts_of_samples(starts, group), group, trace, state_pass)
    return _as_tokens(out)


class _PassStates(torch.autograd.Function):
    """See [Note: states of parts]. The two chunks of a rank are samples: 2 * b of them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        starts: Tensor | None,
        group: Group,
        trace: Trace,
        state_pass: StatePass,
    ) -> Tensor:
        chunks = DeltaChunks(CHUNK, q, k, v, decay, beta, starts, state_pass)
        transition = chunks.transition()
        states = _combined(transition, chunks.scan(None).last, group, trace)
        ctx.save_for_backward(q, k, v, decay, beta, starts, states, transition)
        ctx.group, ctx.trace, ctx.state_pass = group, trace, state_pass
        return chunks.outputs(chunks.scan(states))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, beta, starts, states, transition = ctx.saved_tensors
        chunks = DeltaChunks(CHUNK, q, k, v, decay, beta, starts, ctx.state_pass)
        behind = _combined(transition, chunks.state_gradient(grad), ctx.group, ctx.trace, backward=True)
        return *chunks.gradients(grad, behind, states)[:5], None, None, None, None


def _combined(transition: Tensor, local: Tensor, group: Group, trace: Trace, *, backward: bool = False) -> Tensor:
    """Returns the states before this rank's chunks [2 * b, n_v, d_k, d_v], or the gradients of those behind them.

    transition, local: T and Z of the chunks, or T and E; see [Note: states of parts].
    """
    sent = torch.cat([transition, local], dim=-1).unflatten(0, (2, -1))
    received, handle = trace("states of the delta rule", lambda: all_gather_async(sent, group))
    handle.wait()
    d_k = transition.shape[-1]
    parts = list(layout.to_natural_order(received, 0, group.size))  # [b, n_v, d_k, d_k + d_v] of each chunk
    local_chunks, states = layout.chunks_of(group.rank, group.size), {}
    state = torch.zeros_like(parts[0][..., d_k:])
    for number in range(len(parts) - 1, -1, -1) if backward else range(len(parts)):
        if number in local_chunks:
            states[number] = state
            if len(states) == len(local_chunks):
                break
        through, local_part = parts[number].split([d_k, local.shape[-1]], dim=-1)
        state = (through.mT if backward else through) @ state + local_part
    return torch.cat([states[number] for number in local_chunks])


def _as_samples(x: Tensor) -> Tensor:
    """[2 * length, b, ...] -> [length, 2 * b, ...]: the rank's two chunks as samples."""
    return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2)


def _as_tokens(x: Tensor) -> Tensor:
    """The inverse of `_as_samples`."""
    return x.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1)


def _starts_of_samples(starts: Tensor | None, group: Group) -> Tensor | None:
    """[b, s] of the whole sequence -> [2 * b, length] of this rank's chunks."""
    if starts is None:
        return None
    return layout.take(starts, 1, group.rank, group.size).unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1)
