"""The properties of a framework's kernels that the flags of a run do not say."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.planner.time.hardware import BF16
from megatron.spec.sizes import Target

FLASH_3, FLASH, FLASH_1, TORCH = "flash3", "flash", "flash1", "torch"
FUSED_SOFTMAX, UNFUSED = "fused softmax", "unfused"


@dataclass(frozen=True, kw_only=True)
class Software:
    """Defaults are those of this project on a GPU.

    precision: of the products of linear layers. attention: FlashAttention 3 or cuDNN 9 (FLASH_3), which differ from
    FlashAttention 2 (FLASH) on Hopper; FlashAttention 1 (FLASH_1), torch's scaled_dot_product_attention (TORCH), or
    separate products with a fused softmax (FUSED_SOFTMAX) or without one (UNFUSED). fused_norm, fused_pointwise,
    fused_loss: norms; rotary embedding and activation; the loss are one kernel each. fused_accumulation: the product
    of a weight's gradient adds to its sum. bulk_overlap: the communication of a column-parallel layer's backward is
    overlapped with its products, without any flag. split_gate: the two products of a gated activation are layers of
    their own, which communicate separately. keeps_gathered: with sequence parallelism the output of a norm is gathered
    once, for all layers that read it, and kept for backward. copies_sharded: the collectives of sharded parameters and
    gradients have buffers of their own. recompute_half: every second product of a layer, and all that is no product,
    are computed again. gradient_bytes: of a gradient on the wire, None: as the flags say. half_gradients: weight
    gradients are summed over microbatches in half precision. whole_sums: gradients are summed by an all-reduce between
    all replicas, with copies before and after it, although each needs only a slice. gathered_loss: the logits are
    gathered over tensor parallelism, and every rank computes the loss of all of them. blocking_pipeline: ranks wait for
    messages between pipeline stages.
    """

    precision: str = BF16
    attention: str = FLASH_3
    fused_norm: bool = True
    fused_pointwise: bool = True
    fused_loss: bool = True
    fused_accumulation: bool = True
    bulk_overlap: bool = True
    split_gate: bool = False
    keeps_gathered: bool = False
    copies_sharded: bool = False
    recompute_half: bool = False
    gradient_bytes: int | None = None
    half_gradients: bool = False
    whole_sums: bool = False
    gathered_loss: bool = False
    blocking_pipeline: bool = False

    @property
    def target(self) -> Target:
        """What decides about the memory of its kernels, on a GPU."""
        return Target(cpu=False, fused=self.fused_norm and self.fused_pointwise and self.fused_loss)
