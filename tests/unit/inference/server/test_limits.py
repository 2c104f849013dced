"""What one client may cost the others: sizes, numbers, time, connections."""

import contextlib
import json
import re
import socket
import threading
import time

import pytest

from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.core.inference.chat import ChatTemplate
from megatron.core.inference.engine.continuous_batching import RequestOutput, ScoredToken
from megatron.core.inference.server.answers import ChatFormat, CompletionFormat, Echo
from tests.unit.inference.serving import Live, wait_until, write_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
HALVES = {
    "nothing": b"",
    "half a head": HEAD,
    "half a body": HEAD + b'Content-Length: 100\r\n\r\n{"prompt": ',
    "half a chunk": HEAD + b'Transfer-Encoding: chunked\r\n\r\nff\r\n{"prompt": ',
}
HELLO = [{"role": "user", "content": "Hello"}]


class Counting(HuggingFaceTokenizer):
    """Keeps what it is asked to tokenise, and waits for `go` before it does."""

    def __init__(self, folder):
        super().__init__(folder)
        self.asked, self.go = [], threading.Event()
        self.go.set()

    def encode(self, text):
        self.asked.append(text)
        assert self.go.wait(20)
        return super().encode(text)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Counting(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def live(tokenizer):
    with Live(tokenizer, max_body=100_000) as server:
        yield server


@pytest.fixture
def opened(live):
    """Opens connections to the server, or to another one, that have sent something, and closes them in the end."""
    with contextlib.ExitStack() as stack:

        def connect(data, server=live):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            connection.sendall(data)
            return connection

        yield connect


def answer_of(connection):
    """(status, the error) of an answer that comes before the request has ended."""
    file = connection.makefile("rb")
    status = int(file.readline().split()[1])
    length = next(int(line.split()[1]) for line in file if line.lower().startswith(b"content-length"))
    while file.readline() != b"\r\n":
        pass
    return status, json.loads(file.read(length))["error"]


def closed(connection):
    """Whether the server has closed it, waiting for that."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


class TestSizes:
    def test_a_long_body_is_refused_before_it_is_sent(self, live, opened):
        status, error = answer_of(opened(HEAD + b"Content-Length: 100001\r\n\r\n"))
        assert status == 413 and "more than 100000 bytes" in error["message"]

    def test_a_body_in_chunks_is_refused_when_it_has_become_too_long(self, live, opened):
        chunk = b"ffff\r\n" + b" " * 0xFFFF + b"\r\n"
        status, error = answer_of(opened(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + 2 * chunk))
        assert status == 413 and error["type"] == "invalid_request_error"

    def test_one_just_within_the_limit(self, live):
        body = json.dumps({"prompt": "a", "temperature": 0, "user": ""})
        body = body.replace('"user": ""', f'"user": "{"x" * (100_000 - len(body))}"').encode()
        assert len(body) == 100_000 and live.call("POST", COMPLETIONS, body)[0] == 200

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
    def test_another_type_of_body(self, live, kind):
        status, answer = live.call("POST", COMPLETIONS, {"prompt": "a"}, {"Content-Type": kind})
        assert status == 415 and f"{kind}; send Content-Type: application/json" in answer["error"]["message"]

    @pytest.mark.parametrize(
        ("path", "fields", "message"),
        [
            (COMPLETIONS, {"prompt": ["a"] * 65}, "65 answers at once"),
            (COMPLETIONS, {"prompt": ["a"] * 15_000}, "15000 answers at once"),
            (COMPLETIONS, {"prompt": ["a"] * 33, "n": 2}, "66 answers at once"),
            (COMPLETIONS, {"prompt": "x" * (128 * 256 + 1)}, "context is 128 tokens, .* 32769 characters"),
            (COMPLETIONS, {"prompt": ["a", "x" * 40_000]}, "40000 characters"),
            (COMPLETIONS, {"prompt": [[1], [1] * 129]}, "the prompt has 129"),
            (CHAT, {"messages": [{"role": "user", "content": "x" * 20_000}] * 2}, "40000 characters"),
            (CHAT, {"messages": HELLO, "n": 65}, "65 answers at once"),
        ],
    )
    def test_what_cannot_fit_is_not_tokenised(self, live, path, fields, message):
        live.tokenizer.asked.clear()
        status, answer = live.call("POST", path, fields)
        assert status == 400 and live.tokenizer.asked == []
        assert re.search(message, answer["error"]["message"])

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b'{"prompt": ' + b"[" * 49_000 + b"]" * 49_000 + b"}", "nested too deeply|prompt"),
            (
                b'{"prompt": "a", "logit_bias": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
                "nested|not supported|logit_bias.a: Input should be a valid number",
            ),
            (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "not JSON|digits"),
            (b'{"prompt": "a", "max_tokens": 1' + b"0" * 4290 + b"}", "max_tokens: .* less than"),
            (b'{"prompt": [1' + b"0" * 4290 + b"]}", "token id 10{99}... is not below 260"),
            (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
            (b'{"prompt": "a", "temperature": NaN}', "temperature"),
            (b'{"prompt": "a", "top_p": NaN}', "top_p"),
            (b'{"prompt": "a", "n": Infinity}', "n: "),
            (json.dumps({f"field{i}": 1 for i in range(5000)}).encode(), "an object of 5000 fields"),
            (json.dumps({"prompt": "a", "x" * 50_000: 1}).encode(), "x{100}... is not supported"),
            (json.dumps({"prompt": "a", "model": "x" * 50_000}).encode(), "x{100}... does not exist"),
            (json.dumps({"prompt": "a", "stop": ["x"] * 33}).encode(), "33 stop strings are more than 32"),
            (json.dumps({"prompt": "a", "stop": "x" * 257}).encode(), "a stop string may have 256 characters"),
            (json.dumps({"prompt": [True] * 10_000}).encode(), "prompt"),
            (json.dumps({"messages": [1] * 20_000}).encode(), "prompt|messages"),
        ],
    )
    def test_extreme_values_are_refused_in_a_line(self, live, body, message):
        started = time.perf_counter()
        status, answer = live.call("POST", COMPLETIONS, body)
        assert status in (400, 404) and time.perf_counter() - started < 5
        assert re.search(message, answer["error"]["message"]) and len(answer["error"]["message"]) < 400

    def test_the_server_goes_on(self, live):
        assert live.call("GET", "/health") == (200, {"status": "ok", "running": 0, "waiting": 0})
        assert live.complete("a")["choices"]


class TestWaiting:
    """While one request takes time before it is in the queue, others are answered."""

    def ask_beside(self, live, path, fields, begun):
        answers = []
        slow = threading.Thread(target=lambda: answers.append(live.call("POST", path, fields)))
        slow.start()
        try:
            wait_until(begun)
            assert live.call("GET", "/health")[0] == 200
            assert live.complete([5], max_tokens=2)["choices"] and not answers
        finally:
            live.tokenizer.go.set()
        slow.join(20)
        assert answers[0][0] == 200

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    def test_for_the_tokenizer(self, live, path):
        live.tokenizer.asked.clear()
        live.tokenizer.go.clear()
        self.ask_beside(live, path, {"prompt": "a"} if path == COMPLETIONS else {"messages": HELLO, "max_tokens": 2},
                        lambda: live.tokenizer.asked)  # fmt: skip

    def test_for_the_chat_template(self, live, monkeypatch):
        render, begun = ChatTemplate.render, []
        live.tokenizer.go.clear()

        def wait(self, messages, **options):
            begun.append(messages)
            assert live.tokenizer.go.wait(20)
            return render(self, messages, **options)

        monkeypatch.setattr(ChatTemplate, "render", wait)
        self.ask_beside(live, CHAT, {"messages": HELLO, "max_tokens": 2}, lambda: begun)


@pytest.mark.alone
class TestConnections:
    @pytest.mark.parametrize("half", HALVES)
    def test_the_rest_of_a_request_is_not_waited_for_for_ever(self, tokenizer, opened, half):
        with Live(tokenizer, request_seconds=0.2) as live:
            assert closed(opened(HALVES[half], live))

    def test_nor_that_of_the_next_one(self, tokenizer, opened):
        with Live(tokenizer, request_seconds=0.5) as live:
            connection = opened(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" + HEAD, live)
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
            while not closed(connection):
                pass

    def test_an_answer_may_take_longer(self, tokenizer):
        with Live(tokenizer, request_seconds=0.2, engine_runs=False) as live:
            with contextlib.closing(live.send("POST", COMPLETIONS, {"prompt": "a"})) as connection:
                wait_until(lambda: live.engine.load() == (0, 1))
                time.sleep(0.3)
                live.start_engine()
                assert connection.getresponse().status == 200

    def test_half_sent_requests_yield_turn_to_whole_ones(self, tokenizer, opened):
        """The oldest first; a request that is being answered keeps its connection."""
        with Live(tokenizer, max_connections=5, engine_runs=False) as live:
            with contextlib.closing(live.send("POST", COMPLETIONS, {"prompt": "a"})) as connection:
                wait_until(lambda: live.engine.load() == (0, 1))
                halves = [opened(HEAD, live) for _ in range(12)]
                assert live.call("GET", "/health")[0] == 200
                assert all(closed(half) for half in halves[:8])
                live.start_engine()
                assert connection.getresponse().status == 200


def test_a_log_probability_that_json_has_no_number_for(tokenizer):
    """OpenAI's API and vLLM write -9999.0 for minus infinity."""
    least = ScoredToken(5, float("-inf"), ((6, -1.0), (5, float("-inf"))))
    output = RequestOutput("x", 1, (least,), "length", prompt=(ScoredToken(7), least))
    for answer in (CompletionFormat("m", tokenizer, [Echo("e")], True), ChatFormat("m", tokenizer, True)):
        made = answer.chunk(0, output)
        assert "-9999.0" in json.dumps(made, allow_nan=False)
