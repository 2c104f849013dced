"""A folder of 45,000 small tensors, as of 256 experts in 58 layers, is read at the speed of its files."""

import gc
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from megatron.base.box import Box
from megatron.core.dist_checkpointing.tensor_file import TensorSource, write_tensor_file
from megatron.core.models.hf.families import parse_config
from megatron.core.models.hf.family.qwen_moe import QWEN3_MOE
from megatron.core.models.hf.folder import HFFolder
from megatron.core.models.hf.names import table
from megatron.core.models.hf.source import HFSource
from tests import pool
from tests.unit.models.published import PUBLISHED

LAYERS, EXPERTS, FILES = 58, 256, 40
SIZES = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "hidden_size": 128, "moe_intermediate_size": 64}


def write_folder(folder):
    """Tensors of 16 KB whose numbers tell them apart, in the order in which publishers write them: by name."""
    config = {**PUBLISHED["Qwen3 30B A3B"], **SIZES}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = table(QWEN3_MOE, parse_config(QWEN3_MOE, config, "x")).theirs
    names, places = sorted(shapes), {}
    for number in range(FILES):
        held = names[len(names) * number // FILES : len(names) * (number + 1) // FILES]
        file = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        sources = [
            TensorSource(name, torch.bfloat16, shapes[name], lambda n=name: [value(n, shapes[n])]) for name in held
        ]
        write_tensor_file(folder / file, sources, {"format": "pt"})
        places |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def value(name, shape):
    return torch.full(shape, float(sum(name.encode()) % 251), dtype=torch.bfloat16)


def measure(work, *args):
    """(seconds of the processor, further resident bytes, most open files beyond those before) of work(*args), in a
    process of its own: not a fork of this one, whose threads of OpenMP it would wait for.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(pool.PRELOAD)
    here, there = context.Pipe()
    process = context.Process(target=_measure, args=(work, args, there))
    process.start()
    there.close()
    found = here.recv()
    process.join()
    return found


def _measure(work, args, pipe):
    gc.freeze()
    files, preadv, before = [len(os.listdir("/proc/self/fd"))], os.preadv, resident()

    def counted(*args):
        files.append(len(os.listdir("/proc/self/fd")))
        return preadv(*args)

    start = time.process_time()
    kept = work(*args)
    seconds = time.process_time() - start
    memory = resident() - before
    del kept
    os.preadv = counted
    work(*args)
    pipe.send((seconds, memory, max(files) - files[0]))


def resident():
    """Largest resident size of this process since its start, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def read_bytes(files):
    return [file.read_bytes() for file in files]


def read_all(folder):
    source = HFSource(folder)
    return {name: source.read(name, whole(shape), torch.bfloat16) for name, shape in source.shapes.items()}


def whole(shape):
    return Box((0,) * len(shape), shape)


def sum_in_parallel():
    return torch.ones(2**22).sum()


def test_measuring_does_not_wait_for_threads_of_this_process():
    """Those of OpenMP: a fork of a process that has some hangs for ever in its first parallel loop."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    sum_in_parallel()
    seconds, _, _ = measure(sum_in_parallel)
    torch.set_num_threads(before)
    assert seconds > 0


@pytest.mark.slow
@pytest.mark.alone
def test_within_half_as_much_again_as_the_bytes_and_the_headers(tmp_path):
    folder = tmp_path / "hf"
    write_folder(folder)
    files = sorted(folder.glob("*.safetensors"))
    nbytes = sum(file.stat().st_size for file in files)
    bytes_alone, headers, everything = [], [], []
    for _ in range(4):
        bytes_alone.append(measure(read_bytes, files)[0])
        headers.append(measure(HFFolder, folder)[0])
        seconds, memory, opened = measure(read_all, folder)
        everything.append(seconds)
        assert memory < 1.1 * nbytes + 100e6, "the weights, names and headers"
        assert opened <= 2, "one file, and the list of open ones"
    bound = 1.5 * (min(bytes_alone) + min(headers))
    assert min(everything) <= bound, f"bytes {bytes_alone}, headers {headers}, all weights {everything}"


def test_each_element_is_in_its_place(tmp_path, monkeypatch):
    """Of fewer layers and experts; tensors that follow each other in the file and in memory are read together."""
    monkeypatch.setitem(SIZES, "num_hidden_layers", 2)
    monkeypatch.setitem(SIZES, "num_experts", 13)
    write_folder(tmp_path / "hf")
    source = HFSource(tmp_path / "hf")
    for layer in range(2):
        own = f"decoder.layers.{layer}.mlp.experts."
        names = [f"{own}linear_fc1.weight", f"{own}linear_fc2.weight"]
        fc1, fc2 = (source.read(name, whole(source.shapes[name]), torch.bfloat16) for name in names)
        for expert in range(13):
            theirs = f"model.layers.{layer}.mlp.experts.{expert}."
            for found, name in ((fc1[expert, 0], "gate"), (fc1[expert, 1], "up"), (fc2[expert], "down")):
                assert torch.equal(found, value(f"{theirs}{name}_proj.weight", found.shape))
