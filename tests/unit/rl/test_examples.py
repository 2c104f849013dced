"""The examples: the sandboxed reward under every sandbox of this machine, and the data of the reversed digits."""

import importlib.util
import json

import pytest

from megatron.core.datasets.sft_records import parse_conversation
from megatron.core.datasets.sft_template import SFTTemplate
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.rl.prompts import PromptOptions, load_prompts
from megatron.rl.reward_workers import RewardPool
from megatron.rl.rewards import file_source
from megatron.rl.user_functions import AnsweredPrompt
from tests.unit.project_names import ROOT

SANDBOX = ROOT / "examples/rl/sandboxed_reward.py"
TESTS = ["assert double(2) == 4", "assert double('a') == 'b'"]
DOUBLE = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sandbox():
    return load(SANDBOX)


@pytest.fixture(params=["bwrap", "unshare", "limits"])
def kind(request, sandbox, monkeypatch):
    best = ["bwrap", "unshare", "limits"]
    if best.index(sandbox.isolation()) > best.index(request.param) or not (
        request.param == "limits" or sandbox.shutil.which(request.param)
    ):
        pytest.skip(f"{request.param} does not work here")
    monkeypatch.setattr(sandbox, "isolation", lambda: request.param)
    return request.param


class TestSandbox:
    def test_the_share_of_tests_that_pass(self, sandbox, kind):
        assert sandbox.reward(DOUBLE, TESTS) == {"score": 0.5, "ran": 1.0}
        assert sandbox.reward("def double(x): return 4 if x == 2 else 'b'", TESTS)["score"] == 1.0

    @pytest.mark.parametrize(
        "code",
        [
            "raise SystemExit(0)",
            "import os; os._exit(0)",
            "print('mark 2'); import os; os._exit(0)",
            "x = bytearray(2**31)",
            "def double(",
        ],
    )
    def test_code_that_does_not_come_to_its_end(self, sandbox, kind, code):
        assert sandbox.reward(code, TESTS) == {"score": 0.0, "ran": 0.0}

    def test_a_time_limit(self, sandbox, kind, monkeypatch):
        monkeypatch.setattr(sandbox, "SECONDS", 1)
        assert sandbox.reward("import time; time.sleep(3600)", TESTS)["ran"] == 0.0

    def test_files_and_network(self, sandbox, kind, tmp_path):
        secret = tmp_path / "secret"
        secret.write_text("secret")
        names = "import os, socket, pathlib\nlinks = {name for _, name in socket.if_nameindex()} - {'lo'}"
        tests = [
            f"assert not pathlib.Path({str(secret)!r}).exists()",
            "assert not links",
            "assert os.listdir('.') == [] and os.environ.get('PATH') is None",
        ]
        hidden, offline, private = (sandbox.reward(names, [test])["score"] for test in tests)
        assert private == 1.0
        assert hidden == (kind == "bwrap")
        assert kind == "limits" or offline == 1.0

    def test_as_the_function_of_a_pool(self):
        row = {"prompt": "Write double(x).", "tests": TESTS}
        with RewardPool(file_source(str(SANDBOX)), workers=1, call_seconds=60.0) as pool:
            batch = pool.score([AnsweredPrompt("Write double(x).", text, None, row) for text in (DOUBLE, "no code")])
        assert (batch.scores, batch.mean_figures()) == ([0.5, 0.0], {"ran": 0.5})


class TestReversedDigits:
    @pytest.fixture
    def write(self, tmp_path):
        def to_folder(name, *flags):
            assert load(ROOT / "examples/rl/reversed_digits.py").main(["--output", str(tmp_path / name), *flags]) == 0
            return tmp_path / name

        return to_folder

    def test_files(self, write):
        sizes = ["--prompts", "80", "--held-out", "20", "--warm-up", "30", "--digits", "2"]
        folder = write("first", *sizes)
        names = ("warm_up", "prompts", "held_out")
        rows = {
            name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in names
        }
        assert {name: len(entries) for name, entries in rows.items()} == {"warm_up": 30, "prompts": 80, "held_out": 20}
        questions = [entry["prompt"] for name in ("prompts", "held_out") for entry in rows[name]]
        assert len(set(questions)) == 100
        trained = {entry["messages"][0]["content"] for entry in rows["warm_up"]}
        assert trained <= set(questions[:80])
        same = write("second", *sizes)
        other = write("third", *sizes, "--seed", "2")
        contents = [[(path / f"{name}.jsonl").read_bytes() for name in names] for path in (folder, same, other)]
        assert contents[0] == contents[1] != contents[2]

        tokenizer = HuggingFaceTokenizer(str(folder / "tokenizer"))
        prompts = load_prompts(PromptOptions(prompt_data=(str(folder / "prompts.jsonl"),)), tokenizer, seed=1)
        first, second, sign = prompts.at(0).text.split()
        assert (prompts.at(0).label, sign, tokenizer.vocab_size) == (f"{second} {first}", "=", 16)
        ids, trained = SFTTemplate(tokenizer).encode(
            parse_conversation((folder / "warm_up.jsonl").read_bytes().splitlines()[0])
        )
        question, answer = (turn["content"] for turn in rows["warm_up"][0]["messages"])
        assert tokenizer.decode(ids) == f"{question} {answer} <|end|>"
        assert trained == [False] * 3 + [True] * 3

    def test_too_many_questions(self, write, capsys):
        with pytest.raises(SystemExit) as caught:
            write("first", "--digits", "1")
        assert caught.value.code == 2
        assert "1000 different questions need more than --digits 1" in capsys.readouterr().err
