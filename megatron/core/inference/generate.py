"""Batched generation with a KV cache: token ids in, token ids out, one step at a time. text.py adds the text.

[Note: prompts of different lengths]
Prompts are padded on the left, so that every sequence's newest token is in the last column. A sequence's positions
count from its first real token, and padding is a separate segment: a sequence gets the same results as it would alone.
On a GPU prompts are read without a mask; each later step has a mask of one row per sequence, or none without padding.

[Note: outgrown frequencies]
LongRoPE rotates a sequence with its short factors up to the original context length, and with its long factors above. When
a sequence grows beyond that length, all its keys change, and through attention also its values. So its tokens are read
again, once. Every step then gives the logits of a full forward, as in transformers' generate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.model import ModelConfig
from megatron.core.comm.collectives import all_gather, broadcast
from megatron.core.inference.kv_cache import allocate_caches
from megatron.core.inference.sampling import Draws, Sampling, choose
from megatron.core.inference.staged import StagedModel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.context import Build
from megatron.kernels.ops.attention_segments import Segments, segments_of


class CachedDecoder:
    """A batch of sequences that a model reads from left to right, each position once."""

    def __init__(self, model: GPTModel, build: Build, lengths: Sequence[int], capacity: int) -> None:
        """`lengths`: the number of real tokens of each prompt, at the end of its row. `capacity`: columns of the whole
        batch.
        """
        assert not build.sequence_parallel, "steps of one position cannot be sharded along the sequence"
        padding = max(lengths) - torch.tensor(lengths).unsqueeze(1)  # [b, 1]
        self._on_host = (torch.arange(capacity) >= padding).long() if min(lengths) < max(lengths) else None
        self._ids = None if self._on_host is None else self._on_host.to(build.device)
        self._padding, self._device = padding.to(build.device), build.device
        columns = torch.arange(capacity, device=build.device)
        self._positions = (columns - self._padding).clamp(min=0)  # [b, capacity]
        longrope = None if build.spec.rotary is None else build.spec.rotary.longrope
        # With so many columns a sequence has the original length; see [Note: outgrown frequencies].
        self._outgrown = {longrope.original + max(lengths) - each for each in lengths} if longrope else set()
        self._read: list[Tensor] = []  # all tokens so far, where they may have to be read again
        self._model, self._tp, self._length = StagedModel(model, build), build.groups.tp, 0
        self._caches = allocate_caches(build, self._model.attentions, len(lengths), capacity)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Reads the batch's next columns [b, s]; returns logits of the last one [b, padded vocab], equal on all ranks.

        Communication: StagedModel's, and one all-gather over tp of [vocab / tp, b].
        """
        if self._outgrown:
            self._read.append(tokens)
        if any(self._length <= columns < self._length + tokens.shape[1] for columns in self._outgrown):
            tokens, self._length = torch.cat(self._read, dim=1), 0
            for cache in self._caches:
                cache.clear()
        new = slice(self._length, self._length + tokens.shape[1])
        lengths = new.stop - self._padding
        hidden = self._model.hidden(tokens, self._positions[:, new], self._segments(new), self._caches, lengths=lengths)
        logits = self._model.next_logits(hidden, len(tokens))
        self._length = new.stop
        return all_gather(logits.t(), self._tp).t()

    def _segments(self, new: slice) -> Segments | None:
        """Padding and prompt of each sequence, as far as the new columns see them."""
        if self._ids is None or self._on_host is None:
            return None
        if new.start == 0:
            return segments_of(self._on_host[:, : new.stop], self._device)
        return Segments(self._ids[:, : new.stop])


def generate(
    model: GPTModel,
    build: Build,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    vocab_size: int,
    sampling: Sampling,
    seeds: Sequence[int],
    stop: Callable[[int, int], bool],
) -> Iterator[list[int | None]]:
    """Continues a batch of prompts: each step yields the next id of each sequence, or None for those that have ended.

    `model` is in evaluation mode, built without sequence parallelism, and holds this pipeline rank's stage. Only ids
    below `vocab_size` are chosen. `seeds` has one seed per prompt; with the same seed a prompt continues equally alone,
    in any batch, and under any tp and pp. `stop(i, id)` is called for each new id of sequence i, on all ranks, where it
    must return the same; True ends the sequence with this id.

    Communication per step: StagedModel's, one all-gather of [vocab / tp, b] over tp and one broadcast of [b] over tp x
    pp. Raises ConfigError, before the first step, for prompts that are empty or too long; CheckpointError for logits
    that are not finite.
    """
    assert len(seeds) == len(prompts), f"{len(seeds)} seeds for {len(prompts)} prompts"
    check_lengths([len(prompt) for prompt in prompts], max_new_tokens, build.config)
    return _steps(model, build, prompts, max_new_tokens, vocab_size, sampling, seeds, stop)


def check_lengths(lengths: Sequence[int], max_new_tokens: int, config: ModelConfig) -> None:
    """Raises ConfigError unless every prompt has a token, and room for `max_new_tokens` more."""
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens} must be at least 1")
    limit = config.max_position_embeddings
    for number, length in enumerate(lengths, start=1):
        if length == 0:
            raise ConfigError(f"prompt {number} has no tokens; give it some text, or --add-bos")
        if limit is not None and length + max_new_tokens > limit:
            room = limit - length
            fix = f"give --max-new-tokens {room} or less, or shorten it" if room > 0 else "shorten it"
            raise ConfigError(
                f"prompt {number} has {length} tokens, with --max-new-tokens {max_new_tokens} that is "
                f"{length + max_new_tokens}, above the model's --max-position-embeddings {limit}; {fix}"
            )


@torch.inference_mode()
def _steps(
    model: GPTModel,
    build: Build,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    vocab_size: int,
    sampling: Sampling,
    seeds: Sequence[int],
    stop: Callable[[int, int], bool],
) -> Iterator[list[int | None]]:
    lengths = [len(prompt) for prompt in prompts]
    decoder = CachedDecoder(model, build, lengths, capacity=max(lengths) + max_new_tokens)
    draws = None if sampling.greedy else Draws(list(seeds))
    tokens = _pad_left(prompts, build.device)
    running = [True] * len(prompts)
    for _ in range(max_new_tokens):
        logits = decoder(tokens)[:, : build.config.vocab_size]
        if not logits.isfinite().all():
            raise CheckpointError(
                "the model's logits are not finite: its weights are damaged or have diverged, or overflow in "
                f"{build.config.dtype_name}; try an earlier checkpoint with --ckpt-step"
            )
        chosen = _choose_on_first(logits[:, :vocab_size], sampling, draws, build)
        ids = [token if runs else None for token, runs in zip(chosen.tolist(), running, strict=True)]
        running = [token is not None and not stop(i, token) for i, token in enumerate(ids)]
        yield ids
        if not any(running):
            return
        tokens = chosen.unsqueeze(1)  # Sequences that have ended continue unseen: their rows affect no other.


def _choose_on_first(logits: Tensor, sampling: Sampling, draws: Draws | None, build: Build) -> Tensor:
    """Returns ids [b] chosen by the first rank: on CUDA ranks may differ in the last bit of a sum, and so in a draw."""
    ranks, device = build.groups.model, build.device
    if ranks.rank == 0:
        numbers = None if draws is None else draws.next().to(device)
        ids = choose(logits, sampling, numbers)
    else:
        ids = torch.empty(len(logits), dtype=torch.int64, device=device)
    return broadcast(ids, ranks)


def _pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Returns [b, longest]; padding is id 0, which no token attends to."""
    longest = max(len(prompt) for prompt in prompts)
    return torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
