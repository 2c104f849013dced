"""Small runs of every kind of model, for tests of the search."""

import random

from megatron.command_line.read import parse
from megatron.config.run import RunConfig

WORLD = 16
EVERY_RUN = (
    "--seq-length 256 --global-batch-size 96 --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 1000"
)
TIED = "--hidden-size 96 --num-attention-heads 12 --num-layers 5"
LLAMA = "--preset llama-tiny"
RUNS = {
    "grouped queries": LLAMA,
    "tied embeddings, odd layers": TIED,
    "experts": "--preset moe-tiny",
    "experts in some layers, shared": (
        "--preset moe-tiny --moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 128 --num-experts 6"
    ),
    "adapters": f"{LLAMA} --lora-rank 4 --load x",
    "fp8": f"{LLAMA} --bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "captured layers": f"{LLAMA} --bf16 --cuda-graph-impl local",
    "bf16 state": f"{LLAMA} --bf16 --use-precision-aware-optimizer --main-params-dtype bf16",
    "state that moves": f"{LLAMA} --bf16 --offload-optimizer-states",
    "chosen by measuring": f"{LLAMA} --recompute-policy balanced --activation-memory-budget 0.5",
    "layers in host memory": f"{LLAMA} --cpu-offloading --cpu-offloading-num-layers 1",
    "parts in host memory": f"{LLAMA} --fine-grained-activation-offloading --offload-modules core_attn mlp_act",
    "chunks of offload": f"{LLAMA} --optimizer-offload-chunk-size 64",
    "uneven ranks": f"{LLAMA} --decoder-last-pipeline-num-layers 0",
    "written stages": f"{LLAMA} --pipeline-model-parallel-layout Et|tt|tt|tL",
    "strict": f"{LLAMA} --strict-flags --no-overlap-p2p-communication",
    "tensor parallelism without gathers": f"{LLAMA} --tp-comm-overlap --no-tp-comm-overlap-rs",
    "a growing batch": f"{LLAMA} --rampup-batch-size 48 24 960",
}
# Values that raw products are drawn from. Where a value of another axis makes several of them one run, that one is
# always among them: see `some_choices`.
VALUES = {
    "tp": (1, 2, 3, 4),
    "sequence_parallel": (False, True),
    "tp_overlap": (False, True),
    "cp": (1, 2, 4),
    "cp_kind": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "cp_inner": (1, 2, 4),
    "pp": (1, 2, 3, 4),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"),
    "virtual_stages": (1, 2, 3),
    "group": (0, 2, 3, 4, 6),
    "uneven_ends": (False, True),
    "micro_batch": (1, 2, 4),
    "ep": (1, 2, 4),
    "etp": (1, 2),
    "sharding": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "reduce_mode": ("last-microbatch", "every-microbatch", "auto"),
    "dp_overlap": (False, True),
    "instances": (1, 2, 4),
    "recompute": ("none", "norm+mlp_act", "moe_act", "core_attn", "mlp", "full", "full:1", "full:4", "full/2"),
    "offload": (0.0, 0.5, 1.0),
    "optimizer_offload": (0.0, 0.5, 1.0),
}
_ALWAYS = {
    "cp_kind": ("p2p", "a2a"),
    "schedule": ("1f1b",),
    "virtual_stages": (1, 2),
    "reduce_mode": ("last-microbatch", "every-microbatch"),
    "recompute": ("full",),
}


def run_of(flags: str) -> RunConfig:
    """Returns a run with these flags and those that every run needs."""
    return parse(f"{flags} {EVERY_RUN}".split(), description="")


def some_choices(draw: random.Random, most: int) -> dict[str, tuple]:
    """Returns some values of every axis, with a product of `most` at most."""
    chosen = {axis: _ALWAYS.get(axis) or (_base(draw, values),) for axis, values in VALUES.items()}
    product = 1
    for values in chosen.values():
        product *= len(values)
    while True:
        axis = draw.choice(list(VALUES))
        left = [value for value in VALUES[axis] if value not in chosen[axis]]
        if not left:
            continue
        product = product // len(chosen[axis]) * (len(chosen[axis]) + 1)
        if product > most:
            return chosen
        chosen[axis] = (*chosen[axis], draw.choice(left))


def _base(draw: random.Random, values: tuple) -> object:
    """Mostly the value of the plainest layout, so that many of the product are accepted."""
    return values[0] if draw.random() < 0.85 else draw.choice(values)
