"""Checkpoints of Megatron-LM's training: weights and the optimizer's state, from every form in which it saves them."""

import functools
import os
import pickle

import pytest
import torch

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.models.mcore.classic import FILE, OPTIMIZER_FILE
from megatron.core.models.mcore.source import MCoreSource
from tests.unit.models import megatron_files as files
from tests.unit.models.megatron_arguments import megatron_arguments
from tests.unit.models.test_mcore import MODELS, Bomb, FromModel, Opaque, as_megatron_cuts_it, assert_same, explode

DTYPES = "(torch.bfloat16, torch.float32)"
GROUP = "optimizer.distributed.dp_group_idx_"
BUCKET = 3000  # elements
WHOLE, EVEN, UNEVEN, INTERLEAVED = (1, [[4]]), (2, [[2], [2]]), (2, [[1], [3]]), (2, [[1, 1], [1, 1]])


class Trained(FromModel):
    """A model whose weights are rounded masters, and the state of its optimizer."""

    def __init__(self, fields, *, half=True):
        super().__init__(fields)
        masters = dict(self.tensors)
        draw = torch.Generator().manual_seed(5)
        self.state = {
            "master": masters,
            "exp_avg": {n: torch.randn(t.shape, generator=draw) for n, t in masters.items()},
            "exp_avg_sq": {n: torch.rand(t.shape, generator=draw) for n, t in masters.items()},
        }
        for moment in self.state.values():
            for name, tensor in moment.items():
                if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                    tensor[self.model.vocab_size :] = 0
        if half:
            self.dtype = torch.bfloat16
            self.tensors = {name: tensor.bfloat16() for name, tensor in masters.items()}
        vocabulary = {"attention_backend": Opaque.ONE, "use_distributed_optimizer": True, "global_batch_size": 8}
        self.arguments = {**megatron_arguments("d98e8a6", **fields), **vocabulary, "consumed_train_samples": 56}

    def cut(self, key, tp, stages, *, fused=True):
        """(tp rank, stage) -> {model key: {name: tensor}} of the weights, or of the state `key`."""
        other = object.__new__(FromModel)
        other.__dict__.update(self.__dict__, tensors=self.tensors if key is None else self.state[key])
        found = as_megatron_cuts_it(other, tp, stages, fused)
        return {
            rank: {
                part: {n: t.to(self.dtype) if key is None else t for n, t in held.items()}
                for part, held in parts.items()
            }
            for rank, parts in found.items()
        }


@functools.cache
def trained(name, half=True):
    return Trained(MODELS[name], half=half)


