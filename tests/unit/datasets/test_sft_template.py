"""Which tokens of a conversation are trained on: the assistant's, for templates of every style, or a refusal."""

import itertools

import pytest

from megatron.core.datasets.sft_records import Conversation
from megatron.core.datasets.sft_template import ChatTemplate
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.core.errors import ConfigError
from tests.unit.datasets.chat import CHATML, LLAMA3, MARKED, MISTRAL, MOVING, PLAIN, messages, tokenizer_folder

TURNS = messages("the fox", "jumps over", "my box", "five dozen", system="quick")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def with_spaces(tmp_path_factory):
    return HuggingFaceTokenizer(tokenizer_folder(tmp_path_factory.mktemp("metaspace"), metaspace=True))


def encode(tokenizer, template, turns, tools=None):
    return ChatTemplate(tokenizer, template).encode(Conversation(turns, tools))


def runs(tokenizer, ids, trained):
    """Text of each run of tokens that are trained on."""
    groups = itertools.groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in group]) for is_trained, group in groups if is_trained]


@pytest.mark.parametrize(
    ("template", "space", "end"),
    [
        (CHATML, "", "<|im_end|>"),
        (LLAMA3, "", "<|eot_id|>"),
        (MISTRAL, " ", "</s>"),
        (MARKED, "", "<|im_end|>"),
        (PLAIN, " ", "\n"),
    ],
    ids=["chatml", "llama3", "mistral", "marked", "plain"],
)
@pytest.mark.parametrize("system", [True, False])
def test_the_assistants_turns_and_their_ends(tokenizer, template, space, end, system):
    turns = TURNS if system else TURNS[1:]
    ids, trained = encode(tokenizer, template, turns)
    assert runs(tokenizer, ids, trained) == [f"{space}jumps over{end}", f"{space}five dozen{end}"]
    whole = tokenizer.library.apply_chat_template(turns, chat_template=template, tokenize=True, return_dict=True)
    assert tokenizer.decode(ids) == tokenizer.decode(whole["input_ids"])
    # This tokenizer makes one token of two line ends at the end of a prompt, and two of them before a word.
    assert (ids == whole["input_ids"]) == (template != LLAMA3)


def test_the_prompt_is_what_generation_gives_the_model(tokenizer):
    ids, trained = encode(tokenizer, LLAMA3, TURNS)
    prompt = tokenizer.library.apply_chat_template(
        TURNS[:2], chat_template=LLAMA3, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    first = trained.index(True)
    assert ids[:first] == prompt


def test_what_comes_after_the_last_answer_is_not_trained_on(tokenizer):
    ids, trained = encode(tokenizer, CHATML, [*TURNS, {"role": "user", "content": "pack my"}])
    assert runs(tokenizer, ids, trained) == ["jumps over<|im_end|>", "five dozen<|im_end|>"]


def test_two_turns_of_the_assistant_in_a_row(tokenizer):
    ids, trained = encode(tokenizer, CHATML, [*TURNS[:3], {"role": "assistant", "content": "my box"}])
    assert runs(tokenizer, ids, trained) == ["jumps over<|im_end|>", "my box<|im_end|>"]


def test_a_token_that_would_lie_across_the_bound_is_cut(tokenizer):
    """As in generation, where the prompt is tokenized without the answer."""
    turns = messages("the fox", "\n    jumps")
    text = tokenizer.library.apply_chat_template(turns, chat_template=CHATML, tokenize=False)
    ids, trained = encode(tokenizer, CHATML, turns)
    assert ids != tokenizer.encode(text), "the whole text has a token across the bound, else this tests nothing"
    assert tokenizer.decode(ids) == text and runs(tokenizer, ids, trained) == ["\n    jumps<|im_end|>"]
    prompt = tokenizer.encode(text[: text.index("\n    jumps")])
    assert ids[: len(prompt)] == prompt and not any(trained[: len(prompt)])


def test_tokenizers_that_put_a_space_before_a_text(with_spaces):
    template = (
        "{% for message in messages %}{{ '[Q]' + message['content'] + '[/Q]' if message['role'] == 'user' "
        "else message['content'] + eos_token }}{% endfor %}"
    )
    ids, trained = encode(with_spaces, template, TURNS[1:])
    text = with_spaces.library.apply_chat_template(TURNS[1:], chat_template=template, tokenize=False)
    assert ids == with_spaces.encode(text)
    pieces = with_spaces.encode_batch(["[Q]the fox[/Q]", "jumps over</s>"])
    assert ids[: len(pieces[0]) + len(pieces[1])] != [*pieces[0], *pieces[1]], "else this tests nothing"
    assert [run.strip() for run in runs(with_spaces, ids, trained)] == ["jumps over</s>", "five dozen</s>"]


def test_tools_reach_the_template(tokenizer):
    template = "{{ tools[0]['name'] }}" + CHATML
    ids, _ = encode(tokenizer, template, TURNS, tools=[{"name": "fox"}])
    assert tokenizer.decode(ids).startswith("fox<|im_start|>")


@pytest.mark.parametrize(
    ("template", "turns", "says"),
    [
        (MOVING, TURNS[1:], "turn 2 is not how the whole text begins"),
        (MISTRAL, messages("the", "fox", "dog")[1:], "begins with a turn of the assistant"),
        (MISTRAL, [*TURNS, *TURNS[1:2], *TURNS[1:2]], "refused by the chat template: roles must alternate"),
        ("{{ messages[0]['content'] }}", TURNS, "writes nothing for the assistant's turns"),
        ("{{ messages[0]['content'] + 1 }}", TURNS, "is refused by the chat template: "),
        (MARKED.replace("== 'assistant'", "== 'tool'"), TURNS, "writes nothing for the assistant's turns"),
    ],
    ids=["moves text", "no prompt", "raises", "drops turns", "wrong types", "marks nothing"],
)
def test_refusals(tokenizer, template, turns, says):
    with pytest.raises(ValueError, match=says) as error:
        encode(tokenizer, template, turns)
    assert "\n" not in str(error.value)


def test_a_template_is_needed(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"no chat template; give a file .* --chat-template"):
        ChatTemplate(tokenizer)
    own = HuggingFaceTokenizer(tokenizer_folder(tmp_path, CHATML))
    ids, trained = ChatTemplate(own).encode(Conversation(TURNS))
    assert runs(own, ids, trained) == ["jumps over<|im_end|>", "five dozen<|im_end|>"]
    ids, trained = ChatTemplate(own, LLAMA3).encode(Conversation(TURNS))
    assert runs(own, ids, trained) == ["jumps over<|eot_id|>", "five dozen<|eot_id|>"]
