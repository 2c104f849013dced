"""Generation, the server and evaluation as users start them, straight from a Hugging Face folder, on two ranks."""

import json
import os
import re
import signal

import openai
import pytest

from megatron.tooling.restore import read_hf, restore_tokenizer
from tests.e2e.helpers.launch import HF_TOKENIZER, run, start, warm
from tests.unit.inference.hf_folder import TEXTS, greedy, write_folder

DRIVER = "tests.e2e.helpers.tools:run"
NEW = 16
TOOLS = {
    "generate.py": ("--prompt", "a"),
    "run_text_generation_server.py": ("--port", "0"),
    "evaluate.py": ("--text", "README.md"),
}
LAYOUTS = {"tp 2, pp 1": (), "tp 1, pp 2": ("--pipeline-model-parallel-size", 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    for module in (HF_TOKENIZER, *(f"tools.{tool.removesuffix('.py')}" for tool in TOOLS)):
        warm(module)
    return tmp_path_factory.mktemp("models") / "tiny"


@pytest.fixture(scope="module")
def expected(folder):
    """The texts that transformers continues TEXTS with, greedily."""
    model = write_folder(folder, "qwen2 tied")
    tokenizer = restore_tokenizer(read_hf(folder))
    return [tokenizer.decode(greedy(model, tokenizer.encode(text), NEW)) for text in TEXTS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generate(folder, expected, tmp_path, layout):
    prompts = [word for text in TEXTS for word in ("--prompt", text)]
    flags = ["--load-hf", folder, "--device", "cpu", "--temperature", "0", "--max-new-tokens", NEW, *LAYOUTS[layout]]
    ended = run(["generate.py", *flags, *prompts], tmp_path, world_size=2, driver=DRIVER)
    assert ended.codes == [0, 0], ended.text
    assert [json.loads(line)["text"] for line in ended.stdout[0].splitlines()] == expected
    assert f"loaded {folder}: float32 on cpu, {layout}\n" in ended.stderr[0] and ended.stdout[1] == ""


@pytest.mark.parametrize("layout", [pytest.param("tp 2, pp 1", marks=pytest.mark.slow), "tp 1, pp 2"])
def test_serve(folder, expected, tmp_path, layout):
    argv = ["run_text_generation_server.py", "--load-hf", folder, "--device", "cpu", "--port", "0", *LAYOUTS[layout]]
    job = start(argv, tmp_path, world_size=2, driver=DRIVER)
    job.wait_for("serving ", kind="err")
    (address,) = re.findall(r"serving tiny at (http://127\.0\.0\.1:\d+)/v1", job.text(kind="err"))
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=30)
    for text, continuation in zip(TEXTS, expected, strict=True):
        answer = client.completions.create(model="tiny", prompt=text, max_tokens=NEW, temperature=0)
        assert answer.choices[0].text == continuation
    client.close()
    for pid in job.pids:
        os.kill(pid, signal.SIGTERM)
    ended = job.wait(timeout=20)
    assert ended.codes == [0, 0] and "Traceback" not in ended.text, ended.text


@pytest.mark.parametrize("layout", ["tp 2, pp 1", pytest.param("tp 1, pp 2", marks=pytest.mark.slow)])
def test_evaluate(folder, expected, tmp_path, layout):
    (tmp_path / "a.txt").write_text(TEXTS[1])
    output = tmp_path / "scores.json"
    flags = ["--load-hf", folder, "--device", "cpu", "--bf16", "--text", tmp_path / "a.txt", "--output", output]
    flags += LAYOUTS[layout]
    ended = run(["evaluate.py", *flags], tmp_path, world_size=2, driver=DRIVER)
    assert ended.codes == [0, 0], ended.text
    assert f"loaded {folder}: bfloat16 on cpu, {layout}\n" in ended.stderr[0]
    (score,) = json.loads(output.read_text())["texts"].values()
    assert score["tokens"] == len(TEXTS[1]) and score["perplexity"] > 1


@pytest.mark.parametrize("tool", TOOLS)
def test_a_mistake_is_one_line_of_one_rank(tmp_path, tool):
    ended = run([tool, "--load-hf", "nowhere", *TOOLS[tool]], tmp_path, world_size=2, driver=DRIVER)
    assert ended.codes[0] == 2 and ended.codes[1] != 0
    assert ended.stdout == ["", ""] and ended.stderr[1] == ""
    assert ended.stderr[0].startswith("error: nowhere/config.json is not there") and ended.stderr[0].count("\n") == 1
