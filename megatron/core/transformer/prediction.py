"""Multi-token prediction: layers behind the decoder that predict further tokens in training (DeepSeek-V3, arXiv
2412.19437, section 2.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.transformer.block import TransformerLayer, residual_stream
from megatron.core.transformer.context import Build, Positions
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.core.transformer.recompute import recompute
from megatron.core.transformer.residual import Residual, total


class PredictionLayer(nn.Module):
    """The module of PredictionSpec, for predictions of `depth` + 2 tokens ahead.

    hidden and embedded [s or s/tp, b, h] -> the same: hidden states for the head, and for the next depth.
    """

    def __init__(self, build: Build, depth: int) -> None:
        super().__init__()
        spec, number = build.spec.predictions[depth], len(build.spec.layers) + depth
        self.enorm, self.hnorm = build.norm(spec.embedding_norm), build.norm(spec.hidden_norm)
        self.eh_proj = build.replicated(spec.projection)
        self.transformer_layer = TransformerLayer(build, number)
        self.final_layernorm = build.norm(spec.final_norm)
        self._build, self._is_recomputed = build, any(again for _, again in build.recompute.groups((number,)))

    def forward(
        self, hidden: Tensor, embedded: Tensor, positions: Positions, routing: MicrobatchRouting | None
    ) -> Tensor:
        """hidden: of the depth before, behind its final norm. embedded: the tokens that it predicts."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        if self._build.config.fp32_residual_connection:
            x = x.float()

        def layer(x: Tensor) -> Tensor | Residual:
            stream: Tensor | Residual = self.transformer_layer(
                residual_stream(self._build, x), positions, None, routing
            )
            return stream

        if not self._is_recomputed:
            normed: Tensor = self.final_layernorm(layer(x))
            return normed
        last = self.transformer_layer.last_gemm
        normed = self.final_layernorm(recompute(lambda x: total(layer(x)), x, self._build.rng, last=last))
        return normed


class MultiTokenPrediction(nn.Module):
    """The layers that predict further tokens, by depth."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PredictionLayer(build, depth) for depth in range(len(build.spec.predictions)))
