"""Each kind of tokenizer on a tiny real model, and the mistakes in flags and files."""

import base64
import io
import json

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megatron.base.errors import ConfigError, DataError
from megatron.config.data import TokenizerConfig
from megatron.core.datasets.tokenizer import build_tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"] * 20
TEXTS = ["the quick fox", "", "naïve 狐 — jumps\n\nover  dogs", "x" * 300]


def bpe(special):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return backend


def hugging_face_folder(folder, **names):
    backend = bpe(["<s>", "</s>"])
    # As LLaMA's: the library adds <s> unless it is told not to.
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    return str(folder)


def sentencepiece_model(path, **settings):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=320, model_type="bpe", byte_fallback=True,
        minloglevel=2, **settings
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return str(path)


def tiktoken_file(path, tokens=(b"th", b"the", b" qu")):
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate([*(bytes([i]) for i in range(256)), *tokens])
    ]
    path.write_text(json.dumps(entries))
    return str(path)


def build(kind, vocab_size=None, **flags):
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, **flags), vocab_size)


@pytest.fixture(
    params=["HuggingFaceTokenizer", "PretrainedFromHF", "SentencePieceTokenizer", "TikTokenizer", "GPT2BPETokenizer"]
)
def tokenizer(request, tmp_path):
    kind = request.param
    if kind in ("HuggingFaceTokenizer", "PretrainedFromHF"):
        return build(kind, tokenizer_model=hugging_face_folder(tmp_path / "hf", eos_token="</s>", bos_token="<s>"))
    if kind == "SentencePieceTokenizer":
        return build(kind, tokenizer_model=sentencepiece_model(tmp_path / "m", remove_extra_whitespaces=False))
    if kind == "TikTokenizer":
        return build(kind, tokenizer_model=tiktoken_file(tmp_path / "v.json"), tiktoken_num_special_tokens=10)
    bpe(["<|endoftext|>"]).model.save(str(tmp_path))
    return build(kind, vocab_file=f"{tmp_path}/vocab.json", merge_file=f"{tmp_path}/merges.txt")


def test_text_survives_and_batches_agree(tokenizer):
    ids = tokenizer.encode_batch(TEXTS)
    assert ids == [tokenizer.encode(text) for text in TEXTS]
    assert ids[1] == [] and len(ids[0]) < len(TEXTS[0])
    assert all(isinstance(i, int) and 0 <= i < tokenizer.vocab_size for text in ids for i in text)
    expected = [text.replace("\n", " ") for text in TEXTS] if "SentencePiece" in type(tokenizer).__name__ else TEXTS
    assert [tokenizer.decode(i) for i in ids] == expected
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    # Encoding adds nothing: no text begins with bos or ends with eod.
    assert not {tokenizer.eod, tokenizer.bos} & {i for text in ids for i in text}


def test_hugging_face(tmp_path):
    folder = hugging_face_folder(tmp_path, eos_token="</s>", bos_token="<s>", additional_special_tokens=["<extra>"])
    tokenizer = build("HuggingFaceTokenizer", tokenizer_model=folder)
    assert (tokenizer.bos, tokenizer.eod) == (0, 1)
    assert tokenizer.encode("fox</s><extra>")[-2:] == [1, tokenizer.vocab_size - 1]
    assert tokenizer.decode([1, tokenizer.vocab_size - 1]) == "</s><extra>"


