"""Pairs of answers in the forms that data sets have, the ids that they become, and rows that cannot be used."""

import json
import logging

import pytest

from megatron.base.errors import ConfigError, DataError
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.rl.preference_data import PreferenceOptions, load_preferences
from tests.unit.datasets.chat import CHATML, LLAMA3, MISTRAL, messages, tokenizer_folder

BEGINNING = "<|im_start|>user\nhow?<|im_end|>\n<|im_start|>assistant\n"
BETTER, WORSE = "like this<|im_end|>\n", "no idea<|im_end|>\n"
TWO_TURNS = messages("how?", "like this")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    templates = {"none": None, "chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL}
    return {name: HuggingFaceTokenizer(tokenizer_folder(folder / name, text)) for name, text in templates.items()}


def load(tmp_path, tokenizer, *rows, max_length=200, **options):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    options = PreferenceOptions(preference_data=(str(path),), max_length=max_length, **options)
    return load_preferences(options, tokenizer, seed=1)


def texts(tokenizer, pairs):
    """(prompt, chosen, rejected) of an epoch, sorted: the order is shuffled."""
    shown = []
    for pair in pairs.batch(0, len(pairs)):
        assert pair.chosen.prompt_ids == pair.rejected.prompt_ids
        parts = (pair.chosen.prompt_ids, pair.chosen.ids, pair.rejected.ids)
        shown.append(tuple(tokenizer.library.decode(ids) for ids in parts))
    return sorted(shown)


def test_texts_end_with_the_end_of_a_document(tmp_path, tokenizers):
    tokenizer = tokenizers["none"]
    pairs = load(tmp_path, tokenizer, {"prompt": "how?", "chosen": " like this", "rejected": " no idea</s>"})
    assert texts(tokenizer, pairs) == [("how?", " like this</s>", " no idea</s>")]
    assert pairs.at(0).chosen.ids.count(tokenizer.eod) == pairs.at(0).rejected.ids.count(tokenizer.eod) == 1
    with_bos = load(tmp_path, tokenizer, {"prompt": "how?", "chosen": "a", "rejected": "b"}, add_bos=True)
    assert texts(tokenizer, with_bos) == [("<s>how?", "a</s>", "b</s>")]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "answers"),
    [
        ("Q: how? A: like this", "Q: how? A: no idea", "Q: how? A:", (" like this</s>", " no idea</s>")),
        ("Q: how? A: so", "Q: how? A: sure", "Q: how? A:", (" so</s>", " sure</s>")),  # no word is cut
        ("how? so", "how? so it is", "how?", (" so</s>", " so it is</s>")),
        ("abcX", "abcY", "abc", ("X</s>", "Y</s>")),
    ],
)
def test_an_implicit_prompt_of_texts_is_their_common_beginning(tmp_path, tokenizers, chosen, rejected, prompt, answers):
    pairs = load(tmp_path, tokenizers["none"], {"chosen": chosen, "rejected": rejected})
    assert texts(tokenizers["none"], pairs) == [(prompt, *answers)]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": messages("how?"), "chosen": TWO_TURNS[1:], "rejected": messages("how?", "no idea")[1:]},
        {"prompt": messages("how?"), "chosen": TWO_TURNS[1], "rejected": "no idea"},
        {"prompt": "how?", "chosen": TWO_TURNS, "rejected": messages("how?", "no idea")},
        {"chosen": TWO_TURNS, "rejected": messages("how?", "no idea")},
        {
            "conversations": [{"from": "human", "value": "how?"}],
            "chosen": {"from": "gpt", "value": "like this"},
            "rejected": {"from": "gpt", "value": "no idea"},
        },
    ],
)
def test_messages_are_rendered(tmp_path, tokenizers, row):
    pairs = load(tmp_path, tokenizers["chatml"], row)
    assert texts(tokenizers["chatml"], pairs) == [(BEGINNING, BETTER, WORSE)]


def test_texts_as_turns(tmp_path, tokenizers):
    row = {"question": "how?", "chosen": "like this", "rejected": "no idea"}
    options = {"input_key": "question", "apply_chat_template": True}
    assert texts(tokenizers["chatml"], load(tmp_path, tokenizers["chatml"], row, **options)) == [
        (BEGINNING, BETTER, WORSE)
    ]
    with_system = load(tmp_path, tokenizers["chatml"], {**row, "system": "be brief"}, **options)
    assert texts(tokenizers["chatml"], with_system)[0][0] == f"<|im_start|>system\nbe brief<|im_end|>\n{BEGINNING}"


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_prompt_and_answer_are_the_conversation(tmp_path, tokenizers, name):
    """Both together are the text that the template writes of the whole conversation, of several turns."""
    tokenizer = tokenizers[name]
    chosen, rejected = messages("a", "b", "how?", "like this"), messages("a", "b", "how?", "no idea")
    ((prompt, better, worse),) = texts(tokenizer, load(tmp_path, tokenizer, {"chosen": chosen, "rejected": rejected}))
    for answer, conversation in ((better, chosen), (worse, rejected)):
        assert prompt + answer == tokenizer.library.apply_chat_template(conversation, tokenize=False)
    assert "how?" in prompt and "like this" not in prompt and better.strip().startswith("like this")


