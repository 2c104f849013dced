"""The experts of the sampler in training: other ones without --moe-enable-routing-replay, the same ones with it."""

import hashlib

import pytest
import torch

from megatron.training.routing_trace import RoutingTrace
from tests import pool
from tests.parallel.test_rollouts import CP, PP, TP, learned, make_learner

# Scores of many experts, some of which are close to each other in bf16.
CLOSE = """
    --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 32 --moe-router-load-balancing-type none
    --init-method-std 0.1 --bf16
"""
REPLAY = "--moe-enable-routing-replay"
SHORT = f"{CLOSE} {REPLAY} --num-layers 2 --rollout-max-response-len 6"
EP = "--expert-model-parallel-size 2"


def test_sampler_and_trainer_choose_other_experts_unless_they_are_replayed():
    (without,) = [numbers for _, _, numbers, *_ in pool.run(1, learned, CLOSE, 1)]
    (with_,) = [numbers for _, _, numbers, *_ in pool.run(1, learned, f"{CLOSE} {REPLAY}", 1)]
    assert 1e-3 < without[0]["routing flips"] < 1e-2
    assert with_[0]["routing flips"] == 0.0
    assert with_[0]["sampler-k3"] < without[0]["sampler-k3"] / 3
    assert with_[0]["largest difference"] < without[0]["largest difference"] / 3


def trained(rank, size, words):
    """(flips counted in each rollout, assignments in training steps that are not the sampler's, all assignments)"""
    trainer = make_learner(size, f"{SHORT} {words}")
    reader, trace = trainer.readers.train, RoutingTrace()
    trainer.step.features.experts.trace = trace
    steps, read = [], reader.read
    reader.read = lambda count: steps.append(read(count)) or steps[-1]
    reports = [trainer.train_step() for _ in range(2)]
    differing = total = 0
    for step, batches in enumerate(steps):
        for batch in batches:
            for row, tokens in enumerate(batch.tokens):
                sample = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
                for layer, experts in batch.experts.items():
                    chosen = trace.choices[step, sample, layer]
                    counted = batch.routed[row] & (chosen >= 0).all(1)  # of this rank's tokens
                    differing += int((chosen != experts[row])[counted].sum())
                    total += int(counted.sum()) * experts.shape[-1]
    assert all(report.grad_norm > 0 for report in reports)
    return [report.numbers["routing flips"] for report in reader.reports], differing, total


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, "--micro-batch-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        (2, f"{TP} {EP} --expert-tensor-parallel-size 1"),
        (2, f"{EP} --grpo-iterations 2 --grpo-kl-beta 0.1"),
        pytest.param(4, f"{PP} {CP} {EP}", marks=pytest.mark.slow),
        pytest.param(4, f"{PP} --use-distributed-optimizer {EP} --global-batch-size 4", marks=pytest.mark.slow),
    ],
)
def test_training_steps_take_the_experts_of_the_sampler(size, layout):
    """In every layout, also in a second step on the same answers, before which the router has changed."""
    ranks = pool.run(size, trained, layout)
    for flips, differing, total in ranks:
        assert set(flips) == {0.0} and differing == 0 and total > 0


def test_the_last_token_of_an_answer_goes_to_no_expert():
    """The sampler has not read it, and no log-probability depends on it."""
    routed, trained_on = pool.run(1, marks)[0]
    last = trained_on & ~torch.nn.functional.pad(trained_on[:, 1:], (0, 1))  # behind the last label of an answer
    assert int(last.sum()) == 8 and not torch.nn.functional.pad(last[:, :-1], (1, 0))[routed].any()
    assert routed[trained_on].all(), "the tokens whose labels are trained on were read"


def marks(rank, size):
    reader = make_learner(size, SHORT).readers.train
    batches = reader.read(8)
    return torch.cat([batch.routed for batch in batches]), torch.cat([batch.loss_mask for batch in batches])
