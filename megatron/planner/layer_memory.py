"""What one decoder layer takes and frees, event by event, in forward and in backward.

The events are those of core/transformer/block.py and of the autograd functions it calls, in their order: a tensor that
backward needs is taken in forward and freed when its node has run; the others are taken and freed within. Between
layers there is one tensor: in forward the residual stream, which belongs to the layer that made it; in backward its
gradient, which is in use when a layer's backward begins and when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.model import ModelConfig
from megatron.config.recompute import MLP_ACT, NORM, WHOLE_MLP
from megatron.planner.attention_memory import AttentionMemory
from megatron.planner.product_memory import LinearMemory
from megatron.planner.sizes import BACKWARD, COMMUNICATION, DROPOUT, FP32, MASK, MLP, NORMS, RESIDUAL, WORK, Sizes
from megatron.planner.tally import Tally


@dataclass(frozen=True)
class NormMemory:
    """RMSNorm or LayerNorm of `count` elements in rows of `width`. kind: of what it keeps."""

    sizes: Sizes
    rms: bool
    count: int
    width: int
    from_residual: bool = True
    kind: str = NORMS

    @property
    def copies(self) -> bool:
        """LayerNorm in another dtype than its input's keeps a copy of that, and not the input itself."""
        return not self.rms and self.from_residual and self.sizes.r != self.sizes.e

    @property
    def statistics(self) -> int:
        """Bytes a norm keeps beside its input."""
        rows = self.count // self.width
        copy = self.count * self.sizes.e if self.copies else 0
        return copy + (rows * FP32 if self.rms else 2 * rows * (self.sizes.e if self.sizes.target.cpu else FP32))

    @property
    def out(self) -> int:
        """Bytes of its output."""
        return self.count * self.sizes.e

    @property
    def made(self) -> int:
        """Bytes that it can make again: the output and the statistics proper."""
        return self.out + self.statistics - (self.count * self.sizes.e if self.copies else 0)

    def again(self, tally: Tally) -> None:
        """As `forward`, of what was kept."""
        self.forward(tally)
        tally.free(self.kind, self.out + self.statistics - self.made)

    def forward(self, tally: Tally) -> None:
        """Leaves its statistics and its output."""
        half = self.sizes.e < FP32
        fp32 = FP32 * self.count
        if self.rms:
            converted = fp32 if half and not self._fp32_input else 0
            tally.brief(WORK, converted + fp32 + (fp32 if not half else max(fp32, self.out)) - (0 if half else fp32))
        tally.take(self.kind, self.statistics + self.out)

    def backward(self, tally: Tally) -> None:
        """From the gradient of its output to that of its input, which takes its place. Frees the statistics."""
        grad_in = self.count * (self.sizes.r if self.from_residual else self.sizes.e)
        fp32 = FP32 * self.count
        if self.rms:
            converted = fp32 if self.sizes.e < FP32 else 0  # of the gradient
            widened = (
                fp32 if self.sizes.e < FP32 and not self._fp32_input else 0
            )  # of the input, until it is normalised
            rounded = 0 if grad_in == fp32 else grad_in
            tally.brief(WORK, converted + max(widened + fp32, 3 * fp32 + rounded))
            tally.take(BACKWARD, grad_in)
        else:
            if self.copies:
                tally.take(BACKWARD, self.out)
            tally.take(BACKWARD, grad_in)
            if self.copies:
                tally.free(BACKWARD, self.out)
        tally.free(self.kind, self.statistics)
        tally.free(BACKWARD, self.out)

    @property
    def _fp32_input(self) -> bool:
        return self.from_residual and self.sizes.r == FP32


