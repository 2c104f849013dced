"""How large a run's vocabulary is, and how far it is padded: flags, checkpoint and tokenizer."""

from pathlib import Path

import pytest

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.model import ModelConfig
from megatron.training import vocabulary
from tests.unit.config.runs import make_run

CHECKPOINT = Path("iter_0000001")


@pytest.fixture
def model(monkeypatch):
    """The model of a run with a tokenizer of 900 ids that loads a checkpoint with these fields."""

    def call(saved, given=(), **fields):
        def saved_model_config(path):
            if saved is None:
                raise CheckpointError("damaged")
            return ModelConfig(**saved)

        monkeypatch.setattr(vocabulary, "saved_model_config", saved_model_config)
        run = make_run(**{"vocab_size": None, **fields})
        return vocabulary.with_vocabulary(
            run.model, given, CHECKPOINT, tokenizer_vocab_size=900, seq_length=run.data.seq_length, tp=1
        )

    return call


@pytest.fixture
def sizes(model):
    """(vocabulary, rows) of the same."""

    def call(*words, **fields):
        made = model(*words, **fields)
        return made.vocab_size, made.padded_vocab_size

    return call


def test_the_padding_goes_on(sizes):
    saved = {"vocab_size": 1000, "fixed_padded_vocab_size": 1040}
    assert sizes(saved) == sizes(saved, ("vocab_size",), vocab_size=1000) == (1000, 1040)
    assert sizes({"vocab_size": 1000}) == (1000, 1024)
    assert sizes(None) == (900, 1024)


def test_a_checkpoint_whose_padding_took_part_in_the_softmax_goes_on_so(model):
    saved = {"vocab_size": 1000, "mask_padded_vocabulary": False}
    assert model(saved).softmax_size == 1024
    assert model({"vocab_size": 1000}).softmax_size == 1000
    assert model(saved, ("mask_padded_vocabulary",)).softmax_size == 1000
    flag = {"mask_padded_vocabulary": False}
    assert model({"vocab_size": 1000}, tuple(flag), **flag).softmax_size == 1024


def test_unless_flags_say_otherwise(sizes):
    saved = {"vocab_size": 1000, "fixed_padded_vocab_size": 1040}
    multiple = {"make_vocab_size_divisible_by": 8}
    assert sizes(saved, tuple(multiple), **multiple) == (1000, 1000)
    fixed = {"fixed_padded_vocab_size": 1100}
    assert sizes(saved, tuple(fixed), **fixed) == (1000, 1100)
    with pytest.raises(ConfigError, match="--padded-vocab-size 990 has no room for a vocabulary of 1000"):
        sizes(saved, tuple(fixed), fixed_padded_vocab_size=990)
