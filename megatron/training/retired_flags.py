"""Megatron-LM's flags that this tree does not take, each with what to do instead."""

from __future__ import annotations

_ALWAYS = "is always on here; remove it"
_LATER = "is not available yet; remove it"
_NO_KERNEL = "chooses a fused kernel that does not exist here; remove it"
_ONE_FORMAT = "is not needed: there is one checkpoint format and it loads under any layout; remove it"
_EVENTS = "is not needed: --tensorboard-dir writes everything that is logged; remove it"

ADVICE: dict[str, str] = {
    # Renamed.
    "--use-flash-attn": "is now --attention-backend flash",
    "--use-rotary-position-embeddings": "is now --position-embedding-type rope",
    "--no-position-embedding": "is now --position-embedding-type none; with rope just remove it",
    "--batch-size": "is now --micro-batch-size",
    "--warmup": "is now --lr-warmup-fraction",
    "--model-parallel-size": "is now --tensor-model-parallel-size",
    "--encoder-num-layers": "is now --num-layers",
    "--decoder-num-layers": "is now --num-layers",
    "--encoder-seq-length": "is now --seq-length",
    "--decoder-seq-length": "is now --seq-length",
    "--padded-vocab-size": "is derived: give --vocab-size and --make-vocab-size-divisible-by",
    "--save-retain-interval": "has another meaning here: --save-retain N keeps the N newest checkpoints",
    "--rotary-scaling-factor": "is now --rope-scaling-factor, with --position-embedding-type yarn",
    "--patch-tokenizer-type": "is now --tokenizer-type HuggingFaceTokenizer",
    "--extra-vocab-size": "is derived from the tokenizer; remove it, or give --vocab-size",
    "--checkpoint-activations": "is now --recompute-granularity full, with --recompute-method and --recompute-num-layers",
    # What this tree always does.
    "--use-mcore-models": _ALWAYS,
    "--no-mmap-bin-files": _ALWAYS,
    "--exit-signal-handler": "is always on here; remove it, or give --no-exit-signal-handler to turn it off",
    "--accumulate-allreduce-grads-in-fp32": _ALWAYS,
    "--attention-softmax-in-fp32": _ALWAYS,
    "--ckpt-fully-parallel-save": _ALWAYS,
    "--no-create-attention-mask-in-dataloader": "is not needed: no mask is built there; remove it",
    "--use-cpu-initialization": "is not needed: initial weights do not depend on the device; remove it",
    "--te-rng-tracker": "is not needed: random state does not depend on the layer implementation; remove it",
    "--use-tp-pp-dp-mapping": "is not available: ranks are ordered tp, cp, dp, pp; remove it",
    "--lazy-mpu-init": "is not needed; remove it",
    "--last-bucket-split-count": "is not needed: buckets are small enough; give a smaller --reduce-bucket-size",
    "--verify-grad-order": "is not needed: buckets are reduced in one fixed order; remove it",
    "--overlap-param-gather-with-optimizer-step": "is what --overlap-param-gather does; give that",
    "--overlap-p2p-communication": "is on by default: remove it",
    "--overlap-p2p-communication-warmup-flush": "is part of the overlap, which is on by default: remove it",
    "--no-align-grad-reduce": "is not available: a stage reduces its gradients when its own backward ends; remove it",
    "--distributed-checkpointing": _ONE_FORMAT,
    "--disable-gloo-process-groups": "is not needed: --distributed-backend names the only backend; remove it",
    "--local-rank": "is not needed: torchrun sets LOCAL_RANK; remove it",
    "--local_rank": "is not needed: torchrun sets LOCAL_RANK; remove it",
    "--no-async-tensor-model-parallel-allreduce": "is now --no-tp-comm-bulk-wgrad",
    "--overlap-sp-ag": "is now --tp-comm-overlap",
    "--overlap-sp-rs": "is now --tp-comm-overlap",
    "--tp-comm-overlap-cfg": "is not needed: pieces are cut by the number of rows; remove it",
    "--tp-comm-overlap-rs-dgrad": "is not available: that reduce-scatter runs beside the weight gradient; remove it",
    "--tp-comm-bootstrap-backend": "is not needed: no other backend is started; remove it",
    "--use-dist-ckpt": _ONE_FORMAT,
    "--dist-ckpt-format": _ONE_FORMAT,
    "--ckpt-format": _ONE_FORMAT,
    "--auto-detect-ckpt-format": _ONE_FORMAT,
    "--log-timers-to-tensorboard": _EVENTS,
    "--log-validation-ppl-to-tensorboard": _EVENTS,
    "--log-memory-to-tensorboard": _EVENTS,
    "--log-world-size-to-tensorboard": _EVENTS,
    "--log-learning-rate-to-tensorboard": _EVENTS,
    "--log-batch-size-to-tensorboard": _EVENTS,
    "--tensorboard-queue-size": _EVENTS,
    "--no-log-loss-scale-to-tensorboard": _EVENTS,
    "--no-one-logger": "is not needed: there is no such logger; remove it",
    # Fused kernels that are chosen by flags there.
    "--no-masked-softmax-fusion": _NO_KERNEL,
    "--no-bias-swiglu-fusion": _NO_KERNEL,
    "--no-bias-dropout-fusion": _NO_KERNEL,
    "--no-rope-fusion": _NO_KERNEL,
    "--no-persist-layer-norm": _NO_KERNEL,
    "--cross-entropy-loss-fusion": _NO_KERNEL,
    "--cross-entropy-fusion-impl": _NO_KERNEL,
    "--apply-query-key-layer-scaling": "is not available: softmax is computed in fp32, which needs no such scaling",
    # Not here yet, by name.
    "--use-megatron-fsdp": "is now --data-parallel-sharding-strategy optim_grads_params",
    "--use-torch-fsdp2": "is now --data-parallel-sharding-strategy optim_grads_params",
    "--num-experts": "is not available yet (mixture of experts); remove it",
    "--multi-latent-attention": "is not available yet; remove it",
    "--distribute-saved-activations": "is what --sequence-parallel does; give that",
    "--cpu-offloading-activations": "is what --cpu-offloading does: remove it",
    "--no-cpu-offloading-activations": "is what leaving out --cpu-offloading does: give --cpu-offloading-weights alone",
    "--cpu-offloading-double-buffering": "is not needed: one bucket of weights travels while another is used; remove it",
    "--activation-offload-fraction": "is now --pipeline-offload-ratio",
    "--min-offloaded-tensor-size": "is not needed: large tensors go first, and a ratio is met to the byte; remove it",
    "--use-torch-optimizer-for-cpu-offload": "is not needed: torch's kernel is used where it is the fastest; remove it",
    "--no-pin-cpu-grads": "is not available: copies beside compute need pinned memory; remove it",
    "--no-pin-cpu-params": "is not available: copies beside compute need pinned memory; remove it",
    "--main-grads-dtype": "is not available: gradients are kept in fp32; remove it",
    "--sft-tokenizer-prompt-format": "is not needed: tools/preprocess_sft.py takes the tokenizer's template; remove it",
    "--spec": "is not available: layers are chosen by plain flags; remove it",
    "--yaml-cfg": "is not available: flags are the only configuration; write them out",
    "--rotary-interleaved": _LATER,
    "--decoupled-lr": _LATER,
    "--decoupled-min-lr": _LATER,
    "--async-save": _LATER,
    "--profile": "is now --profile-timeline PATH",
}

_FAMILIES: tuple[tuple[str, str], ...] = (
    ("--moe-", "mixture of experts"),
    ("--fp8-", "FP8"),
    ("--fp4-", "FP4"),
    ("--overlap-moe-", "mixture of experts"),
    ("--mtp-", "multi-token prediction"),
    ("--muon-", "the Muon optimizer"),
    ("--non-persistent-", "local checkpoints"),
    ("--profile-ranks", "torch's profiler"),
    ("--cuda-graph-", "CUDA graphs"),
    ("--inference-", "inference"),
    ("--rerun-", "the rerun engine"),
)


def advice(flag: str) -> str | None:
    """What to do about one of Megatron-LM's flags ("is now --x", "is not available yet ..."), or None if unknown."""
    if flag in ADVICE:
        return ADVICE[flag]
    family = next((what for prefix, what in _FAMILIES if flag.startswith(prefix)), None)
    return f"is not available yet ({family}); remove it" if family else None
