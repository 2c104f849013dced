"""The bytes that layers keep for backward, counted storage by storage, equal those of the layer's description."""

import dataclasses
import itertools

import pytest
import torch

from megatron.config.recompute import KEEP_ALL
from megatron.core.parameter import initialize, local_parameters
from megatron.core.recompute.saved_bytes import saved_bytes
from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.context import Positions
from megatron.core.transformer.norm import Norm
from megatron.kernels.choose_attention import fused_on_cpu
from megatron.kernels.ops import attention, attention_lse, attention_packed, attention_rows
from megatron.kernels.ops.attention_segments import segments_of
from megatron.kernels.ops.rope import rotary_frequencies, rotary_tables
from megatron.spec.decoder import decoder_spec
from megatron.spec.memory.trace import EXPERTS, PARTS, ROUTER, ROUTING, SHARED_EXPERTS
from tests import pool
from tests.unit.kernels.variable_length import VariableLengthOperator
from tests.unit.models.builds import (
    CPU,
    DELTA,
    FACTORS,
    GEMMA2,
    GPT,
    LATENT,
    LATENT_LITE,
    LATENT_PLAIN,
    LLAMA,
    LONGROPE,
    make_build,
)
from tests.unit.narrow_values import narrow_values
from tests.unit.recompute.test_rerun import MODES, UNFUSED, selective
from tests.unit.spec import planned

