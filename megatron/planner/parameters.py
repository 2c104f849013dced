"""The parameters that a rank holds, by name and in the order in which the model makes them, from its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.config.model import ModelConfig
from megatron.schedule.partition import Stage
from megatron.spec.buckets import BucketLayout, default_bucket_size, plan_all


@dataclass(frozen=True)
class Weight:
    """numel: elements here, /tp where sharded. stage: the one that uses it, None when two of this rank do.

    on_both_ends: another pipeline rank has it, too. far: it lives in host memory.
    """

    numel: int
    stage: int | None
    on_both_ends: bool = False
    far: bool = False


def rank_parameters(model: ModelConfig, tp: int, stages: Sequence[Stage], far_layers: int = 0) -> dict[str, Weight]:
    """Name -> parameter of a pipeline rank that holds `stages`; see GPTModel. Adapters (LoRA) are left out.

    far_layers: of each stage, from the first on, whose weights live in host memory.
    """
    assert model.hidden_size
    h, tied = model.hidden_size, not model.untie_embeddings_and_output_weights
    first = next((stage.number for stage in stages if stage.embedding), None)
    last = next((stage.number for stage in stages if stage.head), None)
    found: dict[str, Weight] = {}
    vocabulary = model.padded_vocab_size // tp * h
    if first is not None or (last is not None and tied):
        users = {number for number in (first, last if tied else None) if number is not None}
        shared = tied and (first is None or last is None)
        found["embedding.word_embeddings.weight"] = Weight(vocabulary, users.pop() if len(users) == 1 else None, shared)
    if first is not None and model.position_embedding_type == "learned_absolute":
        assert model.max_position_embeddings
        found["embedding.position_embeddings.weight"] = Weight(model.max_position_embeddings * h, first)
    for stage in stages:
        for place, layer in enumerate(stage.layers):
            for name, numel in layer_parameters(model, tp):
                found[f"decoder.layers.{layer}.{name}"] = Weight(numel, stage.number, far=place < far_layers)
    if last is not None:
        found.update({f"decoder.final_layernorm.{name}": Weight(n, last) for name, n in _norm(model, h)})
        if not tied:
            found["output_layer.weight"] = Weight(vocabulary, last)
    return found


def layer_parameters(model: ModelConfig, tp: int) -> Iterator[tuple[str, int]]:
    """(name, elements) of one layer."""
    assert model.hidden_size and model.num_attention_heads
    h, d, f = model.hidden_size, model.head_dim, model.ffn_dim // tp
    inner = f * (2 if model.swiglu else 1)
    heads = model.num_attention_heads * d // tp
    qkv = heads + 2 * model.local_kv_heads(tp) * d
    yield from ((f"input_layernorm.{name}", n) for name, n in _norm(model, h))
    yield from _linear("self_attention.linear_qkv", h, qkv, bias=model.qkv_bias)
    yield "self_attention.linear_proj.weight", heads * h
    if model.add_bias_linear:
        yield "self_attention.linear_proj.bias", h
    if model.qk_layernorm:
        for which in ("q", "k"):
            yield from ((f"self_attention.{which}_layernorm.{name}", n) for name, n in _norm(model, d))
    yield from ((f"pre_mlp_layernorm.{name}", n) for name, n in _norm(model, h))
    yield from _linear("mlp.linear_fc1", h, inner, bias=model.add_bias_linear)
    yield from _linear("mlp.linear_fc2", f, h, bias=model.add_bias_linear)


def rank_buckets(weights: dict[str, Weight], bucket_size: int | None, shards: int) -> list[BucketLayout]:
    """The buckets that these parameters lie in, in the order in which backward completes them."""
    backward = dict(reversed(weights.items()))
    numels = {name: weight.numel for name, weight in backward.items()}
    kinds = {name: (weight.stage, weight.on_both_ends, weight.far) for name, weight in backward.items()}
    return plan_all(numels, kinds, bucket_size or default_bucket_size(sum(numels.values()), shards), shards)


def _norm(model: ModelConfig, size: int) -> list[tuple[str, int]]:
    return [("weight", size), *([("bias", size)] if model.normalization == "LayerNorm" else [])]


def _linear(name: str, inputs: int, outputs: int, *, bias: bool) -> Iterator[tuple[str, int]]:
    yield f"{name}.weight", inputs * outputs
    if bias:
        yield f"{name}.bias", outputs
