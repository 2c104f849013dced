"""The server as users start it, spoken to with OpenAI's own client: answers, refusals, load, and how it ends."""

import asyncio
import http.client
import itertools
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.request

import openai
import pytest
import torch

from megatron.core.inference.generate import generate
from megatron.tooling.restore import read_saved, restore_model, restore_tokenizer
from tests import pool
from tests.e2e.helpers.launch import HF_TOKENIZER, start, warm
from tests.unit.inference.serving import write_tokenizer
from tests.unit.inference.small import GREEDY, save_small

SERVE = "tests.e2e.helpers.tools:run"
KEY = "right-key"
PROMPTS = ["def f(", "a", "The quick brown fox", "class é:", "0123456789"]
HELLO = [{"role": "user", "content": "Hello"}]
LAYOUTS = {"tp 2": (), "pp 2": ("--pipeline-model-parallel-size", "2")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose tokenizer has a chat template."""
    for module in (HF_TOKENIZER, "tools.run_text_generation_server"):
        warm(module)
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    fields = {"vocab_size": 260, "max_position_embeddings": 128, "tokenizer_type": "HuggingFaceTokenizer"}
    return save_small(pool.groups(), tmp_path_factory.mktemp("run") / "tiny", tokenizer_model=tokenizer, **fields)


class Served:
    """Processes of the tool."""

    def __init__(self, folder, logs, *flags, world_size=1, env=None):
        argv = ["run_text_generation_server.py", "--load", folder, "--device", "cpu", "--port", "0", *flags]
        self.job = start(argv, logs, world_size, driver=SERVE, env=env)
        self.job.wait_for("serving ", kind="err")
        (self.address,) = re.findall(r"serving tiny at (http://127\.0\.0\.1:\d+)/v1", self.job.text(kind="err"))

    def client(self, key=KEY, kind=openai.OpenAI):
        return kind(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=30)

    def health(self):
        with urllib.request.urlopen(f"{self.address}/health", timeout=10) as answer:
            return json.load(answer)

    def end(self, number=signal.SIGTERM):
        """What the processes left, after a signal to all of them, as launchers send it."""
        for pid in self.job.pids:
            os.kill(pid, number)
        return self.job.wait(timeout=20)


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    server = Served(folder, tmp_path_factory.mktemp("log"), env={"MEGATRON_API_KEY": KEY})
    yield server
    ended = server.end()
    assert ended.codes == [0] and "Traceback" not in ended.text and ended.stdout == [""], ended.text


@pytest.fixture(scope="module")
def offline(folder):
    """(prompt, new tokens) -> the text that tools/generate.py continues it with, greedily."""
    saved = read_saved(folder, None)
    tokenizer = restore_tokenizer(saved)
    built = restore_model(saved, pool.groups(), torch.device("cpu"))

    def continue_prompt(prompt, new):
        options = {"max_new_tokens": new, "sampling": GREEDY, "seeds": [0], "shows_special": False}
        return generate(*built, tokenizer, [tokenizer.encode(prompt)], **options)[0].text

    return continue_prompt


def ask(client, prompt, new, **fields):
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=new, temperature=0, **fields)


def test_answers_are_those_of_generation_offline(served, offline):
    client = served.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    for prompt in PROMPTS:
        answer = ask(client, prompt, 20)
        assert answer.choices[0].text == offline(prompt, 20)
        assert answer.usage.prompt_tokens == len(prompt.encode())
    chat = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20, temperature=0)
    assert chat.choices[0].message.content == offline("<s><|user|>Hello<|assistant|>", 20)


def test_two_clients_stream_at_once(served, offline):
    """Each stream gets its pieces while the other one is under way."""
    order, texts = [], ["", ""]

    def read(number):
        for chunk in ask(served.client(), PROMPTS[number], 100, stream=True):
            order.append(number)
            texts[number] += chunk.choices[0].text

    threads = [threading.Thread(target=read, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == [offline(prompt, 100) for prompt in PROMPTS[:2]]
    switches = sum(a != b for a, b in itertools.pairwise(order))
    assert switches > 2, "neither waited for the other's end"


def test_a_stop_string_ends_a_stream(served, offline):
    free = offline(PROMPTS[0], 40)
    stop = free[6:8]
    chunks = list(ask(served.client(), PROMPTS[0], 40, stop=[stop], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == free[: free.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_refusals(served):
    client = served.client()
    with pytest.raises(openai.AuthenticationError, match="API key is wrong"):
        ask(served.client("wrong-key"), "a", 1)
    with pytest.raises(openai.NotFoundError, match="gpt-4 does not exist"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="context is 128 tokens; the prompt has 127") as error:
        ask(client, "x" * 127, 2)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="best_of is not supported: answers are not ranked"):
        ask(client, "a", 1, best_of=3)
    request = urllib.request.Request(f"{served.address}/v1/completions", b'{"prompt": ', method="POST")
    request.add_header("Authorization", f"Bearer {KEY}")
    request.add_header("Content-Type", "application/json")
    with pytest.raises(urllib.error.HTTPError) as broken:
        urllib.request.urlopen(request, timeout=10)
    assert broken.value.code == 400 and "not JSON" in json.load(broken.value)["error"]["message"]
    assert ask(client, "a", 1).choices


def test_200_requests_at_once(served, offline):
    """More than there are rows: they wait, and each gets its own answer."""

    async def all_at_once():
        async with served.client(kind=openai.AsyncOpenAI) as client:
            asked = [ask(client, PROMPTS[i % 5] + str(i % 20), 3 + i % 20) for i in range(200)]
            return await asyncio.gather(*asked)

    answers = asyncio.run(all_at_once())
    known = {i: offline(PROMPTS[i % 5] + str(i % 20), 3 + i % 20) for i in range(20)}
    assert [answer.choices[0].text for answer in answers] == [known[i % 20] for i in range(200)]
    assert served.health() == {"status": "ok", "running": 0, "waiting": 0}


def test_a_client_that_leaves_frees_its_rows(served):
    """It asks for more than there are rows; when it has gone, the others go on at once."""
    host = served.address.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=10)
    body = json.dumps({"prompt": "a", "n": 100, "max_tokens": 120, "stream": True})
    connection.request(
        "POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    )
    assert connection.getresponse().read1(10)
    assert sum(served.health()[name] for name in ("running", "waiting")) > 50
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    deadline = time.monotonic() + 5
    while served.health() != {"status": "ok", "running": 0, "waiting": 0}:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("layout", ["tp 2", pytest.param("pp 2", marks=pytest.mark.slow)])
def test_sigterm_lets_answers_end(folder, tmp_path, offline, layout):
    """On two processes, too: the first one tells the other one when to end."""
    served = Served(folder, tmp_path, *LAYOUTS[layout], world_size=2)
    client = served.client("any: none is asked for")
    stream = iter(ask(client, PROMPTS[2], 100, stream=True))
    text = next(stream).choices[0].text
    ended = threading.Thread(target=lambda: codes.extend(served.end().codes))
    codes = []
    ended.start()
    text += "".join(chunk.choices[0].text for chunk in stream)
    ended.join(30)
    assert codes == [0, 0] and text == offline(PROMPTS[2], 100)
    assert "Traceback" not in served.job.text(kind="err")


@pytest.mark.parametrize("layout", ["tp 2", pytest.param("pp 2", marks=pytest.mark.slow)])
def test_a_lost_rank_ends_the_server(folder, tmp_path, layout):
    served = Served(folder, tmp_path, *LAYOUTS[layout], world_size=2)
    os.kill(served.job.pids[1], signal.SIGKILL)
    lost = served.job.wait(timeout=20)
    assert lost.codes == [1, -9] and lost.seconds < 30
    assert "rank 1 is gone" in lost.stderr[0] and "Traceback" not in lost.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "{taken}"], "cannot listen on --host 127.0.0.1 --port {taken}"),
        (["--max-sequence-length", "129"], "--max-sequence-length 129 is above"),
        (["--max-batch-size", "0"], "--max-batch-size: must be from 1 to 134217728, got 0"),
        (["--api-key", ""], "the API key is empty"),
        (["--chat-template", "nowhere"], "--chat-template nowhere cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, tmp_path, flags, message):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = ["run_text_generation_server.py", "--load", folder, *(flag.format(taken=port) for flag in flags)]
        ended = start(argv, tmp_path, driver=SERVE).wait()
    assert ended.codes == [2] and ended.stderr[0].count("\n") == 1
    assert ended.stderr[0].startswith("error: ") and message.format(taken=port) in ended.stderr[0]
