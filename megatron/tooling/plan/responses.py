"""The lengths of the answers of a planned rollout: of a mean, or those that a run has written."""

from __future__ import annotations

from pathlib import Path

from megatron.base.errors import ConfigError, DataError
from megatron.config.run import RunConfig
from megatron.core.datasets.jsonl import parse_object
from megatron.planner.time.continuous_batch import lengths_of_mean

MOST_ANSWERS = 16384  # of a rollout, which are followed one by one


def response_lengths(run: RunConfig, word: str | None) -> list[int]:
    """Returns the tokens of the answers of a rollout. word: a mean, or a file of --save-rollouts, whose answers are
    repeated or cut to the number of the run's; None: all have the longest length. Raises UserErrors."""
    count, longest = run.rl.answers_per_rollout, run.rl.rollout_max_response_len
    assert longest is not None
    if count > MOST_ANSWERS:
        raise ConfigError(
            f"--grpo-prompts-per-step {run.rl.grpo_prompts_per_step} x --grpo-group-size {run.rl.grpo_group_size} are "
            f"{count} answers, and at most {MOST_ANSWERS} are followed; lower one of them"
        )
    if word is None:
        return [longest] * count
    try:
        mean = float(word)
    except ValueError:
        written = _written(Path(word))
        return [min(longest, written[number % len(written)]) for number in range(count)]
    if not 1 <= mean <= longest:
        raise ConfigError(
            f"--response-lengths {word} is no mean of answers of 1 to --rollout-max-response-len {longest} tokens; give "
            "one between them, or a file of --save-rollouts"
        )
    return lengths_of_mean(mean, longest, count)


def _written(path: Path) -> list[int]:
    """Returns the lengths of the answers in a file of --save-rollouts. Raises DataError, and OSError."""
    lengths = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            ids = parse_object(line).get("ids")
        except ValueError as error:
            raise DataError(f"{path}, line {number} {error}; give a file that --save-rollouts has written") from error
        if not isinstance(ids, list) or not ids:
            raise DataError(f"{path}, line {number} has no token ids of an answer; give a file of --save-rollouts")
        lengths.append(len(ids))
    if not lengths:
        raise DataError(f"{path} has no answers; give a file that --save-rollouts has written")
    return lengths
