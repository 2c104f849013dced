"""The memory of the experts of a rank (kernels/ops/grouped_mlp.py), event by event.

M rows are received, and A pairs of a row and an expert are computed. Products of rows read a copy of the row of every
pair (those in FP8 pick it), and those that are summed write a result for every pair.
"""

from __future__ import annotations

from megatron.spec.expert_rows import ExpertRows
from megatron.spec.fp8_sizes import experts_problem
from megatron.spec.memory.fp8 import Fp8Work
from megatron.spec.memory.trace import BACKWARD, EXPERTS, MLP, WORK, MemoryTrace
from megatron.spec.mlp import SQUARED_RELU, activation_copies
from megatron.spec.moe import ExpertsSpec
from megatron.spec.sizes import FP32, INT64, Sizes


class ExpertsMemory:
    """From the rows that a rank has received to the sums of its experts' results for each row.

    recompute_act: the activation is computed again in backward, and not kept.
    """

    def __init__(self, spec: ExpertsSpec, sizes: Sizes, load: ExpertRows, *, recompute_act: bool) -> None:
        self._spec, self._sizes, self._load, self._recompute_act = spec, sizes, load, recompute_act
        self._width = spec.width // load.etp
        self._outputs = 2 * self._width if spec.gated else self._width
        self._wide, self._half = sizes.target.wide, sizes.e < FP32
        fp8, cpu = sizes.fp8, sizes.target.cpu
        in_fp8 = fp8 is not None and experts_problem(fp8.recipe, spec.hidden, self._width, cpu=cpu) is None
        self._fp8 = fp8 if in_fp8 else None

    @property
    def sums(self) -> int:
        """Bytes of the results, and of their gradient."""
        return self._load.received * self._sizes.h * self._sizes.e

    def forward(self, trace: MemoryTrace, *, product: bool = True) -> None:
        """Leaves the sums as work space. `product` says whether fc2 is computed; a region that runs again leaves it
        out."""
        inner = self._inner
        self._products(trace, self._outputs)
        trace.take(MLP, self._fc1_out, EXPERTS)
        trace.use(WORK, self._fc1_out if self._spec.has_bias else 0)  # the bias of every pair
        trace.use(WORK, self._order)  # the sorted rows, and their numbers
        trace.take(MLP, self._order, EXPERTS)
        copies = activation_copies(self._spec.activation, self._spec.gate, backward=False) * inner
        trace.take(MLP, 0 if self._recompute_act else inner, EXPERTS)
        trace.use(WORK, 0 if self._recompute_act else copies)
        if product:
            trace.take(WORK, inner)  # times the weights
            trace.use(WORK, copies if self._recompute_act else 0)
            trace.use(WORK, 2 * self._fp32_inner if self._converts else 0)
            self._sum_of_products(trace, self._width)
            trace.use(WORK, self._gathered + self._biases if self._spec.has_bias else 0)
            trace.free(WORK, inner)
        trace.take(MLP, self._load.worked * FP32, EXPERTS)  # weights
        trace.take(WORK, self.sums)

    def backward(self, trace: MemoryTrace) -> None:
        """From the gradient of the sums, which stays, to that of the rows. Frees all that forward kept."""
        sizes, inner = self._sizes, self._inner
        saved, recomputed = (0, inner) if self._recompute_act else (inner, 0)
        self._products(trace, self._width)
        trace.take(BACKWARD, inner)  # of the activation
        trace.take(MLP, recomputed)
        copies = [activation_copies(self._spec.activation, self._spec.gate, backward=way) for way in (False, True)]
        trace.use(WORK, copies[0] * recomputed)
        # For the gradients of the weights its product with the activation in fp32, and copies of both where they are
        # not.
        trace.use(WORK, self._fp32_inner * (1 + self._half + self._converts))
        trace.take(MLP, saved)  # the activation times the weights
        trace.use(WORK, self._biases if self._spec.has_bias else 0)
        if not sizes.split_backward:
            self._weight_grad(trace, self._width, sizes.h)
            trace.free(MLP, inner)
        trace.take(BACKWARD, self._fc1_out)
        if self._spec.gated or self._spec.activation == SQUARED_RELU:
            trace.use(WORK, copies[1] * inner)
        trace.free(BACKWARD, inner)
        if not sizes.split_backward:
            self._weight_grad(trace, sizes.h, self._outputs)
        self._sum_of_products(trace, self._outputs)
        trace.take(BACKWARD, self.sums)
        trace.free(BACKWARD, 0 if sizes.split_backward else self._fc1_out)
        trace.free(MLP, saved + self._fc1_out + self._order + self._load.worked * FP32)

    def _products(self, trace: MemoryTrace, outputs: int) -> None:
        """The row of each pair times a matrix of [h, outputs], with the results."""
        copies = self._gathered if self._fp8 is None else 0
        trace.take(WORK, copies)
        self._multiply(trace, self._sizes.h, outputs, picks=True)
        trace.free(WORK, copies)

    def _sum_of_products(self, trace: MemoryTrace, inputs: int) -> None:
        """The products of all pairs, added to the sums of each row."""
        self._multiply(trace, inputs, self._sizes.h, picks=False)
        trace.take(WORK, self._gathered)
        trace.use(WORK, self.sums)
        trace.free(WORK, self._gathered)

    def _multiply(self, trace: MemoryTrace, inputs: int, outputs: int, *, picks: bool) -> None:
        """Rows of [inputs], which are there, times a matrix [inputs, outputs] of each expert; with the results.

        picks: FP8 products quantize received rows, and pick those of the pairs; others are given a row for each pair.
        """
        load, fp8 = self._load, self._fp8
        result = load.worked * outputs * self._sizes.e
        if fp8 is None:
            trace.use(WORK, result + self._wide_product(inputs, outputs))
            return
        weight = load.experts * inputs * outputs
        work = Fp8Work(self._sizes, fp8, weight)
        weights = work.weights(trace)
        trace.take(WORK, result)
        rows = (load.received if picks else load.worked) * inputs
        quantized = work.quantize(trace, WORK, rows)
        work.multiply(trace, rows, weight, load.largest * outputs, picked=load.worked * inputs if picks else 0)
        trace.free(WORK, weights + result + quantized)

    def _weight_grad(self, trace: MemoryTrace, inputs: int, outputs: int) -> None:
        """The gradients of one expert after the other, with copies of operands or result, see LinearMemory."""
        if self._sizes.lora is not None:  # experts are frozen
            return
        sizes, rows = self._sizes, self._load.largest
        copies = FP32 * rows * (inputs + outputs) if self._wide else 0
        if not sizes.fused_weight_grad or (sizes.target.cpu and self._half and not self._wide):
            copies = inputs * outputs * sizes.e
        elements = self._load.experts * inputs * outputs
        total = sizes.grad_sum(elements)
        trace.take(WORK, total)
        trace.use(WORK, self._gathered + copies)
        trace.use(WORK, sizes.grad_bits(elements, in_columns=self._load.etp > 1))
        trace.free(WORK, total)

    def _wide_product(self, inputs: int, outputs: int) -> int:
        """Bytes of fp32 copies of an expert's operands and result."""
        rows = self._load.largest
        return FP32 * (rows * inputs + inputs * outputs + rows * outputs) if self._wide else 0

    @property
    def _biases(self) -> int:
        """Bytes of two fp32 numbers for every pair and output channel of this rank, and of one in the model's dtype."""
        return self._load.worked * (self._sizes.h // self._load.etp) * (2 * FP32 + self._sizes.e)

    @property
    def _order(self) -> int:
        """Bytes of the order of the pairs by rows."""
        return INT64 * (self._load.worked + self._load.received)

    @property
    def _gathered(self) -> int:
        """Bytes of as many rows as there are pairs."""
        return self._load.worked * self._sizes.h * self._sizes.e

    @property
    def _converts(self) -> bool:
        """Torch's CPU kernels make fp32 copies where halves meet fp32 numbers."""
        return self._half and self._sizes.target.cpu

    @property
    def _inner(self) -> int:
        """Bytes of the activation."""
        return self._load.worked * self._width * self._sizes.e

    @property
    def _fp32_inner(self) -> int:
        return self._load.worked * self._width * FP32

    @property
    def _fc1_out(self) -> int:
        return self._load.worked * self._outputs * self._sizes.e
