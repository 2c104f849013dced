"""What a training step asks of a GPU: operations, bytes and FLOPs of the program's own CUDA code, counted without a
GPU.

The first step of a run is traced as `--dry-run` does it (megatron/training/dry_run), and each operation of torch is
counted under the file of the program that calls it: a launch of at least one kernel, the bytes that it has to read and
write, each element once, and the FLOPs of matrix products and of attention (half of the square, which is causal). Runs
with two and with three layers differ by one layer. Views, and operations that only take memory, cost nothing.

    python -m benchmarks.roofline                        # a layer of the shape of Llama-3 8B, sequences of 8192 tokens
    python -m benchmarks.roofline --triton               # with the fused kernels; needs the package triton, but no GPU
    python -m benchmarks.roofline --triton --shape qwen3-30b-a3b
    python -m benchmarks.roofline --rates 720 670 520 3.0 --flags "--recompute-activations"

A Triton kernel is not run: its launch counts with the tensors that its source reads and writes (triton_traffic.py).

The last column is the least time: FLOPs at the rates of --rates (products and attention in TFLOP/s, forward and
backward, and copies in TB/s), and bytes at that of copies. It is computed, not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import megatron
from benchmarks.triton_traffic import traffic
from megatron.base.log import muted
from megatron.command_line.read import parse
from megatron.config.run import RunConfig
from megatron.core.streams.simulated import H100
from megatron.kernels import choose_fp8, fused
from megatron.kernels.ops.fp8.quantize import Quantized
from megatron.spec.decoder import decoder_spec
from megatron.training.dry_run.trace import trace

ROOT = Path(megatron.__file__).parent
SHAPE = """
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --micro-batch-size 1 --global-batch-size 1 --vocab-size 32064 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --bf16 --lr 1e-4 --train-iters 1 --eval-iters 0 --clip-grad 1
"""
# Further flags that turn it into another shape; all experts are on one rank.
SHAPES = {
    "llama3-8b": "",
    "qwen3-30b-a3b": """
        --hidden-size 2048 --ffn-hidden-size 6144 --num-query-groups 4 --kv-channels 128 --qk-layernorm
        --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-aux-loss-coeff 0.001
    """,
}
CALLS_BACKWARD = "core.pipeline_parallel.engine"
AUTOGRAD = "autograd"  # the gradients of torch's own operations
ATTENTION = "kernels.ops.attention"
EXPERT_WEIGHTS = "kernels.backends.triton.expert_weight_grad"
LARGE = (
    ATTENTION,
    "kernels.ops.gemm",
    "kernels.ops.grouped_gemm",
    "kernels.ops.weight_grad",
    "kernels.ops.fp8.scaled_mm",
    EXPERT_WEIGHTS,
)  # the products of a layer
UPDATES = (
    "core.optimizer",
    "core.distributed",
    *(
        f"kernels.{name}"
        for name in ("ops.adam", "ops.square_sum", "backends.triton.adam", "backends.triton.square_sum")
    ),
)
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
# Without a kernel: they take memory, or are about the tensor and not its elements.
_NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "record_stream", "lift",
    "_local_scalar_dense",
}  # fmt: skip
_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}
# Of these the first two tensors are the operands; scales, and the places where the rows of an expert end, come behind
# them.
_OPERANDS_FIRST = {"_grouped_mm", "_scaled_mm", "_scaled_mm_v2"}
# Of these the first tensor is read only where the indices say so: as many elements as there are results.
_TAKES_SOME = {"index_select", "gather", "embedding", "index"}
_GATED = {"_fused_adamw_", "_fused_sgd_"}


@dataclass
class Work:
    """What operations ask for. flops: of products and attention."""

    launches: int = 0
    nbytes: int = 0
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.launches + other.launches, self.nbytes + other.nbytes, self.flops + other.flops)

    def __sub__(self, other: Work) -> Work:
        return Work(self.launches - other.launches, self.nbytes - other.nbytes, self.flops - other.flops)


class CountedWork(TorchDispatchMode):
    """Counts the work of all operations while it is active, by (file of the program, part of the step)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], Work] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        work = work_of(func, args, kwargs, result)
        if work.launches:
            self.add(ATTENTION if "attention" in func._schema.name else caller(), work)
        return result

    def add(self, source: str, work: Work) -> None:
        """Counts work of a file of the program."""
        key = source, part_of(source)
        self.found[key] = self.found.get(key, Work()) + work

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Counts a launch of a Triton kernel, in place of triton's JITFunction.run."""
        arguments = dict(zip(kernel.arg_names, args, strict=True))
        read, written = traffic(kernel, arguments)
        moved = sum(nbytes(arguments[name]) for name in [*read, *written])
        source = caller()
        self.add(source, Work(1, moved, flops_of_weights(arguments) if source == EXPERT_WEIGHTS else 0))

    def add_product(self, out: Tensor, a: Quantized, b: Quantized) -> None:
        """Counts a product of FP8 matrices that is added to fp32 sums, in place of CublasLt.add_product."""
        moved = 2 * nbytes(out) + sum(map(nbytes, (a.data, a.inverse, b.data, b.inverse)))
        self.add(caller(), Work(1, moved, 2 * out.numel() * a.data.shape[1]))