def assert_same_state(source, found, keys=tuple(files.KEYS)):
    for name, shape in source.shapes.items():
        whole = Box((0,) * len(shape), shape)
        part = Box(tuple(n // 2 for n in shape), tuple(n - n // 2 for n in shape))
        for key in keys:
            expected = source.state[key][name]
            assert torch.equal(found.read_state(name, key, whole), expected), (name, key)
        place = tuple(slice(a, a + n) for a, n in zip(part.offset, part.shape))
        assert torch.equal(found.read_state(name, "exp_avg", part), source.state["exp_avg"][name][place]), name


def write_torch_dist(folder, source, state, *, layout=WHOLE, change=files.stacked, common_file=False, **arguments):
    """state: what the checkpoint holds of the optimizer. Weights are changed by `change`. arguments: of
    common_state."""
    tp, stages = layout
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": len(stages)}
    common = files.common_state(source, **{**sizes, **arguments})
    ids = source.model.vocab_size
    weights = change(files.in_their_shape(source.model, source.tensors, -(-ids // (16 * tp)) * 16 * tp))
    objects = {
        "decoder.layers.mlp.linear_fc1._extra_state/shard_0_4": [torch.ones(3)],
        "rng_state/shard_0_1": [Opaque.ONE],
    }
    folder.mkdir(parents=True)
    files.write_dcp(
        folder, {**weights, **state, **objects, **({} if common_file else {"common_state/shard_0_1": [common]})}
    )
    if common_file:
        torch.save(common, folder / "common.pt")


def model_space(source, change=files.stacked, master="fp32_param", fragments=1):
    found = {}
    for key, tensors in source.state.items():
        held = change(files.in_their_shape(source.model, tensors, 112))
        for name, tensor in held.items():
            if fragments > 1:
                tensor = files.in_fragments(tensor, fragments) if name.startswith("embedding.word") else tensor
            found[f"optimizer.state.{master if key == 'master' else key}.{name}"] = tensor
    return found


def buffers(source, layout, size=None, *, engine=False, fused=True):
    """(tp rank, stage) -> chunk -> key -> its buckets."""
    tp, stages = layout
    shared = len(stages) > 1 and not source.model.untie_embeddings_and_output_weights
    alone = ("embedding.word_embeddings.weight", "output_layer.weight") if shared else ()
    found = {}
    for key, theirs in files.KEYS.items():
        for (rank, stage), parts in source.cut(key, tp, stages, fused=fused).items():
            for chunk, part in enumerate(sorted(parts)):
                order = files.rank_order(parts[part], engine=engine)
                full = size if (stage, chunk) == (0, 0) else None
                held = found.setdefault((rank, stage), {}).setdefault(chunk, {})
                held[theirs] = files.buffer_of(parts[part], order, full, alone)
    return found


def in_buckets(source, layout, **options):
    """As `dp_reshardable`."""
    tp, found = layout[0], {}
    for (rank, stage), chunks in buffers(source, layout, BUCKET, **options).items():
        for chunk, held in chunks.items():
            for key, buckets in held.items():
                for number, bucket in enumerate(buckets):
                    place = f"{stage * tp + rank}.gbuf_idx_{chunk}.dtype_{DTYPES}.bucket_idx_{number}.{key}"
                    found[GROUP + place] = bucket
        groups = [{"wd_mult": 1.0, "step": 5}]
        found[f"{GROUP}{stage * tp + rank}.optimizer/shard_0_1"] = [{"param_groups": groups}]
    return found


def coalesced(held):
    """As distrib_optim.pt."""
    content = {"buckets_coalesced": True}
    for chunk, tensors in held.items():
        flat = {key: torch.cat(buckets) for key, buckets in tensors.items()}
        content[chunk] = {(torch.bfloat16, torch.float32): {**flat, "numel_unpadded": len(flat["param"])}}
    return content


def gathered(source, layout):
    """As `dp_zero_gather_scatter`."""
    found = buffers(source, layout, BUCKET)
    tp = layout[0]
    return {f"{GROUP}{s * tp + r}.param_state/shard_0_1": [coalesced(held)] for (r, s), held in found.items()}


def write_classic(folder, source, layout, *, distributed, **arguments):
    tp, stages = layout
    weights = source.cut(None, tp, stages, fused=False)
    states = {key: source.cut(key, tp, stages, fused=False) for key in files.KEYS}
    flat = buffers(source, layout, BUCKET, fused=False)
    for (rank, stage), parts in weights.items():
        place = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if len(stages) > 1 else ""))
        place.mkdir(parents=True)
        content = files.common_state(source, **{"use_distributed_optimizer": distributed, **arguments})
        ordered = {p: {n: held[n] for n in files.rank_order(held)} for p, held in parts.items()}
        if distributed:
            torch.save(coalesced(flat[rank, stage]), place / OPTIMIZER_FILE)
        else:
            mine = {key: states[key][rank, stage] for key in files.KEYS}
            with_masters, decoupled = source.dtype != torch.float32, arguments.get("decoupled_lr") is not None
            content["optimizer"] = lists(ordered, mine, with_masters=with_masters, decoupled=decoupled)
        torch.save({**content, **ordered}, place / FILE)


def lists(parameters, states, *, with_masters, decoupled=False):
    """The state of an optimizer by the numbers of its parameters, in groups: with and without weight decay, and with
    `decoupled` those that have a learning rate of their own."""
    named = [(part, name, t) for part, held in parameters.items() for name, t in held.items()]
    groups, state, masters = [], {}, []
    ends = ("word_embeddings.weight", "output_layer.weight") if decoupled else ()
    for decay, is_end in (
        ((True, False), (True, True), (False, False)) if decoupled else ((True, False), (False, False))
    ):
        members = [
            (p, n)
            for p, n, t in named
            if (t.dim() > 1 and not n.endswith(".bias")) == decay and n.endswith(ends) == is_end
        ]
        numbers = list(range(len(state), len(state) + len(members)))
        for number, (part, name) in zip(numbers, members):
            state[number] = {key: states[key][part][name] for key in ("exp_avg", "exp_avg_sq")} | {
                "step": torch.tensor(5.0)
            }
        groups.append({"params": numbers, "wd_mult": float(decay), "default_config": not is_end})
        masters.append([states["master"][part][name] for part, name in members])
    inner = {"state": state, "param_groups": groups}
    return {"optimizer": inner, "fp32_from_fp16_params": masters} if with_masters else inner


LAYOUTS = pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", WHOLE), ("llama", UNEVEN), ("qwen", INTERLEAVED), ("gpt", EVEN)],
    ids=["1", "uneven", "interleaved, tied", "tp 2 pp 2, biases"],
)


@pytest.mark.parametrize(
    ("name", "change", "options"),
    [
        ("llama", files.stacked, {}),
        ("gpt", files.stacked, {"master": "param"}),
        ("llama", files.split_gates, {}),
        ("qwen", dict, {"fragments": 4}),
    ],
    ids=["stacked", "fully reshardable", "layer by layer, gates apart", "fragments"],
)
def test_state_in_the_models_space(tmp_path, name, change, options):
    source = trained(name)
    write_torch_dist(tmp_path / "release", source, model_space(source, change, **options), change=change)
    found = MCoreSource(tmp_path / "release", None, None)
    assert found.dtype == torch.bfloat16 and found.has_optimizer
    assert_same(source, found)
    assert_same_state(source, found)


@LAYOUTS
def test_state_in_buckets(tmp_path, name, layout):
    source = trained(name)
    write_torch_dist(tmp_path / "one", source, in_buckets(source, layout), layout=layout, common_file=True)
    found = MCoreSource(tmp_path / "one", None, None)
    assert_same(source, found)
    assert_same_state(source, found)


def test_state_in_buckets_of_transformer_engines_layers(tmp_path):
    source, state = trained("gpt"), in_buckets(trained("gpt"), EVEN, engine=True)
    write_torch_dist(tmp_path / "one", source, state, layout=EVEN, transformer_impl="transformer_engine")
    assert_same_state(source, MCoreSource(tmp_path / "one", None, None))


@pytest.mark.parametrize(("name", "layout"), [("qwen", INTERLEAVED), ("gpt", UNEVEN)])
def test_state_gathered_into_objects(tmp_path, name, layout):
    source, arguments = trained(name), {"overlap_grad_reduce": True, "ddp_bucket_size": BUCKET}
    write_torch_dist(tmp_path / "one", source, gathered(source, layout), layout=layout, **arguments)
    assert_same_state(source, MCoreSource(tmp_path / "one", None, None))


@LAYOUTS
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "lists"])
def test_state_of_the_classic_layout(tmp_path, name, layout, distributed):
    source = trained(name)
    arguments = {"overlap_grad_reduce": True, "ddp_bucket_size": BUCKET}
    write_classic(tmp_path / "iter_0000007", source, layout, distributed=distributed, **arguments)
    found = MCoreSource(tmp_path / "iter_0000007", None, None)
    assert_same(source, found)
    assert_same_state(source, found)


