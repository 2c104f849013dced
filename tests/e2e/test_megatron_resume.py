"""A run of Megatron-LM's goes on here: what it saved is written from a run of ours, so that the numbers are known."""

import pytest
import torch

from megatron.core.models.mcore.arguments import arguments_of
from megatron.training.saved_model import model_config_of
from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import checkpoint, figures, flags, lines, write_dataset
from tests.unit.models.megatron_arguments import megatron_arguments
from tests.unit.models.test_mcore_optimizer import UNEVEN, Trained, in_buckets, write_classic, write_torch_dist
from tools.checkpoint import convert

OPTIONS = {
    "--num-layers": 4,
    "--bf16": None,
    "--save-interval": 5,
    "--lr-decay-style": "cosine",
    "--lr-warmup-iters": 3,
}
RELATIVE = 1e-3  # bf16 losses under another layout


class Saved(Trained):
    """A checkpoint of ours, as a model that Megatron-LM trained."""

    def __init__(self, path):
        tensors, state = checkpoint(path)
        self.model, self.dtype = model_config_of(state), torch.bfloat16
        self.tensors = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        self.state = {
            key: {name: tensors[f"optimizer/{name}/{key}"] for name in self.tensors}
            for key in ("master", "exp_avg", "exp_avg_sq")
        }
        base = megatron_arguments("d98e8a6")
        model = {name: value for name, value in arguments_of(self.model).items() if name in base}
        self.arguments = {
            **base,
            **model,
            "global_batch_size": 8,
            "consumed_train_samples": state["train"]["consumed_samples"],
            "use_distributed_optimizer": True,
        }
        schedule = state["schedule"]
        self.schedule = {
            "max_lr": schedule["max_lr"],
            "min_lr": schedule["min_lr"],
            "lr_warmup_steps": 8 * schedule["warmup_length"],
            "lr_decay_steps": 8 * schedule["decay_length"],
            "num_steps": 8 * state["train"]["schedule_position"],
            "start_wd": schedule["start_weight_decay"],
            "end_wd": schedule["end_weight_decay"],
            "wd_incr_steps": 80,
        }


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """(options, Megatron-LM's folders of iteration 5, the figures of steps 6 to 10)"""
    folder = tmp_path_factory.mktemp("straight")
    options = {**OPTIONS, "--data-path": write_dataset(folder / "data", 1), "--split": "100,0,0"}
    result = run(flags(options, {"--save": folder / "ours"}), folder / "log")
    assert result.codes == [0], result.text
    source = Saved(folder / "ours/iter_0000005")
    for name in ("dist", "classic"):
        (folder / name).mkdir()
        (folder / name / "latest_checkpointed_iteration.txt").write_text("5")
    saved = {"iteration": 5, "schedule": source.schedule}
    write_torch_dist(folder / "dist/iter_0000005", source, in_buckets(source, UNEVEN), layout=UNEVEN, **saved)
    write_classic(folder / "classic/iter_0000005", source, UNEVEN, distributed=False, **saved)
    return options, folder, {number: each for number, each in figures(result.stdout[0]).items() if number > 5}


def test_from_torch_dist_the_same_losses_to_the_last_bit_and_then_from_its_own_folder(tmp_path, straight):
    options, folder, expected = straight
    again = flags(options, {"--load": folder / "dist", "--save": tmp_path / "new"})
    first = run(again, tmp_path / "log")
    assert first.codes == [0], first.text
    assert figures(first.stdout[0]) == expected
    assert [line["consumed samples"] for line in lines(first.stdout[0])] == [48, 56, 64, 72, 80]
    assert "--data-order megatron there and stable here" in first.text
    assert first.stdout[0].count("random state not restored: Megatron-LM's is of other generators") == 1
    assert not [entry.name for entry in (folder / "dist").iterdir() if entry.name.startswith(("lock", "iter_0000010"))]
    second = run(again, tmp_path / "log2")
    assert second.codes == [0] and "going on from this run's own checkpoint" in second.stdout[0]
    assert lines(second.stdout[0]) == []


def test_from_the_classic_layout_under_another_one(tmp_path, straight):
    options, folder, expected = straight
    argv = flags(
        options, {"--load": folder / "classic", "--tensor-model-parallel-size": 2}, without=("--save-interval",)
    )
    result = run(argv, tmp_path / "log", 2)
    assert result.codes == [0, 0], result.text
    losses = [line["lm loss"] for line in lines(result.stdout[0])]
    wanted = [float(text.split(": ")[1]) for each in expected.values() for text in each if text.startswith("lm loss")]
    assert losses == pytest.approx(wanted, rel=RELATIVE)


def test_its_folder_is_not_saved_to(tmp_path, straight):
    options, folder, _ = straight
    before = sorted(entry.name for entry in (folder / "dist").iterdir())
    result = run(flags(options, {"--load": folder / "dist", "--save": folder / "dist"}), tmp_path / "log")
    assert result.codes == [2]
    assert "holds iter_0000005 of Megatron-LM, and ours are not put beside it" in result.stderr[0]
    assert sorted(entry.name for entry in (folder / "dist").iterdir()) == before


@pytest.mark.parametrize(
    "form",
    ["--format torch_dist", "--format torch --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2"],
)
def test_what_is_written_for_megatron_lm_goes_on_as_its_own_would(tmp_path, straight, form):
    options, folder, expected = straight
    words = (
        f"--loader megatron --saver mcore --load-dir {folder}/ours --ckpt-step 5 --save-dir {tmp_path}/theirs {form}"
    )
    assert convert.main(words.split()) == 0
    result = run(flags(options, {"--load": tmp_path / "theirs", "--save": tmp_path / "new"}), tmp_path / "log")
    assert result.codes == [0], result.text
    assert figures(result.stdout[0]) == expected
