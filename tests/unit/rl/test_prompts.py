"""Prompts in the three usual shapes, refusals with file and line, and the order of a run."""

import gzip
import json
import logging
import sys

import pytest

from megatron.base.errors import ConfigError, DataError
from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.rl.prompts import Prompt, PromptOptions, PromptSet, load_prompts
from tests.unit.datasets.chat import CHATML, tokenizer_folder

TOOLS_CHATML = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
TURNS = [{"role": "system", "content": "quick"}, {"role": "user", "content": "the fox"}]
RENDERED = "<|im_start|>system\nquick<|im_end|>\n<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), TOOLS_CHATML))


@pytest.fixture
def write(tmp_path):
    def to_file(*rows, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        return str(path)

    return to_file


def load(path, tokenizer, seed=1, **options):
    return load_prompts(PromptOptions(prompt_data=(path,), **options), tokenizer, seed)


def only(path, tokenizer, **options):
    prompts = load(path, tokenizer, **options)
    assert len(prompts) == 1
    return prompts.at(0)


class TestShapes:
    def test_a_text_is_encoded_as_it_is(self, write, tokenizer):
        row = {"prompt": "the quick fox", "label": "3", "level": 2}
        prompt = only(write(row), tokenizer)
        assert list(prompt.ids) == tokenizer.encode("the quick fox")
        assert (prompt.text, prompt.label, prompt.row, prompt.messages) == ("the quick fox", "3", row, None)

    def test_the_bos_of_generation(self, write, tokenizer):
        prompt = only(write({"prompt": "the fox"}), tokenizer, add_bos=True)
        assert list(prompt.ids) == [tokenizer.bos, *tokenizer.encode("the fox")]
        assert prompt.text == "the fox"

    def test_a_template_writes_its_own_beginning(self, write, tokenizer):
        prompt = only(write({"prompt": TURNS}), tokenizer, add_bos=True)
        assert list(prompt.ids) == tokenizer.encode(RENDERED)

    def test_slime(self, write, tokenizer):
        row = {"question": TURNS, "answer": 42, "metadata": {"level": 1}}
        prompt = only(write(row), tokenizer, input_key="question", label_key="answer")
        assert (prompt.text, prompt.label, prompt.row, prompt.messages) == (RENDERED, 42, row, tuple(TURNS))

    def test_a_text_as_the_turn_of_a_user(self, write, tokenizer):
        prompt = only(write({"prompt": "the fox"}), tokenizer, apply_chat_template=True)
        assert prompt.text == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"

    def test_verl(self, write, tokenizer):
        row = {
            "data_source": "gsm8k",
            "prompt": TURNS,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"index": 3},
        }
        prompt = only(write(row), tokenizer, needs_label=True)
        assert (prompt.text, prompt.label, prompt.row["extra_info"]) == (RENDERED, "72", {"index": 3})

    def test_tools_are_written_by_the_template(self, write, tokenizer):
        prompt = only(write({"prompt": TURNS, "tools": [WEATHER]}), tokenizer)
        assert prompt.text.endswith(RENDERED) and '"weather"' in prompt.text

    def test_gzip_and_several_files_in_order(self, tmp_path, tokenizer):
        for number in range(3):
            with gzip.open(tmp_path / f"{number}.jsonl.gz", "wt") as file:
                file.write(json.dumps({"prompt": f"fox {number}"}) + "\n\n")
        prompts = load(str(tmp_path / "*.gz"), tokenizer)
        by_number = sorted(prompts.batch(0, 3), key=lambda prompt: prompt.number)
        assert [prompt.text for prompt in by_number] == ["fox 0", "fox 1", "fox 2"]

    def test_parquet(self, tmp_path, tokenizer):
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = str(tmp_path / "train.parquet")
        row = {"prompt": TURNS, "reward_model": {"style": "rule", "ground_truth": "72"}}
        parquet.write_table(pyarrow.Table.from_pylist([row, {**row, "prompt": []}]), path)
        with pytest.raises(DataError, match=r"train.parquet, row 2 holds no list of turns under 'prompt'"):
            load(path, tokenizer)
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        prompt = only(path, tokenizer)
        assert (prompt.text, prompt.label) == (RENDERED, "72")
        (tmp_path / "bad.parquet").write_bytes(b"text")
        with pytest.raises(DataError, match=r"bad.parquet cannot be read"):
            load(str(tmp_path / "bad.parquet"), tokenizer)

    def test_parquet_without_its_package(self, write, tokenizer, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(ConfigError, match=r"pip install 'megatron-patched\[parquet\]', or give JSON lines"):
            load(write("x", name="train.parquet"), tokenizer)


class TestRefusals:
    @pytest.mark.parametrize(
        ("row", "options", "message"),
        [
            ("{oh\n", {}, "line 2 is not JSON in UTF-8"),
            ("[1]\n", {}, "line 2 is a JSON list, not an object"),
            ({"text": "a", "id": 3}, {}, "line 2 has no key 'prompt', only id, text; name the key.* with --input-key"),
            ({"prompt": None}, {}, "line 2 has no key 'prompt', only none"),
            (
                {"prompt": "a", "answer": 1},
                {"label_key": "gold"},
                "line 2 has no key 'gold', only answer, prompt; name the key of the label with --label-key",
            ),
            ({"prompt": "a", "answer": 1}, {"needs_label": True}, "line 2 has no label under 'label', only answer"),
            ({"prompt": " \n"}, {}, "line 2 has an empty prompt under 'prompt'"),
            ({"prompt": []}, {}, "line 2 holds no list of turns under 'prompt'"),
            ({"prompt": [{"role": "user", "content": " "}]}, {}, "line 2 has an empty prompt"),
            ({"prompt": [{"role": "user"}]}, {}, "line 2 has a NoneType as content of turn 1"),
            ({"prompt": 3}, {}, "line 2 holds a int under 'prompt', and a prompt is a text or a list"),
            (
                {"prompt": [*TURNS, {"role": "assistant", "content": "jumps"}]},
                {},
                "line 2 ends with a turn of the assistant",
            ),
            ({"prompt": "a", "images": ["x.png"]}, {}, "line 2 holds 'images', and only text is read"),
            ('{"prompt": "\\ud83d"}\n', {}, "line 2 holds half of a surrogate pair"),
        ],
    )
    def test_a_row(self, write, tokenizer, row, options, message):
        first = {"prompt": "the fox", "gold": 1, "label": 1}
        with pytest.raises(DataError, match=f"^--prompt-data .*prompts.jsonl, {message}") as caught:
            load(write(first, row), tokenizer, **options)
        assert "\n" not in str(caught.value)

    def test_a_text_that_the_tokenizer_does_not_take(self, write):
        path = write(*({"prompt": text} for text in ("1 2", "3 four", "5")))
        with pytest.raises(DataError, match=r"line 2 has a prompt that cannot be tokenized: .*four"):
            load(path, NullTokenizer(16))

    def test_messages_without_a_template(self, write):
        with pytest.raises(ConfigError, match="line 1 has messages, and the tokenizer has no chat template; give"):
            load(write({"prompt": TURNS}), NullTokenizer(16))
        with pytest.raises(ConfigError, match="line 1 becomes messages under --apply-chat-template, and the tokenizer"):
            load(write({"prompt": "1"}), NullTokenizer(16), apply_chat_template=True)

    def test_files(self, tmp_path, write, tokenizer):
        with pytest.raises(DataError, match=r"--prompt-data .*absent.jsonl names no file"):
            load(str(tmp_path / "absent.jsonl"), tokenizer)
        with pytest.raises(DataError, match="holds no prompt"):
            load(write("\n"), tokenizer)

    def test_a_bos_that_does_not_exist(self, write):
        with pytest.raises(ConfigError, match="--add-bos is given but the tokenizer has no bos"):
            load(write({"prompt": "1"}), NullTokenizer(16), add_bos=True)


class TestLengths:
    def test_long_prompts_are_left_out_and_counted(self, write, caplog):
        path = write(*({"prompt": text} for text in ("1 2 3", "1", "1 2", "1 2 3 4")))
        with caplog.at_level(logging.INFO):
            prompts = load(path, NullTokenizer(16), max_length=2)
        assert sorted(prompt.text for prompt in prompts.batch(0, 2)) == ["1", "1 2"]
        assert caplog.messages == ["2 of 4 prompts are longer than 2 tokens and left out"]

    def test_all_too_long(self, write):
        path = write({"prompt": "1 2 3"}, {"prompt": "1 2 3 4"})
        with pytest.raises(DataError, match=r"2 prompts, all longer than the 2 tokens .* the shortest has 3"):
            load(path, NullTokenizer(16), max_length=2)


class TestOrder:
    def prompt_set(self, seed, count=7):
        return PromptSet([Prompt(n, (n,), str(n), None, {}) for n in range(count)], seed)

    def numbers(self, prompts, first, count):
        return [prompt.number for prompt in prompts.batch(first, count)]

    def test_every_epoch_reads_every_prompt_once_in_an_order_of_its_own(self):
        prompts = self.prompt_set(seed=3)
        epochs = [self.numbers(prompts, 7 * epoch, 7) for epoch in range(4)]
        assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 4

    def test_a_position_alone_decides(self):
        """Reading in other pieces, backwards or from the middle gives the same prompts."""
        whole = self.numbers(self.prompt_set(seed=3), 0, 40)
        resumed = self.prompt_set(seed=3)
        assert self.numbers(resumed, 17, 23) == whole[17:]
        assert [resumed.at(n).number for n in reversed(range(40))] == whole[::-1]
        assert self.numbers(self.prompt_set(seed=4), 0, 40) != whole

    def test_the_order_is_the_same_in_every_version(self):
        assert self.numbers(self.prompt_set(seed=3), 0, 14) == [1, 0, 2, 6, 5, 3, 4, 3, 0, 4, 6, 2, 1, 5]
