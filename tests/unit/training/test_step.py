"""The objective of a step and its gradient: as written down, whatever the microbatches."""

import math

import pytest
import torch

from megatron.base.errors import UserError
from megatron.base.heartbeat import Heartbeat
from megatron.config.data import DataConfig
from megatron.core.groups import Group
from megatron.training.batch import Batch, make_batch
from megatron.training.logging.timers import Timers
from megatron.training.step import Objective, TrainStep, check_same_parameters, evaluate, token_weights
from tests import pool
from tests.unit.models.builds import (
    GPT,
    LLAMA,
    assert_gradients,
    gradients,
    losses,
    make_data_parallel,
    make_ids,
    make_model,
    make_optimizer,
    take_step,
)

S, EOD = 12, 5
DATA = DataConfig(eod_mask_loss=True)


def ids():
    """Six samples with very different numbers of masked tokens; the last has no other."""
    found = make_ids(6, S)
    found[0, 2:9] = EOD
    found[3, 1:3] = EOD
    found[5] = EOD
    return found


def batches(sizes):
    return [make_batch(part, EOD, DATA) for part in ids().split(sizes)]


def setting(fields=LLAMA, *, per_token=False, fp16=False, count_zeros=False, **optimizer):
    groups = pool.groups()
    model = make_model(fields, groups, spread=0.1)
    data_parallel = make_data_parallel(model, groups)
    owner = make_optimizer(data_parallel, groups, fp16=fp16, **optimizer)
    timers = Timers(0, lambda: None)
    step = TrainStep(model, data_parallel, owner, groups, timers, per_token=per_token, count_zeros=count_zeros)
    return model, data_parallel, owner, step


def direct(model, per_token):
    """The formulas of the note in step.py, over the whole batch at once."""
    per = losses(model, ids())
    mask = ids()[:, :-1] != EOD
    if per_token:
        return (per * mask).sum() / mask.sum()
    sample = (per * mask).sum(1) / mask.sum(1).clamp(min=1)
    return sample.sum() / len(sample)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("sizes", [[6], [1] * 6, [4, 2], [2, 2, 2], [1, 5]])
def test_objective_and_gradient(per_token, sizes):
    _, data_parallel, _, step = setting(per_token=per_token)
    loss = step.forward_backward(batches(sizes)).read()
    plain = make_model(LLAMA, pool.groups(), spread=0.1)
    expected = direct(plain, per_token)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_gradients(gradients(data_parallel), {n: p.grad for n, p in plain.named_parameters()})


def read_mean(step, parts):
    (mean,) = Objective.means(step.forward_backward(parts).numbers.tolist())
    return mean


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("sizes", [[6], [1] * 6, [1, 5]])
def test_the_printed_loss_is_the_mean_per_label(per_token, sizes):
    """Samples without any label do not dilute it, whatever the weights of the objective are."""
    _, _, _, step = setting(per_token=per_token)
    model = make_model(LLAMA, pool.groups(), spread=0.1)
    assert read_mean(step, batches(sizes)) == pytest.approx(direct(model, True).item(), rel=1e-6)


def test_a_step_without_labels_has_no_loss():
    _, _, _, step = setting()
    batch = make_batch(torch.full((2, S + 1), EOD), EOD, DATA)
    assert read_mean(step, [batch]) is None


def test_the_two_weightings_differ():
    model = make_model(LLAMA, pool.groups())
    assert direct(model, True).item() != pytest.approx(direct(model, False).item(), rel=1e-3)


