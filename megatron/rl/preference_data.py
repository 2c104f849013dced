"""Pairs of a chosen and a rejected answer: rows of files -> token ids.

A row has one of these shapes, told apart by its values. Answers are texts, a message, or lists of messages.

| shape | prompt | answers |
|---|---|---|
| TRL | a text or messages under the input key | under `chosen` and `rejected` |
| TRL, implicit prompt | none: it is the common beginning of both answers | whole texts or conversations |
| ShareGPT | `conversations`: turns of {from, value} | `chosen` and `rejected`: a turn of {from, value} |

Turns may be {role, content} or {from, value} everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.base.errors import ConfigError, DataError
from megatron.base.log import get_logger
from megatron.core.datasets.jsonl import check_surrogates
from megatron.core.datasets.sft_records import parse_tools, parse_turns
from megatron.core.datasets.tokenizer import Tokenizer, beginning
from megatron.core.inference.chat import ChatTemplate, open_template
from megatron.rl.answers import Answered
from megatron.rl.prompt_rows import read_rows
from megatron.rl.prompts import PromptSet, check_text_alone, encode_texts

FLAG = "--preference-data"
_CHOSEN, _REJECTED = "chosen", "rejected"
_NO_BEGINNING = (
    f"has no prompt, and '{_CHOSEN}' and '{_REJECTED}' have no common beginning; name the key of the prompt with "
    "--input-key"
)
_TOGETHER = 1024  # pairs that are tokenized by one call
_logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """The fields are flags, as in PromptOptions. `max_length` is the largest number of tokens of a prompt with an
    answer."""

    preference_data: tuple[str, ...]
    max_length: int
    input_key: str = "prompt"
    apply_chat_template: bool = False
    add_bos: bool = False


class PreferencePair:
    """Two answers to one prompt, of which the first is preferred. All pairs of a run are held, in 4 bytes per token.

    reference: log-probabilities of the tokens of both answers under the reference, if they are known.
    """

    reference: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None

    def __init__(self, prompt: Sequence[int], chosen: Sequence[int], rejected: Sequence[int]) -> None:
        self._prompt, self._chosen, self._rejected = (np.array(ids, np.int32) for ids in (prompt, chosen, rejected))

    @property
    def chosen(self) -> Answered:
        """The preferred answer."""
        return Answered(prompt_ids=tuple(self._prompt.tolist()), ids=tuple(self._chosen.tolist()))

    @property
    def rejected(self) -> Answered:
        """The other answer."""
        return Answered(prompt_ids=tuple(self._prompt.tolist()), ids=tuple(self._rejected.tolist()))

    @property
    def length(self) -> int:
        """Tokens of the prompt with the longer answer."""
        return len(self._prompt) + max(len(self._chosen), len(self._rejected))

    @property
    def is_a_choice(self) -> bool:
        """Whether the answers differ."""
        return not np.array_equal(self._chosen, self._rejected)


@dataclass(frozen=True)
class _RenderedPair:
    """A pair before it is tokenized. `is_chat`: a template wrote the texts, which have their own bos and end then."""

    place: str
    prompt: str
    chosen: str
    rejected: str
    is_chat: bool


def load_preferences(options: PreferenceOptions, tokenizer: Tokenizer, seed: int) -> PromptSet[PreferencePair]:
    """Reads, renders and tokenizes all pairs.

    Pairs that are longer than `max_length` and those whose answers are the same are left out, and a log line counts
    them. Raises DataError in one line with the file and the number of the line for a row that cannot be used, and if no
    pair is left; ConfigError for flags that do not fit the tokenizer.
    """
    template, files = open_template(tokenizer), " ".join(options.preference_data)
    bos = beginning(tokenizer, options.add_bos)
    rendered = (_render(place, row, options, template) for place, row in read_rows(options.preference_data, FLAG))
    pairs: list[PreferencePair] = []
    rows = same = shortest = 0
    while part := list(islice(rendered, _TOGETHER)):
        rows += len(part)
        for pair in _encode(part, tokenizer, bos):
            if not pair.is_a_choice:
                same += 1
            elif pair.length > options.max_length:
                shortest = min(shortest or pair.length, pair.length)
            else:
                pairs.append(pair)
    if not rows:
        raise DataError(f"{FLAG} {files} holds no pair; write one JSON object per line")
    too_long = rows - same - len(pairs)
    if not pairs:
        raise DataError(
            f"{FLAG} {files} holds {rows} pairs, of which none can be trained on: {same} have the same answer twice, "
            f"and {too_long} are longer than --seq-length {options.max_length}"
            + (f", the shortest with {shortest} tokens" if shortest else "")
        )
    if len(pairs) < rows:
        _logger.info(
            "%d of %d pairs are left out: %d are longer than --seq-length %d, and %d have the same answer twice",
            rows - len(pairs),
            rows,
            too_long,
            options.max_length,
            same,
        )
    return PromptSet(pairs, seed)


def _render(
    place: str, row: dict[str, Any], options: PreferenceOptions, template: ChatTemplate | None
) -> _RenderedPair:
    """Returns the texts of a row. Raises DataError and ConfigError with its place."""
    try:
        check_text_alone(row)
        for name in (_CHOSEN, _REJECTED):
            if row.get(name) is None:
                keys = ", ".join(sorted(key for key, value in row.items() if value is not None)) or "none"
                raise ValueError(f"has no key '{name}', only {keys}")
        prompt, chosen, rejected = row.get(options.input_key), row[_CHOSEN], row[_REJECTED]
        if prompt is None and row.get("conversations") is not None:
            prompt = parse_turns(row["conversations"], "conversations")
        are_texts = isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None)
        if are_texts and not options.apply_chat_template:
            if row.get("system"):
                raise ValueError("holds 'system', for which texts have no place; write it into the prompt")
            result = _RenderedPair(place, *_texts(prompt, chosen, rejected), is_chat=False)
        elif prompt is None and are_texts:
            raise ValueError(
                f"has no key '{options.input_key}', and --apply-chat-template needs a prompt of its own; remove the "
                "flag if the texts hold the turns already"
            )
        else:
            result = _from_messages(
                place, row, prompt, _messages(chosen, _CHOSEN), _messages(rejected, _REJECTED), template
            )
        for name, text in (("prompt", result.prompt), (_CHOSEN, result.chosen), (_REJECTED, result.rejected)):
            check_surrogates([text], name)
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {place} {error}") from error
    except (ValueError, DataError) as error:
        raise DataError(f"{FLAG} {place} {error}") from error
    return result


def _texts(prompt: str | None, chosen: str, rejected: str) -> tuple[str, str, str]:
    """Returns (prompt, chosen, rejected), of which the last two have no common beginning without a prompt.

    An implicit prompt ends before a space, so that no word is cut. Raises ValueError for an empty one.
    """
    if prompt is None:
        prompt = chosen[: _common(chosen, rejected)]
        if chosen != rejected:  # two answers that are the same are left out later
            space = max((place for place, letter in enumerate(prompt) if letter.isspace()), default=0)
            prompt = prompt[:space] or prompt
            if not prompt.strip():
                raise ValueError(_NO_BEGINNING)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt.strip():
        raise ValueError("has an empty prompt; remove the row")
    return prompt, chosen, rejected


def _from_messages(
    place: str,
    row: Mapping[str, Any],
    prompt: object,
    chosen: list[dict[str, Any]],
    rejected: list[dict[str, Any]],
    template: ChatTemplate | None,
) -> _RenderedPair:
    """Returns the texts of conversations. An answer's text is that of the conversation with it, without the prompt's.

    Raises ValueError, DataError and ConfigError.
    """
    if template is None:
        raise ConfigError(
            "has messages, and the tokenizer has no chat template; give --chat-template chatml, or a file that holds "
            "one, or write prompts and answers as text"
        )
    if prompt is None:
        # Two answers that are the same are left out later.
        turns = chosen[:-1] if chosen == rejected else chosen[: _common(chosen, rejected)]
        if not turns:
            raise ValueError(_NO_BEGINNING)
    elif isinstance(prompt, str):
        turns = [{"role": "user", "content": prompt}]
    else:
        turns = parse_turns(prompt, "the prompt")
    # Some data has the whole conversation in its answers although the prompt has a key of its own.
    chosen, rejected = _without(turns, chosen), _without(turns, rejected)
    if not any(turn["content"].strip() for turn in turns):
        raise ValueError("has an empty prompt; remove the row")
    if row.get("system") and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": row["system"]}, *turns]
    tools = parse_tools(row.get("tools"))
    more = {} if tools is None else {"tools": tools}
    text = template.render(turns, **more)

    def answer_text(answer: list[dict[str, Any]], name: str) -> str:
        _check_answer(answer, name)
        whole = template.render([*turns, *answer], add_generation_prompt=False, **more)
        if not whole.startswith(text):
            raise ValueError(
                f"has a prompt that the chat template writes otherwise where the answer under '{name}' follows; give "
                "another --chat-template"
            )
        return whole[len(text) :]

    return _RenderedPair(place, text, answer_text(chosen, _CHOSEN), answer_text(rejected, _REJECTED), is_chat=True)


def _without(prompt: Sequence[Mapping[str, Any]], answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the turns of an answer without those of the prompt, with which it may begin."""
    return answer[len(prompt) :] if answer[: len(prompt)] == list(prompt) else answer