def caller() -> str:
    """The file of the program that runs an operation, as a module's name, or AUTOGRAD."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and "dry_run" not in path.parts:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            return AUTOGRAD if name == CALLS_BACKWARD else name
        frame = frame.f_back  # type: ignore[assignment]
    return AUTOGRAD


def part_of(source: str) -> str:
    """The part of the step that an operation belongs to."""
    if torch._C._current_graph_task_id() != -1:
        return BACKWARD
    return UPDATE if source.startswith(UPDATES) else FORWARD


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> Work:
    """The work of one operation, given what it was called with and what it returned."""
    name = func._schema.name.removeprefix("aten::")
    read, out = tensors((args, {k: v for k, v in kwargs.items() if k != "out"})), tensors(kwargs.get("out"))
    given = {each.untyped_storage()._cdata for each in read}
    results = tensors(result)
    if (
        func.namespace == "prim"
        or name in _NO_KERNEL
        or not (read or results)
        or not any(each.device.type == "cuda" for each in [*read, *results])
    ):
        return Work()
    changes = func._schema.is_mutable
    if not changes and results and all(each.untyped_storage()._cdata in given for each in results):
        return Work()  # a view
    if name in ("fill_", "zero_", "copy_"):
        read = read[1:]
    sizes = [nbytes(each) for each in read]
    if name in _TAKES_SOME:
        sizes[0] = sum(map(nbytes, results))
    written = sum(map(nbytes, out or changed(func, args) or results))
    if name == "index_add_":  # it reads and writes the rows that it adds to
        sizes[0] = written = nbytes(args[3])
    if name in _GATED and kwargs.get("grad_scale") is not None and kwargs.get("found_inf") is not None:
        return Work(1)  # of two kernels one returns at once, which is this one unless gradients are scaled or clipped
    return Work(1, sum(sizes) + written, flops_of(name, func, read, results, out))


def changed(func: Any, args: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    marked = [arg for arg, about in zip(args, func._schema.arguments) if about.is_write]
    return tensors(marked)


def tensors(found: Any) -> list[Tensor]:
    """All tensors in an argument or result."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, dict):
        found = found.values()
    elif not isinstance(found, (tuple, list)):
        return []
    return [tensor for each in found for tensor in tensors(each)]


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; one that is repeated without a copy counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride or not size else 1
    return count * tensor.itemsize


def flops_of(name: str, func: Any, read: list[Tensor], results: list[Tensor], out: list[Tensor]) -> int:
    """FLOPs of matrix products and of causal attention; 0 for other operations."""
    if name in _PRODUCTS or name in _OPERANDS_FIRST:
        left, right = read[:2] if name in _OPERANDS_FIRST else read[-2:]
        return 2 * left.numel() * right.shape[-1]
    if "attention" in name:
        backward = "backward" in name
        query, key = read[1:3] if backward else read[:2]
        rows = 2 if name.startswith("_scaled_dot_product") else 1  # [b, heads, s, d], or [b, s, heads, d]
        pairs = query.numel() // query.shape[-1] * key.shape[rows] // 2  # half are masked
        return 2 * (5 if backward else 2) * pairs * query.shape[-1]
    return 0


def flops_of_weights(arguments: dict[str, Any]) -> int:
    """FLOPs of the gradients of all experts' weights."""
    pairs = arguments["grad_rows_ptr" if arguments["PICK_GRADS"] else "grads_ptr"]
    return 2 * len(pairs) * int(arguments["main_ptr"][0].numel())


@contextlib.contextmanager
def fused_kernels(work: CountedWork) -> Iterator[None]:
    """Runs take the Triton kernels, and cuBLASLt's sums of FP8 products, which `work` counts and does not run. They are
    not tried first: nothing is computed.
    """
    kernel = importlib.import_module("triton.runtime.jit").JITFunction
    quantize = importlib.import_module("megatron.kernels.backends.triton.quantize")
    with (
        mock.patch.object(quantize, "has_instruction", lambda: True),  # no driver can tell
        mock.patch.object(choose_fp8, "choose_sums", lambda config, device: (work.add_product, None)),
        mock.patch.object(fused, "missing", lambda device: None),
        mock.patch.object(fused, "failure_of", lambda trial: None),
        mock.patch.object(kernel, "run", lambda self, *args, **options: work.launch(self, *args, **options)),
    ):
        yield


def counted(flags: str, layers: int, *, triton: bool = False) -> dict[tuple[str, str], Work]:
    """The work of a step of a model with this many layers, by file and part."""
    work = CountedWork()
    with muted(True), fused_kernels(work) if triton else contextlib.nullcontext():
        trace(read(flags, layers), 1, 0, H100, work)
    return work.found


