"""Families that are not supported because they differ in more than names, each with the reason."""

from __future__ import annotations

_MAMBA = "falcon_h1 falcon_mamba bamba granitemoehybrid jamba mamba mamba2 nemotron_h zamba zamba2"
_RECURRENT = "recurrent_gemma rwkv xlstm"
_SHORT_CONVOLUTIONS = "lfm2 lfm2_moe lfm3"
_EMBEDDED_LAYERS = "gemma3n gemma3n_text gemma4 gemma4_text"
REFUSED = {
    **dict.fromkeys(_MAMBA.split(), "it has Mamba layers"),
    **dict.fromkeys(_RECURRENT.split(), "it has recurrent layers of its own kind"),
    **dict.fromkeys(_SHORT_CONVOLUTIONS.split(), "it has short convolutions in the place of attention"),
    **dict.fromkeys(_EMBEDDED_LAYERS.split(), "it has an embedding of the tokens for each layer"),
    "bitnet": "its weights have three values, and its norms stand inside attention and MLP",
    "dbrx": "its experts are three tensors of all experts, of which one is transposed",
    "diffllama": "its attention is the difference of two",
    "jetmoe": "its attention is a mixture of experts, too",
    "llama4": "it multiplies the input of an expert by its weight, not the output, and has attention in chunks",
    "mimo_v2_flash": "it scales the values of attention",
    "minicpm3": "it has latent attention with LongRoPE",
    "minimax": "it has lightning attention in most layers",
    "olmo_hybrid": (
        "its delta nets write with up to twice a value (linear_allow_neg_eigval), and have norms of their own"
    ),
    "opt": "its MLP has a plain ReLU, and its positions begin with the third row of their table",
    "phimoe": "it has LayerNorm, biases, and a router that leaves out experts far behind the best one (SparseMixer)",
}
