"""Environments: the turns that a user's function returns, refusals, their tokens, and the calculator of the examples."""

import json
import sys
import textwrap

import pytest

from megatron.base.errors import ConfigError, DataError
from megatron.core.datasets.tokenizer import NullTokenizer
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.core.inference.generate import Completion
from megatron.rl.environments import EnvironmentFunction, environment_source
from megatron.rl.episodes import Episode, TurnEncoder
from megatron.rl.function_workers import FunctionPool
from megatron.rl.prompts import Prompt, PromptOptions, load_prompts
from megatron.rl.reward_functions import RewardFunction
from megatron.rl.rewards import file_source
from megatron.rl.user_functions import AnsweredPrompt, FunctionError
from tests.unit.datasets.chat import CHATML, tokenizer_folder
from tests.unit.project_names import ROOT

CALCULATOR = str(ROOT / "examples/rl/calculator.py")
QUESTION = ({"role": "user", "content": "2 + 2?"},)
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
TOOLS_CHATML = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def from_text(text):
        (tmp_path / "mine.py").write_text(textwrap.dedent(text))
        return EnvironmentFunction(environment_source(f"{tmp_path}/mine.py"))

    return from_text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), TOOLS_CHATML))


def of_messages(*answers, row=None):
    turns = tuple({"role": "assistant", "content": text} for text in answers)
    return AnsweredPrompt("<user>2 + 2?", "".join(answers), "4", row or {}, (), QUESTION, turns)


def of_text(answer):
    return AnsweredPrompt("2 + 2 =", answer, "4", {"prompt": "2 + 2 ="})


class TestResults:
    def test_what_a_function_reads(self, load):
        function = load(
            """
            def next_turn(conversation, prompt, completion, label, level, **row):
                roles = [message["role"] for message in conversation]
                assert (roles, prompt, completion, label, level) == (["user", "assistant"], "<user>2 + 2?", "5", "4", 3)
                return "No, " + conversation[-1]["content"] + " is wrong."
            """
        )
        turn = [{"role": "user", "content": "No, 5 is wrong."}]
        assert function(of_messages("5", row={"level": 3})) == turn

    def test_a_prompt_that_is_a_text_goes_on_as_text(self, load):
        function = load(
            """
            async def next_turn(conversation):
                assert conversation[0] == {"role": "user", "content": "2 + 2 ="}
                return " 7" if conversation[-1]["content"] == "5" else None
            """
        )
        assert (function(of_text("5")), function(of_text("4"))) == (" 7", None)

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ("''", "empty text; return None"),
            ("3", "holds no list of turns"),
            ("[{'role': 'assistant', 'content': 'a'}]", "a turn of the assistant, which the model writes"),
            ("[{'role': 'robot', 'content': 'a'}]", "from 'robot', which is none of"),
            ("1 / 0", r"ZeroDivisionError: .* \(line 2\)"),
        ],
    )
    def test_refusals(self, load, value, reason):
        function = load(f"def next_turn(conversation):\n    return {value}\n")
        with pytest.raises(ValueError, match=reason):
            function(of_messages("5"))

    def test_messages_behind_a_text(self, load):
        function = load("def next_turn(): return {'role': 'user', 'content': 'a'}")
        with pytest.raises(ValueError, match="a dict for a prompt that is a text; return a text, or write prompts as"):
            function(of_text("5"))

    def test_a_file_without_the_function(self, load, tmp_path):
        with pytest.raises(FunctionError, match=r"--custom-environment-path .*: the file has no function 'next_turn'"):
            load("def step(): pass")
        with pytest.raises(ConfigError, match=r"--custom-environment-path names .*absent.py, which is not a file"):
            environment_source(f"{tmp_path}/absent.py")


def episode(prompt):
    return Episode(prompt_number=0, number=0, prompt=prompt)


def stopped(tokenizer, text, end):
    return Completion([*tokenizer.encode(text), *tokenizer.encode(end)], text, "stop", (-1.0,) * 2)