def _common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Returns the number of turns, or of letters, with which both begin."""
    return next(
        (number for number, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
        min(len(chosen), len(rejected)),
    )


def _check_answer(answer: Sequence[Mapping[str, Any]], name: str) -> None:
    if not answer or answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
        roles = ", ".join(turn["role"] for turn in answer) or "none"
        raise ValueError(
            f"has an answer under '{name}' whose turns are of {roles}; an answer begins behind the prompt, which both "
            "have in common, and begins and ends with a turn of the assistant"
        )


def _messages(value: object, name: str) -> list[dict[str, Any]]:
    """Returns the turns of an answer. Raises ValueError."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return parse_turns([value] if isinstance(value, dict) else value, name)


def _encode(part: Sequence[_RenderedPair], tokenizer: Tokenizer, bos: Sequence[int]) -> Iterator[PreferencePair]:
    """Yields the pairs as token ids. Raises DataError with the place."""
    texts = [
        (f"{FLAG} {pair.place} has a text under '{name}'", text)
        for pair in part
        for name, text in (("prompt", pair.prompt), (_CHOSEN, pair.chosen), (_REJECTED, pair.rejected))
    ]
    encoded = iter(encode_texts(texts, tokenizer))
    for pair in part:
        prompt, chosen, rejected = (next(encoded) for _ in range(3))
        answers = [chosen, rejected]
        if not pair.is_chat:
            prompt = [*bos, *prompt]
            answers = [ids if ids[-1:] == [tokenizer.eod] else [*ids, tokenizer.eod] for ids in answers]
        if not prompt or not all(answers):
            empty = "a prompt" if not prompt else "an answer"
            raise DataError(f"{FLAG} {pair.place} has {empty} without tokens; remove the row")
        yield PreferencePair(prompt, *answers)
