"""What layers keep for backward, counted storage by storage, is what the planner's arithmetic says: equal, not close."""

import dataclasses

import pytest
import torch

from megatron.config.recompute import KEEP_ALL
from megatron.core.parameter import initialize, local_parameters
from megatron.core.recompute.saved_bytes import saved_bytes
from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.context import Positions
from megatron.kernels.ops import attention
from megatron.kernels.ops.rope import rotary_frequencies, rotary_tables
from megatron.planner.activations import PARTS, Place, layer_bytes, stage_bytes
from megatron.spec.decoder import decoder_spec
from tests import pool
from tests.unit.models.builds import CPU, GPT, LLAMA, make_build
from tests.unit.transformer.test_recompute import MODES, UNFUSED, selective

SAMPLES, TOKENS = 2, 8
WAYS = {
    "none": KEEP_ALL,
    "norm": selective("norm"),
    "mlp_act": selective("mlp_act"),
    "norm mlp": selective("norm", "mlp"),
    **MODES,
}
BF16 = {"bf16": True}
ONE_KV_HEAD = {"num_query_groups": 1}
MHA = {"group_query_attention": False, "num_query_groups": None}
ATTENTION_DROPOUT, DROPOUT = {"attention_dropout": 0.1}, {"attention_dropout": 0.1, "hidden_dropout": 0.1}
MODELS = {
    "llama": LLAMA,
    "llama, bf16": {**LLAMA, **BF16},
    "llama, mha, bf16": {**LLAMA, **MHA, **BF16},
    "llama, normed heads, 1p": {**LLAMA, "qk_layernorm": True, "apply_layernorm_1p": True},
    "llama, fp32 residual": {**LLAMA, **BF16, "fp32_residual_connection": True, "hidden_dropout": 0.1},
    "llama, no positions": {**LLAMA, "position_embedding_type": "none"},
    "llama, unfused, bf16": {**LLAMA, **BF16, **UNFUSED},
    "llama, unfused, dropout": {**LLAMA, **UNFUSED, **DROPOUT},
    "llama, dropout": {**LLAMA, **DROPOUT},
    "one kv head": {**LLAMA, **ONE_KV_HEAD},
    "one kv head, no positions": {**LLAMA, **ONE_KV_HEAD, "position_embedding_type": "none"},
    "one kv head, no positions, unfused": {**LLAMA, **ONE_KV_HEAD, **UNFUSED, "position_embedding_type": "none"},
    "one kv head, normed": {**LLAMA, **ONE_KV_HEAD, "qk_layernorm": True},
    "gpt": GPT,
    "gpt, dropout": {**GPT, **DROPOUT},
    "gpt, unfused, bf16": {**GPT, **UNFUSED, **BF16, "qk_layernorm": False},
    "gpt, fp32 residual, exact": {**GPT, **BF16, "fp32_residual_connection": True, "bias_gelu_fusion": False},
    "gpt, dropout, plain heads": {**GPT, **ATTENTION_DROPOUT, "qk_layernorm": False},
    "squared relu, 1p": {**GPT, "squared_relu": True, "qk_layernorm": False, "apply_layernorm_1p": True},
}


def kernel_of(fields, config, upcast):
    """(the kernel's kind for the planner, a kernel in the place of this machine's choice)"""
    if fields.get("attention_backend") == "unfused":
        return "unfused", attention.unfused
    if config.attention_dropout:
        return "math", attention.fused
    return ("upcast", attention.in_fp32(attention.fused)) if upcast else ("fused", attention.fused)


