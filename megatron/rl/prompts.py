"""Prompts of reinforcement learning: rows of files -> token ids, in an order that depends on the seed alone.

A row has one of three usual shapes, told apart by its values. Further columns are kept for the reward function.

| shape | prompt | label |
|---|---|---|
| slime | a text or messages under the input key | under the label key |
| verl | messages under `prompt` | `reward_model.ground_truth` |
| TRL | a text or messages under `prompt` | under the label key, or a column that the reward function names |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.base.errors import ConfigError, DataError, UserError
from megatron.base.log import get_logger
from megatron.core.datasets.jsonl import check_surrogates
from megatron.core.datasets.sft_records import parse_tools, parse_turns
from megatron.core.datasets.tokenizer import Tokenizer, beginning
from megatron.core.inference.chat import ChatTemplate, open_template
from megatron.rl.prompt_rows import FLAG, read_rows

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_TOGETHER = 1024  # prompts that are tokenized by one call, on the threads of the library
_logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The fields are flags. `max_length` is the largest number of tokens of a prompt, None for any.

    Without a label key the label is the row's `label`, verl's `reward_model.ground_truth`, or None. `needs_label`
    refuses rows without a label. `apply_chat_template` makes a text the turn of a user. `add_bos` puts the tokenizer's
    bos before texts, as in generation; a chat template writes its own.
    """

    prompt_data: tuple[str, ...]
    input_key: str = "prompt"
    label_key: str | None = None
    max_length: int | None = None
    apply_chat_template: bool = False
    add_bos: bool = False
    needs_label: bool = False


