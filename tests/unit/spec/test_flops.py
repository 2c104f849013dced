"""Model FLOPs against hand counts and published figures."""

import pytest

from megatron.config.model import ModelConfig
from megatron.config.presets import preset
from megatron.spec import flops
from megatron.spec.decoder import decoder_spec


def train_flops(model, seq_length, samples):
    return flops.train_flops(decoder_spec(model), seq_length, samples)


def test_llama3_8b_matches_the_published_throughput():
    # Megatron-Bridge 25.11, Llama 3 8B at 8,192 tokens on H100: 14,451 tokens/s/GPU printed as 744 TFLOP/s/GPU,
    # so 51.5 GFLOP a token with causal attention counted at half.
    per_token = train_flops(ModelConfig(**preset("llama3-8b")), 8192, 1) / 8192
    assert per_token == pytest.approx(744e12 / 14451, rel=1e-3)
    assert per_token == pytest.approx(51.47e9, rel=1e-4)


def test_attention_without_matrices_is_six_times_the_weights():
    model = ModelConfig(**preset("llama3-8b"))
    weights = 32 * (4096 * (32 + 2 * 8) * 128 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256
    no_attention = 2 * train_flops(model, 1024, 1) - train_flops(model, 2048, 1) / 2  # the part that is linear in s
    assert no_attention / 1024 == pytest.approx(6 * weights, rel=1e-12)


def test_a_small_ungated_model_by_hand():
    model = ModelConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        kv_channels=3,
        ffn_hidden_size=20,
        vocab_size=100,
        make_vocab_size_divisible_by=64,
        max_position_embeddings=8,
    )
    # Multiply-adds a token: QKV 8*18, out 6*8, MLP 2*8*20, scores and values 2*6*(5/2); head 8*128 (padded from 100).
    per_token = 2 * (144 + 48 + 320 + 30) + 1024
    assert train_flops(model, seq_length=5, samples=3) == 6 * per_token * 5 * 3


def test_a_window_leaves_out_what_is_not_seen():
    llama = preset("llama3-8b")
    full, half = (train_flops(ModelConfig(**llama, **more), 8192, 1) for more in ({}, {"window_size": "4095,0"}))
    # The first half meets 2048 others on average and the second 4096: 3072 instead of 4096.
    assert full - half == pytest.approx(6 * 32 * 2 * 4096 * (4096 - 3072) * 8192, rel=1e-9)
    alternating = train_flops(ModelConfig(**llama, window_size="4095,0", window_attn_skip_freq="2"), 8192, 1)
    assert alternating == pytest.approx((full + half) / 2)
    assert train_flops(ModelConfig(**llama, window_size="8191,0"), 8192, 1) == full


def test_adapters_are_trained_and_frozen_weights_are_passed_through_twice():
    small = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "ffn_hidden_size": 20,
        "vocab_size": 128,
        "max_position_embeddings": 8,
    }
    adapted = {**small, "lora_rank": 3, "lora_target_modules": ("q_proj", "down_proj")}
    # A token: QKV 8*24, out 64, MLP 2*8*20; scores and values 2*8*(5/2); head 8*128; adapters 3*(8 + 8) and 3*(20 + 8).
    frozen, trained = 2 * (192 + 64 + 320) + 1024, 2 * (40 + 48 + 84)
    assert train_flops(ModelConfig(**adapted), seq_length=5, samples=3) == 2 * (2 * frozen + 3 * trained) * 5 * 3
