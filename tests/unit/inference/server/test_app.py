import contextlib
import json
import re
import runpy
import sys
import threading
from pathlib import Path

import pytest

from megatron.core.datasets.tokenizer_bpe import HuggingFaceTokenizer
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.engine.slots import SlotDecoder
from megatron.core.inference.generate import generate
from tests.unit.inference.serving import Live, read_events, wait_until, write_tokenizer
from tests.unit.inference.small import GREEDY

PROMPTS = ["def f(", "a", "The quick brown fox", "class é:"]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def live(tokenizer):
    with Live(tokenizer) as server:
        yield server


def offline(live, prompt, new, sampling=GREEDY, seed=0, **options):
    """What tools/generate.py would write."""
    ids = live.tokenizer.encode(prompt)
    options.setdefault("shows_special", False)
    (found,) = generate(
        *live.built, live.tokenizer, [ids], max_new_tokens=new, sampling=sampling, seeds=[seed], **options
    )
    return found


class TestCompletions:
    def test_an_answer_is_that_of_generation_offline(self, live):
        answer = live.complete(PROMPTS[0], max_tokens=20, model="tiny")
        expected = offline(live, PROMPTS[0], 20)
        (choice,) = answer["choices"]
        assert choice == {
            "index": 0,
            "text": expected.text,
            "logprobs": None,
            "finish_reason": expected.reason,
        }
        assert answer["object"] == "text_completion" and answer["model"] == "tiny" and answer["id"]
        assert answer["usage"] == {
            "prompt_tokens": 6,
            "completion_tokens": len(expected.ids),
            "total_tokens": 6 + len(expected.ids),
        }

    def test_sixteen_tokens_unless_told_otherwise(self, live):
        assert live.complete(PROMPTS[1])["usage"]["completion_tokens"] <= 16
        assert live.complete(PROMPTS[1])["choices"][0]["text"] == offline(live, PROMPTS[1], 16).text

    @pytest.mark.parametrize("as_ids", [False, True])
    def test_several_prompts_answer_in_order(self, live, as_ids):
        prompts = [live.tokenizer.encode(p) for p in PROMPTS] if as_ids else PROMPTS
        choices = live.complete(prompts, max_tokens=9)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [choice["text"] for choice in choices] == [offline(live, p, 9).text for p in PROMPTS]

    def test_a_prompt_of_ids(self, live):
        ids = live.tokenizer.encode(PROMPTS[2])
        assert live.complete(ids, echo=True)["choices"][0]["text"] == PROMPTS[2] + offline(live, PROMPTS[2], 16).text

    def test_choices_draw_with_seeds_one_after_another(self, live):
        options = {"temperature": 1.1, "top_p": 0.9, "top_k": 50, "seed": 7, "n": 2, "max_tokens": 12}
        answer = live.complete(PROMPTS[:2], **options)
        sampling = Sampling(temperature=1.1, top_p=0.9, top_k=50)
        expected = [offline(live, PROMPTS[i // 2], 12, sampling, 7 + i).text for i in range(4)]
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert len(set(expected)) == 4 and answer["usage"]["prompt_tokens"] == 7

    def test_without_a_seed_answers_differ(self, live):
        texts = {live.complete("a", temperature=1.0, max_tokens=20)["choices"][0]["text"] for _ in range(3)}
        assert len(texts) == 3

    def test_temperature_0_is_greedy_whatever_top_p_says(self, live):
        text = live.complete(PROMPTS[0], top_p=0.3)["choices"][0]["text"]
        assert text == offline(live, PROMPTS[0], 16).text

    @pytest.mark.parametrize("several", [False, True])
    def test_a_stop_string_ends_an_answer_before_it(self, live, several):
        free = offline(live, PROMPTS[0], 30).text
        stop = free[5:7]
        (choice,) = live.complete(PROMPTS[0], max_tokens=30, stop=["~~~", stop] if several else stop)["choices"]
        assert choice["text"] == free[: free.index(stop)] and choice["finish_reason"] == "stop"

    def test_log_probabilities(self, live):
        (choice,) = live.complete(PROMPTS[0], max_tokens=5, logprobs=2)["choices"]
        found = choice["logprobs"]
        assert [len(values) for values in found.values()] == [5] * 4
        for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
            assert top[token] == logprob == max(top.values()), "greedy: the likeliest token was taken"
        assert found["text_offset"] == [sum(map(len, found["tokens"][:i])) for i in range(5)]

    def test_log_probabilities_of_an_echo(self, live):
        """Every token of the prompt but the first has one, and the new ones follow."""
        (choice,) = live.complete(PROMPTS[0], max_tokens=5, logprobs=2, echo=True)["choices"]
        new = live.complete(PROMPTS[0], max_tokens=5, logprobs=2)["choices"][0]["logprobs"]
        found, prompt = choice["logprobs"], PROMPTS[0]
        assert choice["text"].startswith(prompt) and [len(values) for values in found.values()] == [11] * 4
        assert found["tokens"] == [*prompt, *new["tokens"]]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][6:] == pytest.approx(new["token_logprobs"], abs=1e-5)
        assert found["text_offset"] == [*range(6), *(6 + place for place in new["text_offset"])]
        for token, logprob, top in zip(
            prompt[1:], found["token_logprobs"][1:], found["top_logprobs"][1:], strict=False
        ):
            assert top[token] == logprob <= max(top.values()) and len(top) in (2, 3), "its own is always there"

    def test_an_echo_alone_needs_no_new_token(self, live):
        answer = live.complete(PROMPTS[0], max_tokens=0, logprobs=0, echo=True)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == (
            PROMPTS[0],
            "length",
            0,
        )
        assert choice["logprobs"]["tokens"] == list(PROMPTS[0])
        (nothing,) = live.complete(PROMPTS[0], max_tokens=0)["choices"]
        assert (nothing["text"], nothing["logprobs"], nothing["finish_reason"]) == ("", None, "length")

    def test_fields_that_ask_for_nothing_are_taken(self, live):
        nothing = {"best_of": 1, "frequency_penalty": 0, "logit_bias": {}, "suffix": None, "user": "me", "seed": None}
        assert live.complete("a", **nothing)["choices"] == live.complete("a")["choices"]


class TestStreams:
    def test_the_chunks_join_to_the_whole_answer(self, live):
        body = {"prompt": PROMPTS, "max_tokens": 12, "stream_options": {"include_usage": True}, "echo": True}
        *chunks, usage, done = live.stream(COMPLETIONS, body)
        texts, reasons = [""] * 4, [None] * 4
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
        whole = live.complete(PROMPTS, max_tokens=12, echo=True)
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
        assert done == "[DONE]" and usage["choices"] == [] and usage["usage"] == whole["usage"]
        assert len(chunks) > 20 and len({chunk["id"] for chunk in chunks}) == 1

    def test_a_stop_string_is_never_sent_in_part(self, live):
        free = offline(live, PROMPTS[0], 30).text
        stop = free[4:8]
        *chunks, _ = live.stream(COMPLETIONS, {"prompt": PROMPTS[0], "max_tokens": 30, "stop": stop})
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == free[: free.index(stop)] and chunks[-1]["choices"][0]["finish_reason"] == "stop"

    def test_log_probabilities_come_with_their_tokens(self, live):
        *chunks, _ = live.stream(COMPLETIONS, {"prompt": "a", "max_tokens": 5, "logprobs": 1})
        tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
        assert tokens == live.complete("a", max_tokens=5, logprobs=1)["choices"][0]["logprobs"]["tokens"]

    def test_log_probabilities_of_an_echo_come_with_it(self, live):
        fields = {"max_tokens": 4, "logprobs": 1, "echo": True}
        *chunks, _ = live.stream(COMPLETIONS, {"prompt": PROMPTS[:2], "n": 2, **fields})
        for number, whole in enumerate(live.complete(PROMPTS[:2], n=2, **fields)["choices"]):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == number]
            assert "".join(choice["text"] for choice in own) == whole["text"]
            for name, values in whole["logprobs"].items():
                assert [one for choice in own for one in choice["logprobs"][name]] == values

    def test_a_chat_begins_with_who_speaks(self, live):
        first, *chunks, done = live.stream(CHAT, {"messages": HELLO, "max_tokens": 8})
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""} and done == "[DONE]"
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == offline(live, "<s><|user|>Hello<|assistant|>", 8).text
        assert {chunk["object"] for chunk in [first, *chunks]} == {"chat.completion.chunk"}
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


