"""Answers from an inference engine of the user: a class that is started, gets the weights, and samples.

[Note: first rank alone] The class lives on the first rank of the world, and is usually the client of an engine with
processes and devices of its own. All other ranks send their prompts there, and their parts of the weights.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError, first_line
from megatron.base.log import get_logger
from megatron.config.run import RunConfig
from megatron.core.comm.collectives import gather_objects
from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.engine.text import TextStream
from megatron.core.inference.generate import Completion
from megatron.core.models.hf.export import HFExport
from megatron.core.models.hf.side_files import side_folder
from megatron.rl.sampler import AS_TRAINED
from megatron.rl.user_functions import FunctionError, file_and_function, import_function, line_of
from megatron.training.export import beside_weights, hf_export, write_all
from megatron.training.live_weights import LiveWeights
from megatron.training.together import together
from megatron.training.trainer import Trainer

FLAG, DEFAULT_CLASS = "--rl-external-sampler", "Sampler"
_METHODS = ("start", "update", "sample")
_Result = TypeVar("_Result")
log = get_logger(__name__)


@dataclass(frozen=True)
class SamplerSettings:
    """What an engine needs to know of the run when it starts.

    vocab_size: ids are below it. stop_ids: tokens that end an answer. max_length: most tokens of a prompt with its
    answer. load_hf: the folder with whose weights the run began, if it began with one.
    """

    vocab_size: int
    stop_ids: tuple[int, ...]
    max_length: int
    seed: int
    load_hf: str | None


@dataclass(frozen=True)
class SampleRequest:
    """A prompt to answer once. temperature 0 asks for the likeliest tokens."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int


class ModelWeights:
    """The current weights, in the names and shapes of Hugging Face: iterate over (name, tensor), or `save` a folder.

    They are valid while `update` runs. iteration: optimizer steps that they have had.
    """

    def __init__(self, source: LiveWeights, run: RunConfig, iteration: int) -> None:
        self.iteration = iteration
        self._source, self._run = source, run

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor, in host memory, one after another: only one is held at a time. Raises ConfigError if no
        supported family of models can hold the model."""
        for tensor in self._export(Path()).tensors:
            yield tensor.name, tensor.read(Box((0,) * len(tensor.shape), tensor.shape))

    def save(self, folder: str | Path) -> Path:
        """Writes a folder that transformers, vLLM and SGLang load, with the files of the tokenizer, and returns it.

        It takes the place of an older one when it is complete. Raises ConfigError and CheckpointError.
        """
        path = Path(folder)
        files, texts = beside_weights(self._run.tokenizer, self._run.checkpoint.load_hf, path)
        try:
            write_all(self._export(path), files, texts)
        except OSError as error:
            raise CheckpointError(f"could not save {path} ({FLAG}): {error.strerror}") from error
        return path

    def _export(self, folder: Path) -> HFExport:
        tokenizer = self._run.tokenizer
        return hf_export(
            self._source,
            folder,
            self._source.dtype,
            tokenizer,
            side_folder(tokenizer, self._run.checkpoint.load_hf),
            replace=True,
        )


class SamplingEngine(Protocol):
    """The class of the user. It may also have `close`, which is called when the run ends."""

    def start(self, settings: SamplerSettings) -> None:
        """Called once, before anything else."""
        ...

    def update(self, weights: ModelWeights) -> None:
        """Takes the weights over. Called before the first answers, and when the weights have changed."""
        ...

    def sample(self, requests: list[SampleRequest]) -> Sequence[tuple[Sequence[int], Sequence[float]]]:
        """Returns the tokens of each answer, with the one that ended it, and their log-probabilities: natural, of the
        distribution with the request's temperature over the whole vocabulary."""
        ...


@dataclass(frozen=True)
class _SampledAhead:
    """Requests of all ranks whose answers are on their way. future: on the first rank. iteration: of the weights."""

    requests: list[SampleRequest]
    future: Future[list[tuple[list[int], list[float]]]] | None
    iteration: int