def write_in_buckets(folder, source):
    write_torch_dist(folder, source, in_buckets(source, EVEN), layout=EVEN)


def write_distributed(folder, source):
    write_classic(folder, source, WHOLE, distributed=True)


def write_lists(folder, source):
    write_classic(folder, source, WHOLE, distributed=False)


@pytest.mark.parametrize("write", [write_in_buckets, write_distributed, write_lists])
def test_a_zeroed_range_is_found_in_every_form(tmp_path, write):
    source, name = trained("gpt"), "decoder.layers.1.mlp.linear_fc2.weight"
    whole = Box((0, 0), source.shapes[name])
    for kind, tensors in (("weight", {name: source.tensors[name].bfloat16()}), *source.state.items()):
        folder = tmp_path / kind / "iter_0000007"
        write(folder, source)
        row = tensors[name][0][:16]  # what is cut or flattened keeps a quarter of a row together
        content = row.view(torch.uint8).numpy().tobytes()
        damaged = 0
        for path in folder.rglob("*"):
            data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
            if (start := data.find(content)) >= 0:
                data[start + 8 : start + 24] = bytes(16)
                path.write_bytes(data)
                damaged += 1
        assert damaged == 1, kind
        found = MCoreSource(folder, None, None)
        with pytest.raises(CheckpointError, match=r"is damaged: .* checksum|Bad CRC-32"):
            found.read(name, whole, torch.bfloat16)
            found.read_state(name, kind, whole)


