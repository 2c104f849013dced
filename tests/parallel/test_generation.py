"""Generation under tensor parallelism is that of one process."""

import pytest
import torch

from megatron.core.inference.generate import CachedDecoder
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.text import complete
from megatron.training.restore import read_saved, restore_model, restore_tokenizer
from tests import pool
from tests.unit.inference.small import GPT2, GREEDY, PROMPTS, run, save_small

SAMPLING = Sampling(temperature=1.2, top_k=50, top_p=0.95)
SHAPES = {
    "llama": {},
    "gpt2": {
        name: GPT2.get(name) for name in ("position_embedding_type", "normalization", "swiglu", "add_bias_linear")
    },
    "tied": {"untie_embeddings_and_output_weights": False},
}


def save(rank, size, folder, fields):
    return save_small(pool.groups(tp=size), folder, **fields)


def restore(size, folder):
    return restore_model(read_saved(folder, None), pool.groups(tp=size), torch.device("cpu"))


def tokens(rank, size, folder):
    """(greedy, sampled, what `complete` makes of the sampled ones)"""
    built = restore(size, folder)
    seeds = [4, 5, 6, 4]
    options = {"max_new_tokens": 15, "sampling": SAMPLING, "seeds": seeds, "stop_strings": ["7"]}
    texts = complete(*built, restore_tokenizer(read_saved(folder, None)), PROMPTS, **options)
    return run(*built, PROMPTS, 15, GREEDY), run(*built, PROMPTS, 15, SAMPLING, seeds), texts


@torch.no_grad()
def logits(rank, size, folder):
    """Of a prompt of 6 and of 4 tokens, and of three single steps."""
    ids = torch.randint(0, 99, (2, 9), generator=torch.Generator().manual_seed(2))
    decoder = CachedDecoder(*restore(size, folder), [6, 4], 9)
    return [decoder(ids[:, :6]), *(decoder(ids[:, t : t + 1]) for t in range(6, 9))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("savers", "loaders"), [(1, 2), (2, 1)])
def test_tokens_do_not_depend_on_tp(tmp_path, shape, savers, loaders):
    folder = pool.run(savers, save, str(tmp_path), SHAPES[shape])[0]
    (expected,) = pool.run(1, tokens, folder)
    assert pool.run(loaders, tokens, folder) == [expected] * loaders
    greedy, sampled, _ = expected
    assert greedy != sampled and len({token for ids in sampled for token in ids}) > 10


def test_logits_do_not_depend_on_tp(tmp_path):
    (folder,) = pool.run(1, save, str(tmp_path), {})
    (expected,) = pool.run(1, logits, folder)
    first, second = pool.run(2, logits, folder)
    for one, two, alone in zip(first, second, expected, strict=True):
        assert torch.equal(one, two), "gathered: the same bits on both ranks"
        torch.testing.assert_close(one, alone, rtol=0, atol=1e-5)


def calls(rank, size, folder):
    """Collectives of the prompt's step and of one more."""
    model, build = restore(size, folder)
    with build.groups.heartbeat.record() as made:
        run(model, build, PROMPTS[:2], new=2)
    return [(call.op, call.group, call.shape) for call in made]


def test_a_step_communicates_what_it_says(tmp_path):
    (folder,) = pool.run(1, save, str(tmp_path), {})
    b, h, padded = 2, 32, 112

    def step(s):
        model = [("all_reduce", "tp", (s, b, h))] * (1 + 2 * 2)  # embedding, then attention and MLP of two layers
        return [*model, ("all_gather", "tp", (padded // 2, b)), ("broadcast", "tp", (b,))]

    assert pool.run(2, calls, folder) == [step(3) + step(1)] * 2


def disagree(rank, size, folder):
    """Each rank's own random state is another one, as anything in a program may leave it."""
    torch.manual_seed(rank)
    return run(*restore(size, folder), PROMPTS, 15, SAMPLING)


def test_random_state_of_the_ranks_does_not_matter(tmp_path):
    (folder,) = pool.run(1, save, str(tmp_path), {})
    first, second = pool.run(2, disagree, folder)
    assert first == second
