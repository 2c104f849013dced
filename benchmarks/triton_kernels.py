"""The Triton kernels without a GPU: the resources they compile to, and the bytes they move.

    python -m benchmarks.triton_kernels compile   # registers, stack and shared memory for sm_90 and sm_80
    python -m benchmarks.triton_kernels bytes     # bytes for each element, and for a layer of Llama 3 8B

`compile` calls the functions that layers call, with tensors that have shapes only, and compiles what they launch as
Triton would on the GPU; the resources are those in the compiled binary. `bytes` runs the same functions in Triton's
interpreter on the CPU, and counts each address of device memory that a launch reads, and each that it writes, once: a
weight that all rows read is in the cache after the first. Numbers for each token come from the difference between two
lengths. Neither needs a GPU, both need the package triton, and neither says how fast a kernel is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.triton_experts import expert_calls, fp8_expert_calls
from benchmarks.triton_quantize import quantize_calls
from megatron.kernels.ops.adam import Coefficients
from megatron.kernels.ops.assignments import Assignments
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.update_run import UpdateRun

TARGETS = (90, 80)
FIRST_FP8 = 89  # the first GPUs that multiply FP8
TOKENS, HIDDEN, INNER, HEADS, GROUPS, HEAD, VOCABULARY = 8192, 4096, 14336, 32, 8, 128, 32064
OTHER_WIDTHS = (128, 2048, 8192, 16384)  # of norms; compiled, too
# How often a layer calls each, forward and backward.
LAYER = {
    "addition, RMSNorm": 2,
    "addition, RMSNorm backward": 2,
    "SwiGLU": 1,
    "SwiGLU backward": 1,
    "QKV split": 1,
    "QKV split backward": 1,
}


class Case(NamedTuple):
    """A call of kernels. elements: of a token, which bytes are divided by."""

    call: Callable[[], object]
    elements: int


class Launch(NamedTuple):
    """The resources of a compiled kernel. stack: bytes of a thread, where registers spill; shared: bytes of a
    program."""

    target: str
    registers: int
    stack: int
    shared: int
    warps: int


def cases(tokens: int, device: str, hidden: int = HIDDEN) -> dict[str, Case]:
    """The calls of a layer and of the loss in bf16, for a sequence of `tokens`."""
    norm, activation, rope, cross_entropy, merge, adam, square_sum, embedding = map(_module, KERNELS)

    def half(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16, device=device)

    def full(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float32, device=device)

    x, weight, bias, rstd = half(tokens, 1, hidden), half(hidden), half(hidden), full(tokens, 1, 1)
    inner, grad = half(tokens, 1, 2 * INNER), half(tokens, 1, INNER)
    qkv = half(tokens, 1, GROUPS, HEADS // GROUPS + 2, HEAD)
    three = half(tokens, 1, HEADS, HEAD), half(tokens, 1, GROUPS, HEAD), half(tokens, 1, GROUPS, HEAD)
    q, k, table = half(tokens, 1, HEADS, HEAD), qkv[:, :, :, -2], half(tokens, 1, 1, HEAD // 2)
    out, lse = full(tokens, 1, HEADS, HEAD), full(1, HEADS, tokens)
    states, weights = [full(tokens, 1024).view(-1) for _ in range(4)], half(tokens, 1024).view(-1)
    runs = [UpdateRun(0, 512, True, False), UpdateRun(512, len(weights), False, False)]
    adamw = adam.OnePassAdamW(runs, torch.device(device))
    gate, numbers = full(3), Coefficients(1, 1e-4, 1e-4, 0.9, 0.95, 1e-8, 0.1)
    logits, targets = half(tokens, VOCABULARY), torch.zeros(tokens, dtype=torch.int64, device=device)
    return {
        "RMSNorm": Case(lambda: norm.compute_rms_norm(x, weight, 1e-5), hidden),
        "RMSNorm backward": Case(lambda: norm.gradient_rms_norm(x.clone(), x, weight, rstd), hidden),
        "addition, RMSNorm": Case(lambda: norm.compute_add_norm(x, x.clone(), weight, None, 1e-5), hidden),
        "addition, RMSNorm backward": Case(
            lambda: norm.gradient_add_norm(x.clone(), x.clone(), x, weight, None, (rstd, rstd)), hidden
        ),
        "addition, LayerNorm backward": Case(
            lambda: norm.gradient_add_norm(x.clone(), x.clone(), x, weight, bias, (rstd, rstd.clone())), hidden
        ),
        "LayerNorm": Case(lambda: norm.compute_layer_norm(x, weight, bias, 1e-5), hidden),
        "LayerNorm backward": Case(
            lambda: norm.gradient_layer_norm(x.clone(), x, weight, bias, (rstd, rstd.clone())), hidden
        ),
        "SwiGLU": Case(lambda: activation.swiglu.product(inner), INNER),
        "SwiGLU backward": Case(lambda: activation.swiglu.gradient_of_input(grad, inner), INNER),
        "GEGLU backward": Case(lambda: activation.geglu.gradient_of_input(grad, inner), INNER),
        "GEGLU (tanh) backward": Case(lambda: activation.geglu_tanh.gradient_of_input(grad, inner), INNER),
        "rotation of q": Case(lambda: rope.rotate_once(q, table, table.clone(), False), HEADS * HEAD),
        "rotation of k": Case(lambda: rope.rotate_once(k, table, table.clone(), False), GROUPS * HEAD),
        "interleaved rotation": Case(lambda: rope.rotate_once(q, table, table.clone(), True), HEADS * HEAD),
        "QKV split": Case(lambda: rope.split(qkv, table, table.clone(), False), (HEADS + 2 * GROUPS) * HEAD),
        "QKV split backward": Case(lambda: rope.join(*three, table, table.clone(), False), (HEADS + 2 * GROUPS) * HEAD),
        "interleaved QKV split": Case(lambda: rope.split(qkv, table, table.clone(), True), (HEADS + 2 * GROUPS) * HEAD),
        "cross entropy": Case(lambda: cross_entropy.local_statistics(logits, targets, 0), VOCABULARY),
        "cross entropy backward": Case(
            lambda: cross_entropy.gradient_(logits, targets, 0, rstd.view(-1), rstd.view(-1).clone()), VOCABULARY
        ),
        "merge of blocks": Case(lambda: merge.merge_(out, lse, q, lse.clone()), HEADS * HEAD),
        "squares of the norm": Case(lambda: square_sum.square_sum(states[1]), 1024),
        "embedding gradient": Case(
            lambda: embedding.add_rows(full(VOCABULARY, hidden), targets, x.view(-1, hidden)), hidden
        ),
        "AdamW": Case(lambda: adamw.step(*states, weights, gate, numbers), 1024),
        "AdamW, fp32 weights": Case(lambda: adamw.step(*states, None, gate, numbers), 1024),
    }


KERNELS = ("norm", "activation", "rope", "cross_entropy", "merge", "adam", "square_sum", "embedding_grad")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"megatron.kernels.backends.triton.{name}")


class _Driver:
    """A GPU that is not there: tells Triton which one to compile for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def compiled(capability: int) -> Iterator[tuple[str, Launch]]:
    """Yields (case, resources) of each kernel that the cases launch, compiled for a compute capability such as 90."""
    jit, compiler, runtime = (
        importlib.import_module(f"triton.{name}") for name in ("runtime.jit", "backends.compiler", "runtime.driver")
    )
    run, found = jit.JITFunction.run, []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(run(kernel, *args, grid=grid, warmup=True, **options))

    runtime.driver.set_active(_Driver(compiler.GPUTarget("cuda", capability, 32)))
    chosen = dict(cases(TOKENS, "meta"))
    for width in OTHER_WIDTHS:
        chosen.update(
            {f"{name}, {width} wide": case for name, case in cases(8, "meta", width).items() if "Norm" in name}
        )
    chosen.update(_quantize(TOKENS, HIDDEN, "meta"))
    calls = expert_calls(TOKENS, "meta")
    if capability >= FIRST_FP8:
        calls |= fp8_expert_calls(TOKENS, "meta")
    calls |= fixed_calls(TOKENS, "meta") | state_calls("meta")
    chosen.update({name: Case(call, HIDDEN) for name, call in calls.items()})
    with mock.patch.object(jit.JITFunction, "run", compile_only):
        for name, case in chosen.items():
            found.clear()
            case.call()
            yield from ((name, _resources(kernel, capability)) for kernel in found)


