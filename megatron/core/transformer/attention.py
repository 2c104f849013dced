"""Self-attention with grouped key/value heads.

Shapes: s full sequence, b batch, g key/value heads (groups), q query heads per group, d channels per head; /tp where
sharded. [Note: fewer groups than ranks] Where tp is a multiple of g, tp / g neighbours share a group: each holds a copy of
its key and value rows, and its part of the query heads. So g/tp reads 1 and q reads q g / tp. Each has the part of the
copies' gradient that comes from its own query heads: see `Section.partial`.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from megatron.core.context_parallel.steps import Keys, LayerAttention
from megatron.core.parameter import Init
from megatron.core.tensor_parallel.gemm_last import Prologue
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.context import Build, KeyValueCache, Positions
from megatron.core.transformer.norm import Norm
from megatron.kernels.ops.rope import rotate


class SelfAttention(nn.Module):
    """[s or s/tp, b, h] -> the same. The fused QKV weight is [g, (q + 2) d, h]: per group its queries, key and value.

    `window`: each position sees that many at most, the last of them itself; None: all before it. `attention`: a
    kernel, or what gets at the rest of a sequence of which this rank holds a part.
    """

    def __init__(
        self, build: Build, init: Init, output_init: Init, window: int | None, attention: LayerAttention
    ) -> None:
        super().__init__()
        config, tp = build.config, build.groups.tp
        assert config.hidden_size and config.num_attention_heads
        d, groups = config.head_dim, config.num_kv_heads
        per_group = config.num_attention_heads // groups
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            (groups, (per_group + 2) * d),
            shard_dim=0,
            divided=per_group * d,
            bias=config.qkv_bias,
            init=init,
            tp=tp,
            sequence_parallel=build.sequence_parallel,
            weight_grad=build.kernels.weight_grad,
            dtype=build.dtype,
            device=build.device,
            overlap=build.overlap,
        )
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * d,
            config.hidden_size,
            bias=config.add_bias_linear,
            init=output_init,
            tp=tp,
            sequence_parallel=build.sequence_parallel,
            weight_grad=build.kernels.weight_grad,
            dtype=build.dtype,
            device=build.device,
            overlap=build.overlap,
        )
        self.q_layernorm, self.k_layernorm = (
            Norm(d, config, tp=tp, sum_over_tp=True, dtype=build.dtype, device=build.device)
            if config.qk_layernorm
            else None
            for _ in range(2)
        )
        self._local_groups = config.local_kv_heads(tp.size)
        self._per_group, self._d = per_group // config.kv_head_holders(tp.size), d
        self._attention, self._rng, self._dropout = attention, build.rng, config.attention_dropout
        self._window, self._interleaved = window, config.rotary_interleaved

    def forward(
        self, x: Tensor, positions: Positions, cache: KeyValueCache | None = None, norm: Prologue | None = None
    ) -> tuple[Tensor, Keys]:
        """(output, the keys and values that were attended). With a cache, x holds only the new positions and attends to
        all. `norm`: of x, which the projection computes, and again in its backward."""
        qkv = self.linear_qkv(x, norm)  # [s, b, g/tp * (q + 2) * d]
        s, b, _ = qkv.shape
        heads = qkv.view(s, b, self._local_groups, self._per_group + 2, self._d)
        k, v = heads[:, :, :, -2], heads[:, :, :, -1]  # [s, b, g/tp, d]
        k = _normed_and_rotated(k, self.k_layernorm, positions, self._interleaved)
        if v.requires_grad and positions.rotary is not None and self.k_layernorm is None:
            # The rotated keys and queries are copies: as a view, v alone would keep all of qkv until backward.
            v = v.contiguous()
        if cache is not None:
            k, v = cache.append(k, v)
        keys = self._attention.start(k, v)
        q = heads[:, :, :, : self._per_group].reshape(s, b, -1, self._d)  # [s, b, g/tp * q, d]
        q = _normed_and_rotated(q, self.q_layernorm, positions, self._interleaved)
        return self.linear_proj(self._attend(q, keys, positions.segments)), keys

    def _attend(self, q: Tensor, keys: Keys, segments: Tensor | None) -> Tensor:
        if self._dropout == 0.0 or not self.training:
            return keys.attend(q, segments=segments, window=self._window, dropout=0.0)
        with self._rng.stream("sharded"):
            return keys.attend(q, segments=segments, window=self._window, dropout=self._dropout)


def _normed_and_rotated(x: Tensor, norm: Norm | None, positions: Positions, interleaved: bool) -> Tensor:
    """[s, b, heads, d] -> the same."""
    if norm is not None:
        x = norm(x)
    return x if positions.rotary is None else rotate(x, *positions.rotary, interleaved=interleaved)


def output_scale(num_layers: int) -> float:
    """Factor on the initial weights that write to the residual stream: 1 / sqrt(2 x layers) (GPT-2)."""
    return 1.0 / math.sqrt(2.0 * num_layers)
