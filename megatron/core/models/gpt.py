"""One GPT decoder for every family: embedding, layers, head; on a pipeline rank, its stages of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from megatron.core.parameter import Parameter
from megatron.core.tensor_parallel.chunked_loss import loss_in_backward
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.core.tensor_parallel.token_chunks import TokenChunks
from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.context import Build, LayerCache, Positions
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.core.transformer.prediction import MultiTokenPrediction
from megatron.kernels.ops.alibi import position_channels
from megatron.kernels.ops.attention_segments import Segments
from megatron.kernels.ops.rope import dynamic_frequencies, query_scales, rotary_frequencies, rotary_tables
from megatron.kernels.ops.softcap import softcap
from megatron.schedule.partition import Stage, whole_model
from megatron.spec.attention import RotarySpec
from megatron.spec.decoder import WORD_EMBEDDINGS
from megatron.spec.lora import adapted_weight
from megatron.spec.moe import MoESpec
from megatron.spec.parameter import ParamSpec


class GPTModel(nn.Module):
    """tokens [b, s] -> loss per token [b, s], or logits [s, b, padded vocab / tp] when no labels are given.

    With caches (generation) logits are of the last position only, [1, b, padded vocab / tp]. Names of parameters do not
    depend on how the model is cut into stages. A last stage that ties its head to an embedding of another rank has a
    copy of it, under the same name.
    """

    def __init__(self, build: Build, stages: Sequence[Stage] | None = None) -> None:
        """`stages`: what this rank holds; default the whole model."""
        super().__init__()
        spec = build.spec
        self.stages = {stage.number: stage for stage in stages or (whole_model(len(spec.layers)),)}
        begins = any(stage.embedding for stage in self.stages.values())
        ends = any(stage.head for stage in self.stages.values())
        has_embedding = begins or (ends and spec.embeds_at_both_ends)
        self.embedding = Embedding(build, is_first=begins) if has_embedding else None
        layers = [number for stage in self.stages.values() for number in stage.layers]
        self.decoder = TransformerBlock(build, layers, final_norm=ends)
        shared = self.embedding.word_embeddings.weight if spec.tied and self.embedding is not None else None
        self.output_layer = build.column(spec.output, shared) if ends else None
        self.mtp = MultiTokenPrediction(build) if ends and spec.predictions else None
        self._placed = spec.rank_parameters(tuple(self.stages.values()))
        if self.embedding is not None and self._placed[WORD_EMBEDDINGS].on_both_ends:
            words = self.embedding.word_embeddings.weight
            words.info = dataclasses.replace(words.info, on_both_ends=True)
        self._build = build
        self._rotaries = [_Rotary(rotary, build.device) for rotary in spec.rotaries]
        self.rotary_dtype = build.dtype

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor | None = None,
        segments: Segments | None = None,
        caches: Sequence[LayerCache] | None = None,
        *,
        further_labels: Sequence[Tensor] = (),
        lengths: int | Tensor | None = None,
        context: int | None = None,
        routing: MicrobatchRouting | None = None,
        stage: int = 0,
        received: Tensor | None = None,
        loss_in_backward: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """positions [b or 1, s]; segments: documents inside the samples, or None; caches: one per layer, in generation.

        `further_labels`: [b, s] of each depth of multi-token prediction: the labels, shifted by one for each depth. The
        result is then a tuple with the losses of each depth, behind those of `labels`.

        `lengths`: the tokens of all sequences, or of each one [b, 1], including those that are not in `tokens`; default
        the columns of `tokens`. Only LongRoPE and dynamic NTK scaling depend on them.

        `context`: the ranks that share the sequences, one of the sizes in `Groups.contexts`; None: those of cp.

        `routing`: the choices of experts for these tokens, which layers with experts fill in; None: they are not kept.

        `received`: the hidden states [s or s/tp, b, h] of the stage before, where there is one; a stage that is not the
        last one returns them.

        `loss_in_backward`: the losses are NaN until their backward has run, which computes head and loss for a chunk of
        tokens at a time, as forward does without gradients. See core/tensor_parallel/chunked_loss.py.
        """
        hidden = self.hidden(
            tokens,
            positions,
            segments,
            caches,
            lengths=lengths,
            context=context,
            routing=routing,
            stage=stage,
            received=received,
        )
        if not self.stages[stage].head:
            return hidden
        if caches is not None:
            hidden = hidden[-1:]  # generation asks for the next token only, and the head is the widest layer
        if labels is None:
            return self.head(hidden)
        losses = self._losses(hidden, labels.t(), in_backward=loss_in_backward).t()
        if not further_labels:
            return losses
        where = self._where(positions, tokens.shape[1] if lengths is None else lengths, segments, context)
        further = self._further_losses(
            hidden, (labels, *further_labels), positions, where, routing, in_backward=loss_in_backward
        )
        return losses, *further

    def _further_losses(
        self,
        hidden: Tensor,
        labels: Sequence[Tensor],
        positions: Tensor,
        where: Positions,
        routing: MicrobatchRouting | None,
        *,
        in_backward: bool,
    ) -> Iterator[Tensor]:
        """Yields the losses [b, s] of each depth of multi-token prediction. labels: of the next token, too."""
        assert self.mtp is not None and self.embedding is not None
        for layer, (tokens, targets) in zip(self.mtp.layers, itertools.pairwise(labels), strict=True):
            hidden = layer(hidden, self.embedding(tokens, positions), where, routing)
            yield self._losses(hidden, targets.t(), in_backward=in_backward).t()

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Segments | None = None,
        caches: Sequence[LayerCache] | None = None,
        *,
        lengths: int | Tensor | None = None,
        context: int | None = None,
        routing: MicrobatchRouting | None = None,
        stage: int = 0,
        received: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [s or s/tp, b, h] behind a stage's layers, and behind the final norm on the last stage.

        Arguments are those of `forward`.
        """
        layout = self.stages[stage]
        if layout.embedding:
            assert self.embedding is not None
            received = self.embedding(tokens, positions)
        assert received is not None
        where = self._where(positions, tokens.shape[1] if lengths is None else lengths, segments, context)
        hidden: Tensor = self.decoder(received, where, caches, routing, layers=layout.layers, final_norm=layout.head)
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states of the last stage [s or s/tp, b, h] -> logits [s, b, padded vocab / tp]."""
        assert self.output_layer is not None
        logits: Tensor = self.output_layer(hidden)
        scaling, cap = self._build.logits_scaling, self._build.spec.logits_softcap
        logits = logits if scaling == 1.0 else logits / scaling
        return logits if cap is None else softcap(logits, cap)

    def _losses(self, hidden: Tensor, targets: Tensor, *, in_backward: bool) -> Tensor:
        """Hidden states of the last stage [s or s/tp, b, h], targets [s, b] -> loss per token [s, b]."""
        assert self.output_layer is not None
        if torch.is_grad_enabled() and not in_backward:
            return self._token_losses(hidden, targets)
        chunks = TokenChunks.of(self._build.loss_chunk, hidden.shape[1], self.sequence_shards)
        weights = [cast(Parameter, weight) for weight in self.output_layer.parameters()]
        return loss_in_backward(self._token_losses, weights, hidden, targets, chunks)

    def _token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """As `_losses`, of all tokens at once."""
        assert self.output_layer is not None
        spec = self._build.spec
        return vocab_parallel_cross_entropy(
            self.output_layer(hidden),
            targets,
            spec.softmax_size,
            self._build.groups.tp,
            self._build.logits_scaling,
            spec.logits_softcap,
            self._build.kernels.fused.cross_entropy,
            self._build.z_loss,
            self._build.all_reduce,
        )

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of the model in one stage."""
        return len(self.stages) == 1 and all(stage.embedding and stage.head for stage in self.stages.values())

    @property
    def layers_with_experts(self) -> tuple[bool, ...]:
        """Whether each layer of the whole model has experts, those of predictions behind the others."""
        spec = self._build.spec
        return tuple(isinstance(spec.layer(number).mlp, MoESpec) for number in range(self._end_of_layers))

    def layers_of(self, stage: int) -> range:
        """The layers of a stage, those of predictions behind the others."""
        layers = self.stages[stage].layers
        return range(layers.start, self._end_of_layers) if self.stages[stage].head else layers

    @property
    def num_predictions(self) -> int:
        """The further tokens that training predicts behind the next one."""
        return len(self._build.spec.predictions)

    @property
    def _end_of_layers(self) -> int:
        return len(self._build.spec.layers) + self.num_predictions

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Dtype of the hidden states between stages."""
        return torch.float32 if self._build.config.fp32_residual_connection else self._build.dtype

    @property
    def sequence_shards(self) -> int:
        """How many parts sequence parallelism cuts a sequence into."""
        return self._build.groups.tp.size if self._build.sequence_parallel else 1

    def hidden_shape(self, b: int, s: int) -> tuple[int, int, int]:
        """Shape of the hidden states between stages, for microbatches [b, s]."""
        return s // self.sequence_shards, b, self._build.spec.hidden_size

    def stage_of(self, name: str) -> int | None:
        """The stage that uses a parameter; None for one that two stages of this rank use. An adapter is its layer's."""
        return self._placed[adapted_weight(name)].stage

    def _where(
        self, positions: Tensor, lengths: int | Tensor, segments: Segments | None, context: int | None
    ) -> Positions:
        """lengths: of the sequences, of which the longest decides whether positions scale queries."""
        tables, scaling = self._tables(positions, lengths), self._build.spec.query_scaling
        is_short = scaling is not None and isinstance(lengths, int) and lengths <= scaling.original
        scales = None if scaling is None or is_short else query_scales(positions, scaling, self.rotary_dtype)
        return Positions(tables, segments, context, scales)

    def _tables(self, positions: Tensor, lengths: int | Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Cos and sin of each rotary embedding, for the layers that have it. With ALiBi, the channels of positions."""
        if self._build.spec.position_channels:
            return (position_channels(positions, self.rotary_dtype),)
        return tuple(
            rotary_tables(positions, rotary.frequencies(lengths), rotary.factor, self.rotary_dtype)
            for rotary in self._rotaries
        )


class _Rotary:
    """The frequencies of a rotary embedding on a device. factor: on cos and sin."""

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._frequencies, self.factor = rotary_frequencies(spec, device)
        self._long = None if spec.longrope is None else rotary_frequencies(spec, device, long=True)[0]

    def frequencies(self, lengths: int | Tensor) -> Tensor:
        """Returns [channels / 2], or [b, channels / 2] for lengths [b, 1] of which some may need others."""
        if self._spec.short is None:
            return self._frequencies
        if isinstance(lengths, Tensor):
            return torch.where(lengths > self._spec.short, self._frequencies_of_long(lengths), self._frequencies)
        if lengths <= self._spec.short:
            return self._frequencies
        return self._frequencies_of_long(torch.full((1,), lengths, device=self._device))

    def _frequencies_of_long(self, lengths: Tensor) -> Tensor:
        return dynamic_frequencies(self._spec, lengths) if self._long is None else self._long


class Embedding(nn.Module):
    """tokens [b, s] -> hidden [s or s/tp, b, h]: token embedding, times its factor, learned positions and a norm if
    configured, dropout.

    is_first: whether it is that of the first stage. A copy that only lends its weight to the head has neither positions
    nor a norm.
    """

    def __init__(self, build: Build, *, is_first: bool = True) -> None:
        super().__init__()
        spec = build.spec.embedding
        self.word_embeddings = VocabParallelEmbedding(
            spec.words,
            build.groups,
            sequence_parallel=build.sequence_parallel,
            dtype=build.dtype,
            device=build.device,
            kernel=build.kernels.fused.add_rows,
        )
        # Rounded as transformers rounds that of Gemma; those of other families are whole numbers.
        self._multiplier = float(torch.tensor(spec.multiplier, dtype=build.dtype))
        positions = spec.positions if is_first else None
        self.position_embeddings = None if positions is None else PositionEmbedding(build, positions)
        self.embedding_layernorm = build.optional_norm(spec.norm if is_first else None)
        self._build = build

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """See the class."""
        build, spec = self._build, self._build.spec.embedding
        hidden = self.word_embeddings(tokens)
        if self._multiplier != 1.0:
            hidden = hidden * self._multiplier
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(positions)
        if self.embedding_layernorm is not None:
            hidden = self.embedding_layernorm(hidden)
        if build.config.fp32_residual_connection:
            hidden = hidden.float()
        if spec.dropout == 0.0 or not self.training:
            return hidden
        with build.rng.stream("sharded" if build.sequence_parallel else "replicated"):
            return nn.functional.dropout(hidden, spec.dropout)


class PositionEmbedding(nn.Module):
    """positions [b or 1, s] -> [s or s/tp, b or 1, h]. The table is replicated; under sequence parallelism each rank
    looks up its own part of the sequence."""

    def __init__(self, build: Build, spec: ParamSpec) -> None:
        super().__init__()
        self.weight = build.parameter(spec)
        self._tp = build.groups.tp if build.sequence_parallel else None

    def forward(self, positions: Tensor) -> Tensor:
        """See the class."""
        if self._tp is not None:
            positions = positions.chunk(self._tp.size, dim=1)[self._tp.rank]
        return torch.nn.functional.embedding(positions.t(), self.weight)
