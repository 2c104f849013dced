"""Requests as clients of OpenAI's and vLLM's servers send them: each is answered, or refused by name and with the
reason."""

import itertools
import json
from collections import Counter

import pytest
import torch

from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.core.inference.engine.penalties import LogitChanges, Penalties
from megatron.core.inference.server.tool_calls import ToolCallReader
from tests.unit.inference.serving import BYTES, Live, write_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
# Writes all that a conversation may have; `thinking` is its own option.
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ '<' + t.function.name + '>' }}{% endfor %}"
    "{% for m in messages %}<|{{ 'user' if m.role != 'assistant' else m.role }}|>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking is defined and not thinking %}--{% endif %}{% endif %}"
)
FUNCTION = {"name": "clock", "description": "the time", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"city": "Rome"}'}}
USED = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
USED = [*USED, {"role": "tool", "tool_call_id": "c1", "content": "five"}]
THOUGHT = [*HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": "greets"}, *HELLO]
NEWER = [*HELLO, {"role": "assistant", "content": "Hi", "reasoning": "greets"}, *HELLO]
OURS = [{"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE))


@pytest.fixture(scope="module")
def live(tokenizer):
    with Live(tokenizer) as server:
        yield server


# Bodies that are answered, and the prompt's text where the template decides about it.
PLAIN = "<s><|user|>Hello<|assistant|>"
ANSWERED = {
    "penalties": ({"presence_penalty": 0.5, "frequency_penalty": -0.5}, None),
    "bias": ({"logit_bias": {"65": 5, "66": -100}}, None),
    "no bias": ({"logit_bias": {}}, None),
    "repetition": ({"repetition_penalty": 1.1}, None),
    "no repetition": ({"repetition_penalty": 1.0}, None),
    "stop ids": ({"stop_token_ids": [13, 257]}, None),
    "no stop ids": ({"stop_token_ids": []}, None),
    "ignore eos": ({"ignore_eos": True}, None),
    "min tokens": ({"min_tokens": 4}, None),
    "special": ({"skip_special_tokens": False}, None),
    "no special": ({"skip_special_tokens": True, "spaces_between_special_tokens": False}, None),
    "stop in text": ({"stop": ["x"], "include_stop_str_in_output": True}, None),
    "min_p": ({"temperature": 0.7, "min_p": 0.05}, None),
    "min_p, greedy": ({"min_p": 0.05}, None),
    "top_k off": ({"temperature": 1, "top_k": -1}, None),
    "top_k": ({"temperature": 1, "top_k": 20, "top_p": 0.9}, None),
    "no beams": ({"use_beam_search": False, "best_of": 1, "length_penalty": 1.0, "early_stopping": False}, None),
    "nulls": (dict.fromkeys(("seed", "stop", "logit_bias", "response_format", "user", "guided_json", "min_p")), None),
    "newer labels": ({"request_id": "r", "cache_salt": "s", "prompt_cache_retention": "24h"}, None),
    "labels": ({"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False}, None),
    "text form": ({"response_format": {"type": "text"}}, None),
    "no priority": ({"priority": 0, "return_token_ids": False}, None),
}
CHATS = {
    "tools": ({"tools": TOOLS}, f"<s><clock>{PLAIN[3:]}"),
    "tools, auto": ({"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}, f"<s><clock>{PLAIN[3:]}"),
    "tools, none": ({"tools": TOOLS, "tool_choice": "none"}, PLAIN),
    "strict tools": (
        {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]},
        f"<s><clock>{PLAIN[3:]}",
    ),
    "no tools": ({"tools": [], "tool_choice": "auto", "functions": []}, PLAIN),
    "history with calls": (
        {"messages": USED, "tools": TOOLS},
        "<s><clock><|user|>Hello<|assistant|>clockRome<|user|>five<|assistant|>",
    ),
    "history with calls, no tools": (
        {"messages": USED},
        "<s><|user|>Hello<|assistant|>clockRome<|user|>five<|assistant|>",
    ),
    "calls of a stream": (
        {"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0}]}, USED[2]]},
        "<s><|user|>Hello<|assistant|>clockRome<|user|>five<|assistant|>",
    ),
    "reasoning": ({"messages": THOUGHT}, "<s><|user|>Hello<|assistant|>(greets)Hi<|user|>Hello<|assistant|>"),
    "reasoning, newer": ({"messages": NEWER}, "<s><|user|>Hello<|assistant|>(greets)Hi<|user|>Hello<|assistant|>"),
    "an answer sent back": (
        {"messages": [*HELLO, *OURS, *HELLO]},
        "<s><|user|>Hello<|assistant|>Hi<|user|>Hello<|assistant|>",
    ),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}, PLAIN),
    "marked parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "x"}}]}
            ]
        },
        PLAIN,
    ),
    "messages of lm-evaluation-harness": ({"messages": [{**HELLO[0], "type": "text"}], "stop": ["Q:", "</s>"]}, PLAIN),
    "no likeliest tokens": ({"logprobs": False, "top_logprobs": 0}, PLAIN),
    "developer": ({"messages": [{"role": "developer", "content": "x"}, *HELLO]}, f"<s><|user|>x{PLAIN[3:]}"),
    "a named user": ({"messages": [{**HELLO[0], "name": "me"}]}, PLAIN),
    "thinking off": ({"chat_template_kwargs": {"thinking": False}}, f"{PLAIN}--"),
    "thinking on": ({"chat_template_kwargs": {"thinking": True}}, PLAIN),
    "no options": ({"chat_template_kwargs": {}}, PLAIN),
    "no prompt": ({"add_generation_prompt": False}, "<s><|user|>Hello"),
    "to continue": (
        {"messages": [*HELLO, {"role": "assistant", "content": "Sure"}], "continue_final_message": True},
        "<s><|user|>Hello<|assistant|>Sure",
    ),
    "to continue, as vLLM's clients say it": (
        {
            "messages": [*HELLO, {"role": "assistant", "content": "Sure"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "<s><|user|>Hello<|assistant|>Sure",
    ),
    "limit": ({"max_completion_tokens": 4, "max_tokens": None}, PLAIN),
    "log-probabilities": ({"logprobs": True, "top_logprobs": 2}, PLAIN),
    "several": ({"n": 2, "temperature": 1.0, "seed": 3}, PLAIN),
    "form": ({"modalities": ["text"], "verbosity": "medium", "echo": False, "add_special_tokens": False}, PLAIN),
}
# Bodies that are refused: the field that is named, and a part of the reason.
REFUSED = {
    "JSON": ({"response_format": {"type": "json_object"}}, "response_format", "ask for JSON in the prompt"),
    "schema": ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "not constrained"),
    "forced call": ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "not constrained to a call"),
    "named call": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "clock"}}},
        "tool_choice",
        "not constrained to a call",
    ),
    "one call": ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls", "the model decides"),
    "functions": ({"functions": [FUNCTION]}, "functions", "send tools"),
    "effort": ({"reasoning_effort": "low"}, "reasoning_effort", "chat_template_kwargs"),
    "ranked": ({"best_of": 3}, "best_of", "send n"),
    "beams": ({"use_beam_search": True}, "use_beam_search", "sampled"),
    "guided": ({"guided_json": {"type": "object"}}, "guided_json", "not supported"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        "should be 'text'",
    ),
    "penalty": ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    "bias of no token": ({"logit_bias": {"900": 1}}, "logit_bias", "no token id below 260"),
    "tiny repetition penalty": ({"repetition_penalty": 1e-40}, "repetition_penalty", "greater than or equal to 0.01"),
    "bias of a long number": ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "no token id below 260"),
    "tool without a name": ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "required"),
    "tool with a list as its name": (
        {"tools": [{"type": "function", "function": {"name": ["clock"]}}]},
        "tools.0.function.name",
        "string",
    ),
    "bias of a word": ({"logit_bias": {"fox": 1}}, "logit_bias", "no token id below 260"),
    "strong bias": ({"logit_bias": {"7": 101}}, "logit_bias", "from -100 to 100"),
    "stop at no token": ({"stop_token_ids": [-1]}, "stop_token_ids", "no token id below 260"),
    "too many tokens at least": ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "above the 8"),
    "reserved": ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "must not have tools"),
    "two ways to go on": (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "begins no new turn",
    ),
    "misspelt": ({"max_token": 3}, "max_token", "not supported"),
}