def kept(block, config, layers, sequence_shards=1):
    """Bytes of distinct storages that autograd keeps for the layers, without parameters and rotary tables."""
    x = torch.randn(
        TOKENS // sequence_shards, SAMPLES, config.hidden_size, dtype=block.layers["0"].mlp.linear_fc1.weight.dtype
    )
    x = x.float() if config.fp32_residual_connection else x
    tables = None
    if config.rotary_dim:
        positions = torch.arange(TOKENS).unsqueeze(0)
        tables = rotary_tables(
            positions,
            *rotary_frequencies(decoder_spec(config).rotary, CPU),
            x.dtype if not config.bf16 else torch.bfloat16,
        )
    x.requires_grad_()
    return saved_bytes(
        lambda: block(x, Positions(tables, None), layers=layers, final_norm=False),
        (*block.parameters(), *(tables or ())),
    )


def measured(groups, fields, recompute, *, sequence_parallel=False, upcast=False):
    """(kept, planned) bytes of three layers on this rank."""
    layers = range(3)
    build = make_build({**fields, "num_layers": 3}, groups, sequence_parallel=sequence_parallel, recompute=recompute)
    kind, kernel = kernel_of(fields, build.config, upcast)
    build = dataclasses.replace(build, kernels=dataclasses.replace(build.kernels, attention=kernel))
    block = TransformerBlock(build, layers, final_norm=False).train()
    initialize(local_parameters(block), 3)
    shards = groups.tp.size if build.sequence_parallel else 1
    place = Place(TOKENS, SAMPLES, groups.tp.size, build.sequence_parallel, kind, "cpu")
    return kept(block, build.config, layers, shards), stage_bytes(build.config, recompute, place, layers)


@pytest.mark.parametrize("name", MODELS)
def test_every_mode(name):
    for way, recompute in WAYS.items():
        found, planned = measured(pool.groups(), MODELS[name], recompute)
        assert found == planned, f"{way}: {found} kept, {planned} planned"


@pytest.mark.parametrize("name", ["llama, bf16", "gpt, fp32 residual, exact"])
def test_attention_on_fp32_copies(name):
    for way in ("none", "core_attn", "GEMM-last"):
        found, planned = measured(pool.groups(), MODELS[name], WAYS[way], upcast=True)
        assert found == planned, way


def over_tp(rank, size, name, sequence_parallel):
    """Way -> (kept, planned)"""
    groups = pool.groups(tp=size)
    return {
        way: measured(groups, MODELS[name], recompute, sequence_parallel=sequence_parallel)
        for way, recompute in WAYS.items()
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt, dropout", "llama, unfused, bf16"])
def test_over_tp(name, sequence_parallel):
    for found in pool.run(2, over_tp, name, sequence_parallel):
        assert {way: kept for way, (kept, _) in found.items()} == {way: planned for way, (_, planned) in found.items()}


@pytest.mark.parametrize("tp", [1, 4])
def test_the_figures_of_a_llama_layer(tp):
    """Bytes a token in bf16, with tp and sequence parallelism a tp-th, but for statistics of whole rows."""
    fields = {**LLAMA, **MHA, **BF16, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 11008}
    config = make_build(fields, pool.groups()).config
    h, f, n, tokens = 4096, 11008, 32, 1024
    place = Place(tokens, 1, tp, sequence_parallel=True)
    all_, gemm_last = (sum(layer_bytes(config, WAYS[way], place).values()) for way in ("none", "GEMM-last"))
    assert all_ * tp == tokens * (16 * h + 6 * f + 8 + 4 * n)
    assert gemm_last * tp == tokens * (12 * h + 4 * f + 4 * n)
    assert stage_bytes(config, WAYS["full, uniform 2"], place, range(6)) * tp == tokens * 3 * 2 * h


def test_parts_add_up_and_are_all_named():
    config = make_build(MODELS["gpt, dropout"], pool.groups()).config
    place = Place(TOKENS, SAMPLES, attention="math", device="cpu")
    parts = layer_bytes(config, KEEP_ALL, place)
    assert tuple(parts) == PARTS and all(parts.values())
    assert stage_bytes(config, KEEP_ALL, place, range(5)) == 5 * sum(parts.values())
    with pytest.raises(ValueError, match="paper"):
        layer_bytes(config, KEEP_ALL, dataclasses.replace(place, attention="paper"))
