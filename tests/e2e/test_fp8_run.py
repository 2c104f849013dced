"""Runs with FP8 products: what the log says, and checkpoints."""

import pytest
import torch

from tests.e2e.helpers.launch import run
from tests.e2e.helpers.runs import MOCK, checkpoint, figures, flags, lines

MODEL = {**MOCK, "--bf16": None, "--num-attention-heads": 2, "--train-iters": 6, "--save-interval": 3}
DELAYED = {"--fp8-format": "hybrid", "--fp8-amax-history-len": 4, "--fp8-amax-compute-algo": "max"}
BLOCKWISE = {"--fp8-format": "e4m3", "--fp8-recipe": "blockwise"}
TP2 = {"--tensor-model-parallel-size": 2, "--sequence-parallel": None, "--ffn-hidden-size": 64}
FC1 = "decoder.layers.0.mlp.linear_fc1"


def ran(tmp_path, name, *changes, world=1, load=None, step=3):
    resume = {} if load is None else {"--load": tmp_path / load, "--ckpt-step": step}
    done = run(flags(MODEL, *changes, resume, {"--save": tmp_path / name}), tmp_path / f"log-{name}", world)
    assert done.codes == [0] * world, done.text
    return done


def table(stdout, row):
    """(asked, in effect and why) of a row of the start-up table."""
    (found,) = [line for line in stdout.splitlines() if line.startswith(f"{row}  ")]
    return found.removeprefix(row).split(maxsplit=1)


def assert_same_end(tmp_path, one, other):
    (tensors, state), (others, other_state) = (checkpoint(tmp_path / name / "iter_0000006") for name in (one, other))
    assert tensors.keys() == others.keys() and [n for n in tensors if not torch.equal(tensors[n], others[n])] == []
    assert (state["fp8"], state["optimizer"]) == (other_state["fp8"], other_state["optimizer"])
    return tensors, state


def test_stopped_and_resumed_with_delayed_scales(tmp_path):
    straight = ran(tmp_path, "straight", DELAYED)
    assert table(straight.stdout[0], "FP8 scales")[0] == "max"
    assert "emulated in fp32: 2 of 2 layers, not the head" in " ".join(table(straight.stdout[0], "FP8 products"))
    resumed = ran(tmp_path, "resumed", DELAYED, load="straight")
    assert {n: figures(straight.stdout[0])[n] for n in (4, 5, 6)} == figures(resumed.stdout[0])
    tensors, state = assert_same_end(tmp_path, "straight", "resumed")
    assert tensors[f"fp8/{FC1}"].shape == (3, 4) and (tensors[f"fp8/{FC1}"] > 0).all()
    assert len(state["fp8"]["layers"]) == 8 and state["fp8"]["length"] == 4
    assert "not in FP8" not in resumed.text


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [DELAYED, BLOCKWISE], ids=["delayed", "blockwise"])
def test_stopped_and_resumed_with_tensor_parallelism(tmp_path, recipe):
    ran(tmp_path, "straight", recipe, TP2, world=2)
    ran(tmp_path, "resumed", recipe, TP2, world=2, load="straight")
    assert_same_end(tmp_path, "straight", "resumed")


@pytest.mark.slow
def test_histories_go_to_another_layout(tmp_path):
    straight = ran(tmp_path, "straight", DELAYED, TP2, world=2)
    stages = {"--pipeline-model-parallel-size": 2, "--pipeline-schedule": "zb-h1", "--ffn-hidden-size": 64}
    resumed = ran(tmp_path, "pp", DELAYED, stages, world=2, load="straight")
    assert "not in FP8" not in resumed.text
    whole, part = lines(straight.stdout[0]), lines(resumed.stdout[0])
    assert [x["lm loss"] for x in part] == pytest.approx([x["lm loss"] for x in whole[3:]], rel=1e-3)  # bf16
    (tensors, _), (others, _) = (checkpoint(tmp_path / name / "iter_0000006") for name in ("straight", "pp"))
    histories = [name for name in tensors if name.startswith("fp8/")]
    assert len(histories) == 8
    for name in histories:
        assert torch.equal(others[name][:, 3], tensors[name][:, 3]), "the three first of six steps are the same ones"


def test_fp8_is_turned_on_and_off_between_runs(tmp_path):
    ran(tmp_path, "bf16")
    started = ran(tmp_path, "fp8", DELAYED, {"--save-interval": 2}, load="bf16")
    said = "holds no largest values of 8 FP8 layers (decoder.layers.0.self_attention.linear_qkv ...)"
    assert said in started.text
    # Its first step measures, and so is that of bf16; its second one is not.
    before, after = figures(ran(tmp_path, "again", load="bf16").stdout[0]), figures(started.stdout[0])
    assert before[4] == after[4] and before[6] != after[6]
    stopped = ran(tmp_path, "off", BLOCKWISE, load="fp8", step=4)
    assert "holds largest values of FP8 layers, which this run has no use for" in stopped.text
    _, state = checkpoint(tmp_path / "off" / "iter_0000006")
    assert state["fp8"] is None


@pytest.mark.slow
def test_adapters_on_a_base_in_fp8(tmp_path):
    """Adapters are in bf16. The gradient of the first layer's output reaches nobody but them, and the layer is not
    new."""
    ran(tmp_path, "base")
    lora = {"--lora-rank": 4, "--pretrained-checkpoint": tmp_path / "base"}
    again = {"--kaimm-recompute-norm": None, "--kaimm-recompute-mlp-activation-func": None}
    straight = ran(tmp_path, "straight", DELAYED, lora)
    assert figures(straight.stdout[0]) == figures(ran(tmp_path, "gemm-last", DELAYED, lora, again).stdout[0])
    resumed = ran(tmp_path, "resumed", DELAYED, {"--lora-rank": 4}, load="straight")
    assert "not in FP8" not in resumed.text
    tensors, _ = assert_same_end(tmp_path, "straight", "resumed")
    assert any("lora" in name for name in tensors)
