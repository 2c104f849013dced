"""Megatron-LM's classic checkpoints: read whatever the layout, written so that they can go back, and never run."""

import argparse
import enum
import os
import pickle

import pytest
import torch

from megatron.base.box import Box
from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.model import ModelConfig
from megatron.core.dist_checkpointing.folders import TRACKER
from megatron.core.models.carried import CarriedTensors
from megatron.core.models.mcore.classic import FILE
from megatron.core.models.mcore.names import VOCABULARY
from megatron.core.models.mcore.source import MCoreSource
from megatron.core.models.mcore.training_state import TrainingState
from megatron.core.models.mcore.writer import write_mcore
from megatron.core.parameter import local_parameters
from tests import pool
from tests.unit.models.builds import GPT, LLAMA, make_model
from tests.unit.models.megatron_arguments import megatron_arguments

QWEN = {**LLAMA, "add_qkv_bias": True, "num_layers": 4, "untie_embeddings_and_output_weights": False}
MODELS = {"llama": {**LLAMA, "num_layers": 4}, "qwen": QWEN, "gpt": {**GPT, "num_layers": 4}}


class Opaque(enum.Enum):
    """Something among the arguments that is not known where they are read."""

    ONE = 1


class FromModel:
    """A source of a model in memory."""

    def __init__(self, fields):
        self.fields, self.model = fields, ModelConfig(**fields)
        model = make_model(fields, pool.groups(), spread=0.1)
        self.tensors = {name: p.detach() for name, p in local_parameters(model).items()}
        self.shapes = {name: tuple(t.shape) for name, t in self.tensors.items()}
        self.dtype, self.carried = torch.float32, CarriedTensors()
        for name, tensor in self.tensors.items():
            if name.endswith(VOCABULARY) and self.model.mask_padded_vocabulary:
                tensor[self.model.vocab_size :] = 0

    def read(self, name, box, dtype):
        place = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape))
        return self.tensors[name][place].to(dtype)


def as_megatron_cuts_it(source, tp, stages, fused, padding=16):
    """(tp rank, stage) -> {model key: {name: tensor}}, cut by plain slicing. stages: layers of each chunk of each."""
    model, found = source.model, {}
    padded = -(-model.vocab_size // (padding * tp)) * padding * tp
    last = (len(stages) - 1, len(stages[0]) - 1)
    homes = {"embedding": (0, 0), "decoder.final": last, "output": last}
    for rank in range(tp):
        first = 0
        for chunk in range(len(stages[0])):
            for stage, counts in enumerate(stages):
                held = {}
                tensors = source.tensors
                if not model.untie_embeddings_and_output_weights and (stage, chunk) == last and len(stages) > 1:
                    tensors = {**tensors, "output_layer.weight": tensors["embedding.word_embeddings.weight"]}
                layers = range(first, first + counts[chunk])
                first += counts[chunk]
                for name, tensor in tensors.items():
                    local = name
                    if ".layers." in name:
                        number = int(name.split(".")[2])
                        if number not in layers:
                            continue
                        local = name.replace(f".{number}.", f".{number - layers[0]}.", 1)
                        if fused:
                            local = local.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
                            local = local.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
                    elif (stage, chunk) != next(home for part, home in homes.items() if name.startswith(part)):
                        continue
                    if "linear_qkv" in name:
                        held[local] = tensor.chunk(tp)[rank].flatten(0, 1)
                    elif "linear_fc1" in name and model.swiglu:
                        held[local] = tensor.chunk(tp, dim=1)[rank].flatten(0, 1)
                    elif "linear_fc1" in name:
                        held[local] = tensor.chunk(tp)[rank]
                    elif name.endswith(("linear_proj.weight", "linear_fc2.weight")):
                        held[local] = tensor.chunk(tp, dim=1)[rank]
                    elif name.endswith("softmax_offset"):
                        held[local] = tensor.chunk(tp)[rank]
                    elif name.endswith(("word_embeddings.weight", "output_layer.weight")):
                        whole = torch.zeros(padded, tensor.shape[1])
                        whole[: model.softmax_size] = tensor[: model.softmax_size]
                        held[local] = whole.chunk(tp)[rank]
                    else:
                        held[local] = tensor
                key = f"model{chunk}" if len(stages[0]) > 1 else "model"
                found.setdefault((rank, stage), {})[key] = {k: t.clone() for k, t in held.items()}
    return found


def write_as_megatron(root, source, tp, stages, *, fused=True, padding=16, **more):
    folder = root / "iter_0000007"
    theirs = {name: value for name, value in source.fields.items() if name != "mask_padded_vocabulary"}
    arguments = {**megatron_arguments("core 0.12", **theirs), "attention_backend": Opaque.ONE, **more}
    for (rank, stage), content in as_megatron_cuts_it(source, tp, stages, fused, padding).items():
        place = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if len(stages) > 1 else ""))
        place.mkdir(parents=True)
        for held in content.values():
            held["decoder.layers.0.self_attention._extra_state"] = None
        extra = {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 7, "odd": Opaque.ONE}
        torch.save({**content, **extra}, place / FILE)
    (root / TRACKER).write_text("7")