_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text` is what `ids` encode, without a bos; `messages` are those that were rendered to it, if any.

    `number` is its position among the prompts that are used, in the order of the files.
    """

    number: int
    ids: tuple[int, ...]
    text: str
    label: Any
    row: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...] | None = None


class PromptSet(Generic[_Item]):
    """Prompts, or pairs of answers to them, in an endless order: each epoch reads all of them once, shuffled by (seed,
    epoch) alone.

    So prompt n of a run is a function of the seed and n: it is the same on every rank and under every layout, and a
    run that continues reads on at the number where it stopped.
    """

    def __init__(self, prompts: Sequence[_Item], seed: int) -> None:
        """Keeps the prompts, of which there is at least one."""
        assert prompts, "data without prompts is refused where it is read"
        self._prompts, self._seed = prompts, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        """Returns the number of prompts of an epoch."""
        return len(self._prompts)

    @property
    def in_file_order(self) -> Sequence[_Item]:
        """The prompts of an epoch, in the order of the files."""
        return self._prompts

    def at(self, position: int) -> _Item:
        """Returns the prompt that is read at `position`, counted from 0 over all epochs."""
        epoch, offset = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return self._prompts[int(self._order[offset])]

    def batch(self, first: int, count: int) -> list[_Item]:
        """Returns the prompts at the positions [first, first + count)."""
        return [self.at(position) for position in range(first, first + count)]

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        # numpy guarantees that RandomState's streams never change, so an upgrade during a run keeps the order.
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self._seed, epoch])))
        return random.permutation(len(self._prompts)).astype(np.int64)


@dataclass(frozen=True)
class _Rendered:
    """A prompt before it is tokenized. `is_chat`: a template wrote the text."""

    place: str
    text: str
    label: Any
    row: dict[str, Any]
    messages: tuple[dict[str, Any], ...] | None


def load_prompts(options: PromptOptions, tokenizer: Tokenizer, seed: int) -> PromptSet[Prompt]:
    """Reads, renders and tokenizes all prompts.

    Longer ones than `max_length` are left out, and a log line counts them. Raises DataError in one line with the file
    and the number of the line for a row that cannot be used, and if no prompt is left; ConfigError for flags that do
    not fit the tokenizer.
    """
    template = open_template(tokenizer)
    bos = beginning(tokenizer, options.add_bos)
    rendered = [_render(place, row, options, template) for place, row in read_rows(options.prompt_data)]
    files = " ".join(options.prompt_data)
    if not rendered:
        raise DataError(f"{FLAG} {files} holds no prompt; write one JSON object per line")
    prompts: list[Prompt] = []
    shortest = None
    for start in range(0, len(rendered), _TOGETHER):
        part = rendered[start : start + _TOGETHER]
        encodings = encode_texts([(f"{FLAG} {prompt.place} has a prompt", prompt.text) for prompt in part], tokenizer)
        for prompt, encoded in zip(part, encodings, strict=True):
            if not encoded:
                raise DataError(f"{FLAG} {prompt.place} has a prompt without tokens; remove the row")
            ids = encoded if prompt.messages is not None else [*bos, *encoded]
            if options.max_length is not None and len(ids) > options.max_length:
                shortest = min(shortest or len(ids), len(ids))
                continue
            prompts.append(Prompt(len(prompts), tuple(ids), prompt.text, prompt.label, prompt.row, prompt.messages))
    if not prompts:
        raise DataError(
            f"{FLAG} {files} holds {len(rendered)} prompts, all longer than the {options.max_length} tokens that a "
            f"prompt may have; the shortest has {shortest}"
        )
    if len(prompts) < len(rendered):
        _logger.info(
            "%d of %d prompts are longer than %d tokens and left out",
            len(rendered) - len(prompts),
            len(rendered),
            options.max_length,
        )
    return PromptSet(prompts, seed)


def _render(place: str, row: dict[str, Any], options: PromptOptions, template: ChatTemplate | None) -> _Rendered:
    """Returns the text and the label of a row. Raises DataError and ConfigError with its place."""
    try:
        prompt = row[_present(row, options.input_key, "the prompt", "--input-key")]
        check_text_alone(row)
        label = _label(row, options)
        text, messages = _text(prompt, row, options, template)
        check_surrogates([text], options.input_key)
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {place} {error}") from error
    except (ValueError, DataError) as error:
        raise DataError(f"{FLAG} {place} {error}") from error
    return _Rendered(place, text, label, row, messages)


def _text(
    prompt: object, row: dict[str, Any], options: PromptOptions, template: ChatTemplate | None
) -> tuple[str, tuple[dict[str, Any], ...] | None]:
    """Returns (text, messages or None for a text that is read as it is). Raises ValueError, DataError and
    ConfigError.
    """
    key = options.input_key
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"has an empty prompt under '{key}'; remove the row")
        if not options.apply_chat_template:
            return prompt, None
        turns = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list):
        turns = parse_turns(prompt, key)
    else:
        raise ValueError(f"holds a {type(prompt).__name__} under '{key}', and a prompt is a text or a list of messages")
    if turns[-1]["role"] == "assistant":
        raise ValueError(f"ends with a turn of the assistant under '{key}'; a prompt ends before the answer")
    if not any(turn["content"].strip() for turn in turns):
        raise ValueError(f"has an empty prompt under '{key}'; remove the row")
    if template is None:
        cause = "has messages" if isinstance(prompt, list) else "becomes messages under --apply-chat-template"
        raise ConfigError(
            f"{cause}, and the tokenizer has no chat template; give --chat-template chatml, or a file that holds "
            "one, or write prompts as text"
        )
    tools = parse_tools(row.get("tools"))
    try:
        return template.render(turns, **({} if tools is None else {"tools": tools})), tuple(turns)
    except DataError as error:
        raise ValueError(f"has messages of another form: {error}") from error


def _label(row: dict[str, Any], options: PromptOptions) -> Any:
    if options.label_key is not None:
        return row[_present(row, options.label_key, "the label", "--label-key")]
    reward_model = row.get("reward_model")
    label = row.get("label")
    if label is None and isinstance(reward_model, dict):
        label = reward_model.get("ground_truth")
    if label is None and options.needs_label:
        raise ValueError(f"has no label under 'label', only {_keys(row)}; name its key with --label-key")
    return label


def _present(row: dict[str, Any], key: str, content: str, flag: str) -> str:
    """Returns the key. Raises ValueError if the row has no value under it."""
    if row.get(key) is None:
        raise ValueError(f"has no key '{key}', only {_keys(row)}; name the key of {content} with {flag}")
    return key


def _keys(row: dict[str, Any]) -> str:
    return ", ".join(sorted(name for name, value in row.items() if value is not None)) or "none"


def check_text_alone(row: Mapping[str, Any]) -> None:
    """Raises ValueError for a row with an image, a video or a sound, which would be left out."""
    for name in _MEDIA:
        if row.get(name) not in (None, "", [], {}):
            raise ValueError(f"holds '{name}', and only text is read; remove it if the prompt is whole without it")


def encode_texts(texts: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the ids of each text, which has the words with which an error about it begins before it.

    Raises DataError for a text that the tokenizer does not take.
    """
    try:
        return tokenizer.encode_batch([text for _, text in texts])
    except UserError:
        for words, text in texts:
            try:
                tokenizer.encode(text)
            except UserError as error:
                raise DataError(f"{words} that cannot be tokenized: {error}") from error
        raise