def _resources(kernel: Any, capability: int) -> Launch:
    tool = importlib.import_module("triton").knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(kernel.asm["cubin"])
        said = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    stack = found["STACK"] + found["LOCAL"]
    return Launch(f"sm_{capability}", found["REG"], stack, kernel.metadata.shared, kernel.metadata.num_warps)


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Yields [bytes] that kernels move inside, in the interpreter. Each launch counts an address once for each way."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder, executor, total = interpreter.InterpreterBuilder, interpreter.GridExecutor, [0]
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__
    seen: dict[str, list[Any]] = {"load": [], "store": []}

    def note(way: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses, inside = np.broadcast_arrays(pointers.data, mask.data)
        seen[way].append((size, addresses[inside.astype(bool)]))

    def noted_load(self: Any, pointers: Any, mask: Any, *inputs: Any, **named: Any) -> Any:
        note("load", pointers, mask)
        return load(self, pointers, mask, *inputs, **named)

    def noted_store(self: Any, pointers: Any, value: Any, mask: Any, *inputs: Any) -> Any:
        note("store", pointers, mask)
        return store(self, pointers, value, mask, *inputs)

    def launch(self: Any, *args: Any, **named: Any) -> Any:
        result = call(self, *args, **named)
        for pieces in seen.values():
            for size in {size for size, _ in pieces}:
                total[0] += size * len(np.unique(np.concatenate([each for of, each in pieces if of == size])))
            pieces.clear()
        return result

    with (
        mock.patch.object(builder, "create_masked_load", noted_load),
        mock.patch.object(builder, "create_masked_store", noted_store),
        mock.patch.object(executor, "__call__", launch),
    ):
        yield total


def bytes_per_token() -> dict[str, tuple[float, int]]:
    """Returns {case: (bytes that each further token moves, elements of a token)}."""
    norm = _module("norm")
    # Every further row would be summed by a further program at such lengths; at real ones their number is fixed.
    with mock.patch.object(norm, "WARPS", norm._tile(HIDDEN)[2]):
        found = _between(lambda tokens: cases(tokens, "cpu"), 2, 4)
    return found | _between(lambda tokens: _quantize(tokens, 256, "cpu"), 128, 256)  # whole blocks


def _between(cases_of: Callable[[int], dict[str, Case]], few: int, many: int) -> dict[str, tuple[float, int]]:
    """See bytes_per_token; from the difference between two lengths."""
    found: dict[str, list[int]] = {}
    with counted() as total:
        for tokens in (few, many):
            for name, case in cases_of(tokens).items():
                before = total[0]
                case.call()
                found.setdefault(name, []).append(total[0] - before)
    return {name: ((b - a) / (many - few), cases_of(0)[name].elements) for name, (a, b) in found.items()}


def _quantize(tokens: int, width: int, device: str) -> dict[str, Case]:
    return {name: Case(call, width) for name, call in quantize_calls(tokens, width, device).items()}


def fixed_calls(tokens: int, device: str) -> dict[str, Callable[[], object]]:
    """The products and the attention of --batch-invariant-mode, of one document and of several."""
    product, attention = _module("fixed_product"), _module("fixed_attention")
    calls: dict[str, Callable[[], object]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        x, weight = (torch.zeros(rows, HIDDEN, dtype=dtype, device=device) for rows in (tokens, INNER))
        out = torch.zeros(tokens, INNER, dtype=dtype, device=device)
        multiply = product.TileProduct(weight.t())
        calls[f"product in tiles, {name}"] = lambda multiply=multiply, x=x, out=out: multiply(x, out)
        q, k = (torch.zeros(tokens, 1, heads, HEAD, dtype=dtype, device=device) for heads in (HEADS, GROUPS))
        for documents, ids in (("", None), (", documents", torch.zeros(1, tokens, dtype=torch.int64, device=device))):
            calls[f"attention in blocks, {name}{documents}"] = lambda q=q, k=k, ids=ids: attention.forward(
                q, k, k, Scores(HEAD**-0.5), ids, None
            )
    matrices = torch.zeros(8, INNER, HIDDEN, dtype=torch.bfloat16, device=device).transpose(1, 2)
    ends = torch.zeros(8, dtype=torch.int32, device=device)
    rows = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    calls["products of experts in tiles"] = lambda: product.grouped(rows, matrices, Assignments(ends, ends, []))
    return calls


def state_calls(device: str) -> dict[str, Callable[[], object]]:
    """The states of the gated delta rule, with a decay for each head and for each channel."""
    passes = _module("state_pass")
    calls: dict[str, Callable[[], object]] = {}
    for channels, decays in ((64, 1), (HEAD, 1), (HEAD, HEAD)):
        rows = torch.zeros(8, HEADS, 64, channels, device=device)
        states = torch.zeros(9, HEADS, channels, channels, device=device)
        whole = torch.zeros(8, HEADS, decays, 1, device=device)
        name = f"states, {channels} channels{', decay of channels' if decays > 1 else ''}"
        arguments = rows, rows, whole
        calls[name] = lambda rows=rows, states=states, inputs=arguments: passes.forward_(rows, states, *inputs)
        calls[f"{name}, backward"] = lambda rows=rows, states=states, inputs=arguments: passes.backward_(
            rows, states[:-1], states[:-1], *inputs
        )
    return calls


def print_compiled() -> None:
    """Prints the table of resources."""
    print(f"{'target':8} {'call':40} {'registers':>9} {'stack':>6} {'shared':>7} {'warps':>6}")
    for capability in TARGETS:
        for name, of in compiled(capability):
            print(f"{of.target:8} {name:40} {of.registers:9} {of.stack:6} {of.shared:7} {of.warps:6}")


def print_bytes() -> None:
    """Prints bytes for each element of each call, and the sum over a layer."""
    found = bytes_per_token()
    print(f"{'call':36} {'bytes for each element':>22}")
    for name, (size, elements) in found.items():
        print(f"{name:36} {size / elements:22.2f}")
    norm = _module("norm")
    sums = 2 * 4 * HIDDEN * (norm.WARPS // norm._tile(HIDDEN)[2])  # a weight's parts: written, and read again
    layer = (
        TOKENS * sum(times * found[name][0] for name, times in LAYER.items())
        + LAYER["addition, RMSNorm backward"] * sums
    )
    launches = sum(LAYER.values())
    print(f"a layer of Llama 3 8B, {TOKENS} tokens: {layer / 1e9:.2f} GB in {launches} launches of these:")
    print(", ".join(LAYER))


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compile", "bytes"))
    if parser.parse_args().what == "compile":
        print_compiled()
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        print_bytes()


if __name__ == "__main__":
    main()