SAMPLES, TOKENS = 2, 8
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2], [0] * 8])
WAYS = {
    "none": KEEP_ALL,
    "norm": selective("norm"),
    "mlp_act": selective("mlp_act"),
    "norm mlp": selective("norm", "mlp"),
    **MODES,
}
BF16 = {"bf16": True}
BEHIND = {"pre_norm": False, "post_norm": True}
CAPPED = {"attn_logit_softcapping": 2.0}
SINKS = {"softmax_type": "learnable", "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0}
TOGETHER = {"qk_layernorm": True, "qk_layernorm_across_heads": True}
AFTER = {"qk_layernorm": True, "qk_layernorm_after_rope": True}
ONE_KV_HEAD = {"num_query_groups": 1}
MHA = {"group_query_attention": False, "num_query_groups": None}
ATTENTION_DROPOUT, DROPOUT = {"attention_dropout": 0.1}, {"attention_dropout": 0.1, "hidden_dropout": 0.1}
MODELS = {
    "llama": LLAMA,
    "llama, bf16": {**LLAMA, **BF16},
    "llama, mha, bf16": {**LLAMA, **MHA, **BF16},
    "llama, normed heads, 1p": {**LLAMA, "qk_layernorm": True, "apply_layernorm_1p": True},
    "llama, fp32 residual": {**LLAMA, **BF16, "fp32_residual_connection": True, "hidden_dropout": 0.1},
    "llama, a layer without rotary": {**LLAMA, "no_rope_freq": "2"},
    "llama, norms on both sides": {**LLAMA, **BF16, "post_norm": True},
    "llama, norms behind": {**LLAMA, **BF16, **BEHIND, "hidden_dropout": 0.1},
    "llama, norms behind, fp32 residual": {**LLAMA, **BF16, **BEHIND, "fp32_residual_connection": True},
    "gpt, norms on both sides, fp32 residual": {**GPT, **BF16, "post_norm": True, "fp32_residual_connection": True},
    "gpt, norms behind, 1p": {**GPT, **BEHIND, "apply_layernorm_1p": True},
    "llama, parallel, bf16": {**LLAMA, **BF16, "parallel_residual": True},
    "gpt, parallel, dropout, fp32 residual": {
        **{**GPT, **BF16, "parallel_residual": True},
        **{"fp32_residual_connection": True, "hidden_dropout": 0.1},
    },
    "llama, longrope of a part": {**LLAMA, **LONGROPE, "rotary_percent": 0.5, "short_factor": "1", "long_factor": "3"},
    "llama, one norm, bf16": {**LLAMA, **BF16, "parallel_residual": True, "shared_norm": True},
    "llama, clipped, bf16": {**LLAMA, **BF16, "clip_qkv": 0.5},
    "llama, clipped, normed heads": {**LLAMA, "clip_qkv": 0.5, "qk_layernorm": True},
    "llama, weights per head, clipped": {
        **{**LLAMA, **BF16, "qk_layernorm": True},
        **{"qk_layernorm_weight_per_head": True, "clip_qkv": 0.5},
    },
    "gpt, clipped, no positions": {**GPT, "clip_qkv": 0.5, "qk_layernorm": False},
    "gpt, norms with a weight, fp32 residual": {
        **{**GPT, **BF16, "norm_parameters": "weight", "qk_layernorm": False},
        **{"fp32_residual_connection": True},
    },
    "llama, no positions": {**LLAMA, "position_embedding_type": "none"},
    "llama, unfused, bf16": {**LLAMA, **BF16, **UNFUSED},
    "llama, unfused, dropout": {**LLAMA, **UNFUSED, **DROPOUT},
    "llama, dropout": {**LLAMA, **DROPOUT},
    "llama, factors": {**LLAMA, **BF16, **FACTORS},
    "llama, factors, norms behind": {**LLAMA, **BF16, **FACTORS, "post_norm": True},
    "llama, factors, fp32 residual": {
        **LLAMA,
        **BF16,
        **FACTORS,
        "fp32_residual_connection": True,
        "hidden_dropout": 0.1,
    },
    "gemma 2": GEMMA2,
    "gemma 2, bf16": {**GEMMA2, **BF16},
    "llama, capped": {**LLAMA, **CAPPED},
    "llama, sinks": {**LLAMA, **SINKS},
    "llama, sinks, bf16, dropout": {**LLAMA, **SINKS, **BF16, **DROPOUT},
    "llama, sinks, mha, bf16": {**LLAMA, **SINKS, **MHA, **BF16},
    "llama, sinks, window": {**LLAMA, **SINKS, "window_size": "3,0"},
    "llama, capped, bf16, dropout": {**LLAMA, **CAPPED, **BF16, **DROPOUT},
    "llama, capped, mha, no positions": {**LLAMA, **CAPPED, **MHA, "position_embedding_type": "none"},
    "llama, capped, unfused, bf16": {**LLAMA, **CAPPED, **UNFUSED, **BF16},
    "gpt, capped, unfused, dropout": {**GPT, **CAPPED, **UNFUSED, **DROPOUT},
    "llama, heads normed together": {**LLAMA, **TOGETHER},
    "llama, heads normed together, 1p": {**LLAMA, **BF16, **TOGETHER, "apply_layernorm_1p": True, **BEHIND},
    "one kv head, heads normed together": {**LLAMA, **ONE_KV_HEAD, **TOGETHER},
    "one kv head": {**LLAMA, **ONE_KV_HEAD},
    "one kv head, no positions": {**LLAMA, **ONE_KV_HEAD, "position_embedding_type": "none"},
    "one kv head, no positions, unfused": {**LLAMA, **ONE_KV_HEAD, **UNFUSED, "position_embedding_type": "none"},
    "one kv head, normed": {**LLAMA, **ONE_KV_HEAD, "qk_layernorm": True},
    "latents": LATENT,
    "latents, bf16": {**LATENT, **BF16},
    "latents, bf16, unfused": {**LATENT, **BF16, **UNFUSED},
    "latents, queries without": {**LATENT_LITE, **BF16},
    "latents without norms": {**LATENT_PLAIN, **BF16},
    "latents, no positions, dropout": {**LATENT, "position_embedding_type": "none", **DROPOUT},
    "latents, norms behind, 1p": {**LATENT, **BEHIND, "apply_layernorm_1p": True},
    "llama, gates": {**LLAMA, "qk_layernorm": True, "attention_output_gate": True},
    "llama, gates without norms": {**LLAMA, "attention_output_gate": True},
    "llama, heads normed after rotation": {**LLAMA, **AFTER},
    "llama, heads normed after rotation, mha, bf16, 1p": {**LLAMA, **MHA, **BF16, **AFTER, "apply_layernorm_1p": True},
    "llama, heads normed after rotation, gates, unfused": {**LLAMA, **AFTER, **UNFUSED, "attention_output_gate": True},
    "llama, a layer without rotary, normed": {**LLAMA, **AFTER, "no_rope_freq": "2"},
    "one kv head, normed together after rotation": {**LLAMA, **ONE_KV_HEAD, **TOGETHER, **AFTER},
    "delta nets": DELTA,
    "delta nets, bf16": {**DELTA, **BF16, "linear_num_value_heads": 4, "num_query_groups": 1},
    "gpt": GPT,
    "gpt, dropout": {**GPT, **DROPOUT},
    "gpt, unfused, bf16": {**GPT, **UNFUSED, **BF16, "qk_layernorm": False},
    "gpt, fp32 residual, exact": {**GPT, **BF16, "fp32_residual_connection": True, "bias_gelu_fusion": False},
    "gpt, dropout, plain heads": {**GPT, **ATTENTION_DROPOUT, "qk_layernorm": False},
    "xielu": {**GPT, "xielu": True, "qk_layernorm": False},
    "xielu, bf16": {**LLAMA, **BF16, "swiglu": False, "xielu": True},
    "squared relu, 1p": {**GPT, "squared_relu": True, "qk_layernorm": False, "apply_layernorm_1p": True},
}


def kernel_of(fields, config, upcast):
    """A kernel in the place of this machine's choice."""
    if config.softmax_type != "vanilla":
        blocks = attention_lse.with_dropout(attention_lse.cpu)
        blocks = attention_lse.in_fp32(blocks) if upcast else blocks
        return attention_packed.packed(attention_rows.of_blocks(blocks), by_flash=False, grouped=True)
    if config.attn_logit_softcapping is not None:
        return attention.unfused if config.attention_backend == "unfused" else attention_rows.attention
    if fields.get("attention_backend") == "unfused":
        return attention.unfused
    kernel = attention.fused if config.attention_dropout else fused_on_cpu
    return attention.in_fp32(kernel) if upcast else kernel


def kept(block, config, layers, sequence_shards=1, ids=None):
    """Bytes of distinct storages that autograd keeps for the layers, without parameters and what layers share."""
    segments = None if ids is None else segments_of(ids, CPU)
    samples = SAMPLES if ids is None else len(ids)
    x = torch.randn(
        TOKENS // sequence_shards, samples, config.hidden_size, dtype=block.layers["0"].mlp.linear_fc1.weight.dtype
    )
    x = x.float() if config.fp32_residual_connection else x
    positions = torch.arange(TOKENS).unsqueeze(0)
    tables = tuple(
        rotary_tables(positions, *rotary_frequencies(rotary, CPU), x.dtype if not config.bf16 else torch.bfloat16)
        for rotary in decoder_spec(config).rotaries
    )
    x.requires_grad_()
    norms = [module for module in block.modules() if isinstance(module, Norm)]
    constants = [tensor for norm in norms for tensor in (norm.weight, norm.bias, norm._ones) if tensor is not None]
    return saved_bytes(
        lambda: block(x, Positions(tables, segments), layers=layers, final_norm=False),
        (*block.parameters(), *constants, *itertools.chain(*tables), *(() if segments is None else segments.tensors)),
    )


def measured(groups, fields, recompute, *, sequence_parallel=False, upcast=False, ids=None, cuda_kernel=None):
    """(kept, planned) bytes of three layers on this rank. ids: of documents. cuda_kernel: attention that CUDA would
    have."""
    layers = range(3)
    build = make_build({**fields, "num_layers": 3}, groups, sequence_parallel=sequence_parallel, recompute=recompute)
    kernel = cuda_kernel or kernel_of(fields, build.config, upcast)
    target = planned.CUDA if cuda_kernel else planned.WIDE if upcast else planned.CPU
    build = dataclasses.replace(build, kernels=dataclasses.replace(build.kernels, attention=kernel))
    block = TransformerBlock(build, layers, final_norm=False).train()
    initialize(local_parameters(block), 3)
    shards = groups.tp.size if build.sequence_parallel else 1
    sizes = planned.sizes_for(
        build.config,
        target,
        TOKENS,
        SAMPLES if ids is None else len(ids),
        groups.tp.size,
        sequence_parallel=build.sequence_parallel,
        documents=ids is not None,
    )
    found = kept(block, build.config, layers, shards, ids)
    return found, planned.kept_by_layers(build.config, sizes, recompute, layers)


@pytest.mark.parametrize("name", MODELS)
def test_every_mode(name):
    for way, recompute in WAYS.items():
        if MODELS[name].get("shared_norm") and "norm" in recompute.parts_of(0):
            continue  # a rule refuses it
        found, expected = measured(pool.groups(), MODELS[name], recompute)
        assert found == expected, f"{way}: {found} kept, {expected} planned"


@pytest.mark.parametrize("name", ["llama, bf16", "gpt, fp32 residual, exact"])
def test_attention_on_fp32_copies(name):
    for way in ("none", "core_attn", "GEMM-last"):
        found, expected = measured(pool.groups(), MODELS[name], WAYS[way], upcast=True)
        assert found == expected, way


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(
    ("name", "upcast"),
    [
        ("llama, bf16", False),
        ("llama, bf16", True),
        ("llama, unfused, bf16", False),
        ("llama, dropout", False),
        ("llama, capped", False),
        ("llama, sinks, mha, bf16", False),
        ("llama, sinks, mha, bf16", True),
        ("one kv head, no positions", False),
        ("delta nets", False),
        ("gpt", False),
    ],
)
def test_documents_on_the_cpu(name, upcast, samples):
    """A mask only where all probabilities are kept: in the reference and with dropout."""
    for way in ("none", "core_attn", "GEMM-last"):
        found, expected = measured(pool.groups(), MODELS[name], WAYS[way], upcast=upcast, ids=DOCUMENTS[:samples])
        assert found == expected, way


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", ["llama", "llama, mha", "one kv head, no positions", "llama, normed heads, 1p"])
@pytest.mark.parametrize("half", [True, False])
def test_documents_on_cuda(name, half, samples):
    """No mask. FlashAttention in halves, by a stand-in for its operator; in fp32 one document after the other."""
    fields = {**MODELS.get(name, {**LLAMA, **MHA}), **(BF16 if half else {}), "num_attention_heads": 4}
    kernel = attention_packed.variable_length if half else attention_packed.by_document(attention.fused)
    for way in ("none", "core_attn", "GEMM-last"):
        with VariableLengthOperator() as operator:
            found, expected = measured(pool.groups(), fields, WAYS[way], ids=DOCUMENTS[:samples], cuda_kernel=kernel)
        assert found == expected and bool(operator.calls) == half, way


@pytest.mark.parametrize("name", ["llama", "one kv head, no positions"])
def test_grouped_heads_in_fp32_on_cuda(name):
    """The memory-efficient kernel gets a copy of keys and values for every query head; that of the CPU stands in."""
    kernel = attention.with_equal_heads(attention.fused)
    for way in ("none", "core_attn", "GEMM-last"):
        found, expected = measured(pool.groups(), MODELS[name], WAYS[way], cuda_kernel=kernel)
        assert found == expected, way


def over_tp(rank, size, name, sequence_parallel):
    """Way -> (kept, planned)"""
    groups = pool.groups(tp=size)
    return {
        way: measured(groups, MODELS[name], recompute, sequence_parallel=sequence_parallel)
        for way, recompute in WAYS.items()
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt, dropout", "llama, unfused, bf16", "llama, heads normed together, 1p"])
def test_over_tp(name, sequence_parallel):
    for found in pool.run(2, over_tp, name, sequence_parallel):
        assert {way: kept for way, (kept, _) in found.items()} == {way: said for way, (_, said) in found.items()}


@pytest.mark.parametrize("tp", [1, 4])
def test_the_figures_of_a_llama_layer(tp):
    """The note on the bytes that a layer keeps: per token, and a tp-th of it over tp with sequence parallelism."""
    fields = {**LLAMA, **MHA, **BF16, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 11008}
    config = make_build(fields, pool.groups()).config
    h, f, n, tokens = 4096, 11008, 32, 1024
    sizes = planned.sizes_for(config, planned.CUDA, tokens, 1, tp, sequence_parallel=True)
    all_, gemm_last = (
        sum(planned.layer_memory(config, sizes, WAYS[way].modules).kept_by_part().values())
        for way in ("none", "GEMM-last")
    )
    assert all_ * tp == tokens * (16 * h + 6 * f + 8 + 4 * n)
    assert gemm_last * tp == tokens * (12 * h + 4 * f + 4 * n)
    assert planned.kept_by_layers(config, sizes, WAYS["full, uniform 2"], range(6)) * tp == tokens * 3 * 2 * h


def test_parts_add_up_and_are_all_named():
    config = make_build({**MODELS["gpt, dropout"], "post_norm": True}, pool.groups()).config
    sizes = planned.sizes_for(config, planned.CPU, TOKENS, SAMPLES)
    parts = planned.layer_memory(config, sizes).kept_by_part()
    of_experts = {SHARED_EXPERTS, ROUTER, EXPERTS, ROUTING}
    assert tuple(parts) == PARTS and {part for part, size in parts.items() if not size} == of_experts
    assert planned.kept_by_layers(config, sizes, KEEP_ALL, range(5)) == 5 * sum(parts.values())


NARROW_VALUES = [
    "llama",
    "llama, bf16",
    "llama, mha, bf16",
    "llama, normed heads, 1p",
    "llama, no positions",
    "llama, unfused, bf16",
    "llama, dropout",
    "llama, capped",
    "gpt, dropout",
    "one kv head",
    "one kv head, no positions",
]


@pytest.mark.parametrize("name", NARROW_VALUES)
def test_values_of_fewer_channels_than_keys(name):
    """The CPU's fused kernel takes heads of one size alone, so it keeps padded values and a padded output."""
    with narrow_values():
        test_every_mode(name)


@pytest.mark.parametrize("name", ["llama, bf16", "one kv head"])
def test_documents_with_values_of_fewer_channels_than_keys(name):
    with narrow_values():
        for upcast in (False, "bf16" in name):
            found, expected = measured(pool.groups(), MODELS[name], KEEP_ALL, upcast=upcast, ids=DOCUMENTS)
            assert found == expected, upcast
