"""The small operations of a layer and of the loss: each in several kernels of torch, or in one fused kernel each way;
and the update.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron.base.errors import first_line
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.positions import ROTARY
from megatron.config.update_rules import ADAM
from megatron.kernels.ops import (
    activation,
    adam,
    attention_lse,
    cross_entropy,
    delta_rule,
    embedding_grad,
    norm,
    rope,
    square_sum,
)
from megatron.kernels.ops.activation import Activation, Gated
from megatron.kernels.ops.update_run import UpdateRun
from megatron.spec.mlp import (
    GEGLU,
    GEGLU_TANH,
    GELU,
    GELU_TANH,
    PLAIN_GATE,
    QUICK_GEGLU,
    SQUARED_RELU,
    SWIGLU,
    activation_of,
    gate_form,
)

# The kernel's name, why it is not even tried, and what raises an error if it cannot run or is wrong.
KernelTrial = tuple[str, str | None, Callable[[], None]]
KernelTuple = TypeVar("KernelTuple")
_TOKENS = 64
_TOLERANCE = 0.02  # results are rounded to half precision; results of a broken kernel are not close


class LayerKernels(NamedTuple):
    """The kernels of a run.

    The keys of `activations` are the names of the model's specification. `split` is None where queries, keys and values
    are split by views and copies. `make_adamw` is None where torch's kernels update.

    """

    norm: norm.NormKernel
    activations: Mapping[str, Activation]
    rotate_once: rope.Rotation
    split: rope.SplitRotation | None
    cross_entropy: cross_entropy.CrossEntropyKernel
    merge: attention_lse.Merge
    make_adamw: adam.MakeAdamW | None
    square_sum: square_sum.SquareSum
    add_rows: embedding_grad.AddRows
    state_pass: delta_rule.StatePass

    @property
    def without_copies(self) -> bool:
        """Whether norms and the loss make no copies in fp32, which the memory plan counts otherwise."""
        return self.norm is not SEPARATE.norm and self.cross_entropy is not SEPARATE.cross_entropy


SEPARATE = LayerKernels(
    norm.separate,
    MappingProxyType(
        {
            SWIGLU: activation.swiglu,
            GEGLU: activation.geglu,
            GEGLU_TANH: activation.geglu_tanh,
            QUICK_GEGLU: activation.quick_geglu,
            SQUARED_RELU: activation.squared_relu,
            GELU: activation.gelu,
            GELU_TANH: activation.gelu_tanh,
        }
    ),
    rope.rotate_once,
    None,
    cross_entropy.separate,
    attention_lse.merge_,
    None,
    square_sum.square_sum,
    embedding_grad.add_rows,
    delta_rule.SEPARATE_PASS,
)


def choose_fused(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    optimizer: OptimizerConfig | None = None,
    taken: Collection[str] = (),
    *,
    blocks: bool = False,
) -> tuple[LayerKernels, str]:
    """Returns the fused kernels that run here, SEPARATE's elsewhere, and "those fused (why not the others)" for the
    start-up table. optimizer: None where nothing is trained. taken: fields whose kernels are Transformer Engine's.
    blocks: attention is computed in blocks.

    Each is tried on a few tokens: whether Triton can compile for a GPU, and whether a row of the model fits into a
    program, is known for certain only then. Kernels with equal tasks give equal results up to the order of sums.
    """
    why, plain = missing(device), SEPARATE._replace(activations=plain_activations(config))
    if why is not None:
        return plain, f"none ({why})"
    candidates, rotary = load(), config.position_embedding_type in ROTARY
    unrotated = _first(("the model has none", not rotary), ("--no-rope-fusion", not config.apply_rope_fusion))
    trials: dict[str, KernelTrial] = {
        "norm": (
            "norms",
            None if config.persist_layer_norm else "--no-persist-layer-norm",
            lambda: try_norm(candidates.norm, config, device, dtype),
        ),
        "activations": (
            "gated activation",
            _first(("the model has none", not config.gated)) or no_fused_gate(config),
            lambda: _try_gated(candidates.activations, config, device, dtype),
        ),
        "rotate_once": (
            "rotation",
            unrotated,
            lambda: _try_rotation(candidates.rotate_once, config, device, dtype),
        ),
        "split": (
            "QKV split",
            unrotated
            or _first(
                ("there are latents", config.multi_latent_attention),
                ("queries have gates", config.attention_output_gate),
                ("queries and keys are normalized first", config.qk_layernorm and not config.qk_layernorm_after_rope),
            ),
            lambda: _try_split(candidates.split, config, device, dtype),
        ),
        "cross_entropy": ("cross entropy", None, lambda: _try_loss(candidates.cross_entropy, device, dtype)),
        "merge": (
            "merge of blocks",
            _first(("there is one", not blocks)),
            lambda: _try_merge(candidates.merge, device, dtype),
        ),
        "make_adamw": ("AdamW", _no_adamw(optimizer), lambda: _try_adamw(candidates.make_adamw, device, dtype)),
        "square_sum": ("gradient norm", _untrained(optimizer), lambda: _try_squares(candidates.square_sum, device)),
        "add_rows": (
            "embedding gradient",
            _untrained(optimizer),
            lambda: _try_rows(candidates.add_rows, device, dtype),
        ),
    }
    if config.has_delta_net:
        trials["state_pass"] = (
            "states of the delta rule",
            # Registers hold no larger state.
            _first(("a key has more than 128 channels", config.linear_key_head_dim > 128)),
            lambda: _try_states(candidates.state_pass, config, device, dtype),
        )
    for field in taken:
        name, _, trial = trials[field]
        trials[field] = name, "Transformer Engine's is in use", trial
    return choose_tried(plain, candidates, trials)


def plain_activations(config: ModelConfig) -> Mapping[str, Activation]:
    """Returns the activations in plain torch, by the names of the model's specification. That of the model has its
    limit and its offset."""
    name, form = activation_of(config), gate_form(config)
    of_model = SEPARATE.activations.get(name)
    if not isinstance(of_model, Gated) or form == PLAIN_GATE:
        return SEPARATE.activations
    return MappingProxyType({**SEPARATE.activations, name: Gated(of_model.inner, form)})


def no_fused_gate(config: ModelConfig) -> str | None:
    """Returns the reason why no kernel in Triton computes the gated activation of the model, or None."""
    return _first(
        ("--no-bias-swiglu-fusion", not config.bias_swiglu_fusion),
        ("--quick-geglu", config.quick_geglu),
        ("--activation-func-clamp-value", config.activation_func_clamp_value is not None),
        ("--glu-linear-offset", config.glu_linear_offset != 0.0),
    )


def choose_tried(plain: KernelTuple, fused: KernelTuple, trials: Mapping[str, KernelTrial]) -> tuple[KernelTuple, str]:
    """Returns `plain` with those fields of `fused` that are not refused and pass their trials, and "those (why not the
    others)" for the start-up table. Both are NamedTuples. The keys of `trials` are their fields.
    """
    names, reasons, fields = list[str](), list[str](), dict[str, Any]()
    for field, (name, refused, trial) in trials.items():
        failure = refused or failure_of(trial)
        if failure is None:
            fields[field] = getattr(fused, field)
            names.append(name)
        else:
            reasons.append(f"{name} not: {failure}")
    chosen: KernelTuple = plain._replace(**fields)  # type: ignore[attr-defined]
    return chosen, f"{', '.join(names) or 'none'} ({'; '.join(reasons)})"


def load() -> LayerKernels:
    """Returns the kernels in Triton, which is imported here."""
    name = "megatron.kernels.backends.triton"
    gated, norms, rotation, loss, merge, adamw, squares, embedding, states = (
        importlib.import_module(f"{name}.{module}")
        for module in (
            "activation", "norm", "rope", "cross_entropy", "merge", "adam", "square_sum", "embedding_grad",
            "state_pass",
        )
    )  # fmt: skip
    activations = {SWIGLU: gated.swiglu, GEGLU: gated.geglu, GEGLU_TANH: gated.geglu_tanh}
    return LayerKernels(
        norm.NormKernel(
            norms.compute_rms_norm,
            norms.gradient_rms_norm,
            norms.compute_layer_norm,
            norms.gradient_layer_norm,
            norm.ResidualNorm(norms.compute_add_norm, norms.gradient_add_norm),
        ),
        MappingProxyType({**SEPARATE.activations, **activations}),
        rotation.rotate_once,
        rope.SplitRotation(rotation.split, rotation.join),
        cross_entropy.CrossEntropyKernel(loss.local_statistics, loss.gradient_),
        merge.merge_,
        adamw.OnePassAdamW,
        squares.square_sum,
        embedding.add_rows,
        delta_rule.StatePass(states.forward_, states.backward_),
    )


def missing(device: torch.device) -> str | None:
    """Returns the reason why Triton cannot run on the device, or None."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if importlib.util.find_spec("triton") is None and not only_traced():
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    return None


