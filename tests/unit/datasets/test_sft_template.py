"""Which tokens of a conversation are trained on: the assistant's, for templates of every style, or a refusal."""

import itertools

import pytest

from megatron.base.errors import ConfigError
from megatron.core.datasets.sft_records import Conversation
from megatron.core.datasets.sft_template import SFTTemplate
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from tests.unit.datasets.chat import CHATML, LLAMA3, MARKED, MISTRAL, PLAIN, messages, tokenizer_folder

TURNS = messages("the fox", "jumps over", "my box", "five dozen", system="quick")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def with_spaces(tmp_path_factory):
    return HuggingFaceTokenizer(tokenizer_folder(tmp_path_factory.mktemp("metaspace"), metaspace=True))


def encode(tokenizer, template, turns, tools=None):
    return SFTTemplate(tokenizer, template).encode(Conversation(turns, tools))


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


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "fox", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "over", "tool_call_id": "c1", "name": "fox"}
# Writes calls and tools, as CHATML does not.
CALLING = (
    "{{ (tools | tojson + '\n') if tools else '' }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ message['tool_calls'] | tojson if message['tool_calls'] else '' }}{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_calls_are_trained_on_where_the_template_writes_them(tokenizer):
    turns = [*TURNS[:2], CALL, RESULT, *TURNS[2:3]]
    ids, trained = encode(tokenizer, CALLING, turns, tools=[{"name": "fox"}])
    assert [run[:12] for run in runs(tokenizer, ids, trained)] == ['[{"function"', "jumps over<|"]


THINKING = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")


@pytest.mark.parametrize(
    ("template", "turns", "tools", "says"),
    [
        (
            CHATML,
            [*TURNS[:2], CALL, RESULT, *TURNS[2:]],
            None,
            "has 'tool_calls' in turn 3, which the chat template leaves",
        ),
        (
            MARKED,
            [*TURNS[:2], CALL, RESULT, *TURNS[2:]],
            None,
            "has 'tool_calls' in turn 3, which the chat template leaves",
        ),
        (CHATML, TURNS, [{"name": "fox"}], "has 'tools', which the chat template leaves out"),
        (
            CHATML,
            [*TURNS[:2], {**TURNS[2], "reasoning_content": "lazy dog"}],
            None,
            "has 'reasoning_content' in turn 3, which the chat template leaves",
        ),
        (
            CHATML.replace("messages %}", "messages if message.role != 'system' %}"),
            TURNS,
            None,
            "has turn 1 from system, whose text the chat template leaves out",
        ),
        (
            CALLING.replace("if message['tool_calls'] else", "if message['tool_calls'] and loop.index == 3 else"),
            [*TURNS[:2], CALL, RESULT, CALL, RESULT, *TURNS[2:3]],
            None,
            "has turn 5 from assistant, for which the chat template writes nothing",
        ),
    ],
    ids=["calls", "calls, marked", "tools", "reasoning", "system", "one of two calls"],
)
def test_nothing_is_left_out_without_a_word(tokenizer, template, turns, tools, says):
    with pytest.raises(ValueError, match=says):
        encode(tokenizer, template, turns, tools)


def test_what_is_not_text_to_learn_may_be_left_out(tokenizer):
    labelled = [{**turn, "name": "someone", "id": 7, "tool_calls": None, "annotations": []} for turn in TURNS]
    assert encode(tokenizer, CHATML, labelled) == encode(tokenizer, CHATML, TURNS)
    # A template may shorten a text, as many do with the reasoning in an answer.
    thought = [*TURNS[:2], {**TURNS[2], "content": "<think>lazy dog</think>jumps over"}, *TURNS[3:]]
    assert encode(tokenizer, THINKING, thought) == encode(tokenizer, CHATML, TURNS)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MARKED], ids=["chatml", "llama3", "marked"])
def test_turns_of_weight_0(tokenizer, template):
    whole, all_trained = encode(tokenizer, template, TURNS)
    for left, untrained in ((1, {2}), (0, {4})):
        ids, trained = SFTTemplate(tokenizer, template).encode(Conversation(TURNS, untrained=frozenset(untrained)))
        assert ids == whole
        assert runs(tokenizer, ids, trained) == [runs(tokenizer, whole, all_trained)[left]]


def test_marks_that_are_not_one_per_turn_cannot_be_weighed(tokenizer):
    answer = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    twice = MARKED.replace(answer, "{% generation %}{{ 'a' }}{% endgeneration %}{{ ':' }}" + answer)
    encode(tokenizer, twice, TURNS)
    with pytest.raises(ValueError, match="4 marked parts for 2 turns of the assistant"):
        SFTTemplate(tokenizer, twice).encode(Conversation(TURNS, untrained=frozenset({2})))


@pytest.mark.parametrize(
    ("template", "turns", "says"),
    [
        (MISTRAL, messages("the", "fox", "dog")[1:], "begins with a turn of the assistant"),
        (MISTRAL, [*TURNS, *TURNS[1:2], *TURNS[1:2]], "refused by the chat template: roles must alternate"),
        ("{{ messages[0]['content'] }}", TURNS, "turn 2 from user, whose text the chat template leaves out"),
        ("{{ messages[0]['content'] + 1 }}", TURNS, "is refused by the chat template: "),
        (MARKED.replace("== 'assistant'", "== 'tool'"), TURNS, "writes nothing for the assistant's turns"),
    ],
    ids=["no prompt", "raises", "drops turns", "wrong types", "marks nothing"],
)
def test_refusals(tokenizer, template, turns, says):
    with pytest.raises(ValueError, match=says) as error:
        encode(tokenizer, template, turns)
    assert "\n" not in str(error.value)


def test_a_template_is_needed(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match=r"no chat template, .* give --chat-template chatml, or a file"):
        SFTTemplate(tokenizer)
    own = HuggingFaceTokenizer(tokenizer_folder(tmp_path, CHATML))
    ids, trained = SFTTemplate(own).encode(Conversation(TURNS))
    assert runs(own, ids, trained) == ["jumps over<|im_end|>", "five dozen<|im_end|>"]
    ids, trained = SFTTemplate(own, LLAMA3).encode(Conversation(TURNS))
    assert runs(own, ids, trained) == ["jumps over<|eot_id|>", "five dozen<|eot_id|>"]