def assert_same(source, other):
    """The same tensors, up to how far the vocabulary is padded."""
    assert other.shapes.keys() == source.shapes.keys()
    for name, shape in source.shapes.items():
        if name.endswith(VOCABULARY):
            shape = (source.model.vocab_size, *shape[1:])
            assert other.shapes[name] == (other.model.padded_vocab_size, *shape[1:])
            padding = Box((shape[0], 0), (other.model.padded_vocab_size - shape[0], shape[1]))
            assert other.read(name, padding, torch.float32).eq(0).all()
            assert torch.equal(
                other.read(name, Box((0, 0), shape), torch.float32),
                source.read(name, Box((0, 0), shape), torch.float32),
            )
            continue
        assert other.shapes[name] == shape
        whole = Box((0,) * len(shape), shape)
        assert torch.equal(other.read(name, whole, torch.float32), source.tensors[name]), name
        part = Box(tuple(n // 2 for n in shape), tuple(n - n // 2 for n in shape))
        assert torch.equal(other.read(name, part, torch.float32), source.read(name, part, torch.float32)), name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("tp", "stages"),
    [(1, [[4]]), (2, [[4]]), (4, [[4]]), (1, [[2], [2]]), (2, [[1], [3]]), (2, [[1, 1], [1, 1]])],
    ids=["1", "tp 2", "tp 4", "pp 2", "tp 2 pp 2 uneven", "tp 2 pp 2 interleaved"],
)
def test_every_layout_is_read(tmp_path, name, tp, stages):
    source = FromModel(MODELS[name])
    write_as_megatron(tmp_path, source, tp, stages, fused=name != "gpt")
    found = MCoreSource(tmp_path, None, None)
    assert found.model.num_kv_heads == source.model.num_kv_heads and found.model.vocab_size == 99
    assert_same(source, found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2)])
