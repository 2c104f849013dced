"""The comparison with transformers: its sites, its attribution of errors, its exit code."""

import dataclasses

import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.config.data import TokenizerConfig
from megatron.conversion import align
from megatron.conversion.convert import to_checkpoint
from megatron.core.datasets.indexed import IndexedDatasetWriter
from megatron.core.models.hf.source import HFSource
from megatron.training.export import CheckpointSource
from tests import pool
from tests.unit.models.builds import CPU
from tests.unit.models.hf_models import save_hf_model
from tests.unit.models.test_hf_families import SHAPES, make_model
from tests.unit.models.test_hf_predictions import with_predictions
from tools.checkpoint import align as tool

TOKENS = torch.randint(0, 99, (2, 24), generator=torch.Generator().manual_seed(0))
FAMILIES = [
    "llama",
    "llama with biases",
    "mistral",
    "qwen2 with windows",
    "qwen2 tied",
    "smollm3",
    "glm",
    "granite",
    "olmo2",
    "gemma2",
    "gemma3",
    "phi4 mini",
    "starcoder2",
]


def pair_of(folder, dtype, ours=None):
    return align.ModelPair(folder, dtype, pool.groups(), CPU, ours=ours)


def test_ulps_are_counted_at_the_size_of_a_number():
    one = torch.tensor([1.0, 2.0, 1e-9])
    near = torch.tensor([1.0 + 2**-23, 2.0 + 2**-21, 1.1e-9])
    found = align.compare(0, "x", near, one)
    assert found.max_ulps == pytest.approx(2.0) and found.differing == 1.0
    assert align.compare(0, "x", one, one) == align.SiteDifference(0, "x", 0.0, 0.0, 0.0)


def test_first_choices_tell_ties_from_disagreements():
    """Four positions: the same, a tie of one rounding, neighbours 3 ulps apart, and another token altogether."""
    ulp = torch.finfo(torch.bfloat16).eps
    theirs = torch.tensor([[4.0, 1, 0], [1 + ulp, 1, 0], [1 + 3 * ulp, 1, 0], [4.0, 1, 0]], dtype=torch.bfloat16)
    ours = torch.tensor([[3.0, 1, 0], [1, 1 + ulp, 0], [1, 1 + ulp, 0], [0, 1, 0]], dtype=torch.bfloat16)
    assert align.first_choices(ours, theirs) == align.Choices(positions=4, same=1, ties=1)
    assert align.first_choices(theirs, theirs) == align.Choices(positions=4, same=4, ties=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_site_of_every_layer_agrees_in_fp32(tmp_path, name):
    save_hf_model(name, tmp_path)
    rows = align.differences(*pair_of(tmp_path, torch.float32).record(TOKENS))
    left_out = {"olmo2": {"norm", "mlp norm"}, "gemma2": set(), "gemma3": set()}.get(name, {"o_proj norm", "down norm"})
    left_out |= {"router", "experts", "q latent", "kv latent", "kv"} | ({"gate"} if name == "starcoder2" else set())
    sites = [site for site in align.SITES if site not in left_out]
    assert [row.site for row in rows] == [*sites * 3, "final norm", "logits"]
    assert max(row.mean_ulps for row in rows) < 16


EXPERTS = ["mixtral", "qwen2 moe with windows", "olmoe"]
LATENTS = {
    "deepseek v3": {1, 2},
    "deepseek v3.2": {1, 2},
    "glm 5": {1, 2},
    "moonlight": {1, 2},
    "deepseek v2": {2},
    "deepseek v2 lite": {0, 1, 2},
}


@pytest.mark.parametrize("name", [*LATENTS, "glm 4.7 flash"])
def test_latents_are_sites(tmp_path, name):
    """The rotated channels are none: transformers has them in another order."""
    save_hf_model(name, tmp_path)
    pair = pair_of(tmp_path, torch.float32)
    rows = align.differences(*pair.record(TOKENS))
    assert {row.layer for row in rows if row.site == "router"} == LATENTS.get(name, {0, 2})
    attention = {row.site for row in rows if row.layer == 0} & set(align.SITES[: align.SITES.index("o_proj")])
    compressed = {"q latent"} if name not in ("moonlight", "deepseek v2 lite") else set()
    assert attention == {"norm", "q", "kv latent", "kv", "attention"} | compressed
    assert max(row.mean_ulps for row in rows) < 32
    assert max(dict(pair.gradients(TOKENS)).values()) <= 1e-5


@pytest.mark.parametrize("name", EXPERTS)
def test_routers_and_experts_are_sites(tmp_path, name):
    """Which experts are chosen, with their weights, and their sum; and gradients, of routers and experts too."""
    save_hf_model(name, tmp_path)
    pair = pair_of(tmp_path, torch.float32)
    rows = align.differences(*pair.record(TOKENS))
    layers = {row.layer for row in rows if row.site == "router"}
    assert layers == ({1, 2} if "qwen2" in name else {0, 1, 2}) == {row.layer for row in rows if row.site == "experts"}
    assert max(row.mean_ulps for row in rows) < 32
    assert max(dict(pair.gradients(TOKENS)).values()) <= 1e-5


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_norms_behind_the_rotation(tmp_path, family):
    make_model(family, SHAPES[0]).save_pretrained(tmp_path)
    pair, tokens = pair_of(tmp_path, torch.float32), TOKENS % (SHAPES[0][5] - 1) + 1  # padding has no gradient
    rows = align.differences(*pair.record(tokens))
    assert {"q rotated", "k rotated", "router" if "moe" in family else "gate"} <= {row.site for row in rows}
    assert max(row.mean_ulps for row in rows) < 32
    assert max(dict(pair.gradients(tokens)).values()) <= 1e-5


@pytest.mark.parametrize("name", FAMILIES + EXPERTS)
def test_with_all_operations_as_theirs_bf16_is_the_same_bits(tmp_path, name):
    """So the ablation leaves nothing unexplained."""
    save_hf_model(name, tmp_path, torch.bfloat16)
    pair = pair_of(tmp_path, torch.bfloat16)
    _, theirs = pair.record(TOKENS)
    rows = dict(align.ablation(pair, TOKENS, theirs[-1, "logits"]))
    assert rows["all as theirs"].differing <= rows["as it is"].differing
    assert rows["all as theirs"].differing < (0.9 if name == "llama with biases" else 0.01)


def test_gradients(tmp_path):
    save_hf_model("qwen2", tmp_path)
    pair = pair_of(tmp_path, torch.float32)
    found = dict(pair.gradients(TOKENS))
    assert found.keys() == pair.parameters.keys()
    assert max(found.values()) <= 1e-5


def test_an_error_is_found_where_it_is(tmp_path):
    """A norm weight that was lost in conversion shows at that norm first, and nowhere before it."""
    save_hf_model("llama", tmp_path)
    source = HFSource(tmp_path)
    read = source.read

    def without_one_norm(name, box, dtype):
        found = read(name, box, dtype)
        return torch.ones_like(found) if name == "decoder.layers.1.pre_mlp_layernorm.weight" else found

    source.read = without_one_norm
    rows = align.differences(*pair_of(tmp_path, torch.float32, ours=source).record(TOKENS))
    first = next(row for row in rows if row.mean_ulps > 100)
    assert (first.layer, first.site) == (1, "mlp norm")


def test_the_tool_says_it_with_its_exit_code(tmp_path, capsys):
    save_hf_model("qwen2", tmp_path / "hf")
    words = ["--hf", str(tmp_path / "hf"), "--length", "24", "--output", str(tmp_path / "align.png")]
    assert tool.main(words) == 0
    printed = capsys.readouterr().out
    assert "aligned" in printed and "RMSNorm as theirs" in printed
    assert "first choices: the same at 48 of 48 positions (100.00%)\n" in printed
    assert (tmp_path / "align.png").stat().st_size > 10_000
    assert tool.main([*words, "--threshold", "1e-9"]) == 1
    assert "differ by more than the threshold: logits" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["deepseek v3", "glm4 moe"])
