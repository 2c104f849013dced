"""The assistant's text under published chat templates: one turn, several, calls of tools, and reasoning."""

import itertools
import re

import pytest

from megatron.core.datasets.sft_records import Conversation
from megatron.core.datasets.sft_template import SFTTemplate
from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from tests.unit.datasets.chat import SPECIAL, messages, tokenizer_folder
from tests.unit.datasets.published import TEMPLATES

TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "clock", "arguments": {"city": "Rome"}}}],
}
RESULT = {"role": "tool", "content": "five", "tool_call_id": "c1", "name": "clock"}
ONE = messages("the fox", "jumps over", system="quick")
MANY = messages("the fox", "jumps over", "my box", "five dozen", "and", "lazy dog", system="quick")
CALLS = [*messages("what time"), CALL, RESULT, *messages("?", "it is five")[1:], *messages("again"), CALL, RESULT]
CALLS = [*CALLS, *messages("?", "still five")[1:]]
THOUGHT = messages("the fox", "jumps over", "my box", "five dozen")
THOUGHT = [
    turn | ({"reasoning_content": f"on {turn['content']}"} if turn["role"] == "assistant" else {}) for turn in THOUGHT
]
IN_TEXT = messages(
    "the fox", "<think>\nquick\n</think>\n\njumps over", "my box", "<think>\nlazy\n</think>\n\nfive dozen"
)
CONVERSATIONS = {
    "one": (ONE, None),
    "many": (MANY, None),
    "calls": (CALLS, TOOLS),
    "thought": (THOUGHT, None),
    "in text": (IN_TEXT, None),
}


def all_with(end, *, start="", one="jumps over", many=("five dozen", "lazy dog")):
    """The trained text of turns without calls, each between the same words."""
    return {"one": [f"{start}{one}{end}"], "many": [f"{start}{text}{end}" for text in (one, *many)]}


def in_text(end, *, start=""):
    """Reasoning in the text of an answer, which the template treats like any other text."""
    first, second = IN_TEXT[1]["content"], IN_TEXT[3]["content"]
    return {"in text": [f"{start}{first}{end}", f"{start}{second}{end}"]}