def prompt_of(live, monkeypatch, body):
    """The answer, and the text that the engine was given."""
    prompts = []
    submit = live.engine.submit

    def noted(requests):
        prompts.extend(live.tokenizer.decode(request.prompt) for request in requests)
        submit(requests)

    monkeypatch.setattr(live.engine, "submit", noted)
    status, answer = live.call("POST", CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 8, **body})
    assert status == 200, answer
    return answer, prompts[0]


@pytest.mark.parametrize("name", [*ANSWERED, *CHATS])
def test_chats_that_are_answered(live, monkeypatch, name):
    body, expected = {**ANSWERED, **CHATS}[name]
    answer, prompt = prompt_of(live, monkeypatch, body)
    assert prompt == (expected or PLAIN)
    assert answer["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize("name", ANSWERED)
def test_completions_that_are_answered(live, name):
    live.complete("ab", max_tokens=8, **ANSWERED[name][0])


@pytest.mark.parametrize("name", REFUSED)
def test_chats_that_are_refused(live, name):
    body, param, reason = REFUSED[name]
    status, answer = live.call("POST", CHAT, {"messages": HELLO, "max_tokens": 8, **body})
    assert status == 400 and answer["error"]["param"] == param, answer
    assert reason in answer["error"]["message"], answer


def test_tools_that_the_template_does_not_show(tmp_path):
    with Live(HuggingFaceTokenizer(write_tokenizer(tmp_path))) as live:
        for body, part in (({"messages": HELLO, "tools": TOOLS}, "tools"), ({"messages": USED}, "tool_calls")):
            status, answer = live.call("POST", CHAT, body)
            assert status == 400 and f"does not write {part}" in answer["error"]["message"]


class TestMeaning:
    """What the fields do."""

    def text(self, live, **fields):
        return live.complete("ab", max_tokens=12, **fields)["choices"][0]["text"]

    def test_a_bias_decides(self, live):
        assert self.text(live, logit_bias={"65": 100}) == chr(live.tokenizer.decode([65]).encode()[0]) * 12

    def test_a_penalty_on_what_was_said(self, live):
        """Of two tokens that a bias makes likely, the other follows each time."""
        said = self.text(live, logit_bias={"65": 60, "66": 60}, frequency_penalty=2)
        counts = Counter(said)
        assert len(counts) == 2 and max(counts.values()) - min(counts.values()) <= 2, said

    def test_ends(self, live):
        likely = {"logit_bias": {"257": 100}}
        assert live.complete("ab", max_tokens=12, **likely)["usage"]["completion_tokens"] == 1
        assert live.complete("ab", max_tokens=12, ignore_eos=True, **likely)["usage"]["completion_tokens"] == 12
        assert live.complete("ab", max_tokens=12, min_tokens=5, **likely)["usage"]["completion_tokens"] == 6
        ended = {"max_tokens": 12, "stop_token_ids": [65], "logit_bias": {"65": 100}}
        (choice,) = live.complete("ab", **ended)["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        (choice,) = live.complete("ab", include_stop_str_in_output=True, **ended)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (live.tokenizer.decode([65]), "stop")

    def test_special_tokens(self, live):
        likely = {"logit_bias": {"258": 100}}
        assert self.text(live, **likely) == ""
        assert self.text(live, skip_special_tokens=False, **likely) == "<|user|>" * 12
        for included, text in ((False, ""), (True, "<|user|>")):
            likely |= {"stop": "<|user|>", "include_stop_str_in_output": included}
            (choice,) = live.complete("ab", max_tokens=12, **likely)["choices"]
            assert (choice["text"], choice["finish_reason"]) == (text, "stop")

    def test_stop_strings(self, live):
        letter = live.tokenizer.decode([65])
        likely = {"logit_bias": {"65": 100}, "stop": letter * 2}
        assert self.text(live, **likely) == ""
        assert self.text(live, include_stop_str_in_output=True, **likely) == letter * 2
        assert live.complete("ab", max_tokens=12, min_tokens=5, **likely)["usage"]["completion_tokens"] == 5

    def test_a_character_of_several_tokens(self, live):
        """A prompt of ids that ends inside a character: its end belongs to the answer, and places count characters."""
        first, second = live.tokenizer.encode("é")
        body = {"logit_bias": {str(second): 100}, "max_tokens": 1, "logprobs": 0}
        ids = [*live.tokenizer.encode("ab"), first]
        assert live.complete(ids, **body)["choices"][0]["text"] == "é"
        (choice,) = live.complete(ids, echo=True, **body)["choices"]
        assert choice["text"] == "abé" and choice["logprobs"]["text_offset"] == [0, 1, 2, 2]
        assert live.complete(ids, echo=True, max_tokens=0)["choices"][0]["text"] == "ab\ufffd"
        (choice,) = live.complete("ab\ufffd", echo=True, max_tokens=1, logit_bias={"65": 100})["choices"]
        assert choice["text"] == "ab\ufffd" + live.tokenizer.decode([65]), "the replacement character is whole"
        (choice,) = live.complete("aé€b", echo=True, max_tokens=0, logprobs=0)["choices"]
        assert choice["text"] == "aé€b" and choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3]


def test_the_server_goes_on_where_every_token_is_an_end(tokenizer):
    """A choice from no token would be an id that the embedding lacks, which ends the engine for all clients."""
    with Live(tokenizer, fields={**BYTES, "make_vocab_size_divisible_by": 1}) as live:
        fields = {"stop_token_ids": list(range(260)), "min_tokens": 2, "temperature": 1.0, "seed": 1}
        assert live.call("POST", "/v1/completions", {"prompt": "a", "max_tokens": 6, **fields})[0] == 200
        assert live.call("GET", "/health")[0] == 200


def test_penalties_by_hand():
    changes = LogitChanges(Penalties(presence=0.5, frequency=0.25, repetition=2.0, bias={3: -1.0}), [0, 1])
    for token in (2, 2, 1):
        changes.add(token)
    found = changes.changed(torch.tensor([4.0, -4.0, 4.0, 4.0]))
    assert found.tolist() == [2.0, -8.0 - 0.75, 2.0 - 1.0, 3.0]
    assert not LogitChanges(Penalties(), [0], min_tokens=3).is_needed
    waiting = LogitChanges(Penalties(), [0], min_tokens=1, ends=[2])
    assert waiting.changed(torch.zeros(3)).softmax(0).tolist() == [0.5, 0.5, 0.0]
    waiting.add(0)
    assert waiting.changed(torch.zeros(3)).tolist() == [0.0] * 3


CLOCK = '{"name": "clock", "arguments": {"city": "Rome"}}'
ANSWERS = {
    "text": ("It is five.", "It is five.", []),
    "call": (f"<tool_call>\n{CLOCK}\n</tool_call>", "", ["Rome"]),
    "text and call": (f"I look.\n\n<tool_call>{CLOCK}</tool_call>", "I look.", ["Rome"]),
    "two calls": (
        f"<tool_call>{CLOCK}</tool_call>\n<tool_call>{CLOCK.replace('Rome', 'Oslo')}</tool_call>",
        "",
        ["Rome", "Oslo"],
    ),
    "bare": (CLOCK.replace("arguments", "parameters"), "", ["Rome"]),
    "list": (f"[{CLOCK}, {CLOCK}]", "", ["Rome", "Rome"]),
    "no mark at the end": (f"I look. <tool_call>{CLOCK}", "I look.", ["Rome"]),
    "another tool": (f"<tool_call>{CLOCK.replace('clock', 'bomb')}</tool_call>", None, []),
    "the mark of the end in a string": (
        f"<tool_call>{CLOCK.replace('Rome', '</tool_call>')}</tool_call> x",
        " x",
        ["</tool_call>"],
    ),
    "an open string": ('<tool_call>{"name": "clock</tool_call>', None, []),
    "a name that is no text": ('<tool_call>{"name": {}, "arguments": {}}</tool_call>', None, []),
    "half of a surrogate pair": (f"<tool_call>{CLOCK.replace('Rome', chr(92) + 'ud83d')}</tool_call>", None, []),
    "a number that JSON does not have": (
        f"<tool_call>{CLOCK.replace(chr(34) + 'Rome' + chr(34), 'NaN')}</tool_call>",
        None,
        [],
    ),
    "no JSON": ("<tool_call>clock</tool_call> said", None, []),
    "cut off": ("<tool_call>\n" + CLOCK[:20], None, []),
    "almost": ("a <tool> <tool_cal", None, []),
    "an object": ('{"a": 1}', None, []),
    "a comparison": ("1 < 2", None, []),
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", ANSWERS)
def test_calls_in_an_answer(name, size):
    """Whole, or in pieces: the same text and the same calls."""
    answer, text, cities = ANSWERS[name]
    reader = ToolCallReader(frozenset({"clock"}))
    pieces = [reader.push(answer[i : i + size]) for i in range(0, len(answer), size)] + [reader.close()]
    assert "".join(said for said, _ in pieces) == (answer if text is None else text)
    calls = [call for _, found in pieces for call in found]
    assert calls == reader.calls
    assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == cities
    assert all(call["function"]["name"] == "clock" and call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)


def test_the_last_call_of_an_answer_that_was_cut_off():
    """Its JSON may be complete by accident; one before it is a call."""
    reader = ToolCallReader(frozenset({"clock"}))
    answer = f"<tool_call>{CLOCK}</tool_call><tool_call>{CLOCK}"
    text, calls = reader.push(answer)
    rest, more = reader.close(is_complete=False)
    assert (text + rest, len(calls), more) == (f"<tool_call>{CLOCK}", 1, [])


def test_marks_that_are_special_tokens_have_text_where_tools_are_offered(tmp_path):
    library = HuggingFaceTokenizer(write_tokenizer(tmp_path, TEMPLATE)).library
    library.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    library.save_pretrained(tmp_path)
    likely = {"messages": HELLO, "logit_bias": {"260": 100}, "max_tokens": 2}
    with Live(HuggingFaceTokenizer(str(tmp_path)), fields={**BYTES, "vocab_size": 262}) as live:
        for fields, text in (({"tools": TOOLS}, "<tool_call>" * 2), ({}, "")):
            status, answer = live.call("POST", CHAT, {**likely, **fields})
            assert status == 200 and answer["choices"][0]["message"]["content"] == text


class TestCalls:
    """A model that calls a tool, and OpenAI's own client."""

    @pytest.fixture
    def client(self, live, monkeypatch):
        from openai import OpenAI  # noqa: PLC0415

        says = live.tokenizer.encode(f"Wait.<tool_call>{CLOCK}</tool_call>")
        monkeypatch.setattr(live.engine._decoder, "read", lambda prompt: self.logits(says, 0))
        places = itertools.count(1)
        monkeypatch.setattr(live.engine._decoder, "step", lambda last: self.logits(says, next(places)))
        monkeypatch.setattr(live.engine._decoder, "remove", lambda row: None)
        return OpenAI(base_url=f"http://127.0.0.1:{live.port}/v1", api_key="any")

    @staticmethod
    def logits(says, place):
        logits = torch.zeros(1, 260)
        logits[0, says[place] if place < len(says) else 257] = 50.0
        return logits

    def test_whole(self, client):
        answer = client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, max_tokens=90)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Wait."
        (call,) = choice.message.tool_calls
        assert call.function.name == "clock" and json.loads(call.function.arguments) == {"city": "Rome"}

    def test_streamed(self, client):
        chunks = list(
            client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, max_tokens=90, stream=True)
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Wait."
        (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert (call.index, call.function.name, chunks[-1].choices[0].finish_reason) == (0, "clock", "tool_calls")

    def test_without_tools_it_is_text(self, client):
        answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=90)
        assert answer.choices[0].message.content == f"Wait.<tool_call>{CLOCK}</tool_call>"
        assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.tool_calls is None
