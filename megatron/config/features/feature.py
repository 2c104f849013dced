"""A row of the start-up table, the facts that rows state, and flags that have no effect on the results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A feature as asked for and as in effect. `why` is empty if the run does what was requested."""

    name: str
    requested: str
    in_effect: str
    why: str


@dataclass(frozen=True)
class Note:
    """A flag that is accepted but not in effect: a row of the start-up table, and an error with --strict-flags."""

    flag: str
    requested: str  # the value on the command line
    in_effect: str  # the behaviour in effect instead
    why: str

    @property
    def refusal(self) -> str:
        """The error line with --strict-flags."""
        words = "" if self.requested == "on" else f" {self.requested}"
        return f"{self.flag}{words} is not in effect: {self.in_effect} ({self.why}), and --strict-flags refuses that"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about this machine and the objects that set-up has built."""

    device: str  # device type: "cpu" or "cuda"
    backend: str | None  # "nccl" or "gloo"; None in a world of one process
    attention_choice: str  # "kernel (why this one)", as kernels.choose words it
    block_choice: str  # "kernel (why this one)" of attention over blocks, under context parallelism
    fusion_missing: str | None  # why weight gradients are not accumulated inside the GEMM; None when they are
    grouped_missing: str | None  # why the experts' products are not one grouped product; None when they are
    experts_choice: str  # "the operations of experts that are in Triton (why not the others)"
    fused_choice: str  # "the operations that are fused (why not the others)", as kernels.fused words it
    layers_choice: str  # "whose kernels (why)", as kernels.choose words it
    upcast_products: bool  # the device is slow at products of the parameters' dtype, so they are taken in fp32
    separate_main_grads: bool  # the fp32 gradient buffer has another dtype than the parameters
    buckets: int  # gradient buckets of this rank
    shards: (
        int  # ranks that share the optimizer's state, and perhaps gradients and parameters; 1 when nothing is shared
    )
    tp_overlap: str  # how products and tensor-parallel communication are interleaved; "off" when they are not
    tp_overlap_why: str  # why not better; empty when it is the best there is, or was not asked for
    fp8_choice: str = ""  # "how FP8 products are taken (why not better)"; empty without FP8
    fp8_experts_choice: str = ""  # "how FP8 products of experts are taken (why not better)"; empty without experts
    recomputed: str = ""  # the recompute of this rank's layers, if they differ
    cpu_chunks: tuple[int, int] = (0, 0)  # chunks of optimizer state that the CPU updates, and all
    allocator: str = ""  # settings of torch's allocator on CUDA, from the environment; "" without CUDA
    deterministic: str = ""  # environment variables of --deterministic-mode on CUDA, with their values


def on_or_off(state: bool) -> str:
    """Returns the word for a feature that is asked for, or in effect, or not."""
    return "on" if state else "off"