def read(flags: str, layers: int) -> RunConfig:
    """The run of SHAPE with this many layers and further flags."""
    run = parse(f"--dry-run {SHAPE} --num-layers {layers} {flags}".split(), description="")
    model = dataclasses.replace(run.model, max_position_embeddings=run.data.seq_length)
    return dataclasses.replace(run, model=model)


@dataclass(frozen=True)
class Rates:
    """FLOP/s of products and of attention forward and backward, and bytes per second of copies."""

    products: float
    attention: float
    attention_backward: float
    copies: float

    def milliseconds(self, source: str, part: str, work: Work) -> float:
        """The least time of the work."""
        if source != ATTENTION:
            rate = self.products
        else:
            rate = self.attention_backward if part == BACKWARD else self.attention
        return 1000 * max(work.flops / rate, work.nbytes / self.copies)


def print_table(title: str, found: dict[tuple[str, str], Work], rates: Rates) -> None:
    """Prints a row per file and part, most bytes first, and their sum."""
    print(f"\n{title}\n\n| file | part | launches | MB | TFLOP | least ms |\n|---|---|---|---|---|---|")
    least = 0.0
    for (source, part), work in sorted(found.items(), key=lambda item: -item[1].nbytes):
        if work.launches or work.nbytes:
            ms = rates.milliseconds(source, part, work)
            least += ms
            print(
                f"| {source} | {part} | {work.launches} | {work.nbytes / 1e6:.0f} | {work.flops / 1e12:.3f} | {ms:.3f} "
                "|"
            )
    work = total(found, lambda source, part: True)
    print(f"| all | | {work.launches} | {work.nbytes / 1e6:.0f} | {work.flops / 1e12:.3f} | {least:.3f} |")


class Figures(NamedTuple):
    """The figures that fused kernels are judged by: of a layer, forward and backward; per logit; and per parameter,
    with the norm of its gradient.
    """

    launches: int
    small_bytes: int  # of all but products and attention
    loss_bytes: float
    update_bytes: float


def figures_of(layer: dict[tuple[str, str], Work], rest: dict[tuple[str, str], Work], flags: str) -> Figures:
    """The figures of a run with these flags."""
    small = total(layer, lambda source, part: part != UPDATE and not source.startswith(LARGE))
    of_layer = total(layer, lambda source, part: part != UPDATE)
    loss = total(rest, lambda source, part: "cross_entropy" in source)
    update = total(layer, lambda source, part: part == UPDATE)
    run = read(flags, 2)
    assert run.data.seq_length and run.train.micro_batch_size and run.model.vocab_size
    logits = run.data.seq_length * run.train.micro_batch_size * run.model.vocab_size
    parameters = sum(spec.numel for _, spec in decoder_spec(run.model).layers[0].parameters())
    return Figures(of_layer.launches, small.nbytes, loss.nbytes / logits, update.nbytes / parameters)


def print_summary(figures: Figures) -> None:
    """Prints the figures."""
    print(f"""
| figure | |
|---|---|
| launches of a layer, forward and backward | {figures.launches} |
| bytes of a layer beyond products and attention | {figures.small_bytes / 1e9:.2f} GB |
| bytes of the cross entropy per logit | {figures.loss_bytes:.1f} |
| bytes of the update per parameter, with the norm of its gradient | {figures.update_bytes:.1f} |""")


def layer_and_rest(
    flags: str, *, triton: bool = False
) -> tuple[dict[tuple[str, str], Work], dict[tuple[str, str], Work]]:
    """The work of a layer, and all that a step has once, by file and part."""
    two, three = (counted(flags, layers, triton=triton) for layers in (2, 3))
    layer = {key: three.get(key, Work()) - two.get(key, Work()) for key in sorted({*two, *three})}
    return layer, {key: two.get(key, Work()) - layer[key] - layer[key] for key in layer}


def total(found: dict[tuple[str, str], Work], wanted: Callable[[str, str], bool]) -> Work:
    """The sum over the wanted files and parts."""
    return sum((work for key, work in found.items() if wanted(*key)), Work())


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs=4, default=(720, 670, 520, 3.0))
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--flags", default="", help="further flags of the run, such as another shape")
    parser.add_argument("--triton", action="store_true", help="with the fused kernels in Triton")
    args = parser.parse_args()
    products, forward, backward, copies = args.rates
    rates = Rates(products * 1e12, forward * 1e12, backward * 1e12, copies * 1e12)
    flags = f"{SHAPES[args.shape]} {args.flags}"
    layer, rest = layer_and_rest(flags, triton=args.triton)
    print_table("One decoder layer", layer, rates)
    print_table("The rest: embedding, output layer, loss, and all that a step has once", rest, rates)
    print_summary(figures_of(layer, rest, flags))
    return 0


if __name__ == "__main__":
    sys.exit(main())
