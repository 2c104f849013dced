"""Fine-tuning with low-rank adapters as a user runs it: from Hugging Face, resumed, over tp, to PEFT and merged."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import SHAPE, checkpoint, evaluations, figures, flags, lines
from tests.unit.models.builds import make_ids
from tests.unit.models.hf_models import save_hf_model
from tools.checkpoint import convert

SHAPE_FLAGS = set(SHAPE) - {"--attention-dropout", "--hidden-dropout"}
LORA = {"--lora-rank": 4, "--lora-alpha": 8}
SOME = {"--lora-target-modules": ("q_proj", "v_proj", "down_proj")}
TP2 = {"--tensor-model-parallel-size": 2, "--sequence-parallel": None}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "model"
    save_hf_model("qwen2", folder)
    return folder


def options(base, root, *more):
    """Learning fast, so that what is learnt is seen in the logits."""
    changes = {"--load-hf": base, "--mock-data": None, "--save": root / "run", "--load": root / "run"}
    given = {"--save-hf": root / "hf", "--save-interval": 3, "--train-iters": 6, "--lr": 2e-2}
    return flags(changes, given, LORA, *more, without=SHAPE_FLAGS)


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    done = run(options(base, root), root / "log")
    assert done.codes == [0], done.text
    return root, done.stdout[0]


def logits(model):
    with torch.no_grad():
        return model.eval()(make_ids(2, 40)[:, :-1]).logits


def assert_close(one, other):
    assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def convert_to(saver, root, folder, *more):
    words = ["--loader", "megatron", "--saver", saver, "--load-dir", root / "run", "--save-dir", folder, *more]
    return convert.main([str(word) for word in words])


def test_peft_and_the_merged_model_are_the_same(base, trained, tmp_path):
    root, output = trained
    share = "adapters of q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
    assert "training " in output and share in output
    before = logits(AutoModelForCausalLM.from_pretrained(base))
    adapter = root / "hf" / "iter_0000006"
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    adapted = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))
    assert (adapted - before).abs().max() > 0.1 * before.abs().max()
    assert convert_to("hf", root, tmp_path / "merged") == 0
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), adapted)
    merged, unmerged = load_file(tmp_path / "merged/model.safetensors"), load_file(base / "model.safetensors")
    same = {name for name, tensor in unmerged.items() if torch.equal(merged[name], tensor)}
    assert {name for name in unmerged if "proj.weight" not in name} == same
    # The tool writes the same adapter as the run; the base model is named from the run's --load-hf.
    assert convert_to("peft", root, tmp_path / "adapter") == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "adapter" / name).read_bytes() == (adapter / name).read_bytes()
    assert json.loads((adapter / "adapter_config.json").read_bytes())["base_model_name_or_path"] == str(base)


def test_the_merged_checkpoint_is_a_plain_model(trained, tmp_path, base):
    root, _ = trained
    assert convert_to("megatron", root, tmp_path / "plain") == 0
    losses = {}
    for name, start in {
        "merged": {"--load": tmp_path / "plain", "--use-checkpoint-args": None},
        "adapted": {"--load": root / "run", "--use-checkpoint-args": None, **LORA},
    }.items():
        argv = flags({"--mock-data": None, "--skip-train": None, "--eval-iters": 2, **start}, without=SHAPE_FLAGS)
        done = run(argv, tmp_path / name)
        assert done.codes == [0], done.text
        losses[name] = [loss for _, loss in evaluations(done.stdout[0])]
    assert losses["merged"] and losses["merged"] == losses["adapted"]


def test_stopped_and_resumed(base, trained, tmp_path):
    """By the same command, bit for bit."""
    _, output = trained
    first = run(options(base, tmp_path, {"--exit-interval": 3}), tmp_path / "log1")
    second = run(options(base, tmp_path), tmp_path / "log2")
    assert first.codes == second.codes == [0], first.text + second.text
    assert figures(output) == {**figures(first.stdout[0]), **figures(second.stdout[0])}


@pytest.mark.parametrize("layout", [TP2, {"--overlapped-distributed-optimizer": None}], ids=["tp 2", "dp 2"])
def test_the_same_losses_under_other_layouts(base, trained, tmp_path, layout):
    _, output = trained
    done = run(options(base, tmp_path, layout), tmp_path / "log", 2)
    assert done.codes == [0, 0], done.text
    found, expected = ([line["lm loss"] for line in lines(text)] for text in (done.stdout[0], output))
    assert found == pytest.approx(expected, rel=1e-4)
    one, other = (load_file(folder / "hf/iter_0000003/adapter_model.safetensors") for folder in (trained[0], tmp_path))
    assert one.keys() == other.keys()
    # Adam's first steps turn rounding into whole steps where a gradient is nearly zero, in a few elements.
    assert all((one[name] - other[name]).abs().mean() < 1e-4 for name in one)


def test_some_projections_of_a_checkpoint_of_ours(base, tmp_path):
    """--pretrained-checkpoint as the base: frozen weights do not move, and only the named projections have adapters."""
    words = ["--loader", "hf", "--saver", "megatron", "--load-dir", str(base), "--save-dir", str(tmp_path / "base")]
    assert convert.main(words) == 0
    start = {"--pretrained-checkpoint": tmp_path / "base", "--use-checkpoint-args": None}
    argv = options(base, tmp_path, SOME, start)
    at = argv.index("--load-hf")
    done = run(argv[:at] + argv[at + 2 :], tmp_path / "log")
    assert done.codes == [0], done.text
    before, after = checkpoint(tmp_path / "base/iter_0000000")[0], checkpoint(tmp_path / "run/iter_0000006")[0]
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    added = {name.rsplit(".", 2)[1] for name in after if name not in before and name.startswith("model/")}
    assert added == {"q_proj", "v_proj", "down_proj"}
    adapter = tmp_path / "hf/iter_0000006"
    adapted = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))
    assert convert_to("hf", tmp_path, tmp_path / "merged") == 0
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), adapted)


@pytest.mark.parametrize("layout", [{}, TP2], ids=["1", "tp 2"])
def test_an_adapter_of_peft_is_gone_on_with(base, trained, tmp_path, layout):
    """From the adapter that a run exported: its losses, and then learning goes on from there."""
    root, output = trained
    losses = {}
    adapter = {"--load-adapter": root / "hf/iter_0000006"}
    for name, start in {"checkpoint": {"--load": root / "run", **LORA}, "adapter": {**adapter, **layout}}.items():
        changes = {"--load-hf": base, "--mock-data": None, "--skip-train": None, "--eval-iters": 2, **start}
        done = run(flags(changes, without=SHAPE_FLAGS), tmp_path / name, 2 if name == "adapter" and layout else 1)
        assert set(done.codes) == {0}, done.text
        losses[name] = [loss for _, loss in evaluations(done.stdout[0])]
    assert losses["adapter"] == pytest.approx(losses["checkpoint"], rel=1e-5)
    if layout:
        return
    changes = {
        "--load-hf": base,
        "--mock-data": None,
        "--save": tmp_path / "run",
        "--load": tmp_path / "run",
        **adapter,
    }
    given = {"--save-interval": 2, "--train-iters": 2, "--lr": 2e-2, "--lr-decay-iters": 9}
    argv = flags(changes, given, without=SHAPE_FLAGS)
    first = run(argv, tmp_path / "log")
    assert first.codes == [0], first.text
    began, ended = (lines(text)[at]["lm loss"] for text, at in ((first.stdout[0], 0), (output, -1)))
    assert began < lines(output)[0]["lm loss"] and abs(began - ended) < 0.5
    # The same command goes on with its own checkpoint, and an adapter cannot be put on one that has some.
    again = run([*argv, "--train-iters", "3"], tmp_path / "log2")
    assert [line["iteration"] for line in lines(again.stdout[0])] == [3], again.text
    twice = flags({**changes, "--load": root / "run", "--finetune": None}, without={*SHAPE_FLAGS, "--save"})
    done = run(twice, tmp_path / "log3")
    assert done.codes == [2] and "holds LoRA adapters already; --load-adapter" in done.stderr[0], done.text


@pytest.mark.parametrize("loader", ["hf", "megatron"])
def test_an_adapter_of_peft_is_merged_by_the_converter(base, trained, tmp_path, loader):
    root, _ = trained
    source = base
    if loader == "megatron":
        source = tmp_path / "base"
        words = ["--loader", "hf", "--saver", "megatron", "--load-dir", str(base), "--save-dir", str(source)]
        assert convert.main(words) == 0
    words = ["--loader", loader, "--saver", "hf", "--load-dir", source, "--save-dir", tmp_path / "a"]
    assert convert.main([str(word) for word in [*words, "--load-adapter", root / "hf/iter_0000006"]]) == 0
    assert convert_to("hf", root, tmp_path / "b") == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("more", "without", "problem"),
    [
        ({"--lora-rank": 8}, (), "lora_rank is 4 there and 8 here"),
        ({}, ("--lora-rank", "--lora-alpha"), "holds LoRA adapters (--lora-rank 4); give its LoRA flags"),
        ({"--lora-target-modules": "query"}, (), "'query' is not known; choose one of q_proj, q_a_proj"),
        ({"--load": "nowhere"}, ("--load-hf",), "--load nowhere holds none; give --load-hf"),
        ({}, ("--load-hf", "--load"), "--lora-rank 4 adapts a model that is trained already; give it with --load-hf"),
        ({}, ("--lora-rank",), "--lora-alpha has no effect: there are no adapters"),
        ({"--load-adapter": "x"}, (), "adapter_config.json is not there; give a folder in PEFT's format"),
    ],
)
def test_mistakes(base, trained, tmp_path, more, without, problem):
    root, _ = trained
    hidden = set() if "--load-hf" in without else SHAPE_FLAGS
    changes = {"--load-hf": base, "--mock-data": None, "--load": root / "run", **LORA, **more}
    done = run(flags(changes, without={*hidden, *without}), tmp_path / "log")
    assert done.codes == [2] and problem in done.stderr[0], done.text
    assert len([line for line in done.stderr[0].splitlines() if line.startswith("error")]) == 1


def test_no_adapters_to_write(base, tmp_path, capsys):
    words = ["--loader", "hf", "--saver", "megatron", "--load-dir", str(base), "--save-dir", str(tmp_path / "run")]
    assert convert.main(words) == 0
    assert convert_to("peft", tmp_path, tmp_path / "adapter") == 2
    assert "has no LoRA adapters" in capsys.readouterr().err and not (tmp_path / "adapter").exists()
    assert convert.main([*words[:2], "--saver", "peft", *words[4:6], "--save-dir", str(tmp_path / "adapter")]) == 2
    assert "--saver peft writes the adapters of our checkpoints" in capsys.readouterr().err
