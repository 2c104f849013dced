"""FlashAttention-3's operators on the CPU: the schemas of its hopper/flash_api.cpp, and attention in plain torch."""

import functools
import importlib.machinery
import itertools
import sys
import types

import torch

from megatron.kernels.ops import attention_lse
from megatron.kernels.ops.attention_rule import Rule
from megatron.kernels.ops.attention_scores import Scores

FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = "
    "None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None, "
    "Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, bool is_rotary_interleaved = False, "
    "Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
)
CALLS = []  # ("fwd" or "bwd", the tensors by name, the other arguments by name) of each call since `install`


def install(monkeypatch):
    """Makes the package importable, and its operators callable. Returns the list of calls."""
    register()
    package = types.ModuleType("flash_attn_interface")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    CALLS.clear()
    return CALLS


@functools.cache
def register():
    """Defines the operators once per process: torch cannot take them back while something names them."""
    library = torch.library.Library("flash_attn_3", "DEF")
    for schema in (FORWARD, BACKWARD):
        library.define(schema)
    for name, keys, work in (
        ("fwd", "CPU", _forward),
        ("bwd", "CPU", _backward),
        ("fwd", "Meta", _forward_of_shapes),
        ("bwd", "Meta", _backward_of_shapes),
    ):
        library.impl(name, _by_name(name, work), keys)
    return library


def _by_name(name, work):
    """torch gives the arguments by their places, without the last ones that have their defaults."""
    arguments = getattr(torch.ops.flash_attn_3, name).default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    names = list(defaults)
    return lambda *args, **options: work(**{**defaults, **dict(zip(names, args, strict=False)), **options})


def _forward(q, k, v, *, out, **options):
    _check({"q": q, "k": k, "v": v, "out": out}, options)
    CALLS.append(("fwd", {"q": q, "k": k, "v": v, "out": out}, options))
    assert options.pop("num_splits") == 1
    lses = []
    for (queries, keys, values, into), rule in _pieces((q, k, v, out), options):
        found, lse = attention_lse.reference.forward(queries, keys, values, rule)
        into.copy_(found)
        lses.append(lse)
    return out, _whole(lses, options), out.new_empty(0), out.new_empty(0)


def _backward(dout, q, k, v, out, softmax_lse, *, dq, dk, dv, deterministic, **options):
    grad, lse = dout, softmax_lse
    tensors = {"dout": grad, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}
    _check(tensors, options)
    assert lse.is_contiguous() and lse.dtype == torch.float32
    CALLS.append(("bwd", {**tensors, "softmax_lse": lse}, {**options, "deterministic": deterministic}))
    starts = options.get("cu_seqlens_q")
    pieces = _pieces((grad, q, k, v, out, dq, dk, dv), options)
    for number, (each, rule) in enumerate(pieces):
        rows = lse if starts is None else lse[None, :, starts[number] : starts[number + 1]]
        found = attention_lse.reference.backward(*each[:5], rows, rule)
        for into, gradient in zip(each[5:], found, strict=True):
            into.copy_(gradient)
    return dq, dk, dv, *[q.new_empty(0)] * 5


def _forward_of_shapes(q, k, v, *, out, **options):
    *b, tokens, heads, _ = q.shape
    lse = (*b, heads, tokens)
    return out, torch.empty(lse, dtype=torch.float32, device="meta"), *[out.new_empty(0)] * 2


def _backward_of_shapes(dout, q, k, v, out, softmax_lse, *, dq, dk, dv, **options):
    """With the fp32 sums that the kernel allocates: of the queries' gradient, and of two numbers per row."""
    sums = torch.empty(q.shape, dtype=torch.float32, device="meta")
    return dq, dk, dv, torch.empty_like(softmax_lse), torch.empty_like(softmax_lse), sums, *[q.new_empty(0)] * 2


def _check(tensors, options):
    """The conditions of mha_fwd and mha_bwd."""
    starts, longest = options.get("cu_seqlens_q"), options.get("max_seqlen_q")
    assert options.get("cu_seqlens_k") is starts and options.get("max_seqlen_k") == longest
    q, k = tensors["q"], tensors["k"]
    for name, x in tensors.items():
        assert x.stride(-1) == 1 and x.dtype == q.dtype and x.shape[-1] % 8 == 0, name
        assert x.dim() == (4 if starts is None else 3), name
        assert x.shape == (k if name in ("k", "v", "dk", "dv") else q).shape, name
    assert q.shape[-2] % k.shape[-2] == 0
    if starts is not None:
        assert starts.dtype == torch.int32 and starts.is_contiguous() and starts.diff().max() <= longest
        assert starts[0] == 0 and starts[-1] == len(q) == len(k)


def _pieces(tensors, options):
    """Yields ([s, b, heads, d] of each tensor, rule) of the whole, or of each document."""
    starts = options.get("cu_seqlens_q")
    if starts is None:
        parts = [[x.transpose(0, 1) for x in tensors]]
    else:
        parts = [[x[begin:end].unsqueeze(1) for x in tensors] for begin, end in itertools.pairwise(starts.tolist())]
    scores = Scores(options["softmax_scale"], options["softcap"] or None)
    left, right = options["window_size_left"], options["window_size_right"]
    if options["is_causal"]:
        right = 0
    for part in parts:
        queries, keys = (len(part[i]) for i in ((0, 1) if len(part) == 4 else (1, 2)))  # after dout in backward
        if left < 0 and right < 0:
            yield part, Rule(scores)
            continue
        offset = keys - queries + right  # bottom-right corners meet
        yield part, Rule(scores, offset, None if left < 0 else left + right + 1)


def _whole(lses, options):
    return lses[0] if options.get("cu_seqlens_q") is None else torch.cat(lses, dim=-1).squeeze(0)
