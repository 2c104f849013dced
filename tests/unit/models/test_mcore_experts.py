"""Megatron-LM's checkpoints of models with experts: read under every layout, written so that they can go back."""

import functools
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from megatron.base.box import Box
from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.data import TokenizerConfig
from megatron.conversion.convert import to_checkpoint, to_hf
from megatron.core.dist_checkpointing.folders import find
from megatron.core.models.hf.source import HFSource
from megatron.core.models.mcore.classic import FILE
from megatron.core.models.mcore.dist_writer import write_torch_dist
from megatron.core.models.mcore.source import MCoreSource
from megatron.core.models.mcore.training_state import Adam, TrainingState
from megatron.core.models.mcore.writer import write_mcore
from tests.unit.models import megatron_moe_files as theirs
from tests.unit.models.hf_models import save_hf_model
from tests.unit.models.megatron_moe_files import GROUPED, MODELS, SEQUENTIAL, WithExperts, World
from tests.unit.models.test_mcore import assert_same
from tests.unit.models.test_mcore_writers import SCHEDULER, load, load_dist
from tools.checkpoint import convert

SLOW = pytest.mark.slow
EVEN = [[2], [2]]
WORLDS = {
    "ep 2": World(1, [[4]], 2, 1),
    "ep 4 pp 2": World(1, EVEN, 4, 1, SEQUENTIAL),
    "tp 2 ep 2 uneven": World(2, [[1], [3]], 2, 2),
    "tp 2 etp 2 ep 2": World(2, [[4]], 2, 2),
    "tp 2 etp 1 ep 4": World(2, [[4]], 4, 1),
    "tp 4 etp 2 ep 2 interleaved": World(4, [[1, 1], [1, 1]], 2, 2, SEQUENTIAL),
    "tp 4 etp 1 ep 1": World(4, [[4]], 1, 1),
    "tp 4 etp 1 ep 2": World(4, [[4]], 2, 1),
}
KEYS = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@functools.cache
def model(name):
    return WithExperts(MODELS[name])


def written(source, root, world, **more):
    """Our classic folder of a world."""
    options = {"dtype": torch.float32, "training": TrainingState(), **more}
    fused = world.names == GROUPED
    return write_mcore(
        source, root, tp=world.tp, pp=len(world.stages), ep=world.ep, etp=world.etp, fused_norms=fused, **options
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixtral", "ep 2"),
        pytest.param("mixtral", "tp 4 etp 1 ep 1", marks=SLOW),
        ("qwen2 moe", "ep 4 pp 2"),
        pytest.param("qwen2 moe", "tp 2 etp 1 ep 4", marks=SLOW),
        ("qwen2 moe", "tp 4 etp 2 ep 2 interleaved"),
        ("sigmoid", "tp 2 ep 2 uneven"),
        pytest.param("sigmoid", "tp 4 etp 1 ep 2", marks=SLOW),
        ("squared relu", "tp 4 etp 2 ep 2 interleaved"),
        ("biases", "tp 4 etp 2 ep 2 interleaved"),
        ("biases", "tp 2 ep 2 uneven"),
    ],
)
def test_every_layout_is_read(tmp_path, name, layout):
    source = model(name)
    theirs.write_classic(tmp_path, source, WORLDS[layout])
    found = MCoreSource(tmp_path, None, None)
    assert (
        found.model.moe_layers == source.model.moe_layers
        and found.model.normalizes_topk == source.model.normalizes_topk
    )
    assert_same(source, found)


