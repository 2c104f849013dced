"""Continues prompts to their ends: the batching engine with all requests submitted at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.context_limit import context_limit
from megatron.config.model import ModelConfig
from megatron.core.comm.collectives import gather_objects
from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.inference.engine.continuous_batching import InferenceEngine, Request, RequestOutput
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.engine.slots import SlotDecoder
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.context import Build


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt.

    `ids` are the new tokens, including the one that ended the sequence. `text` is their text, up to the end-of-document
    token or the stop string. `reason` is "stop" for those two, and "length" if the token limit was reached first.
    `logprobs`, if requested, are the natural log-probabilities of `ids`, in the model's whole distribution. `experts`,
    if requested: those of the tokens of the prompt and of `ids` but for the last, which was never an input, int16
    [tokens, layers with experts on this rank, k] in host memory.
    """

    ids: list[int]
    text: str
    reason: str
    logprobs: tuple[float, ...] = ()
    experts: Tensor | None = None


class _Collector:
    """Collects the outputs of all requests into completions, and passes them on."""

    def __init__(
        self, count: int, on_text: Callable[[int, str], None], on_end: Callable[[int, Completion], None]
    ) -> None:
        self.completions: list[Completion | None] = [None] * count
        self.error = ""
        self._texts = [""] * count
        self._logprobs: list[list[float]] = [[] for _ in range(count)]
        self._on_text, self._on_end = on_text, on_end

    def add(self, index: int, output: RequestOutput) -> None:
        self.error = self.error or output.error
        if output.text:
            self._texts[index] += output.text
            self._on_text(index, output.text)
        self._logprobs[index] += [token.logprob for token in output.tokens if token.logprob is not None]
        if output.reason is not None and not output.error:
            completion = Completion(list(output.ids), self._texts[index], output.reason, tuple(self._logprobs[index]))
            self.completions[index] = completion
            self._on_end(index, completion)


def generate(
    model: GPTModel,
    build: Build,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling,
    seeds: Sequence[int],
    batch_size: int | None = None,
    stop_ids: Collection[int] = (),
    stop_strings: Sequence[str] = (),
    shows_special: bool = True,
    logprobs: bool = False,
    records_experts: bool = False,
    on_text: Callable[[int, str], None] = lambda index, piece: None,
    on_end: Callable[[int, Completion], None] = lambda index, completion: None,
) -> list[Completion]:
    """Continues encoded prompts to their ends; returns one completion per prompt, the same on all ranks of tp x pp.

    `model` is in evaluation mode, built without sequence parallelism, and holds this pipeline rank's stage. At most
    `batch_size` prompts, by default all, are continued at the same time; the others follow when one ends.
    `max_new_tokens` is one limit for all prompts, or one per prompt. `seeds` has one seed per prompt; with the same
    seed a prompt continues equally alone, in any batch, and under any tp and pp. The tokenizer's eod always ends a
    sequence. Without `shows_special`, special tokens have no text. With `logprobs`, completions have those of their
    tokens, and with `records_experts` the experts that layers have chosen for them.

    On the first rank of tp x pp, `on_text(i, piece)` is called with the text of completion i as it is generated, and
    `on_end(i, completion)` when it is complete; its pieces joined are the completion's text.

    Communication per step: SlotDecoder's; at the end the completions are gathered over tp x pp. Raises, on all ranks,
    ConfigError for prompts that are empty or too long, before the first step; CheckpointError for logits that are not
    finite.
    """
    assert len(seeds) == len(prompts), f"{len(seeds)} seeds for {len(prompts)} prompts"
    lengths = [len(prompt) for prompt in prompts]
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    for number, (length, limit) in enumerate(zip(lengths, limits, strict=True), start=1):
        check_length(number, length, limit, build.config)
    slots = max(1, min(batch_size or len(prompts), len(prompts)))
    capacity = max((length + limit for length, limit in zip(lengths, limits, strict=True)), default=1)
    decoder = SlotDecoder(model, build, slots=slots, capacity=capacity, records_experts=records_experts)
    collector = _Collector(len(prompts), on_text, on_end)
    if build.groups.model.rank == 0:
        engine = InferenceEngine(decoder, tokenizer, max_waiting=len(prompts), stop_ids=stop_ids)
        engine.submit(
            [
                Request(
                    prompt=prompt,
                    max_new_tokens=limit,
                    sampling=sampling,
                    seed=seed,
                    on_output=functools.partial(collector.add, index),
                    stop_strings=stop_strings,
                    shows_special=shows_special,
                    top_logprobs=0 if logprobs else None,
                )
                for index, (prompt, limit, seed) in enumerate(zip(prompts, limits, seeds, strict=True))
            ]
        )
        while not collector.error and engine.step():
            pass
        while decoder.accompany():  # see [Note: replicas that share experts] in slots.py
            pass
        decoder.close()
    else:
        decoder.follow()
    error, completions = gather_objects((collector.error, collector.completions), build.groups.model)[0]
    if error:
        raise CheckpointError(
            f"{error} in {build.config.dtype_name}; try an earlier checkpoint with --ckpt-step, or another precision"
        )
    # The engine reads requests in their order, so a completion has the number of its sequence.
    return [replace(completion, experts=decoder.experts.get(n)) for n, completion in enumerate(completions)]


def check_lengths(lengths: Sequence[int], max_new_tokens: int, config: ModelConfig) -> None:
    """Raises ConfigError unless every prompt has a token, and room for `max_new_tokens` more."""
    for number, length in enumerate(lengths, start=1):
        check_length(number, length, max_new_tokens, config)


def check_length(number: int, length: int, max_new_tokens: int, config: ModelConfig) -> None:
    """Raises ConfigError unless prompt `number`, counted from 1, has a token, and room for `max_new_tokens` more."""
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens} must be at least 1")
    if length == 0:
        raise ConfigError(f"prompt {number} has no tokens; give it some text, or --add-bos")
    limit = context_limit(config)
    if limit is not None and length + max_new_tokens > limit[0]:
        room = limit[0] - length
        fix = f"give --max-new-tokens {room} or less, or shorten it" if room > 0 else "shorten it"
        raise ConfigError(
            f"prompt {number} has {length} tokens, with --max-new-tokens {max_new_tokens} that is "
            f"{length + max_new_tokens}, above the model's {limit[1]} {limit[0]}; {fix}"
        )
