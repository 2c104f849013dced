"""A run that is stopped and resumed is the run that was never stopped."""

import pytest
import torch

from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import checkpoint, evaluations, figures, flags, lines, write_dataset

DROPOUT = {"--attention-dropout": 0.1, "--hidden-dropout": 0.1}
TP2 = {"--tensor-model-parallel-size": 2, "--sequence-parallel": None}
RELATIVE = 1e-5  # fp32 losses under another layout


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A blend of two datasets of about 35 samples each: ten steps of 8 begin a second epoch of both."""
    folder = tmp_path_factory.mktemp("data")
    first, second = write_dataset(folder / "first", 1), write_dataset(folder / "second", 2)
    return {"--data-path": ("0.4", first, "0.6", second), "--split": "90,10,0"}


def assert_same_end(one, other, iteration=10):
    """Every tensor and number of two checkpoints is the same, bit for bit."""
    (tensors, state), (others, other_state) = (checkpoint(path / f"iter_{iteration:07d}") for path in (one, other))
    assert tensors.keys() == others.keys() and any(name.startswith("optimizer/") for name in tensors)
    different = [name for name in tensors if not torch.equal(tensors[name], others[name])]
    assert different == []
    for part in ("train", "schedule", "layout", "rng", "optimizer"):
        assert state[part] == other_state[part], part
    return tensors, state


def straight_and_resumed(tmp_path, options, world_size=1):
    """Ten steps with a checkpoint at 5; then 6 to 10 again from that checkpoint."""
    options = {**options, "--save-interval": 5}
    straight = run(flags(options, {"--save": tmp_path / "straight"}), tmp_path / "log", world_size)
    resume = {"--load": tmp_path / "straight", "--ckpt-step": 5, "--save": tmp_path / "resumed"}
    resumed = run(flags(options, resume), tmp_path / "log2", world_size)
    assert straight.codes == resumed.codes == [0] * world_size, straight.text + resumed.text
    whole, part = figures(straight.stdout[0]), figures(resumed.stdout[0])
    assert list(whole) == list(range(1, 11)) and any(len(fields) == 2 for fields in whole.values())
    assert part == {iteration: whole[iteration] for iteration in range(6, 11)}
    tensors, state = assert_same_end(tmp_path / "straight", tmp_path / "resumed")
    return straight, resumed, tensors, state


def test_stopped_and_resumed_with_dropout_workers_and_evaluation(tmp_path, data):
    options = {**data, **DROPOUT, "--num-workers": 1, "--save-interval": 100, "--eval-interval": 2, "--eval-iters": 1}
    straight = run(flags(options, {"--save": tmp_path / "a"}), tmp_path / "log")
    first = run(flags(options, {"--save": tmp_path / "b", "--exit-interval": 5}), tmp_path / "log1")
    second = run(flags(options, {"--save": tmp_path / "b", "--load": tmp_path / "b"}), tmp_path / "log2")
    assert straight.codes == first.codes == second.codes == [0]
    assert figures(straight.stdout[0]) == {**figures(first.stdout[0]), **figures(second.stdout[0])}
    assert "stopped at iteration 5: --exit-interval 5" in first.stdout[0]
    whole = evaluations(straight.stdout[0])
    assert [where for where, _ in whole] == [f"iteration {n}" for n in (2, 4, 6, 8, 10)]
    assert len({loss for _, loss in whole}) == 5  # each reads other samples
    assert evaluations(first.stdout[0]) + evaluations(second.stdout[0]) == whole
    _, state = assert_same_end(tmp_path / "a", tmp_path / "b")
    assert state["train"]["consumed_samples"] == 80 and state["train"]["consumed_valid_samples"] == 40
    assert state["train"]["floating_point_operations"] > 0
    assert [line["consumed samples"] for line in lines(second.stdout[0])] == [48, 56, 64, 72, 80]


def test_bf16(tmp_path, data):
    *_, tensors, _ = straight_and_resumed(tmp_path, {**data, "--bf16": None})
    name = "decoder.final_layernorm.weight"
    assert tensors[f"model/{name}"].dtype == torch.bfloat16
    assert tensors[f"optimizer/{name}/master"].dtype == torch.float32
    moments = sum(tensor.nbytes for key, tensor in tensors.items() if key.startswith("optimizer/"))
    written = sum(file.stat().st_size for file in (tmp_path / "straight" / "iter_0000010").glob("*.safetensors"))
    assert moments <= written < 1.1 * moments  # no weights: these are rounded masters


def test_fp16_continues_its_loss_scale(tmp_path, data):
    scaling = {"--fp16": None, "--initial-loss-scale": 2**21, "--loss-scale-window": 2, "--hysteresis": 1}
    straight, resumed, _, state = straight_and_resumed(tmp_path, {**data, **scaling})
    scales = [line["loss scale"] for line in lines(straight.stdout[0])]
    assert scales[5:] == [line["loss scale"] for line in lines(resumed.stdout[0])]
    assert len(set(scales[5:])) > 1, scales  # it moves after the resume, too
    assert state["train"]["skipped_iterations"] == sum(b < a for a, b in zip([2**21, *scales], scales)) > 0


def test_tensor_and_sequence_parallel_with_dropout(tmp_path, data):
    straight_and_resumed(tmp_path, {**data, **DROPOUT, **TP2, "--global-batch-size": 4}, world_size=2)


def test_resume_under_another_layout(tmp_path, data):
    options = {**data, "--train-iters": 6, "--save-interval": 3, "--global-batch-size": 4}
    straight = run(flags(options, TP2, {"--save": tmp_path / "s", "--micro-batch-size": 2}), tmp_path / "log", 4)
    assert straight.codes == [0] * 4, straight.text
    whole = lines(straight.stdout[0])
    for name, layout in (("dp4", {"--micro-batch-size": 1}), ("tp4", {"--tensor-model-parallel-size": 4})):
        resume = {"--load": tmp_path / "s", "--ckpt-step": 3, "--save": tmp_path / name}
        resumed = run(flags(options, layout, resume), tmp_path / f"log-{name}", 4)
        assert resumed.codes == [0] * 4, resumed.text
        part = lines(resumed.stdout[0])
        assert [line["iteration"] for line in part] == [4, 5, 6]
        assert [line["lm loss"] for line in part] == pytest.approx([x["lm loss"] for x in whole[3:]], rel=RELATIVE)
        (tensors, _), (others, _) = (checkpoint(tmp_path / n / "iter_0000006") for n in ("s", name))
        for key in tensors:
            if not key.startswith("rng/"):
                torch.testing.assert_close(others[key], tensors[key], rtol=1e-3, atol=1e-5)


def test_batches_and_evaluations_may_change_on_resume(tmp_path):
    """The data read so far counts as it was read: 4 x 8 samples and 2 x 2 x 8 evaluated ones."""
    common = {"--mock-data": None, "--micro-batch-size": 2, "--eval-interval": 2, "--save": tmp_path / "s"}
    before = {**common, "--save-interval": 4, "--exit-interval": 4, "--eval-iters": 2}
    assert run(flags(before), tmp_path / "log").codes == [0]
    smaller = {**common, "--save-interval": 50, "--load": tmp_path / "s", "--eval-iters": 1, "--global-batch-size": 2}
    after = run(flags(smaller), tmp_path / "log2")
    assert after.codes == [0], after.text
    assert [line["consumed samples"] for line in lines(after.stdout[0])] == [34, 36, 38, 40, 42, 44]
    assert lines(after.stdout[0])[-1]["ETA"] == 0
    _, state = checkpoint(tmp_path / "s" / "iter_0000010")
    assert state["train"]["consumed_valid_samples"] == 32 + 3 * 2
    done = run(flags(smaller), tmp_path / "log3")
    assert done.codes == [0] and "nothing is left to train: iteration 10 of 10 is done" in done.stdout[0]


def test_megatron_order_goes_on_and_another_length_is_said(tmp_path, data):
    options = {
        **data,
        "--data-order": "megatron",
        "--dataloader-type": "cyclic",
        "--eval-interval": 4,
        "--eval-iters": 1,
    }
    straight, resumed, *_ = straight_and_resumed(tmp_path, options)
    assert evaluations(straight.stdout[0])[1:] == evaluations(resumed.stdout[0])
    assert "the order of samples is another one" not in resumed.text
    longer = {"--load": tmp_path / "straight", "--train-iters": 11, "--override-opt_param-scheduler": None}
    longer = run(flags(options, longer), tmp_path / "log3")
    assert longer.codes == [0] and "--train-samples 80 there and 88 here" in longer.text, longer.text
