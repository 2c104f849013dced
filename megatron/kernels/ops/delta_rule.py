"""The gated delta rule: linear attention whose state is corrected by each token and decays between tokens.

A value head has a state S [d_k, d_v]. A token with key k, value v, log decay g and rate beta writes to it, and reads it
with its query q (Yang et al., arXiv 2412.06464; with a decay of each channel of the key: Kimi Linear, arXiv 2510.26692):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T        o_t = S_t^T q_t

[Note: chunks] The rule is computed for C tokens at a time. G_t is the sum of g from the first token of the chunk to
token t, and S_0 the state before the chunk. The corrections U [C, d_v] of a chunk, U_t = beta_t (v_t - ..), solve

    (I + beta P) U = beta (V - (exp(G) K) S_0)        P_ij = sum_c k_ic k_jc exp(G_ic - G_jc) for j < i, else 0

and outputs and the next state are products with them. A_ij is as P_ij, with q_i for k_i and for j <= i:

    O = (exp(G) Q) S_0 + A U        S_C = exp(G_C) S_0 + (exp(G_C - G) K)^T U

With M = (I + beta P)^-1 beta, U is M V - (M exp(G) K) S_0. So all but the states is computed for all chunks at once, and
two products remain in the loop over the chunks. Only exponentials of numbers that are not positive occur.

[Note: gradient of the decay] The decay appears only as exp(G) at a query or at a key that reads, and as exp(-G) at a key
that writes. So the gradient of G is q dq + k (dk as a reader - dk as a writer). A decay that all channels share has the
gradient of g itself: the sum over the pairs i >= t > j of P and A that g_t lies between, and over the reads and writes of
states that it lies before or behind. So nothing cancels: a decay that forgets all at once has a gradient near zero, of
which a difference of large numbers would leave rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def pass_forward_(corrections: Tensor, states: Tensor, weights: Tensor, write: Tensor, whole: Tensor) -> None:
    """Takes the state states[0] through the chunks into states[1:], and M V in `corrections` becomes U."""
    for i in range(len(corrections)):
        corrections[i].baddbmm_(weights[i], states[i], alpha=-1)
        torch.mul(states[i], whole[i], out=states[i + 1])
        states[i + 1].baddbmm_(write[i].mT, corrections[i])


def pass_backward_(
    grad_u: Tensor, grad_after: Tensor, grad_states: Tensor, weights: Tensor, write: Tensor, whole: Tensor
) -> Tensor:
    """Takes the gradient grad_after[-1] of the last state back through the chunks, into the others of `grad_after`, and
    returns that of the first state. Gradients of U and of states by the outputs are in `grad_u`, which becomes that of
    U, and in `grad_states`."""
    after = grad_after[-1]
    for i in reversed(range(len(grad_states))):
        grad_u[i].baddbmm_(write[i], after)
        before = grad_after[i - 1] if i else torch.empty_like(after)
        torch.addcmul(grad_states[i], after, whole[i], out=before)
        after = before.baddbmm_(weights[i].mT, grad_u[i], alpha=-1)
    return after


class StatePass(NamedTuple):
    """The loops over the chunks; see `pass_forward_` and `pass_backward_`. All tensors are in fp32 and in chunks
    [chunks, heads, ..]; weights, write and whole are those of `_Parts` and `_Decays`."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


