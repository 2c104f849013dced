"""Rewards from a model: one score for the text of a prompt with its answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.base.errors import DataError
from megatron.core.comm.collectives import gather_objects
from megatron.core.datasets.sft_records import parse_tools
from megatron.core.datasets.tokenizer import Tokenizer, beginning, build_tokenizer
from megatron.core.inference.chat import open_template
from megatron.core.models.hf.families import config_of
from megatron.core.models.hf.side_files import tokenizer_of
from megatron.rl.answers import Answered, pack, shares
from megatron.rl.frozen_model import FrozenModel
from megatron.rl.prompts import Prompt
from megatron.training.together import together
from megatron.training.trained_model import TrainedModel

FLAG = "--reward-model"


class RewardModel:
    """A frozen model with a score in place of its head.

    It reads text, which its own tokenizer encodes, so that it may be of another family than the policy. Messages are
    rendered by its own chat template.
    """

    def __init__(self, folder: str, trained: TrainedModel) -> None:
        """Collective over the world. Raises UserError for a folder that holds no such model."""
        self._folder, self._trained = folder, trained
        self._tokenizer = together(trained.groups.world, lambda: open_tokenizer(folder))
        self._template = open_template(self._tokenizer)
        self._first_ids = beginning(self._tokenizer, trained.run.rl.add_bos)
        self._model = FrozenModel(FLAG, folder, trained, temperature=1.0, has_score=True)

    def scores(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[float]:
        """Returns the score of each answer to its prompt, which is that at the last token of both.

        All ranks call it with the same arguments, and the replicas share them out. Communication: that of
        `log_probabilities` of training/step.py, and a gather over dp. Raises DataError, on all ranks.
        """
        trained, dp = self._trained, self._trained.groups.dp
        texts = self._encode(prompts, answers)
        run, parallel = trained.run, trained.run.parallel
        assert run.train.micro_batch_size and run.data.seq_length
        unit = 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size
        longest = max(text.length for text in texts)
        packed = pack(
            shares(texts, dp.size),
            dp.rank,
            seq_length=max(run.data.seq_length, -(-longest // unit) * unit),
            micro_batch_size=run.train.micro_batch_size,
            device=trained.device,
        )
        scores = packed.values_of_tokens(self._model.log_probabilities(packed.batches)).tolist()
        return [score for part in gather_objects(scores, dp) for score in part]

    def _encode(self, prompts: Sequence[Prompt], answers: Sequence[str]) -> list[Answered]:
        """Returns the tokens of prompts with their answers, as prompts. A token behind them, which they do not see,
        stands for the place of the score: `pack` keeps a token's value where it is the label."""
        texts = [self._text(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        return [
            Answered(prompt_ids=tuple(ids if prompt.messages else [*self._first_ids, *ids]), ids=(0,))
            for prompt, ids in zip(prompts, self._tokenizer.encode_batch(texts), strict=True)
        ]

    def _text(self, prompt: Prompt, answer: str) -> str:
        if prompt.messages is None:
            return prompt.text + answer
        if self._template is None:
            raise DataError(
                f"{FLAG} {self._folder} has no chat template, and prompts have messages; give a folder whose "
                "tokenizer has one, or write prompts as text"
            )
        tools = parse_tools(prompt.row.get("tools"))
        conversation = [*prompt.messages, {"role": "assistant", "content": answer}]
        options = {} if tools is None else {"tools": tools}
        return self._template.render(conversation, add_generation_prompt=False, **options)


def open_tokenizer(folder: str) -> Tokenizer:
    """Returns the tokenizer of a reward model. No communication. Raises DataError, and CheckpointError for a folder
    without a model."""
    config_of(Path(folder))
    config = tokenizer_of(Path(folder))
    if config.tokenizer_type is None:
        raise DataError(
            f"{FLAG} {folder} holds no tokenizer, and a reward model reads text; copy the files of its tokenizer there"
        )
    return build_tokenizer(config, None)
