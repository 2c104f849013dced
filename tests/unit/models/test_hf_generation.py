"""Greedy continuations by our decoder and by transformers' generate: the same tokens."""

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.models.hf.source import HFSource
from megatron.core.models.source import fill
from megatron.core.parameter import local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from tests import pool
from tests.unit.inference.small import run
from tests.unit.models.builds import CPU
from tests.unit.models.hf_models import EXPERTS, save_hf_model

PROMPTS = [[5, 17, 3, 42, 8], [9, 1, 77]]
NEW = 20  # the windows are up to seven tokens long
NEW_LONGROPE = 48  # its original length is 48 at the most
NAMES = ["llama", "qwen2 with windows", "smollm3", "glm", "granite", "olmo2", "gemma2", "gemma3"]
NAMES += ["phi3, longrope", "phi4 mini"]
NAMES += [pytest.param(name, marks=pytest.mark.slow) for name in ("llama 3.2", "mistral", "qwen3")]


def continue_greedily(folder, groups, new):
    """The new tokens of each prompt."""
    source = HFSource(folder)
    config = source.model
    build = Build(
        config, groups, False, choose_kernels(config, CPU, etp=groups.etp.size), RngTracker(1, groups, CPU), CPU
    )
    model = GPTModel(build).eval().requires_grad_(False)
    fill(local_parameters(model), source, dict(model.named_buffers()))
    return run(model, build, PROMPTS, new)


def on_a_rank(rank, size, folder, new):
    return continue_greedily(folder, pool.groups(tp=size, experts=True), new)


def on_a_rank_with_some_experts(rank, size, folder, new):
    return continue_greedily(folder, pool.groups(tp=size // 2, ep=2, etp=size // 2, experts=True), new)


def continued_by_transformers(theirs, new):
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = theirs.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers(tmp_path, name):
    theirs = save_hf_model(name, tmp_path)
    new = NEW_LONGROPE if "longrope" in name or name == "phi4 mini" else NEW
    expected = continued_by_transformers(theirs, new)
    assert continue_greedily(tmp_path, pool.groups(), new) == expected
    assert pool.run(2, on_a_rank, tmp_path, new) == [expected] * 2


@pytest.mark.parametrize(
    "name",
    [
        "qwen2 moe with windows",
        *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS if name != "qwen2 moe with windows"),
    ],
)
def test_64_tokens_of_models_with_experts(tmp_path, name):
    """On one process, on two that share each expert, and on two that have half of the experts each."""
    expected = continued_by_transformers(save_hf_model(name, tmp_path), 64)
    assert continue_greedily(tmp_path, pool.groups(), 64) == expected
    assert pool.run(2, on_a_rank, tmp_path, 64) == [expected] * 2
    if HFSource(tmp_path).model.num_experts % 2 == 0:
        assert pool.run(2, on_a_rank_with_some_experts, tmp_path, 64) == [expected] * 2
