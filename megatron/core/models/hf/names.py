"""The tensors of Hugging Face decoders, and the elements of ours that they are. See core/models/mapping.py."""

from __future__ import annotations

from megatron.base.box import Box
from megatron.config.model import ModelConfig
from megatron.core.models.hf.families import Family
from megatron.core.models.mapping import Mapping, Part, Table


def table(family: Family, model: ModelConfig) -> Table:
    """The table of a dense decoder of this family."""
    assert model.num_layers and model.hidden_size and model.vocab_size
    h = model.hidden_size
    mappings = [_rows("embedding.word_embeddings.weight", "model.embed_tokens.weight", model)]
    for layer in range(model.num_layers):
        mappings += _layer(f"decoder.layers.{layer}.", f"model.layers.{layer}.", family, model)
    mappings.append(_same("decoder.final_layernorm.weight", "model.norm.weight", (h,)))
    if model.untie_embeddings_and_output_weights:
        mappings.append(_rows("output_layer.weight", "lm_head.weight", model))
    return Table(mappings)


def _layer(own: str, theirs: str, family: Family, model: ModelConfig) -> list[Mapping]:
    assert model.hidden_size and model.num_attention_heads
    h, d, f = model.hidden_size, model.head_dim, model.ffn_dim
    attention, mlp = f"{own}self_attention.", f"{own}mlp."
    their_attention, their_mlp = f"{theirs}self_attn.", f"{theirs}mlp."
    found = [
        _same(f"{own}input_layernorm.weight", f"{theirs}input_layernorm.weight", (h,)),
        _qkv(f"{attention}linear_qkv.weight", their_attention, "weight", (h,), family, model),
        _same(f"{attention}linear_proj.weight", f"{their_attention}o_proj.weight", (h, model.num_attention_heads * d)),
        _same(f"{own}pre_mlp_layernorm.weight", f"{theirs}post_attention_layernorm.weight", (h,)),
        _gate_up(f"{mlp}linear_fc1.weight", their_mlp, "weight", (f, h)),
        _same(f"{mlp}linear_fc2.weight", f"{their_mlp}down_proj.weight", (h, f)),
    ]
    if model.qkv_bias:
        found.append(_qkv(f"{attention}linear_qkv.bias", their_attention, "bias", (), family, model))
    if model.qk_layernorm:
        found += [
            _same(f"{attention}{x}_layernorm.weight", f"{their_attention}{x}_norm.weight", (d,)) for x in ("q", "k")
        ]
    if model.add_bias_linear:
        found += [
            _same(f"{attention}linear_proj.bias", f"{their_attention}o_proj.bias", (h,)),
            _gate_up(f"{mlp}linear_fc1.bias", their_mlp, "bias", (f,)),
            _same(f"{mlp}linear_fc2.bias", f"{their_mlp}down_proj.bias", (h,)),
        ]
    return found


def _same(own: str, theirs: str, shape: tuple[int, ...]) -> Mapping:
    whole = Box((0,) * len(shape), shape)
    return Mapping(own, shape, (Part(own, whole, theirs, whole),))


def _rows(own: str, theirs: str, model: ModelConfig) -> Mapping:
    """The rows of the vocabulary, without our padding."""
    assert model.hidden_size and model.vocab_size
    rows = Box((0, 0), (model.vocab_size, model.hidden_size))
    return Mapping(own, (model.padded_vocab_size, model.hidden_size), (Part(own, rows, theirs, rows),))


def _qkv(own: str, theirs: str, kind: str, columns: tuple[int, ...], family: Family, model: ModelConfig) -> Mapping:
    """[g, (q + 2) d, columns]: a group's queries, key and value. Theirs: one tensor of rows for each, or one for all."""
    assert model.num_attention_heads
    d, groups = model.head_dim, model.num_kv_heads
    queries = model.num_attention_heads // groups * d
    zeros = tuple(0 for _ in columns)
    # (their tensor, its first row, where it begins in our group, rows a group)
    kinds = [("q_proj", 0, 0, queries), ("k_proj", 0, queries, d), ("v_proj", 0, queries + d, d)]
    if family.packed_qkv:
        firsts = (0, groups * queries, groups * (queries + d))
        kinds = [("W_pack", first, at, rows) for first, (_, _, at, rows) in zip(firsts, kinds, strict=True)]
    parts = tuple(
        Part(
            own,
            Box((group, at, *zeros), (1, rows, *columns)),
            f"{theirs}{name}.{kind}",
            Box((first + group * rows, *zeros), (rows, *columns)),
        )
        for name, first, at, rows in kinds
        for group in range(groups)
    )
    return Mapping(own, (groups, queries + 2 * d, *columns), parts)


def _gate_up(own: str, theirs: str, kind: str, shape: tuple[int, ...]) -> Mapping:
    """[2, f, ...]: gate, then up."""
    zeros = tuple(0 for _ in shape)
    parts = tuple(
        Part(own, Box((half, *zeros), (1, *shape)), f"{theirs}{name}.{kind}", Box(zeros, shape))
        for half, name in enumerate(("gate_proj", "up_proj"))
    )
    return Mapping(own, (2, *shape), parts)
