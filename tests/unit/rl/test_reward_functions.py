"""Reward functions of a user's file: their four forms, what they return, and what is refused."""

import sys
import textwrap
from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.rl.reward_functions import RewardFunction, as_reward
from megatron.rl.rewards import Reward, file_source
from megatron.rl.user_functions import AnsweredPrompt, FunctionError

TURNS = ({"role": "user", "content": "2 + 2?"},)
ANSWER = AnsweredPrompt("2 + 2 =", "4", "4", {"prompt": "2 + 2 =", "level": 3, "metadata": {"kind": "sum"}}, (8, 9))


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def from_text(text, function="reward", **settings):
        (tmp_path / "mine.py").write_text(textwrap.dedent(text))
        return RewardFunction(file_source(f"{tmp_path}/mine.py:{function}", settings))

    return from_text


class TestForms:
    def test_of_this_project(self, load):
        function = load(
            """
            def reward(prompt, completion, label, **row):
                assert (prompt, row["level"], row["completion_ids"]) == ("2 + 2 =", 3, [8, 9])
                return completion == label
            """
        )
        assert function(ANSWER) == Reward(1.0)

    def test_only_the_named_columns(self, load):
        function = load("def reward(completion, level, weight=2): return weight * level")
        assert function(ANSWER).score == 6.0

    def test_of_trl(self, load):
        function = load(
            """
            def reward(prompts, completions, level, **columns):
                assert (prompts, columns["metadata"]) == (["2 + 2 ="], [{"kind": "sum"}])
                assert columns["completion_ids"] == [[8, 9]]
                return [float(text) + number for text, number in zip(completions, level)]
            """
        )
        assert function(ANSWER).score == 7.0

    def test_of_trl_with_messages(self, load):
        function = load(
            """
            def reward(completions, prompts):
                assert prompts == [[{"role": "user", "content": "2 + 2?"}]], prompts
                return [float(turns[0]["content"]) for turns in completions]
            """
        )
        assert function(AnsweredPrompt("<user>2 + 2?", "4", None, {"prompt": list(TURNS)}, messages=TURNS)).score == 4.0

    def test_of_slime(self, load):
        function = load(
            """
            import asyncio
            async def custom_rm(args, sample, **kwargs):
                await asyncio.sleep(0)
                assert (sample.prompt, sample.metadata, sample.response_length) == ("2 + 2 =", {"kind": "sum"}, 2)
                return args.scale * (sample.response == sample.label)
            """,
            "custom_rm",
            scale=0.5,
        )
        assert [function(ANSWER).score for _ in range(2)] == [0.5, 0.5]

    def test_of_verl(self, load):
        function = load(
            """
            def compute_score(data_source, solution_str, ground_truth, extra_info=None):
                correct = (data_source, solution_str, ground_truth, extra_info) == ("gsm8k", "4", "4", {"index": 1})
                return {"score": correct, "acc": correct, "pred": solution_str}
            """,
            "compute_score",
        )
        row = {"data_source": "gsm8k", "extra_info": {"index": 1}}
        assert function(AnsweredPrompt("2 + 2 =", "4", "4", row)) == Reward(1.0, {"acc": 1.0})

    def test_an_object_that_is_called(self, load):
        function = load(
            """
            import functools
            def scaled(completion, scale): return scale * float(completion)
            reward = functools.partial(scaled, scale=3)
            """
        )
        assert function(ANSWER).score == 12.0

    def test_a_file_imports_its_neighbours(self, load, tmp_path):
        (tmp_path / "neighbour_of_mine.py").write_text("SCALE = 5")
        function = load("from neighbour_of_mine import SCALE\ndef reward(completion): return SCALE")
        assert function(ANSWER).score == 5.0


class TestResults:
    @pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), torch.tensor(1), Fraction(1)])
    def test_numbers(self, value):
        assert as_reward(value) == Reward(1.0)

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (None, "it returned None, a NoneType, not a number"),
            ("1", "it returned '1', a str, not a number"),
            ([1.0], r"it returned \[1.0\], a list, not a number"),
            (1j, "a complex, not a number"),
            (float("nan"), "it returned nan, which is not finite"),
            ({"score": float("-inf")}, "it returned -inf, which is not finite"),
            ({"reward": 1.0}, "it returned a dict without 'score', with reward"),
            ({}, "it returned a dict without 'score', with no key"),
            (10**400, "not a number"),
        ],
    )
    def test_other_values(self, value, reason):
        with pytest.raises(ValueError, match=reason):
            as_reward(value)

    def test_figures_are_finite_numbers(self):
        value = {"score": 0.5, "steps": 3, "text": "x", "bad": float("nan"), "right": False}
        assert as_reward(value) == Reward(0.5, {"steps": 3.0, "right": 0.0})

    def test_a_list_of_another_length(self, load):
        with pytest.raises(ValueError, match="for one answer, not a list of one number"):
            load("def reward(completions): return [1.0, 2.0]")(ANSWER)

    def test_an_exception_has_its_line(self, load):
        function = load("def reward(completion):\n    return helper()\ndef helper():\n    return {}['key']")
        with pytest.raises(ValueError, match=r"^KeyError: 'key' \(line 4\)$"):
            function(ANSWER)

    def test_an_exit_is_a_failure(self, load):
        with pytest.raises(ValueError, match=r"^SystemExit: 0 \(line 3\)$"):
            load("import sys\ndef reward(completion):\n    sys.exit(0)")(ANSWER)

    def test_a_column_that_the_row_lacks(self, load):
        with pytest.raises(ValueError, match=r"it takes 'tests', and the row of the prompt has only .*level"):
            load("def reward(completion, tests): return 0.0")(ANSWER)


class TestRefusals:
    @pytest.mark.parametrize("parameters", ["", "text", "sample, args", "*values", "**row", "prompt, answer"])
    def test_an_unknown_form(self, load, parameters):
        with pytest.raises(FunctionError) as caught:
            load(f"def reward({parameters}): return 0.0")
        assert f"has the parameters ({parameters}), which are none of the forms: reward(prompt, " in str(caught.value)
        assert "custom_rm(args, sample) and verl's compute_score(" in str(caught.value)

    def test_a_function_without_names(self, load):
        with pytest.raises(FunctionError, match="none of the forms"):
            load("reward = dict")

    def test_a_missing_function(self, load):
        with pytest.raises(FunctionError, match=r"the file has no function 'reward'; give FILE.py:FUNCTION"):
            load("def score(completion): return 0.0")

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("import no_such_package", r"ModuleNotFoundError: No module named 'no_such_package' \(line 1\)"),
            ("x = 1\nraise OSError('no disk')", r"OSError: no disk \(line 2\)"),
            ("def reward(:", "SyntaxError: invalid syntax"),
        ],
    )
    def test_an_import_that_fails(self, load, text, reason):
        with pytest.raises(FunctionError, match=f"--custom-rm-path .*mine.py:reward: the file cannot be .*: {reason}"):
            load(text)

    def test_paths(self, tmp_path):
        with pytest.raises(ConfigError, match=r"--custom-rm-path names .*absent.py, which is not a file"):
            file_source(f"{tmp_path}/absent.py:reward")
        with pytest.raises(ConfigError, match=r"is package.module.function; give a Python file .* mine.py:reward"):
            file_source("package.module.function")
        (tmp_path / "mine.py").touch()
        assert file_source(f"{tmp_path}/mine.py").function == "reward"
        assert file_source(f"{tmp_path}/mine.py:other").function == "other"
