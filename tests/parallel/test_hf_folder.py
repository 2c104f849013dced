"""A Hugging Face folder that is run as it is: the tokens of its conversion and of transformers, under any tp and pp."""

import pytest
import torch

from megatron.core.models.hf.side_files import stop_ids
from megatron.core.parameter import local_parameters
from megatron.tooling.restore import read_hf, read_saved, restore_model
from tests import pool
from tests.unit.inference.hf_folder import convert, greedy, write_folder
from tests.unit.inference.small import run

CPU = torch.device("cpu")
PROMPTS = [[5, 17, 3, 42, 8], [9, 1, 77, 30]]
NEW = 24


def answers(rank, size, pp, folder, converted):
    """The new tokens of each prompt, of the folder and of its conversion."""
    found = []
    for saved in (read_hf(folder), read_saved(converted, None)):
        ends = stop_ids(saved.tokenizer)
        model = restore_model(saved, pool.groups(tp=size // pp, pp=pp), CPU)
        found.append(run(*model, PROMPTS, NEW, stop_ids=ends))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2 tied"])
def test_tokens_are_those_of_the_conversion_and_of_transformers(tmp_path, name):
    free = [greedy(write_folder(tmp_path / "hf", name), ids, NEW, eos_token_id=None) for ids in PROMPTS]
    end = free[0][NEW // 2]
    theirs = write_folder(tmp_path / "hf", name, ends=[end])
    converted = convert(tmp_path / "hf", tmp_path / "checkpoint")
    expected = [greedy(theirs, ids, NEW) for ids in PROMPTS]
    assert expected[0][-1] == end and len(expected[0]) <= NEW // 2 + 1 and len(free[0]) == NEW
    for size, pp in ((1, 1), (2, 1), (2, 2), (4, 2)):
        assert pool.run(size, answers, pp, tmp_path / "hf", converted) == [[expected, expected]] * size


def what_is_read(rank, size, pp, folder):
    """(elements that came from the folder, elements of this rank's parameters)"""
    saved, sizes = read_hf(folder), []
    fill = saved.hf.folder.fill
    saved.hf.folder.fill = lambda out, names, box: sizes.append(out.numel()) or fill(out, names, box)
    model, _ = restore_model(saved, pool.groups(tp=size // pp, pp=pp), CPU)
    return sum(sizes), sum(parameter.numel() for parameter in local_parameters(model).values())


def test_a_rank_reads_its_own_slices(tmp_path):
    model = write_folder(tmp_path)
    whole = sum(parameter.numel() for parameter in model.parameters())
    replicated = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    ranks = pool.run(2, what_is_read, 1, tmp_path)
    assert sum(read for read, _ in ranks) == whole + replicated
    assert all(read <= held < 0.7 * whole for read, held in ranks)


@pytest.mark.parametrize("name", ["llama", "qwen2 tied"])
def test_a_pipeline_rank_reads_its_own_layers(tmp_path, name):
    """And, where the head is tied, the last one the embedding once more."""
    model = write_folder(tmp_path, name)
    whole = sum(parameter.numel() for parameter in model.parameters())
    again = model.get_input_embeddings().weight.numel() if "tied" in name else 0
    ranks = pool.run(2, what_is_read, 2, tmp_path)
    assert sum(read for read, _ in ranks) == whole + again
    assert all(read <= held and read < 0.7 * whole for read, held in ranks)


def weights(rank, size, folder, dtype):
    """Of the checkpoint, run in `dtype`: (precision of the model, this rank's weights)."""
    saved = read_saved(folder, None)
    saved = type(saved)(saved.path, saved.model, saved.tokenizer, dtype=dtype)
    model, build = restore_model(saved, pool.groups(tp=size), CPU)
    return build.config.dtype_name, {name: p.detach() for name, p in local_parameters(model).items()}


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float32, "float32")])
def test_a_checkpoint_is_run_in_another_precision(tmp_path, dtype, name):
    write_folder(tmp_path / "hf")
    converted = convert(tmp_path / "hf", tmp_path / "checkpoint", torch.float16)
    for (_, stored), (found_name, found) in zip(
        pool.run(2, weights, converted, None), pool.run(2, weights, converted, dtype), strict=True
    ):
        assert found_name == name and {weight.dtype for weight in stored.values()} == {torch.float16}
        assert found.keys() == stored.keys() and all(torch.equal(found[key], stored[key].to(dtype)) for key in stored)