def test_what_is_written_is_what_megatron_writes(tmp_path, name, tp, pp):
    source = FromModel(MODELS[name])
    path = write_mcore(source, tmp_path, tp=tp, pp=pp, fused_norms=True, dtype=torch.float32, training=TrainingState())
    assert path.name == "release" and (tmp_path / TRACKER).read_text() == "release"
    expected = as_megatron_cuts_it(source, tp, [[4 // pp]] * pp, True)
    for (rank, stage), content in expected.items():
        file = path / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")) / FILE
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(file, weights_only=True)
        assert found["checkpoint_version"] == 3.0 and found["args"].tensor_model_parallel_size == tp
        assert found["model"].keys() == content["model"].keys()
        for key, tensor in content["model"].items():
            assert torch.equal(found["model"][key], tensor), key
    assert_same(source, MCoreSource(tmp_path, None, None))


class TestPadding:
    """Megatron-LM trains the rows of the padding: they take part in its softmax."""

    def test_its_rows_are_read(self, tmp_path):
        source = FromModel({**MODELS["llama"], "mask_padded_vocabulary": False})
        write_as_megatron(tmp_path, source, 1, [[4]])
        found = MCoreSource(tmp_path, None, None)
        assert found.model.softmax_size == found.model.padded_vocab_size == 112
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            whole = Box((0, 0), source.shapes[name])
            assert source.tensors[name][99:].ne(0).any()
            assert torch.equal(found.read(name, whole, torch.float32), source.tensors[name])

    @pytest.mark.parametrize("masked", [True, False])
    def test_its_rows_go_there_and_back(self, tmp_path, masked):
        source = FromModel({**MODELS["qwen"], "mask_padded_vocabulary": masked})
        write_mcore(source, tmp_path, tp=2, pp=1, fused_norms=True, dtype=torch.float32, training=TrainingState())
        found = MCoreSource(tmp_path, None, None)
        assert found.model.mask_padded_vocabulary is masked
        name = "embedding.word_embeddings.weight"
        rows = Box((0, 0), source.shapes[name])
        assert torch.equal(found.read(name, rows, torch.float32), source.tensors[name])


def test_a_padded_size_of_its_own_is_written(tmp_path):
    source = FromModel({**MODELS["qwen"], "fixed_padded_vocab_size": 102})
    path = write_mcore(source, tmp_path, tp=2, pp=1, fused_norms=True, dtype=torch.float32, training=TrainingState())
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = torch.load(path / "mp_rank_01" / FILE, weights_only=True)
    assert found["args"].padded_vocab_size == 102
    assert found["model"]["embedding.word_embeddings.weight"].shape[0] == 51
    assert_same(source, MCoreSource(tmp_path, None, None))
    with pytest.raises(ConfigError, match="4 tensor-parallel ranks cannot share the 102 rows of --padded-vocab-size"):
        write_mcore(source, tmp_path / "b", tp=4, pp=1, fused_norms=True, dtype=torch.float32, training=TrainingState())


@pytest.mark.parametrize("tp", [1, 2])
def test_rows_are_where_the_files_padding_puts_them(tmp_path, tp):
    """Whatever the arguments say about it: --padded-vocab-size can ask for any number, tools pad on their own."""
    source = FromModel(MODELS["qwen"])
    write_as_megatron(tmp_path, source, tp, [[4]], padding=40)
    found = MCoreSource(tmp_path, None, None)
    assert found.model.padded_vocab_size == {1: 120, 2: 160}[tp]
    assert_same(source, found)


def test_more_ids_than_rows(tmp_path):
    write_as_megatron(tmp_path, FromModel(MODELS["qwen"]), 1, [[4]], vocab_size=150)
    with pytest.raises(CheckpointError, match="holds 112 rows of the vocabulary, fewer than its 150 ids"):
        MCoreSource(tmp_path, None, None)


def explode(path):
    """What a pickle should not be able to make happen."""
    os.mkdir(path)
    return path


class Bomb:
    """A pickle of this calls `function` when it is opened."""

    def __init__(self, function, path):
        self.call = function, (str(path),)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [explode, os.mkdir])
def test_a_pickle_that_would_run_something_runs_nothing(tmp_path, function):
    source, evidence = FromModel(MODELS["llama"]), tmp_path / "evidence"
    pickle.loads(pickle.dumps(Bomb(function, evidence)))
    assert evidence.exists()
    evidence.rmdir()
    write_as_megatron(tmp_path, source, 1, [[4]], bomb=Bomb(function, evidence))
    if function is explode:  # a name that means nothing here is taken for a class without effect
        assert_same(source, MCoreSource(tmp_path, None, None, ("bomb",)))
    else:
        with pytest.raises(CheckpointError, match=r"is refused: its pickle would call posix.mkdir"):
            MCoreSource(tmp_path, None, None)
    assert not evidence.exists()


def cut_file(root):
    path = root / "iter_0000007/mp_rank_00_000" / FILE
    path.write_bytes(path.read_bytes()[:-100])


def rewrite(root, function):
    path = root / "iter_0000007/mp_rank_00_000" / FILE
    content = torch.load(path, weights_only=False)
    function(content)
    torch.save(content, path)


def change(root, key, value):
    def exchange(content):
        content["model"].pop(key, None)
        if value is not None:
            content["model"][key] = value

    rewrite(root, exchange)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda root: rewrite(root, lambda content: content.pop("model")), "model holds no tensor embedding"),
        (lambda root: rewrite(root, lambda content: content.pop("args")), "holds no arguments"),
        (lambda root: (root / TRACKER).unlink(), "latest_checkpointed_iteration.txt cannot be read"),
        (lambda root: (root / TRACKER).write_text("8"), "iter_0000008 is not there"),
        (cut_file, "model_optim_rng.pt cannot be read"),
        (lambda root: (root / "iter_0000007/mp_rank_01_000" / FILE).unlink(), "cannot be read"),
        (lambda root: (root / "iter_0000007/mp_rank_01_001").rename(root / "x"), "tp 2 x pp 2 need 4"),
        (lambda root: change(root, "decoder.layers.1.mlp.linear_fc2.weight", None), "holds no tensor decoder.layers.1"),
        (lambda root: change(root, "decoder.layers.1.mlp.router.weight", torch.ones(2)), "unknown tensor .*router"),
        (lambda root: change(root, "embedding.word_embeddings.weight", torch.ones(56, 31)), r"is \[56, 31\]"),
        (lambda root: change(root, "embedding.word_embeddings.weight", torch.ones(3, 32)), "holds 6 rows"),
        (lambda root: change(root, "embedding.word_embeddings.weight", torch.ones(())), "holds 0 rows"),
    ],
)
def test_damage_is_named(tmp_path, damage, problem):
    write_as_megatron(tmp_path, FromModel(MODELS["llama"]), 2, [[2], [2]])
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=problem) as caught:
        MCoreSource(tmp_path, None, None)
    assert "\n" not in str(caught.value)


