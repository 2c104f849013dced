"""Model FLOPs: the floating-point operations the mathematics of a step needs, whatever the implementation does.

Forward, per token, in multiply-adds, with h hidden, L layers, n query heads, k key/value heads, d channels per head,
f MLP width, V padded vocabulary, s sequence length:

    L x [ h (n + 2k) d        query, key, value projection
        + n d h               attention output projection
        + m h f               MLP: m = 3 matrices when gated, else 2
        + 2 n d t ]           scores and weighted values: causal, so a token meets t = s / 2 others on average,
                              and t = W - W^2 / 2s in a layer with a sliding window of W < s
    + h V                     output head
    + D x (2 h h + a layer + h V)   D predictions of further tokens
    + r (in + out)            a LoRA adapter of rank r of a projection

A layer with a gated delta net, of g key heads with k channels and n value heads with v channels, has instead of
attention  h (2 g k + 2 n v + 2 n) + n v h  for its projections, 3 n k v for its state, which a token reads twice and
changes once, and c (2 g k + n v) for a convolution over c tokens. A gate of the output of attention adds  h n d.
Where each channel of a key has a decay, the projections of decays and gates,  h (n v + n)  of these, are
h (k + v) + n (k k + v v)  instead.

A layer with experts has  h E  for the router and  k m h f  for the k experts of a token, each of width f, and the
shared experts' MLP, instead of the MLP: the parameters that a token uses count, not those that exist.

A multiply-add is 2 FLOPs and the backward pass costs twice the forward pass (one product for the input's gradient,
one for the weight's), so training costs 3 x 2 times that. V is the padded vocabulary, as in Megatron-LM; here the
padding does not depend on the layout, so neither do the figures. Frozen weights (LoRA) have no gradient, so they cost
twice and not three times the forward pass. Attention that stops at document borders is counted as if it did not. Not
counted: the embedding lookup, norms, activations, softmax, the optimizer, and the repetitions of recompute.
"""

from __future__ import annotations

from collections import Counter

from megatron.spec.decoder import DecoderSpec

# Training in units of the forward pass.
TRAINED, FROZEN = 3, 2
FLOPS_PER_MULTIPLY_ADD = 2


def train_flops(spec: DecoderSpec, seq_length: int, samples: int) -> float:
    """Model FLOPs of forward and backward over `samples` sequences of `seq_length` tokens, all replicas together."""
    layers = [*spec.layers, *(prediction.layer for prediction in spec.predictions)]
    weights = spec.output.multiply_adds * (1 + len(spec.predictions))
    weights += sum(prediction.projection.multiply_adds for prediction in spec.predictions)
    trained = 0.0
    kinds = {id(layer): layer for layer in layers}  # alike layers are one object
    for kind, count in Counter(map(id, layers)).items():
        layer = kinds[kind]
        weights += count * layer.multiply_adds
        trained += count * layer.attention.core.multiply_adds(seq_length)
        if spec.lora is not None:
            trained += count * spec.lora.multiply_adds(layer.linears().values())
    per_token = (FROZEN if spec.lora is not None else TRAINED) * weights + TRAINED * trained
    return float(FLOPS_PER_MULTIPLY_ADD * per_token * seq_length * samples)
