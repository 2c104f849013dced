"""An export takes the place of an older one, and at every moment of that one of the two is whole, or put back."""

import dataclasses
import multiprocessing
import os
import signal

import torch
from safetensors.torch import load_file

from megatron.base.box import Box
from megatron.config.data import TokenizerConfig
from megatron.core.models.carried import CarriedTensors
from megatron.core.models.hf.export import leftovers, repair
from megatron.core.models.hf.families import write_config
from megatron.core.models.hf.names import table
from megatron.training.export import hf_export
from tests import file_events
from tests.unit.config.runs import make_run

MODEL = make_run(
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=48,
    vocab_size=64,
    make_vocab_size_divisible_by=16,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    max_position_embeddings=64,
).model


class Constant:
    """A model all of whose weights are one number, as a Source."""

    def __init__(self, value, shapes):
        self.model, self.value, self.shapes, self.dtype = MODEL, value, shapes, torch.float32
        self.carried = CarriedTensors()

    def read(self, name, box: Box, dtype):
        return torch.full(box.shape, self.value, dtype=dtype)


def export(path, value, shapes, side_file):
    made = hf_export(Constant(value, shapes), path, torch.float32, TokenizerConfig(), None, replace=True)
    made.begin()
    made.write(made.shards)
    made.finish({side_file.name: side_file}, {})


def export_until_killed(moment, *args):
    def die(number):
        if number == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    file_events.on_each([args[0].parent], die)
    export(*args)


def value_of(path):
    """The number in a whole export."""
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "merges.txt", "model.safetensors"]
    (value,) = {float(x) for tensor in load_file(path / "model.safetensors").values() for x in tensor.flatten()}
    return value


def test_a_kill_at_any_moment_of_a_replacement(tmp_path):
    shapes = table(write_config(MODEL)[0], MODEL).ours
    side_file = tmp_path / "merges.txt"
    side_file.write_text("a b")
    root = tmp_path / "hf"
    path, fork = root / "iter_0000010", multiprocessing.get_context("fork")
    export(path, 1.0, shapes, side_file)
    found, moment, code = [], 0, None
    while code != 0:
        moment += 1
        process = fork.Process(target=export_until_killed, args=(moment, path, 2.0, shapes, side_file))
        process.start()
        process.join(60)
        code = process.exitcode
        assert code in (0, -signal.SIGKILL)
        if path.exists():
            value_of(path)  # what has the name is whole
        for left in leftovers(root):
            repair(left)
        found.append(value_of(path))
        assert [entry.name for entry in root.iterdir()] == [path.name]
        if code != 0:
            export(path, 1.0, shapes, side_file)
    assert moment > 10 and set(found) == {1.0, 2.0} and found[-2:] == [2.0, 2.0], found


def test_padding_is_not_written():
    padded = dataclasses.replace(MODEL, fixed_padded_vocab_size=72)
    assert write_config(padded) == write_config(MODEL)
    names = table(write_config(padded)[0], padded)
    assert names.theirs["lm_head.weight"] == (64, 32) and names.ours["output_layer.weight"] == (72, 32)