HERMES = '<tool_call>\n{"name": "clock", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
NO_CALLS, NO_THOUGHT = "has 'tool_calls' in turn 2, which", "has 'reasoning_content' in turn 2, which"
NOTHING = {"calls": NO_CALLS, "thought": NO_THOUGHT}
LLAMA31_CALL = '{"name": "clock", "parameters": {"city": "Rome"}}<|eot_id|>'
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "clock", "arguments": {"city": "Rome"}}]</s>'
R1_CALL = '<|tool_calls|>clock\n{"city": "Rome"}<|end_of_sentence|>'
# The runs of trained text, or what a refusal says.
EXPECTED = {
    "chatml": all_with("<|im_end|>") | in_text("<|im_end|>") | NOTHING,
    "llama-2": all_with(" </s>", start=" ")
    | in_text(" </s>", start=" ")
    | {"calls": "roles must take turns"}
    | {"thought": NO_THOUGHT},
    "llama-3.1": all_with("<|eot_id|>")
    | in_text("<|eot_id|>")
    | {"calls": [LLAMA31_CALL, "it is five<|eot_id|>", LLAMA31_CALL, "still five<|eot_id|>"], "thought": NO_THOUGHT},
    "qwen2.5": all_with("<|im_end|>")
    | in_text("<|im_end|>")
    | {"calls": [HERMES, "it is five<|im_end|>", HERMES, "still five<|im_end|>"], "thought": NO_THOUGHT},
    "qwen3": {
        "one": ["<think>\n\n</think>\n\njumps over<|im_end|>"],
        "many": ["jumps over<|im_end|>", "five dozen<|im_end|>", "<think>\n\n</think>\n\nlazy dog<|im_end|>"],
        "calls": [HERMES, "it is five<|im_end|>", HERMES, "<think>\n\n</think>\n\nstill five<|im_end|>"],
        "thought": ["jumps over<|im_end|>", "<think>\non five dozen\n</think>\n\nfive dozen<|im_end|>"],
        "in text": ["jumps over<|im_end|>", "<think>\nlazy\n</think>\n\nfive dozen<|im_end|>"],
    },
    "phi-3": all_with("<|end|>") | in_text("<|end|>") | NOTHING,
    "phi-4": all_with("<|im_end|>") | in_text("<|im_end|>") | NOTHING,
    "mistral-v3": all_with("</s>", start=" ")
    | in_text("</s>", start=" ")
    | {"calls": [MISTRAL_CALL, " it is five</s>", MISTRAL_CALL, " still five</s>"], "thought": NO_THOUGHT},
    "gemma": {"one": "System role not supported", "many": "System role not supported"}
    | in_text("<end_of_turn>")
    | NOTHING,
    "deepseek-r1": all_with("<|end_of_sentence|>")
    | {
        "calls": "has 'tools', which the chat template leaves out",
        "thought": NO_THOUGHT,
        "in text": ["\n\njumps over<|end_of_sentence|>", "\n\nfive dozen<|end_of_sentence|>"],
    },
    "glm-4": {
        "one": ["\njumps over"],
        "many": ["\njumps over<|user|>", "\nfive dozen<|user|>", "\nlazy dog"],
        "calls": [
            'clock\n{"city": "Rome"}<|observation|>',
            "\nit is five<|user|>",
            'clock\n{"city": "Rome"}<|observation|>',
            "\nstill five",
        ],
        "thought": NO_THOUGHT,
        "in text": [f"\n{IN_TEXT[1]['content']}<|user|>", f"\n{IN_TEXT[3]['content']}"],
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One whose special tokens are those of all templates."""
    written = re.findall(r"<\|\w+\|>|<\w+_of_turn>|</?think>|</?tool_call>|\[/?[A-Z_]+\]", "".join(TEMPLATES.values()))
    named = [f"<|{role}|>" for role in ("system", "user", "assistant")]
    special = [*SPECIAL, *sorted({*written, *named} - set(SPECIAL))]
    return HuggingFaceTokenizer(tokenizer_folder(tmp_path_factory.mktemp("published"), special=special, vocabulary=500))


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_assistants_text(tokenizer, name, conversation):
    (turns, tools), expected = CONVERSATIONS[conversation], EXPECTED[name][conversation]
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            trained_text(tokenizer, TEMPLATES[name], turns, tools)
    else:
        assert trained_text(tokenizer, TEMPLATES[name], turns, tools) == expected


def trained_text(tokenizer, template, turns, tools=None):
    ids, trained = SFTTemplate(tokenizer, template).encode(Conversation(turns, tools))
    groups = itertools.groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in group]) for is_trained, group in groups if is_trained]


def test_arguments_in_the_form_that_a_template_takes(tokenizer):
    """Objects, as most templates write them, or JSON text."""
    r1 = [R1_CALL, "it is five<|end_of_sentence|>", R1_CALL, "still five<|end_of_sentence|>"]
    assert trained_text(tokenizer, TEMPLATES["deepseek-r1"], CALLS) == r1
    function = {"name": "clock", "arguments": '{"city": "Rome"}'}
    as_text = [turn | ({"tool_calls": [{"function": function}]} if turn is CALL else {}) for turn in CALLS]
    for name in ("llama-3.1", "qwen3", "mistral-v3"):
        assert trained_text(tokenizer, TEMPLATES[name], as_text, TOOLS) == EXPECTED[name]["calls"]
    assert trained_text(tokenizer, TEMPLATES["deepseek-r1"], as_text) == r1


@pytest.mark.parametrize("end", ["", " \n", "\n\n"])
@pytest.mark.parametrize("name", ["chatml", "llama-3.1", "qwen3", "phi-3"])
def test_space_at_the_end_of_a_text(tokenizer, name, end):
    """It is the assistant's where the template keeps it."""
    turns = [{**turn, "content": turn["content"] + end} for turn in MANY]
    kept = "" if name == "llama-3.1" else end
    expected = [re.sub(r"(<\|(?:im_end|end|eot_id)\|>)$", lambda m: kept + m[0], run) for run in EXPECTED[name]["many"]]
    assert trained_text(tokenizer, TEMPLATES[name], turns) == expected


def test_words_that_occur_again(tokenizer):
    """Turns that say what others say, and what the template writes."""
    for said in ("assistant", "x", "<|im_end|>\n<|im_start|>assistant\n", "user\nx"):
        turns = messages(said, said, said, said, system=said)
        assert trained_text(tokenizer, TEMPLATES["chatml"], turns) == [f"{said}<|im_end|>"] * 2


def test_an_empty_answer(tokenizer):
    turns = messages("the fox", "", "my box", "five dozen")
    assert trained_text(tokenizer, TEMPLATES["chatml"], turns) == ["<|im_end|>", "five dozen<|im_end|>"]


def test_a_template_that_ends_turns_otherwise_later(tokenizer):
    """Words that are no token, and differ between the end of a conversation and its middle, cannot be told from a
    text."""
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}"
        "{{ '. ' if loop.last and m['role'] != 'user' else '; ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    with pytest.raises(ValueError, match="turn 2 ends otherwise in the whole text"):
        trained_text(tokenizer, template, MANY[1:])