def test_models_with_shared_experts_and_further_predictions(tmp_path, capsys, name):
    with_predictions(name, tmp_path / "hf")
    assert tool.main(["--hf", str(tmp_path / "hf"), "--length", "24"]) == 0
    printed = capsys.readouterr().out
    assert "aligned" in printed and "experts as theirs" in printed


def test_the_last_tokens_of_a_dataset_are_taken(tmp_path, capsys):
    save_hf_model("qwen2", tmp_path / "hf")
    with IndexedDatasetWriter(tmp_path / "data", "uint16") as writer:
        for first in (0, 50, 60, 70):
            writer.add_document(range(first, first + 10))
        writer.finalize()
    words = ["--hf", str(tmp_path / "hf"), "--data-path", str(tmp_path / "data"), "--batches", "3", "--batch", "1"]
    args = tool.build_parser().parse_args([*words, "--length", "8"])
    assert tool.read_tokens(args, 80).tolist() == [[[*range(56, 64)]], [[*range(64, 72)]], [[*range(72, 80)]]]
    assert tool.main([*words, "--length", "8"]) == 0
    assert "first choices: the same at 24 of 24 positions" in capsys.readouterr().out
    assert tool.main([*words, "--length", "14"]) == 2
    assert "holds 40 tokens; 3 x 1 x 14 are asked for" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="holds token 79 and the model knows 79"):
        tool.read_tokens(args, 79)


def test_a_checkpoint_of_ours_is_compared(tmp_path, capsys):
    save_hf_model("llama", tmp_path / "hf")
    source = HFSource(tmp_path / "hf")
    path = to_checkpoint(source, tmp_path / "ours", dtype=torch.float32, tokenizer=TokenizerConfig())
    assert dataclasses.replace(CheckpointSource(path).model) == source.model
    words = ["--hf", str(tmp_path / "hf"), "--load", str(tmp_path / "ours"), "--length", "24"]
    assert tool.main(words) == 0
    assert tool.main([*words, "--length", "1"]) == 2
    assert "--length: must be from 2 to 134217728, got 1" in capsys.readouterr().err
