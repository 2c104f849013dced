"""The teacher of on-policy distillation: a larger model, which rates the tokens that the policy has sampled."""

from __future__ import annotations

from pathlib import Path

from megatron.base.errors import ConfigError, DataError
from megatron.base.log import get_logger
from megatron.core.datasets.tokenizer import Tokenizer, build_tokenizer
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.core.models.hf.side_files import tokenizer_of
from megatron.rl.frozen_model import FrozenModel
from megatron.training.together import together
from megatron.training.trained_model import TrainedModel

FLAG = "--opd-teacher-load"
log = get_logger(__name__)


def open_teacher(folder: str, trained: TrainedModel, tokenizer: Tokenizer) -> FrozenModel:
    """Returns the model of a Hugging Face folder whose tokens are those of the policy.

    It divides its logits by the temperature with which the policy samples. Collective over the world. Raises UserError
    for a model with other tokens.
    """
    together(trained.groups.world, lambda: check_same_tokens(folder, tokenizer))
    teacher = FrozenModel(FLAG, folder, trained, temperature=trained.run.rl.rollout_temperature)
    tokens, rows = trained.run.model.vocab_size, teacher.config.vocab_size
    assert tokens and rows
    if rows < tokens:
        raise ConfigError(
            f"{FLAG} {folder} has {rows} tokens, and the policy {tokens}, so it could sample some that the teacher "
            "does not know; give a teacher with at least as many"
        )
    return teacher


def check_same_tokens(folder: str, tokenizer: Tokenizer) -> None:
    """Raises DataError unless the tokens of the policy's tokenizer are those of the folder's, which may have more.

    Other tokenizers than Hugging Face's are not compared, which a line of the log says. No communication.
    """
    config = tokenizer_of(Path(folder))
    if not isinstance(tokenizer, HuggingFaceTokenizer) or config.tokenizer_type is None:
        log.warning("%s %s: its tokenizer is not compared with that of the policy", FLAG, folder)
        return
    library = build_tokenizer(config, None)
    assert isinstance(library, HuggingFaceTokenizer)
    tokens: dict[str, int] = tokenizer.library.get_vocab()
    of_teacher: dict[str, int] = library.library.get_vocab()
    differing = [token for token, number in tokens.items() if of_teacher.get(token) != number]
    if differing:
        first = min(differing, key=lambda token: tokens[token])
        raise DataError(
            f"{FLAG} {folder} has another tokenizer than the policy: {len(differing)} of {len(tokens)} tokens differ, "
            f"such as {first!r}, which is {tokens[first]} for the policy and {of_teacher.get(first, 'no token')} there; a "
            "teacher rates the tokens of the policy, so give one of the same family"
        )