SEPARATE_PASS = StatePass(pass_forward_, pass_backward_)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    chunk_size: int = 64,
    state: Tensor | None = None,
    starts: Tensor | None = None,
    state_pass: StatePass = SEPARATE_PASS,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [s, b, n_v, d_v] in the dtype of v, and the state after the last token
    [b, n_v, d_k, d_v] in fp32.

    q, k [s, b, n_k, d_k] are used as they are: the caller normalizes both and scales q. Each of their heads serves
    n_v / n_k consecutive heads of v [s, b, n_v, d_v]. decay: logarithms that are not positive, [s, b, n_v], or
    [s, b, n_v, d_k] for a decay of each channel. beta [s, b, n_v]. state: before the first token; zero if None. starts
    [b, s], bool: True at the first token of a document, before which the state is set to zero. chunk_size: a power of
    two; it changes the order of sums only. state_pass: the kernels of the loops over the chunks. All is computed in
    fp32.

    Kept for the backward are the arguments as they are, and nothing else: with i bytes for an element of q, k and v,
    2 n_k d_k i + n_v d_v i + 4 n_v (or 4 n_v d_k) + n_v times the bytes of a beta, for each token, and one byte for a
    start. Forward and backward need, while they run, a few times the bytes of v in fp32, and 4 n_v d_k d_v / chunk_size
    bytes of states for each token. A single token needs neither.
    """
    assert chunk_size & (chunk_size - 1) == 0, f"chunk_size {chunk_size} is no power of two"
    if len(v) == 1:
        return _one_token(q, k, v, decay, beta, state, starts)
    result: tuple[Tensor, Tensor] = _DeltaRule.apply(q, k, v, decay, beta, state, starts, chunk_size, state_pass)
    return result


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rule as it is written, without chunks."""
    copies = v.shape[2] // k.shape[2]
    q32, k32 = (x[0].float().repeat_interleave(copies, dim=1).unsqueeze(-2) for x in (q, k))  # [b, n_v, 1, d_k]
    v32, rate = v[0].float().unsqueeze(-2), beta[0].float()[..., None, None]
    if state is None:
        state = v32.new_zeros(*v32.shape[:2], k.shape[3], v.shape[3])
    factor = decay[0].float().exp()
    factor = factor.unsqueeze(-1) if decay.dim() == 4 else factor[..., None, None]
    if starts is not None:
        factor = factor.masked_fill(starts.view(-1, 1, 1, 1), 0)
    decayed = factor * state
    last = decayed + k32.mT @ (rate * (v32 - k32 @ decayed))
    return (q32 @ last).squeeze(-2).to(v.dtype).unsqueeze(0), last


class _Decays(NamedTuple):
    """The decay of the tokens of chunks. The factors are zero where a document ends in between."""

    logs: Tensor  # G [chunks, heads, C, 1 or d_k]
    since: Tensor  # exp(G): what a token sees of the state before the chunk
    until: Tensor  # exp(G_C - G): what is left of a token at the end of the chunk
    whole: Tensor  # exp(G_C) [chunks, heads, 1 or d_k, 1]
    pairs: Tensor  # [.., C, C]: exp(G_i - G_j), or 1 where each channel has a decay, for j <= i; else 0


class _Parts(NamedTuple):
    """The products of a chunk that need no state; see [Note: chunks]. All [chunks, heads, C, ..]."""

    read: Tensor  # exp(G) K
    write: Tensor  # exp(G_C - G) K
    query: Tensor  # exp(G) Q
    keys: Tensor  # P
    scores: Tensor  # A
    inverse: Tensor  # (I + beta P)^-1
    weights: Tensor  # M exp(G) K


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor | None,
        starts: Tensor | None,
        chunk_size: int,
        state_pass: StatePass,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, decay, beta, state, starts)
        ctx.chunk_size, ctx.state_pass = chunk_size, state_pass
        ctx.set_materialize_grads(False)
        chunks = DeltaChunks(chunk_size, q, k, v, decay, beta, starts, state_pass)
        scan = chunks.scan(state)
        # A copy of the last state, because a view would hold the states of all chunks.
        return chunks.outputs(scan), scan.last.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, decay, beta, state, starts = ctx.saved_tensors
        grad = torch.zeros_like(v) if grads[0] is None else grads[0]
        chunks = DeltaChunks(ctx.chunk_size, q, k, v, decay, beta, starts, ctx.state_pass)
        gradients = chunks.gradients(grad, grads[1], state)
        return *gradients[:5], None if state is None else gradients[5].to(state.dtype), None, None, None


class DeltaScan(NamedTuple):
    """The part of the rule that goes from chunk to chunk."""

    corrections: Tensor  # U [chunks, heads, C, d_v]
    states: Tensor  # before each chunk [chunks, heads, d_k, d_v]
    last: Tensor  # the state behind the last token [b, n_v, d_k, d_v]