class TestChat:
    def ask(self, live, messages, **fields):
        return live.call("POST", CHAT, {"messages": messages, "temperature": 0, "max_tokens": 8, **fields})

    def test_the_template_makes_the_prompt(self, live):
        turns = [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "more"}]
        status, answer = self.ask(live, turns, n=2)
        expected = offline(live, "<s><|user|>Hello<|assistant|>Hi<|user|>more<|assistant|>", 8)
        assert status == 200 and answer["object"] == "chat.completion"
        assert [choice["message"] for choice in answer["choices"]] == [
            {"role": "assistant", "content": expected.text}
        ] * 2
        assert answer["usage"]["prompt_tokens"] == 1 + (1 + 5) + (1 + 2) + (1 + 4) + 1

    def test_parts_of_text_are_joined(self, live):
        parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
        by_parts, by_text = (
            self.ask(live, [{"role": "user", "content": content}])[1]["choices"] for content in (parts, "Hello")
        )
        assert by_parts == by_text

    def test_an_answer_may_take_all_the_room_there_is(self, live):
        answer = self.ask(live, HELLO, max_tokens=None, seed=3, temperature=1.5)[1]
        assert answer["choices"][0]["finish_reason"] == "stop" or answer["usage"]["total_tokens"] == 128

    def test_both_names_of_the_limit(self, live):
        answer = self.ask(live, HELLO, max_tokens=None, max_completion_tokens=3)[1]
        assert answer["usage"]["completion_tokens"] == 3

    def test_log_probabilities(self, live):
        choice = self.ask(live, HELLO, logprobs=True, top_logprobs=2)[1]["choices"][0]
        content = choice["logprobs"]["content"]
        ids = offline(live, "<s><|user|>Hello<|assistant|>", 8).ids
        assert [entry["token"] for entry in content] == [live.tokenizer.decode([i]) for i in ids]
        for entry in content:
            assert [len(entry["top_logprobs"]), entry["top_logprobs"][0]["token"]] == [2, entry["token"]]
            whole = "\ufffd" not in entry["token"]
            assert entry["bytes"] == (list(entry["token"].encode()) if whole else None)

    def test_a_template_may_refuse(self, live):
        status, answer = self.ask(live, [*HELLO, {"role": "system", "content": "x"}])
        assert status == 400 and "the system speaks first" in answer["error"]["message"]

    def test_a_tokenizer_without_a_template(self, tokenizer):
        with Live(tokenizer, chat=False) as live:
            status, answer = self.ask(live, HELLO)
        assert status == 400 and "no chat template" in answer["error"]["message"]