def test_every_element_is_read_once(tmp_path, monkeypatch):
    """Of what several files hold one copy is read; the elements of all reads are those of the model."""
    source, world = model("qwen2 moe"), WORLDS["tp 2 ep 2 uneven"]
    theirs.write_classic(tmp_path, source, world)
    found, read = MCoreSource(tmp_path, None, None), []
    files = found._files
    monkeypatch.setattr(
        files, "read", lambda key, shape, box, own=files.read: read.append(box.numel) or own(key, shape, box)
    )
    for name, shape in found.shapes.items():
        found.read(name, Box((0,) * len(shape), shape), torch.float32)
    assert sum(read) == sum(math.prod(shape) for shape in found.shapes.values())


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixtral", "ep 2"),
        pytest.param("qwen2 moe", "tp 4 etp 1 ep 2", marks=SLOW),
        ("sigmoid", "tp 2 etp 1 ep 4"),
        ("biases", "tp 2 etp 2 ep 2"),
        ("qwen2 moe", "ep 4 pp 2"),
    ],
)
def test_what_is_written_is_what_megatron_writes(tmp_path, name, layout):
    source, world = model(name), WORLDS[layout]
    path = written(source, tmp_path, world)
    expected = theirs.cut(source, world)
    assert {folder.name for folder in path.iterdir()} == expected.keys()
    for folder, parts in expected.items():
        found = load(path / folder / FILE)
        part = {theirs_of_local(name, world): tensor for name, tensor in parts["model"].items()}
        assert found["model"].keys() == part.keys()
        for key, tensor in part.items():
            assert torch.equal(found["model"][key], tensor), key
        arguments = vars(found["args"])
        for size in ("expert_model", "expert_tensor", "tensor_model"):
            assert arguments[f"{size}_parallel_size"] == world.arguments({})[f"{size}_parallel_size"]
    assert_same(source, MCoreSource(tmp_path, None, None))


def theirs_of_local(name, world):
    """Sequential experts are written for local layers, whose norms are modules of their own."""
    if world.names == GROUPED:
        return name
    name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")


@pytest.mark.parametrize("form", [GROUPED, SEQUENTIAL])
def test_a_rank_lists_its_tensors_in_the_order_of_the_modules(tmp_path, form):
    path = written(model("sigmoid"), tmp_path, World(1, [[4]], 2, 1, form))
    names = [n for n in load(path / "mp_rank_00_001" / FILE)["model"] if n.startswith("decoder.layers.0.mlp.")]
    each = [form.format(module=module, number=number) for module in ("linear_fc1", "linear_fc2") for number in (0, 1)]
    if form == SEQUENTIAL:
        each = [each[0], each[2], each[1], each[3]]
    shared = [f"shared_experts.linear_fc{n}.weight" for n in (1, 2)]
    order = ["router.weight", "router.expert_bias", *(f"experts.{name}" for name in each), *shared]
    assert names == [f"decoder.layers.0.mlp.{name}" for name in order]


def test_biases_stay_fp32(tmp_path):
    source = model("sigmoid")
    path = written(source, tmp_path / "classic", WORLDS["ep 2"], dtype=torch.bfloat16)
    held = load(path / "mp_rank_00_001" / FILE)["model"]
    name = "decoder.layers.3.mlp.router.expert_bias"
    assert held[name].dtype == torch.float32 and held[name].equal(source.tensors[name])
    assert held["decoder.layers.3.mlp.router.weight"].dtype == torch.bfloat16
    ours = to_checkpoint(
        MCoreSource(path, None, None), tmp_path / "ours", dtype=torch.bfloat16, tokenizer=TokenizerConfig()
    )
    record = json.loads((ours / "metadata.json").read_text())["tensors"][f"model/{name}"]
    assert record["dtype"] in ("float32", "F32")


