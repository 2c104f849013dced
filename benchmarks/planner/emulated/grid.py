"""The models, layouts, hosts and links that are measured and predicted."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

RANKS = 4
SHARE = 0.4  # of a core that each rank has
RATES = (100.0, 300.0, 1000.0)  # Mbit/s; rising, because the memory of a connection only grows
# Steps of a run: one without limits, and at each rate one that is left out and two that count. Every second run
# has some more.
LEFT_OUT, COUNTED = 1, 2
STEPS = 1 + len(RATES) * (LEFT_OUT + COUNTED)
MORE_STEPS = 4
_TRAINING = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --mock-data --lr 1e-3 "
    "--lr-decay-style constant --log-interval 1 --eval-iters 0 --device cpu --distributed-timeout-minutes 2"
)
_SEVERAL = "--num-virtual-stages-per-pipeline-rank 2"
_OVERLAP = "--overlap-grad-reduce"
_BOTH = f"{_OVERLAP} --overlap-param-gather"
# Name -> flags. The world has 4 ranks; those that tp, cp and pp leave are replicas.
_DATA = {
    "dp": "--micro-batch-size 4",
    "dp overlap": f"--micro-batch-size 2 {_OVERLAP}",
    "zero-1": "--micro-batch-size 2 --data-parallel-sharding-strategy optim",
    "zero-1 overlap": f"--micro-batch-size 2 --data-parallel-sharding-strategy optim {_BOTH}",
    "zero-2": (
        "--micro-batch-size 2 --data-parallel-sharding-strategy optim_grads --grad-reduce-mode every-microbatch "
        f"{_BOTH}"
    ),
    "zero-3": f"--micro-batch-size 4 --data-parallel-sharding-strategy optim_grads_params {_BOTH}",
    "full recompute": (
        "--micro-batch-size 4 --data-parallel-sharding-strategy optim --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1"
    ),
}
_TENSOR = {
    "tp": "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "tp overlap": "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
}
_PIPELINE = {
    "gpipe": "--micro-batch-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule gpipe",
    "1f1b": "--micro-batch-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule 1f1b",
    "1f1b selective": (
        "--micro-batch-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule 1f1b "
        "--recompute-granularity selective --recompute-modules core_attn mlp_act"
    ),
    "interleaved": f"--micro-batch-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule interleaved {_SEVERAL}",
    "zb-h1": "--micro-batch-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
    "zb-v": f"--micro-batch-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-v {_SEVERAL}",
    "1f1b of 4": "--micro-batch-size 2 --pipeline-model-parallel-size 4 --pipeline-schedule 1f1b",
}
_CONTEXT = {
    f"cp {kind}": f"--micro-batch-size 2 --context-parallel-size 2 --cp-comm-type {kind}"
    for kind in ("p2p", "all_gather", "a2a")
}
_MIXED = {
    "tp and pp": (
        "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--pipeline-schedule 1f1b"
    )
}
LAYOUTS = _DATA | _TENSOR | _PIPELINE | _CONTEXT | _MIXED


@dataclass(frozen=True)
class Machine:
    """Hosts that share the ranks equally, and the rate of their links in Mbit/s in each direction."""

    hosts: int
    rate: float

    @property
    def ranks_per_host(self) -> int:
        """Ranks of one host."""
        return RANKS // self.hosts

    def host_of(self, rank: int) -> int:
        """Returns the host of a rank."""
        return rank // self.ranks_per_host


@dataclass(frozen=True)
class Model:
    """A small dense model, and the hosts on which it is trained."""

    name: str
    hosts: int
    shape: str

    @property
    def flags(self) -> list[str]:
        """Returns the flags of the model, its batch and its training, without those of a layout."""
        return shlex.split(f"{self.shape} {_TRAINING}")


MODELS = (
    Model(
        "narrow",
        2,
        "--num-layers 4 --hidden-size 192 --num-attention-heads 4 --ffn-hidden-size 512 --seq-length 192 --vocab-size "
        "1024 --global-batch-size 16",
    ),
    Model(
        "wide",
        4,
        "--num-layers 4 --hidden-size 320 --num-attention-heads 4 --ffn-hidden-size 896 --seq-length 96 "
        "--vocab-size 1024 --global-batch-size 16",
    ),
)


@dataclass(frozen=True)
class Case:
    """A layout of a model."""

    model: Model
    layout: str

    @property
    def name(self) -> str:
        """Returns what tells it apart."""
        return f"{self.model.name}: {self.layout}"

    def flags(self, steps: int = STEPS) -> list[str]:
        """Returns the flags of a run."""
        return [*self.model.flags, *shlex.split(LAYOUTS[self.layout]), "--train-iters", str(steps)]


def cases(chosen: Iterable[str] = ()) -> list[Case]:
    """Returns all layouts of all models, or those whose name contains one of `chosen`."""
    words = list(chosen)
    every = [Case(model, layout) for model in MODELS for layout in LAYOUTS]
    return [case for case in every if not words or any(word in case.name for word in words)]
