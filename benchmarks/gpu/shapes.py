"""The sizes that several parts measure: layers of Llama-3 8B, and toy sizes for a dry run."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.gpu.case import Setting


class LayerShape(NamedTuple):
    """A Llama layer: tokens, hidden size, MLP width, query heads, key/value heads, channels per head, and
    vocabulary."""

    tokens: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int


def layer_shape(setting: Setting) -> LayerShape:
    """Returns the layer of Llama-3 8B on 8192 tokens, with a quarter of its vocabulary; or a toy."""
    if setting.toy:
        return LayerShape(128, 128, 256, 4, 2, 32, 256)
    return LayerShape(8192, 4096, 14336, 32, 8, 128, 32064)


def layer_products(setting: Setting) -> dict[str, tuple[int, int, int]]:
    """Returns the linear layers: name -> (tokens, input width, output width)."""
    shape = layer_shape(setting)
    return {
        "qkv": (shape.tokens, shape.hidden, (shape.heads + 2 * shape.groups) * shape.head),
        "proj": (shape.tokens, shape.heads * shape.head, shape.hidden),
        "fc1": (shape.tokens, shape.hidden, 2 * shape.ffn),
        "fc2": (shape.tokens, shape.ffn, shape.hidden),
    }
