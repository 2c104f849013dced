"""One GPT decoder for every family: embedding, layers, head. Any part may be absent on a pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.parameter import make_parameter
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.core.tensor_parallel.linear import ColumnParallelLinear
from megatron.core.transformer.block import TransformerBlock, layer_inits
from megatron.core.transformer.context import Build, KeyValueCache, Positions
from megatron.kernels.ops.rope import rotary_frequencies, rotary_tables


class GPTModel(nn.Module):
    """tokens [b, s] -> loss per token [b, s], or logits [s, b, padded vocab / tp] when no labels are given.

    With caches (generation) logits are of the last position only, [1, b, padded vocab / tp].
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        assert config.num_layers and config.hidden_size and config.vocab_size
        self.embedding = Embedding(build)
        self.decoder = TransformerBlock(build, 0, config.num_layers, final_norm=True)
        untied = config.untie_embeddings_and_output_weights
        self.output_layer = ColumnParallelLinear(
            config.hidden_size,
            (config.padded_vocab_size,),
            shard_dim=0,
            bias=False,
            init=layer_inits(config)[0],
            tp=build.groups.tp,
            sequence_parallel=build.sequence_parallel,
            weight_grad=build.kernels.weight_grad,
            dtype=build.dtype,
            device=build.device,
            weight=None if untied else self.embedding.word_embeddings.weight,
        )
        self._build = build
        self._rotary = rotary_frequencies(config, build.device) if config.rotary_dim else None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor | None = None,
        segments: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """positions [b or 1, s]; segments [b, s] document ids or None; caches: one a layer, in generation."""
        hidden = self.embedding(tokens, positions)
        hidden = self.decoder(hidden, Positions(self._tables(positions), segments), caches)
        if caches is not None:
            hidden = hidden[-1:]  # generation asks for the next token only, and the head is the widest layer
        logits: Tensor = self.output_layer(hidden)
        if labels is None:
            return logits
        vocab_size = self._build.config.vocab_size
        assert vocab_size
        return vocab_parallel_cross_entropy(logits, labels.t(), vocab_size, self._build.groups.tp).t()

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        if self._rotary is None:
            return None
        frequencies, factor = self._rotary
        return rotary_tables(positions, frequencies, factor, self._build.dtype)


class Embedding(nn.Module):
    """tokens [b, s] -> hidden [s or s/tp, b, h]: token embedding, learned positions if configured, dropout."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        assert config.hidden_size
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab_size,
            config.hidden_size,
            init=layer_inits(config)[0],
            tp=build.groups.tp,
            sequence_parallel=build.sequence_parallel,
            dtype=build.dtype,
            device=build.device,
        )
        self.position_embeddings: nn.Module | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(build)
        self._build = build

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """See the class."""
        build, config = self._build, self._build.config
        hidden = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(positions)
        if config.fp32_residual_connection:
            hidden = hidden.float()
        if config.hidden_dropout == 0.0 or not self.training:
            return hidden
        with build.rng.stream("sharded" if build.sequence_parallel else "replicated"):
            return nn.functional.dropout(hidden, config.hidden_dropout)


class PositionEmbedding(nn.Module):
    """positions [b or 1, s] -> [s or s/tp, b or 1, h]. The table is replicated; under sequence parallelism each rank
    looks up its own part of the sequence."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        assert config.hidden_size and config.max_position_embeddings
        self.weight = make_parameter(
            (config.max_position_embeddings, config.hidden_size),
            layer_inits(config)[0],
            dtype=build.dtype,
            device=build.device,
            tp=build.groups.tp,
            sum_over_tp=build.sequence_parallel,
        )
        self._tp = build.groups.tp if build.sequence_parallel else None

    def forward(self, positions: Tensor) -> Tensor:
        """See the class."""
        if self._tp is not None:
            positions = positions.chunk(self._tp.size, dim=1)[self._tp.rank]
        return torch.nn.functional.embedding(positions.t(), self.weight)
