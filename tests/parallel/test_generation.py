"""Generation under tensor and pipeline parallelism is that of one process."""

import pytest
import torch

from megatron.base.errors import CheckpointError
from megatron.core.inference.engine.sampling import Sampling
from megatron.core.inference.engine.slots import SlotDecoder
from megatron.core.inference.generate import generate
from megatron.tooling.restore import read_saved, restore_model, restore_tokenizer
from tests import pool
from tests.unit.inference.small import GPT2, GREEDY, LATENT, LONGROPE, PROMPTS, run, save_small

SAMPLING = Sampling(temperature=1.2, top_k=50, top_p=0.95)
SHAPES = {
    "llama": {},
    "gpt2": {
        name: GPT2.get(name) for name in ("position_embedding_type", "normalization", "swiglu", "add_bias_linear")
    },
    "longrope": LONGROPE,
    "latents": {**LATENT, "group_query_attention": False, "num_query_groups": None},
    "tied": {"untie_embeddings_and_output_weights": False},
    "alibi": {"position_embedding_type": "alibi", "embed_layernorm": True},
}
LAYERS = 4
ONE, TP2, PP2, PP4, MIXED = (1, 1), (2, 1), (1, 2), (1, 4), (2, 2)  # tp, pp
TP4 = (4, 1)  # two ranks share each of the two key/value heads


def on(layout, fn, *args):
    """Results of `fn(rank, size, layout, *args)` on the ranks of a layout."""
    return pool.run(layout[0] * layout[1], fn, layout, *args)


def groups(layout):
    return pool.groups(tp=layout[0], pp=layout[1])


def save(rank, size, layout, folder, fields):
    return save_small(groups(layout), folder, **{**fields, "num_layers": LAYERS})


def restore(layout, folder):
    return restore_model(read_saved(folder, None), groups(layout), torch.device("cpu"))


def tokens(rank, size, layout, folder):
    """(greedy, sampled, sampled with a stop string, where two prompts wait for a row)"""
    built = restore(layout, folder)
    seeds = [4, 5, 6, 4]
    options = {"max_new_tokens": 15, "sampling": SAMPLING, "seeds": seeds, "stop_strings": ["7"], "batch_size": 2}
    texts = generate(*built, restore_tokenizer(read_saved(folder, None)), PROMPTS, **options)
    return run(*built, PROMPTS, 15, GREEDY), run(*built, PROMPTS, 15, SAMPLING, seeds), texts


@torch.no_grad()
def logits(rank, size, layout, folder):
    """On the first rank those of a prompt of 6 and of 4 tokens, and of three single steps."""
    ids = torch.randint(0, 99, (2, 9), generator=torch.Generator().manual_seed(2))
    decoder = SlotDecoder(*restore(layout, folder), slots=2, capacity=9)
    if rank > 0:
        return decoder.follow()
    first = decoder.read([ids[0, :6].tolist(), ids[1, 2:6].tolist()])
    found = [first, *(decoder.step(ids[:, t].tolist()) for t in range(6, 9))]
    decoder.close()
    return found


# Of the other shapes those layouts in which they meet something new: biases, heads with copies, and a weight that both
# ends of a pipeline use.
LAYOUTS = (TP2, PP2, PP4, MIXED, TP4)
QUICK = {"llama": LAYOUTS, "gpt2": (MIXED,), "longrope": (TP4,), "latents": (MIXED, TP4), "tied": (PP2, MIXED)}
QUICK["alibi"] = (MIXED,)


@pytest.mark.parametrize(
    ("shape", "layouts"),
    [*QUICK.items(), *(pytest.param(shape, LAYOUTS, marks=pytest.mark.slow) for shape in SHAPES if shape != "llama")],
    ids=str,
)
def test_tokens_do_not_depend_on_the_layout(tmp_path, shape, layouts):
    (folder,) = on(ONE, save, str(tmp_path), SHAPES[shape])
    (expected,) = on(ONE, tokens, folder)
    for layout in layouts:
        assert on(layout, tokens, folder) == [expected] * (layout[0] * layout[1]), layout
    greedy, sampled, _ = expected
    assert greedy != sampled and len({token for ids in sampled for token in ids}) > 10


@pytest.mark.parametrize("layout", [TP2, MIXED], ids=str)
def test_tokens_do_not_depend_on_the_layout_that_saved(tmp_path, layout):
    folders = (
        on(ONE, save, str(tmp_path / "one"), SHAPES["tied"])[0],
        on(layout, save, str(tmp_path), SHAPES["tied"])[0],
    )
    (one,), (other,) = (on(ONE, tokens, folder) for folder in folders)
    assert one == other


@pytest.fixture
def one_thread():
    """As the processes of a pool have: how many threads share a sum decides its last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("fields", [{}, {"bf16": True, "fp32_residual_connection": True}], ids=["fp32", "bf16"])
def test_logits_do_not_depend_on_pp(tmp_path, fields, one_thread):
    (folder,) = on(ONE, save, str(tmp_path), fields)
    (expected,) = on(ONE, logits, folder)
    for layout in (PP2, PP4):
        first, *_ = on(layout, logits, folder)
        assert all(map(torch.equal, first, expected)), "the same sums: the same bits"


@pytest.mark.parametrize("layout", [TP2, TP4, MIXED], ids=str)
def test_logits_do_not_depend_on_tp(tmp_path, layout):
    (folder,) = on(ONE, save, str(tmp_path), {})
    (expected,) = on(ONE, logits, folder)
    first, *_ = on(layout, logits, folder)
    for one, alone in zip(first, expected, strict=True):
        torch.testing.assert_close(one, alone, rtol=0, atol=1e-5)


def disagree(rank, size, layout, folder):
    """Each rank's own random state is another one, as anything in a program may leave it."""
    torch.manual_seed(rank)
    return run(*restore(layout, folder), PROMPTS, 15, SAMPLING)


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_random_state_of_the_ranks_does_not_matter(tmp_path, layout):
    (folder,) = on(ONE, save, str(tmp_path), {})
    first, second = on(layout, disagree, folder)
    assert first == second


def restore_damaged(layout, folder):
    """The weights of the last layer, which one pipeline rank holds, are no numbers."""
    model, build = restore(layout, folder)
    for name, parameter in model.named_parameters():
        if name.startswith(f"decoder.layers.{LAYERS - 1}."):
            parameter.fill_(float("nan"))
    return model, build


def damaged(rank, size, layout, folder):
    """The error of every rank."""
    with pytest.raises(CheckpointError) as error:
        run(*restore_damaged(layout, folder), PROMPTS)
    return str(error.value)


def test_damaged_weights_end_it_on_all_stages(tmp_path):
    (folder,) = on(ONE, save, str(tmp_path), {})
    first, second = on(PP2, damaged, folder)
    assert first == second and "the model's logits are not finite" in first
