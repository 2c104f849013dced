"""A Hugging Face tokenizer of bytes with a chat template, and a server on a free loopback port to talk to."""

import contextlib
import http.client
import json
import socket
import threading
import time

import uvicorn
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron.core.inference.chat import open_template
from megatron.core.inference.engine.continuous_batching import InferenceEngine
from megatron.core.inference.engine.slots import SlotDecoder
from megatron.core.inference.server.app import Settings, build_app
from megatron.core.inference.server.connections import configure
from tests import pool
from tests.unit.inference.small import LLAMA, small_model

BYTES = {**LLAMA, "vocab_size": 260, "max_position_embeddings": 128}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('the system speaks first') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder, template=TEMPLATE):
    """Ids 0 to 255 are bytes; 256 <s>, 257 </s>, 258 <|user|>, 259 <|assistant|>."""
    backend = Backend(models.BPE({mark: i for i, mark in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>"])
    library = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    if template is not None:
        library.chat_template = template
    library.save_pretrained(folder)
    return str(folder)


class Live:
    """A model of random weights behind the application, as the tool runs it. A context manager."""

    def __init__(
        self,
        tokenizer,
        *,
        slots=4,
        max_waiting=64,
        engine_runs=True,
        chat=True,
        max_connections=100,
        request_seconds=30.0,
        fields=BYTES,
        **settings,
    ):
        self.built = small_model(pool.groups(), **fields)
        self.tokenizer = tokenizer
        self.engine = InferenceEngine(
            SlotDecoder(*self.built, slots=slots, capacity=128), tokenizer, max_waiting=max_waiting
        )
        template = open_template(tokenizer) if chat else None
        app = build_app(self.engine, tokenizer, Settings(model="tiny", chat_template=template, **settings))
        self._server = uvicorn.Server(configure(app, max_connections, grace_seconds=1, request_seconds=request_seconds))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._server.run, args=([self._listener],))]
        self._engine_runs = engine_runs

    def __enter__(self):
        self._threads[0].start()
        if self._engine_runs:
            self.start_engine()
        wait_until(lambda: self._server.started)
        return self

    def __exit__(self, *exception):
        self._server.should_exit = True
        self.engine.stop()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def start_engine(self):
        self._threads.append(threading.Thread(target=self.engine.run))
        self._threads[-1].start()

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def send(self, method, path, body=None, headers=()):
        """An open connection on which the request has been sent. `body`: bytes as they are, or a value for JSON."""
        connection = self.connect()
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **dict(headers)})
        return connection

    def call(self, method, path, body=None, headers=()):
        """(status, answer)"""
        with contextlib.closing(self.send(method, path, body, headers)) as connection:
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def complete(self, prompt, **fields):
        """The answer of /v1/completions, greedy unless told otherwise."""
        status, answer = self.call("POST", "/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert status == 200, answer
        return answer

    def stream(self, path, body):
        """The events of a streamed answer, the last of them the text [DONE]."""
        with contextlib.closing(self.send("POST", path, {"temperature": 0, **body, "stream": True})) as connection:
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.getheader("Content-Type").startswith("text/event-stream")
            return read_events(response)


def read_events(response):
    events = [event.removeprefix("data: ") for event in response.read().decode().split("\n\n") if event]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def wait_until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)
