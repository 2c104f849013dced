"""Model FLOPs: the floating-point operations the mathematics of a step needs, whatever the implementation does.

Forward, per token, in multiply-adds, with h hidden, L layers, n query heads, k key/value heads, d channels a head,
f MLP width, V padded vocabulary, s sequence length:

    L x [ h (n + 2k) d        query, key, value projection
        + n d h               attention output projection
        + m h f               MLP: m = 3 matrices when gated (SwiGLU), else 2
        + 2 n d t ]           scores and weighted values: causal, so a token meets t = s / 2 others on average,
                              and t = W - W^2 / 2s in a layer with a sliding window of W < s
    + h V                     output head
    + r (in + out)            a LoRA adapter of rank r beside a projection

A multiply-add is 2 FLOPs and the backward pass costs twice the forward pass (one product for the input's gradient,
one for the weight's), so training costs 3 x 2 times that. V is the padded vocabulary, as in Megatron-LM; here the
padding does not depend on the layout, so neither do the figures. Frozen weights (LoRA) have no gradient, so they cost
twice and not three times the forward pass. Attention that stops at document borders is counted
as if it did not. Not counted: the embedding lookup, norms, activations, softmax, the optimizer, and what
recomputation repeats.
"""

from __future__ import annotations

from megatron.config.model import ModelConfig
from megatron.core.transformer.lora import adapted_linears

# Training in units of the forward pass.
TRAINED, FROZEN = 3, 2
FLOPS_PER_MULTIPLY_ADD = 2


def train_flops(model: ModelConfig, seq_length: int, samples: int) -> float:
    """Model FLOPs of forward and backward over `samples` sequences of `seq_length` tokens, all replicas together."""
    assert model.num_layers and model.hidden_size and model.num_attention_heads
    attention = model.num_attention_heads * model.head_dim
    key_value = model.num_kv_heads * model.head_dim
    projections = model.hidden_size * (attention + 2 * key_value) + attention * model.hidden_size
    mlp = (3 if model.swiglu else 2) * model.hidden_size * model.ffn_dim
    others = sum(others_met(window, seq_length) for window in model.windows)
    head = model.hidden_size * model.padded_vocab_size
    weights = model.num_layers * (projections + mlp) + head
    trained = 2 * attention * others + model.num_layers * _adapters(model)
    per_token = (FROZEN if model.lora_rank else TRAINED) * weights + TRAINED * trained
    return float(FLOPS_PER_MULTIPLY_ADD * per_token * seq_length * samples)


def _adapters(model: ModelConfig) -> int:
    """Multiply-adds a token of the adapters of a layer, which are their parameters."""
    return sum(
        (model.lora_rank or 0) * (adapted.inputs + piece.outputs.numel)
        for adapted in adapted_linears(model)
        for piece in adapted.pieces
        if piece.projection in model.lora_projections
    )


def others_met(window: int | None, seq_length: int) -> float:
    """Tokens that a token attends to, on average over a sample."""
    if window is None or window >= seq_length:
        return seq_length / 2
    return window - window**2 / (2 * seq_length)
