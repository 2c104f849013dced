"""Megatron-LM's checkpoints of models with gated delta nets and gates on attention, as Qwen3-Next's and Qwen3.5's."""

import pytest
import torch

from megatron.base.box import Box
from megatron.base.errors import CheckpointError, ConfigError
from megatron.core.models.mcore.arguments import arguments_of, model_of
from megatron.core.models.mcore.buckets import in_module_order
from megatron.core.models.mcore.classic import FILE
from megatron.core.models.mcore.source import MCoreSource
from megatron.core.models.mcore.training_state import TrainingState
from megatron.spec.decoder import decoder_spec
from tests.unit.models.builds import DELTA, LLAMA
from tests.unit.models.megatron_moe_files import WithExperts
from tests.unit.models.test_mcore import assert_same
from tests.unit.models.test_mcore_experts import Trained
from tests.unit.models.test_mcore_latents import write_classic, write_dist
from tests.unit.models.test_mcore_writers import load, load_dist

PLAIN = {**DELTA, "num_layers": 4, "linear_attention_freq": "[1,1,0,1]", "apply_layernorm_1p": False}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}
MODELS = {
    "delta nets": PLAIN,
    "one value head for each key head": {**PLAIN, "linear_num_value_heads": 4, "attention_output_gate": False},
    "gates alone": {**LLAMA, "num_layers": 4, "attention_output_gate": True, "add_qkv_bias": True},
    "experts": {**PLAIN, **EXPERTS, "moe_shared_expert_gate": True},
}
PARTS = {"query": 6, "key": 6, "value": 20, "z": 20, "beta": 2, "alpha": 2}  # rows of a key head in DELTA
LOCAL, ENGINE = True, False


def in_parts(tensor):
    """The rows of all heads of each part, from ours of each head. in_proj [4, 56, h] or conv1d [4, 32, 1, 4]."""
    names = list(PARTS)[: 6 if tensor.shape[1] == 56 else 3]
    pieces = tensor.split([PARTS[name] for name in names], dim=1)
    return {name: piece.flatten(0, 1) for name, piece in zip(names, pieces, strict=True)}


def gated(tensor):
    """Queries, then gates, then key and value of each group; 8 heads of 4 channels in 4 groups."""
    heads = tensor.unflatten(1, (6, 4))
    return heads[:, [0, 2, 1, 3, 4, 5]].flatten(0, 2)


