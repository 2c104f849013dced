"""Families with experts that are not supported because they differ in more than names, each with the reason."""

from __future__ import annotations

REFUSED = {
    "dbrx": "its experts are three tensors of all experts, of which one is transposed",
    "jetmoe": "its attention is a mixture of experts, too",
    "llama4": "it multiplies the input of an expert by its weight, not the output, and has attention in chunks",
    "phimoe": "it has LayerNorm, biases, and a router that leaves out experts far behind the best one (SparseMixer)",
}
