"""One line of instruction data to messages: three formats, told apart line by line, and every mistake in them."""

import json

import pytest

from megatron.core.datasets.sft_records import parse_conversation
from tests.unit.datasets.chat import messages


def parse(record):
    return parse_conversation(json.dumps(record).encode())


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": messages("q", "a", "r", "b", system="s")}, messages("q", "a", "r", "b", system="s")),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            messages("q", "a", system="s"),
        ),
        (
            {
                "system": "s",
                "conversations": [
                    *({"from": "human", "value": "q"}, {"from": "function_call", "value": "f()"}),
                    *({"from": "observation", "value": "1"}, {"from": "gpt", "value": "a"}),
                ],
            },
            [
                *messages("q", "f()", system="s"),
                *({"role": "tool", "content": "1"}, {"role": "assistant", "content": "a"}),
            ],
        ),
        ({"instruction": "i", "input": "", "output": "o"}, messages("i", "o")),
        ({"instruction": "i", "input": "x", "output": "o", "system": "s"}, messages("i\nx", "o", system="s")),
        ({"instruction": "i", "output": "o", "history": [["q", "a"]]}, messages("q", "a", "i", "o")),
        ({"messages": messages("é", "\n\t")}, messages("é", "\n\t")),
    ],
)
def test_formats(record, expected):
    found = parse(record)
    assert found.messages == expected and found.tools is None


def test_fields_for_the_template_are_kept():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    found = parse({"messages": [*messages("q"), call], "tools": [{"name": "f"}]})
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    assert found.tools == [{"name": "f"}]
    assert parse({"messages": messages("q", "a"), "tools": '[{"name": "g"}]'}).tools == [{"name": "g"}]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([1], "is a JSON list, not an object"),
        ({"text": "t"}, "has none of the keys messages, conversations and instruction, only text"),
        ({"messages": []}, "holds no list of turns under 'messages'"),
        ({"messages": ["q"]}, "as turn 1 under 'messages', not an object"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "turn 1 under 'messages' from 'bot', which is none of"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "which is none of"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "has a list as content of turn 1"),
        ({"messages": [*messages("q"), {"role": "assistant", "content": None}]}, "has a NoneType as content of turn 2"),
        ({"messages": messages("q")}, "has no turn of the assistant, so nothing to train on"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "has no turn of the assistant"),
        ({"instruction": "i"}, "has no key 'output', only instruction"),
        ({"instruction": 1, "output": "o"}, "has a int as instruction, not text"),
        ({"instruction": "i", "output": "o", "history": "q"}, r"holds no list of \[question, answer\]"),
        ({"messages": messages("q", "a"), "tools": "{"}, "holds no JSON under 'tools'"),
        ({"messages": messages("q", "a"), "tools": ["f"]}, "holds no list of objects under 'tools'"),
        ({"messages": messages("q", "a\ud83d")}, "half of a surrogate pair"),
    ],
)
def test_mistakes(record, says):
    with pytest.raises(ValueError, match=says) as error:
        parse(record)
    assert "\n" not in str(error.value)


def test_no_json():
    with pytest.raises(ValueError, match="is not JSON in UTF-8"):
        parse_conversation(b'{"messages": ')