class TestFiles:
    """The tensors that Megatron-LM's modules would have, by plain slicing."""

    def test_torch_dist(self, tmp_path):
        source = WithExperts(PLAIN)
        tensors, objects = load_dist(write_dist(source, tmp_path, local=ENGINE))
        for layer in (0, 1, 3):
            theirs = f"decoder.layers.{layer}.self_attention."
            for module in ("in_proj", "conv1d"):
                expected = in_parts(source.tensors[f"{theirs}{module}.weight"])
                for name, tensor in expected.items():
                    assert torch.equal(tensors[f"{theirs}{module}.weight.{name}"], tensor), name
            for name in ("A_log", "dt_bias"):
                assert torch.equal(tensors[theirs + name], source.tensors[f"{theirs}decay.{name}"])
            norm = source.tensors[f"decoder.layers.{layer}.input_layernorm.weight"]
            assert torch.equal(tensors[f"{theirs}in_proj.layer_norm_weight"], norm)
            assert not any(name.startswith((f"{theirs}linear_qkv", f"{theirs}core_attention")) for name in tensors)
            states = [name for name in objects if name.startswith(theirs)]
            assert states == [f"{theirs}{name}._extra_state/shard_0_1" for name in ("in_proj", "out_norm", "out_proj")]
        qkv = "decoder.layers.2.self_attention.linear_qkv.weight"
        assert torch.equal(tensors[qkv], gated(source.tensors[qkv]))
        assert "decoder.layers.2.self_attention.core_attention._extra_state/shard_0_1" in objects
        assert "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight" in tensors

    def test_classic(self, tmp_path):
        """Each rank of tp has its heads in the same order; the first stage has the first two layers."""
        source = WithExperts(PLAIN)
        path = write_classic(source, tmp_path, local=ENGINE)
        for rank in range(2):
            first, second = (load(path / f"mp_rank_{rank:02d}_{stage:03d}" / FILE)["model"] for stage in range(2))
            for module in ("in_proj", "conv1d"):
                name = f"decoder.layers.1.self_attention.{module}.weight"
                expected = torch.cat(list(in_parts(source.tensors[name].chunk(2)[rank]).values()))
                assert torch.equal(first[name], expected)
            out = "decoder.layers.1.self_attention.out_proj.weight"
            assert torch.equal(first[out], source.tensors[out].chunk(2, dim=1)[rank])
            mine = source.tensors["decoder.layers.3.self_attention.decay.A_log"].chunk(2)[rank]
            assert torch.equal(second["decoder.layers.1.self_attention.A_log"], mine)
            qkv = source.tensors["decoder.layers.2.self_attention.linear_qkv.weight"].chunk(2)[rank]
            assert torch.equal(second["decoder.layers.0.self_attention.linear_qkv.weight"], gated(qkv))

    def test_order_of_modules(self, tmp_path):
        """That of torch's state: the parameters of the delta net itself stand before those of its modules."""
        path = write_classic(WithExperts(PLAIN), tmp_path, local=ENGINE, tp=1)
        names = load(path / "mp_rank_00_000" / FILE)["model"]
        layer = [name.removeprefix("decoder.layers.0.") for name in names if name.startswith("decoder.layers.0.")]
        inside = ("dt_bias", "A_log", "in_proj.layer_norm_weight")
        inside += ("in_proj.weight", "conv1d.weight", "out_norm.weight", "out_proj.weight")
        mlp = [f"mlp.{name}" for name in ("linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight")]
        assert layer == [*(f"self_attention.{name}" for name in inside), *mlp]
        assert in_module_order(sorted(layer), local=False) == layer


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path, name):
    source = WithExperts(MODELS[name])
    cut = {"tp": 1, "ep": 2} if source.model.num_experts else {}
    assert_same(source, MCoreSource(write_classic(source, tmp_path / "classic", local=ENGINE, **cut), None, None))
    loaded = MCoreSource(write_dist(source, tmp_path / "dist", local=ENGINE), None, None)
    assert decoder_spec(loaded.model) == decoder_spec(source.model)
    assert_same(source, loaded)


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_the_training_goes_there_and_back(tmp_path, form):
    """With masters and moments; the norms behind the states are stored minus one, as all others are."""
    source = WithExperts({**PLAIN, "apply_layernorm_1p": True})
    state = Trained(source)
    norms = [name for name in source.tensors if name.endswith("out_norm.weight")]
    assert len(norms) == 3
    for name in norms:  # numbers of few bits, of which nothing is lost
        state.by_key["master"][name] = torch.arange(10) / 8 + 0.5
    state.round_masters()
    more = {"dtype": torch.bfloat16, "training": state.training()}
    if form == "torch":
        path = write_classic(source, tmp_path, local=ENGINE, **more)
        tensors = load(path / "mp_rank_01_000" / FILE)["model"]
    else:
        tensors, _ = load_dist(write_dist(source, tmp_path, local=ENGINE, **more))
        master = tensors[f"optimizer.state.param.{norms[0]}"]
        assert torch.equal(master, torch.arange(10) / 8 - 0.5)
        moment = tensors["optimizer.state.exp_avg.decoder.layers.0.self_attention.in_proj.weight.beta"]
        of_heads = state.by_key["exp_avg"]["decoder.layers.0.self_attention.in_proj.weight"]
        assert torch.equal(moment, in_parts(of_heads)["beta"])
    assert torch.equal(tensors[norms[0]], (torch.arange(10) / 8 - 0.5).bfloat16())
    found = MCoreSource(tmp_path, None, None)
    state.assert_same(found)
    weight = found.read(norms[0], Box((2,), (4,)), torch.bfloat16)
    assert torch.equal(weight, source.tensors[norms[0]][2:6])
    plain = "decoder.layers.2.input_layernorm.weight"
    assert torch.equal(found.read(plain, Box((0,), (32,)), torch.bfloat16), source.tensors[plain])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant is 'dsa'"),
        ({"experimental_attention_variant": "gdn2"}, "experimental_attention_variant is 'gdn2'"),
        ({"linear_attention_freq": None}, "linear_attention_freq is None"),
        ({"linear_attention_freq": [1, 0]}, "linear-attention-freq .1, 0. is for 2 layers, but --num-layers is 4"),
        ({"linear_attention_freq": [1, 1, 1, 1]}, "only layers of one kind"),
        ({"linear_num_value_heads": 6}, "6 value heads of a delta net cannot share 4 key heads"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
        ({"swiglu": False}, "swiglu is False beside delta nets"),
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm' beside delta nets"),
    ],
)
def test_arguments_that_are_refused(changes, message):
    arguments = arguments_of(WithExperts(PLAIN).model)
    assert model_of(arguments, "file").delta_layers == (True, True, False, True)
    with pytest.raises(CheckpointError, match=message):
        model_of({**arguments, **changes}, "file")


def test_layers_that_megatron_lm_does_not_build(tmp_path):
    source = WithExperts(PLAIN)
    for write in (write_classic, write_dist):
        with pytest.raises(ConfigError, match="--saver-transformer-impl local: Megatron-LM has gated delta nets"):
            write(source, tmp_path, local=LOCAL)
    with pytest.raises(ConfigError, match="3 tensor-parallel ranks cannot share the 4 heads of --linear-num-key-heads"):
        write_classic(source, tmp_path, local=ENGINE, tp=3, training=TrainingState())
    assert not list(tmp_path.iterdir())
