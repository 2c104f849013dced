"""Learning from preferences: DPO's own gradient, and under every layout the losses and weights of one process."""

import contextlib
import functools
import json
import math
import random

import pytest
import torch
import torch.nn.functional as F

from megatron.base.errors import DataError
from megatron.rl.main import build
from megatron.rl.preferences import PREFERENCE_LOSSES
from megatron.training.checkpoint import save_checkpoint
from tests import pool
from tests.parallel.rl_runs import CPU, EXPERTS, HOST, MODEL, ZERO_3, read_run
from tests.parallel.strategies import boxes_of, whole
from tests.unit.models.builds import assert_gradients, backward, gradients, losses

LIMIT = 1e-5  # other layouts: products of other shapes, sums in another order
STEPS, PAIRS = 4, 12
# The update is linear in the gradient, so that weights differ by as little as gradients do.
TRAINING = "--global-batch-size 4 --optimizer sgd --lr 0.3 --clip-grad 0 --weight-decay 0 --lr-decay-style constant"
SMOOTHED = "--dpo-label-smoothing 0.1 --dpo-sft-coefficient 0.5 --dpo-beta 0.5"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file of pairs, whose answers have other lengths: two or three of them fit into a row."""
    draw = random.Random(3)

    def ids(least, most):
        return " ".join(str(draw.randrange(62)) for _ in range(draw.randint(least, most)))

    path = tmp_path_factory.mktemp("preferences") / "pairs.jsonl"
    rows = ({"prompt": ids(1, 8), "chosen": ids(1, 24), "rejected": ids(1, 24)} for _ in range(PAIRS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make(size, data, words):
    run, groups = read_run(size, f"{MODEL} {TRAINING} --preference-data {data} {words}")
    trainer = build(run, groups, CPU)
    trainer.model.train()
    return trainer


def figures(trainer, steps=STEPS):
    """(figures of each step, losses of tokens, gradient norms, weights of this rank)"""
    reports = [trainer.train_step() for _ in range(steps)]
    trainer.data_parallel.synchronize()
    return (
        [report.numbers for report in trainer.readers.train.reports],
        [report.loss for report in reports],
        [report.grad_norm for report in reports],
        boxes_of(trainer.data_parallel),
    )


def learned(rank, size, data, words):
    return figures(make(size, data, words))


@functools.cache
def expected(data, words):
    return pool.run(1, learned, data, words)[0]


def assert_same(ranks, alone):
    numbers, token_losses, norms, weights = alone
    for rank_numbers, rank_losses, rank_norms, _ in ranks:
        for step, reference in zip(rank_numbers, numbers, strict=True):
            assert step == pytest.approx(reference, rel=LIMIT, abs=LIMIT)
        assert rank_losses == pytest.approx(token_losses, rel=LIMIT)
        assert rank_norms == pytest.approx(norms, rel=1e-4)
    # Differences of a step's gradient add up over the steps.
    single, joined = whole([weights]), whole([of_rank for *_, of_rank in ranks])
    for name, tensor in single.items():
        assert float((joined[name] - tensor).abs().max()) <= 5 * LIMIT * float(tensor.abs().max()), name


@pytest.mark.parametrize(
    ("words", "size", "layout"),
    [
        ("", 2, ""),
        pytest.param("", 1, "--micro-batch-size 4", marks=pytest.mark.slow),
        ("", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("", 2, "--pipeline-model-parallel-size 2"),
        pytest.param(
            "", 2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", marks=pytest.mark.slow
        ),
        ("", 2, "--context-parallel-size 2"),
        pytest.param(
            "",
            2,
            "--data-parallel-sharding-strategy optim_grads --overlap-param-gather --overlap-grad-reduce",
            marks=pytest.mark.slow,
        ),
        pytest.param(EXPERTS, 2, "--expert-model-parallel-size 2", marks=pytest.mark.slow),
        (f"--dpo-loss-type ipo {SMOOTHED}", 2, "--use-distributed-optimizer --micro-batch-size 2"),
        (f"--dpo-loss-type sigmoid_norm {SMOOTHED}", 4, "--tensor-model-parallel-size 2 --context-parallel-size 2"),
    ],
)
def test_the_layout_changes_nothing(data, words, size, layout):
    alone = expected(data, words)
    assert alone[0][0]["margin"] == 0 and alone[0][-1]["margin"] != 0, "the policy leaves the reference"
    assert_same(pool.run(size, learned, data, f"{words} {layout}"), alone)


def both_gradients(rank, size, data, words):
    """(the gradient of a step, its loss in the log, DPO's gradient, DPO's loss) of a policy that is not the
    reference."""
    results = []
    for by_hand in (False, True):
        trainer = make(size, data, words)
        reader, config = trainer.readers.train, trainer.run.rl
        pairs = reader._pairs.batch(0, 4)

        def answer_logs(answer, trainer=trainer):
            ids = torch.tensor([[*answer.prompt_ids, *answer.ids]])
            return -losses(trainer.model, ids)[0, len(answer.prompt_ids) - 1 :]

        with torch.no_grad():
            reference = [[answer_logs(answer) for answer in (pair.chosen, pair.rejected)] for pair in pairs]
            for number, parameter in enumerate(trainer.parameters.values()):
                generator = torch.Generator().manual_seed(number)
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        if by_hand:
            total = 0.0
            for pair, (chosen_before, rejected_before) in zip(pairs, reference, strict=True):
                chosen, rejected = answer_logs(pair.chosen), answer_logs(pair.rejected)
                total += dpo(chosen, rejected, chosen_before, rejected_before, config) / len(pairs)
            backward(trainer.data_parallel, total)
            loss = total.item()
        else:
            trainer.step.forward_backward(reader.read(4))
            loss = reader.reports[0].numbers["loss"]
        results += [gradients(trainer.data_parallel), loss]
    return results


def dpo(chosen, rejected, chosen_before, rejected_before, config):
    """The loss of a pair as its paper writes it, of log-probabilities of the tokens of both answers."""
    means = PREFERENCE_LOSSES[config.dpo_loss_type].is_length_normalized
    chosen_ratio, rejected_ratio = (chosen - chosen_before).sum(), (rejected - rejected_before).sum()
    if means:
        chosen_ratio, rejected_ratio = chosen_ratio / len(chosen), rejected_ratio / len(rejected)
    margin, beta = chosen_ratio - rejected_ratio, config.dpo_beta
    if config.dpo_loss_type == "ipo":
        right, wrong = (margin - 1 / (2 * beta)) ** 2, (-margin - 1 / (2 * beta)) ** 2
    else:
        right, wrong = -F.logsigmoid(beta * margin), -F.logsigmoid(-beta * margin)
    smoothing = config.dpo_label_smoothing
    return (1 - smoothing) * right + smoothing * wrong - config.dpo_sft_coefficient * chosen.mean()


@pytest.mark.parametrize("words", ["", f"--dpo-loss-type sigmoid_norm {SMOOTHED}", "--dpo-loss-type ipo"])
def test_the_gradient_is_that_of_the_objective(data, words):
    gradient, loss, by_hand, loss_by_hand = pool.run(1, both_gradients, data, words)[0]
    assert loss == pytest.approx(loss_by_hand, rel=LIMIT)
    assert_gradients(gradient, by_hand, LIMIT)


def evaluated(rank, size, data, held_out, words):
    """Figures of held-out pairs before two steps and behind them, and those of the steps."""
    trainer = make(size, data, f"{words} --eval-preference-data {held_out}")
    reader = trainer.readers.train
    before = reader.evaluate()
    trainer.train_step()
    trainer.train_step()
    return before, reader.evaluate(), [report.numbers for report in reader.reports]


def test_held_out_pairs_are_evaluated_under_every_layout(data, tmp_path):
    """Ten pairs in batches of eight: in the second one two of four replicas have no pair."""
    words, held_out = "--global-batch-size 8", tmp_path / "held_out.jsonl"
    with open(data) as pairs:
        held_out.write_text("".join(pairs.readlines()[:10]))
    before, behind, _ = pool.run(1, evaluated, data, held_out, words)[0]
    assert before == pytest.approx({"loss": math.log(2), "chosen": 0, "rejected": 0, "margin": 0, "accuracy": 0})
    assert behind["loss"] < before["loss"] and behind["margin"] == pytest.approx(behind["chosen"] - behind["rejected"])
    for size, layout in ((2, "--tensor-model-parallel-size 2"), (4, "")):
        for _, figures_of_rank, _ in pool.run(size, evaluated, data, held_out, f"{words} {layout}"):
            assert figures_of_rank == pytest.approx(behind, rel=1e-4, abs=LIMIT)


def test_an_evaluation_has_the_figures_of_a_step_and_changes_nothing(data):
    """All pairs are those of one step, whose figures are those under the weights before it."""
    _, behind, numbers = pool.run(1, evaluated, data, data, "--global-batch-size 12")[0]
    of_steps = pool.run(1, learned, data, "--global-batch-size 12")[0][0]
    assert numbers == of_steps[:2] and behind == pytest.approx(of_steps[2], rel=LIMIT, abs=LIMIT)


def with_a_file(rank, size, data, words):
    """As `learned`, and the figures of an evaluation."""
    trainer = make(size, data, f"{words} --eval-preference-data {data}")
    result = figures(trainer)
    assert trainer.readers.train._reference is None
    return *result, trainer.readers.train.evaluate()


def refusal(rank, size, data, words):
    with pytest.raises(DataError) as error:
        make(size, data, words)
    return str(error.value)


def test_the_reference_may_be_in_a_file(data, tmp_path):
    """Written by one process, read by two, and by a run that continues; the figures are those without a file."""
    file, saved = tmp_path / "new" / "reference.npz", tmp_path / "run"
    words = f"--precompute-ref-log-probs {file} --save {saved} --save-interval 9"
    alone = expected(data, "")
    written = pool.run(1, with_a_file, data, words)[0]
    assert_same([written[:4]], alone)
    content = file.read_bytes()
    ranks = pool.run(2, with_a_file, data, words)
    assert_same([of_rank[:4] for of_rank in ranks], alone)
    assert all(of_rank[4] == pytest.approx(written[4], rel=1e-4, abs=LIMIT) for of_rank in ranks)
    assert file.read_bytes() == content and not list(file.parent.glob("*.partial"))
    # Another model, and other pairs.
    words = f"--precompute-ref-log-probs {file} --eval-preference-data {data}"
    assert "is of another reference" in pool.run(2, refusal, data, f"{words} --seed 9 --init-method-std 0.2")[0]
    assert "of other pairs" in pool.run(1, refusal, data, f"--precompute-ref-log-probs {file}")[0]
    file.write_bytes(content[:50])
    assert "cannot be read" in pool.run(1, refusal, data, words)[0]


def test_a_run_that_continues_computes_the_file_of_its_first_weights(data, tmp_path):
    file, saved = tmp_path / "reference.npz", tmp_path / "run"
    words = f"--precompute-ref-log-probs {file}"
    alone = pool.run(1, continued, data, words, saved)[0]
    first = file.read_bytes()
    file.unlink()
    pool.run(1, learned, data, f"{words} --save {saved} --save-interval 2 --load {saved} --train-iters 6")
    assert file.read_bytes() == first
    for step, numbers in zip(alone[0], expected(data, "")[0], strict=True):
        assert step == pytest.approx(numbers, rel=LIMIT, abs=LIMIT)


class WholeCopy:
    """A reference that copies all parameters, those that are not trained, too."""

    def __init__(self, trainer):
        self._parameters = trainer.parameters
        self._weights = self._copies()

    def _copies(self):
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @contextlib.contextmanager
    def in_place(self):
        current = self._copies()
        for weights in (self._weights, current):
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(weights[name])
            if weights is not current:
                yield


def save_base(rank, size, data, folder):
    save_checkpoint(make(size, data, f"--save {folder} --save-interval 2"))


def adapted(rank, size, data, words, in_full):
    """As `learned`, the elements that the reference copies, and those that are trained, and all."""
    trainer = make(size, data, words)
    reader = trainer.readers.train
    copied = sum(weights.numel() for weights in reader._reference._weights)
    if in_full:
        reader._reference = WholeCopy(trainer)
    parameters = trainer.parameters.values()
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return figures(trainer), (copied, trained, sum(parameter.numel() for parameter in parameters))


def test_the_reference_of_adapters_is_the_model_without_training(data, tmp_path):
    """Only adapters are exchanged."""
    pool.run(1, save_base, data, tmp_path)
    words = f"--load {tmp_path} --finetune --lora-rank 4 --lora-alpha 8"
    (alone, (copied, trained, all_elements)), *_ = pool.run(1, adapted, data, words, True)
    assert trained <= copied < trained + 64 * 100 < all_elements, "with the padding of buckets"
    assert alone[0][-1]["margin"] > 0
    tp = "--tensor-model-parallel-size 2 --sequence-parallel"
    for size, layout in ((1, ""), (2, tp)):
        ranks = pool.run(size, adapted, data, f"{words} {layout}", False)
        assert_same([of_rank for of_rank, _ in ranks], alone)


def continued(rank, size, data, words, folder):
    """Two steps and a save, then two more of a run that continues."""
    words += f" --save {folder} --save-interval 2"
    trainer = make(size, data, words)
    begun = figures(trainer, 2)
    save_checkpoint(trainer)
    ended = figures(make(size, data, f"{words} --load {folder}"), 2)
    return begun[0] + ended[0], begun[1] + ended[1], begun[2] + ended[2], ended[3]


@pytest.mark.parametrize(
    ("size", "begins"),
    [
        (1, "seed"),
        (2, "checkpoint"),
        (2, "sharded"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "seed"), (1, "checkpoint"))),
        *(pytest.param(size, "adapters", marks=pytest.mark.slow) for size in (1, 2)),
    ],
)
def test_a_continued_run_reads_on(data, tmp_path, size, begins):
    """It has the next pairs, and compares with the weights with which the first run began."""
    words, layout = "", f"{ZERO_3} {HOST}" if begins == "sharded" else ""
    if begins in ("checkpoint", "adapters"):
        pool.run(1, save_base, data, tmp_path / "base")
        words = f"--pretrained-checkpoint {tmp_path / 'base'} {'--lora-rank 4' if begins == 'adapters' else ''}"
    # Another seed: these weights are those of the file.
    words += " --seed 5" if begins == "checkpoint" else ""
    alone = pool.run(1, learned, data, f"{words} --save {tmp_path / 'none'} --save-interval 9")[0]
    assert_same(pool.run(size, continued, data, f"{words} {layout}", tmp_path / "run"), alone)
