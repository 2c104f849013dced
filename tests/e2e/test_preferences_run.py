"""train_rl.py with pairs of answers as a user runs it: from Hugging Face, resumed, and with mistakes."""

import json
import random
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import SHAPE, figures, flags
from tests.unit.datasets.chat import CHATML, messages, tokenizer_folder
from tests.unit.models.hf_models import SHAPE as HF_SHAPE

DRIVER = "tests.e2e.helpers.drivers:train_rl"
OF_THE_FOLDER = {*SHAPE, "--tokenizer-type"} - {"--attention-dropout", "--hidden-dropout"}
WORDS = ("fox", "dog", "box", "liquor", "jugs", "lazy", "quick", "brown")
LINE = re.compile(r"pairs of step (\d+) \| (.*)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model of Hugging Face that has a tokenizer, and pairs: the better answer repeats the question."""
    folder, draw = tmp_path_factory.mktemp("preferences"), random.Random(1)
    tokenizer = HuggingFaceTokenizer(tokenizer_folder(folder / "model", CHATML))
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**HF_SHAPE | {"vocab_size": tokenizer.vocab_size})).save_pretrained(folder / "model")
    with open(folder / "pairs.jsonl", "w") as file, open(folder / "held_out.jsonl", "w") as held_out:
        for number in range(48):
            question, wrong = draw.sample(WORDS, 2)
            pair = {
                "chosen": messages(question, f"the {question}"),
                "rejected": messages(question, f"over {wrong} dozen"),
            }
            (file if number < 40 else held_out).write(json.dumps(pair) + "\n")
    return folder


def command(folder, tmp_path, *more):
    changes = {"--load-hf": folder / "model", "--preference-data": (folder / "pairs.jsonl",), "--lr": 2e-3}
    saves = {"--save": tmp_path / "run", "--load": tmp_path / "run", "--save-interval": 5}
    sizes = {"--seq-length": 64, "--micro-batch-size": 1, "--tensorboard-dir": tmp_path / "board"}
    evaluation = {"--eval-preference-data": (folder / "held_out.jsonl",), "--eval-interval": 5}
    return flags(changes, saves, sizes, evaluation, *more, without=OF_THE_FOLDER)


def reported(stdout):
    """Step -> name -> figure of the lines about pairs."""
    return {
        int(step): {name: float(value) for name, value in (part.split(": ") for part in figures_text.split(" | "))}
        for step, figures_text in LINE.findall(stdout)
    }


def test_the_policy_learns_to_prefer(folder, tmp_path):
    first = run(command(folder, tmp_path), tmp_path / "log", driver=DRIVER)
    assert first.codes == [0], first.text
    steps = reported(first.stdout[0])
    assert list(steps) == list(range(1, 11)) == list(figures(first.stdout[0]))
    assert steps[1]["margin"] == steps[1]["accuracy"] == 0, "the policy begins as the reference"
    assert steps[10]["accuracy"] > 0.9 and steps[10]["loss"] < 0.9 * steps[1]["loss"]
    assert steps[10]["margin"] == pytest.approx(steps[10]["chosen"] - steps[10]["rejected"], rel=1e-4)
    assert any((tmp_path / "board").iterdir())
    held_out = re.findall(r"evaluation at iteration (\d+) \|.* accuracy: ([\d.]+) \| 8 pairs", first.stdout[0])
    assert [step for step, _ in held_out] == ["0", "5", "10"]
    assert float(held_out[0][1]) == 0 and float(held_out[2][1]) > 0.9

    longer = {"--train-iters": 12, "--override-opt_param-scheduler": None}
    second = run(command(folder, tmp_path, longer), tmp_path / "log2", 2, driver=DRIVER)
    assert second.codes == [0, 0], second.text
    assert list(reported(second.stdout[0])) == [11, 12]
    assert reported(second.stdout[0])[11]["accuracy"] > 0.9, "it is compared with the weights of Hugging Face"


def test_mistakes_are_one_line(folder, tmp_path):
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b"}) + "\n")
    data = {"--preference-data": (tmp_path / "bad.jsonl",)}
    ended = run(command(folder, tmp_path, data), tmp_path / "log", 2, driver=DRIVER)
    assert ended.codes[0] == 2
    (line,) = [line for text in ended.stderr for line in text.splitlines() if "bad.jsonl" in line]
    assert "bad.jsonl, line 1 has no key 'rejected'" in line
    rewards = {"--rm-type": "exact"}
    ended = run(command(folder, tmp_path, rewards), tmp_path / "log2", driver=DRIVER)
    assert ended.codes == [2]
    assert "--rm-type has no effect: --preference-data has the answers" in ended.stderr[0]