class TestTorchDist:
    @pytest.mark.parametrize(
        ("name", "local"), [("mixtral", False), ("qwen2 moe", False), ("sigmoid", True), ("biases", True)]
    )
    def test_it_is_read(self, tmp_path, name, local):
        source = model(name)
        theirs.write_torch_dist(tmp_path, source, {}, local=local)
        assert_same(source, MCoreSource(tmp_path, None, None))

    @pytest.mark.parametrize(
        ("name", "local"), [("mixtral", True), ("qwen2 moe", False), ("sigmoid", False), ("biases", False)]
    )
    def test_what_is_written_is_what_megatron_writes(self, tmp_path, name, local):
        source = model(name)
        path = write_torch_dist(source, tmp_path, tp=1, local=local, dtype=torch.float32, training=TrainingState())
        tensors, objects = load_dist(path)
        expected = theirs.whole_tensors(source, source.tensors, local=local)
        assert tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(tensors[key], tensor), key
        layer, place = ("layers", "3.2_4.4") if name != "qwen2 moe" else ("layers.3", "2_4")
        assert f"decoder.{layer}.mlp.experts.experts.linear_fc2._extra_state/shard_{place}" in objects
        assert any("pre_mlp_layernorm" in each for each in objects) is not local
        assert not any("layers.0.mlp.experts" in each for each in objects)
        assert_same(source, MCoreSource(tmp_path, None, None))


class Trained:
    """State of a model's optimizer: key -> our name -> tensor."""

    def __init__(self, source):
        draw = torch.Generator().manual_seed(4)
        self.source, names = source, [name for name in source.tensors if not name.endswith("expert_bias")]
        self.by_key = {key: {name: torch.randn(source.shapes[name], generator=draw) for name in names} for key in KEYS}
        for held in self.by_key.values():
            for name, tensor in held.items():
                if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                    tensor[source.model.vocab_size :] = 0

    def training(self):
        def read(name, key, box):
            return self.by_key[key][name][tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape))]

        adam = Adam(updates=5, betas=(0.9, 0.95), eps=1e-8, loss_scale=None, read=read)
        return TrainingState(iteration=7, arguments={"optimizer": "adam"}, scheduler=SCHEDULER, adam=adam)

    def round_masters(self):
        """The weights of the source are the masters in bf16 from now on."""
        self.source.tensors |= {name: tensor.bfloat16() for name, tensor in self.by_key["master"].items()}
        self.source.dtype = torch.bfloat16

    def assert_same(self, found, keys=tuple(KEYS)):
        for key in keys:
            for name, tensor in self.by_key[key].items():
                whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
                assert torch.equal(found.read_state(name, key, whole), tensor), (key, name)

    def whole(self, prefix):
        """As torch_dist has it."""
        return {
            f"{prefix(name)}optimizer.state.{kind}.{name}": tensor
            for key, kind in KEYS.items()
            for name, tensor in theirs.whole_tensors(self.source, self.by_key[key]).items()
        }