class DeltaChunks:
    """The rule of some tokens without autograd, in fp32: its steps, for a caller that combines states itself.

    The arguments are those of `delta_rule`. All tensors are in chunks [chunks, heads, C, ..], of all heads of all
    samples, with zeros behind the last token.
    """

    def __init__(
        self,
        size: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        starts: Tensor | None,
        state_pass: StatePass = SEPARATE_PASS,
    ) -> None:
        size = min(size, 1 << (len(v) - 1).bit_length())
        self._size, self._inputs, self._copies = size, (q, k, v, decay, beta), v.shape[2] // k.shape[2]
        self._q, self._k = (_in_chunks(x, size, self._copies) for x in (q, k))
        self._v, self._beta = _in_chunks(v, size), _in_chunks(beta.unsqueeze(-1), size)
        logs = decay if decay.dim() == 4 else decay.unsqueeze(-1)
        self._state_pass, self._starts, first = state_pass, starts, None
        if starts is not None:
            at_start = starts.t()[..., None, None]
            logs = logs.masked_fill(at_start, 0)  # the decay before a document has no effect
            first = _in_chunks(at_start.expand(-1, -1, v.shape[2], 1), size)
        self._decays = _decays(_in_chunks(logs, size), first)
        self._parts = self._products()

    def _products(self) -> _Parts:
        k, decays = self._k, self._decays
        read = decays.since * k
        keys, scores = _products(self._q, k, decays)
        identity = torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device)
        inverse = torch.linalg.solve_triangular(self._beta * keys, identity, upper=False, unitriangular=True)
        weights = inverse @ (self._beta * read)
        return _Parts(read, decays.until * k, decays.since * self._q, keys, scores, inverse, weights)

    @property
    def _samples(self) -> tuple[int, int]:
        b, n_v = self._inputs[2].shape[1:3]
        return b, n_v

    def scan(self, state: Tensor | None) -> DeltaScan:
        """Goes through the chunks from a state [b, n_v, d_k, d_v], or from zero if it is None."""
        parts = self._parts
        corrections = parts.inverse @ (self._beta * self._v)
        count, heads = corrections.shape[:2]
        states = corrections.new_empty(count + 1, heads, self._k.shape[3], self._v.shape[3])
        if state is None:
            states[0].zero_()
        else:
            states[0].copy_(state.flatten(0, 1))
        self._state_pass.forward(corrections, states, parts.weights, parts.write, self._decays.whole)
        return DeltaScan(corrections, states[:-1], states[-1].unflatten(0, self._samples))

    def transition(self) -> Tensor:
        """Returns T [b, n_v, d_k, d_k]: from a state S, the last state is T S, and what it is from zero."""
        parts = self._parts
        identity = torch.eye(self._k.shape[3], dtype=torch.float32, device=self._k.device)
        product = identity.expand(self._k.shape[1], -1, -1)
        for i in range(len(self._k)):
            decayed = self._decays.whole[i] * product
            product = decayed.baddbmm_(parts.write[i].mT, parts.weights[i] @ product, alpha=-1)
        return product.unflatten(0, self._samples)

    def outputs(self, scan: DeltaScan) -> Tensor:
        """Returns the outputs [s, b, n_v, d_v] in the dtype of v."""
        out = _add_product(self._parts.scores @ scan.corrections, self._parts.query, scan.states)
        return _tokens(out, self._inputs[2])

    def state_gradient(self, grad: Tensor) -> Tensor:
        """Returns the gradient [b, n_v, d_k, d_v] of the state before the first token, for the gradient of the
        outputs alone."""
        return self._scan_back(_in_chunks(grad, self._size), None)[2]

    def _scan_back(self, grad: Tensor, grad_last: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of U and of the states behind the chunks, in chunks, and of the first state."""
        parts = self._parts
        grad_states = parts.query.mT @ grad
        grad_u = parts.scores.mT @ grad
        grad_after = torch.empty_like(grad_states)
        if grad_last is None:
            grad_after[-1].zero_()
        else:
            grad_after[-1].copy_(grad_last.flatten(0, 1))
        first = self._state_pass.backward(
            grad_u, grad_after, grad_states, parts.weights, parts.write, self._decays.whole
        )
        return grad_u, grad_after, first.unflatten(0, self._samples)

    def gradients(self, grad: Tensor, grad_last: Tensor | None, state: Tensor | None) -> tuple[Tensor, ...]:
        """Returns the gradients of q, k, v, decay and beta in their dtypes, and of the state in fp32, from those of the
        outputs [s, b, n_v, d_v] and of the last state. state: the argument of `scan`."""
        q, k, v, decay, beta = self._inputs
        parts, decays, grad = self._parts, self._decays, _in_chunks(grad, self._size)
        corrections, states, _ = self.scan(state)
        grad_u, grad_after, grad_state = self._scan_back(grad, grad_last)
        # U solves (I + beta P) U = beta (V - read S): `grad_right` is the gradient of the right side.
        grad_right = parts.inverse.mT @ grad_u
        grad_read = grad_right @ states.mT
        grad_system = grad_right @ corrections.mT
        grad_beta = (
            (grad_right * self._v).sum(-1, keepdim=True)
            - (grad_read * parts.read).sum(-1, keepdim=True)
            - (grad_system * parts.keys).sum(-1, keepdim=True)
        )
        grad_keys = grad_system.mul_(self._beta).neg_()
        grad_read.mul_(self._beta).neg_()
        grad_scores = grad @ corrections.mT
        grad_query = (grad @ states.mT).mul_(decays.since)
        grad_read.mul_(decays.since)
        grad_write = (corrections @ grad_after.mT).mul_(decays.until)
        grad_whole = ((grad_after * states).sum(-1, keepdim=True) * decays.whole).squeeze(-1)  # [chunks, heads, d_k]
        shared = decay.dim() == 3
        if shared:  # see [Note: gradient of the decay]
            between = _between(grad_keys * parts.keys + grad_scores * parts.scores)
            reads = (self._q * grad_query).addcmul_(self._k, grad_read).sum(-1, keepdim=True)
            writes = (self._k * grad_write).sum(-1, keepdim=True)
            before = writes.cumsum(2).sub_(writes)
            grad_steps = between + _from_here(reads) + before + grad_whole.sum(-1)[..., None, None]
        grad_q, grad_reader, grad_writer = _gradient_of_products(self._q, self._k, decays, grad_keys, grad_scores)
        grad_q.add_(grad_query)
        grad_reader.add_(grad_read)
        grad_writer.add_(grad_write)
        if not shared:
            grad_logs = (self._q * grad_q).addcmul_(self._k, grad_reader - grad_writer)
            grad_logs[:, :, -1] += (grad_write * self._k).sum(2) + grad_whole
            grad_steps = _from_here(grad_logs)
        return (
            _tokens(grad_q, q, self._copies),
            _tokens(grad_reader.add_(grad_writer), k, self._copies),
            _tokens(grad_right.mul_(self._beta), v),
            self._gradient_of_decay(grad_steps),
            _tokens(grad_beta, beta),
            grad_state,
        )

    def _gradient_of_decay(self, steps: Tensor) -> Tensor:
        """steps: the gradient in chunks. The decay before a document has no effect."""
        grad = _tokens(steps, self._inputs[3])
        if self._starts is None:
            return grad
        return grad.masked_fill(self._starts.t().reshape(*grad.shape[:2], *[1] * (grad.dim() - 2)), 0)


def _between(pairs: Tensor) -> Tensor:
    """[.., C, C] -> [.., C, 1]: for each token t the sum over the rows i >= t and the columns j < t."""
    return _from_here(pairs).tril_(-1).sum(-1, keepdim=True)


def _from_here(x: Tensor) -> Tensor:
    """[.., C, d] -> the same: the sums from each token to the last one of its chunk."""
    return x.flip(-2).cumsum(-2).flip(-2)


def _decays(steps: Tensor, starts: Tensor | None) -> _Decays:
    """steps: the decay of each token [chunks, heads, C, 1 or d_k]. starts [chunks, heads, C, 1]: 1 where a document
    begins, else 0."""
    logs, size = steps.cumsum(2), steps.shape[2]
    since, until = logs.exp(), (logs[:, :, -1:] - logs).exp()
    unseen = torch.ones(size, size, dtype=torch.bool, device=steps.device).triu(1)
    if starts is not None:
        number = starts.cumsum(2)  # of documents that have begun in the chunk
        since = since.masked_fill(number > 0, 0)
        until = until.masked_fill(number != number[:, :, -1:], 0)
        unseen = unseen | (number != number.mT)
    if steps.shape[3] == 1:
        pairs = (logs - logs.mT).masked_fill_(unseen, -torch.inf).exp_()
    else:
        pairs = (~unseen).to(steps.dtype)
    return _Decays(logs, since, until, since[:, :, -1].unsqueeze(-1), pairs)


def _products(q: Tensor, k: Tensor, decays: _Decays) -> tuple[Tensor, Tensor]:
    """Returns P and A of [Note: chunks], [chunks, heads, C, C]."""
    if decays.logs.shape[3] == 1:
        return (k @ k.mT).mul_(decays.pairs).tril_(-1), (q @ k.mT).mul_(decays.pairs)
    rows = torch.stack([k, q])
    products = rows.new_zeros(*rows.shape[:-1], rows.shape[-2])
    for read, write, halves in _levels(decays.logs):
        _lower(products, halves).copy_((_second(rows, halves) * read) @ (_first(k, halves) * write).mT)
    products[1].diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    keys, scores = products.mul_(decays.pairs)
    return keys, scores


def _gradient_of_products(
    q: Tensor, k: Tensor, decays: _Decays, grad_keys: Tensor, grad_scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, of k as a reader (i in [Note: chunks]) and of k as a writer (j). Overwrites those of
    P and A."""
    grad_keys, grad_scores = grad_keys.mul_(decays.pairs).tril_(-1), grad_scores.mul_(decays.pairs)
    if decays.logs.shape[3] == 1:
        return grad_scores @ k, grad_keys @ k, (grad_keys.mT @ k).add_(grad_scores.mT @ q)
    rows, grads = torch.stack([k, q]), torch.stack([grad_keys, grad_scores])
    diagonal = grad_scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    grad_rows, grad_writer = torch.stack([torch.zeros_like(k), diagonal * k]), diagonal * q
    for read, write, halves in _levels(decays.logs):
        grad = _lower(grads, halves)
        reader, writer = _second(rows, halves) * read, _first(k, halves) * write
        _second(grad_rows, halves).add_((grad @ writer).mul_(read))
        _first(grad_writer, halves).add_((grad.mT @ reader).sum(0).mul_(write))
    return grad_rows[1], grad_rows[0], grad_writer


def _levels(logs: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yields (exp(G_i - m), exp(m - G_j), length) for the tokens i and j of the second and of the first halves of
    blocks of 2 * length tokens, for all lengths from half of the chunk to 1. m is G at the end of the first half.

    A product with exp(G_i - G_j) of each channel is one product of matrices only if the exponential is a product, and
    exp(G_i) exp(-G_j) would overflow. The halves of the blocks of all lengths cover each pair j < i once.
    """
    length = logs.shape[2] // 2
    while length:
        first, second = _first(logs, length), _second(logs, length)
        middle = first[..., -1:, :]
        yield (second - middle).exp_(), (middle - first).exp_(), length
        length //= 2


def _first(x: Tensor, length: int) -> Tensor:
    """[.., C, d] -> a view [.., blocks, length, d] of the first halves of blocks of 2 * length tokens."""
    return x.unflatten(-2, (-1, 2, length)).select(-3, 0)


def _second(x: Tensor, length: int) -> Tensor:
    """As `_first`, of the second halves."""
    return x.unflatten(-2, (-1, 2, length)).select(-3, 1)


def _lower(x: Tensor, length: int) -> Tensor:
    """[.., C, C] -> a view [.., blocks, length, length]: rows of second halves, columns of first halves."""
    blocks = x.unflatten(-2, (-1, 2 * length)).unflatten(-1, (-1, 2 * length))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., length:, :length]


def _in_chunks(x: Tensor, size: int, copies: int = 1) -> Tensor:
    """[s, b, n, d] -> [chunks, b * n * copies, size, d] in fp32, with zeros behind the last token."""
    s, b, n, d = x.shape
    count = -(-s // size)
    if s % size:
        x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, count * size - s))
    parts = x.unflatten(0, (count, size)).permute(0, 2, 3, 1, 4).unsqueeze(3)  # [chunks, b, n, 1, C, d]
    chunks = torch.empty(count, b, n, copies, size, d, dtype=torch.float32, device=x.device)
    return chunks.copy_(parts).flatten(1, 3)


def _tokens(x: Tensor, like: Tensor, copies: int = 1) -> Tensor:
    """The inverse of `_in_chunks`, in the shape and dtype of `like`. Copies are summed."""
    s, b, n = like.shape[:3]
    x = x.unflatten(1, (b, n, copies))
    x = x.squeeze(3) if copies == 1 else x.sum(3)
    tokens = x.permute(0, 3, 1, 2, 4).flatten(0, 1)[:s]
    return tokens.to(like.dtype).reshape(like.shape)


def _add_product(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Returns x + left @ right, in the memory of x."""
    shape = x.shape
    x.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    return x.view(shape)
