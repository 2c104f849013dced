"""How the GEMMs of the sharded linear layers are overlapped with their communication over tp.

*Dependent*: a GEMM needs the gathered tensor, or computes the one that is reduced. `Plain` does one after the other;
`InChunks` splits the rows and multiplies one chunk while others are in flight; `Fused` leaves that to torch's
operations on symmetric memory. *Independent* ("bulk" in Megatron-LM's flags): a GEMM is overlapped with communication
that it has nothing to do with. That needs no chunks, so all of them do it: in a column layer's backward the gather of
the input is overlapped with the input-gradient GEMM, and the reduction of the input gradient with the weight-gradient
GEMM.

Shapes: s sequence, b batch, in/out features of the local weight [out, in]. With sequence parallelism the leading dim of
a tensor that is gathered or scattered is s/tp. A row of the result depends on its own row of the input alone, so chunks
change no sum; a GEMM may pick another kernel for fewer rows.
"""

from __future__ import annotations

import copy

from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.core.comm import symmetric
from megatron.core.comm.chunks import ChunkComm
from megatron.core.comm.collectives import (
    Handle,
    all_gather,
    all_gather_async,
    all_reduce,
    all_reduce_async,
    all_reduce_in_rank_order,
    reduce_scatter,
    reduce_scatter_async,
)
from megatron.core.comm.regions import Reduce
from megatron.core.groups import Group
from megatron.core.streams.streams import Streams
from megatron.kernels.ops.linear import LinearKernel, OutputGrad, RowProduct

# Of a chunk: enough for an efficient GEMM, and to be worth a message to every other rank.
LEAST_ROWS = {"cpu": 64, "cuda": 512}
# Of a product that is all-reduced.
MOST_CHUNKS = 8


class Plain:
    """Communicate, then multiply; or multiply, then communicate."""

    name = "off"  # in the start-up table

    def __init__(self, parallel: ParallelConfig) -> None:
        self._bulk_dgrad, self._bulk_wgrad = parallel.tp_comm_bulk_dgrad, parallel.tp_comm_bulk_wgrad
        self._reduce_outputs: Reduce = all_reduce

    def gather_linear(self, kernel: LinearKernel, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group) -> Tensor:
        """x [s/tp, b, in] -> [s, b, out]. Communication: an all-gather of x."""
        return kernel.output(all_gather(x, tp), weight, bias)

    def linear_sum(self, kernel: LinearKernel, x: Tensor, weight: Tensor, tp: Group, *, scatter: bool) -> Tensor:
        """x [s, b, in] -> the sum over tp of [s, b, out], or this rank's [s/tp, b, out] of it.

        Communication: a reduce-scatter (`scatter`) or an all-reduce of the product.
        """
        out = kernel.output(x, weight)
        return reduce_scatter(out, tp) if scatter else self._reduce_outputs(out, tp)

    def gather_input_grad(
        self, kernel: LinearKernel, grad: Tensor, weight: Tensor, tp: Group, *, for_weight: bool
    ) -> tuple[OutputGrad, Tensor]:
        """grad [s/tp, b, out] -> (gathered [s, b, out], its product [s, b, in]). Communication: an all-gather of grad.

        for_weight: whether the weight's gradient is computed next, so that operands for it are made at the same time.
        """
        full = kernel.prepare(all_gather(grad, tp), for_weight=for_weight)
        return full, kernel.input_grad(full, weight)

    def input_grad_sum(
        self, kernel: LinearKernel, grad: OutputGrad, weight: Tensor, tp: Group, *, scatter: bool
    ) -> tuple[Tensor, list[Handle]]:
        """grad [s, b, out] -> the sum over tp of [s, b, in], or [s/tp, b, in] of it, there after the handles' `wait`.

        Communication: a reduce-scatter (`scatter`) or an all-reduce of the product.
        """
        total = kernel.input_grad(grad, weight)
        if scatter:
            total, handle = reduce_scatter_async(total, tp)
        else:
            handle = all_reduce_async(total, tp)
        return total, self._beside([handle], self._bulk_wgrad)

    def gather_input(self, x: Tensor, tp: Group) -> tuple[Tensor, list[Handle]]:
        """x [s/tp, b, in] -> [s, b, in], there after the handles' `wait`. Communication: an all-gather."""
        full, handle = all_gather_async(x, tp)
        return full, self._beside([handle], self._bulk_dgrad)

    def _beside(self, handles: list[Handle], bulk: bool) -> list[Handle]:
        if bulk:
            return handles
        wait(handles)
        return []

    def in_rank_order(self) -> Plain:
        """Returns the same with sums in rank order: with --batch-invariant-mode, which refuses chunks."""
        assert type(self) is Plain, self.name
        ordered = copy.copy(self)
        ordered._reduce_outputs = all_reduce_in_rank_order
        return ordered


PLAIN = Plain(ParallelConfig())


