"""The planner's steps of a rollout against the CPU time of rollouts: python -m benchmarks.rollout_time

Decoding and reading are planned as the forwards of planner/time/continuous_batch.py. A decoding step takes a + b x rows
seconds, and a prompt c. The three numbers are fitted to some rollouts of a tiny model on one CPU thread, and predict
others, whose batches have other sizes. The answers end where the model writes the end of document, so their lengths
differ, and the last ones run alone.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from megatron.base.heartbeat import Heartbeat
from megatron.command_line.read import parse
from megatron.config.mesh import mesh_of
from megatron.config.rules.check import check
from megatron.config.run import with_batch_of_answers
from megatron.config.settings import resolve
from megatron.core.datasets.sample import Splits
from megatron.core.groups import create_groups
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from megatron.planner.time.continuous_batch import Batching, batching
from megatron.rl.sampler import Sampler, sample_seed
from megatron.training.setup import assemble, read_files

CPU = torch.device("cpu")
PROMPT, LONGEST = 16, 96
FLAGS = f"""
    --preset llama-tiny --num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --seq-length {PROMPT + LONGEST}
    --micro-batch-size 4 --train-iters 9 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 40
    --make-vocab-size-divisible-by 8 --device cpu --attention-dropout 0 --hidden-dropout 0 --perform-rl-step
    --prompt-data none --rm-type length --rollout-max-response-len {LONGEST} --grpo-prompts-per-step 8
"""
FITTED = ((1, 4), (2, 8), (4, 16), (8, 32), (16, 48), (32, 64))  # answers at the same time, and of the rollout
ROUNDS = 3
PREDICTED = ((3, 12), (6, 24), (12, 40), (24, 96))


def features(batch: Batching) -> list[float]:
    """Returns the sums whose weights are a, b and c."""
    return [batch.steps, batch.steps * batch.mean_rows, sum(part.prompts for part in batch.readings)]


class MeasuredRollouts:
    """Rollouts of a model that is built once."""

    def __init__(self) -> None:
        run = with_batch_of_answers(parse(FLAGS.split(), description=""))
        check(run, 1)
        settings = resolve(run, mesh_of(run.parallel, 1))
        groups = create_groups(settings.mesh, 0, Heartbeat(0), 60.0)
        run, checkpoint, self._tokenizer = read_files(run, groups)
        streams = Streams(CPU, Timeline(CPU))
        self._trainer = assemble(run, checkpoint, groups, streams, lambda settings, state: Splits(None, None, None))

    def measure(self, slots: int, answers: int, seed: int) -> tuple[float, list[int]]:
        """Returns the CPU seconds of a rollout, and the lengths of its answers."""
        sampler = Sampler(self._trainer, self._tokenizer, temperature=1.0, batch_size=slots)
        seeds = [sample_seed(seed, 0, number) for number in range(answers)]
        begin = time.process_time()
        completions = sampler.sample([list(range(1, PROMPT + 1))] * answers, seeds, [LONGEST] * answers)
        return time.process_time() - begin, [len(completion.ids) for completion in completions]


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    rollouts = MeasuredRollouts()
    rollouts.measure(2, 4, 0)  # the first calls choose kernels
    rows, seconds = [], []
    for number, (slots, answers) in enumerate(FITTED * ROUNDS):
        spent, lengths = rollouts.measure(slots, answers, number)
        rows.append(features(batching(lengths, slots, PROMPT)))
        seconds.append(spent)
    weight = 1 / np.array(seconds)  # relative errors
    numbers, *_ = np.linalg.lstsq(np.array(rows) * weight[:, None], np.ones(len(rows)), rcond=None)
    print(f"a, b and c in ms: {', '.join(f'{1e3 * number:.4f}' for number in numbers)}")
    print("| answers | at the same time | mean length | decoding steps | measured s | predicted s | error |")
    print("|---|---|---|---|---|---|---|")
    for number, (slots, answers) in enumerate(PREDICTED):
        spent, lengths = rollouts.measure(slots, answers, 100 + number)
        batch = batching(lengths, slots, PROMPT)
        predicted = float(np.dot(features(batch), numbers))
        print(
            f"| {answers} | {slots} | {sum(lengths) / answers:.0f} | {batch.steps} | {spent:.2f} | {predicted:.2f} | "
            f"{predicted / spent - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
