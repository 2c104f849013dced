"""The tools on a Hugging Face folder as it is, and what is said when that does not work."""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from megatron.config.data import TokenizerConfig
from megatron.core.models.hf.side_files import GENERATION_FILE, stop_ids
from megatron.core.parameter import local_parameters
from megatron.tooling.restore import read_hf, read_saved, restore_model, restore_tokenizer
from tests import pool
from tests.unit.inference.hf_folder import EOD, TEXTS, convert, greedy, write_folder
from tests.unit.models.hf_models import edit_json

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
GREEDY_FLAGS = ("--prompt", TEXTS[0], "--temperature", "0", "--max-new-tokens", "12")


@pytest.fixture(scope="module")
def tools():
    """name -> argv -> exit code"""

    def tool(name):
        found = runpy.run_path(str(ROOT / "tools" / f"{name}.py"), run_name=name)
        work = found["run"] if name == "generate" else found["evaluate"]
        return lambda *argv: found["run_tool"](found["build_parser"](), work, ["--device", "cpu", *argv])

    return {name: tool(name) for name in ("generate", "evaluate")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(the model of transformers, its folder)"""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return write_folder(folder), str(folder)


def test_half_a_character_is_no_prompt(call, saved):
    """What Python makes of a byte on the command line that is not UTF-8."""
    code, out, err = call("generate", "--load-hf", saved[1], "--prompt", "a\udcff")
    assert (code, out) == (2, "") and err.endswith("give it in that encoding\n")
    assert err.startswith(r"error: 'a\udcff' is not UTF-8") and err.count("\n") == 1


@pytest.fixture
def own(tmp_path):
    """A folder that the test may change."""
    write_folder(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def call(tools, capsys):
    """(exit code, stdout, stderr)"""

    def call(name, *flags):
        capsys.readouterr()  # transformers draws a bar while it saves a folder
        code = tools[name](*map(str, flags))
        found = capsys.readouterr()
        return code, found.out, found.err

    return call


class TestTools:
    def test_generate_writes_what_transformers_does(self, call, saved):
        model, folder = saved
        tokenizer = restore_tokenizer(read_hf(folder))
        new = greedy(model, tokenizer.encode(TEXTS[0]), 12)
        code, out, err = call("generate", "--load-hf", folder, *GREEDY_FLAGS)
        assert (code, out) == (0, TEXTS[0] + tokenizer.decode(new) + "\n")
        assert f"loaded {folder}: float32 on cpu, tp 1" in err

    def test_generate_ends_where_the_folder_says(self, call, saved, own):
        tokenizer = restore_tokenizer(read_hf(own))
        new = greedy(saved[0], tokenizer.encode(TEXTS[0]), 12)
        edit_json(own / GENERATION_FILE, eos_token_id=[EOD, new[5]])
        ended = new[: new.index(new[5])]
        for where in (("--load-hf", own), ("--load", convert(own, own.parent / "checkpoint"))):
            assert call("generate", *where, *GREEDY_FLAGS)[1] == TEXTS[0] + tokenizer.decode(ended) + "\n"

    def test_generate_with_an_adapter_writes_what_peft_does(self, call, own, tmp_path):
        theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(own), LoraConfig(r=4, target_modules=["v_proj"]))
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.ones(parameter.shape) * 0.3)
        theirs.save_pretrained(tmp_path / "adapter")
        tokenizer = restore_tokenizer(read_hf(own))
        new = greedy(theirs.base_model.model, tokenizer.encode(TEXTS[0]), 12)
        adapter = ("--load-adapter", tmp_path / "adapter")
        for where in (("--load-hf", own), ("--load", convert(own, own.parent / "checkpoint"))):
            code, out, err = call("generate", *where, *adapter, *GREEDY_FLAGS)
            assert (code, out) == (0, TEXTS[0] + tokenizer.decode(new) + "\n"), err
            assert out != call("generate", *where, *GREEDY_FLAGS)[1]

    def test_the_precision_is_the_flags(self, call, saved, own):
        converted = convert(own, own.parent / "checkpoint", torch.bfloat16)
        for where, default in (("--load-hf", saved[1]), "float32"), (("--load", converted), "bfloat16"):
            for flags, name in (((), default), (("--fp16",), "float16"), (("--fp32",), "float32")):
                assert f": {name} on cpu" in call("generate", *where, *flags, *GREEDY_FLAGS)[2]

    def test_evaluate_gives_the_loss_of_transformers(self, call, saved, tmp_path):
        model, folder = saved
        (tmp_path / "a.txt").write_text(TEXTS[1])
        ids = torch.tensor([[256, *restore_tokenizer(read_hf(folder)).encode(TEXTS[1])]])
        with torch.no_grad():
            loss = model(ids, labels=ids).loss
        code, out, _ = call("evaluate", "--load-hf", folder, "--text", tmp_path / "a.txt")
        assert code == 0 and f" {loss:.4f} " in out

    def test_another_tokenizer_is_taken_when_it_is_named(self, call, saved):
        prompt = ("--prompt", "1 2 3", "--temperature", "0", "--max-new-tokens", "4")
        code, out, _ = call("generate", "--load-hf", saved[1], "--tokenizer-type", "NullTokenizer", *prompt)
        assert code == 0 and out.split() == ["1", "2", "3", *map(str, greedy(saved[0], [1, 2, 3], 4))]


class TestMistakes:
    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ((), "one of the arguments --load --load-hf is required"),
            (("--load", "{folder}", "--load-hf", "{folder}"), "--load-hf: not allowed with argument --load"),
            (("--load-hf", "{folder}", "--ckpt-step", "7"), "--ckpt-step 7 has no effect with --load-hf; remove it"),
            (("--load-hf", "nowhere"), "nowhere/config.json is not there; give a folder in Hugging Face format"),
            (("--load", "{folder}"), "--load .*tiny holds no checkpoint; --load-hf takes its Hugging Face model"),
            (("--load-hf", "{folder}", "--bf16", "--fp32"), "--bf16 and --fp32 are given together; give one"),
            (("--load-hf", "{folder}", "--tensor-model-parallel-size", "2"), "1 processes for .* 2 x .* 1; start 2"),
        ],
    )
    def test_in_flags(self, call, saved, flags, message):
        self.refused(call("generate", *(flag.format(folder=saved[1]) for flag in flags), *GREEDY_FLAGS), message)

    @pytest.mark.parametrize(
        ("missing", "message"),
        [
            ("model.safetensors", "holds neither model.safetensors nor"),
            ("tokenizer*.json", "no tokenizer is given; add --tokenizer-type"),
        ],
    )
    def test_a_file_is_missing(self, call, own, missing, message):
        for file in own.glob(missing):
            file.unlink()
        self.refused(call("generate", "--load-hf", own, *GREEDY_FLAGS), message)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model_type": "bert"}, "model_type 'bert' is not supported; llama, "),
            ({"num_hidden_layers": 3}, r"holds no tensor model\.layers\.2\..*, which its config.json requires"),
        ],
    )
    def test_a_folder_of_another_model(self, call, own, change, message):
        edit_json(own / "config.json", **change)
        self.refused(call("generate", "--load-hf", own, *GREEDY_FLAGS), message)

    @pytest.mark.parametrize("content", ["no json", "[1]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [[2]]}'])
    def test_a_broken_generation_config(self, call, own, content):
        (own / GENERATION_FILE).write_text(content)
        self.refused(call("generate", "--load-hf", own, *GREEDY_FLAGS), f"{GENERATION_FILE} cannot be read: ")

    def refused(self, result, message):
        code, out, err = result
        assert code == 2 and out == ""
        assert err.count("\n") == 1 and err.startswith("error: ") and re.search(message, err), err


class TestRestore:
    def test_weights_are_in_the_precision_that_they_are_stored_in(self, tmp_path):
        theirs = write_folder(tmp_path, dtype=torch.bfloat16)
        saved = read_hf(tmp_path)
        assert saved.stored == torch.bfloat16 and saved.model.bf16 and saved.name == tmp_path.name
        model, build = restore_model(saved, pool.groups(), CPU)
        assert build.config.dtype_name == "bfloat16" and not any(p.requires_grad for p in model.parameters())
        assert torch.equal(model.embedding.word_embeddings.weight[:260], theirs.model.embed_tokens.weight)
        wide, build = restore_model(dataclasses.replace(saved, dtype=torch.float32), pool.groups(), CPU)
        assert build.config.dtype_name == "float32"
        for name, parameter in local_parameters(wide).items():
            assert torch.equal(parameter, local_parameters(model)[name].float())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_model_is_bit_for_bit_that_of_the_conversion(self, own, dtype):
        converted = read_saved(convert(own, own.parent / "checkpoint", dtype), None)
        assert converted.name == "checkpoint" and converted.path.name == "iter_0000000" and converted.stored == dtype
        direct = dataclasses.replace(read_hf(own), dtype=dtype)
        (one, here), (other, there) = (restore_model(saved, pool.groups(), CPU) for saved in (direct, converted))
        assert here.config == there.config and here.config.dtype_name == str(dtype).removeprefix("torch.")
        expected = local_parameters(other)
        assert all(torch.equal(weight, expected[name]) for name, weight in local_parameters(one).items())

    @pytest.mark.parametrize(
        ("content", "found"),
        [
            ("{}", []),
            ('{"eos_token_id": null}', []),
            ('{"eos_token_id": 2}', [2]),
            ('{"eos_token_id": [2, 7]}', [2, 7]),
        ],
    )
    def test_stops(self, tmp_path, content, found):
        tokenizer = TokenizerConfig(tokenizer_model=str(tmp_path))
        assert stop_ids(tokenizer) == [] == stop_ids(TokenizerConfig())
        (tmp_path / GENERATION_FILE).write_text(content)
        assert stop_ids(tokenizer) == found