@pytest.mark.parametrize(("name", "layout"), [("llama", WHOLE), ("gpt", EVEN)], ids=["untied", "tied"])
def test_lists_with_a_decoupled_learning_rate(tmp_path, name, layout):
    source = trained(name)
    write_classic(tmp_path / "iter_0000007", source, layout, distributed=False, decoupled_lr=1e-3)
    assert_same_state(source, MCoreSource(tmp_path / "iter_0000007", None, None))


def test_an_fp32_model_has_no_masters_of_its_own(tmp_path):
    source = trained("qwen", half=False)
    write_classic(tmp_path / "iter_0000007", source, EVEN, distributed=False)
    assert_same_state(source, MCoreSource(tmp_path / "iter_0000007", None, None), ("exp_avg", "exp_avg_sq"))


def test_rows_of_the_padding_are_read_with_the_others(tmp_path):
    """99 ids in 112 rows."""
    source = Trained(MODELS["llama"], half=False)
    for tensors in (source.tensors, *source.state.values()):
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensors[name][99:] = torch.arange(13).unsqueeze(1) + 1.0
    write_torch_dist(tmp_path / "one", source, model_space(source))
    found = MCoreSource(tmp_path / "one", None, None)
    assert found.model.vocab_size == 99 and found.model.padded_vocab_size == 112
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert torch.equal(found.read(name, Box((0, 0), (112, 32)), torch.float32), source.tensors[name])
    assert_same_state(source, found)


def reverse_masters(state):
    """As if the parameters were in another order."""
    for key, bucket in state.items():
        if isinstance(bucket, torch.Tensor) and key.endswith("param"):
            bucket.copy_(bucket.flip(0))


def shorter(state):
    for key, bucket in state.items():
        if isinstance(bucket, torch.Tensor) and "bucket_idx_0" in key:
            state[key] = bucket[:-64].clone()


def without_a_rank(state):
    for key in [key for key in state if f"{GROUP}3." in key]:
        del state[key]


def of_two_dtypes(state):
    for key in [key for key in state if "bucket_idx_0" in key]:
        state[key.replace("bfloat16", "float16")] = state[key]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (reverse_masters, "the fp32 weights in its optimizer do not round to"),
        (shorter, "cannot be told apart into parameters"),
        (without_a_rank, "of 3 ranks, or not the same of all; its arguments say 4"),
        (of_two_dtypes, "are of several dtypes"),
    ],
)
def test_buckets_that_cannot_be_read_are_refused_and_the_weights_are_not(tmp_path, damage, problem):
    source = trained("qwen")
    state = in_buckets(source, EVEN)
    damage(state)
    write_torch_dist(tmp_path / "one", source, state, layout=EVEN)
    found = MCoreSource(tmp_path / "one", None, None)
    assert_same(source, found)
    with pytest.raises(CheckpointError, match=problem) as caught:
        assert_same_state(source, found)
    assert "--dist-ckpt-optim-fully-reshardable" in str(caught.value) and "--no-load-optim" in str(caught.value)
    assert "\n" not in str(caught.value)


