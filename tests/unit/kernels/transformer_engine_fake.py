"""Transformer Engine on the CPU: its functions' signatures (transformer_engine_signatures.py) and conditions, computed
in plain torch. What it accepts is read from the source of version 2.12.0.
"""

import enum
import importlib.metadata
import itertools
import sys
import types

import torch
import torch.nn.functional as F

from megatron.kernels.ops.attention import causal_mask
from megatron.kernels.ops.fp8 import quantize

OURS = "megatron.kernels.backends.transformer_engine"
CALLS = []  # (function, its arguments by name) of each call since `install`
NONE = set()  # what there is no kernel for: layouts, "window", "only 512", or recipes of FP8
DType = enum.Enum("DType", ["kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2"])
TE_DType = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
HALVES = (torch.bfloat16, torch.float16)


def _names(title, *names):
    kind = enum.Enum(title, list(names))
    return {name: kind[name] for name in names}


QKVLayout = _names("QKVLayout", "sbhd_sbhd_sbhd", "thd_thd_thd")
AttnBiasType = _names("AttnBiasType", "no_bias")
AttnMaskType = _names("AttnMaskType", "causal", "padding_causal")
SoftmaxType = _names("SoftmaxType", "vanilla")
FusedAttnBackend = _names("FusedAttnBackend", "F16_max512_seqlen", "F16_arbitrary_seqlen", "No_Backend")


def install(monkeypatch, version="2.12.0"):
    """Makes the package importable, and our modules that import it new. Returns the list of calls."""
    found = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "transformer_engine" else found(name)
    )
    here = sys.modules[__name__]
    modules = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {name: getattr(here, name) for name in AVAILABLE},
        "transformer_engine.pytorch.tensor": {name: getattr(here, name) for name in QUANTIZERS},
        "transformer_engine.pytorch.constants": {"TE_DType": TE_DType},
        "transformer_engine.pytorch.cpp_extensions": {name: getattr(here, name) for name in FUNCTIONS},
        "transformer_engine.pytorch.cpp_extensions.fused_attn": {
            name: getattr(here, name)
            for name in ("QKVLayout", "AttnBiasType", "AttnMaskType", "SoftmaxType", "FusedAttnBackend")
        },
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    forget(monkeypatch)
    CALLS.clear()
    NONE.clear()
    return CALLS


def forget(monkeypatch):
    """Our modules are imported again, now and after the test."""
    for name in ("linear", "norm", "activation", "attention", "fp8"):
        monkeypatch.setitem(sys.modules, f"{OURS}.{name}", None)
        del sys.modules[f"{OURS}.{name}"]


def _record(name, given):
    CALLS.append((name, dict(given)))


def _dense(*tensors):
    """The kernels get a pointer and a shape."""
    assert all(x.is_contiguous() for x in tensors)


def general_gemm(
    A,
    B,
    out_dtype=None,
    quantization_params=None,
    gelu=False,
    gelu_in=None,
    alpha=1.0,
    beta=None,
    accumulate=False,
    layout="TN",
    out=None,
    bias=None,
    use_split_accumulator=False,
    grad=False,
    ub=None,
    ub_type=None,
    extra_output=None,
    bulk_overlap=False,
):
    _record("general_gemm", locals())
    assert layout in ("TN", "NN", "NT") and alpha == 1.0
    assert beta is None and quantization_params is None and not gelu and gelu_in is None and not bulk_overlap
    assert ub is ub_type is extra_output is None
    if isinstance(A, FakeQuantized):
        # Hopper multiplies FP8 along rows only, so each operand needs the direction of the layout.
        a, b = A.along_rows(layout[0] == "T").t(), B.along_rows(layout[1] == "N")
        assert all(size % 16 == 0 for size in (*a.shape, b.shape[1])) and len(b) % 8 == 0
        assert (A.dtype, B.dtype).count(torch.float8_e5m2) < 2
        assert use_split_accumulator is grad
        shape = (len(b), a.shape[1])
    else:
        _dense(A, B)
        assert A.dtype == B.dtype and A.dtype in HALVES
        a, b = A.flatten(0, -2).float(), B.flatten(0, -2).float()
        a, b = (a.t() if layout[0] == "T" else a), (b.t() if layout[1] == "T" else b)
        shape = (*(B.shape[-1:] if layout[1] == "T" else B.shape[:-1]), a.shape[-1])
    product = b @ a
    if bias is not None:
        assert not grad and bias.dtype in HALVES and bias.shape == product.shape[-1:]
        product = product + bias.float()
    if out is None:
        assert not accumulate
        out = torch.empty(shape, dtype=out_dtype or A.dtype)
    _dense(out)
    assert out.shape == shape and out_dtype in (None, out.dtype)
    product = product.view(shape)
    out.copy_(out + product if accumulate else product)
    return out, None, None, None


