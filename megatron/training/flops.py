"""Model FLOPs: the floating-point operations the mathematics of a step needs, whatever the implementation does.

Forward, per token, in multiply-adds, with h hidden, L layers, n query heads, k key/value heads, d channels a head,
f MLP width, V padded vocabulary, s sequence length:

    L x [ h (n + 2k) d        query, key, value projection
        + n d h               attention output projection
        + m h f               MLP: m = 3 matrices when gated (SwiGLU), else 2
        + 2 n d t ]           scores and weighted values: causal, so a token meets t = s / 2 others on average,
                              and t = W - W^2 / 2s in a layer with a sliding window of W < s
    + h V                     output head

A multiply-add is 2 FLOPs and the backward pass costs twice the forward pass (one product for the input's gradient,
one for the weight's), so training costs 3 x 2 times that. V is the padded vocabulary, as in Megatron-LM; here the
padding does not depend on the layout, so neither do the figures. Attention that stops at document borders is counted
as if it did not. Not counted: the embedding lookup, norms, activations, softmax, the optimizer, and what
recomputation repeats.
"""

from __future__ import annotations

from megatron.config.model import ModelConfig

BACKWARD_AND_FORWARD = 3  # in units of the forward pass
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
    per_token = model.num_layers * (projections + mlp) + 2 * attention * others + head
    return float(BACKWARD_AND_FORWARD * FLOPS_PER_MULTIPLY_ADD * per_token * seq_length * samples)


def others_met(window: int | None, seq_length: int) -> float:
    """Tokens that a token attends to, on average over a sample."""
    if window is None or window >= seq_length:
        return seq_length / 2
    return window - window**2 / (2 * seq_length)
