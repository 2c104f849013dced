"""Bytes that a decoder layer keeps for its backward, tensor by tensor: arithmetic on the configuration.

Counted are distinct storages of one microbatch on one rank. Not counted: parameters, rotary tables (one pair a microbatch
for all layers), and where random streams stood (some bytes a recomputed region on CUDA, 10 KB on the CPU).

Letters: s tokens of this rank's part of the sequence, b samples, h hidden, f inner width, n query heads, g key/value heads,
d channels a head. n, g and f are divided by tp; what lies outside tensor-parallel layers is divided by tp with sequence
parallelism, and whole without. In bf16, with a fused kernel, without biases, dropout and adapters, a Llama layer keeps for
each token, n = g and n d = h:

    everything  16 h + 6 f + 8 + 4 n     bytes: residuals 2 x 2h, norms 2 x 2h, queries, keys and values 6h, output 2h,
                                         gate and up 4f, product 2f, statistics 2 x 4, log-sum-exp 4n
    GEMM-last   12 h + 4 f + 4 n         without both norms, their statistics, and the product
    full         2 h                     of a group of layers

Megatron-Kwai's layer starts at 16 h + 8 f: its SwiGLU keeps silu(gate), too, which is computed again here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.model import ModelConfig
from megatron.config.recompute import CORE_ATTN, MLP_ACT, NORM, WHOLE_MLP, RecomputeConfig

# How attention is computed. fused: flash or memory-efficient, in the activations' dtype. upcast: the same on fp32 copies,
# as on CPUs without half-precision products. unfused: plain torch. math: torch's own fallback, which is what its fused
# attention does on a CPU with dropout.
ATTENTION = ("fused", "upcast", "unfused", "math")
# Parts of a layer, by which bytes are told apart.
PARTS = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2", "dropout")
_FP32 = 4


@dataclass(frozen=True)
class Place:
    """How a layer lies on a rank. tokens: of this rank's part of the sequence before sequence parallelism."""

    tokens: int
    samples: int
    tp: int = 1
    sequence_parallel: bool = False
    attention: str = "fused"
    device: str = "cuda"  # "cpu" keeps statistics and masks in other types

    @property
    def sharded(self) -> int:
        """Token positions outside tensor-parallel layers."""
        return self.tokens * self.samples // (self.tp if self.sequence_parallel else 1)


def layer_bytes(model: ModelConfig, recompute: RecomputeConfig, place: Place) -> dict[str, int]:
    """Part -> bytes that one layer keeps which is not recomputed whole; a storage counts where it is kept first.

    Without adapters and packed documents, under no or p2p context parallelism. Raises ValueError for an unknown kernel.
    """
    if place.attention not in ATTENTION:
        raise ValueError(f"attention is one of {', '.join(ATTENTION)}, not {place.attention}")
    modules = recompute.modules
    found = dict.fromkeys(PARTS, 0)
    found["attn_norm"], found["qkv_linear"] = _norm(model, place, again=NORM in modules)
    found["core_attn"], found["attn_proj"] = _attention(model, place, again=CORE_ATTN in modules)
    if WHOLE_MLP in modules:
        # The region's input: of the norm, or of the MLP behind it.
        norm, normed = _norm(model, place, again=False)
        residual = _residual(model) * place.sharded * _hidden(model)
        found["mlp_norm"], found["mlp_fc1"] = (residual, 0) if NORM in modules else (norm, normed)
    else:
        found["mlp_norm"], found["mlp_fc1"] = _norm(model, place, again=NORM in modules)
        found["mlp_act"], found["mlp_fc2"] = _activation(model, place, again=MLP_ACT in modules)
    if model.hidden_dropout:
        mask = _itemsize(model) if place.device == "cpu" else 1
        found["dropout"] = 2 * mask * place.sharded * _hidden(model)
    return found


def stage_bytes(model: ModelConfig, recompute: RecomputeConfig, place: Place, layers: Sequence[int]) -> int:
    """Bytes that the layers of a stage keep. A group of them that is recomputed whole keeps its input."""
    total = 0
    for group, again in recompute.groups(layers):
        if again:
            total += _residual(model) * place.sharded * _hidden(model)
        else:
            total += len(group) * sum(layer_bytes(model, recompute, place).values())
    return total


