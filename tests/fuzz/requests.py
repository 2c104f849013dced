"""Requests to the server: valid ones of which fields were replaced, added and left out, and bytes were changed.

Whatever is sent, the answer is JSON with a status below 500 (JSON has no NaN and no infinity), and the server goes on.

python -m tests.fuzz.requests --seed S --cases N
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from tests.fuzz.campaign import Campaign, Failure, main
from tests.unit.inference.server.test_requests import TEMPLATE
from tests.unit.inference.serving import Live, write_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TURN = '{"role": "user", "content": "Hello"}'
# Values are JSON's text, so that a case prints as it is sent.
VALID = {
    COMPLETIONS: {"prompt": '"def f("', "max_tokens": "3"},
    CHAT: {"messages": f"[{TURN}]", "max_tokens": "3"},
}
NAMES = """
    model prompt messages max_tokens max_completion_tokens n temperature top_p top_k seed stop stream stream_options echo
    logprobs top_logprobs best_of logit_bias user suffix tools tool_choice parallel_tool_calls response_format what
    presence_penalty frequency_penalty repetition_penalty min_p stop_token_ids ignore_eos min_tokens skip_special_tokens
    include_stop_str_in_output add_special_tokens chat_template_kwargs add_generation_prompt continue_final_message
"""
SMALL_VALUES = r"""
    null true false 0 1 2 3 -1 0.5 1e-320 1e999 -1e999 NaN -Infinity 128 129 1e3 9223372036854775808
    "" "a" "\ud83d" "\u0000" "é" "tiny" "system" ["a","b"] ["a",1] [""] {"a":1} {"type":"text"} {"include_usage":true}
    [] {} [0] [1,2,259] [260] [-1] [[1],[2,3]] [[]] [1,[2]] [1.5] [true] [null]
    [{"role":"user","content":"a"},{"role":"assistant","content":"b"}]
    [{"role":"system","content":[{"type":"text","text":"a"}]}] [{"role":"robot","content":"a"}]
    [{"role":"user","content":null,"name":"x"}]
    "none" "auto" "required" {"5":3} {"259":-100,"0":100} {"enable_thinking":false}
    [{"type":"function","function":{"name":"f"}}] [{"type":"function","function":{"name":"\ud83d","parameters":{"a":null}}}]
    [{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":"{}"}}]}]
    [{"role":"user","content":"a"},{"role":"tool","tool_call_id":"c","content":"b"}]
"""
VALUES = [*SMALL_VALUES.split(), "1" + "0" * 400, "[" * 3000 + "]" * 3000, '"' + "x" * 40_000 + '"']
CUTS = (None, None, None, None, None, 1, 7, 15)  # bytes that are cut off the end


@dataclass(frozen=True)
class Case:
    """Fields as JSON's text. cut: bytes that the end of the body lacks."""

    path: str
    fields: tuple[tuple[str, str], ...]
    cut: int | None = None

    def body(self) -> bytes:
        """What is sent."""
        text = "{" + ", ".join(f'"{name}": {value}' for name, value in self.fields) + "}"
        return text.encode()[: None if self.cut is None else -self.cut]


def draw(rng: random.Random) -> Case:
    """A valid request with up to four changes."""
    path = rng.choice((COMPLETIONS, CHAT))
    fields = dict(VALID[path])
    for _ in range(rng.randint(0, 4)):
        name = rng.choice(NAMES.split())
        if rng.random() < 0.1:
            fields.pop(name, None)
        else:
            fields[name] = rng.choice(VALUES)
    return Case(path, tuple(fields.items()), rng.choice(CUTS))


def check(live: Live, case: Case, folder: Path) -> str:
    """Send it."""
    with contextlib.closing(live.send("POST", case.path, case.body())) as connection:
        response = connection.getresponse()
        status, kind, data = response.status, response.getheader("Content-Type"), response.read()
    if status >= 500:
        raise Failure(f"status {status}: {data[:300]!r}")
    for text in _texts(data, kind or ""):
        try:
            answer = json.loads(text, parse_constant=_refuse)
        except ValueError as error:
            raise Failure(f"the answer is not JSON: {error}: {text[:300]!r}") from error
        if status >= 400 and not answer["error"]["message"]:
            raise Failure(f"status {status} does not say why: {answer}")
        if len(text) > 2000 and status >= 400:
            raise Failure(f"an error of {len(text)} bytes")
    if live.call("GET", "/health")[0] != 200:
        raise Failure("the server does not go on")
    return "answered" if status == 200 else f"refused {status}"


def _texts(data: bytes, kind: str) -> Iterator[bytes]:
    if not kind.startswith("text/event-stream"):
        yield data
        return
    for event in data.split(b"\n\n"):
        if event and event != b"data: [DONE]":
            yield event.removeprefix(b"data: ")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def simpler(case: Case) -> Iterable[Case]:
    """Without one field, or whole."""
    for name, _ in case.fields:
        yield replace(case, fields=tuple(field for field in case.fields if field[0] != name))
    if case.cut is not None:
        yield replace(case, cut=None)


def command(case: Case) -> str:
    """The request by curl."""
    body = case.body().decode(errors="replace").replace("'", "'\\''")
    return f"curl http://127.0.0.1:5000{case.path} -H 'Content-Type: application/json' -d '{body}'"


def tokenizer(folder: str) -> HuggingFaceTokenizer:
    """Of bytes, with a template that takes tools."""
    return HuggingFaceTokenizer(write_tokenizer(folder, TEMPLATE))


@contextlib.contextmanager
def campaign() -> Iterator[Campaign[Case]]:
    """Against a server of its own."""
    with tempfile.TemporaryDirectory() as folder, Live(tokenizer(folder)) as live:
        yield Campaign("requests", draw, functools.partial(check, live), simpler, command)


if __name__ == "__main__":
    with campaign() as made:
        main(made)
