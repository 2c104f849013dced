"""Training that starts from a Hugging Face model and saves as one."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import SHAPE, figures, flags, lines
from tests.unit.models.hf_models import save_hf_model
from tools.checkpoint import convert

SHAPE_FLAGS = set(SHAPE) - {"--attention-dropout", "--hidden-dropout"}
TP2 = {"--tensor-model-parallel-size": 2, "--sequence-parallel": None}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "model"
    save_hf_model("qwen2", folder)
    return folder


def options(model, tmp_path, *more):
    changes = {"--load-hf": model, "--mock-data": None, "--save": tmp_path / "run", "--load": tmp_path / "run"}
    given = {"--save-hf": tmp_path / "hf", "--save-interval": 2, "--train-iters": 4, "--eval-iters": 1}
    return flags(changes, given, *more, without=SHAPE_FLAGS)


def test_from_hugging_face_and_back(tmp_path, model):
    """The first loss is transformers' own on these weights; what is saved is what transformers then loads; the same
    command continues the run; and two processes do the same."""
    argv = [*options(model, tmp_path)]
    one = run(argv, tmp_path / "log")
    assert one.codes == [0], one.text
    assert "loaded" in one.stdout[0] and "stored as float32, as float32" in one.stdout[0]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["iter_0000002", "iter_0000004", "lock.json"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "iter_0000004")
    before = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.equal(saved.lm_head.weight, before.lm_head.weight)
    assert saved.config.eos_token_id == before.config.eos_token_id == 2
    beside = [folder / "generation_config.json" for folder in (tmp_path / "hf/iter_0000004", model)]
    assert beside[0].read_bytes() == beside[1].read_bytes()
    first = lines(one.stdout[0])[0]["lm loss"]

    again = run([*argv, "--train-iters", "6", "--override-opt_param-scheduler"], tmp_path / "log2")
    assert again.codes == [0] and list(figures(again.stdout[0])) == [5, 6]

    two = run([*options(model, tmp_path / "two", TP2)], tmp_path / "log3", 2)
    assert two.codes == [0, 0], two.text
    assert lines(two.stdout[0])[0]["lm loss"] == pytest.approx(first, rel=1e-5)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "two/hf/iter_0000004")
    # Adam's first steps turn rounding into whole steps where a gradient is nearly zero, in a few elements.
    for name, parameter in saved.named_parameters():
        assert (parameter - dict(other.named_parameters())[name]).abs().mean() < 1e-5, name


def test_an_export_that_a_kill_prevented_is_written_by_the_next_start(tmp_path, model):
    """Also when nothing is left to train."""
    argv = options(model, tmp_path, {"--save-interval": 4})
    killed = run(argv, tmp_path / "log", driver="tests.e2e.helpers.drivers:dies_before_an_export")
    assert killed.codes == [-9] and (tmp_path / "run" / "iter_0000004").is_dir()
    left = tmp_path / "hf" / ".iter_0000002.tmp"
    left.mkdir(exist_ok=True)  # of another killed run
    again = run(argv, tmp_path / "log2")
    assert again.codes == [0] and "nothing is left to train" in again.stdout[0], again.text
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["iter_0000004", "lock.json"]
    straight = run(options(model, tmp_path / "straight"), tmp_path / "log3")
    assert straight.codes == [0], straight.text
    for file in ("config.json", "model.safetensors"):
        name = f"hf/iter_0000004/{file}"
        assert (tmp_path / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_a_converted_checkpoint_starts_a_run(tmp_path, model):
    """Weights only, under another layout; as the same model loaded directly."""
    words = ["--loader", "hf", "--saver", "megatron", "--load-dir", str(model), "--save-dir", str(tmp_path / "ours")]
    assert convert.main([*words, "--target-tensor-parallel-size", "2"]) == 0
    first = {}
    for name, start, world_size in (
        ("direct", {"--load-hf": model}, 1),
        ("converted", {"--load": tmp_path / "ours", "--use-checkpoint-args": None, **TP2}, 2),
    ):
        argv = flags({"--mock-data": None, "--train-iters": 2, **start}, without=SHAPE_FLAGS)
        result = run(argv, tmp_path / name, world_size)
        assert set(result.codes) == {0}, result.text
        first[name] = [line["lm loss"] for line in lines(result.stdout[0])]
    assert first["converted"] == pytest.approx(first["direct"], rel=1e-5)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--num-layers", "2"], "--num-layers has no effect: --load-hf takes the model's shape from its config.json"),
        (["--preset", "llama-tiny"], "--preset has no effect: --load-hf"),
        (["--use-checkpoint-args"], "--use-checkpoint-args and --load-hf both give the model's shape"),
        (["--load-hf", "nowhere"], "nowhere/config.json is not there"),
    ],
)
def test_bad_flags_are_one_line(tmp_path, model, more, problem):
    result = run([*options(model, tmp_path), *more], tmp_path / "log")
    assert result.codes == [2]
    assert f"error: {problem}" in result.stderr[0] and not (tmp_path / "run").exists()