def _norm(model: ModelConfig, place: Place, *, again: bool) -> tuple[int, int]:
    """(kept by the norm, kept by the linear layer behind it)"""
    h = _hidden(model)
    is_rms = model.normalization == "RMSNorm"
    x = (_residual(model) if is_rms else _itemsize(model)) * place.sharded * h
    weight = _itemsize(model) * h if model.apply_layernorm_1p else 0  # the sum of 1 and the parameter
    if again:
        return x + weight, 0
    return x + weight + _statistics(model, place) * place.sharded, _itemsize(model) * place.sharded * h


def _statistics(model: ModelConfig, place: Place) -> int:
    """Bytes a row that is normalised."""
    if model.normalization == "RMSNorm":
        return _FP32
    return 2 * (_itemsize(model) if place.device == "cpu" else _FP32)


def _attention(model: ModelConfig, place: Place, *, again: bool) -> tuple[int, int]:
    """(kept by attention with what leads to it, kept by the output projection)"""
    assert model.num_attention_heads
    tokens, d, size = place.tokens * place.samples, model.head_dim, _itemsize(model)
    n, g = model.num_attention_heads // place.tp, model.local_kv_heads(place.tp)
    out = size * tokens * n * d
    norms = _query_key_norms(model, place, n, g, tokens)
    if again or place.attention == "fused":
        kept = norms + size * tokens * d * _inputs(model, n, g)
        return kept + (0 if again else _FP32 * tokens * n), out
    pairs = place.samples * n * place.tokens**2
    if place.attention == "upcast":
        return norms + _FP32 * tokens * (d * (2 * n + 2 * g) + n), out
    if place.attention == "unfused":
        # Copies of keys and values for every query head.
        kept = norms + size * tokens * d * (_queries(model, n, g) + 2 * n)
        kept += place.tokens**2 + _FP32 * pairs  # what may be seen, softmax
        if model.attention_dropout:
            mask = size if place.device == "cpu" else 1
            return kept + (mask + size) * pairs, out
        return kept + (size * pairs if size != _FP32 else 0), out
    kept = norms + _FP32 * (tokens * d * 2 * n + 3 * pairs)
    return kept + _FP32 * tokens * d * _math_values(model, n, g), out


def _inputs(model: ModelConfig, n: int, g: int) -> int:
    """Heads that queries, keys and values hold, beside what their norms keep."""
    if model.qk_layernorm:
        return n + g  # values are a view of qkv, which the norm of the keys keeps
    if model.rotary_dim:
        return n + 2 * g
    return n + 2 * g + (n if n > g > 1 else 0)  # views of qkv, but for the queries of several groups


def _queries(model: ModelConfig, n: int, g: int) -> int:
    """The same of queries alone, where keys and values are copied."""
    is_view = not model.rotary_dim and not model.qk_layernorm and n == g
    return n + 2 * g if is_view else n


def _math_values(model: ModelConfig, n: int, g: int) -> int:
    """The same of values alone, in fp32."""
    if n > g or _itemsize(model) != _FP32:
        return n
    if model.qk_layernorm:
        return 0
    return n if model.rotary_dim else n + 2 * g


def _query_key_norms(model: ModelConfig, place: Place, n: int, g: int, tokens: int) -> int:
    if not model.qk_layernorm:
        return 0
    heads = n + 2 * g + (n if n > g > 1 else 0)  # keys are a view of qkv, queries of several groups a copy
    weights = 2 * _itemsize(model) * model.head_dim if model.apply_layernorm_1p else 0
    return tokens * (_itemsize(model) * heads * model.head_dim + _statistics(model, place) * (n + g)) + weights


def _activation(model: ModelConfig, place: Place, *, again: bool) -> tuple[int, int]:
    """(kept by the activation, kept by the linear layer behind it)"""
    inner = _itemsize(model) * place.tokens * place.samples * model.ffn_dim // place.tp
    return (2 * inner if model.swiglu else inner), 0 if again else inner


def _hidden(model: ModelConfig) -> int:
    assert model.hidden_size
    return model.hidden_size


def _itemsize(model: ModelConfig) -> int:
    return _FP32 if model.dtype_name == "float32" else 2


def _residual(model: ModelConfig) -> int:
    return _FP32 if model.fp32_residual_connection else _itemsize(model)