def test_parquet(tmp_path, tokenizers):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(
        [{"chosen": TWO_TURNS, "rejected": messages("how?", "no idea")}, {"chosen": TWO_TURNS, "rejected": None}]
    )
    parquet.write_table(table.slice(0, 1), tmp_path / "good.parquet")
    options = PreferenceOptions(preference_data=(str(tmp_path / "good.parquet"),), max_length=200)
    assert texts(tokenizers["chatml"], load_preferences(options, tokenizers["chatml"], 1)) == [
        (BEGINNING, BETTER, WORSE)
    ]
    parquet.write_table(table, tmp_path / "bad.parquet")
    options = PreferenceOptions(preference_data=(str(tmp_path / "bad.parquet"),), max_length=200)
    with pytest.raises(DataError, match=r"bad\.parquet, row 2 has no key 'rejected', only chosen"):
        load_preferences(options, tokenizers["chatml"], 1)


def test_pairs_without_use_are_left_out_and_counted(tmp_path, tokenizers, caplog):
    short = {"prompt": "a", "chosen": "b", "rejected": "c"}
    long = {"prompt": "a", "chosen": "b", "rejected": "c d e f g h i j k"}
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    with caplog.at_level(logging.INFO):
        assert len(load(tmp_path, tokenizers["none"], short, long, same, long, "", max_length=6)) == 1
    assert "3 of 4 pairs are left out: 2 are longer than --seq-length 6, and 1 have the same answer" in caplog.text
    with pytest.raises(
        DataError, match=r"holds 2 pairs, of which none .* 1 are longer than --seq-length 6, the shortest"
    ):
        load(tmp_path, tokenizers["none"], long, same, max_length=6)
    with pytest.raises(DataError, match="holds no pair"):
        load(tmp_path, tokenizers["none"])


PAIR = {"prompt": "how?", "chosen": "so", "rejected": "no"}
QUESTION = {"prompt": messages("how?"), "chosen": TWO_TURNS[1], "rejected": messages("", "no idea")[1]}


@pytest.mark.parametrize(
    ("tokenizer", "row", "words"),
    [
        ("none", {**PAIR, "rejected": None}, "has no key 'rejected', only chosen, prompt"),
        ("none", {"prompt": "how?", "answers": []}, "has no key 'chosen', only answers, prompt"),
        ("none", {**PAIR, "images": ["a.png"]}, "holds 'images', and only text is read"),
        ("none", {**PAIR, "system": "be brief"}, "holds 'system', for which texts have no place"),
        ("none", {**PAIR, "prompt": " "}, "has an empty prompt"),
        ("none", {"chosen": "so", "rejected": "no"}, "have no common beginning; name the key of the prompt"),
        ("none", {**PAIR, "chosen": "\ud83d"}, "holds half of a surrogate pair under 'chosen'"),
        ("none", "[1]", "is a JSON list, not an object"),
        ("chatml", {**QUESTION, "chosen": 3}, "holds no list of turns under 'chosen'"),
        ("chatml", {**QUESTION, "prompt": 3}, "holds no list of turns under 'the prompt'"),
        ("chatml", {**QUESTION, "chosen": {"from": "robot", "value": "so"}}, "turn 1 under 'chosen' from 'robot'"),
        ("chatml", {**QUESTION, "chosen": messages("why?")}, "under 'chosen' whose turns are of user;"),
        ("chatml", {**QUESTION, "rejected": messages("how?")}, "under 'rejected' whose turns are of none;"),
        ("chatml", {"chosen": messages("a", "b"), "rejected": messages("c", "d")}, "have no common beginning"),
        ("mistral", {**QUESTION, "prompt": messages("a", "b")}, "the chat template does not take these messages"),
    ],
)
def test_a_bad_row_is_named_in_one_line(tmp_path, tokenizers, tokenizer, row, words):
    good = PAIR if tokenizer == "none" else QUESTION
    with pytest.raises(DataError) as error:
        load(tmp_path, tokenizers[tokenizer], good, row)
    message = str(error.value)
    assert message.startswith(f"--preference-data {tmp_path / 'pairs.jsonl'}, line 2 ") and "\n" not in message
    assert words in message


def test_flags_that_do_not_fit(tmp_path, tokenizers):
    with pytest.raises(ConfigError, match="line 1 has messages, and the tokenizer has no chat template"):
        load(tmp_path, tokenizers["none"], QUESTION)
    with pytest.raises(DataError, match="line 1 has no key 'prompt', and --apply-chat-template needs a prompt"):
        load(tmp_path, tokenizers["chatml"], {"chosen": "a b", "rejected": "a c"}, apply_chat_template=True)
    with pytest.raises(DataError, match=r"--preference-data missing\.jsonl names no file"):
        load_preferences(PreferenceOptions(preference_data=("missing.jsonl",), max_length=9), tokenizers["none"], 1)


def test_a_template_that_rewrites_the_prompt(tmp_path):
    """Where an answer follows, the prompt must stay as it is: its tokens are the prompt's."""
    rewriting = "{{ messages | length }}" + CHATML
    tokenizer = HuggingFaceTokenizer(tokenizer_folder(tmp_path / "tokenizer", rewriting))
    with pytest.raises(DataError, match=r"line 1 has a prompt that the chat template writes otherwise .* 'chosen'"):
        load(tmp_path, tokenizer, QUESTION)
