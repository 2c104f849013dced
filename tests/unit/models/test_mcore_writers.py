"""What is written for Megatron-LM to go on with: the tensors of its own checkpoint of the same model, and their
elements.

torch_dist_of_megatron_lm.json: names, shapes and dtypes of a checkpoint that Megatron-LM d98e8a6 saved of the model
`TINY` in bf16, with tp 2, pp 2, --use-distributed-optimizer and --dist-ckpt-optim-fully-reshardable, without its random
states.
"""

import argparse
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.models.mcore.classic import FILE
from megatron.core.models.mcore.dist_writer import write_torch_dist
from megatron.core.models.mcore.training_state import Adam, TrainingState
from megatron.core.models.mcore.writer import write_mcore
from tests.unit.models.test_mcore import MODELS, FromModel, as_megatron_cuts_it

SAVED = json.loads((Path(__file__).parent / "torch_dist_of_megatron_lm.json").read_text(encoding="ascii"))
TINY = {
    **MODELS["llama"],
    **{"hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 128},
    **{"vocab_size": 128, "make_vocab_size_divisible_by": 32},
}
SCHEDULER = {"max_lr": 1e-3, "min_lr": 1e-4, "start_wd": 0.1, "end_wd": 0.1, "num_steps": 56}
KEYS = ("master", "exp_avg", "exp_avg_sq")


class State:
    """Random state of the weights of a source, on which `adam` and plain slicing agree."""

    def __init__(self, source):
        generator = torch.Generator().manual_seed(3)
        self.by_key = {}
        for key in KEYS:
            held = FromModel(source.fields)
            for name, tensor in held.tensors.items():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
                if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                    tensor[source.model.vocab_size :] = 0
            self.by_key[key] = held

    def training(self, loss_scale=None):
        def read(name, key, box):
            return self.by_key[key].read(name, box, torch.float32)

        adam = Adam(updates=7, betas=(0.9, 0.95), eps=1e-8, loss_scale=loss_scale, read=read)
        arguments = {"consumed_train_samples": 56, "global_batch_size": 8}
        return TrainingState(iteration=7, arguments=arguments, scheduler=SCHEDULER, adam=adam)


def load_dist(folder):
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in metadata.items() if hasattr(e, "size")
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors, sorted(name for name, entry in metadata.items() if not hasattr(entry, "size"))


def load(file):
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(file, weights_only=True)


def stacked(source):
    """Name -> tensor as torch_dist has it, by plain slicing."""
    whole = as_megatron_cuts_it(source, 1, [[source.model.num_layers]], True)[0, 0]["model"]
    found = {}
    for name, tensor in whole.items():
        parts = name.split(".")
        if parts[1] == "layers":
            found.setdefault(".".join((*parts[:2], *parts[3:])), []).append(tensor)
        else:
            found[name] = tensor
    return {name: torch.stack(held) if isinstance(held, list) else held for name, held in found.items()}


def test_torch_dist_has_the_names_and_shapes_of_megatron_lms_own(tmp_path):
    source = FromModel(TINY)
    write_torch_dist(source, tmp_path, tp=2, local=True, dtype=torch.bfloat16, training=State(source).training())
    tensors, objects = load_dist(tmp_path / "iter_0000007")
    found = {n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in tensors.items()}
    assert found == SAVED["tensors"]
    assert objects == SAVED["objects"]


@pytest.mark.parametrize("name", MODELS)
def test_torch_dist_holds_the_elements(tmp_path, name):
    source = FromModel(MODELS[name])
    state = State(source)
    path = write_torch_dist(
        source, tmp_path, tp=1, local=False, dtype=torch.float32, training=state.training({"scale": torch.ones(1)})
    )
    assert path.name == "iter_0000007" and (tmp_path / TRACKER).read_text() == "7"
    tensors, objects = load_dist(path)
    parts = {"": source} | {
        f"optimizer.state.{theirs}.": state.by_key[key] for key, theirs in zip(KEYS, ("param", "exp_avg", "exp_avg_sq"))
    }
    expected = {prefix + n: tensor for prefix, held in parts.items() for n, tensor in stacked(held).items()}
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensors[key], tensor), key
    assert "decoder.layers.self_attention.core_attention._extra_state/shard_3_4" in objects
    common = load(path / "common.pt")
    assert common["iteration"] == 7 and common["opt_param_scheduler"] == SCHEDULER
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [(g["wd_mult"], g["weight_decay"], g["step"]) for g in groups] == [(1.0, 0.1, 7), (0.0, 0.0, 7)]
    assert common["optimizer"]["grad_scaler"] == {"scale": torch.ones(1)}
    arguments = common["args"]
    assert (arguments.consumed_train_samples, arguments.num_layers, arguments.no_save_optim) == (56, 4, False)
    assert json.loads((path / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_torch_dist_without_a_training_is_a_release(tmp_path):
    source = FromModel(MODELS["llama"])
    path = write_torch_dist(source, tmp_path, tp=1, local=False, dtype=torch.bfloat16, training=TrainingState())
    assert path.name == "release" and (tmp_path / TRACKER).read_text() == "release"
    tensors, _ = load_dist(path)
    assert not any(name.startswith("optimizer") for name in tensors)
    common = load(path / "common.pt")
    assert "optimizer" not in common and common["args"].no_save_optim and common["args"].no_save_rng


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_classic_optimizer_lists_its_parameters_in_megatron_lms_order(tmp_path, name, fused):
    """Matrices in the order of the modules, then norms and biases: torch numbers the parameters of its groups so."""
    source = FromModel(MODELS[name])
    state = State(source)
    path = write_mcore(source, tmp_path, tp=2, pp=2, fused_norms=fused, dtype=torch.bfloat16, training=state.training())
    cut = {key: as_megatron_cuts_it(held, 2, [[2], [2]], fused) for key, held in state.by_key.items()}
    for rank, stage in cut["master"]:
        found = load(path / f"mp_rank_{rank:02d}_{stage:03d}" / FILE)
        names = list(found["model"])
        assert set(names) == cut["master"][rank, stage]["model"].keys()
        assert names == in_module_order(names, fused)
        matrices = [n for n in names if found["model"][n].ndim > 1]
        order = [*matrices, *(n for n in names if n not in matrices)]
        optimizer = found["optimizer"]["optimizer"]
        groups = optimizer["param_groups"]
        assert [len(g["params"]) for g in groups] == [len(matrices), len(names) - len(matrices)]
        assert [n for g in groups for n in g["params"]] == list(optimizer["state"]) == list(range(len(names)))
        masters = [tensor for group in found["optimizer"]["fp32_from_fp16_params"] for tensor in group]
        for number, key in enumerate(order):
            held = optimizer["state"][number]
            assert torch.equal(masters[number], cut["master"][rank, stage]["model"][key]), key
            for moment in KEYS[1:]:
                assert torch.equal(held[moment], cut[moment][rank, stage]["model"][key]), key
            assert ("step" in held) is not fused
        if not fused:  # torch counts up each of them
            steps = [held["step"] for held in optimizer["state"].values()]
            assert all(step == 7 for step in steps) and len({step.data_ptr() for step in steps}) == len(steps)


def in_module_order(names, fused):
    """Those that are there, as the state_dict of Megatron-LM's own GPTModel lists them."""
    norms = ("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_")
    attention = [f"self_attention.{module}." for module in ("linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")]
    attention = [attention[0], norms[0], *attention[1:]] if fused else ["input_layernorm.", *attention]
    modules = [*attention, norms[1] if fused else "pre_mlp_layernorm.", "mlp.linear_fc1.", "mlp.linear_fc2."]
    order = [f"embedding.{kind}_embeddings." for kind in ("word", "position")]
    order += [f"decoder.layers.{layer}.{module}" for layer in range(2) for module in modules]
    order += ["decoder.final_layernorm.", "output_layer."]
    return [name for name in (module + kind for module in order for kind in ("weight", "bias")) if name in names]


def test_in_fp32_the_weights_are_the_masters(tmp_path):
    source = FromModel(MODELS["llama"])
    path = write_mcore(
        source, tmp_path, tp=1, pp=1, fused_norms=True, dtype=torch.float32, training=State(source).training()
    )
    assert load(path / "mp_rank_00" / FILE)["optimizer"].keys() == {"state", "param_groups"}


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_a_failure_leaves_nothing_and_what_is_there_is_kept(tmp_path, form):
    source = FromModel(MODELS["llama"])
    training = State(source).training()

    def write(training):
        if form == "torch":
            write_mcore(source, tmp_path, tp=1, pp=1, fused_norms=True, dtype=torch.float32, training=training)
        else:
            write_torch_dist(source, tmp_path, tp=1, local=False, dtype=torch.float32, training=training)

    def fail(name, key, box):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write(TrainingState(iteration=7, scheduler=SCHEDULER, adam=Adam(7, (0.9, 0.95), 1e-8, None, fail)))
    assert list(tmp_path.iterdir()) == []
    write(training)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="iter_0000007 exists; give another folder"):
        write(training)
    assert sorted(tmp_path.rglob("*")) == before