class InChunks(Plain):
    """Multiply some rows while others are in flight; see comm/chunks.py for the order."""

    def __init__(self, parallel: ParallelConfig, comm: ChunkComm, name: str, least_rows: int) -> None:
        """least_rows: of a chunk."""
        super().__init__(parallel)
        self.name = name
        self._gather, self._reduce = parallel.tp_comm_overlap_ag, parallel.tp_comm_overlap_rs
        self._comm, self._least_rows = comm, least_rows

    def gather_linear(self, kernel: LinearKernel, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group) -> Tensor:
        """See Plain."""
        if not self._gather:
            return super().gather_linear(kernel, x, weight, bias, tp)
        _, out = self._gathered_product(x, kernel.output_rows(weight, bias))
        return _like(out, x)

    def linear_sum(self, kernel: LinearKernel, x: Tensor, weight: Tensor, tp: Group, *, scatter: bool) -> Tensor:
        """See Plain."""
        if not self._reduce:
            return super().linear_sum(kernel, x, weight, tp, scatter=scatter)
        if scatter:
            return _like(self._scattered_product(x, kernel, weight), x)
        total, handles = self._reduced_product(x, kernel.output_rows(weight), tp)
        wait(handles)
        return _like(total, x)

    def gather_input_grad(
        self, kernel: LinearKernel, grad: Tensor, weight: Tensor, tp: Group, *, for_weight: bool
    ) -> tuple[OutputGrad, Tensor]:
        """See Plain."""
        if not self._gather:
            return super().gather_input_grad(kernel, grad, weight, tp, for_weight=for_weight)
        full, out = self._gathered_product(grad, kernel.input_grad_rows(weight))
        return OutputGrad(_like(full, grad)), _like(out, grad)

    def input_grad_sum(
        self, kernel: LinearKernel, grad: OutputGrad, weight: Tensor, tp: Group, *, scatter: bool
    ) -> tuple[Tensor, list[Handle]]:
        """See Plain. The reduce-scatter is overlapped with the weight gradient; an all-reduce, which takes twice as
        long, starts with the first rows of the product."""
        if scatter or not self._reduce:
            return super().input_grad_sum(kernel, grad, weight, tp, scatter=scatter)
        total, handles = self._reduced_product(grad.tensor, kernel.input_grad_rows(weight), tp)
        return _like(total, grad.tensor), self._beside(handles, self._bulk_wgrad)

    def _gathered_product(self, x: Tensor, product: RowProduct) -> tuple[Tensor, Tensor]:
        x = x.flatten(0, -2)
        full, arriving = self._comm.gather(x, self._least_rows)
        out = x.new_empty((full.shape[0], product.columns))
        for rows in arriving:
            product(full[rows], out[rows])
        return full, out

    def _scattered_product(self, x: Tensor, kernel: LinearKernel, weight: Tensor) -> Tensor:
        x, product = x.flatten(0, -2), kernel.output_rows(weight)
        shard, leaving = self._comm.scatter(x.shape[0], product.columns, x, self._least_rows)
        for rows, out in leaving:
            product(x[rows], out)
        return shard

    def _reduced_product(self, x: Tensor, product: RowProduct, tp: Group) -> tuple[Tensor, list[Handle]]:
        x = x.flatten(0, -2)
        out = x.new_empty((x.shape[0], product.columns))
        handles = []
        chunks = max(1, min(MOST_CHUNKS, x.shape[0] // self._least_rows))
        for source, result in zip(x.tensor_split(chunks), out.tensor_split(chunks), strict=True):
            product(source, result)
            handles.append(all_reduce_async(result, tp))
        return out, handles


class Fused(InChunks):
    """torch's fused operations on symmetric memory, for what they do; all-reduces in chunks. CUDA only.

    They take no bias: it is added to the rounded product. They multiply in the activation dtype, whatever the kernel.
    """

    def gather_linear(self, kernel: LinearKernel, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group) -> Tensor:
        """See Plain."""
        if not self._gather:
            return super().gather_linear(kernel, x, weight, bias, tp)
        _, out = symmetric.gather_matmul(x.flatten(0, -2), weight.t(), tp, keep=False)
        return _like(out if bias is None else out.add_(bias), x)

    def gather_input_grad(
        self, kernel: LinearKernel, grad: Tensor, weight: Tensor, tp: Group, *, for_weight: bool
    ) -> tuple[OutputGrad, Tensor]:
        """See Plain."""
        if not self._gather:
            return super().gather_input_grad(kernel, grad, weight, tp, for_weight=for_weight)
        full, out = symmetric.gather_matmul(grad.flatten(0, -2), weight, tp, keep=True)
        assert full is not None
        return OutputGrad(_like(full, grad)), _like(out, grad)

    def _scattered_product(self, x: Tensor, kernel: LinearKernel, weight: Tensor) -> Tensor:
        return symmetric.matmul_scatter(x.flatten(0, -2), weight.t(), self._comm.group)


def choose_overlap(
    parallel: ParallelConfig, tp: Group, backend: str | None, streams: Streams, *, fp8: bool = False
) -> tuple[Plain, str]:
    """How this run interleaves, and why it is not the best way there is ("" when it is, or nothing was asked for).

    `backend`: "gloo", "nccl" or None in a world of one. `fp8`: layers have FP8 products. Communication: small gathers
    over tp, when CUDA is asked.
    """
    plain = Plain(parallel)
    if not parallel.tp_comm_overlap:
        return plain, ""
    if tp.size == 1:
        return plain, "tp = 1"
    if streams.device.type == "cuda" and backend != "nccl":
        return plain, f"{backend} sends no chunks from GPU memory"
    comm, least_rows = ChunkComm(tp, streams), LEAST_ROWS[streams.device.type]
    missing: str | None
    if fp8:
        missing = "its products are not in FP8"
    elif not parallel.sequence_parallel:
        missing = "it needs --sequence-parallel"
    else:
        missing = symmetric.why_not(tp, streams.device)
    if missing is None:
        return Fused(parallel, comm, "fused, symmetric memory", least_rows), ""
    return InChunks(parallel, comm, f"in chunks, {backend}", least_rows), f"no symmetric memory: {missing}"


def wait(handles: list[Handle]) -> None:
    """Wait for all of them."""
    for handle in handles:
        handle.wait()


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """[rows, columns] -> [..., columns] with the dims of x [s, b, ...] between."""
    return rows.view(-1, *x.shape[1:-1], rows.shape[-1])
