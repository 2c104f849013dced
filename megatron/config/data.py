"""Datasets, samples and tokenizers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the model reads. Paths name `.bin/.idx` pairs without the extension."""

    seq_length: int | None = flag(None, "tokens in a training sample")
    data_path: tuple[str, ...] | None = flag(
        None, "dataset prefix, or several, or 'weight prefix weight prefix ...'", nargs="*"
    )
    train_data_path: tuple[str, ...] | None = flag(None, "as --data-path, for training only", nargs="*")
    valid_data_path: tuple[str, ...] | None = flag(None, "as --data-path, for validation only", nargs="*")
    test_data_path: tuple[str, ...] | None = flag(None, "as --data-path, for the final test only", nargs="*")
    split: str | None = flag(
        None, "shares of --data-path's documents for training, validation and test; default 969,30,1"
    )
    mock_data: bool = flag(False, "random tokens instead of a dataset, to try a configuration")
    data_cache_path: str | None = flag(None, "folder for sample indices; default a cache folder beside each dataset")
    num_workers: int = flag(2, "processes a rank that prepare batches; 0 prepares them in the training process")
    dataloader_type: str = flag(
        "single",
        "single: samples in the order of the shuffled index, every epoch shuffled by itself; "
        "cyclic: one fixed shuffle, repeated, or with --data-order megatron a new draw in every epoch",
        choices=("single", "cyclic"),
    )
    data_order: str = flag(
        "stable",
        "stable: sample n depends on the seed and n alone, so a longer run, or one with other batches, reads the same "
        "samples first; megatron: Megatron-LM's samples in its order, to go on with a run of it, which depend on the "
        "length of the run",
        choices=("stable", "megatron"),
    )
    data_sharding: bool = flag(
        True,
        "with --data-order megatron and cyclic data, replicas draw from all samples and not each from its own range",
    )
    reset_position_ids: bool = flag(False, "positions start again at 0 after each end-of-document token")
    reset_attention_mask: bool = flag(False, "attention does not cross an end-of-document token")
    eod_mask_loss: bool = flag(False, "no loss on end-of-document tokens in the input")
    sft: bool = flag(
        False,
        "train on instruction data: samples of whole conversations, loss on the tokens their dataset marks "
        "(finetune.py sets it)",
    )
    sft_packing: bool = flag(True, "one conversation a sample, filled up to --seq-length, instead of as many as fit")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text <-> token ids."""

    tokenizer_type: str | None = flag(
        None,
        "kind of tokenizer; PretrainedFromHF is another name of HuggingFaceTokenizer; default GPT2BPETokenizer beside "
        "--vocab-file and --merge-file",
        choices=(
            "HuggingFaceTokenizer",
            "PretrainedFromHF",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "GPT2BPETokenizer",
            "NullTokenizer",
        ),
    )
    tokenizer_model: str | None = flag(
        None,
        "the tokenizer's folder (HuggingFaceTokenizer) or file (SentencePiece, tiktoken)",
        aliases=("--tokenizer-name-or-path",),
    )
    chat_template: str | None = flag(
        None,
        "in the place of the tokenizer's own template: chatml, or a file with a Jinja template; default for instruction "
        "data the one it was made with",
    )
    vocab_file: str | None = flag(None, "vocab.json of GPT2BPETokenizer")
    merge_file: str | None = flag(None, "merges.txt of GPT2BPETokenizer")
    tiktoken_pattern: str | None = flag(
        None, "pre-tokenization pattern of TikTokenizer; default v2", choices=("v1", "v2")
    )
    tiktoken_num_special_tokens: int = flag(
        1000, "ids that TikTokenizer keeps for special tokens, first in its vocabulary"
    )
    tokenizer_hf_include_special_tokens: bool = flag(
        True,
        "tools/preprocess_data.py: no special tokens that HuggingFaceTokenizer puts around each text, such as a beginning-"
        "of-sequence token; nothing else adds them by itself anyway",
        name="--tokenizer-hf-no-include-special-tokens",
    )
    null_tokenizer_eod_id: int | None = flag(
        None, "the id of NullTokenizer that ends a document; default the last one, --vocab-size less one"
    )
    trust_remote_code: bool = flag(False, "let a Hugging Face tokenizer run Python code from its own folder")

    def with_type_of_files(self) -> TokenizerConfig:
        """The same with the type that the files imply where none is given: as in Megatron-LM, both files of GPT-2's."""
        if self.tokenizer_type is None and self.vocab_file is not None and self.merge_file is not None:
            return dataclasses.replace(self, tokenizer_type="GPT2BPETokenizer")
        return self
