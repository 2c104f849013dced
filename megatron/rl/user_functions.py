"""The values that functions of a user read, and how their file is imported and called. No torch: the processes that
call them import this, too."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.base.errors import ConfigError, UserError, first_line

ASSISTANT = "assistant"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FunctionError(UserError):
    """A function of the user cannot be used, or failed for an answer. One rank calls the function, and only that rank
    raises this.
    """

    on_all_ranks = False


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt and all that followed it: all that a reward function or an environment may read.

    `prompt` is a text, and `completion` the text behind it, whose tokens are `completion_ids`. `messages` are those of
    the prompt if it had messages. `turns` are the messages behind the prompt: the answers, and those of the environment
    between them; empty for a single answer, which is then the completion.
    """

    prompt: str
    completion: str
    label: Any
    row: Mapping[str, Any]
    completion_ids: tuple[int, ...] = ()
    messages: tuple[Mapping[str, Any], ...] | None = None
    turns: tuple[Mapping[str, Any], ...] = ()

    @property
    def answers(self) -> tuple[Mapping[str, Any], ...]:
        """The messages behind the prompt, also for a single answer."""
        return self.turns or ({"role": ASSISTANT, "content": self.completion},)

    @property
    def last_answer(self) -> str:
        """The text of the last message, which is an answer."""
        return str(self.answers[-1]["content"])

    def values(self) -> dict[str, Any]:
        """Returns the values that a function gets by the names of its parameters: the columns of the row, and these."""
        prompt = self.messages or ({"role": "user", "content": self.prompt},)
        return {
            **self.row,
            "prompt": self.prompt,
            "completion": self.completion,
            "label": self.label,
            "completion_ids": list(self.completion_ids),
            "conversation": [dict(message) for message in (*prompt, *self.answers)],
        }


class UserCall:
    """Calls a function for an answer, and waits for the result of an async one."""

    def __init__(self, call: Callable[[AnsweredPrompt], Any], path: str | None = None) -> None:
        """path: of the user's file, if the function is in one."""
        self._call, self._path = call, path
        self._loop = asyncio.new_event_loop()

    def __call__(self, answer: AnsweredPrompt) -> Any:
        """Returns the function's result. Raises ValueError with the reason if the function fails."""
        try:
            value = self._call(answer)
            if inspect.isawaitable(value):
                value = self._loop.run_until_complete(_result(value))
        except (Exception, SystemExit) as error:
            raise ValueError(f"{type(error).__name__}: {first_line(error)}{line_of(error, self._path)}") from error
        return value


async def _result(value: Any) -> Any:
    return await value


def file_and_function(flag: str, text: str, default: str) -> tuple[str, str]:
    """Returns the absolute path and the name of the function in a flag's value, `file.py` or `file.py:function`.

    Raises ConfigError for a file that does not exist.
    """
    path, separator, function = text.rpartition(":")
    if not separator or not function.isidentifier():
        path, function = text, default
    if not path.endswith(".py"):
        raise ConfigError(f"{flag} is {text}; give a Python file and a name in it, such as mine.py:{default}")
    if not Path(path).is_file():
        raise ConfigError(f"{flag} names {path}, which is not a file")
    return str(Path(path).absolute()), function


def import_function(path: str, name: str, flag: str) -> Callable[..., Any]:
    """Returns a function, or a class, of a file, which runs as a module of its own.

    flag: with its value, for messages. Raises FunctionError in one line if that fails.
    """
    module = _import(path, flag)
    function = getattr(module, name, None)
    if not callable(function):
        raise FunctionError(f"{flag}: the file has no function '{name}'; give FILE.py:FUNCTION")
    return function


def _import(path: str, flag: str) -> ModuleType:
    """Runs the file as a module. Files in its folder can be imported by it, as in a program."""
    name = f"megatron_user_{Path(path).stem}"
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the path ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {first_line(error)}{line_of(error, path)}"
        raise FunctionError(f"{flag}: the file cannot be imported: {reason}") from error
    return module


def line_of(error: BaseException, path: str | None) -> str:
    """Returns the line of the user's file where an error came from, as the end of a message."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f" (line {lines[-1]})" if lines else ""


def names_of(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Returns the parameters that can be given by name."""
    return [name for name, parameter in parameters.items() if parameter.kind in _NAMED]


def arguments(values: dict[str, Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Returns the values that a function takes. Raises ValueError for a parameter without a value."""
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in names_of(parameters):
        if parameters[name].default is inspect.Parameter.empty and name not in values:
            raise ValueError(f"it takes '{name}', and the row of the prompt has only {', '.join(sorted(values))}")
    return values if takes_all else {name: value for name, value in values.items() if name in parameters}