class FakeQuantized:
    """A tensor with the directions that its quantizer was asked for: the bits of our reference."""

    def __init__(self, both, dtype):
        self.both, self.dtype = both, dtype

    def along_rows(self, rowwise):
        """The values of the matrix, or of its transpose."""
        part = self.both.rows if rowwise else self.both.columns
        assert part is not None, "this direction was not quantized"
        return quantize.dequantize(part)


class Quantizer:
    """As quantized_tensor.py's."""

    def __init__(self, *, rowwise, columnwise):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = self.optimize_for_gemm = False

    def set_usage(self, *, rowwise=None, columnwise=None):
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def __call__(self, tensor):
        _record(type(self).__name__, {"quantizer": self, "tensor": tensor, **vars(self)})
        assert self.internal and tensor.dim() == 2 and (self.rowwise_usage or self.columnwise_usage)
        return FakeQuantized(self.quantize(tensor), self.torch_dtype)

    @property
    def torch_dtype(self):
        (dtype,) = [each for each, name in TE_DType.items() if name is self.dtype]
        assert dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        return dtype

    @property
    def directions(self):
        return {"rows": self.rowwise_usage, "columns": self.columnwise_usage}


class Float8Quantizer(Quantizer):
    def __init__(self, scale, amax, fp8_dtype, *, rowwise=True, columnwise=True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert scale.shape == amax.shape == (1,) and scale.dtype == amax.dtype == torch.float32
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def quantize(self, x):
        assert self.rowwise_usage, "quantizing in only the columnwise direction is not supported"
        return quantize.per_tensor(x, self.scale, self.torch_dtype, amax=self.amax, **self.directions)


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(
        self,
        fp8_dtype,
        device,
        *,
        rowwise=True,
        columnwise=True,
        use_existing_amax=False,
        with_amax_reduction=False,
        amax_reduction_group=None,
        force_pow_2_scales=False,
        amax_epsilon=0.0,
        scale=None,
        amax=None,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert not with_amax_reduction and amax_reduction_group is None, "it would communicate by itself"
        assert not force_pow_2_scales and not amax_epsilon and scale is amax is None
        self.dtype, self.use_existing_amax = fp8_dtype, use_existing_amax
        self.scale, self.amax = torch.empty(1, device=device), torch.full((1,), float("nan"), device=device)

    def quantize(self, x):
        assert self.rowwise_usage, "quantizing in only the columnwise direction is not supported"
        if not self.use_existing_amax:
            self.amax.copy_(quantize.amax_of(x))
        self.scale.copy_(quantize.scale_of(self.amax, torch.finfo(self.torch_dtype).max))
        return quantize.per_tensor(x, self.scale, self.torch_dtype, **self.directions)


class Float8BlockQuantizer(Quantizer):
    def __init__(
        self,
        fp8_dtype,
        *,
        rowwise,
        columnwise,
        amax_epsilon=0.0,
        force_pow_2_scales=True,
        block_scaling_dim=2,
    ):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        assert not amax_epsilon and force_pow_2_scales
        self.dtype, self.block_scaling_dim = fp8_dtype, block_scaling_dim

    def quantize(self, x):
        assert self.rowwise_usage or self.block_scaling_dim == 1, "the kernel of squares writes rowwise data"
        block = {1: quantize.VECTOR, 2: quantize.SQUARE}[self.block_scaling_dim]
        return quantize.per_block(x, block, self.torch_dtype, **self.directions)


class MXFP8Quantizer(Quantizer):
    def __init__(self, fp8_dtype, *, rowwise=True, columnwise=True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_dtype

    def quantize(self, x):
        assert all(size % 32 == 0 for size in x.shape)
        return quantize.per_block(x, quantize.MICRO, self.torch_dtype, **self.directions)


def is_fp8_available(return_reason=False):
    return _available("fp8", return_reason)


def is_fp8_block_scaling_available(return_reason=False):
    return _available("blockwise", return_reason)


def is_mxfp8_available(return_reason=False):
    return _available("mxfp8", return_reason)


def _available(kind, return_reason):
    reason = f"{kind} requires another GPU." if kind in NONE else ""
    return (not reason, reason) if return_reason else not reason


def _rows(x, weight):
    _dense(x, weight)
    assert x.dim() == 2 and x.shape[1:] == weight.shape and x.dtype == weight.dtype and len(x)


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    _record("rmsnorm_fwd", locals())
    _rows(input, weight)
    assert ln_out is quantizer is None and not zero_centered_gamma and otype is TE_DType[input.dtype]
    x = input.float()
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return [(x * rstd[:, None] * weight.float()).to(input.dtype), None, rstd]


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma, /):
    _record("rmsnorm_bwd", locals())
    _rows(x, gamma)
    assert dz.shape == x.shape and dz.dtype == x.dtype and rsigma.shape == x.shape[:1] and not zero_centered_gamma
    normalized, grad = x.float() * rsigma[:, None], dz.float()
    scaled = grad * gamma.float()
    dx = (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)) * rsigma[:, None]
    return [dx.to(x.dtype), (grad * normalized).sum(0).to(gamma.dtype)]


def rmsnorm_bwd_add(dz, x, add, rsigma, gamma, sm_margin, zero_centered_gamma, /):
    _record("rmsnorm_bwd_add", locals())
    _rows(add, gamma)
    assert add.shape == x.shape and add.dtype == x.dtype
    dx, dgamma = rmsnorm_bwd(dz.float(), x.float(), rsigma, gamma.float(), sm_margin, zero_centered_gamma)
    CALLS.pop()
    return [(dx + add.float()).to(x.dtype), dgamma.to(gamma.dtype)]


def layernorm_fwd(input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    _record("layernorm_fwd", locals())
    _rows(input, weight)
    assert ln_out is quantizer is None and not zero_centered_gamma and otype is TE_DType[input.dtype]
    assert bias.is_contiguous() and bias.shape == weight.shape and bias.dtype == weight.dtype
    x = input.float()
    mean = x.mean(-1)
    rstd = (x.var(-1, correction=0) + eps).rsqrt()
    out = (x - mean[:, None]) * rstd[:, None] * weight.float() + bias.float()
    return [out.to(input.dtype), mean, rstd]


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma, /):
    _record("layernorm_bwd", locals())
    _rows(x, gamma)
    assert dz.shape == x.shape and dz.dtype == x.dtype and mu.shape == rsigma.shape == x.shape[:1]
    normalized, grad = (x.float() - mu[:, None]) * rsigma[:, None], dz.float()
    scaled = grad * gamma.float()
    dx = scaled - scaled.mean(-1, keepdim=True) - normalized * (scaled * normalized).mean(-1, keepdim=True)
    dx = dx * rsigma[:, None]
    return [dx.to(x.dtype), (grad * normalized).sum(0).to(gamma.dtype), grad.sum(0).to(gamma.dtype)]


def _tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def _gated(inner):
    def apply(x):
        gate, up = x.chunk(2, dim=-1)
        return inner(gate) * up

    return apply


_ACTIVATIONS = {
    "swiglu": _gated(F.silu),
    "geglu": _gated(_tanh_gelu),
    "gelu": _tanh_gelu,
    "srelu": lambda x: F.relu(x).square(),
}


def _activation(name):
    def forward(input, quantizer):
        _record(name, locals())
        assert quantizer is None and input.numel()
        return _ACTIVATIONS[name](input.float()).to(input.dtype)

    def backward(grad, fwd_input, quantizer):
        _record(f"d{name}", locals())
        assert quantizer is None and grad.dtype == fwd_input.dtype and grad.numel()
        with torch.enable_grad():
            x = fwd_input.detach().float().requires_grad_()
            (found,) = torch.autograd.grad(_ACTIVATIONS[name](x), x, grad.float())
        return found.to(fwd_input.dtype)

    return forward, backward


swiglu, dswiglu = _activation("swiglu")
geglu, dgeglu = _activation("geglu")
gelu, dgelu = _activation("gelu")
srelu, dsrelu = _activation("srelu")


def get_fused_attn_backend(
    is_training,
    q_dtype,
    kv_dtype,
    qkv_layout,
    bias_type,
    attn_mask_type,
    softmax_type,
    p_dropout,
    num_attn_heads,
    num_gqa_groups,
    max_seqlen_q,
    max_seqlen_kv,
    head_dim_qk,
    head_dim_v,
    window_size_left,
    window_size_right,
    return_max_logit,
    cuda_graph,
    deterministic,
    /,
):
    """As nvte_get_fused_attn_backend on Hopper, as far as a test asks; heads of more than 128 channels are left out."""
    _record("get_fused_attn_backend", locals())
    assert is_training is True and q_dtype is kv_dtype and qkv_layout in QKVLayout.values()
    assert bias_type in AttnBiasType.values() and softmax_type in SoftmaxType.values()
    assert attn_mask_type in AttnMaskType.values() and num_attn_heads % num_gqa_groups == 0
    assert max_seqlen_q == max_seqlen_kv and head_dim_qk == head_dim_v and window_size_right == 0
    halves = q_dtype in (DType.kBFloat16, DType.kFloat16)
    windowed = window_size_left >= 0
    if not halves or head_dim_qk % 8 or head_dim_qk > 128 or (windowed and p_dropout):
        return FusedAttnBackend["No_Backend"]
    if qkv_layout.name in NONE or (windowed and "window" in NONE):
        return FusedAttnBackend["No_Backend"]
    return FusedAttnBackend["F16_max512_seqlen" if "only 512" in NONE else "F16_arbitrary_seqlen"]


def fused_attn_fwd(
    is_training,
    max_seqlen_q,
    max_seqlen_kv,
    cu_seqlens_q,
    cu_seqlens_kv,
    q,
    k,
    v,
    fake_dtype,
    fused_attention_backend,
    attn_bias=None,
    cu_seqlens_q_padded=None,
    cu_seqlens_kv_padded=None,
    page_table_k=None,
    page_table_v=None,
    s_quantizer=None,
    o_quantizer=None,
    attn_scale=None,
    dropout=0.0,
    fast_zero_fill=True,
    qkv_layout="sbh3d",
    attn_bias_type="no_bias",
    attn_mask_type="padding",
    softmax_type="vanilla",
    window_size=(-1, -1),
    bottom_right_diagonal=None,
    rng_gen=None,
    softmax_offset=None,
    return_max_logit=False,
    cuda_graph=False,
):
    given = dict(locals())
    _record("fused_attn_fwd", given)
    assert is_training and fused_attention_backend is not FusedAttnBackend["No_Backend"] and rng_gen is None
    _check_attention(given)
    rng_state = torch.randint(1 << 31, (2,))  # of the current generator
    out = torch.empty_like(q)
    for (queries, keys, values, into), number in _sequences(given, (q, k, v, out)):
        into.copy_(_attend(queries.float(), keys.float(), values.float(), given, rng_state, number))
    stats = torch.empty((*q.shape[:-1], 1), dtype=torch.float32)
    return out, [stats, rng_state]


def fused_attn_bwd(
    max_seqlen_q,
    max_seqlen_kv,
    cu_seqlens_q,
    cu_seqlens_kv,
    q,
    k,
    v,
    o,
    d_o,
    fake_dtype,
    dqkv_dtype,
    aux_ctx_tensors,
    fused_attention_backend,
    cu_seqlens_q_padded=None,
    cu_seqlens_kv_padded=None,
    s_quantizer=None,
    dp_quantizer=None,
    dqkv_quantizer=None,
    attn_scale=None,
    dropout=0.0,
    fast_zero_fill=True,
    qkv_layout="sbh3d",
    attn_bias_type="no_bias",
    attn_mask_type="padding",
    softmax_type="vanilla",
    window_size=(-1, -1),
    bottom_right_diagonal=None,
    deterministic=False,
    cuda_graph=False,
):
    given = dict(locals())
    _record("fused_attn_bwd", given)
    _check_attention(given)
    _dense(o, d_o)
    assert o.shape == d_o.shape == q.shape and d_o.dtype == q.dtype and dqkv_dtype is TE_DType[q.dtype]
    stats, rng_state = aux_ctx_tensors
    assert stats.shape == (*q.shape[:-1], 1)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    for (*inputs, grad, dq, dk, dv), number in _sequences(given, (q, k, v, d_o, *gradients)):
        with torch.enable_grad():
            leaves = [x.detach().float().requires_grad_() for x in inputs]
            found = torch.autograd.grad(_attend(*leaves, given, rng_state, number), leaves, grad.float())
        for into, gradient in zip((dq, dk, dv), found, strict=True):
            into.copy_(gradient)
    return [*gradients, None, None]


def _check_attention(given):
    """The conditions of FusedAttention.forward and of the kernels."""
    q, k, v = given["q"], given["k"], given["v"]
    _dense(q, k, v)
    assert q.dtype in HALVES and q.dtype == k.dtype == v.dtype == given["fake_dtype"]
    assert k.shape == v.shape and q.shape[-2] % k.shape[-2] == 0
    starts = given["cu_seqlens_q"]
    assert starts.dtype == torch.int32 and given["cu_seqlens_kv"].equal(starts)
    assert given["max_seqlen_q"] == given["max_seqlen_kv"] >= int(starts.diff().max())
    packed = given["qkv_layout"] == "thd_thd_thd"
    assert packed or given["qkv_layout"] == "sbhd_sbhd_sbhd"
    assert given["attn_mask_type"] == ("padding_causal" if packed else "causal")
    assert q.dim() == (3 if packed else 4)
    if packed:
        assert given["cu_seqlens_q_padded"] is starts and int(starts[-1]) == len(q) == len(k)
    else:
        assert len(starts) == q.shape[1] + 1 and given["max_seqlen_q"] == len(q) == len(k)
    assert given["attn_bias_type"] == "no_bias" and given["softmax_type"] == "vanilla"
    assert given["window_size"][1] == 0 and given["cuda_graph"] is False


def _sequences(given, tensors):
    """Yields ([s, heads, d] of each tensor, number) of every sequence."""
    if given["qkv_layout"] == "thd_thd_thd":
        pairs = itertools.pairwise(given["cu_seqlens_q"].tolist())
        parts = [[x[begin:end] for x in tensors] for begin, end in pairs]
    else:
        parts = [[x[:, sample] for x in tensors] for sample in range(tensors[0].shape[1])]
    return zip(parts, itertools.count())


def _attend(q, k, v, given, rng_state, number):
    s, n, _ = q.shape
    k, v = (x.repeat_interleave(n // x.shape[1], dim=1) for x in (k, v))
    left = given["window_size"][0]
    scores = torch.einsum("snd,tnd->nst", q, k) * given["attn_scale"]
    seen = causal_mask(s, s, None, None if left < 0 else left + 1, q.device)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    if given["dropout"]:
        generator = torch.Generator().manual_seed(int(rng_state[0]) + number)
        kept = torch.rand(weights.shape, generator=generator) >= given["dropout"]
        weights = weights * kept / (1.0 - given["dropout"])
    return torch.einsum("nst,tnd->snd", weights, v)


FUNCTIONS = [
    "general_gemm",
    "fused_attn_fwd",
    "fused_attn_bwd",
    "get_fused_attn_backend",
    "rmsnorm_fwd",
    "rmsnorm_bwd",
    "rmsnorm_bwd_add",
    "layernorm_fwd",
    "layernorm_bwd",
    "swiglu",
    "dswiglu",
    "geglu",
    "dgeglu",
    "gelu",
    "dgelu",
    "srelu",
    "dsrelu",
]
AVAILABLE = ["is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available"]
QUANTIZERS = ["Float8Quantizer", "Float8CurrentScalingQuantizer", "Float8BlockQuantizer", "MXFP8Quantizer"]
