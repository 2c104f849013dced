"""What a run takes over from a checkpoint of Megatron-LM's, and which folder it goes on from."""

import shutil

import pytest
import torch

from megatron.base.errors import CheckpointError
from megatron.config.checkpoint import CheckpointConfig
from megatron.core.dist_checkpointing.folders import TRACKER, begin, find, foreign_in, is_foreign
from megatron.core.models.mcore.source import MCoreSource
from megatron.training.megatron_lm import state_of
from megatron.training.saved_run import open_saved_run, read_run_state
from megatron.training.start import find_start
from megatron.training.vocabulary import with_vocabulary
from tests import pool
from tests.unit.config.runs import make_run
from tests.unit.models.test_mcore_optimizer import (
    EVEN,
    model_space,
    trained,
    write_classic,
    write_torch_dist,
)


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Folders of Megatron-LM's runs, by format, with iteration 7."""
    folder = tmp_path_factory.mktemp("megatron")
    for name in ("dist", "classic"):
        (folder / name).mkdir()
        (folder / name / TRACKER).write_text("7\n")
    source = trained("qwen")
    write_torch_dist(folder / "dist/iter_0000007", source, model_space(source))
    write_classic(folder / "classic/iter_0000007", source, EVEN, distributed=False)
    return folder


def state(path, source=None, kind="torch_dist", **options):
    source = source or trained("qwen")
    if kind == "torch_dist":
        write_torch_dist(path, source, model_space(source), **options)
    else:
        write_classic(path, source, EVEN, distributed=False, **options)
    return state_of(MCoreSource(path, None, None), None)


@pytest.mark.parametrize("kind", ["torch_dist", "torch"])
def test_progress_counted_in_iterations(tmp_path, kind):
    found = state(tmp_path / "iter_0000007", kind=kind, consumed_valid_samples=16, lr_warmup_init=1e-6)
    assert found["train"]["iteration"] == 7 and found["train"]["consumed_samples"] == 56
    assert found["train"]["schedule_position"] == 7 and found["train"]["consumed_valid_samples"] == 16
    assert found["train"]["floating_point_operations"] == 1e9
    schedule = found["schedule"]
    assert (schedule["unit"], schedule["warmup_length"], schedule["decay_length"]) == ("iterations", 2, 20)
    assert (schedule["max_lr"], schedule["min_lr"], schedule["warmup_init_lr"]) == (1e-3, 1e-4, 1e-6)
    assert (schedule["start_weight_decay"], schedule["weight_decay_style"], schedule["weight_decay_length"]) == (
        0.1,
        "constant",
        0,
    )
    assert found["optimizer"] == {"steps": 5, "loss_scale": None}
    assert found["config"]["model"]["bf16"] and not found["config"]["model"]["fp16"]


def test_progress_counted_in_samples(tmp_path):
    decay = {"lr_decay_style": "WSD", "wd_incr_style": "linear", "num_steps": 48}
    arguments = {"train_samples": 160, "lr_wsd_decay_samples": 32, "lr_wsd_decay_style": "linear"}
    found = state(tmp_path / "iter_0000007", schedule=decay, **arguments)
    schedule = found["schedule"]
    assert found["train"]["schedule_position"] == 48  # eight samples were skipped
    assert (schedule["unit"], schedule["warmup_length"], schedule["decay_length"]) == ("samples", 16, 160)
    assert (schedule["wsd_decay_style"], schedule["wsd_decay_length"]) == ("linear", 32)
    assert schedule["weight_decay_length"] == 160


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (None, 0.0)),
        ({"decoupled_lr": 4e-3}, (4e-3, 1e-4)),
        ({"decoupled_lr": 4e-3, "decoupled_min_lr": 0.0}, (4e-3, 0.0)),
    ],
)
def test_a_decoupled_learning_rate(tmp_path, arguments, expected):
    found = state(tmp_path / "iter_0000007", **arguments)["schedule"]
    assert (found["decoupled_max_lr"], found["decoupled_min_lr"]) == expected


def test_what_has_no_effect_is_not_compared(tmp_path):
    arguments = {"decoupled_lr": 4e-3, "decoupled_min_lr": 1e-3}
    found = state(tmp_path / "iter_0000007", schedule={"lr_decay_style": "constant"}, **arguments)
    assert found["schedule"]["min_lr"] == found["schedule"]["decay_length"] == 0
    assert (found["schedule"]["decoupled_max_lr"], found["schedule"]["decoupled_min_lr"]) == (4e-3, 0.0)