def zero_in(path, content):
    """Sets some bytes of a tensor in a file to zero."""
    data = bytearray(path.read_bytes())
    start = data.index(content)
    data[start + 8 : start + 24] = bytes(16)
    path.write_bytes(data)


def test_a_zeroed_range_is_found_when_it_is_read(tmp_path):
    source = FromModel(MODELS["llama"])
    write_as_megatron(tmp_path, source, 1, [[4]])
    path, name = tmp_path / "iter_0000007/mp_rank_00" / FILE, "decoder.layers.1.mlp.linear_fc2.weight"
    held = torch.load(path, weights_only=False)["model"][name]
    zero_in(path, held.numpy().tobytes())
    found = MCoreSource(tmp_path, None, None)
    for other in sorted(source.shapes.keys() - {name}):
        found.read(other, Box((0,) * len(source.shapes[other]), source.shapes[other]), torch.float32)
    with pytest.raises(CheckpointError, match=rf"{FILE} is damaged: {held.nbytes} bytes of it"):
        found.read(name, Box((0, 0), source.shapes[name]), torch.float32)


def test_a_file_without_checksums_is_read(tmp_path):
    source = FromModel(MODELS["llama"])
    torch.serialization.set_crc32_options(False)
    try:
        write_as_megatron(tmp_path, source, 1, [[4]])
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(source, MCoreSource(tmp_path, None, None))


def test_what_is_not_supported_is_refused(tmp_path):
    write_as_megatron(tmp_path, FromModel(MODELS["llama"]), 1, [[4]], qk_l2_norm=True, later=3)
    with pytest.raises(CheckpointError, match="argument qk_l2_norm is True, which is not supported"):
        MCoreSource(tmp_path, None, None, ("later",))


def test_what_is_not_known_can_be_ignored(tmp_path):
    source = FromModel(MODELS["llama"])
    write_as_megatron(tmp_path, source, 1, [[4]], later=3)
    with pytest.raises(CheckpointError, match=r"argument later is 3, .* --ignore-arguments later"):
        MCoreSource(tmp_path, None, None)
    assert_same(source, MCoreSource(tmp_path, None, None, ("later",)))


def test_a_model_without_arguments_is_not_written(tmp_path):
    fields = {**MODELS["llama"], "use_rope_scaling": True, "rope_scaling_original_max_position_embeddings": 4096}
    with pytest.raises(
        ConfigError, match=r"--rope-scaling-original-max-position-embeddings 4096 .* nothing is written"
    ):
        write_mcore(
            FromModel(fields),
            tmp_path / "new",
            tp=1,
            pp=1,
            fused_norms=True,
            dtype=torch.float32,
            training=TrainingState(),
        )
    assert not (tmp_path / "new").exists()


def test_stages_must_divide_the_layers(tmp_path):
    with pytest.raises(ConfigError, match="--target-pipeline-parallel-size 3 does not divide the model's 4 layers"):
        write_mcore(
            FromModel(MODELS["llama"]),
            tmp_path,
            tp=1,
            pp=3,
            fused_norms=True,
            dtype=torch.float32,
            training=TrainingState(),
        )
    assert list(tmp_path.iterdir()) == []