class LayerMemory:
    """One layer of the configured kind. split: its backward leaves the gradients of linear layers' weights for later.

    modules: parts that are computed again in backward. norm and mlp_act are computed by the linear layer behind them,
    which keeps what they read, and again within its backward.
    """

    def __init__(
        self, model: ModelConfig, sizes: Sizes, attention: AttentionMemory, modules: frozenset[str], *, split: bool
    ) -> None:
        self._sizes, self._attention, self._split = sizes, attention, split
        self._dropout = model.hidden_dropout > 0
        self._swiglu, self._squared_relu = model.swiglu, model.squared_relu
        self._norm_again, self._act_again, self._mlp_again = (m in modules for m in (NORM, MLP_ACT, WHOLE_MLP))
        rms = model.normalization == "RMSNorm"
        self._norm = NormMemory(sizes, rms, sizes.rows * sizes.h, sizes.h)
        fusion, bias = model.gradient_accumulation_fusion, model.add_bias_linear
        width = sizes.f * (2 if sizes.gated else 1)
        self._fc1 = LinearMemory(sizes, (NORMS, MLP), sizes.h, width, True, fusion, bias, put_off=split)
        self._fc2 = LinearMemory(sizes, (MLP, WORK), sizes.f, sizes.h, False, fusion, bias, put_off=split)

    def forward(self, tally: Tally) -> None:
        """Leaves what backward needs, and the residual stream after the layer."""
        sizes = self._sizes
        with tally.doing("attention"):
            self._norm.forward(tally)
            self._attention.project(tally)
            self._forget_norm(tally)
            self._attention.forward(tally)  # leaves its output
            self._add(tally)
        if self._norm.copies:
            tally.free(RESIDUAL, sizes.residual)  # of the layer's input, which nobody keeps
        with tally.doing("mlp"):
            self._mlp_forward(tally)
            self._fc2.forward(tally)
            self._forget_activation(tally)
            if self._mlp_again:
                self._forget_mlp(tally)
            self._add(tally)
            tally.free(WORK, sizes.hidden)  # the MLP's output
        if self._norm.copies:
            tally.free(RESIDUAL, sizes.residual)
        tally.free(WORK, sizes.hidden)  # the attention's output, which lives as long as the layer's function
        self._attention.end_layer(tally)

    def backward(self, tally: Tally, *, owned: bool = True) -> None:
        """Frees what forward kept, and the residual stream before the layer.

        owned: nobody else holds the gradient that comes in, so it is added to in place.
        """
        sizes = self._sizes
        tally.take(COMMUNICATION, self._attention.early)
        with tally.doing("mlp"):
            branch = self._branch_gradient(tally)
            if self._mlp_again:
                self._mlp_forward(tally, with_norm=self._norm_again)
            elif self._act_again:
                self._activation_forward(tally)
            if self._act_again:
                self._fc2.backward(tally, branch, self._activation_backward)
            else:
                self._fc2.backward(tally, branch)
                self._activation_backward(tally)
            self._norm_backward(tally, self._fc1)
        shared = self._split and branch == 0  # the gradient that comes in waits for the weights' turn
        if shared or not owned:
            tally.take(BACKWARD, sizes.residual)
        with tally.doing("attention"):
            branch = self._branch_gradient(tally)
            self._attention.backward(tally, grad=branch)
            self._norm_backward(tally, self._attention.qkv)
        if shared:
            tally.take(BACKWARD, sizes.residual)
            if not owned:
                tally.take(BACKWARD, sizes.residual)

    def _mlp_forward(self, tally: Tally, *, with_norm: bool = True) -> None:
        """Up to the input of fc2; `with_norm`: from the norm on, else from its output."""
        if with_norm:
            self._norm.forward(tally)
        self._fc1.forward(tally)
        self._forget_norm(tally)
        self._activation_forward(tally)

    def _forget_mlp(self, tally: Tally) -> None:
        """The MLP as a region that keeps its input alone."""
        tally.free(MLP, self._fc1.out + (0 if self._act_again else self._sizes.inner))

    def _forget_norm(self, tally: Tally) -> None:
        if self._norm_again:
            tally.free(NORMS, self._norm.made)

    def _forget_activation(self, tally: Tally) -> None:
        if self._act_again:
            tally.free(MLP, self._sizes.inner)

    def _add(self, tally: Tally) -> None:
        """The branch's output, with dropout, to the residual stream. The output stays."""
        sizes = self._sizes
        if self._dropout:
            tally.take(DROPOUT, self.mask)
            tally.take(WORK, sizes.hidden)
        tally.take(RESIDUAL, sizes.residual)
        if self._dropout:
            tally.free(WORK, sizes.hidden)

    def _branch_gradient(self, tally: Tally) -> int:
        """Bytes of the gradient of the branch's output; 0 when it is the residual stream's own."""
        sizes = self._sizes
        if not self._dropout and sizes.residual == sizes.hidden:
            return 0
        if sizes.residual != sizes.hidden:
            tally.take(BACKWARD, sizes.hidden)
        if self._dropout:
            tally.take(BACKWARD, sizes.hidden)
            tally.free(DROPOUT, self.mask)
            if sizes.residual != sizes.hidden:
                tally.free(BACKWARD, sizes.hidden)
        return sizes.hidden

    def _norm_backward(self, tally: Tally, behind: LinearMemory) -> None:
        """Of the linear layer behind a norm, of the norm, and the sum of the two gradients of the residual stream."""
        if self._norm_again:
            self._norm.again(tally)
            behind.backward(tally, then=self._norm.backward)
        else:
            behind.backward(tally)
            self._norm.backward(tally)
        if not self._norm.copies:
            tally.free(RESIDUAL, self._sizes.residual)
        tally.free(BACKWARD, self._sizes.residual)

    @property
    def mask(self) -> int:
        """Bytes that dropout of hidden states keeps. On the CPU torch has no kernel of its own for it: it keeps factors."""
        sizes = self._sizes
        return sizes.rows * sizes.h * (sizes.e if sizes.target.cpu else MASK)

    def _activation_forward(self, tally: Tally) -> None:
        """Of the output of fc1, which is kept; leaves the input of fc2. squared_relu keeps its first result instead."""
        inner = self._sizes.inner
        tally.take(MLP, inner)
        if self._squared_relu:
            tally.take(MLP, inner)
            tally.free(MLP, inner)

    def _activation_backward(self, tally: Tally) -> None:
        """From the gradient of the input of fc2 to that of the output of fc1. Frees what was kept for it."""
        inner = self._sizes.inner
        if self._swiglu:
            tally.take(BACKWARD, 2 * inner)
            tally.brief(WORK, 2 * inner)
        else:
            tally.take(BACKWARD, inner)
            if self._squared_relu:
                tally.brief(WORK, 2 * inner)
        tally.free(BACKWARD, inner)
        tally.free(MLP, self._fc1.out)
