"""A Hugging Face model with experts, loaded, saved and written back under layouts of its experts: the same bytes."""

import itertools
import json

import pytest
from safetensors.torch import load_file

from megatron.config.rules.check import check
from megatron.core.models.hf.folder import HFFolder
from megatron.training.checkpoint import save_checkpoint
from megatron.training.export import save_hf
from megatron.training.setup import build
from megatron.training.start import take_shape_from_files
from tests import pool
from tests.parallel.test_hf_layouts import DROPOUT, assert_same
from tests.unit.config.runs import make_run
from tests.unit.models.builds import CPU
from tests.unit.models.hf_models import save_hf_model
from tests.unit.models.test_hf_predictions import with_predictions

# name -> sizes of tp, ep, etp, pp
LAYOUTS = {
    "ep 2": (1, 2, 1, 1),
    "etp 2": (2, 1, 2, 1),
    "tp 2, ep 2": (2, 2, 1, 1),
    "ep 2, etp 2": (2, 2, 2, 1),
    "pp 2, ep 2": (1, 2, 1, 2),
}
CASES = [("qwen2 moe with windows", "ep 2, etp 2"), ("mixtral with window", "tp 2, ep 2"), ("olmoe", "pp 2, ep 2")]
CASES += [("glm4 moe", "ep 2"), ("glm4 moe", "pp 2, ep 2")]
EVEN = (
    "mixtral with window",
    "qwen2 moe",
    "qwen2 moe with windows",
    "qwen3 moe",
    "olmoe",
    "glm4 moe",
)  # numbers of experts
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(EVEN, LAYOUTS) if case not in CASES]
FLAGS = ("tensor_model", "expert_model", "expert_tensor", "pipeline_model")


def through(rank, size, sizes, source, root, **fields):
    """Begin a run as pretrain_gpt.py does and save it before its first step: (the folder for transformers, tensors
    read)."""
    read, fill = set(), HFFolder.fill
    layout = {f"{flag}_parallel_size": n for flag, n in zip(FLAGS, sizes)} | {"sequence_parallel": sizes[0] > 1}
    layout |= {"decoder_first_pipeline_num_layers": 1} if sizes[3] > 1 else {}  # of three
    run = make_run(
        **layout, **DROPOUT, **fields, load_hf=source, save=f"{root}/run", save_interval=100, save_hf=f"{root}/hf"
    )
    run = take_shape_from_files(run)
    check(run, size)
    tp, ep, etp, pp = sizes
    groups = pool.groups(tp=tp, ep=ep, etp=etp, pp=pp, instances=1)
    HFFolder.fill = lambda self, out, names, box: read.update(names) or fill(self, out, names, box)
    try:
        trainer = build(run, groups, CPU)
    finally:
        HFFolder.fill = fill
    return save_hf(trainer, save_checkpoint(trainer)), read


@pytest.mark.parametrize(("name", "layout"), [*CASES, *SLOW])
def test_through_a_layout_of_the_experts(tmp_path, name, layout):
    """Each rank reads the tensors of its experts only, and all of them together each tensor."""
    save_hf_model(name, tmp_path / "hf")
    before = load_file(tmp_path / "hf/model.safetensors")
    tp, ep, etp, pp = LAYOUTS[layout]
    ranks = pool.run(max(tp, ep * etp) * pp, through, LAYOUTS[layout], str(tmp_path / "hf"), str(tmp_path))
    assert_same(load_file(ranks[0][0] / "model.safetensors"), before)
    config, expected = (json.loads((path / "config.json").read_text()) for path in (ranks[0][0], tmp_path / "hf"))
    assert {**expected, "torch_dtype": "float32"} == {"dtype": "float32", **config}
    experts = {key for key in before if ".experts." in key}
    assert set().union(*(read for _, read in ranks)) == before.keys()
    for _, read in ranks:
        assert len(read & experts) == len({key for key in experts if key.split(".")[2] in layers(read)}) // ep


def layers(names):
    return {name.split(".")[2] for name in names if name.startswith("model.layers.")}


def predicting(rank, size, sizes, source, root):
    return through(rank, size, sizes, source, root, mtp_num_layers=2)


def test_layers_that_predict_further_tokens(tmp_path):
    """The last stage reads them, with a copy of the embedding."""
    with_predictions("glm4 moe", tmp_path / "hf", 2)
    ranks = pool.run(4, predicting, LAYOUTS["pp 2, ep 2"], str(tmp_path / "hf"), str(tmp_path))
    assert_same(load_file(ranks[0][0] / "model.safetensors"), load_file(tmp_path / "hf/model.safetensors"))