def test_the_loss_scale_goes_on(tmp_path):
    source, path = trained("qwen"), tmp_path / "iter_0000007"
    write_torch_dist(path, source, model_space(source), common_file=True)
    common = torch.load(path / "common.pt", weights_only=False)
    scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    common["optimizer"]["grad_scaler"] = scaler
    torch.save(common, path / "common.pt")
    scale = state_of(MCoreSource(path, None, None), None)["optimizer"]["loss_scale"]
    assert scale == {"value": 4096.0, "good_steps": 3, "hysteresis": 2}


@pytest.mark.parametrize(
    ("groups", "problem"),
    [([{"step": 4}, {"step": 5}], r"had \[4, 5\] updates"), ([{}], "does not say how many updates")],
)
def test_updates_that_are_not_clear(tmp_path, groups, problem):
    source, path = trained("qwen"), tmp_path / "iter_0000007"
    write_torch_dist(path, source, model_space(source), common_file=True)
    common = torch.load(path / "common.pt", weights_only=False)
    common["optimizer"]["optimizer"]["param_groups"] = groups
    torch.save(common, path / "common.pt")
    with pytest.raises(CheckpointError, match=problem + ".*--no-load-optim"):
        state_of(MCoreSource(path, None, None), None)


def test_a_release_has_no_progress(tmp_path):
    found = state(tmp_path / "release")
    assert found["train"] is None and found["optimizer"] is None and found["schedule"] is None


def test_a_vocabulary_that_is_not_known_is_left_to_the_run(tmp_path):
    source, path = trained("qwen"), tmp_path / "iter_0000007"
    write_torch_dist(path, source, model_space(source), vocab_size=None, padded_vocab_size=112)
    assert read_run_state(path)["config"]["model"]["vocab_size"] is None
    ours = {"tokenizer_vocab_size": 99, "seq_length": 32, "tp": 1}
    model = with_vocabulary(make_run(vocab_size=None).model, {"make_vocab_size_divisible_by"}, path, **ours)
    assert model.vocab_size == 99 and model.padded_vocab_size == 112 and not model.mask_padded_vocabulary
    saved = open_saved_run(path, model, pool.groups().world)
    assert saved.state["config"]["model"]["vocab_size"] == 99
    asked = make_run(vocab_size=None, fixed_padded_vocab_size=128).model
    assert with_vocabulary(asked, {"fixed_padded_vocab_size"}, path, **ours).padded_vocab_size == 128


def test_folders_are_told_apart(tmp_path, roots):
    for name in ("dist", "classic"):
        assert is_foreign(roots / name / "iter_0000007") and foreign_in(roots / name) == roots / name / "iter_0000007"
        assert find(roots / name, None) == find(roots / name, 7) == roots / name / "iter_0000007"
        with pytest.raises(CheckpointError, match="iteration 8"):
            find(roots / name, 8)
        with pytest.raises(CheckpointError, match="is a checkpoint of Megatron-LM, and ours are not put beside it"):
            begin(roots / name, 9)
    shutil.copytree(roots / "classic/iter_0000007", tmp_path / "release")
    (tmp_path / TRACKER).write_text("release")
    assert find(tmp_path, None) == tmp_path / "release" and foreign_in(tmp_path) == tmp_path / "release"
    assert foreign_in(tmp_path / "nothing") is None


@pytest.mark.parametrize("name", ["dist", "classic"])
def test_load_and_pretrained_checkpoint_take_them(tmp_path, roots, name):
    theirs = roots / name / "iter_0000007"
    config = CheckpointConfig(load=str(roots / name), save=str(tmp_path / "new"), save_interval=5)
    assert find_start(config, sft=False, trains=True) == (config, theirs)
    other = CheckpointConfig(pretrained_checkpoint=str(roots / name), save=str(tmp_path / "new"))
    begun, found = find_start(other, sft=False, trains=True)
    assert found == theirs and begun.finetune
    begun, found = find_start(config, sft=True, trains=True)
    assert found == theirs and begun.finetune
    with pytest.raises(CheckpointError, match=r"--save .* holds iter_0000007 of Megatron-LM"):
        find_start(CheckpointConfig(load=str(roots / name), save=str(roots / name)), sft=False, trains=True)
