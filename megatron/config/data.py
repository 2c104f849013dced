"""Datasets and their splits, samples and tokenizers."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from megatron.base.errors import ConfigError
from megatron.config.flag import Need, flag, on_by_default
from megatron.config.interval import SIZE, SIZE_OR_NONE, WORKERS_OR_NONE

# Kinds of tokenizers; several names are of one kind.
HUGGING_FACE = ("HuggingFaceTokenizer", "PretrainedFromHF")
SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TIKTOKEN, GPT2, NULL = "TikTokenizer", "GPT2BPETokenizer", "NullTokenizer"
DEFAULT_SPLIT = "969,30,1"
_NUMBER = re.compile(r"[.0-9]+")
_OTHER_NOTATION = re.compile(r"[^\W\d]|[-+]")  # letters, signs and underscores: 1e3 is not the numbers 1 and 3


def _tokenizer(run: Any) -> str:
    return f"--tokenizer-type is {run.tokenizer.tokenizer_type}"


_FILES = Need(
    lambda run: not run.data.mock_data, "--mock-data reads no files", "give --data-path instead of --mock-data"
)
_PATHS_OF_SPLITS = Need(
    lambda run: not run.data.mock_data and run.data.data_path is None,
    lambda run: "--mock-data reads no files" if run.data.mock_data else "--data-path is given",
    "remove --data-path",
)
_EVALUATES = Need(lambda run: run.eval.eval_iters > 0, "--eval-iters 0 never evaluates", "raise --eval-iters")
_GPT2 = Need(
    lambda run: run.tokenizer.tokenizer_type == GPT2,
    lambda run: f"{_tokenizer(run)}, not GPT2BPETokenizer",
    "give --tokenizer-type GPT2BPETokenizer",
)
_TIKTOKEN = Need(
    lambda run: run.tokenizer.tokenizer_type == TIKTOKEN,
    lambda run: f"{_tokenizer(run)}, not TikTokenizer",
    "give --tokenizer-type TikTokenizer",
)
_HUGGING_FACE = Need(
    lambda run: run.tokenizer.tokenizer_type in HUGGING_FACE,
    lambda run: f"{_tokenizer(run)}, not HuggingFaceTokenizer",
    "give --tokenizer-type HuggingFaceTokenizer",
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The input of the model. Paths name `.bin/.idx` pairs without the extension."""

    seq_length: int | None = flag(None, "tokens in a training sample", within=SIZE)
    data_path: tuple[str, ...] | None = flag(
        None, "dataset prefix, or several, or 'weight prefix weight prefix ...'", nargs="*"
    )
    train_data_path: tuple[str, ...] | None = flag(
        None, "as --data-path, for training only", nargs="*", needs=_PATHS_OF_SPLITS
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, "as --data-path, for validation only", nargs="*", needs=(_PATHS_OF_SPLITS, _EVALUATES)
    )
    test_data_path: tuple[str, ...] | None = flag(
        None, "as --data-path, for the final test only", nargs="*", needs=(_PATHS_OF_SPLITS, _EVALUATES)
    )
    split: str | None = flag(
        None,
        "shares of --data-path's documents for training, validation and test; default 969,30,1",
        needs=Need(
            lambda run: run.data.data_path is not None,
            lambda run: "--mock-data has no documents" if run.data.mock_data else "each split has its own data path",
            "give one --data-path",
        ),
    )
    mock_data: bool = flag(False, "random tokens instead of a dataset, to try a configuration")
    data_cache_path: str | None = flag(
        None, "folder for sample indices; default a cache folder next to each dataset", needs=_FILES
    )
    num_workers: int = flag(
        2, "processes per rank that prepare batches; 0 prepares them in the training process", within=WORKERS_OR_NONE
    )
    dataloader_type: str = flag(
        "single",
        "single: samples in the order of the shuffled index, every epoch shuffled separately; "
        "cyclic: one fixed shuffle, repeated, or with --data-order megatron a new one in every epoch",
        choices=("single", "cyclic"),
        needs=_FILES,
    )
    data_order: str = flag(
        "stable",
        "stable: sample n depends on the seed and n alone, so a longer run, or one with other batches, reads the same "
        "samples first; megatron: Megatron-LM's samples in its order, to continue one of its runs; they depend on the "
        "length of the run",
        choices=("stable", "megatron"),
        needs=Need(
            lambda run: not (run.data.mock_data or run.data.sft),
            lambda run: (
                "--mock-data reads no files" if run.data.mock_data else "conversations have an order of their own"
            ),
            "train on documents of --data-path",
        ),
    )
    data_sharding: bool = on_by_default(
        when_off="with --data-order megatron and cyclic data, replicas draw from all samples and not each from its own "
        "range",
        needs=Need(
            lambda run: run.data.data_order == "megatron" and run.data.dataloader_type == "cyclic",
            "replicas read consecutive samples",
            "give --data-order megatron and --dataloader-type cyclic",
        ),
    )
    reset_position_ids: bool = flag(
        False,
        "positions start again at 0 after each end-of-document token",
        needs=Need(
            lambda run: run.model.position_embedding_type != "none",
            lambda run: f"--position-embedding-type is {run.model.position_embedding_type}",
            "give another --position-embedding-type",
        ),
    )
    reset_attention_mask: bool = flag(False, "attention does not cross an end-of-document token")
    eod_mask_loss: bool = flag(
        False,
        "no loss on end-of-document tokens in the input",
        needs=Need(
            lambda run: not run.data.sft, "a dataset of conversations marks the tokens with loss", "use pretrain_gpt.py"
        ),
    )
    sft: bool = flag(
        False,
        "train on instruction data: samples of whole conversations, loss on the tokens that their dataset marks "
        "(finetune.py sets it)",
    )
    sft_packing: bool = on_by_default(
        when_off="one conversation per sample, padded to --seq-length, instead of as many as fit",
        needs=Need(lambda run: run.data.sft, "samples are cut from documents", "use finetune.py"),
    )
    perform_rl_step: bool = flag(
        False,
        "learn from rewards: samples are answers of the model to prompts, see docs/rl.md; or from preferences, see "
        "docs/preferences.md (train_rl.py sets it)",
    )

    @property
    def separate_documents(self) -> bool:
        """Whether attention stays inside the documents, or conversations, of a sample."""
        return self.sft or self.perform_rl_step or self.reset_attention_mask

    @property
    def can_validate(self) -> bool:
        """Whether there may be validation data: training data that is split, or validation data of its own."""
        return self.train_data_path is None or self.valid_data_path is not None


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text <-> token ids."""

    tokenizer_type: str | None = flag(
        None,
        "kind of tokenizer; PretrainedFromHF is another name of HuggingFaceTokenizer; default GPT2BPETokenizer with "
        "--vocab-file and --merge-file",
        choices=(*HUGGING_FACE, *SENTENCEPIECE, TIKTOKEN, GPT2, NULL),
    )
    tokenizer_model: str | None = flag(
        None,
        "the tokenizer's folder (HuggingFaceTokenizer) or file (SentencePiece, tiktoken)",
        aliases=("--tokenizer-name-or-path",),
        needs=Need(
            lambda run: run.tokenizer.tokenizer_type not in (None, NULL, GPT2),
            lambda run: f"{_tokenizer(run)}, which does not read it",
            "give another --tokenizer-type",
        ),
    )
    chat_template: str | None = flag(
        None,
        "replaces the tokenizer's own template: chatml, or a file with a Jinja template; default for instruction "
        "data the one used to make it",
        needs=_HUGGING_FACE,
    )
    vocab_file: str | None = flag(None, "vocab.json of GPT2BPETokenizer", needs=_GPT2)
    merge_file: str | None = flag(None, "merges.txt of GPT2BPETokenizer", needs=_GPT2)
    tiktoken_pattern: str | None = flag(
        None, "pre-tokenization pattern of TikTokenizer; default v2", choices=("v1", "v2"), needs=_TIKTOKEN
    )
    tiktoken_num_special_tokens: int = flag(
        1000,
        "ids that TikTokenizer reserves for special tokens, first in its vocabulary",
        within=SIZE_OR_NONE,
        needs=_TIKTOKEN,
    )
    tokenizer_hf_include_special_tokens: bool = on_by_default(
        when_off="tools/preprocess_data.py: no special tokens that HuggingFaceTokenizer puts around each text, such as "
        "a beginning-of-sequence token; no other program adds them",
        name="--tokenizer-hf-no-include-special-tokens",
    )
    null_tokenizer_eod_id: int | None = flag(
        None,
        "the id of NullTokenizer that ends a document; default the last one, --vocab-size - 1",
        within=SIZE_OR_NONE,
    )
    trust_remote_code: bool = flag(
        False, "let a Hugging Face tokenizer run Python code from its own folder", needs=_HUGGING_FACE
    )

    def with_type_of_files(self) -> TokenizerConfig:
        """Returns the configuration with the type that its files imply, if none is given: as in Megatron-LM, both of
        GPT-2's.
        """
        if self.tokenizer_type is None and self.vocab_file is not None and self.merge_file is not None:
            return dataclasses.replace(self, tokenizer_type=GPT2)
        return self


def split_shares(text: str) -> tuple[float, float, float]:
    """Returns the fractions of training, validation and test, normalised to 1, from up to three numbers like
    "969,30,1".

    As in Megatron-LM, other text around the numbers is ignored, especially spaces and quotes that a script passes on.
    Raises ConfigError.
    """
    try:
        shares = [] if _OTHER_NOTATION.search(text) else [float(word) for word in _NUMBER.findall(text)]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or sum(shares) <= 0:
        raise ConfigError(
            f"--split '{text}' must be up to three decimal numbers with a sum above 0, such as {DEFAULT_SPLIT}"
        )
    # Not `sum`, which rounds differently since Python 3.12: the last bit may move a document to another split.
    total = reduce(add, shares)
    train, valid, test = (share / total for share in shares + [0.0] * (3 - len(shares)))
    return train, valid, test
