"""Megatron-LM's checkpoints of models with latent attention and predictions of further tokens, as DeepSeek-V3's.

latents_of_megatron_lm.json: what Megatron-LM d98e8a6 saved of the models `V3`, under ep 2 x pp 2, and `DENSE`, under tp
2 x pp 2, with its own layers: names and shapes of torch_dist, and of the weights in every classic file, in its order.
"""

import json
import random
import re
from pathlib import Path

import pytest
import torch

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.data import TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.conversion.convert import to_checkpoint
from megatron.core.dist_checkpointing.folders import find
from megatron.core.models.mcore.arguments import arguments_of, flags_beside, model_of, refuse_what_has_no_argument
from megatron.core.models.mcore.buckets import in_module_order
from megatron.core.models.mcore.classic import FILE
from megatron.core.models.mcore.dist_writer import write_torch_dist
from megatron.core.models.mcore.source import MCoreSource
from megatron.core.models.mcore.training_state import TrainingState
from megatron.core.models.mcore.writer import write_mcore
from megatron.spec.decoder import decoder_spec
from tests.unit.models.builds import LATENT, LATENT_LITE, LATENT_PLAIN, LLAMA
from tests.unit.models.hf_models import edit_json
from tests.unit.models.megatron_arguments import megatron_arguments
from tests.unit.models.megatron_moe_files import WithExperts
from tests.unit.models.test_hf_predictions import assert_same_files, with_predictions
from tests.unit.models.test_mcore import assert_same
from tests.unit.models.test_mcore_experts import Trained, tensor_bytes
from tests.unit.models.test_mcore_writers import load, load_dist
from tools.checkpoint import convert

