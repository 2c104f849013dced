"""Sampling with the weights that are trained: a second model over the same parameters, so that no byte is handed over.

The sampler has the tensor, pipeline and expert parallelism of training. Sequence parallelism cannot shard a step of one
token, and context parallelism has nothing to share then: the ranks of cp sample other answers, like replicas.

[Note: whole weights] Parameters that training shards over replicas, or holds in host memory, are gathered once for all
answers of a call and freed when it ends. Layer by layer, as training gathers them, every token would move the whole
model again, for a product with a few rows: 500 tokens 500 times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Collection, Sequence

from torch import nn

from megatron.core.datasets.tokenizer import Tokenizer
from megatron.core.groups import Group, Groups
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.engine.slots import check_room
from megatron.core.inference.generate import Completion, generate
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.training.trained_model import TrainedModel

AS_TRAINED = Sampling()  # from the whole distribution: its temperature is that of the model's `Build`
GREEDY = Sampling(temperature=0.0)


class Sampler:
    """Answers prompts with the current weights of a trained model. All ranks of a replica call it with the same
    arguments; each replica, and each rank of cp, has its own prompts.

    staleness: 0, since the weights are the trainer's."""

    staleness = 0

    def __init__(
        self,
        trained: TrainedModel,
        tokenizer: Tokenizer,
        *,
        temperature: float,
        batch_size: int | None,
        stop_ids: Collection[int] = (),
    ) -> None:
        """temperature: of the distribution. batch_size: answers at the same time; None: all. stop_ids: end an answer,
        as the tokenizer's eod does. Raises ConfigError."""
        run, groups = trained.run, single_context(trained.groups)
        kernels = choose_kernels(run.model, trained.device, etp=groups.etp.size)
        rng = RngTracker(run.train.seed, groups, trained.device)
        self._build = Build(
            run.model, groups, False, kernels, rng, trained.device, moe=run.moe, temperature=temperature
        )
        self.model = GPTModel(self._build, tuple(trained.model.stages.values())).eval()
        share_parameters(self.model, trained.model)
        self._trained, self._tokenizer = trained, tokenizer
        self._batch_size, self._stop_ids = batch_size, stop_ids

    def check_room(self, slots: int, capacity: int) -> None:
        """Raises ConfigError, on the rank that finds it, if the device has no room for the cache of so many answers of
        `capacity` tokens with their prompts."""
        check_room(
            self.model,
            self._build,
            slots=slots,
            capacity=capacity,
            batch_flag="--rl-generation-batch-size",
            length_flag="--rollout-max-response-len",
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
        """Returns an answer to each prompt, with the log-probabilities of its tokens, and their experts if they are
        recorded and there are any. See `generate`.

        The cache is made for this call and freed when it ends; meanwhile the weights are whole on the device, see
        [Note: whole weights], and with --rl-offload-optimizer-during-inference optimizer states are in host memory.
        Communication: that of `generate` and of `DataParallel.full_parameters`, and under expert parallelism its
        replicas run their forwards together. Raises CheckpointError for logits that are not finite.
        """
        trained = self._trained
        with contextlib.ExitStack() as stack:
            if trained.run.rl.rl_offload_optimizer_during_inference:
                stack.enter_context(trained.optimizer.states_on_host())
            stack.enter_context(trained.data_parallel.full_parameters())
            return generate(
                self.model,
                self._build,
                self._tokenizer,
                prompts,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                seeds=seeds,
                batch_size=self._batch_size,
                stop_ids=self._stop_ids,
                logprobs=True,
                records_experts=records_experts,
            )

    def close(self) -> None:
        """Does nothing: there are no processes, and the weights are the trainer's."""


def single_context(groups: Groups) -> Groups:
    """Returns the groups of this rank where it holds whole sequences: those along cp are the rank alone."""
    alone = Group("cp", (groups.rank,), 0, None, groups.heartbeat)
    tp_cp = dataclasses.replace(groups.tp, name="tp_cp")
    return dataclasses.replace(groups, cp=alone, cp_inner=alone, cp_outer=alone, tp_cp=tp_cp, contexts={})


def share_parameters(model: nn.Module, source: nn.Module) -> None:
    """Makes the parameters and buffers of `source` those of `model`, which has the same modules."""
    modules = dict(source.named_modules())
    for name, module in model.named_modules():
        module._parameters.update(modules[name]._parameters)
        module._buffers.update(modules[name]._buffers)


def sample_seed(seed: int, prompt: int, number: int, turn: int = 0) -> int:
    """Returns the seed of an answer: it depends on the run's seed, on the prompt's number in the run, on that of the
    answer in its group, and on the answers before it in its conversation, and so on no layout."""
    words = f"{seed}/{prompt}/{number}" + (f"/{turn}" if turn else "")
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little") >> 1