class TestWeights:
    def test_sum_to_one(self):
        """But for samples with nothing to learn, when every sample counts alike."""
        for sizes in ([6], [2, 4]):
            groups = pool.groups()
            assert float(sum(w.sum() for w in token_weights(batches(sizes), groups, True))) == pytest.approx(1.0)
            assert float(sum(w.sum() for w in token_weights(batches(sizes), groups, False))) == pytest.approx(5 / 6)

    def test_masked_tokens_weigh_nothing(self):
        for per_token in (True, False):
            for batch, weights in zip(batches([2, 4]), token_weights(batches([2, 4]), pool.groups(), per_token)):
                assert weights[~batch.loss_mask].eq(0).all() and weights[batch.loss_mask].gt(0).all()

    def test_nothing_to_learn_at_all(self):
        batch = make_batch(torch.full((2, S + 1), EOD), EOD, DATA)
        for per_token in (True, False):
            (weights,) = token_weights([batch], pool.groups(), per_token)
            assert weights.eq(0).all()


@pytest.mark.parametrize("scale", [2.0, 2.0**14])
def test_loss_scale(scale):
    """In the buckets it multiplies the gradient; the loss and the norm do not show it."""
    _, data_parallel, _, step = setting()
    plain_loss = step.forward_backward(batches([6])).read()
    plain = gradients(data_parallel)
    _, data_parallel, _, step = setting(fp16=True, loss_scale=scale)
    loss = step.forward_backward(batches([6])).read()
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert_gradients({name: g / scale for name, g in gradients(data_parallel).items()}, plain)


def test_a_whole_step():
    model, _, owner, step = setting(GPT, count_zeros=True)
    before = [p.detach().clone() for p in model.parameters()]
    loss, update = take_step(step, batches([3, 3]), 1e-2, 0.1)
    assert update.applied and update.grad_norm > 0 and update.num_zeros > 0 and owner.steps == 1
    assert all(not p.equal(old) for p, old in zip(model.parameters(), before, strict=True))
    again, _ = take_step(step, batches([3, 3]), 1e-2, 0.1)
    assert again < loss, "the same batch once more"


def test_norm_is_that_of_the_gradient():
    _, _, _, step = setting()
    _, update = take_step(step, batches([6]), 0.0, 0.0)
    plain = make_model(LLAMA, pool.groups(), spread=0.1)
    direct(plain, False).backward()
    assert update.grad_norm == pytest.approx(
        float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])), rel=1e-5
    )


class TestSameParameters:
    GROUP = Group("dp_cp", (1, 3, 5), 0, None, Heartbeat(1))

    def test_agreement(self):
        check_same_parameters([[], [], []], self.GROUP)
        check_same_parameters([["a", "b"]] * 3, self.GROUP)

    @pytest.mark.parametrize(
        ("without", "says"),
        [
            (
                [["a"], ["a"], ["a", "b"]],
                "parameter b got a gradient on rank 1 and none on rank 5 in the same step (1 ",
            ),
            (
                [["c", "d"], [], ["c", "d"]],
                "parameter c got a gradient on rank 3 and none on rank 1 in the same step (2 ",
            ),
        ],
    )
    def test_disagreement_names_parameter_and_ranks(self, without, says):
        with pytest.raises(UserError) as error:
            check_same_parameters(without, self.GROUP)
        assert str(error.value).startswith(says) and "requires_grad False" in str(error.value)


class TestEvaluate:
    def test_mean_over_tokens(self):
        model = make_model({**LLAMA, "hidden_dropout": 0.5}, pool.groups(), spread=0.1)
        parts = iter([batches([6])[:1], batches([2, 4])])
        loss = evaluate(model, lambda: next(parts), 2, pool.groups())
        assert loss == pytest.approx(direct(model.eval(), True).item(), rel=1e-5), "twice the same samples"

    @pytest.mark.parametrize("training", [True, False])
    def test_leaves_the_mode_and_no_gradient(self, training):
        model = make_model(LLAMA, pool.groups())
        model.train(training)
        evaluate(model, lambda: batches([6]), 1, pool.groups())
        assert model.training is training
        assert all(p.grad is None for p in model.parameters())

    def test_nothing_to_count(self):
        model = make_model(LLAMA, pool.groups())
        empty: list[Batch] = [make_batch(torch.full((1, S + 1), EOD), EOD, DATA)]
        assert math.isnan(evaluate(model, lambda: empty, 1, pool.groups()))
