"""Loads a reward function and calls it in its form, which the names of its parameters tell. No torch.

| form | parameters | result |
|---|---|---|
| this project | prompt, completion, label and columns of the row, by name | the reward |
| TRL | prompts, completions and columns, by name, as lists | a list of rewards |
| slime | args, sample | the reward; the function may be async |
| verl | data_source, solution_str, ground_truth, extra_info, by name | the reward |

A reward is a number, or a dict with the number under "score" and further numbers for the log.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megatron.base.errors import first_line, shown
from megatron.rl.builtin_rewards import built_in_function
from megatron.rl.rewards import Reward, RewardError, RewardInput, RewardSource

FORMS = (
    "reward(prompt, completion, label, **row), TRL's reward(prompts, completions, **columns), slime's "
    "custom_rm(args, sample) and verl's compute_score(data_source, solution_str, ground_truth, extra_info)"
)
_MODULE = "megatron_custom_reward"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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
        """Imports the file. Raises RewardError in one line if that fails, or if the function has no known form."""
        self._source = source
        self._loop = asyncio.new_event_loop()
        if source.built_in is not None:
            self._call: Callable[[RewardInput], Any] = built_in_function(source)
            return
        function = getattr(_import(source), source.function, None)
        if not callable(function):
            raise RewardError(f"{source}: the file has no function '{source.function}'; give FILE.py:FUNCTION")
        self._call = _bind(function, source)

    def __call__(self, answer: RewardInput) -> Reward:
        """Returns the reward. Raises ValueError with the reason if the function fails or returns something else."""
        try:
            value = self._call(answer)
            if inspect.isawaitable(value):
                value = self._loop.run_until_complete(_result(value))
        except (Exception, SystemExit) as error:
            raise ValueError(f"{type(error).__name__}: {first_line(error)}{_place(error, self._source)}") from error
        return as_reward(value)


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


async def _result(value: Any) -> Any:
    return await value


def _import(source: RewardSource) -> ModuleType:
    """Runs the file as a module. Files in its folder can be imported by it, as in a program."""
    assert source.path is not None, "a source names a built-in function or a file"
    sys.path.insert(0, str(Path(source.path).parent))
    spec = importlib.util.spec_from_file_location(_MODULE, source.path)
    assert spec is not None and spec.loader is not None, "the path ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses and pickle look a class up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"{source}: the file cannot be imported: {type(error).__name__}: {first_line(error)}{_place(error, source)}"
        ) from error
    return module


def _place(error: BaseException, source: RewardSource) -> str:
    """Returns the line of the user's file where an error came from, as the end of a message."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source.path]
    return f" (line {lines[-1]})" if lines else ""


def _bind(function: Callable[..., Any], source: RewardSource) -> Callable[[RewardInput], Any]:
    """Returns a function that calls another in its form. Raises RewardError if it has none of the forms."""
    parameters: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # it is written in C and has no names
        parameters = inspect.signature(function).parameters
    names = [name for name, parameter in parameters.items() if parameter.kind in _NAMED]
    if "completion" in names:
        return lambda answer: function(**_arguments(_one(answer), parameters))
    if "completions" in names:
        return lambda answer: _only(function(**_arguments(_many(answer), parameters)))
    if "solution_str" in names:
        return lambda answer: function(**_arguments(_scored(answer), parameters))
    if names[:2] == ["args", "sample"]:
        settings = SimpleNamespace(**source.settings)
        return lambda answer: function(settings, _sample(answer))
    written = ", ".join(map(str, parameters.values()))
    raise RewardError(f"{source} has the parameters ({written}), which are none of the forms: {FORMS}")


def _arguments(values: dict[str, Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Returns the values that a function takes. Raises ValueError for a parameter without a value."""
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, parameter in parameters.items():
        if parameter.kind in _NAMED and parameter.default is inspect.Parameter.empty and name not in values:
            raise ValueError(f"it takes '{name}', and the row of the prompt has only {', '.join(sorted(values))}")
    return values if takes_all else {name: value for name, value in values.items() if name in parameters}


def _one(answer: RewardInput) -> dict[str, Any]:
    return {
        **answer.row,
        "prompt": answer.prompt,
        "completion": answer.completion,
        "label": answer.label,
        "completion_ids": list(answer.completion_ids),
    }


def _many(answer: RewardInput) -> dict[str, Any]:
    """Returns lists of one. A prompt of messages has an answer of messages."""
    columns = {name: [value] for name, value in answer.row.items() if name not in ("prompt", "completion")}
    prompt: Any = answer.prompt
    completion: Any = answer.completion
    if answer.messages is not None:
        prompt = [dict(message) for message in answer.messages]
        completion = [{"role": "assistant", "content": answer.completion}]
    ids = list(answer.completion_ids)
    return {**columns, "prompts": [prompt], "completions": [completion], "completion_ids": [ids]}


def _scored(answer: RewardInput) -> dict[str, Any]:
    return {
        "data_source": answer.row.get("data_source"),
        "solution_str": answer.completion,
        "ground_truth": answer.label,
        "extra_info": answer.row.get("extra_info"),
    }


def _sample(answer: RewardInput) -> RewardSample:
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
