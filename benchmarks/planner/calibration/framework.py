"""The kernels and the communication of a framework that no flag of a run describes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.planner.time.hardware import BF16
from megatron.planner.time.software import Software
from megatron.spec.sizes import Target

# Kernels of attention: FlashAttention 3 or cuDNN 9; FlashAttention 2, which is slower on Hopper; FlashAttention 1;
# scaled_dot_product_attention of torch; separate products with a softmax in one kernel, or in plain torch.
FLASH_3, FLASH, FLASH_1, TORCH = "flash3", "flash", "flash1", "torch"
FUSED_SOFTMAX, UNFUSED = "fused softmax", "unfused"


@dataclass(frozen=True, kw_only=True)
class Framework:
    """Defaults are those of this project on a GPU.

    precision: of the products of linear layers. attention: one of the kernels above. fused_norm, fused_pointwise,
    fused_loss: norms; rotary embedding and activation; the loss are one kernel each. fused_accumulation: the product of
    a weight's gradient adds to its sum. split_gate: the two products of a gated activation are layers of their own,
    which communicate separately. keeps_gathered: with sequence parallelism the output of a norm is gathered once, for
    all layers that read it, and kept for backward. copies_sharded: the collectives of sharded parameters and gradients
    have buffers of their own. recompute_half: every second product of a layer, and all operations that are no products,
    are computed again. half_on_wire: gradients are sent in half precision, whatever the flags say. half_gradients:
    weight gradients are summed over microbatches in half precision. whole_sums: gradients are summed by an all-
    reduce between all replicas, with copies before and after it, although each needs only a slice. gathered_loss:
    the logits are gathered over tensor parallelism, and every rank computes the loss of all of them.
    whole_logits: forward computes the head and the loss, of all tokens at once. blocking_pipeline: ranks wait for
    messages between pipeline stages, whatever the flags say.
    """

    precision: str = BF16
    attention: str = FLASH_3
    fused_norm: bool = True
    fused_pointwise: bool = True
    fused_loss: bool = True
    fused_accumulation: bool = True
    split_gate: bool = False
    keeps_gathered: bool = False
    copies_sharded: bool = False
    recompute_half: bool = False
    half_on_wire: bool = False
    half_gradients: bool = False
    whole_sums: bool = False
    gathered_loss: bool = False
    whole_logits: bool = False
    blocking_pipeline: bool = False

    @property
    def software(self) -> Software:
        """The nearest kernels of this project, whose operations `as_framework` changes."""
        return Software(precision=self.precision, unfused_attention=self.attention in (FUSED_SOFTMAX, UNFUSED))

    @property
    def target(self) -> Target:
        """The device for the memory plan of the framework's kernels."""
        return Target(cpu=False, fused=self.fused_norm and self.fused_pointwise and self.fused_loss)
