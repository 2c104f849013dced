"""Where a run's shape, vocabulary and adapters come from: flags, a checkpoint, a tokenizer or an adapter's folder."""

import dataclasses

import pytest

from megatron.base.errors import ConfigError
from megatron.config.data import TokenizerConfig
from megatron.config.model import RUNTIME_FIELDS, ModelConfig
from megatron.config.rules import check as rules
from tests.unit.config.runs import make_run

PENDING = {"use_checkpoint_args": True, "load": "d", "num_layers": None, "hidden_size": None, "vocab_size": None}
HF = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "t"}


def test_adapters_have_one_source():
    fields = {"load_hf": "a", "load_adapter": "b", "lora_rank": 4, "lora_alpha": 2.0}
    rules.check(make_run(("load_hf", "load_adapter", "lora_dropout"), **fields), 1)
    with pytest.raises(ConfigError, match="--lora-rank, --lora-alpha has no effect: --load-adapter takes"):
        rules.check(make_run(("load_hf", "load_adapter", "lora_rank", "lora_alpha"), **fields), 1)


GPT2_FILES = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}


class TestTokenizerOfFiles:
    def test_both_files_of_gpt2_name_their_tokenizer(self):
        made = TokenizerConfig(**GPT2_FILES).with_type_of_files()
        assert made == TokenizerConfig(**GPT2_FILES, tokenizer_type="GPT2BPETokenizer")
        run = make_run(tuple(GPT2_FILES), tokenizer_type=None, vocab_size=None)
        rules.check(dataclasses.replace(run, tokenizer=made), 1)

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"vocab_file": "vocab.json"},
            {"tokenizer_model": "model"},
            {**GPT2_FILES, "tokenizer_type": "HuggingFaceTokenizer"},
        ],
    )
    def test_nothing_else_does(self, fields):
        assert TokenizerConfig(**fields).with_type_of_files() == TokenizerConfig(**fields)


class TestShapeFromCheckpoint:
    def test_shape_rules_wait_for_the_checkpoint(self):
        rules.check(make_run(("use_checkpoint_args", "load"), **PENDING), 1)
        with pytest.raises(ConfigError, match="--micro-batch-size must be given"):
            rules.check(make_run(**PENDING, micro_batch_size=None), 1)

    def test_and_judge_it_then(self):
        with pytest.raises(ConfigError, match="--hidden-size 66"):
            rules.check(make_run(**{**PENDING, "num_layers": 2, "hidden_size": 66}), 1)

    def test_runtime_fields_are_fields(self):
        assert set(RUNTIME_FIELDS) < {f.name for f in dataclasses.fields(ModelConfig)}


class TestVocabulary:
    def test_tokenizer_larger_than_the_model(self):
        run = make_run(vocab_size=1000)
        rules.check_vocabulary(run.model, run.parallel.tensor_model_parallel_size, 1000)
        with pytest.raises(ConfigError, match=r"1001 ids but --vocab-size is 1000"):
            rules.check_vocabulary(run.model, run.parallel.tensor_model_parallel_size, 1001)

    def test_tp_divides_the_tokenizers_padded_vocabulary(self):
        run = make_run(vocab_size=None, tensor_model_parallel_size=3)
        rules.check_vocabulary(run.model, run.parallel.tensor_model_parallel_size, 300)  # 384 rows
        with pytest.raises(ConfigError, match=r"512 is not a multiple of --tensor-model-parallel-size 3"):
            rules.check_vocabulary(run.model, run.parallel.tensor_model_parallel_size, 400)

    def test_unknown_vocabulary_passes_the_first_check(self):
        rules.check(make_run(vocab_size=None, **HF), 1)