class ExternalSampler:
    """Answers prompts by an engine of the user. All ranks of the world call its methods together.

    staleness: optimizer steps between the weights that gave the last answers and those of the trainer.
    """

    def __init__(
        self, trainer: Trainer, tokenizer: Tokenizer, text: str, *, temperature: float, stop_ids: Collection[int]
    ) -> None:
        """text: the flag's value. temperature: of the distribution. stop_ids: end an answer, as the tokenizer's eod
        does. Raises UserError for a class that cannot be used."""
        run, self._trainer, self._tokenizer = trainer.run, trainer, tokenizer
        self._temperature, self._stop_ids = temperature, frozenset({tokenizer.eod, *stop_ids})
        self._updated_at: int | None = None  # the iteration whose weights the engine has
        self._ahead: _SampledAhead | None = None
        self.staleness = 0
        assert run.data.seq_length
        settings = SamplerSettings(
            tokenizer.vocab_size,
            tuple(sorted(self._stop_ids)),
            run.data.seq_length,
            run.train.seed,
            run.checkpoint.load_hf,
        )
        self._is_first = trainer.groups.world.rank == 0
        self._path, self._engine = "", None

        def start() -> None:
            if self._is_first:
                self._path, name = file_and_function(FLAG, text, DEFAULT_CLASS)
                self._engine = self._started(import_function(self._path, name, f"{FLAG} {text}"), settings)

        self._flag = f"{FLAG} {text}"
        together(trainer.groups.world, start)
        if run.rl.tis_clip is None:
            log.warning(
                "an external sampler has log-probabilities of its own; --tis-clip 2 corrects for their difference"
            )

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
        sampling: Sampling = AS_TRAINED,
        *,
        records_experts: bool = False,
    ) -> list[Completion]:
        """Returns an answer to each prompt, with the log-probabilities of its tokens: those that `begin` has asked for,
        or else after handing over weights that have changed. Experts are not recorded: the engine does not say them.

        Communication: gathers of prompts and answers over the world, and that of LiveWeights. Raises FunctionError, on
        all ranks.
        """
        groups, ahead = self._trainer.groups, self._ahead
        requests = self._requests(prompts, seeds, max_new_tokens, sampling)
        parts = self._gathered(requests)
        everything = [request for part in parts for request in part]
        if ahead is not None and ahead.requests == everything:
            self._ahead, self.staleness = None, self._trainer.state.iteration - ahead.iteration
            answers = together(groups.world, lambda: [] if ahead.future is None else ahead.future.result())
        else:
            self.staleness = 0
            self._hand_over()
            answers = together(groups.world, lambda: self._answers(everything))
        answers = gather_objects(answers, groups.world)[0]
        start = sum(len(part) for part in parts[: groups.model.ranks[0]])
        return [
            self._completion(request, *answer)
            for request, answer in zip(requests, answers[start : start + len(requests)], strict=True)
        ]

    def begin(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], max_new_tokens: Sequence[int]) -> None:
        """Hands over the weights as they are, and begins to sample answers, which the next call of `sample` with the
        same arguments returns. The engine samples while this process trains.

        Communication: as in `sample`, without the answers.
        """
        self._hand_over()
        parts = self._gathered(self._requests(prompts, seeds, max_new_tokens, AS_TRAINED))
        requests = [request for part in parts for request in part]
        future = None if self._engine is None else _in_a_thread(lambda: self._answers(requests))
        self._ahead = _SampledAhead(requests, future, self._trainer.state.iteration)

    def _requests(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], limits: Sequence[int], sampling: Sampling
    ) -> list[SampleRequest]:
        temperature = 0.0 if sampling.greedy else self._temperature
        return [
            SampleRequest(tuple(prompt), limit, temperature, seed)
            for prompt, limit, seed in zip(prompts, limits, seeds, strict=True)
        ]

    def _gathered(self, requests: list[SampleRequest]) -> list[list[SampleRequest]]:
        """Returns the requests of all ranks; those of a replica are its first rank's."""
        groups = self._trainer.groups
        return gather_objects(requests if groups.model.rank == 0 else [], groups.world)

    def close(self) -> None:
        """Closes the engine, if it has a method for it."""
        close = getattr(self._engine, "close", None)
        if close is not None:
            self._guarded("close", close)

    def _started(self, engine_class: Callable[[], Any], settings: SamplerSettings) -> SamplingEngine:
        engine = self._guarded("__init__", engine_class)
        missing = [name for name in _METHODS if not callable(getattr(engine, name, None))]
        if missing:
            raise FunctionError(f"{self._flag} has no method {' and no '.join(missing)}; write it, see docs/rl.md")
        self._guarded("start", lambda: engine.start(settings))
        return engine

    def _hand_over(self) -> None:
        """Hands the weights over if they have changed since the last time."""
        trainer, started = self._trainer, time.perf_counter()
        if self._ahead is not None and self._ahead.future is not None:
            wait([self._ahead.future])  # no method of the engine is called while another one runs
        if self._updated_at == trainer.state.iteration:
            return
        self._updated_at = trainer.state.iteration
        source = LiveWeights(trainer)
        weights = ModelWeights(source, trainer.run, trainer.state.iteration)

        def serve() -> None:
            if self._engine is None:
                source.follow()
                return
            engine = self._engine
            try:
                self._guarded("update", lambda: engine.update(weights))
            finally:
                source.close()

        with trainer.groups.heartbeat.phase("hand over weights"):
            together(trainer.groups.world, serve)
        seconds = time.perf_counter() - started
        log.info("weights of iteration %d handed to the external sampler in %.1f s", self._updated_at, seconds)

    def _answers(self, requests: list[SampleRequest]) -> list[tuple[list[int], list[float]]]:
        """Returns the engine's answers on the first rank, and none on others. Raises FunctionError."""
        engine = self._engine
        if engine is None or not requests:
            return []
        answers = self._guarded("sample", lambda: list(engine.sample(requests)))
        if len(answers) != len(requests):
            raise FunctionError(f"{self._flag}: sample returned {len(answers)} answers to {len(requests)} requests")
        return [self._checked(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def _checked(self, request: SampleRequest, answer: Any) -> tuple[list[int], list[float]]:
        """Returns the ids and log-probabilities of an answer as plain numbers. Raises FunctionError."""
        try:
            ids, logprobs = [int(number) for number in answer[0]], [float(number) for number in answer[1]]
        except (TypeError, ValueError, IndexError, KeyError) as error:
            raise FunctionError(f"{self._flag}: sample returned no (ids, log-probabilities): {error}") from error
        reason = None
        if not 0 < len(ids) <= request.max_new_tokens:
            reason = f"{len(ids)} tokens where 1 to {request.max_new_tokens} were asked for"
        elif len(ids) != len(logprobs):
            reason = f"{len(ids)} tokens with {len(logprobs)} log-probabilities"
        elif not 0 <= min(ids) <= max(ids) < self._tokenizer.vocab_size:
            reason = f"a token that is not below the vocabulary of {self._tokenizer.vocab_size}"
        elif not self._stop_ids.isdisjoint(ids[:-1]):
            reason = "tokens behind one that ends an answer"
        elif not all(map(math.isfinite, logprobs)):
            reason = "log-probabilities that are not finite"
        if reason is not None:
            raise FunctionError(f"{self._flag}: sample returned {reason}")
        return ids, logprobs

    def _completion(self, request: SampleRequest, ids: list[int], logprobs: list[float]) -> Completion:
        stream = TextStream(self._tokenizer, request.prompt_ids, self._stop_ids, ())
        for token in ids:
            stream.push(token)
        stream.close()
        is_cut = stream.reason == "length" and len(ids) == request.max_new_tokens
        return Completion(ids, stream.text, "length" if is_cut else "stop", tuple(logprobs))

    def _guarded(self, method: str, call: Callable[[], _Result]) -> _Result:
        """Returns the result of a method of the user's. Raises FunctionError for what it raises."""
        try:
            return call()
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {first_line(error)}{line_of(error, self._path)}"
            raise FunctionError(f"{self._flag}: {method} failed: {reason}") from error


def _in_a_thread(call: Callable[[], _Result]) -> Future[_Result]:
    """Returns the future result of a call in a thread that does not keep the process alive."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
