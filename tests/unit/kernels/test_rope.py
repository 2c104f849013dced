"""Rotary embedding against transformers: frequencies of every scaling, tables and rotation bit for bit."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as apply_rotary_interleaved
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from megatron.config.layers import written
from megatron.config.model import ModelConfig
from megatron.kernels.ops.rope import dynamic_frequencies, rotary_frequencies, rotary_tables, rotate
from megatron.spec.decoder import rotary_spec
from tests.unit.kernels.close import assert_same, random

HEADS, D = 4, 32
SHORT, LONG = [1.0 + i / 37 for i in range(D // 2)], [1.1**i + i / 3 for i in range(D // 2)]
# name -> (fields of ModelConfig, rope_parameters of a transformers config)
SCALINGS = {
    "plain": ({}, {"rope_type": "default", "rope_theta": 10000.0}),
    "base": ({"rotary_base": 500000.0}, {"rope_type": "default", "rope_theta": 500000.0}),
    "linear": (
        {"rotary_seq_len_interpolation_factor": 3.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    ),
    "llama3": (
        {
            "rotary_base": 500000.0,
            "use_rope_scaling": True,
            "rope_scaling_factor": 32.0,
            "rope_scaling_low_freq_factor": 1.0,
            "rope_scaling_high_freq_factor": 4.0,
            "rope_scaling_original_max_position_embeddings": 512,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "yarn": (
        {
            "position_embedding_type": "yarn",
            "rope_scaling_factor": 4.0,
            "rope_scaling_original_max_position_embeddings": 2048,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048},
    ),
    "yarn tuned": (
        {
            "position_embedding_type": "yarn",
            "rotary_base": 1e6,
            "rope_scaling_factor": 16.0,
            "rope_scaling_original_max_position_embeddings": 4096,
            "yarn_beta_fast": 20.0,
            "yarn_beta_slow": 2.0,
            "yarn_mscale": 1.25,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
        },
    ),
    "longrope": (
        {
            "position_embedding_type": "longrope",
            "rope_scaling_original_max_position_embeddings": 2048,
            "max_position_embeddings": 8192,
            "short_factor": written(SHORT),
            "long_factor": written(LONG),
        },
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 2048,
            "short_factor": SHORT,
            "long_factor": LONG,
        },
    ),
}


def model_config(**fields):
    shape = {"hidden_size": HEADS * D, "num_attention_heads": HEADS, "position_embedding_type": "rope"}
    return ModelConfig(**{**shape, **fields})


def theirs(rope):
    """transformers' module; 8192 positions."""
    config = LlamaConfig(
        hidden_size=HEADS * D,
        num_attention_heads=HEADS,
        max_position_embeddings=8192,
        rope_parameters=dict(rope),
    )
    return LlamaRotaryEmbedding(config)


def ours(fields):
    return rotary_frequencies(rotary_spec(model_config(**fields)), torch.device("cpu"))


@pytest.mark.parametrize("name", SCALINGS)
class TestAgainstTransformers:
    def test_frequencies(self, name):
        fields, rope = SCALINGS[name]
        expected = theirs(rope)
        frequencies, factor = ours(fields)
        torch.testing.assert_close(frequencies, expected.inv_freq, rtol=3e-7, atol=0)
        assert factor == pytest.approx(expected.attention_scaling, rel=1e-12)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rotation_has_the_same_bits(self, name, dtype):
        """Given their frequencies: scalings may round those differently in the last bit."""
        _, rope = SCALINGS[name]
        module = theirs(rope)
        s, b = 37, 2
        positions = torch.stack([torch.arange(s), torch.arange(s) + 1000])
        q, k = random(s, b, HEADS, D, dtype=dtype), random(s, b, 2, D, dtype=dtype, seed=1)
        cos, sin = module(q, positions)
        expected = apply_rotary_pos_emb(*(x.permute(1, 2, 0, 3) for x in (q, k)), cos, sin)
        tables = rotary_tables(positions, module.inv_freq, module.attention_scaling, dtype)
        for x, y in zip((q, k), expected, strict=True):
            assert rotate(x, *tables).equal(y.permute(2, 0, 1, 3))


def test_scalings_differ():
    """The table above compares different things."""
    found = {tuple(ours(fields)[0].tolist()) for fields, _ in SCALINGS.values()}
    assert len(found) == len(SCALINGS)


def test_default_yarn_factor():
    assert ours(SCALINGS["yarn"][0])[1] == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert ours({"position_embedding_type": "yarn", "rope_scaling_factor": 1.0})[1] == 1.0


