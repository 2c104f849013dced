"""Loads a reward function and calls it in its form, which the names of its parameters tell. No torch.

| form | parameters | result |
|---|---|---|
| this project | prompt, completion, conversation, label and columns of the row, by name | the reward |
| TRL | prompts, completions and columns, by name, as lists | a list of rewards |
| slime | args, sample | the reward; the function may be async |
| verl | data_source, solution_str, ground_truth, extra_info, by name | the reward |

A reward is a number, or a dict with the number under "score" and further numbers for the log.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron.base.errors import shown
from megatron.rl.builtin_rewards import built_in_function
from megatron.rl.rewards import Reward, RewardSource
from megatron.rl.user_functions import AnsweredPrompt, FunctionError, UserCall, arguments, import_function, names_of

FORMS = (
    "reward(prompt, completion, label, **row), which may also take conversation, TRL's reward(prompts, completions, "
    "**columns), slime's custom_rm(args, sample) and verl's compute_score(data_source, solution_str, ground_truth, "
    "extra_info)"
)


@dataclass(frozen=True)
class RewardSample:
    """The sample that a function of slime's form gets. `metadata` is the row's column of this name."""

    prompt: str
    response: str
    label: Any
    metadata: Mapping[str, Any]
    tokens: tuple[int, ...]
    response_length: int


class RewardFunction:
    """Computes the reward of one answer."""

    def __init__(self, source: RewardSource) -> None:
        """Imports the file. Raises FunctionError in one line if that fails, or if the function has no known form."""
        if source.built_in is not None:
            self._call = UserCall(built_in_function(source))
            return
        assert source.path is not None, "a source names a built-in function or a file"
        function = import_function(source.path, source.function, str(source))
        self._call = UserCall(_bind(function, source), source.path)

    def __call__(self, answer: AnsweredPrompt) -> Reward:
        """Returns the reward. Raises ValueError with the reason if the function fails or returns something else."""
        return as_reward(self._call(answer))


def as_reward(value: Any) -> Reward:
    """Returns a number, or a dict with "score" and further numbers, as a reward. Raises ValueError for other values.

    Entries of the dict that are no finite number, such as texts, are not for the log and left out.
    """
    if not isinstance(value, Mapping):
        return Reward(_finite(value))
    if "score" not in value:
        raise ValueError(f"it returned a dict without 'score', with {', '.join(map(str, value)) or 'no key'}")
    numbers = ((str(name), _number(entry)) for name, entry in value.items() if name != "score")
    figures = {name: number for name, number in numbers if number is not None and math.isfinite(number)}
    return Reward(_finite(value["score"]), figures)


def _finite(value: Any) -> float:
    number = _number(value)
    if number is None:
        raise ValueError(f"it returned {shown(value)}, a {type(value).__name__}, not a number")
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}, which is not finite")
    return number


def _number(value: Any) -> float | None:
    """Returns a number of any library as a float, or None for another value."""
    if not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # such as an array of several numbers
        return None


def _bind(function: Callable[..., Any], source: RewardSource) -> Callable[[AnsweredPrompt], Any]:
    """Returns a function that calls another in its form. Raises FunctionError if it has none of the forms."""
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # it is written in C and has no names
        parameters = inspect.signature(function).parameters
    names = names_of(parameters)
    if "completion" in names or "conversation" in names:
        return lambda answer: function(**arguments(answer.values(), parameters))
    if "completions" in names:
        return lambda answer: _only(function(**arguments(_many(answer), parameters)))
    if "solution_str" in names:
        return lambda answer: function(**arguments(_scored(answer), parameters))
    if names[:2] == ["args", "sample"]:
        settings = SimpleNamespace(**source.settings)
        return lambda answer: function(settings, _sample(answer))
    written = ", ".join(map(str, parameters.values()))
    raise FunctionError(f"{source} has the parameters ({written}), which are none of the forms: {FORMS}")


def _many(answer: AnsweredPrompt) -> dict[str, Any]:
    """Returns lists of one. A prompt of messages has an answer of messages."""
    columns = {name: [value] for name, value in answer.row.items() if name not in ("prompt", "completion")}
    prompt: Any = answer.prompt
    completion: Any = answer.completion
    if answer.messages is not None:
        prompt = [dict(message) for message in answer.messages]
        completion = [dict(message) for message in answer.answers]
    ids = list(answer.completion_ids)
    return {**columns, "prompts": [prompt], "completions": [completion], "completion_ids": [ids]}


def _scored(answer: AnsweredPrompt) -> dict[str, Any]:
    return {
        "data_source": answer.row.get("data_source"),
        "solution_str": answer.completion,
        "ground_truth": answer.label,
        "extra_info": answer.row.get("extra_info"),
    }


def _sample(answer: AnsweredPrompt) -> RewardSample:
    metadata = answer.row.get("metadata") or {}
    ids = answer.completion_ids
    return RewardSample(answer.prompt, answer.completion, answer.label, metadata, ids, len(ids))


def _only(values: Any) -> Any:
    """Returns the one reward in a list. Raises ValueError for anything else."""
    try:
        (value,) = values
    except (TypeError, ValueError):
        raise ValueError(f"it returned {shown(values)} for one answer, not a list of one number") from None
    return value
