import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError
from megatron.config.data import TokenizerConfig
from megatron.tooling.restore import Saved, check_pp, check_tp, read_saved, restore_tokenizer
from tests import pool
from tests.unit.inference.serving import BYTES, write_tokenizer
from tests.unit.inference.small import LLAMA, PROMPTS, run, save_small, small_model

ROOT = Path(__file__).parents[3]
GREEDY_FLAGS = ("--temperature", "0", "--max-new-tokens", "6")


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools" / "generate.py"))["main"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small(pool.groups(), tmp_path_factory.mktemp("run"))


@pytest.fixture
def call(tool, folder, capsys):
    """(exit code, stdout, stderr) of the tool on the checkpoint."""

    def call(*flags, load=folder):
        code = tool(["--load", load, "--device", "cpu", *flags])
        found = capsys.readouterr()
        return code, found.out, found.err

    return call


def words(ids):
    return " ".join(map(str, ids))


def test_one_prompt_is_followed_by_its_continuation(call):
    code, out, err = call("--prompt", words(PROMPTS[0]), *GREEDY_FLAGS)
    first, *rest = out.rstrip("\n").split(" ")
    assert code == 0 and [first, *rest][:3] == ["5", "17", "3"] and len(rest) == 8
    assert "6 tokens in " in err and "tokens/s" in err and "iter_0000000: float32 on cpu, tp 1" in err


def test_several_prompts_give_a_line_of_json_each_whatever_the_batches(call, tmp_path):
    file = tmp_path / "prompts"
    file.write_text("\n".join(map(words, PROMPTS[1:])) + "\n\n")
    prompts = ("--prompt", words(PROMPTS[0]), "--prompts-file", str(file), "--top-p", "0.9", "--seed", "5")
    whole = call(*prompts)
    assert whole[:2] == call(*prompts, "--batch-size", "3")[:2] and whole[0] == 0
    lines = [json.loads(line) for line in whole[1].splitlines()]
    assert [line["prompt"] for line in lines] == [words(prompt) for prompt in PROMPTS]
    assert [line["tokens"] for line in lines] == [
        len(line["text"].split()) + (line["reason"] == "stop") for line in lines
    ]
    assert max(line["tokens"] for line in lines) == 64 - max(map(len, PROMPTS)), "all the room there is"


def test_text_is_that_of_the_saved_weights(call, folder):
    """Training starts from the same weights for the same seed, whoever builds the model."""
    model, build = small_model(pool.groups(), seed=1234, **LLAMA)
    out = call("--prompt", words(PROMPTS[2]), *GREEDY_FLAGS)[1]
    assert out == words(PROMPTS[2] + run(model, build, PROMPTS[2:3], new=6)[0]) + "\n"


def test_the_seed_decides_what_is_drawn(call):
    one, two, other = (call("--prompt", "1 2", "--seed", seed)[1] for seed in ("3", "3", "4"))
    assert one == two != other


def test_stops_end_a_continuation(call):
    prompt = words(PROMPTS[0])
    free = call("--prompt", prompt, *GREEDY_FLAGS)[1].split()[3:]
    assert (
        call("--prompt", prompt, *GREEDY_FLAGS, "--stop", f" {free[2]}")[1].split()[3:] == free[: free.index(free[2])]
    )
    assert call("--prompt", prompt, *GREEDY_FLAGS, "--stop-id", free[1])[1].split()[3:] == free[: free.index(free[1])]