class TestOptimizer:
    @pytest.mark.parametrize("name", ["qwen2 moe", "sigmoid"])
    @pytest.mark.parametrize("chained", [False, True], ids=["avoid prefix", "before core 0.14"])
    def test_torch_dist_is_read(self, tmp_path, name, chained):
        state = Trained(model(name))
        groups = [{"wd_mult": 1.0, "step": 5}]
        part = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}

        def prefix(name):
            return f"chained_{int('.mlp.experts.' in name)}." if chained else ""

        theirs.write_torch_dist(tmp_path, state.source, state.whole(prefix), optimizer={0: part, 1: part})
        found = MCoreSource(tmp_path, None, None)
        assert found.has_optimizer
        found.open_optimizer()
        state.assert_same(found)
        assert found.optimizer_part("optimizer")["param_groups"] == groups * 2

    @pytest.mark.parametrize("ep", [1, 4])
    def test_torch_dist_goes_there_and_back(self, tmp_path, ep):
        state = Trained(model("sigmoid"))
        path = write_torch_dist(
            state.source, tmp_path, tp=1, ep=ep, local=False, dtype=torch.bfloat16, training=state.training()
        )
        tensors, _ = load_dist(path)
        expected = state.whole(lambda name: "")
        assert {name for name in tensors if name.startswith("optimizer")} == expected.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        optimizer = load(path / "common.pt")["optimizer"]
        if ep == 1:
            assert len(optimizer["optimizer"]["param_groups"]) == 2
        else:
            kinds = [[g["is_expert_parallel"] for g in optimizer[n]["optimizer"]["param_groups"]] for n in (0, 1)]
            assert kinds == [[False, False], [True]]
        state.assert_same(MCoreSource(tmp_path, None, None))

    @pytest.mark.parametrize(
        "layout", ["ep 4 pp 2", "whole", *(pytest.param(each, marks=SLOW) for each in ("ep 2", "tp 2 etp 1 ep 4"))]
    )
    def test_the_classic_one_goes_there_and_back(self, tmp_path, layout):
        """With ep > 1 the experts are in a second optimizer, each in the order of its modules."""
        world = {**WORLDS, "whole": theirs.WHOLE}[layout]
        state = Trained(model("qwen2 moe"))
        path = written(state.source, tmp_path, world, dtype=torch.float32, training=state.training())
        moments = theirs.cut(state.source, world, {**state.source.tensors, **state.by_key["exp_avg"]})
        for folder, parts in moments.items():
            content = load(path / folder / FILE)
            optimizers = content["optimizer"] if world.ep > 1 else [content["optimizer"]]
            names = list(content["model"])
            assert len(optimizers) == (2 if world.ep > 1 else 1)
            for number, optimizer in enumerate(optimizers):
                mine = [n for n in names if world.ep == 1 or (".mlp.experts." in n) == bool(number)]
                order = [n for n in mine if content["model"][n].dim() > 1]
                order += [n for n in mine if content["model"][n].dim() == 1]
                assert len(optimizer["state"]) == len(order)
                held = {theirs_of_local(n, world): tensor for n, tensor in parts["model"].items()}
                for place, key in enumerate(order):
                    assert torch.equal(optimizer["state"][place]["exp_avg"], held[key]), key
        state.assert_same(MCoreSource(tmp_path, None, None), tuple(KEYS)[1:])

    def test_masters_are_in_the_optimizer_of_their_experts(self, tmp_path):
        state, world = Trained(WithExperts(MODELS["mixtral"])), WORLDS["ep 2"]
        state.round_masters()
        written(state.source, tmp_path, world, dtype=torch.bfloat16, training=state.training())
        state.assert_same(MCoreSource(tmp_path, None, None))

    @pytest.mark.parametrize(
        ("name", "world"),
        [
            ("sigmoid", World(2, [[1], [3]], 2, 2)),
            ("qwen2 moe", World(2, [[4]], 4, 1)),
            pytest.param("qwen2 moe", World(2, EVEN, 2, 1, SEQUENTIAL), marks=SLOW),
            pytest.param("mixtral", World(2, [[1, 1], [1, 1]], 2, 2, SEQUENTIAL), marks=SLOW),
            pytest.param("qwen2 moe", World(2, EVEN, 1, 2), marks=SLOW),
        ],
        ids=["uneven", "etp 1", "sequential, tied", "interleaved", "one optimizer"],
    )
    def test_buckets_are_read(self, tmp_path, name, world):
        """Which elements are a parameter's follows from the order of the modules."""
        state = Trained(WithExperts({**MODELS[name], "vocab_size": 96}))
        state.round_masters()
        states = {kind: {**state.source.tensors, **state.by_key[key]} for key, kind in KEYS.items()}
        buckets = theirs.in_buckets(state.source, states, world, 3000)
        theirs.write_torch_dist(tmp_path, state.source, buckets, local=world.names == SEQUENTIAL, world=world)
        found = MCoreSource(tmp_path, None, None)
        assert found.has_optimizer and found.optimizer_part("optimizer")["param_groups"][0]["step"] == 5
        state.assert_same(found)

    def test_buckets_of_one_optimizer_with_ep_are_refused(self, tmp_path):
        state, world = Trained(WithExperts({**MODELS["mixtral"], "vocab_size": 96})), WORLDS["ep 2"]
        states = {kind: {**state.source.tensors, **state.by_key[key]} for key, kind in KEYS.items()}
        buckets = theirs.in_buckets(state.source, states, theirs.WHOLE, 3000)
        theirs.write_torch_dist(tmp_path, state.source, buckets, world=world)
        with pytest.raises(CheckpointError, match="holds one optimizer for ep 2, which has two; save it"):
            MCoreSource(tmp_path, None, None).open_optimizer()

    def test_other_flat_buffers_are_refused(self, tmp_path):
        theirs.write_classic(
            tmp_path,
            model("mixtral"),
            WORLDS["ep 2"],
            use_distributed_optimizer=True,
            change=lambda folder, content: content.update(optimizer=[{}, {}]),
        )
        found = MCoreSource(tmp_path, None, None)
        with pytest.raises(
            CheckpointError,
            match=r"with experts in a form that is read of dense models only.*--dist-ckpt-optim-fully-reshardable",
        ):
            found.open_optimizer()

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"tp": 2, "pp": 1, "ep": 1, "etp": 1}, "some versions of Megatron-LM have two optimizers then"),
            (
                {"tp": 1, "pp": 4, "ep": 2},
                "stage 0 of --target-pipeline-parallel-size 4 would have no layer with experts",
            ),
        ],
    )
    def test_where_versions_differ_it_is_not_written(self, tmp_path, options, problem):
        state = Trained(model("qwen2 moe"))
        with pytest.raises(ConfigError, match=problem):
            write_mcore(
                state.source, tmp_path, **options, fused_norms=True, dtype=torch.float32, training=state.training()
            )
        assert list(tmp_path.iterdir()) == []


