"""torch's own context parallelism (torch.distributed.tensor.experimental) as an attention kernel.

Its public function `context_parallel` supports the CUDA kernels only and rejects CPU tensors. Internally it uses a ring
that takes the kernel as an argument; here that ring gets torch's flash attention for CPUs, the kernel that our blocks
use. It has the same balanced layout, [b, n, s, d].
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as peer

from megatron.core.groups import Group
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_METHODS = {"alltoall": peer._RotateMethod.ALL_TO_ALL, "allgather": peer._RotateMethod.ALL_GATHER}


class TorchRing:
    """An AttentionKernel. `method` is "alltoall" (keys are passed around the ring) or "allgather"."""

    def __init__(self, group: Group, method: str) -> None:
        self.group, self.method = group.process_group, _METHODS[method]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scores: Scores,
        segments: Segments | None,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        """q [s / size, b, n, d]; k, v [s / size, b, n, d] -> [s / size, b, n * d]."""
        assert scores == Scores(1.0 / math.sqrt(q.shape[-1])) and segments is None and window is None and dropout == 0.0
        assert self.group is not None
        out: Tensor = _Ring.apply(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), self)
        return out.permute(2, 0, 1, 3).flatten(2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: TorchRing) -> Tensor:
        with mock.patch.object(peer._cp_options, "rotate_method", ring.method):
            out, lse, *_ = peer._templated_ring_attention(ring.group, 2, _kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors

        def kernel(*, query: Tensor, key: Tensor, value: Tensor, logsumexp: Tensor, **rest: Any) -> tuple[Tensor, ...]:
            gradients: tuple[Tensor, ...] = _kernel_backward(
                rest["grad_out"], query, key, value, rest["out"], logsumexp, 0.0, rest["is_causal"]
            )
            return gradients

        with mock.patch.object(peer._cp_options, "rotate_method", ctx.ring.method):
            dq, dk, dv = peer._templated_ring_attention_backward(
                ctx.ring.group, 2, kernel, grad, "grad_out", q, k, v, out, lse, is_causal=True
            )
        return dq, dk, dv, None


@contextlib.contextmanager
def silent_ring(size: int) -> Iterator[None]:
    """Replaces communication by local tensors of the same shapes."""

    def permuted(x: Tensor, *_: Any) -> Tensor:
        return x

    def gathered(x: Tensor, **_: Any) -> Tensor:
        return x.repeat(size)

    with mock.patch.multiple(collectives, permute_tensor=permuted, all_gather_single=gathered):
        yield
