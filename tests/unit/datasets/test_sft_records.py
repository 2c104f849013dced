"""One line of instruction data to messages: three formats, told apart line by line, and every mistake in them."""

import json

import pytest

from megatron.core.datasets.sft_records import parse_conversation
from tests.unit.datasets.chat import messages


def parse(record):
    return parse_conversation(json.dumps(record).encode())


def test_empty_keys_and_notes_of_other_programs_are_no_content():
    record = {
        "messages": messages("q", "a"),
        "images": [],
        "rejected_response": "",
        "id": 7,
        "source": "web",
        "label": "x",
    }
    assert parse(record).messages == messages("q", "a")


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
        ({"messages": messages("q", "a"), "system": "s"}, messages("q", "a", system="s")),
        ({"messages": messages("q", "a", system="s"), "system": "s"}, messages("q", "a", system="s")),
        ({"messages": messages("q", "a", system="s"), "system": None}, messages("q", "a", system="s")),
        (
            {"system": "s", "conversations": [{"from": r, "value": r[0]} for r in ("system", "human", "gpt")]},
            messages("h", "g", system="s"),
        ),
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


def test_a_turn_of_weight_0_is_not_trained_on():
    turns = messages("q", "a", "r", "b", "s", "c")
    turns[1]["weight"], turns[3]["weight"], turns[4]["weight"], turns[5]["weight"] = 0, 1, 0, None
    found = parse({"messages": turns, "system": "x"})
    assert found.untrained == {2}
    assert found.messages == messages("q", "a", "r", "b", "s", "c", system="x")
    assert parse({"messages": messages("q", "a")}).untrained == set()


def weighted(number, weight, name="weight"):
    turns = messages("q", "a", "r", "b")
    turns[number][name] = weight
    return {"messages": turns}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (weighted(1, 0.5), "gives turn 2 the weight 0.5; give 0 or 1"),
        (weighted(3, True), "gives turn 4 the weight true; give 0 or 1"),
        (weighted(1, "0"), 'gives turn 2 the weight "0"; give 0 or 1'),
        (weighted(2, 1), "gives turn 3 the weight 1, and only the assistant's turns are trained on"),
        (weighted(1, False, "train"), "has 'train' in turn 2; write it as a weight of 0 or 1"),
        (weighted(1, False, "loss"), "has 'loss' in turn 2; write it as a weight of 0 or 1"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]},
            "has only turns of the assistant with weight 0, so nothing to train on",
        ),
        (
            {"messages": messages("q", "a", system="s"), "system": "t"},
            "says 't' under 'system' and 's' in its system turn",
        ),
        (
            {"system": "t", "conversations": [{"from": r, "value": r[0]} for r in ("system", "human", "gpt")]},
            "says 't' under 'system' and 's' in its system turn",
        ),
        ({"messages": messages("q", "a"), "system": 3}, "has a int as system, not text"),
        ({"messages": messages("q", "a"), "images": ["a.png"]}, "holds 'images', and only text is trained on"),
        ({"messages": messages("q", "a"), "rejected_response": "b"}, "holds 'rejected_response', and answers are not"),
        ({"conversations": messages("q", "a"), "videos": ["v"]}, "holds 'videos'"),
        ({"instruction": "q", "output": "a", "image": "a.png"}, "holds 'image'"),
        ({"messages": messages("q", "a"), "kto_tag": False}, "holds 'kto_tag'"),
        ({"messages": messages("q", "a"), "documents": [{"text": "d"}]}, "holds 'documents', and templates"),
        (
            {"messages": [{"role": "user", "content": "q", "images": ["a.png"]}, *messages("q", "a")[1:]]},
            "holds 'images' in turn 1",
        ),
        ({"messages": messages("q", "a"), "functions": [{"name": "f"}]}, "holds 'functions'; write them under 'tools'"),
        (
            {"messages": [*messages("q"), {"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
            "holds 'function_call' in turn 2; write it as 'tool_calls'",
        ),
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
