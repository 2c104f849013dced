"""Flags of other programs that depend on each other, and the run that they ask for together."""

import pytest

from megatron.command_line.read import read, words_without

MODEL = "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1"
EXPERTS = f"{MODEL} --num-experts 8"
BATCH = f"{MODEL} --global-batch-size 4"


def fields(words):
    """The values that the words set."""
    line = read(words.split())
    assert not line.problems, line.problems
    run = line.run
    parts = (run.model, run.parallel, run.train, run.optimizer)
    return {name: value for part in parts for name, value in vars(part).items() if name in run.given}


@pytest.mark.parametrize(
    ("words", "same"),
    [
        # The layers that do nothing are left out; the stages keep their places.
        (
            f"{MODEL} --noop-layers 6,7 --pipeline-model-parallel-size 2",
            f"{MODEL} --num-layers 6 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttt|ttL",
        ),
        (
            f"{MODEL} --noop-layers 0,7 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
            f"{MODEL} --num-layers 6 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt|tt|tL",
        ),
        (f"{MODEL} --noop-layers 3", f"{MODEL} --num-layers 7"),
        (
            f"{EXPERTS} --moe-layer-freq [0,1,1,1,0,1,1,1] --noop-layers 1,4",
            f"{EXPERTS} --num-layers 6 --moe-layer-freq [0,1,1,1,1,1]",
        ),
        (
            f"{EXPERTS} --moe-layer-freq 2 --noop-layers 1,6 --pipeline-model-parallel-size 4",
            f"{EXPERTS} --num-layers 6 --moe-layer-freq [1,1,0,1,0,0] --pipeline-model-parallel-size 4 "
            "--pipeline-model-parallel-layout Et|tt|tt|tL",
        ),
        (
            f"{EXPERTS} --moe-layer-freq 1 --first-k-dense-replace 2 --noop-layers 7",
            f"{EXPERTS} --num-layers 7 --moe-layer-freq [0,0,1,1,1,1,1]",
        ),
        (
            f"{EXPERTS} --moe-layer-freq -1 --first-k-dense-replace -1 --noop-layers 7",
            f"{EXPERTS} --num-layers 7 --moe-layer-freq 1",
        ),
        (f"{EXPERTS} --first-k-dense-replace 3", f"{EXPERTS} --moe-layer-freq [0,0,0,1,1,1,1,1]"),
        (f"{EXPERTS} --first-k-dense-replace 3 --moe-layer-freq 2", f"{EXPERTS} --moe-layer-freq [0,0,0,0,1,0,1,0]"),
        # Experts are whole on the ranks of tp, too.
        (
            f"{EXPERTS} --moe-tp-extend-ep --tensor-model-parallel-size 2 --expert-model-parallel-size 4",
            f"{EXPERTS} --tensor-model-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1",
        ),
        (
            f"{EXPERTS} --moe-tp-extend-ep --tensor-model-parallel-size 2",
            f"{EXPERTS} --tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        ),
        # 1000 tokens are 62.5 samples of 16, or 15.6 steps of 4.
        (f"{BATCH} --train-tokens 1000", f"{BATCH} --train-samples 64"),
        (f"{BATCH} --train-tokens 1000 --train-samples 32", f"{BATCH} --train-samples 32"),
        (f"{BATCH} --train-tokens 1000 --train-samples 3200", f"{BATCH} --train-samples 64"),
        (f"{BATCH} --train-tokens 1000 --train-iters 99", f"{BATCH} --train-iters 16"),
        (
            f"{BATCH} --train-samples 640 --lr-decay-tokens 8000 --lr-warmup-tokens 320 --lr-decay-samples 7",
            f"{BATCH} --train-samples 640 --lr-decay-samples 500 --lr-warmup-samples 20",
        ),
        (
            f"{BATCH} --train-iters 640 --lr-decay-tokens 6400 --lr-warmup-tokens 320",
            f"{BATCH} --train-iters 640 --lr-decay-iters 100 --lr-warmup-iters 5",
        ),
    ],
)
def test_together_they_ask_for(words, same):
    assert fields(words) == fields(same)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"{MODEL} --noop-layers 8", "--noop-layers 8 is not available here"),
        (f"{MODEL} --noop-layers first", "--noop-layers first is not available here"),
        (f"{MODEL} --noop-layers 7 --pipeline-model-parallel-size 3", "--noop-layers 7 is not available here"),
        (
            f"{MODEL} --noop-layers 7 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|ttttL",
            "--noop-layers 7 is not available here",
        ),
        (f"{EXPERTS} --noop-layers 7 --moe-layer-freq [0,1]", "--noop-layers 7 is not available here"),
        (
            f"{EXPERTS} --moe-tp-extend-ep --expert-tensor-parallel-size 2",
            "--moe-tp-extend-ep is not available here (another layout of the experts)",
        ),
        (
            f"{MODEL} --train-tokens 1000",
            "--train-tokens 1000 is not available here (a length in tokens); give --train-samples",
        ),
        (
            f"{BATCH} --train-tokens 1000 --rampup-batch-size 1 1 9",
            "give --train-samples, or this flag with --seq-length",
        ),
        (f"{BATCH} --train-tokens 1e3", "--train-tokens 1e3 is not available here"),
    ],
)
def test_unclear_ones_are_refused(words, says):
    assert any(says in problem for problem in read(words.split()).problems), read(words.split()).problems


def test_the_words_of_a_line_stay_apart():
    """One outcome for each flag, so that flags can be taken from a line."""
    words = f"{MODEL} --noop-layers 6,7 --pipeline-model-parallel-size 2".split()
    assert len(read(words).outcomes) == sum(word.startswith("--") for word in words)
    assert "--micro-batch-size" not in words_without(words, {"micro_batch_size"})
