"""Model FLOPs against hand counts and published figures."""

import dataclasses

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
    # Each further token: the projection 16*8, a layer, the head.
    predicting = dataclasses.replace(model, mtp_num_layers=2, position_embedding_type="none")
    per_token += 2 * (128 + (144 + 48 + 320 + 30) + 1024)
    assert train_flops(predicting, seq_length=5, samples=3) == 6 * per_token * 5 * 3


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


EXPERT_SHAPE = {
    "num_layers": 3,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "group_query_attention": True,
    "num_query_groups": 1,
    "swiglu": True,
    "add_bias_linear": False,
    "ffn_hidden_size": 20,
    "vocab_size": 128,
    "max_position_embeddings": 8,
}


def test_only_the_experts_of_a_token_count_in_a_model_like_mixtral():
    model = ModelConfig(**EXPERT_SHAPE, num_experts=8, moe_router_topk=2)
    # Multiply-adds a token: QKV 8*(2 + 2)*4, out 8*8, scores and values 2*8*(5/2), router 8*8, 2 experts 3*8*20; head
    # 8*128.
    per_token = 3 * (128 + 64 + 40 + 64 + 2 * 480) + 1024
    assert train_flops(model, seq_length=5, samples=3) == 6 * per_token * 5 * 3


def test_shared_experts_and_their_gate_count_in_a_model_like_qwen2_moe():
    model = ModelConfig(
        **EXPERT_SHAPE,
        num_experts=12,
        moe_router_topk=4,
        moe_ffn_hidden_size=6,
        moe_shared_expert_intermediate_size=24,
        moe_shared_expert_gate=True,
        moe_layer_freq="[0,1,1]",
    )
    # A token: attention as above; MLP 3*8*20; router 8*12, 4 experts 3*8*6, shared experts 3*8*24, their gate 8.
    attention, dense, sparse = 128 + 64 + 40, 480, 96 + 4 * 144 + 576 + 8
    per_token = 3 * attention + dense + 2 * sparse + 1024
    assert train_flops(model, seq_length=5, samples=3) == 6 * per_token * 5 * 3
    wider = dataclasses.replace(model, num_experts=24)
    assert train_flops(wider, 5, 3) - train_flops(model, 5, 3) == 6 * 2 * 8 * 12 * 5 * 3, "the router alone"


def test_adapters_of_shared_experts_count_and_routed_experts_have_none():
    model = ModelConfig(
        **EXPERT_SHAPE,
        num_experts=12,
        moe_router_topk=4,
        moe_ffn_hidden_size=6,
        moe_shared_expert_intermediate_size=24,
        moe_layer_freq="[0,1,1]",
        lora_rank=3,
        lora_target_modules=("up_proj",),
    )
    # A token, as above. Adapters of rank 3: 3*(8 + 20) in the dense layer, 3*(8 + 24) of the shared experts.
    frozen = 3 * (128 + 64) + 480 + 2 * (96 + 4 * 144 + 576) + 1024
    trained = 3 * 40 + 84 + 2 * 96
    assert train_flops(model, seq_length=5, samples=3) == 2 * (2 * frozen + 3 * trained) * 5 * 3