class TestTokens:
    """The tokens behind an answer are those of the template, and the answer's are those that were sampled."""

    @pytest.fixture(scope="class")
    def prompt(self, tokenizer, tmp_path_factory):
        path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
        path.write_text(json.dumps({"prompt": [{"role": "user", "content": "the fox"}], "tools": [{"name": "t"}]}))
        return load_prompts(PromptOptions(prompt_data=(str(path),)), tokenizer, 1).at(0)

    def test_the_template_writes_the_turn_behind_the_answer(self, tokenizer, prompt):
        whole, encoder = episode(prompt), TurnEncoder(tokenizer)
        whole.add_answer(stopped(tokenizer, "quick", "<|im_end|>"))
        turn = encoder.encode(whole, [{"role": "tool", "content": "the dog"}])
        assert turn.text == "<|im_end|>\n<|im_start|>tool\nthe dog<|im_end|>\n<|im_start|>assistant\n"
        whole.add_turn(turn, room=1000)
        whole.add_answer(stopped(tokenizer, "jumps", "<|im_end|>"))
        second = encoder.encode(whole, [{"role": "user", "content": "the"}, {"role": "user", "content": "fox"}])
        assert second.text == (
            "<|im_end|>\n<|im_start|>user\nthe<|im_end|>\n<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n"
        )
        text = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\nquick" + turn.text
        assert tokenizer.decode(whole.context).endswith(f"{text}jumps<|im_end|>")
        assert whole.text == f"quick{turn.text}jumps"
        assert sum(whole.mask) == len(whole.ids) - len(turn.ids) and len(whole.mask) == len(whole.ids)
        assert [message["role"] for message in whole.turns] == ["assistant", "tool", "assistant"]
        assert whole.answer_count == 2 and whole.answered().last_answer == "jumps"

    def test_sampled_tokens_are_never_encoded_again(self, tokenizer, prompt):
        """An answer may have other tokens than its text, and end by another token than a turn does."""
        whole = episode(prompt)
        letters = [token for letter in "the" for token in tokenizer.encode(letter)]
        assert letters != tokenizer.encode("the")
        whole.add_answer(Completion([*letters, tokenizer.eod], "the", "stop", (-1.0,) * 4))
        turn = TurnEncoder(tokenizer).encode(whole, [{"role": "tool", "content": "dog"}])
        assert whole.ids == [*letters, tokenizer.eod]
        assert tokenizer.decode([tokenizer.eod]) != "<|im_end|>"
        assert tokenizer.decode(turn.ids).startswith("<|im_end|>\n<|im_start|>tool")

    def test_a_template_that_leaves_earlier_answers_out(self, tokenizer, prompt, monkeypatch):
        only_last = "{{ tools | tojson }}{{ messages[-1]['content'] }}"
        monkeypatch.setattr(tokenizer.library, "chat_template", only_last)
        whole = episode(prompt)
        whole.add_answer(stopped(tokenizer, "quick", "<|im_end|>"))
        with pytest.raises(DataError, match="a chat template that writes answers before the last one"):
            TurnEncoder(tokenizer).encode(whole, [{"role": "tool", "content": "dog"}])

    def test_a_template_that_does_not_take_the_turn(self, tokenizer, prompt, monkeypatch):
        refuses = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + TOOLS_CHATML
        monkeypatch.setattr(tokenizer.library, "chat_template", refuses)
        whole = episode(prompt)
        whole.add_answer(stopped(tokenizer, "quick", "<|im_end|>"))
        with pytest.raises(DataError, match=r"path wrote a turn for which the chat template .*tools"):
            TurnEncoder(tokenizer).encode(whole, [{"role": "tool", "content": "dog"}])

    def test_a_text_is_taken_as_it_is(self):
        whole = episode(Prompt(0, (1, 2), "1 2", None, {}))
        whole.add_answer(Completion([3, 63], "3", "stop", (-1.0, -2.0)))
        encoder = TurnEncoder(NullTokenizer(64))
        whole.add_turn(encoder.encode(whole, "4 5"), room=5)
        assert (whole.context, whole.mask) == ((1, 2, 3, 63, 4, 5), [1, 1, 0, 0])
        with pytest.raises(DataError, match="--custom-environment-path wrote a turn that cannot be tokenized"):
            encoder.encode(whole, "five")

    def test_a_turn_without_room_for_an_answer_ends_the_episode(self):
        whole = episode(Prompt(0, (1, 2), "1 2", None, {}))
        whole.add_answer(Completion([3, 63], "3", "stop", (-1.0, -2.0)))
        whole.add_turn(TurnEncoder(NullTokenizer(64)).encode(whole, "4 5"), room=4)
        assert (whole.ids, whole.is_cut, whole.is_over) == ([3, 63], True, True)


class TestCalculator:
    def test_calls_in_worker_processes(self):
        answers = [CALL % "12 * (3 + -4.5)", CALL % "1/3", CALL % "2 ** 9", "<tool_call>7</tool_call>", "It is 4."]
        with FunctionPool(environment_source(CALCULATOR), workers=1, call_seconds=60.0) as pool:
            results = [result.value for result in pool.call([of_messages(answer) for answer in answers])]
        contents = [turns and turns[0]["content"] for turns in results]
        assert contents[:2] == ["-18", "1/3"] and contents[-1] is None
        assert contents[2].startswith("error: ValueError") and contents[3].startswith("error: TypeError")

    def test_reward_reads_all_turns(self, monkeypatch):
        monkeypatch.setattr(sys, "path", list(sys.path))
        function = RewardFunction(file_source(CALCULATOR))
        turns = ({"role": "assistant", "content": CALL % "2 + 2"}, {"role": "tool", "content": "4"})
        for last, score in (("It is 4", 1.0), ("It is 5", 0.0), ("I do not know", 0.0)):
            answer = AnsweredPrompt(
                "2 + 2?", "", "4", {}, (), QUESTION, (*turns, {"role": "assistant", "content": last})
            )
            reward = function(answer)
            assert (reward.score, reward.figures) == (score, {"calls": 1.0})
