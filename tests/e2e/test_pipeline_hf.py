"""Under pipeline parallelism a Hugging Face model is read, trained and saved as by one process: the same files."""

import pytest

from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import SHAPE, flags, lines
from tests.unit.models.hf_models import make_hf_model

SHAPE_FLAGS = set(SHAPE) - {"--attention-dropout", "--hidden-dropout"}
LAYOUTS = {
    "pp 2": (2, {"--pipeline-model-parallel-size": 2}),
    "pp 2, zb-v": (2, {"--pipeline-model-parallel-size": 2, "--pipeline-schedule": "zb-v"}),
}
# Without clipping: its factor is a sum over ranks.
TRAINED = {"--train-iters": 3, "--clip-grad": 0}
# Adam's first step is plus or minus the rate wherever there is a gradient, however it was rounded.
UNCHANGED = {"--train-iters": 1, "--lr": 1e-30, "--weight-decay": 0}


def saved(tmp_path, model, layout, more):
    """(name -> bytes of the files of the last iteration, losses)"""
    world, fields = layout
    paths = {"--load-hf": model, "--save": tmp_path / "run", "--save-hf": tmp_path / "hf", "--save-interval": 100}
    result = run(flags({"--mock-data": None}, paths, fields, more, without=SHAPE_FLAGS), tmp_path / "log", world)
    assert result.codes == [0] * world, result.text
    folder = tmp_path / "hf" / f"iter_{more['--train-iters']:07d}"
    return {path.name: path.read_bytes() for path in folder.iterdir()}, [
        line["lm loss"] for line in lines(result.stdout[0])
    ]


@pytest.mark.parametrize(("name", "more"), [("qwen2", TRAINED), ("qwen2 tied", UNCHANGED)])
def test_the_same_files(tmp_path, name, more):
    """A tied weight's gradients are added in another order on two ranks, so that one is compared as it was read."""
    make_hf_model(name, num_hidden_layers=4).save_pretrained(tmp_path / "model")
    expected, losses = saved(tmp_path / "one", tmp_path / "model", (1, {}), more)
    assert "model.safetensors" in expected and len(losses) == more["--train-iters"]
    for name, layout in LAYOUTS.items():
        files, found = saved(tmp_path / name, tmp_path / "model", layout, more)
        assert found == losses and files.keys() == expected.keys()
        assert [name for name in files if files[name] != expected[name]] == []