def _untrained(optimizer: OptimizerConfig | None) -> str | None:
    return "nothing is trained" if optimizer is None else None


def _no_adamw(optimizer: OptimizerConfig | None) -> str | None:
    if optimizer is None:
        return _untrained(optimizer)
    return None if optimizer.rule == ADAM else f"--optimizer is {optimizer.optimizer}"


def only_traced() -> bool:
    """Whether this is a --dry-run: its tensors have no memory."""
    return isinstance(torch.empty(0), FakeTensor)


def _first(*reasons: tuple[str, bool]) -> str | None:
    """Returns the first reason that holds."""
    return next((reason for reason, holds in reasons if holds), None)


def failure_of(trial: Callable[[], None]) -> str | None:
    """Returns why a trial fails, or None."""
    try:
        trial()
    except Exception as error:  # Triton, its compiler or the driver: each has errors of its own
        return first_line(error)
    return None


def numbers(device: torch.device, dtype: torch.dtype, *shape: int, turns: float = 0.7) -> Tensor:
    """Returns numbers from -1 to 1 that differ from their neighbours."""
    count = int(torch.Size(shape).numel())
    return torch.arange(count, device=device, dtype=torch.float32).mul_(turns).sin_().view(shape).to(dtype)


def compare(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Raises RuntimeError if results differ by more than rounding does. Those of a traced run have no values."""
    if only_traced():
        return
    for a, b in zip(results, expected, strict=True):
        scale = b.float().abs().max().clamp(min=1e-6)
        if not bool((a.float() - b.float()).abs().max() <= _TOLERANCE * scale):
            raise RuntimeError("its results are wrong")


def try_norm(kernel: norm.NormKernel, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raises an error if a kernel for the model's norms cannot run, or gives wrong results."""
    assert config.hidden_size
    for width in {config.hidden_size, *(_inner_norms(config) if config.qk_layernorm else ())}:
        x, grad = numbers(device, dtype, _TOKENS, width), numbers(device, dtype, _TOKENS, width, turns=1.1)
        weight = bias = torch.ones(width, device=device, dtype=dtype)
        results: list[tuple[Tensor, ...]] = []
        for norm_kernel in (kernel, norm.separate):
            if config.normalization == "RMSNorm":
                out, rstd = norm_kernel.compute_rms_norm(x, weight, 1e-5, norm.own)
                results.append((out, *norm_kernel.gradient_rms_norm(grad, x, weight, rstd, norm.own)))
            else:
                out, statistics = norm_kernel.compute_layer_norm(x, weight, bias, 1e-5)
                results.append((out, *norm_kernel.gradient_layer_norm(grad, x, weight, bias, statistics)[:2]))
        compare(*results)
    if kernel.residual is not None:
        _try_sum(kernel.residual, config, device, dtype)


def _inner_norms(config: ModelConfig) -> list[int]:
    """Channels of the norms of queries and keys, or of latents, and of the outputs of delta nets."""
    if not config.multi_latent_attention:
        return [config.head_dim, *([config.linear_value_head_dim] if config.has_delta_net else [])]
    return [rank for rank in (config.q_lora_rank, config.kv_lora_rank) if rank is not None]


def _try_sum(kernel: norm.ResidualNorm, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    assert config.hidden_size
    x, grad = (numbers(device, dtype, _TOKENS, config.hidden_size, turns=turns) for turns in (0.7, 1.1))
    weight = torch.ones(config.hidden_size, device=device, dtype=dtype)
    bias = None if config.normalization == "RMSNorm" else weight
    results: list[tuple[Tensor, ...]] = []
    for residual in (kernel, norm.ResidualNorm(norm.compute_add_norm, norm.gradient_add_norm)):
        total, out, statistics = residual.compute_add_norm(x, grad, weight, bias, 1e-5)
        results.append((total, out, *residual.gradient_add_norm(grad, x, total, weight, bias, statistics)[:2]))
    compare(*results)


def _try_gated(
    activations: Mapping[str, Activation], config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> None:
    x, grad = numbers(device, dtype, _TOKENS, 256), numbers(device, dtype, _TOKENS, 128, turns=1.1)
    for name in (SWIGLU,) if config.swiglu else (GEGLU, GEGLU_TANH):
        results, expected = (
            (activation.compute(x)[0], activation.gradient_of_input(grad, x))
            for activation in (activations[name], SEPARATE.activations[name])
        )
        compare(results, expected)


def _try_rotation(once: rope.Rotation, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    width = config.qk_pos_emb_head_dim if config.multi_latent_attention else config.head_dim // 2 * 2
    x, angles = (numbers(device, dtype, _TOKENS, 1, heads, width) for heads in (3, 1))
    cos, sin = (table[..., ::2].contiguous() for table in (angles.cos(), angles.sin()))
    compare(*((rotation(x, cos, sin, config.rotates_neighbours),) for rotation in (once, rope.rotate_once)))


def _try_split(
    kernel: rope.SplitRotation | None, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> None:
    assert kernel is not None
    width, interleaved = config.head_dim // 2 * 2, config.rotary_interleaved
    qkv, angles = (numbers(device, dtype, _TOKENS, 1, *heads, width) for heads in ((2, 4), (1,)))
    tables = [table[..., ::2].contiguous() for table in (angles.cos(), angles.sin())]
    results: list[tuple[Tensor, ...]] = []
    for rotation in (kernel, rope.SplitRotation(rope.split, rope.join)):
        three = rotation.split(qkv, tables[0], tables[1], interleaved)
        results.append((*three, rotation.join(*three, tables[1], tables[0], interleaved)))
    compare(*results)


def _try_loss(kernel: cross_entropy.CrossEntropyKernel, device: torch.device, dtype: torch.dtype) -> None:
    logits, targets = numbers(device, dtype, _TOKENS, 1000), torch.arange(_TOKENS, device=device)
    results = []
    for loss in (kernel, cross_entropy.separate):
        statistics = loss.local_statistics(logits, targets, 0)
        log_sum_exp = statistics[1].log() + statistics[0]
        ones = torch.ones_like(log_sum_exp)
        results.append((statistics, loss.gradient_(logits.clone(), targets, 0, log_sum_exp, ones, 30.0)))
    compare(*results)


def _try_merge(merge: attention_lse.Merge, device: torch.device, dtype: torch.dtype) -> None:
    out, block = (
        numbers(device, block_dtype, _TOKENS, 1, 3, 64, turns=turns)
        for block_dtype, turns in ((torch.float32, 0.7), (dtype, 1.1))
    )
    lse, block_lse = (numbers(device, torch.float32, 1, 3, _TOKENS, turns=turns) for turns in (0.7, 1.3))
    results = []
    for merge_kernel in (merge, attention_lse.merge_):
        merged, merged_lse = out.clone(), lse.clone()
        merge_kernel(merged, merged_lse, block, block_lse)
        results.append((merged, merged_lse))
    compare(*results)


def _try_adamw(make: adam.MakeAdamW | None, device: torch.device, dtype: torch.dtype) -> None:
    """With two runs, of which one has no weight decay, against the kernel of the CPU."""
    assert make is not None
    size, half, host = 4096, 2048, torch.device("cpu")
    runs = [UpdateRun(0, half, decay=True, decoupled=False), UpdateRun(half, size, decay=False, decoupled=True)]
    coefficients = adam.Coefficients(3, 0.1, 0.2, 0.9, 0.95, 1e-8, 0.1)
    states = [numbers(host, torch.float32, size, turns=turns) for turns in (0.7, 1.1, 1.3, 1.7)]
    states[3].abs_()
    param, grad, exp_avg, exp_avg_sq = (state.to(device, copy=True) for state in states)
    out = torch.empty(size, dtype=dtype, device=device)
    gate = torch.tensor([2.0, 1.0, 0.0], device=device)
    make(runs, device).step(param, grad, exp_avg, exp_avg_sq, out, gate, coefficients)
    for run in runs:
        adam.separate(
            *(state[run.start : run.stop] for state in states),
            step=3, lr=0.2 if run.decoupled else 0.1, beta1=0.9, beta2=0.95, eps=1e-8,
            weight_decay=0.1 if run.decay else 0.0, divisor=2.0,
        )  # fmt: skip
    compare((param.to(host), exp_avg.to(host), exp_avg_sq.to(host), out.to(host)), (states[0], *states[2:], states[0]))


def _try_squares(kernel: square_sum.SquareSum, device: torch.device) -> None:
    x = numbers(device, torch.float32, 1000)
    compare((kernel(x),), (square_sum.square_sum(x),))


def _try_rows(kernel: embedding_grad.AddRows, device: torch.device, dtype: torch.dtype) -> None:
    """With ids that occur once, some times, and in more rows than a bag has."""
    ids = torch.arange(3 * _TOKENS, device=device).remainder(2 * _TOKENS).clamp(max=_TOKENS // 4)
    grad = numbers(device, dtype, len(ids), 40)
    results = []
    for add in (kernel, embedding_grad.add_rows):
        main_grad = numbers(device, torch.float32, _TOKENS, 40, turns=1.1)
        add(main_grad, ids, grad)
        results.append((main_grad,))
    compare(*results)


def _try_states(kernel: delta_rule.StatePass, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """With two chunks, of which the second is not full."""
    tokens, (d_k, d_v) = 3 * _TOKENS // 2, (config.linear_key_head_dim, config.linear_value_head_dim)
    q, k, v, grad = (
        numbers(device, dtype, tokens, 1, 2, width, turns=turns)
        for width, turns in ((d_k, 0.7), (d_k, 1.1), (d_v, 1.3), (d_v, 1.7))
    )
    k = torch.nn.functional.normalize(k, dim=-1)
    decay = numbers(device, torch.float32, tokens, 1, 2).abs_().neg_()
    results: list[tuple[Tensor, ...]] = []
    for state_pass in (kernel, delta_rule.SEPARATE_PASS):
        chunks = delta_rule.DeltaChunks(_TOKENS, q, k, v, decay, decay.exp(), None, state_pass)
        scan = chunks.scan(None)
        results.append((chunks.outputs(scan), scan.last, *chunks.gradients(grad, scan.last, None)))
    compare(*results)