def tensor_bytes(folder):
    """Name -> (dtype, shape, bytes)."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {n: (t.dtype, tuple(t.shape), t.view(torch.uint8).numpy().tobytes()) for n, t in tensors.items()}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        pytest.param(
            "sigmoid", ["--target-expert-parallel-size", "2", "--target-tensor-parallel-size", "2"], marks=SLOW
        ),
        (
            "qwen2 moe",
            [
                *("--target-expert-parallel-size", "2", "--target-expert-tensor-parallel-size", "1"),
                *("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"),
                *("--saver-transformer-impl", "local"),
            ],
        ),
        ("sigmoid", ["--format", "torch_dist"]),
        pytest.param("qwen2 moe", ["--format", "torch_dist", "--target-expert-parallel-size", "2"], marks=SLOW),
    ],
)
def test_ours_goes_there_and_back_by_the_tool(tmp_path, name, flags):
    ours, there, back = tmp_path / "ours", tmp_path / "there", tmp_path / "back"
    source = WithExperts({**MODELS[name], "vocab_size": 96})  # which no layout pads
    to_checkpoint(source, ours, dtype=torch.float32, tokenizer=TokenizerConfig())
    common = ["--load-dir", str(ours), "--save-dir", str(there)]
    assert convert.main(["--loader", "megatron", "--saver", "mcore", *common, *flags]) == 0
    common = ["--load-dir", str(there), "--save-dir", str(back)]
    assert convert.main(["--loader", "mcore", "--saver", "megatron", *common]) == 0
    expected = tensor_bytes(find(ours, None))
    assert len(expected) == len(source.shapes) and tensor_bytes(find(back, None)) == expected


@pytest.mark.parametrize("name", ["mixtral", "qwen2 moe"])
def test_hugging_faces_goes_there_and_back(tmp_path, name):
    save_hf_model(name, tmp_path / "hf")
    source = HFSource(tmp_path / "hf")
    to_hf(source, tmp_path / "before", dtype=torch.float32, tokenizer=TokenizerConfig())
    write_mcore(
        source,
        tmp_path / "classic",
        tp=2,
        pp=1,
        ep=1,
        etp=1,
        fused_norms=True,
        dtype=source.dtype,
        training=TrainingState(),
    )
    write_torch_dist(source, tmp_path / "dist", tp=2, local=False, dtype=source.dtype, training=TrainingState())
    for form in ("classic", "dist"):
        folder = tmp_path / f"after {form}"
        to_hf(MCoreSource(tmp_path / form, None, None), folder, dtype=torch.float32, tokenizer=TokenizerConfig())
        assert tensor_bytes(folder) == tensor_bytes(tmp_path / "before") != {}
        before, after = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "before", folder))
        assert after == before


def drop(folder):
    return lambda root: (
        [file.unlink() for file in (root / "iter_0000007" / folder).iterdir()]
        and (root / "iter_0000007" / folder).rmdir()
    )


def of(folder, name, value):
    """A change of one file."""

    def change(here, content):
        if here == folder:
            content["model"].pop(name, None)
            content["model"] |= {} if value is None else {name: value}

    return change


ONE, FC1, BOTH = (
    "mp_rank_00_001",
    "decoder.layers.1.mlp.experts.linear_fc1.weight1",
    "local_experts.0.linear_fc1.weight",
)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"num_experts": 8},
            r"mp_rank_00_000/model/decoder.layers.0.mlp.router.weight is \[4, 32\], .* require \[8, 32\]",
        ),
        ({"num_experts": 3}, "argument num_experts is 3, which ep 2 cannot share equally"),
        ({"expert_model_parallel_size": 4}, "tp 1 x pp 1 x ep 4 with etp 1 need 4: mp_rank_00_002 is missing"),
        ({"expert_model_parallel_size": 1}, "mp_rank_00 is missing"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size is 2 and tensor_model_parallel_size 1"),
        ({"expert_model_parallel_size": "2"}, "argument expert_model_parallel_size is '2', which is not supported"),
        ({"change": of(ONE, FC1, None)}, f"{ONE}: model holds no tensor {FC1}, which its arguments require"),
        ({"change": of(ONE, FC1, torch.ones(48, 31))}, rf"{FC1} is \[48, 31\]"),
        (
            {"change": of(ONE, "decoder.layers.0.mlp.router.weight", None)},
            f"{ONE}: model holds no tensor .*router.weight",
        ),
        ({"change": of(ONE, f"decoder.layers.0.mlp.experts.{BOTH}", torch.ones(2))}, "holds its experts twice, as"),
        ({"change": of(ONE, FC1.replace("weight1", "weight2"), torch.ones(2))}, "unknown tensor .*weight2"),
        ({"change": of(ONE, "decoder.layers.0.mlp.experts.weight1", torch.ones(2))}, "--moe-use-legacy-grouped-gemm"),
    ],
)
def test_damage_is_named(tmp_path, options, problem):
    theirs.write_classic(tmp_path, model("mixtral"), WORLDS["ep 2"], **options)
    with pytest.raises(CheckpointError, match=problem) as caught:
        MCoreSource(tmp_path, None, None)
    assert "\n" not in str(caught.value)


def test_a_missing_file_of_experts_is_named(tmp_path):
    theirs.write_classic(tmp_path, model("mixtral"), WORLDS["tp 2 etp 1 ep 4"])
    drop("mp_rank_01_003")(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds 3 folders .* need 4: mp_rank_01_003 is missing"):
        MCoreSource(tmp_path, None, None)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tp": 1, "pp": 1, "ep": 3}, "--target-expert-parallel-size 3 does not divide the model's 4 experts"),
        ({"tp": 1, "pp": 1, "etp": 2}, "--target-expert-tensor-parallel-size 2 does not divide --target-tensor"),
        ({"tp": 5, "pp": 1}, "5 tensor-parallel ranks of experts cannot share their width 24"),
        ({"tp": 5, "pp": 1, "etp": 1}, "5 tensor-parallel ranks cannot share the width 16 of the shared experts"),
    ],
)
def test_an_impossible_layout_is_refused(tmp_path, options, problem):
    with pytest.raises(ConfigError, match=problem):
        write_mcore(
            model("sigmoid"), tmp_path, **options, fused_norms=True, dtype=torch.float32, training=TrainingState()
        )
    assert list(tmp_path.iterdir()) == []
