"""Weights for a model with more rows of the vocabulary than their source has: new tokens, or other padding."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.models.source import Source
from megatron.spec.decoder import decoder_spec

_BLOCK_ROWS = 8192


class ResizedVocabulary:
    """The weights of `source` for `model`, which differs in the number of tokens and in the padding. A Source.

    Rows of new tokens are the mean of the source's rows, so that a new token begins with a probability like that of the
    others (Hewitt, "Initializing new word embeddings for pretrained language models", 2021; transformers does the same,
    up to a noise of 1e-9). Rows of padding are zero.
    """

    def __init__(self, source: Source, model: ModelConfig) -> None:
        """Raises CheckpointError if the model has fewer tokens than the source."""
        assert model.vocab_size and source.model.vocab_size
        if model.vocab_size < source.model.vocab_size:
            raise CheckpointError(
                f"the weights are of {source.model.vocab_size} tokens, and --vocab-size {model.vocab_size} would drop "
                f"some; give --vocab-size {source.model.vocab_size} or more"
            )
        self.model, self.dtype, self._source = model, source.dtype, source
        self.carried = source.carried
        self._tokens, self._old_tokens = model.vocab_size, source.model.vocab_size
        resized = {
            name: spec.shape for name, spec in decoder_spec(model).parameters().items() if spec.embedding_or_output
        }
        self.shapes = source.shapes | {name: shape for name, shape in resized.items() if name in source.shapes}
        self._resized, self._means = resized.keys(), dict[str, Tensor]()

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """See Source."""
        if name not in self._resized:
            return self._source.read(name, box, dtype)
        first, rows = box.offset[0], box.shape[0]
        old, tokens = (max(0, min(size - first, rows)) for size in (self._old_tokens, self._tokens))
        out = torch.zeros(box.shape, dtype=dtype)
        if old:
            out[:old] = self._source.read(name, Box(box.offset, (old, *box.shape[1:])), dtype)
        if tokens > old:
            out[old:tokens] = narrow(self._mean(name), Box(box.offset[1:], box.shape[1:]))
        return out

    def _mean(self, name: str) -> Tensor:
        """Returns the mean of the source's rows in fp64, summed in blocks that do not depend on the layout."""
        if name not in self._means:
            width = self.shapes[name][1:]
            total = torch.zeros(width, dtype=torch.float64)
            for first in range(0, self._old_tokens, _BLOCK_ROWS):
                rows = min(_BLOCK_ROWS, self._old_tokens - first)
                box = Box((first, *(0 for _ in width)), (rows, *width))
                total += self._source.read(name, box, torch.float32).double().sum(0)
            self._means[name] = total / self._old_tokens
        return self._means[name]
