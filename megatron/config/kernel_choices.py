"""How the operations of the model are computed, as a part of its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import flag, on_by_default


@dataclass(frozen=True, kw_only=True)
class KernelChoices:
    """Fields of ModelConfig that choose kernels. All kernels compute the same function up to rounding."""

    attention_backend: str = flag(
        "auto",
        "attention kernel: auto takes the first that can run of FlashAttention-3, cuDNN, FlashAttention-2, torch's "
        "memory-efficient one and plain torch; flash = FlashAttention, fused = cuDNN, unfused (or local) = plain "
        "torch. One that is named and cannot run on a GPU is refused",
        choices=("auto", "flash", "fused", "unfused"),
    )
    transformer_impl: str = flag(
        "local",
        "kernels of linear layers, norms, activations and attention: our own, or on CUDA those of Transformer Engine, "
        "which has to be installed then. A CPU always takes local",
        choices=("local", "transformer_engine"),
    )
    batch_invariant_mode: bool = flag(
        False,
        "compute a token's numbers independently of the batch, of padding, of packing and of decoding one token at a "
        "time, so that generation reports the log-probabilities of training bit for bit; slower",
    )
    gradient_accumulation_fusion: bool = on_by_default(
        when_off="do not add weight gradients to the fp32 main gradient inside the GEMM; add them after it",
    )
    persist_layer_norm: bool = on_by_default(
        when_off="norms in several kernels of torch, not in one of Triton where it runs",
    )
    bias_swiglu_fusion: bool = on_by_default(
        when_off="gated activations (SwiGLU, GEGLU) in several kernels of torch, not in one of Triton where it runs",
    )
    apply_rope_fusion: bool = on_by_default(
        when_off="the rotation of queries and keys in several kernels of torch, not in one of Triton where it runs",
        name="--no-rope-fusion",
    )
