"""Divides the layers between virtual stages. Pure arithmetic.

Stages are numbered along the model: stage 0 has the embedding, the last one the final norm, predictions of further
tokens, the head and the loss.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.base.errors import ConfigError

_LONGEST = 100_000  # characters of an expanded layout


@dataclass(frozen=True)
class Stage:
    """A range of the model's layers, which may be empty, with or without its two ends."""

    number: int
    layers: range
    embedding: bool
    head: bool


def whole_model(num_layers: int) -> Stage:
    """Returns the only stage of a model without pipeline parallelism."""
    return Stage(0, range(num_layers), embedding=True, head=True)


def partition(
    num_layers: int,
    rank_of: Sequence[int],
    *,
    first: int | None = None,
    last: int | None = None,
    embedding_counts: bool = False,
    head_counts: bool = False,
) -> tuple[Stage, ...]:
    """Returns stages of equal numbers of layers. Raises ConfigError if the numbers do not divide.

    `rank_of` is the rank of each stage; all ranks have equally many. `first` and `last` are the layers of the first and
    the last rank; the others share the rest equally. `embedding_counts` and `head_counts` make these count as a layer
    in the first and in the last stage.
    """
    p = max(rank_of) + 1
    v = len(rank_of) // p
    if len(rank_of) == 1:
        return (whole_model(num_layers),)
    per_rank = _per_rank(num_layers + embedding_counts + head_counts, p, first, last)
    for layers in sorted(set(per_rank)):
        if layers % v:
            raise ConfigError(
                f"the {layers} layers of a pipeline rank are not divisible by its {v} virtual stages; change "
                "--num-layers or the number of stages, or write the split with --pipeline-model-parallel-layout"
            )
    sizes = [per_rank[rank] // v for rank in rank_of]
    sizes[0] -= embedding_counts
    sizes[-1] -= head_counts
    return _stages(sizes)


def parse_layout(text: str, num_layers: int, num_stages: int) -> tuple[Stage, ...]:
    """Parses Megatron-LM's --pipeline-model-parallel-layout.

    E is the embedding, t a layer, m a prediction of a further token, L the loss, | ends a stage, (..)*n or x*n repeats.
    Commas and spaces are ignored. Raises ConfigError for a text that does not describe `num_layers` in `num_stages`.
    """
    flag = f"--pipeline-model-parallel-layout {text}"
    stages = _written_out(text, flag).split("|")
    if len(stages) != num_stages:
        raise ConfigError(
            f"{flag} has {len(stages)} stages, but pipeline ranks and their virtual stages make {num_stages}"
        )
    written = "".join(stages)
    if written.count("t") != num_layers:
        raise ConfigError(f"{flag} has {written.count('t')} layers, but --num-layers is {num_layers}")
    if not (written.count("E") == written.count("L") == 1 and written[0] == "E" and written[-1] == "L"):
        raise ConfigError(f"{flag} must begin with its one E (embedding) and end with its one L (loss)")
    if stages[0][:1] != "E" or stages[-1][-1:] != "L":
        raise ConfigError(f"{flag} must have E in its first stage and L in its last; another stage may be empty")
    if "m" in written.rstrip("L").rstrip("m") or "m" in "".join(stages[:-1]):
        raise ConfigError(
            f"{flag} must have each m (prediction of a further token) in its last stage, directly before L"
        )
    return _stages([stage.count("t") for stage in stages])


def count_predictions(text: str) -> int:
    """Returns the number of predictions of further tokens in a layout. Raises ConfigError for an invalid one."""
    return _written_out(text, f"--pipeline-model-parallel-layout {text}").count("m")


def count_stages(text: str) -> int:
    """Returns the number of stages of a layout. Raises ConfigError for an invalid one."""
    return _written_out(text, f"--pipeline-model-parallel-layout {text}").count("|") + 1


def _per_rank(num_layers: int, p: int, first: int | None, last: int | None) -> list[int]:
    end_counts = [count for count in (first, last) if count is not None]
    remaining, middle_ranks = num_layers - sum(end_counts), p - len(end_counts)
    if p == 1 and end_counts:
        raise ConfigError("one pipeline rank has all layers; remove --decoder-first- and -last-pipeline-num-layers")
    if remaining < 0 or (middle_ranks == 0 and remaining) or (middle_ranks and remaining % middle_ranks):
        what = f"{num_layers} layers" if not end_counts else f"{remaining} of {num_layers} layers that are left"
        raise ConfigError(
            f"{what} are not divisible by {middle_ranks} pipeline ranks; change --num-layers, "
            "--pipeline-model-parallel-size, --decoder-first-pipeline-num-layers or "
            "--decoder-last-pipeline-num-layers, or let embedding and loss count with "
            "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split"
        )
    per_rank = [remaining // middle_ranks if middle_ranks else 0] * p
    if first is not None:
        per_rank[0] = first
    if last is not None:
        per_rank[-1] = last
    return per_rank


def _stages(sizes: list[int]) -> tuple[Stage, ...]:
    if min(sizes) < 0:
        raise ConfigError("a stage has fewer layers than the embedding or the loss take up; use fewer stages")
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return tuple(
        Stage(number, range(end - size, end), embedding=number == 0, head=number == len(sizes) - 1)
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )


def _written_out(text: str, flag: str) -> str:
    """Expands repetitions, the innermost first."""
    pattern = re.sub(r"[\s,]", "", text)
    repeated = re.compile(r"(?:\(([EtmL|]*)\)|([EtmL|]))\*(\d+)")
    while (match := repeated.search(pattern)) is not None:
        part, times = match.group(1) or match.group(2) or "", int(match.group(3))
        if len(part) * times > _LONGEST:
            raise ConfigError(f"{flag} repeats {part} {times} times; that is no model")
        pattern = pattern[: match.start()] + part * times + pattern[match.end() :]
    if not re.fullmatch(r"[EtmL|]*", pattern):
        raise ConfigError(f"{flag} has {re.sub('[EtmL|]', '', pattern)[0]!r}; it knows E, t, m, L, | and (..)*n")
    return pattern
