"""Feed-forward layer. Shapes: h hidden, f inner width, /tp where sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from megatron.core.parameter import read_parameters
from megatron.core.streams.turns import Switch
from megatron.core.tensor_parallel.token_chunks import TokenChunks, run_in_chunks
from megatron.core.transformer.context import Build
from megatron.core.transformer.xielu import Xielu, XieluPrologue
from megatron.kernels.ops.activation import Activation
from megatron.spec.mlp import MLPSpec


class MLP(nn.Module):
    """[s or s/tp, b, h] -> the same."""

    def __init__(self, build: Build, spec: MLPSpec, *, recompute_activation: bool = False) -> None:
        """recompute_activation: fc2 applies the activation, and again in its backward (GEMM-last)."""
        super().__init__()
        self.linear_fc1 = build.column(spec.linear_fc1)
        self.linear_fc2 = build.row(spec.linear_fc2)
        self.activation_func = None if spec.xielu is None else Xielu(build, spec.xielu)
        self.activation: Activation | XieluPrologue | None
        if self.activation_func is None:
            self.activation = build.kernels.fused.activations[spec.activation]
        else:
            self.activation = XieluPrologue(self.activation_func)
        if recompute_activation:
            self.activation, self.linear_fc2.prologue = None, self.activation
        self._shards = build.groups.tp.size if build.sequence_parallel else 1
        self._chunk: int | None = None
        self._further: list[nn.Module] = []
        self._skipped, self._dtype = Switch(), build.dtype

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if self._chunk is None:
            return self._all_tokens(x)
        chunks = TokenChunks.of(self._chunk, x.shape[1], self._shards)
        # autograd notes their shapes here, which must not be those of freed memory.
        weights = [weight for module in (self, *self._further) for weight in read_parameters(module)]
        return run_in_chunks(
            lambda _, chunk: self._all_tokens(chunk),
            lambda _, chunk: self._without_fc2(chunk),
            weights,
            [x],
            chunks,
            self._dtype,
            skip=bool(self._skipped),
        )

    def compute_in_chunks(self, tokens: int, norm: nn.Module | None = None) -> None:
        """From now on computes so many tokens at a time, and repeats each chunk in its backward.

        norm: one that fc1 applies first (GEMM-last).
        """
        self._chunk, self._further = tokens, [] if norm is None else [norm]

    @contextmanager
    def without_gemm(self) -> Iterator[None]:
        """In the body a call leaves out fc2, or everything where the backward repeats it anyway.

        As RowParallelLinear.without_gemm.
        """
        with self._skipped.on(), self.linear_fc2.without_gemm():
            yield

    def _all_tokens(self, x: Tensor) -> Tensor:
        inner = self.linear_fc1(x)
        out: Tensor = self.linear_fc2(inner if self.activation is None else self.activation(inner))
        return out

    def _without_fc2(self, x: Tensor) -> Tensor:
        with self.linear_fc2.without_gemm():
            return self._all_tokens(x)
