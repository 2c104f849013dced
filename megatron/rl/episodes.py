"""Episodes: a prompt, the answers of the policy, and the turns of an environment between them, as tokens.

[Note: token ids from end to end]
Sampled tokens are never encoded again: the text of an answer may have other tokens than those that were sampled. A turn
of the environment is encoded alone, and its tokens follow those of the answer. With a chat template its text is all
that the template writes behind the text of the answer, up to where the next answer begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron.base.errors import DataError, UserError
from megatron.core.datasets.sft_records import parse_tools
from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.inference.chat import open_template
from megatron.core.inference.generate import Completion
from megatron.rl.environments import FLAG
from megatron.rl.prompts import Prompt
from megatron.rl.user_functions import ASSISTANT, AnsweredPrompt

_ANSWER = "answer-of-the-assistant"  # stands for the last answer when a template is rendered; no template changes it


@dataclass(frozen=True)
class EnvironmentTurn:
    """What stands between two answers: the tokens behind the one that ends the first answer, its text, and messages.

    With a chat template the text begins with the end of the first answer's turn.
    """

    ids: tuple[int, ...]
    text: str
    messages: tuple[Mapping[str, Any], ...]


@dataclass(kw_only=True)
class Episode:
    """A prompt with its number in the run, and all that follows it. `number` is that of the episode in its group.

    ids: the tokens behind the prompt. mask: 1 for those that were sampled, else 0. logprobs: of the sampled ones. text:
    of all turns, without the token that ends the last answer. turns: as messages. is_cut: a turn has no room, or the last
    answer has reached the longest length. failure: why the environment gave no turn. is_over: no answer follows.
    experts: of all tokens that the sampler has read, if it has recorded them; see megatron/rl/routing.py.
    """

    prompt_number: int
    number: int
    prompt: Prompt
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    turns: list[Mapping[str, Any]] = field(default_factory=list)
    is_cut: bool = False
    failure: str | None = None
    is_over: bool = False
    experts: Tensor | None = None

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens so far."""
        return (*self.prompt.ids, *self.ids)

    @property
    def answer_count(self) -> int:
        """The number of answers so far."""
        return sum(turn["role"] == ASSISTANT for turn in self.turns)

    def add_answer(self, completion: Completion) -> None:
        """Adds an answer. One that has reached its longest length ends the episode."""
        self.ids += completion.ids
        self.mask += [1] * len(completion.ids)
        self.logprobs += completion.logprobs
        self.experts = completion.experts  # of the turns before, too, which were read again
        self.text += completion.text
        self.turns.append({"role": ASSISTANT, "content": completion.text})
        self.is_cut = self.is_over = completion.reason == "length"

    def add_turn(self, turn: EnvironmentTurn, room: int) -> None:
        """Adds a turn of the environment, or ends the episode if an answer behind it has no room.

        room: the most tokens behind the prompt.
        """
        if len(self.ids) + len(turn.ids) >= room:
            self.is_cut = self.is_over = True
            return
        self.ids += turn.ids
        self.mask += [0] * len(turn.ids)
        self.text += turn.text
        self.turns += turn.messages

    def answered(self) -> AnsweredPrompt:
        """Returns all that functions of the user read."""
        prompt = self.prompt
        return AnsweredPrompt(
            prompt.text, self.text, prompt.label, prompt.row, tuple(self.ids), prompt.messages, tuple(self.turns)
        )


class TurnEncoder:
    """Encodes the turns of an environment. See [Note: token ids from end to end]."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._template = tokenizer, open_template(tokenizer)

    def encode(self, episode: Episode, written: str | Sequence[Mapping[str, Any]]) -> EnvironmentTurn:
        """Returns the turn that the environment wrote behind the episode's last answer: a text, which is taken as it
        is, or messages. Raises DataError for messages that the chat template does not take.
        """
        messages: tuple[Mapping[str, Any], ...]
        if isinstance(written, str):
            text = new = written
            messages = ({"role": "user", "content": written},)
        else:
            messages = tuple(dict(message) for message in written)
            text = self._behind_answer(episode, messages)
            # The token that ended the answer is the beginning of that text, unless another one ended it.
            new = text.removeprefix(self._tokenizer.decode(episode.ids[-1:]))
        try:
            ids = self._tokenizer.encode(new)
        except UserError as error:
            raise DataError(f"{FLAG} wrote a turn that cannot be tokenized: {error}") from error
        return EnvironmentTurn(tuple(ids), text, messages)

    def _behind_answer(self, episode: Episode, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns all that the template writes behind the text of the last answer."""
        prompt = episode.prompt
        assert self._template is not None and prompt.messages is not None, "a template rendered the prompt"
        before = [*prompt.messages, *episode.turns[:-1], {"role": ASSISTANT, "content": _ANSWER}]
        tools = parse_tools(prompt.row.get("tools"))
        try:
            text = self._template.render([*before, *messages], **({} if tools is None else {"tools": tools}))
        except DataError as error:
            raise DataError(f"{FLAG} wrote a turn for which {error}") from error
        _, answer, behind = text.rpartition(_ANSWER)
        if not answer:
            raise DataError(f"{FLAG} needs a chat template that writes answers before the last one, and it writes none")
        return behind