SAVED = json.loads((Path(__file__).parent / "latents_of_megatron_lm.json").read_text(encoding="ascii"))
LATEST = "d98e8a6"
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_layer_freq": "[0,1,1,1]",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
}
# The models of tests/megatron/continue_runs.py.
DENSE = {
    **{name: value for name, value in LATENT.items() if name != "latent_norm_epsilon"},
    **{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "mtp_num_layers": 1},
    **{"q_lora_rank": 48, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 24},
    **{"position_embedding_type": "yarn", "rope_scaling_factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.6},
    **{"rope_scaling_original_max_position_embeddings": 4096, "make_vocab_size_divisible_by": 32},
    "vocab_size": 128,
}
V3 = {
    **{**DENSE, "mtp_num_layers": 2, **EXPERTS},
    **{"moe_ffn_hidden_size": 96, "moe_shared_expert_intermediate_size": 64},
}
# Small ones, with all layers alike, and without latents of queries or norms of latents.
SMALL = {**{name: value for name, value in LATENT.items() if name != "latent_norm_epsilon"}, "num_layers": 4}
MODELS = {
    "like V3": {**SMALL, **EXPERTS, "mtp_num_layers": 2, "moe_ffn_hidden_size": 24},
    "experts everywhere": {**SMALL, **EXPERTS, "moe_layer_freq": None, "mtp_num_layers": 1},
    "like V2-Lite": {**LATENT_LITE, **EXPERTS, "num_layers": 4},
    "no norms": {**LATENT_PLAIN, "num_layers": 4, "mtp_num_layers": 1},
    "tied": {**SMALL, "mtp_num_layers": 1, "untie_embeddings_and_output_weights": False},
    "grouped heads": {**LLAMA, "num_layers": 4, "qk_layernorm": True, "mtp_num_layers": 2},
}


def write_classic(source, root, *, local, tp=2, pp=2, ep=1, **more):
    options = {"dtype": torch.float32, "training": TrainingState(), **more}
    return write_mcore(source, root, tp=tp, pp=pp, ep=ep, fused_norms=not local, **options)


def write_dist(source, root, *, local, ep=1, **more):
    options = {"dtype": torch.float32, "training": TrainingState(), **more}
    return write_torch_dist(source, root, tp=1, ep=ep, local=local, **options)


def in_rows(tensor, name):
    """One of our weights as a matrix or vector of theirs."""
    if ".experts." in name:
        return tensor.flatten(1, 2) if "linear_fc1" in name else tensor
    return tensor.flatten(0, -2) if tensor.dim() > 2 else tensor


def shard(tensor, name, shape, rank):
    """What is cut from a whole weight for a rank of tp: the dim in which `shape` is smaller; of gate and up each."""
    dim = next((d for d, (n, part) in enumerate(zip(tensor.shape, shape, strict=True)) if n != part), None)
    if dim is None:
        return tensor
    count = tensor.shape[dim] // shape[dim]
    if "linear_fc1" in name:
        return torch.cat([half.chunk(count)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(count, dim)[rank]


def ours_of(name, first, ep_rank, experts):
    """Our name of a weight in a classic file, and the number of its expert. first: the stage's first layer."""
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")
    name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda number: str(int(number[0]) + first), name)
    name = name.replace("linear_q_up_proj.layer_norm_", "q_layernorm.")
    name = name.replace("linear_kv_up_proj.layer_norm_", "kv_layernorm.")
    name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    if match := re.fullmatch(r"(.*\.experts\.)(?:local_experts\.(\d+)\.)?(linear_fc\d\.weight)(\d*)", name):
        return match[1] + match[3], int(match[2] or match[4]) + ep_rank * experts
    return name, None


def check_classic(source, path, *, ep=1):
    """Asserts that all files hold the shards of the source's weights, cut here by their shapes alone."""
    names, count = set(), source.model.num_experts or 0
    for folder in sorted(path.iterdir()):
        tp_rank, stage, *others = map(int, re.findall(r"\d+", folder.name))
        for name, held in load(folder / FILE)["model"].items():
            ours, expert = ours_of(name, 2 * stage, sum(others), count // ep)
            if ours == "output_layer.weight" and ours not in source.tensors:
                ours = "embedding.word_embeddings.weight"
            tensor = in_rows(source.tensors[ours], ours)
            tensor = tensor if expert is None else tensor[expert]
            if not name.endswith(("word_embeddings.weight", "output_layer.weight")):
                assert torch.equal(held, shard(tensor, name, held.shape, tp_rank)), (folder.name, name)
            names.add(ours)
    assert names == source.tensors.keys()


class TestMegatronLMsOwn:
    """Names, shapes and order are those that Megatron-LM saved."""

    @pytest.mark.parametrize(("name", "fields"), [("like V3", V3), ("latents under tp", DENSE)])
    def test_torch_dist(self, tmp_path, name, fields):
        tensors, objects = load_dist(write_dist(WithExperts(fields), tmp_path, local=True))
        assert {key: list(tensor.shape) for key, tensor in tensors.items()} == SAVED[name]["torch_dist"]
        assert objects == SAVED[name]["objects"]

    @pytest.mark.parametrize(
        ("name", "fields", "cut"), [("like V3", V3, {"tp": 1, "ep": 2}), ("latents under tp", DENSE, {})]
    )
    def test_classic(self, tmp_path, name, fields, cut):
        source = WithExperts(fields)
        path = write_classic(source, tmp_path, local=True, **cut)
        saved = SAVED[name]["classic"]
        assert {folder.name for folder in path.iterdir()} == saved.keys()
        for folder, expected in saved.items():
            weights = load(path / folder / FILE)["model"]
            assert [[key, list(tensor.shape)] for key, tensor in weights.items()] == expected, folder
        check_classic(source, path, ep=cut.get("ep", 1))

    @pytest.mark.parametrize("name", ["like V3", "latents under tp"])
    def test_buckets_have_the_order_of_the_modules(self, name):
        """The parameters of a layer, as the classic file of the last stage lists them, are sorted so again."""
        names = [key for key, _ in list(SAVED[name]["classic"].values())[-1] if not key.endswith("expert_bias")]
        for beginning in ("decoder.layers.1.", "mtp.layers.0."):
            inside = [key.removeprefix(beginning) for key in names if key.startswith(beginning)]
            inside = [key.replace("mtp_model_layer.", "transformer_layer.") for key in inside]
            shuffled = random.Random(1).sample(inside, len(inside))
            assert len(inside) > 10 and in_module_order(shuffled, local=True) == inside


@pytest.mark.parametrize("local", [True, False], ids=["local", "Transformer Engine"])
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(tmp_path, name, local):
    source = WithExperts(MODELS[name])
    cut = {"tp": 1, "ep": 2} if source.model.num_experts else {}
    path = write_classic(source, tmp_path / "classic", local=local, **cut)
    check_classic(source, path, ep=cut.get("ep", 1))
    assert_same(source, MCoreSource(path, None, None))
    path = write_dist(source, tmp_path / "dist", local=local)
    loaded = MCoreSource(path, None, None)
    assert decoder_spec(loaded.model) == decoder_spec(source.model)
    assert_same(source, loaded)


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_the_training_goes_there_and_back(tmp_path, form):
    """Masters and moments of all parameters, the experts of predictions in the optimizer of experts."""
    source = WithExperts(MODELS["like V3"])
    state = Trained(source)
    state.round_masters()
    more = {"dtype": torch.bfloat16, "training": state.training(), "ep": 2}
    if form == "torch":
        path = write_classic(source, tmp_path, local=True, tp=1, **more)
        optimizers = load(path / "mp_rank_00_001_000" / FILE)["optimizer"]
        # Two layers and two predictions, with two experts of two matrices on the rank.
        assert len(optimizers[1]["optimizer"]["state"]) == 16
    else:
        write_dist(source, tmp_path, local=True, **more)
    state.assert_same(MCoreSource(tmp_path, None, None))


class TestTransformerEngine:
    """Its layers have norms inside the projections up and the dense MLP, and projections down that are not cut."""

    FUSED = ("linear_q_up_proj.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight")

    def test_norms(self, tmp_path):
        source = WithExperts(MODELS["like V3"])
        tensors, objects = load_dist(write_dist(source, tmp_path, local=False))
        for layer in ("decoder.layers.0.", "decoder.layers.3.", "mtp.layers.1.transformer_layer."):
            assert {f"{layer}self_attention.{name}" for name in self.FUSED} <= tensors.keys()
            assert f"{layer}input_layernorm.weight" in tensors
            assert f"{layer}input_layernorm._extra_state/shard_0_1" in objects
            assert f"{layer}self_attention.linear_kv_down_proj._extra_state/shard_0_1" in objects
        assert not any("q_layernorm" in name or "kv_layernorm" in name for name in [*tensors, *objects])
        assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in tensors
        assert "decoder.layers.0.pre_mlp_layernorm._extra_state/shard_0_1" not in objects
        assert "decoder.layers.1.pre_mlp_layernorm.weight" in tensors
        for norm in ("enorm", "hnorm", "final_layernorm"):
            assert f"mtp.layers.0.{norm}._extra_state/shard_0_1" in objects

    def test_a_norm_stands_before_its_projection(self, tmp_path):
        path = write_classic(WithExperts(MODELS["tied"]), tmp_path, local=False)
        names = list(load(path / "mp_rank_01_001" / FILE)["model"])
        layer = [name.removeprefix("decoder.layers.1.") for name in names if name.startswith("decoder.layers.1.")]
        attention = [
            "linear_proj",
            "linear_q_down_proj",
            "linear_q_up_proj",
            "linear_kv_down_proj",
            "linear_kv_up_proj",
        ]
        expected = ["input_layernorm", *(f"self_attention.{module}" for module in attention)]
        expected = [f"{module}.weight" for module in (*expected, "mlp.linear_fc1", "mlp.linear_fc2")]
        for name in (*(f"self_attention.{name}" for name in self.FUSED), "mlp.linear_fc1.layer_norm_weight"):
            expected.insert(expected.index(name.replace("layer_norm_weight", "weight")), name)
        assert layer == expected == in_module_order(sorted(layer), local=False)
        assert names[0] == "embedding.word_embeddings.weight" and names[-1] == "output_layer.weight"

    @pytest.mark.parametrize("local", [True, False])
    def test_projections_down_are_read_cut_or_whole(self, tmp_path, local):
        """Until core 0.13 Transformer Engine's layers cut them, too."""
        source = WithExperts(MODELS["tied"])
        path = write_classic(source, tmp_path, local=local)
        down = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
        assert load(path / "mp_rank_00_000" / FILE)["model"][down].shape[0] == (7 if local else 14)
        for rank in range(0 if local else 2):
            for stage in range(2):
                file = path / f"mp_rank_{rank:02d}_{stage:03d}" / FILE
                content = load(file)
                for name, tensor in content["model"].items():
                    if "_down_proj" in name:
                        content["model"][name] = tensor.chunk(2)[rank].clone()
                torch.save(content, file)
        assert_same(source, MCoreSource(tmp_path, None, None))

    def test_fused_projections_down_are_refused(self, tmp_path):
        path = write_classic(WithExperts(MODELS["tied"]), tmp_path, local=False, tp=1, pp=1)
        content = load(path / "mp_rank_00" / FILE)
        content["model"]["decoder.layers.0.self_attention.linear_qkv_down_proj.weight"] = torch.ones(34, 32)
        torch.save(content, path / "mp_rank_00" / FILE)
        with pytest.raises(CheckpointError, match="is of --mla-down-proj-fusion, which is not read in this format"):
            MCoreSource(tmp_path, None, None)


def change_classic(path, change):
    for file in path.glob(f"*/{FILE}"):
        content = load(file)
        content["model"] = change(file.parent.name, content["model"])
        torch.save(content, file)


def test_the_older_name_of_the_layer_of_a_prediction_is_read(tmp_path):
    source = WithExperts(MODELS["grouped heads"])
    path = write_classic(source, tmp_path, local=False)
    change_classic(
        path, lambda _, held: {n.replace("mtp_model_layer", "transformer_layer"): t for n, t in held.items()}
    )
    assert_same(source, MCoreSource(tmp_path, None, None))


@pytest.mark.parametrize(
    "name", ["embedding.word_embeddings.weight", "mtp.layers.1.eh_proj.weight", "mtp.layers.0.enorm.weight"]
)
def test_what_the_last_stage_lacks_is_named(tmp_path, name):
    path = write_classic(WithExperts(MODELS["grouped heads"]), tmp_path, local=True)

    def change(folder, held):
        return {n: tensor for n, tensor in held.items() if folder != "mp_rank_01_001" or n != name}

    change_classic(path, change)
    with pytest.raises(CheckpointError, match=f"mp_rank_01_001: model holds no tensor {name}, which its arguments"):
        MCoreSource(tmp_path, None, None)


@pytest.mark.parametrize(
    ("fields", "options", "problem"),
    [
        ({}, {"tp": 8, "local": False}, None),
        ({}, {"tp": 4, "local": True}, "4 tensor-parallel ranks cannot share the 14 rows of --kv-lora-rank"),
        (
            {"kv_lora_rank": 14},
            {"tp": 8, "local": True},
            "8 tensor-parallel ranks cannot share the 20 rows of --q-lora",
        ),
        (
            {"hidden_size": 36},
            {"tp": 8, "local": False},
            "8 tensor-parallel ranks cannot share the 36 rows of --hidden",
        ),
    ],
)
def test_rows_that_ranks_cannot_share_are_refused(tmp_path, fields, options, problem):
    source = WithExperts({**MODELS["tied"], **fields})
    if problem is None:
        write_classic(source, tmp_path, pp=1, **options)
        return
    with pytest.raises(ConfigError, match=problem):
        write_classic(source, tmp_path, pp=1, **options)
    assert not list(tmp_path.iterdir())


def read(version=LATEST, **changes):
    latents = {"multi_latent_attention": True, "add_bias_linear": False, "position_embedding_type": "rope"}
    return model_of({**megatron_arguments(version), **latents, **changes}, "file")


class TestArguments:
    def test_sizes(self):
        sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 10}
        model = read(**sizes, kv_channels=77, num_query_groups=1, add_qkv_bias=True, mtp_num_layers=2)
        assert model.multi_latent_attention and {name: getattr(model, name) for name in sizes} == sizes
        assert (model.kv_channels, model.qkv_bias, model.mtp_num_layers) == (None, False, 2)
        assert read(mtp_num_layers=None).mtp_num_layers == 0

    @pytest.mark.parametrize("kind", [None, "yarn", "rope"])
    def test_positions(self, kind):
        """YaRN is the default, and without a scaling factor the plain rotation."""
        assert read(rope_type=kind).position_embedding_type == "rope"
        stretched = read(rope_type=kind, rotary_scaling_factor=40.0, mscale=0.7)
        if kind == "rope":
            assert stretched.position_embedding_type == "rope"
            return
        scaling = stretched.rope_scaling_factor, stretched.rope_scaling_original_max_position_embeddings
        assert stretched.position_embedding_type == "yarn" and scaling == (40.0, 4096)
        assert (stretched.mscale, stretched.mscale_all_dim) == (0.7, 0.0)

    def test_the_original_context_of_older_versions(self):
        """Until core 0.13 it was the longest sequence."""
        model = read("core 0.12", rotary_scaling_factor=40.0, max_position_embeddings=640)
        assert model.rope_scaling_original_max_position_embeddings == 640

    @pytest.mark.parametrize(
        ("version", "changes", "named"),
        [
            (LATEST, {"position_embedding_type": "learned_absolute"}, "position_embedding_type is 'learned_absolute'"),
            (LATEST, {"rope_type": "mrope"}, "rope_type is 'mrope'"),
            (LATEST, {"no_rope_freq": [0, 1]}, "no_rope_freq is"),
            (LATEST, {"rotary_interleaved": True}, "rotary_interleaved is True"),
            (LATEST, {"group_query_attention": True}, "group_query_attention is True"),
            (LATEST, {"add_bias_linear": True}, "add_bias_linear is True"),
            (LATEST, {"rope_type": "rope", "rotary_percent": 0.5}, "rotary_percent is 0.5"),
            (
                LATEST,
                {"rope_type": "rope", "rotary_scaling_factor": 4.0, "mscale_all_dim": 1.0},
                "mscale_all_dim is 1.0",
            ),
            ("core 0.12", {"rotary_scaling_factor": 4.0, "mscale": 0.7}, "mscale is 0.7"),
        ],
    )
    def test_what_is_not_here_is_named(self, version, changes, named):
        with pytest.raises(CheckpointError, match=f"argument {named}.* beside latent attention, which") as caught:
            read(version, **changes)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("fields", [V3, MODELS["like V2-Lite"], MODELS["no norms"]])
    def test_they_are_written_as_they_are_read(self, fields):
        model = ModelConfig(**fields)
        arguments = {**megatron_arguments(LATEST), **arguments_of(model)}
        decoder, expected = decoder_spec(model_of(arguments, "file")), decoder_spec(model)
        assert decoder.layers == expected.layers and decoder.predictions == expected.predictions
        assert arguments["kv_channels"] == model.v_head_dim and arguments["position_embedding_type"] == "rope"

    def test_flags_beside_those_of_the_file(self):
        flags = " ".join(flags_beside(ModelConfig(**V3)))
        assert "--multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 16" in flags
        assert "--qk-pos-emb-head-dim 8 --v-head-dim 24 --rope-type yarn" in flags
        assert "--rotary-scaling-factor 4.0 --mscale 0.8 --mscale-all-dim 0.6 --mtp-num-layers 2" in flags
        flags = flags_beside(ModelConfig(**MODELS["like V2-Lite"]))
        assert "--q-lora-rank" not in flags and flags[flags.index("--rope-type") + 1] == "rope"

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"latent_norm_epsilon": 1e-6}, "--latent-norm-epsilon 1e-06"),
            (
                {"rope_scaling_original_max_position_embeddings": 8192},
                "--rope-scaling-original-max-position-embeddings",
            ),
            ({"yarn_beta_fast": 1.0}, "--yarn-beta-fast 1.0"),
            ({"yarn_mscale": 1.2}, "--yarn-mscale 1.2"),
            ({"position_embedding_type": "none"}, "--position-embedding-type none"),
            ({"no_rope_freq": "2"}, "--no-rope-freq 2"),
            ({"use_rope_scaling": True}, "--use-rope-scaling"),
            ({"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 2.0}, "--rotary-seq-len"),
        ],
    )
    def test_what_has_no_argument_there_is_named(self, fields, named):
        with pytest.raises(ConfigError, match=f"Megatron-LM has no argument for {named}"):
            refuse_what_has_no_argument(ModelConfig(**{**DENSE, **fields}))

    def test_predictions_with_yarn_of_grouped_heads(self):
        with pytest.raises(ConfigError, match=r"for --mtp-num-layers 2 \(Megatron-LM has none with YaRN\)"):
            refuse_what_has_no_argument(ModelConfig(**{**MODELS["grouped heads"], "position_embedding_type": "yarn"}))


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_hugging_faces_goes_there_and_back_by_the_tool(tmp_path, form):
    with_predictions("deepseek v3", tmp_path / "hf", 2)
    edit_json(tmp_path / "hf" / "config.json", rms_norm_eps=1e-6)
    common = ["--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "there"), "--format", form]
    assert convert.main(["--loader", "hf", "--saver", "mcore", *common]) == 0
    common = ["--load-dir", str(tmp_path / "there"), "--save-dir", str(tmp_path / "back")]
    assert convert.main(["--loader", "mcore", "--saver", "hf", *common]) == 0
    assert_same_files(tmp_path / "back", tmp_path / "hf")


def test_ours_goes_there_and_back_by_the_tool(tmp_path):
    ours, there, back = tmp_path / "ours", tmp_path / "there", tmp_path / "back"
    source = WithExperts({**MODELS["like V3"], "vocab_size": 96})  # which no layout pads
    to_checkpoint(source, ours, dtype=torch.float32, tokenizer=TokenizerConfig())
    cut = [f"--target-{kind}-parallel-size=2" for kind in ("tensor", "pipeline", "expert")]
    common = ["--load-dir", str(ours), "--save-dir", str(there), *cut, "--target-expert-tensor-parallel-size", "1"]
    assert convert.main(["--loader", "megatron", "--saver", "mcore", *common]) == 0
    common = ["--load-dir", str(there), "--save-dir", str(back)]
    assert convert.main(["--loader", "mcore", "--saver", "megatron", *common]) == 0
    expected = tensor_bytes(find(ours, None))
    assert len(expected) == len(source.shapes) and tensor_bytes(find(back, None)) == expected


def test_a_model_without_arguments_ends_with_exit_code_2(tmp_path, capsys):
    """Moonlight's norms of latents have another epsilon than its others."""
    source = WithExperts({**MODELS["like V2-Lite"], "vocab_size": 96, "latent_norm_epsilon": 1e-6})
    to_checkpoint(source, tmp_path / "ours", dtype=torch.float32, tokenizer=TokenizerConfig())
    common = ["--load-dir", str(tmp_path / "ours"), "--save-dir", str(tmp_path / "there")]
    assert convert.main(["--loader", "megatron", "--saver", "mcore", *common]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "no argument" in line]
    assert len(lines) == 1 and "--latent-norm-epsilon 1e-06" in lines[0]
    assert not (tmp_path / "there").exists()
