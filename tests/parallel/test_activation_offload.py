"""Activation offload changes no bit: losses and parameters of several steps, beside the same run without it."""

import dataclasses
import functools
import itertools

import pytest
import torch

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.rules.check import check
from megatron.tooling.layout_parity import reduced
from megatron.tooling.layouts import ParityLayout, under
from megatron.training.setup import build
from tests import pool
from tests.parallel.test_layout_parity import MODELS
from tests.unit.config.runs import make_run

OVERLAPPED = {"overlapped_distributed_optimizer": True}
OFFLOAD = {
    "none": {},
    "half": {"pipeline_offload_ratio": "0.5"},
    "all": {"pipeline_offload_ratio": "1"},
    "auto": {"pipeline_offload_ratio": "auto"},
    "layers": {"cpu_offloading": True, "cpu_offloading_num_layers": 2},
    "modules": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ("core_attn", "mlp_act", "qkv_linear"),
    },
}
RECOMPUTE = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "norm", "mlp_act")},
}
# A step leaves the next one weights, the optimizer's state and blocks of host memory, so a few steps show all.
STEPS, MANY_STEPS = 5, 20


@dataclasses.dataclass(frozen=True)
class Case:
    """layers: of the whole model; microbatches: a step."""

    layout: ParityLayout
    layers: int
    microbatches: int
    dropout: float
    steps: int = STEPS

    def __str__(self):
        return f"{self.layout}, {self.layers} layers, dropout {self.dropout}, {self.steps} steps"


def make(case, offload, recompute):
    model = "gpt" if case.layout.tp > 1 else "llama"
    run = reduced(make_run(**MODELS[model], **OVERLAPPED), case.steps)
    return dataclasses.replace(
        run,
        model=dataclasses.replace(
            run.model,
            num_layers=case.layers,
            hidden_size=32,
            kv_channels=8,
            ffn_hidden_size=32,
            hidden_dropout=case.dropout,
            attention_dropout=case.dropout,
        ),
        train=dataclasses.replace(run.train, global_batch_size=case.microbatches),
        activation_offload=ActivationOffloadConfig(**OFFLOAD[offload]),
        recompute=RecomputeConfig(**RECOMPUTE[recompute]),
    )


def trained(rank, size, run):
    """(losses, parameters as bytes, what was offloaded: bytes out, blocks made by the first step and by the last)."""
    parallel = run.parallel
    groups = pool.groups(
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        instances=1,
    )
    trainer = build(run, groups, torch.device("cpu"))
    losses, made = [], []
    for _ in range(run.train.train_iters):
        losses.append(trainer.train_step().loss)
        if trainer.step.features.offload is not None:
            made.append(trainer.step.features.offload.actions.pool.num_allocated)
    trainer.data_parallel.synchronize()
    content = [p.detach().numpy().tobytes() for _, p in sorted(trainer.parameters.items())]
    out = 0 if trainer.step.features.offload is None else trainer.step.features.offload.actions.offloaded_bytes
    return losses, content, out, made


@functools.cache
def results(case, offload="none", recompute="none"):
    """Of all ranks; a run that several tests compare with is made once."""
    run = under(make(case, offload, recompute), case.layout)
    check(run, case.layout.world_size)
    return pool.run(case.layout.world_size, trained, run)


ONE = Case(ParityLayout(1, 1), 5, 1, 0.1)
CHUNKS = ParityLayout(1, 1, pp=2, schedule="interleaved", chunks=2)
INTERLEAVED, THREE_A_CHUNK = Case(CHUNKS, 4, 4, 0.1), Case(CHUNKS, 12, 4, 0.1)
FOUR_STAGES = ParityLayout(1, 1, pp=4, schedule="1f1b")
# case, offload, ranks that have something to offload
CASES = [
    (ONE, "half", {0}),
    (ONE, "layers", {0}),
    (ONE, "modules", {0}),
    (Case(ParityLayout(2, 1, True), 3, 1, 0.1), "all", {0, 1}),
    (Case(ParityLayout(1, 1, cp=2), 3, 1, 0.0), "all", {0, 1}),
    (INTERLEAVED, "half", {0, 1}),
    (Case(ParityLayout(1, 1, pp=2, schedule="zb-v"), 4, 4, 0.1), "all", {0, 1}),
    (Case(FOUR_STAGES, 12, 4, 0.1, 4), "half", {0, 1, 2, 3}),
    (Case(ParityLayout(1, 1, pp=4, schedule="zb-h1"), 12, 6, 0.0, 4), "all", {0, 1, 2, 3}),
]
SLOW = [
    (Case(CHUNKS, 4, 4, 0.1, MANY_STEPS), "half", {0, 1}),
    (Case(ParityLayout(1, 1, pp=2, schedule="1f1b"), 8, 4, 0.0, MANY_STEPS), "all", {0, 1}),
    (Case(ParityLayout(2, 1, pp=2, schedule="gpipe"), 8, 4, 0.1, MANY_STEPS), "half", {0, 1, 2, 3}),
    (Case(FOUR_STAGES, 12, 4, 0.1, MANY_STEPS), "half", {0, 1, 2, 3}),
    (Case(FOUR_STAGES, 12, 4, 0.1, MANY_STEPS), "layers", {0, 1, 2, 3}),
    (Case(ParityLayout(1, 1, pp=4, schedule="zb-h1"), 12, 6, 0.0, MANY_STEPS), "all", {0, 1, 2, 3}),
    (Case(ParityLayout(1, 1, pp=4, schedule="zb-h1"), 12, 6, 0.0, MANY_STEPS), "modules", {0, 1, 2, 3}),
]


@pytest.mark.parametrize(
    ("case", "offload", "moving"), [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)], ids=str
)
def test_no_bit_changes(case, offload, moving):
    for rank, ((losses, content, *_), (other, others, out, made)) in enumerate(
        zip(results(case), results(case, offload), strict=True)
    ):
        assert len(set(losses)) == case.steps, "nothing was learned"
        assert other == losses
        assert others == content
        assert (out > 0) == (rank in moving)
        assert made[0] == made[-1], "host memory grows after the first step"


BESIDE = [*itertools.product([ONE], ["half", "layers"], ["full", "selective"]), (INTERLEAVED, "half", "full")]
BESIDE_SLOW = itertools.product([THREE_A_CHUNK], ["all", "layers"], ["full", "selective"])


@pytest.mark.parametrize(
    ("case", "offload", "recompute"),
    [*BESIDE, *(pytest.param(*each, marks=pytest.mark.slow) for each in BESIDE_SLOW)],
    ids=str,
)
def test_beside_recompute(case, offload, recompute):
    """What a checkpoint keeps, its input, moves; what the second run saves does not."""
    for (losses, content, *_), (other, others, out, _), (_, _, more, _) in zip(
        results(case), results(case, offload, recompute), results(case, offload), strict=True
    ):
        assert (other, others) == (losses, content)
        assert 0 < out < more


def test_auto_decides_after_the_second_step():
    for (losses, content, *_), (other, others, out, made) in zip(
        results(INTERLEAVED), results(INTERLEAVED, "auto"), strict=True
    ):
        assert (other, others) == (losses, content)
        assert made[1] == 1, "only the probe before"  # which is given back
        assert out >= 0