class TestLongRope:
    fields, rope = SCALINGS["longrope"]

    @pytest.mark.parametrize("length", [2047, 2048, 2049, 8192])
    def test_a_sequence_above_the_original_length_has_the_long_factors(self, length):
        """The same bits as transformers, which looks at the last position."""
        module = theirs(self.rope)
        module(random(1), torch.tensor([[length - 1]]))
        spec = rotary_spec(model_config(**self.fields))
        frequencies, factor = rotary_frequencies(spec, torch.device("cpu"), long=length > spec.longrope.original)
        assert frequencies.equal(module.inv_freq) and factor == module.attention_scaling

    def test_magnitude(self):
        """sqrt(1 + ln(stretch) / ln(original)); 1 where the context is not stretched; or as given."""
        assert ours(self.fields)[1] == math.sqrt(1 + math.log(4) / math.log(2048))
        assert ours({**self.fields, "max_position_embeddings": 1024})[1] == 1.0
        assert ours({**self.fields, "longrope_mscale": 1.3})[1] == 1.3

    def test_sequences_may_differ_in_frequencies(self):
        spec = rotary_spec(model_config(**self.fields))
        each = [rotary_frequencies(spec, torch.device("cpu"), long=long)[0] for long in (False, True)]
        positions = torch.stack([torch.arange(5), torch.arange(5) + 3000])
        together = rotary_tables(positions, torch.stack(each), 1.2, torch.float32)
        for row, frequencies in enumerate(each):
            alone = rotary_tables(positions[row : row + 1], frequencies, 1.2, torch.float32)
            for table, expected in zip(together, alone, strict=True):
                assert table[:, row : row + 1].equal(expected)
        assert not each[0].equal(each[1])


class TestDynamicNtk:
    fields, rope = (
        {"rotary_base": 5e7, "dynamic_ntk_factor": 6.0, "max_position_embeddings": 8192},
        {"rope_type": "dynamic", "rope_theta": 5e7, "factor": 6.0},
    )

    @pytest.mark.parametrize("length", [8193, 12001, 100_000])
    def test_a_longer_sequence_has_the_frequencies_of_its_length(self, length):
        """The same bits as transformers, which looks at the last position; those of sequences in one batch may
        differ."""
        module = theirs(self.rope)
        module(random(1), torch.tensor([[length - 1]]))
        spec = rotary_spec(model_config(**self.fields))
        together = dynamic_frequencies(spec, torch.tensor([[length], [9000]]))
        assert together[0].equal(module.inv_freq) and together[1].equal(dynamic_frequencies(spec, torch.tensor([9000])))
        assert not together[0].equal(together[1])

    def test_one_within_the_context_has_the_plain_ones(self):
        module = theirs(self.rope)
        module(random(1), torch.tensor([[8191]]))
        assert ours(self.fields)[0].equal(module.inv_freq) and ours({"rotary_base": 5e7})[0].equal(module.inv_freq)

    def test_a_context_that_follows_from_the_run_is_not_stretched(self):
        assert rotary_spec(model_config(dynamic_ntk_factor=6.0)).dynamic is None


def test_tables_of_shared_positions():
    frequencies, factor = ours({})
    cos, sin = rotary_tables(torch.arange(5).unsqueeze(0), frequencies, factor, torch.float32)
    assert cos.shape == sin.shape == (5, 1, 1, D // 2)
    assert cos[0].eq(1).all() and sin[0].eq(0).all()


def test_part_of_the_channels():
    """--rotary-percent 0.5: the other half passes through."""
    config = model_config(rotary_percent=0.5)
    assert config.rotary_dim == D // 2
    frequencies, factor = rotary_frequencies(rotary_spec(config), torch.device("cpu"))
    tables = rotary_tables(torch.arange(9).unsqueeze(0), frequencies, factor, torch.float32)
    x = random(9, 1, HEADS, D)
    out = rotate(x, *tables)
    assert out[..., D // 2 :].equal(x[..., D // 2 :])
    assert out[..., : D // 2].equal(rotate(x[..., : D // 2], *tables))
    assert not out[1:, ..., : D // 2].equal(x[1:, ..., : D // 2])


def test_neighbours_are_pairs_when_interleaved():
    """GPT-J's pairing: transformers' rotation of the same frequencies, and channels in another order give the other
    one."""
    frequencies, factor = ours(SCALINGS["yarn"][0])
    positions = torch.stack([torch.arange(9), torch.arange(9) + 1000])
    tables = rotary_tables(positions, frequencies, factor, torch.float32)
    x = random(9, 2, HEADS, D + 8)
    found = rotate(x, *tables, interleaved=True)
    angles = (positions.t().float().unsqueeze(-1) * frequencies).unsqueeze(2)
    sin, cos = angles.sin() * factor, angles.cos() * factor
    first = x.permute(1, 0, 2, 3)[..., :D]
    expected = apply_rotary_interleaved(first, sin.squeeze(2).transpose(0, 1), cos.squeeze(2).transpose(0, 1))
    torch.testing.assert_close(found[..., :D], expected.permute(1, 0, 2, 3), rtol=0, atol=2e-6)
    assert found[..., D:].equal(x[..., D:])
    apart = torch.cat([x[..., 0:D:2], x[..., 1:D:2], x[..., D:]], dim=-1)
    halves = rotate(apart, *tables)
    assert found[..., 0:D:2].equal(halves[..., : D // 2]) and found[..., 1:D:2].equal(halves[..., D // 2 : D])
    assert not found.equal(rotate(x, *tables))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d", [D, D + 8])
def test_gradient(d, interleaved):
    frequencies, factor = ours(SCALINGS["yarn"][0])
    cos, sin = rotary_tables(torch.arange(7).unsqueeze(0), frequencies, factor, torch.float32)

    def plain(x):
        rotated, rest = x[..., :D], x[..., D:]
        first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rotated.chunk(2, dim=-1)
        c, s = cos.to(x.dtype), sin.to(x.dtype)
        pair = first * c - second * s, second * c + first * s
        turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
        return torch.cat([turned, rest], dim=-1)

    assert_same(lambda x: rotate(x, cos, sin, interleaved=interleaved), plain, [random(7, 2, 3, d)])
