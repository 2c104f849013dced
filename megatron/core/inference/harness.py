"""A model for lm-evaluation-harness (`lm_eval`): its tasks run on this program's checkpoints without conversion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

from megatron.base.errors import ConfigError
from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.generate import generate
from megatron.core.inference.score import Window, score
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.context import Build

DEFAULT_NEW_TOKENS = 256  # as in the harness's own `hf` model
_NEUTRAL = {"num_beams": 1, "min_p": 0.0}  # values that have no effect
Pair = tuple[tuple[str, str], list[int], list[int]]  # texts, ids of the context, ids of the continuation


class CheckpointLM(TemplateLM):
    """Computes log-likelihoods and continuations for the harness, with the encoding and truncation of its `hf` class.

    All ranks that share the model run the same tasks and get the same answers. Requests use their numbers as seeds.
    """

    def __init__(
        self, model: GPTModel, build: Build, tokenizer: Tokenizer, *, context: int, batch_tokens: int, add_bos: bool
    ) -> None:
        """`context`: longest input; longer inputs lose their beginning. `batch_tokens`: positions that are read
        together.
        """
        super().__init__()
        self._model, self._build, self._tokenizer = model, build, tokenizer
        self._context, self._batch_tokens, self._add_bos = context, batch_tokens, add_bos

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        return self._tokenizer.eod if self._tokenizer.bos is None else self._tokenizer.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the ids of a text, after the bos if that was requested."""
        ids = self._tokenizer.encode(string)
        wanted = self._add_bos if add_special_tokens is None else add_special_tokens and self._add_bos
        return [self.prefix_token_id, *ids] if wanted else ids

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **kwargs: Any) -> list[tuple[float, bool]]:
        windows = [
            Window([*context, *continuation][-(self._context + 1) :], min(len(continuation), self._context))
            for _, context, continuation in requests
        ]
        scores = score(self._model, self._build, windows, self._batch_tokens)
        return [(window_score.logprob, window_score.greedy) for window_score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of whole texts, in the harness's own windows, which do not overlap."""
        windows: list[Window] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._context,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, pairs):
                windows.append(Window([*context, *continuation], len(continuation)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, window_score in zip(
            owners, score(self._model, self._build, windows, self._batch_tokens), strict=True
        ):
            totals[number] += window_score.logprob
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns continuations up to the first of the request's `until` texts; requests with equal options share
        batches.
        """
        texts = [""] * len(requests)
        alike: dict[tuple[Any, ...], list[tuple[list[int], int]]] = {}
        for number, request in enumerate(requests):
            context, options = request.args
            until, new, sampling = _read_options(options)
            if new >= self._context:
                raise ConfigError(f"a task asks for {new} new tokens, the model's context is {self._context}")
            ids = (self.tok_encode(context) or [self.prefix_token_id])[new - self._context :]
            alike.setdefault((until, new, sampling), []).append((ids, number))
        for (until, new, sampling), prompts in alike.items():
            prompts.sort(key=lambda prompt: -len(prompt[0]))
            while prompts:
                size = max(1, self._batch_tokens // (len(prompts[0][0]) + new))
                batch, prompts = prompts[:size], prompts[size:]
                completions = generate(
                    self._model,
                    self._build,
                    self._tokenizer,
                    [ids for ids, _ in batch],
                    max_new_tokens=new,
                    sampling=sampling,
                    seeds=[number for _, number in batch],
                    stop_strings=until,
                )
                for (_, number), completion in zip(batch, completions, strict=True):
                    texts[number] = completion.text
        return texts


def _read_options(options: dict[str, Any]) -> tuple[tuple[str, ...], int, Sampling]:
    """Returns (stop strings, longest continuation, sampling) from a task's generation_kwargs. Raises ConfigError."""
    left = {name: value for name, value in options.items() if name not in _NEUTRAL or value != _NEUTRAL[name]}
    until = left.pop("until", None) or []
    new = left.pop("max_gen_toks", DEFAULT_NEW_TOKENS)
    sampled = left.pop("do_sample", False)
    temperature, top_k, top_p = left.pop("temperature", 1.0), left.pop("top_k", 0), left.pop("top_p", 1.0)
    if left:
        raise ConfigError(f"a task's generation_kwargs hold {', '.join(sorted(left))}, which is not supported")
    if not sampled or temperature == 0.0:
        sampling = Sampling(temperature=0.0)
    else:
        sampling = Sampling(temperature=float(temperature), top_k=int(top_k), top_p=float(top_p))
    stops = [until] if isinstance(until, str) else until
    return tuple(stop for stop in stops if stop), int(new), sampling


def run_tasks(
    lm: CheckpointLM, tasks: Sequence[str], include_path: str | None, num_fewshot: int | None, limit: int | None
) -> dict[str, Any]:
    """Returns the result of `lm_eval.simple_evaluate`. Raises ConfigError for an unknown task."""
    manager = TaskManager(include_path=include_path, include_defaults=include_path is None)
    if any(name not in manager.all_tasks for name in tasks):
        # also reads the harness's own thousands of tasks, which takes seconds
        manager = TaskManager(include_path=include_path)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        raise ConfigError(f"--tasks {', '.join(unknown)}: not known; give --include-path, or a name that lm_eval knows")
    results: dict[str, Any] = simple_evaluate(
        lm, tasks=list(tasks), task_manager=manager, num_fewshot=num_fewshot, limit=limit
    )
    return results


def format_table(results: dict[str, Any]) -> str:
    """Returns the harness's own table of scores."""
    return str(make_table(results))