def test_hugging_face_errors(tmp_path):
    with pytest.raises(DataError, match="--tokenizer-model /nowhere is not a folder"):
        build("HuggingFaceTokenizer", tokenizer_model="/nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty cannot be loaded as a tokenizer: [^\n]+$"):
        build("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "empty"))
    with pytest.raises(DataError, match="has no eos token to end documents with; set eos_token"):
        build("PretrainedFromHF", tokenizer_model=hugging_face_folder(tmp_path / "hf"))


def test_sentencepiece(tmp_path):
    path = sentencepiece_model(tmp_path / "m")
    tokenizer = build("Llama2Tokenizer", tokenizer_model=path)
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (320, model.bos_id(), model.eos_id())
    assert tokenizer.encode(TEXTS[0]) == model.encode(TEXTS[0])
    assert build("GPTSentencePieceTokenizer", tokenizer_model=path).encode(TEXTS[0]) == model.encode(TEXTS[0])
    assert build("SentencePieceTokenizer", tokenizer_model=sentencepiece_model(tmp_path / "n", bos_id=-1)).bos is None


def test_sentencepiece_errors(tmp_path):
    with pytest.raises(DataError, match="--tokenizer-model /nowhere does not exist"):
        build("SentencePieceTokenizer", tokenizer_model="/nowhere")
    (tmp_path / "text").write_text("no model")
    with pytest.raises(DataError, match="text is not a SentencePiece model"):
        build("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "text"))
    with pytest.raises(DataError, match="has no eos piece"):
        build("SentencePieceTokenizer", tokenizer_model=sentencepiece_model(tmp_path / "m", eos_id=-1))


def test_tiktoken(tmp_path):
    path = tiktoken_file(tmp_path / "v.json")
    tokenizer = build("TikTokenizer", tokenizer_model=path, tiktoken_num_special_tokens=10)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (10 + 259, 1, 2)
    # Special ids come first, then the bytes, then the merges.
    assert tokenizer.encode("the qu\n") == [10 + 257, 10 + 258, 10 + ord("\n")]
    assert tokenizer.encode("</s><SPECIAL_9>") == [2, 9] and tokenizer.decode([2, 9]) == "</s><SPECIAL_9>"
    limited = build("TikTokenizer", 10 + 257, tokenizer_model=path, tiktoken_num_special_tokens=10)
    assert limited.vocab_size == 267 and limited.encode("the") == [10 + 256, 10 + ord("e")]


def test_tiktoken_patterns_cut_text_differently(tmp_path):
    path = tiktoken_file(tmp_path / "v.json", [b"aB"])
    flags = {"tokenizer_model": path, "tiktoken_num_special_tokens": 10}
    # v2 cuts where lower case turns to upper case, so the merge of "aB" cannot happen.
    assert len(build("TikTokenizer", tiktoken_pattern="v1", **flags).encode("aB")) == 1
    assert len(build("TikTokenizer", tiktoken_pattern="v2", **flags).encode("aB")) == 2
    assert build("TikTokenizer", **flags).encode("aB") == build("TikTokenizer", tiktoken_pattern="v2", **flags).encode(
        "aB"
    )


def test_tiktoken_errors(tmp_path):
    path = tiktoken_file(tmp_path / "v.json")
    with pytest.raises(DataError, match="--tokenizer-model /nowhere cannot be read"):
        build("TikTokenizer", tokenizer_model="/nowhere")
    with pytest.raises(ConfigError, match="--tiktoken-num-special-tokens 3 leaves no room"):
        build("TikTokenizer", tokenizer_model=path, tiktoken_num_special_tokens=3)
    with pytest.raises(ConfigError, match=r"--vocab-size 5000 does not fit .*: its 259 tokens .* allow 1256 to 1259"):
        build("TikTokenizer", 5000, tokenizer_model=path)
    entries = json.loads((tmp_path / "v.json").read_text())
    for changed, message in [
        ({"a": 1}, "is not a list of rank, token_bytes and token_str"),
        ([{"rank": 0}], "is not a list of rank, token_bytes and token_str"),
        (entries[:5] + entries[6:], "must list each token once"),
        ([{**entry, "rank": rank} for rank, entry in enumerate(entries[:5] + entries[6:])], "must begin with the 256"),
        ("no", "is not a list of rank"),
    ]:
        (tmp_path / "bad.json").write_text(json.dumps(changed))
        with pytest.raises(DataError, match=message):
            build("TikTokenizer", tokenizer_model=str(tmp_path / "bad.json"))


def test_gpt2_bpe(tmp_path):
    bpe(["<|endoftext|>"]).model.save(str(tmp_path))
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    tokenizer = build("GPT2BPETokenizer", vocab_file=f"{tmp_path}/vocab.json", merge_file=f"{tmp_path}/merges.txt")
    assert tokenizer.vocab_size == len(vocab) and tokenizer.eod == tokenizer.bos == vocab["<|endoftext|>"]
    assert tokenizer.encode("fox<|endoftext|>")[-1] == tokenizer.eod
    assert tokenizer.encode(" the") == [vocab["Ġthe"]]


def test_gpt2_bpe_errors(tmp_path):
    bpe([]).model.save(str(tmp_path))
    vocab, merges = f"{tmp_path}/vocab.json", f"{tmp_path}/merges.txt"
    with pytest.raises(DataError, match=r"vocab\.json has no token <\|endoftext\|>"):
        build("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    with pytest.raises(DataError, match="--merge-file /nowhere does not exist"):
        build("GPT2BPETokenizer", vocab_file=vocab, merge_file="/nowhere")
    with pytest.raises(DataError, match=r"are not GPT-2's vocab\.json and merges\.txt"):
        build("GPT2BPETokenizer", vocab_file=merges, merge_file=merges)


def test_null():
    tokenizer = build("NullTokenizer", 100)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos) == (100, 99, None)
    assert tokenizer.encode_batch(["1 2  3\n", ""]) == [[1, 2, 3], []] and tokenizer.decode([4, 5]) == "4 5"
    with pytest.raises(DataError, match=r"token ids separated by spaces: .*'x'"):
        tokenizer.encode("1 x")
    assert build("NullTokenizer", 100, null_tokenizer_eod_id=0).eod == 0
    with pytest.raises(ConfigError, match="--null-tokenizer-eod-id 100 is not below the vocabulary of 100"):
        build("NullTokenizer", 100, null_tokenizer_eod_id=100)
    for bad in ("100", "-1"):
        with pytest.raises(DataError, match=f"token id {bad} is outside the vocabulary of 100; raise --vocab-size"):
            tokenizer.encode(f"5 {bad}")


@pytest.mark.parametrize(
    "kind, message",
    [
        (None, "no tokenizer is given; add --tokenizer-type"),
        ("NullTokenizer", "--tokenizer-type NullTokenizer needs --vocab-size"),
        ("HuggingFaceTokenizer", "HuggingFaceTokenizer needs --tokenizer-model"),
        ("Llama2Tokenizer", "Llama2Tokenizer needs --tokenizer-model"),
        ("TikTokenizer", "TikTokenizer needs --tokenizer-model"),
        ("GPT2BPETokenizer", "GPT2BPETokenizer needs --vocab-file"),
        ("Bert", "--tokenizer-type Bert is not known"),
    ],
)
def test_missing_flags(kind, message):
    with pytest.raises(ConfigError, match=message):
        build(kind, tokenizer_model="/nowhere" if kind == "Bert" else None)
    with pytest.raises(ConfigError, match="GPT2BPETokenizer needs --merge-file"):
        build("GPT2BPETokenizer", vocab_file="/nowhere")