def test_prompts_are_typed_in_a_terminal_and_a_bad_one_does_not_end_it(call, monkeypatch):
    typed = io.StringIO("5 17 3\n\nnonsense\n60\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    code, out, err = call(*GREEDY_FLAGS)
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["5", "60"]
    assert "NullTokenizer reads token ids" in err and err.count("tokens/s") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "there is no prompt; give --prompt or --prompts-file"),
        (("--prompt", "1", "--ckpt-step", "7"), "no checkpoint of iteration 7"),
        (("--prompt", "1 2 x"), "NullTokenizer reads token ids"),
        (("--prompt", words([1] * 64)), "prompt 1 has 64 tokens.*above .*64; shorten it"),
        (
            ("--prompt", words([1] * 60), "--max-new-tokens", "8"),
            "prompt 1 has 60 tokens.* 68, above .*64; give --max-new-tokens 4 or less",
        ),
        (("--prompt", ""), "prompt 1 has no tokens"),
        (("--prompt", "1", "--add-bos"), "no bos token"),
        (("--prompt", "1", "--tensor-model-parallel-size", "2"), "1 processes for .* 2 x .* 1; start 2 with torchrun"),
        (("--prompt", "1", "--pipeline-model-parallel-size", "2"), "1 processes for .* 2; start a multiple of 2 with"),
        (("--prompt", "1", "--temperature", "0", "--seed", "3"), "--seed has no effect"),
        (("--prompt", "1", "--temperature", "0", "--top-k", "3"), "no effect at --temperature 0"),
        (
            ("--prompt", "1", "--tensor-model-parallel-size", "0"),
            "parallel-size: must be from 1 to .*, got 0",
        ),
        (
            ("--prompt", "1", "--pipeline-model-parallel-size", "0"),
            "--pipeline-model-parallel-size: must be from 1 to .*, got 0",
        ),
        (("--prompt", "1", "--batch-size", "0"), "--batch-size: must be from 1 to .*, got 0"),
        (("--prompt", "1", "--stop", ""), "--stop ''"),
        (("--prompt", "1", "--max-new-tokens", "x"), "--max-new-tokens: needs a whole number, got 'x'"),
        (("--prompt", "1", "--max-new-tokens", "0"), "--max-new-tokens: must be from 1 to .*, got 0"),
        (("--prompt", "1", "--seed", "-1"), "--seed: must be from 0 to .*, got -1"),
        (("--prompt", "1", "--seed", str(2**64)), f"--seed: .*{2**64}"),
        (("--prompt", "1", "--stop-id", "99"), "--stop-id 99 must be from 0 to 98"),
        (("--prompt", "1", "--stop-id", "-1"), "--stop-id -1 must be from 0 to 98"),
        (("--prompt", "1", "--ckpt-step", "-1"), "--ckpt-step: must be from 0 to .*, got -1"),
        (("--prompt", "1", "--temperature", "nan"), "--temperature: must be finite, got nan"),
        (("--prompt", "1", "--top-p", "nan"), "--top-p: must be finite, got nan"),
        (("--prompt", "1 \udcff"), "is not UTF-8"),
        (("--prompt", "1", "--stop", "\udcff"), "is not UTF-8"),
        (("--prompts-file", "nowhere"), "--prompts-file nowhere cannot be read"),
        (
            ("--prompt", "1", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "nowhere"),
            "--tokenizer-model nowhere is not a folder",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(call, monkeypatch, flags, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, out, err = call(*flags)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("error: ")
    assert re.search(message, err), err


@pytest.mark.parametrize(
    ("processes", "tp", "pp", "message"),
    [
        (
            3,
            None,
            3,
            "--pipeline-model-parallel-size 3 does not divide the 2 layers of .*iter_0000000; use a divisor of 2",
        ),
        (16, None, 2, "--tensor-model-parallel-size 8 does not divide the model"),
        (6, 2, 2, "6 processes for --tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2; start 4 with"),
        (3, None, 2, "3 processes for --pipeline-model-parallel-size 2; start a multiple of 2 with torchrun"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_processes_meet(call, monkeypatch, processes, tp, pp, message):
    for name, value in (("RANK", 0), ("WORLD_SIZE", processes), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    sizes = ["--pipeline-model-parallel-size", str(pp)]
    sizes += [] if tp is None else ["--tensor-model-parallel-size", str(tp)]
    code, out, err = call("--prompt", "1", *sizes)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert re.match(f"error: {message}", err), err


def test_a_folder_without_checkpoints_is_named(call, tmp_path):
    code, _, err = call("--prompt", "1", load=str(tmp_path))
    assert (code, err) == (
        2,
        f"error: --load {tmp_path} holds no checkpoint; give the folder that a run saved in\n",
    )


class TestRestore:
    def test_a_tp_that_does_not_cut_the_layers_is_refused(self, folder):
        saved = read_saved(folder, None)
        check_tp(saved, 2)
        check_tp(saved, 4)  # two ranks share each of the key/value heads
        with pytest.raises(ConfigError, match=r"size 8 .* 4 heads, 2 key/value heads, .* use one of 1, 2, 4"):
            check_tp(saved, 8)

    def test_a_pp_that_does_not_cut_the_model_is_refused(self, folder):
        saved = read_saved(folder, None)
        check_pp(saved, 2)
        with pytest.raises(ConfigError, match=r"size 4 does not divide the 2 layers of .*; use a divisor of 2"):
            check_pp(saved, 4)

    def test_a_checkpoint_without_a_tokenizer_needs_one(self, folder):
        saved = read_saved(folder, None)
        bare = Saved(saved.path, saved.model, TokenizerConfig())
        with pytest.raises(ConfigError, match="add --tokenizer-type"):
            restore_tokenizer(bare)
        assert restore_tokenizer(bare, tokenizer_type="NullTokenizer").vocab_size == 99

    def test_a_checkpoint_cannot_ask_to_run_code(self, folder, monkeypatch):
        saved = read_saved(folder, None)
        asks = Saved(saved.path, saved.model, TokenizerConfig(tokenizer_type="NullTokenizer", trust_remote_code=True))
        seen = []
        monkeypatch.setattr(
            "megatron.tooling.restore.build_tokenizer", lambda config, size: seen.append(config) or restored
        )
        restored = type("Tokenizer", (), {"vocab_size": 99})
        restore_tokenizer(asks)
        restore_tokenizer(asks, trust_remote_code=True)
        assert [config.trust_remote_code for config in seen] == [False, True]

    def test_a_tokenizer_that_is_too_large_is_refused(self, folder, tmp_path, monkeypatch):
        restored = type("Tokenizer", (), {"vocab_size": 100})
        monkeypatch.setattr("megatron.tooling.restore.build_tokenizer", lambda config, size: restored)
        with pytest.raises(ConfigError, match=r"100 ids but .* knows 99"):
            restore_tokenizer(read_saved(folder, None))


class TestChat:
    @pytest.fixture
    def chatting(self, tool, tmp_path, capsys):
        """(exit code, stdout, stderr) of the tool on a model of bytes with a chat template."""
        tokenizer = write_tokenizer(tmp_path / "tokenizer")
        named = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tokenizer}
        folder = save_small(pool.groups(), tmp_path / "run", **BYTES, **named)

        def call(*flags):
            code = tool(["--load", folder, "--device", "cpu", *GREEDY_FLAGS, *flags])
            found = capsys.readouterr()
            return code, found.out, found.err

        return call

    def test_the_template_writes_the_prompt(self, chatting):
        written = chatting("--prompt", "<s><|user|>Hi<|assistant|>")[1]
        code, out, _ = chatting("--chat", "--prompt", "Hi")
        plain = re.sub(r"<s>|</s>|<\|\w+\|>", "", written.removeprefix("<s><|user|>Hi<|assistant|>"))
        assert code == 0 and out == plain and out.strip()
        with_system = chatting("--prompt", "<s><|system|>Be brief<|user|>Hi<|assistant|>")[1]
        found = chatting("--chat", "--system", "Be brief", "--prompt", "Hi")[1].rstrip("\n")
        assert found and re.sub(r"<s>|</s>|<\|(?!system)\w+\|>", "", with_system).rstrip("\n").endswith(found)

    def test_typed_turns_are_one_conversation(self, chatting, monkeypatch):
        typed = io.StringIO("Hi\nand\n")
        monkeypatch.setattr(typed, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", typed)
        first, second = chatting("--chat")[1].rstrip("\n").split("\n")
        assert first == chatting("--chat", "--prompt", "Hi")[1].rstrip("\n")
        assert second != chatting("--chat", "--prompt", "and")[1].rstrip("\n"), "it follows the first turn"

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (("--system", "x"), "--system has no effect without --chat"),
            (("--chat", "--add-bos"), "--add-bos has no effect with --chat"),
        ],
    )
    def test_flags_without_an_effect(self, call, flags, says):
        code, _, err = call("--prompt", "1", *flags)
        assert code == 2 and says in err

    def test_a_tokenizer_without_a_template(self, call):
        code, _, err = call("--prompt", "1", "--chat")
        assert code == 2 and "has none; remove it" in err
