"""Part D: the operations around the GEMMs and attention: error against fp64, time, and share of the copy bandwidth.

Each is measured as plain torch under autograd, as the framework computes it in torch's kernels and in its own in
Triton, as torch.compile does, and as Liger's kernels do if they are installed. A dry run has Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.case import Case, Result, Setting, check, measuring
from benchmarks.gpu.measure import check_error, copy_rate, error, package, poison, random, timed
from benchmarks.gpu.record import NotRunError
from benchmarks.gpu.runs import device_of
from benchmarks.gpu.shapes import layer_shape
from megatron.base.heartbeat import Heartbeat
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.core.groups import Group
from megatron.core.optimizer.rules.adamw import AdamW
from megatron.core.optimizer.update_rule import Inputs
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.kernels.fused import SEPARATE, LayerKernels, choose_fused, load
from megatron.kernels.ops import norm, rope, weight_grad
from megatron.kernels.ops.delta_rule import delta_rule
from megatron.kernels.ops.update_run import UpdateRun
from megatron.spec.mlp import SWIGLU

# Kernels of each way; inductor takes many times the seconds of one for its own start.
COMPILED = {"plain": 0, "framework": 0, "triton": 2, "liger": 2, "inductor": 15, "fla": 20}
EPSILON = 1e-5  # of norms
BETAS, EPS = (0.9, 0.95), 1e-8  # of AdamW
# An operation rounds its results to bf16, and some round once more on the way.
LIMIT = 4 * 2.0**-8
Function = Callable[..., Tensor | tuple[Tensor, ...]]


class Operation(NamedTuple):
    """An operation in all its implementations.

    plain: in torch, in the dtype of its inputs. framework: with some kernels. liger: None where Liger has none. data:
    makes the inputs of `dtype`; those that need a gradient, and others. nbytes: the least bytes that forward and
    backward read and write.
    """

    plain: Function
    framework: Callable[[LayerKernels], Function]
    liger: Callable[[], Function] | None
    data: Callable[[torch.dtype], tuple[list[Tensor], list[Tensor]]]
    nbytes: int


def cases(setting: Setting) -> list[Case]:
    """Returns the cases of this part."""
    of = functools.partial
    if not setting.cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    return [
        *(
            Case(f"{name}, {way}", of(measure, setting, name, way), measuring(2, compiled=COMPILED[way]))
            for name, operation in operations(setting).items()
            for way in ("plain", "framework", "triton", "inductor", *(["liger"] if operation.liger else []))
        ),
        *(Case(f"merge of blocks, {way}", of(merge_blocks, setting, way)) for way in ("framework", "triton")),
        *(
            Case(f"delta rule, {way}", of(gated_delta_rule, setting, way), measuring(3, compiled=COMPILED[way]))
            for way in ("framework", "triton", "fla")
        ),
        Case("weight gradient", of(weight_gradient, setting), measuring(3)),
        Case("adamw", of(adamw, setting), measuring(2, compiled=1)),
    ]


def operations(setting: Setting, *, interpreted: bool = False) -> dict[str, Operation]:
    """Returns the operations of a layer, at its sizes. interpreted: of a few tokens, for Triton's interpreter."""
    shape = layer_shape(setting)
    shape = shape._replace(tokens=8) if interpreted else shape
    n, h, f, v = shape.tokens, shape.hidden, shape.ffn, shape.vocabulary
    made = functools.partial(random, setting=setting)

    def norm_data(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        return [made(n, h, seed=0).to(dtype), (1 + made(h, seed=1, scale=0.1)).to(dtype)], []

    def swiglu_data(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        return [made(n, 2 * f, seed=0).to(dtype)], []

    def rope_data(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        angles = torch.arange(n, device=setting.device)[:, None] / 1e4 ** torch.linspace(
            0, 1, shape.head // 2, device=setting.device
        )
        tables = [angles.cos(), angles.sin()]
        # Rounded first, so that every dtype rotates by the same numbers.
        return [made(n, 1, shape.heads, shape.head, seed=0).to(dtype)], [
            table.bfloat16().to(dtype)[:, None, None] for table in tables
        ]

    def loss_data(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        targets = torch.randint(v, (n, 1), generator=torch.Generator().manual_seed(1)).to(setting.device)
        return [made(n, 1, v, seed=0, scale=3.0).to(dtype)], [targets]

    def sum_data(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        (x, weight), _ = norm_data(dtype)
        return [x, made(n, h, seed=2).to(dtype), weight], []

    def split_data(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        queries = shape.heads // shape.groups
        return [made(n, 1, shape.groups, queries + 2, shape.head, seed=0).to(dtype)], rope_data(dtype)[1]

    alone = Group("tp", (0,), 0, None, Heartbeat(0))
    in_torch = rope.SplitRotation(rope.split, rope.join)
    return {
        "rms_norm": Operation(
            plain_rms_norm,
            lambda kernels: lambda x, w: norm.rms_norm(x, w, EPSILON, norm.own, kernels.norm),
            liger_rms_norm,
            norm_data,
            10 * n * h,
        ),
        "add + rms_norm": Operation(
            plain_add_norm,
            lambda kernels: lambda x, branch, w: norm.add_norm(x, branch, w, None, EPSILON, kernels.norm),
            None,
            sum_data,
            16 * n * h,
        ),
        "swiglu": Operation(
            plain_swiglu, lambda kernels: kernels.activations[SWIGLU], liger_swiglu, swiglu_data, 16 * n * f
        ),
        "rope": Operation(
            plain_rope,
            lambda kernels: functools.partial(rope.rotate, once=kernels.rotate_once),
            liger_rope,
            rope_data,
            8 * n * shape.heads * shape.head,
        ),
        "split + rope": Operation(
            plain_split,
            lambda kernels: functools.partial(
                rope.split_and_rotate, interleaved=False, kernel=kernels.split or in_torch
            ),
            None,
            split_data,
            8 * n * (shape.heads + 2 * shape.groups) * shape.head,
        ),
        "cross entropy": Operation(
            plain_cross_entropy,
            lambda kernels: (
                lambda x, targets: vocab_parallel_cross_entropy(x, targets, v, alone, kernel=kernels.cross_entropy)
            ),
            liger_cross_entropy,
            loss_data,
            6 * n * v,
        ),
    }


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / root mean square * weight; statistics in fp32 for half-precision inputs."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * weight


def plain_add_norm(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum, and its norm."""
    total = x + branch
    return total, plain_rms_norm(total, weight)


def plain_swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates channels that are half a head apart."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def plain_split(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, of groups of heads."""
    queries, keys = qkv[:, :, :, :-2].flatten(2, 3), qkv[:, :, :, -2]
    return plain_rope(queries, cos, sin), plain_rope(keys, cos, sin), qkv[:, :, :, -1]


def plain_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss per token, in fp32 for half-precision logits."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def liger_rms_norm() -> Function:
    """Liger's kernel. Raises MissingError."""
    function = package("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return lambda x, weight: function.apply(x, weight, EPSILON, 0.0, "llama", False)


def liger_swiglu() -> Function:
    """Liger's kernel, which takes gate and up apart. Raises MissingError."""
    function = package("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    return lambda x: function.apply(*(part.contiguous() for part in x.chunk(2, dim=-1)))


def liger_rope() -> Function:
    """Liger's kernel, for queries and keys together: half of the heads are given as keys. Raises MissingError."""
    function = package("liger_kernel.ops.rope").LigerRopeFunction

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.permute(1, 2, 0, 3)  # [b, heads, s, d]
        half = heads.shape[1] // 2
        tables = (torch.cat((table, table), dim=-1).reshape(1, x.shape[0], x.shape[-1]) for table in (cos, sin))
        return torch.cat(function.apply(heads[:, :half], heads[:, half:], *tables), dim=1).permute(2, 0, 1, 3)

    return rotate


def liger_cross_entropy() -> Function:
    """Liger's kernel, which computes the gradient in forward, in place of the logits. Raises MissingError."""
    function = package("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        none = (None, -100, 0.0, 0.0, "none")
        found = function.apply(logits.flatten(0, 1), targets.flatten(), *none)
        return (found[0] if isinstance(found, tuple) else found).view(targets.shape)

    return loss


def measure(setting: Setting, name: str, way: str) -> Result:
    """Compares one implementation of an operation with fp64, and measures forward and backward together."""
    interpreted = way == "triton" and not setting.cuda
    operation = operations(setting, interpreted=interpreted)[name]
    if way == "liger":
        assert operation.liger is not None
        function = operation.liger()
        setting.needs_cuda("Liger")
    elif way == "inductor":
        # On the CPU the graph is traced and not compiled: a compiler would take longer than the whole dry run.
        function = torch.compile(operation.plain, backend="aot_eager" if setting.toy else "inductor")
    elif way == "triton":
        package("triton")
        function = operation.framework(load())
    else:
        function = operation.plain if way == "plain" else operation.framework(SEPARATE)
    data, constants = operation.data(torch.bfloat16)
    shapes = [out.shape for out in listed(operation.plain(*data, *constants))]
    upstream = [random(*shape, setting=setting, seed=9 + number) for number, shape in enumerate(shapes)]
    expected = passes(operation.plain, *operation.data(torch.float64), [each.double() for each in upstream])
    poison(setting)
    found = passes(function, data, constants, upstream)
    errors = [check_error(a, b, LIMIT, name) for a, b in zip(found, expected, strict=True)]
    del expected, found
    if interpreted:
        return Result(f"error {max(errors):.1e} in Triton's interpreter", {"error": max(errors)})
    timing = timed(lambda: passes(function, data, constants, upstream), setting)
    rate = operation.nbytes / (timing.ms / 1e3) / 1e9
    share = rate / copy_rate(setting)
    values = {"error": max(errors), "ms": timing.ms, "spread": timing.spread, "share_of_copy": share}
    return Result(f"{timing} forward and backward, {100 * share:.0f} % of a copy, error {max(errors):.1e}", values)


def listed(out: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """Returns the results of an operation with one or several."""
    return [out] if isinstance(out, Tensor) else list(out)


def passes(
    function: Function, data: Sequence[Tensor], constants: Sequence[Tensor], upstream: Sequence[Tensor]
) -> list[Tensor]:
    """Returns the results and the gradients."""
    leaves = [x.detach().requires_grad_() for x in data]
    out = listed(function(*leaves, *constants))
    grads = [grad.to(each.dtype) for grad, each in zip(upstream, out, strict=True)]
    return [*(each.detach() for each in out), *torch.autograd.grad(out, leaves, grads)]


def merge_blocks(setting: Setting, way: str) -> Result:
    """Compares the merge of two blocks of context-parallel attention with fp64, and measures it: 10 bytes per
    element."""
    interpreted, shape = way == "triton" and not setting.cuda, layer_shape(setting)
    if way == "triton":
        package("triton")
    kernel = (load() if way == "triton" else SEPARATE).merge
    n, made = 8 if interpreted else shape.tokens, functools.partial(random, setting=setting)
    out = made(n, 1, shape.heads, shape.head, seed=0, dtype=torch.float32)
    block = made(n, 1, shape.heads, shape.head, seed=1)
    lse, block_lse = (made(1, shape.heads, n, seed=seed, dtype=torch.float32) for seed in (2, 3))
    weights = torch.softmax(torch.stack((lse, block_lse)).double(), dim=0).permute(0, 3, 1, 2).unsqueeze(-1)
    exact = weights[0] * out.double() + weights[1] * block.double()
    poison(setting)
    merged, merged_lse = out.clone(), lse.clone()
    kernel(merged, merged_lse, block, block_lse)
    values = {"error": check_error(merged, exact, 1e-5, "output")}
    check_error(merged_lse, torch.logaddexp(lse.double(), block_lse.double()), 1e-5, "log-sum-exp")
    if interpreted:
        return Result(f"error {values['error']:.1e} in Triton's interpreter", values)
    timing = timed(lambda: kernel(merged, merged_lse, block, block_lse), setting)
    values |= {"ms": timing.ms, "share_of_copy": timing.rate(10 * out.numel()) / 1e9 / copy_rate(setting)}
    return Result(f"{timing}, {100 * values['share_of_copy']:.0f} % of a copy, error {values['error']:.1e}", values)


def gated_delta_rule(setting: Setting, way: str) -> Result:
    """Compares the gated delta rule with fp64, and measures it forward and backward, in torch, with the loops over the
    chunks in Triton, and as the package fla computes it if it is installed."""
    if way != "framework":
        package("triton" if way == "triton" else "fla.ops.gated_delta_rule")
    if way != "framework" and not setting.cuda:  # tests/unit/kernels/triton runs the kernels in Triton's interpreter
        raise NotRunError("needs a GPU")
    rule, shape = _delta_rule(way), layer_shape(setting)
    channels = min(shape.head, 128)

    def inputs(tokens: int) -> list[Tensor]:
        """q, k, v, the decay and beta."""
        q, k, v = (random(tokens, 1, shape.heads, channels, setting=setting, seed=seed) for seed in range(3))
        decay, beta = (
            random(tokens, 1, shape.heads, setting=setting, seed=seed, dtype=torch.float32) for seed in (3, 4)
        )
        q, k = (F.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
        return [x.requires_grad_() for x in (q * channels**-0.5, k, v, -F.softplus(decay), beta.sigmoid())]

    few = inputs(128)
    upstream = random(*few[2].shape, setting=setting, seed=5)
    exact = delta_by_token(*(x.detach().double() for x in few))
    poison(setting)
    out = rule(*few)
    values = {"error": check_error(out.detach(), exact, LIMIT, "output")}
    gradients = torch.autograd.grad(out, few, upstream)
    for name, a, b in zip(("q", "k", "v", "decay", "beta"), gradients, _exact_gradients(few, upstream), strict=True):
        check_error(a, b, LIMIT, f"gradient of {name}")
    if not setting.cuda:
        return Result(f"error {values['error']:.1e}", values)
    many = inputs(shape.tokens)
    grad = random(*many[2].shape, setting=setting, seed=5)
    timing = timed(lambda: torch.autograd.grad(rule(*many), many, grad), setting)
    values["ms"] = timing.ms
    return Result(f"{timing}, error {values['error']:.1e}", values)


def _delta_rule(way: str) -> Callable[..., Tensor]:
    if way == "fla":
        chunked = package("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        # It has samples before tokens, and its decay and beta are named.
        return lambda q, k, v, decay, beta: chunked(
            *(x.transpose(0, 1) for x in (q, k, v)), g=decay.transpose(0, 1), beta=beta.transpose(0, 1), scale=1.0
        )[0].transpose(0, 1)
    state_pass = (load() if way == "triton" else SEPARATE).state_pass
    return lambda *inputs: delta_rule(*inputs, state_pass=state_pass)[0]


def delta_by_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Returns the outputs of the gated delta rule as its formula says, one token after the other."""
    state, out = torch.zeros_like(k[0].unsqueeze(-1) * v[0].unsqueeze(-2)), []
    for t in range(len(v)):
        state = decay[t].exp()[..., None, None] * state
        error_of_value = v[t] - (k[t].unsqueeze(-2) @ state).squeeze(-2)
        state = state + (beta[t].unsqueeze(-1) * k[t]).unsqueeze(-1) * error_of_value.unsqueeze(-2)
        out.append((q[t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(out)


def _exact_gradients(inputs: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    return torch.autograd.grad(delta_by_token(*leaves), leaves, upstream.double())


def weight_gradient(setting: Setting) -> Result:
    """Compares the product that accumulates in fp32, in both of torch's libraries, with one that an addition
    follows."""
    shape, device = layer_shape(setting), device_of(setting)
    grad, x = (
        random(shape.tokens, width, setting=setting, seed=i) for i, width in enumerate((shape.hidden, shape.ffn))
    )
    exact = grad[:, :64].double().t() @ x.double()
    chosen, missing = weight_grad.choose(True, device, torch.bfloat16)
    ways = [("fused", chosen, "cublas"), ("fused by cuBLASLt", chosen, "cublaslt")] if setting.cuda else []
    values: dict[str, Any] = {}
    for name, kernel, library in [*(ways or [("fused", chosen, "")]), ("separate", weight_grad.separate, "")]:
        main_grad = torch.full((shape.hidden, shape.ffn), float("nan"), device=device)
        with blas_library(library):
            kernel(main_grad, grad, x, True)
            kernel(main_grad, grad, x, False)
            values[f"{name}_error"] = error(main_grad[:64], 2 * exact)
            timing = timed(lambda kernel=kernel, into=main_grad: kernel(into, grad, x, False), setting)
        values[f"{name}_ms"], values[f"{name}_spread"] = timing
        # 8192 products of bf16 numbers are added in fp32, in the order of the library.
        limit = 1e-2 if name == "separate" or missing is not None else 1e-4
        check(values[f"{name}_error"] <= limit, f"{name}: error {values[f'{name}_error']:.1e}")
    why = "" if missing is None else f"; not fused here: {missing}"
    words = (f"{key[:-3]} {ms:.3g} ms" for key, ms in values.items() if key.endswith("_ms"))
    return Result(f"{', '.join(words)}, error {values['fused_error']:.0e} of the fused one{why}", values)


@contextlib.contextmanager
def blas_library(name: str) -> Iterator[None]:
    """Products of the body are torch's by this library of CUDA; by its own choice if the name is empty."""
    if not name:
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def adamw(setting: Setting) -> Result:
    """Compares the framework's update with fp64, and measures it: fp32 masters, moments and gradient, bf16 weights."""
    numel = setting.size(1 << 28, 1 << 16)
    state = [random(numel, setting=setting, seed=seed, dtype=torch.float32, scale=0.1) for seed in range(4)]
    state[3].square_()
    weights = torch.empty(numel, dtype=torch.bfloat16, device=setting.device)
    few = slice(0, 4096)
    gate = torch.tensor([1.0, 0.0, 1.0], device=setting.device)
    inputs = Inputs(step=3, lr=1e-3, decoupled_lr=1e-3, weight_decay=0.1, gate=gate)
    exact = adamw_in_fp64(inputs, *(x[few].double() for x in state))
    poison(setting)
    values_of = dict(zip(("master", "exp_avg", "exp_avg_sq"), (state[0], *state[2:]), strict=True))
    config = OptimizerConfig(adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPS)
    runs = [UpdateRun(0, numel, True, False)]
    device = device_of(setting)
    make = choose_fused(ModelConfig(hidden_size=256), device, torch.bfloat16, config)[0].make_adamw
    one_pass = None if make is None else make(runs, device)
    step = functools.partial(AdamW(config, runs, one_pass).step, values_of, state[1], weights, inputs)
    step()
    values = {"error": check_error(state[0][few], exact, 1e-5, "masters"), "weights_error": error(weights[few], exact)}
    check(values["weights_error"] <= 2.0**-8, f"bf16 weights: error {values['weights_error']:.1e}")
    timing = timed(step, setting)
    rate = timing.rate(30 * numel) / 1e9  # reads 16 bytes, writes 14
    values |= {"ms": timing.ms, "spread": timing.spread, "share_of_copy": rate / copy_rate(setting)}
    return Result(f"{timing}, {rate:.4g} GB/s, {100 * values['share_of_copy']:.0f} % of a copy", values)


def adamw_in_fp64(inputs: Inputs, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """Returns the masters after a step with BETAS and EPS."""
    (beta1, beta2), step = BETAS, inputs.step
    mean = beta1 * exp_avg + (1 - beta1) * grad
    square = beta2 * exp_avg_sq + (1 - beta2) * grad.square()
    denominator = (square / (1 - beta2**step)).sqrt() + EPS
    return master * (1 - inputs.lr * inputs.weight_decay) - inputs.lr * (mean / (1 - beta1**step)) / denominator