def put(path, raw):
    path.write_bytes(raw)


def cut_chunks(folder):
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_chunk(folder):
    def change(metadata):
        key = next(index for index in metadata.storage_data if "linear_fc2" in index.fqn)
        del metadata.storage_data[key]

    files.rewrite_metadata(folder, change)


def climb_out(folder):
    def change(metadata):
        for place in metadata.storage_data.values():
            place.relative_path = "../" + place.relative_path

    files.rewrite_metadata(folder, change)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
        (lambda folder: put(folder / ".metadata", b"abc"), ".metadata cannot be read"),
        (lambda folder: put(folder / ".metadata", pickle.dumps({"a": 1})), ".metadata cannot be read"),
        (lambda folder: next(folder.glob("*.distcp")).unlink(), "distcp is missing"),
        (cut_chunks, "distcp is damaged: it has"),
        (lose_a_chunk, "does not contain the position of .*linear_fc2"),
        (climb_out, r"file name '\.\./"),
        (lambda folder: put(folder / "metadata.json", b"{}"), "does not say which format"),
        (lambda folder: put(folder / "metadata.json", b'{"sharded_backend": "zarr"}'), "in the format 'zarr'"),
        (lambda folder: (folder / "metadata.json").unlink(), "in the format torch_dcp or fsdp_dtensor"),
        (lambda folder: put(folder / "common.pt", b"abc"), "common.pt cannot be read"),
        (lambda folder: torch.save([1], folder / "common.pt"), "is not a table of values"),
        (lambda folder: torch.save({"a": 1}, folder / "common.pt"), "holds no arguments"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, damage, problem):
    source = trained("qwen")
    write_torch_dist(tmp_path / "one", source, {})
    damage(tmp_path / "one")
    with pytest.raises(CheckpointError, match=problem) as caught:
        MCoreSource(tmp_path / "one", None, None)
    assert "\n" not in str(caught.value)


def bomb_in_metadata(folder, bomb):
    files.rewrite_metadata(folder, lambda metadata: setattr(metadata, "planner_data", bomb))


def bomb_in_file(folder, bomb):
    torch.save({"a": bomb}, folder / "common.pt")


@pytest.mark.parametrize("function", [explode, os.mkdir], ids=["a function of a package", "os.mkdir"])
@pytest.mark.parametrize("place", [bomb_in_metadata, bomb_in_file, "object", "tensor"])
def test_a_pickle_that_would_run_something_runs_nothing(tmp_path, place, function):
    """A name of a package is taken for a class without effect, as enums among the arguments are; not where nothing but
    the metadata is expected."""
    source, evidence = trained("qwen"), tmp_path / "evidence"
    bomb = Bomb(function, evidence)
    pickle.loads(pickle.dumps(bomb))
    evidence.rmdir()
    state = {"common_state/shard_0_1": [bomb]} if place == "object" else {}
    write_torch_dist(tmp_path / "one", source, state, common_file=place == "object")
    if place == "object":
        (tmp_path / "one/common.pt").unlink()
    elif place == "tensor":
        files.exchange_chunk(tmp_path / "one", "decoder.final_layernorm.weight", bomb)
    else:
        place(tmp_path / "one", bomb)
    with pytest.raises(CheckpointError) as caught:
        found = MCoreSource(tmp_path / "one", None, None)
        found.read("decoder.final_layernorm.weight", Box((0,), (32,)), torch.float32)
    assert not evidence.exists() and "\n" not in str(caught.value)
    if function is os.mkdir and place in (bomb_in_file, "object"):
        assert "is refused: its pickle would call posix.mkdir" in str(caught.value)
