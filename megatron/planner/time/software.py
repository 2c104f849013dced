"""The properties of a run's kernels that decide about its operations."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.planner.time.hardware import BF16


@dataclass(frozen=True, kw_only=True)
class Software:
    """Defaults are those of a bf16 run on a GPU.

    precision: of the products of linear layers. unfused_attention: separate products and a softmax of plain torch, in
    place of FlashAttention 3 or cuDNN 9.
    """

    precision: str = BF16
    unfused_attention: bool = False