REFUSED = {
    "too long": (
        COMPLETIONS,
        {"prompt": "x" * 120, "max_tokens": 20},
        None,
        "context is 128 .* 120 .* 20, together 140",
    ),
    "too long for any answer": (CHAT, {"messages": [{"role": "user", "content": "x" * 200}]}, None, "context is 128"),
    "half a character": (COMPLETIONS, {"prompt": "\ud83d"}, "prompt", "half of a surrogate pair"),
    "half a character as a name": (COMPLETIONS, {"prompt": "a", "\ud83d": 1}, None, "unicode"),
    "empty": (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
    "no prompts": (COMPLETIONS, {"prompt": []}, "prompt", "empty"),
    "one of them empty": (COMPLETIONS, {"prompt": ["a", ""]}, None, "no tokens"),
    "no prompt": (COMPLETIONS, {}, "prompt", "required"),
    "an id too high": (COMPLETIONS, {"prompt": [1, 260]}, "prompt", "260 is not below 260"),
    "prompt": (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "prompt: "),
    "unknown field": (COMPLETIONS, {"prompt": "a", "max_token": 3}, "max_token", "max_token is not supported"),
    "penalty": (COMPLETIONS, {"prompt": "a", "frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
    "best of": (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of", "not supported"),
    "temperature": (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "greater than or equal to 0"),
    "type": (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}, "max_tokens", "integer"),
    "top_p": (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
    "n": (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
    "stop": (COMPLETIONS, {"prompt": "a", "stop": ["x", ""]}, "stop", "empty stop string"),
    "too many": (COMPLETIONS, {"prompt": "a", "n": 65}, "n", "65 answers"),
    "tools": (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools.0.function", "required"),
    "json mode": (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format", "not supp"),
    "no messages": (CHAT, {"messages": []}, "messages", "at least 1"),
    "role": (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'system', 'developer'"),
    "two limits": (CHAT, {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "two names"),
    "top_logprobs": (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "no effect"),
}


class TestRefusals:
    @pytest.mark.parametrize("case", REFUSED)
    def test_a_field_that_cannot_be_honoured_is_named(self, live, case):
        path, body, param, message = REFUSED[case]
        status, answer = live.call("POST", path, body)
        error = answer["error"]
        assert status == 400 and error["type"] == "invalid_request_error" and error["param"] == param, error
        assert re.search(message, error["message"]), error

    def test_an_image(self, live):
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        status, answer = live.call("POST", CHAT, {"messages": [{"role": "user", "content": [image]}]})
        assert status == 400 and answer["error"]["param"].startswith("messages.0.content")

    @pytest.mark.parametrize("body", [b'{"prompt": "a",,}', b"", b"[1]", b"\xff"])
    def test_broken_json(self, live, body):
        status, answer = live.call("POST", COMPLETIONS, body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"

    def test_broken_json_says_where(self, live):
        answer = live.call("POST", COMPLETIONS, b'{"prompt": "a",,}')[1]
        assert "the body is not JSON" in answer["error"]["message"] and "character 15" in answer["error"]["message"]

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    def test_another_model(self, live, path):
        body = {"model": "gpt-\ud83d", "prompt": "a"} if path == COMPLETIONS else {"model": "gpt-4", "messages": HELLO}
        status, answer = live.call("POST", path, body)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")

    @pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/x", 404), ("GET", COMPLETIONS, 405)])
    def test_another_route(self, live, method, path, status):
        found, answer = live.call(method, path)
        assert found == status and answer["error"]["message"]

    def test_the_server_goes_on(self, live):
        assert live.call("GET", "/health") == (200, {"status": "ok", "running": 0, "waiting": 0})


def test_models(live):
    status, answer = live.call("GET", "/v1/models")
    (model,) = answer["data"]
    assert status == 200 and (model["id"], model["max_model_len"]) == ("tiny", 128)
    assert live.call("GET", "/v1/models/tiny") == (200, model)
    assert live.call("GET", "/v1/models/other")[0] == 404


def test_a_key_opens_every_route_but_health(tokenizer):
    with Live(tokenizer, api_key="geheim-é") as live:
        body, right = {"prompt": "a"}, {"Authorization": "Bearer geheim-é".encode()}
        for headers, message in (({}, "missing"), ({"Authorization": "Bearer geheim"}, "wrong")):
            for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models")):
                status, answer = live.call(method, path, body, headers)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert message in answer["error"]["message"]
        assert live.call("POST", COMPLETIONS, b"{", {"Authorization": "x"})[0] == 401, "before anything is read"
        assert live.call("POST", COMPLETIONS, body, right)[0] == 200
        assert live.call("GET", "/health")[0] == 200


def test_prompts_begin_with_bos_where_asked_for(tokenizer):
    with Live(tokenizer, add_bos=True) as live:
        answer = live.complete("a", max_tokens=8)
        assert answer["choices"][0]["text"] == offline(live, "<s>a", 8).text and answer["usage"]["prompt_tokens"] == 2
        assert live.complete([5], max_tokens=1)["usage"]["prompt_tokens"] == 1, "ids are taken as they are"
        (choice,) = live.complete("ab", max_tokens=1, echo=True, logprobs=0)["choices"]
        found = choice["logprobs"]
        assert choice["text"].startswith("ab") and found["tokens"][:3] == ["<s>", "a", "b"], "what the model has read"
        assert found["text_offset"] == [0, 0, 1, 2] and found["token_logprobs"][1] < 0


class TestLoad:
    """With an engine that starts when the test says so."""

    def test_a_full_queue_answers_at_once(self, tokenizer):
        with Live(tokenizer, max_waiting=2, engine_runs=False) as live:
            answers = []
            client = threading.Thread(target=lambda: answers.append(live.complete(["a", "b"])))
            client.start()
            wait_until(lambda: live.engine.load() == (0, 2))
            status, answer = live.call("POST", COMPLETIONS, {"prompt": "c"})
            assert (status, answer["error"]["code"]) == (503, "overloaded")
            live.start_engine()
            client.join(20)
            assert len(answers[0]["choices"]) == 2
            assert live.call("POST", COMPLETIONS, {"prompt": "c"})[0] == 200

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_leaves_frees_its_place(self, tokenizer, stream, monkeypatch):
        read = []
        keep = SlotDecoder.read
        monkeypatch.setattr(SlotDecoder, "read", lambda self, prompts: (read.extend(prompts), keep(self, prompts))[1])
        with Live(tokenizer, engine_runs=False) as live:
            connection = live.send("POST", COMPLETIONS, {"prompt": ["a", "b"], "stream": stream})
            wait_until(lambda: live.engine.load() == (0, 2))
            waiting = list(live.engine._waiting)
            connection.close()
            wait_until(lambda: all(request.cancelled for request in waiting))
            live.start_engine()
            live.complete("c")
            assert read == [live.tokenizer.encode("c")]

    def test_an_engine_that_fails_is_reported(self, tokenizer, monkeypatch):
        monkeypatch.setattr(SlotDecoder, "read", lambda self, prompts: 1 / 0)
        with Live(tokenizer, engine_runs=False) as live:
            streamed = live.send("POST", COMPLETIONS, {"prompt": "a", "stream": True})
            whole = live.send("POST", COMPLETIONS, {"prompt": "a"})
            with contextlib.closing(streamed), contextlib.closing(whole):
                wait_until(lambda: live.engine.load() == (0, 2))
                live.start_engine()
                (event,) = read_events(streamed.getresponse())
                response = whole.getresponse()
                error = json.loads(response.read())["error"]
            assert response.status == 500 and event["error"] == error
            assert "the engine failed: division by zero" in error["message"] and error["type"] == "server_error"
            assert live.call("GET", "/health")[0] == 503
            assert live.call("POST", COMPLETIONS, {"prompt": "a"})[0] == 503


def test_the_tool_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fastapi", None)  # importing it then raises, as if it were not there
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(__file__).parents[4] / "tools" / "run_text_generation_server.py"))
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: the server needs fastapi; pip install 'megatron-patched[serve]'\n"
