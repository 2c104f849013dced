"""Rules about multi-head latent attention."""

from __future__ import annotations

from functools import partial

from megatron.config.data import DataConfig
from megatron.config.layer_forms import VANILLA
from megatron.config.model import ModelConfig
from megatron.config.positions import ROTARY
from megatron.config.rules.rule import ConfigRule
from megatron.config.rules.sources import shape_is_pending
from megatron.config.run import RunConfig


def latents_have_a_width(model: ModelConfig) -> str | None:
    """Megatron-LM's default of 32 channels is that of no published model, so there is none here."""
    if model.multi_latent_attention and model.kv_lora_rank is None:
        return (
            "--multi-latent-attention needs the width of the latents of keys and values; give --kv-lora-rank, such as "
            "512"
        )
    return None


def heads_have_sizes_of_latent_attention(model: ModelConfig) -> str | None:
    """The flags that size and group the heads of other attention have no meaning."""
    switches = {
        "--group-query-attention": model.group_query_attention,
        "--qk-layernorm-across-heads": model.qk_layernorm_across_heads,
        "--qk-layernorm-after-rope": model.qk_layernorm_after_rope,
        "--rotary-percent": model.rotary_percent != 1.0,
        "--rotary-interleaved": model.rotary_interleaved,
    }
    flags = [name for name, on in switches.items() if on]
    if not model.multi_latent_attention or not flags:
        return None
    return (
        f"{' and '.join(flags)} {'has' if len(flags) == 1 else 'have'} no meaning with --multi-latent-attention, whose "
        "heads are sized by --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim, and rotated in neighbouring pairs; "
        f"remove {'it' if len(flags) == 1 else 'them'}"
    )


def latents_have_no_bias(model: ModelConfig) -> str | None:
    """No published model adds biases to the projections down and up."""
    if model.multi_latent_attention and model.qkv_bias:
        flag = "add --disable-bias-linear" if model.add_bias_linear else "remove --add-qkv-bias"
        return f"--multi-latent-attention has no biases on the projections of queries, keys and values; {flag}"
    return None


def latents_have_plain_softmax(model: ModelConfig) -> str | None:
    """Attention of a query to the latents themselves, in generation, has no sinks."""
    if model.multi_latent_attention and model.softmax_type != VANILLA:
        return f"--multi-latent-attention has no --softmax-type {model.softmax_type}; give {VANILLA}"
    return None


def rotated_channels_form_pairs(model: ModelConfig) -> str | None:
    """Channels are rotated in pairs."""
    rotates = model.multi_latent_attention and model.position_embedding_type in ROTARY
    if rotates and model.qk_pos_emb_head_dim % 2:
        return f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim} must be even: channels are rotated in pairs"
    return None


def sequence_fits_indexer(data: DataConfig, model: ModelConfig) -> str | None:
    """While there are no more keys than an indexer chooses, attention to all keys is the same function."""
    seq, longest = data.seq_length, model.indexer_topk
    if longest is None or seq is None or seq <= longest:
        return None
    return (
        f"--seq-length {seq} is above --indexer-topk {longest}, the keys that the model's indexer chooses for each "
        f"query, which is not computed here; give --seq-length {longest} or less, or --override-model-fields "
        "indexer_topk to train the model without the indexer"
    )


def rules(run: RunConfig) -> list[ConfigRule]:
    """Returns the rules about latent attention, once the model's shape is known."""
    model = run.model
    if shape_is_pending(model, run.checkpoint):
        return []
    return [
        partial(latents_have_a_width, model),
        partial(heads_have_sizes_of_latent_attention, model),
        partial(latents_have_no_bias, model),
        partial(latents_have_plain_softmax, model),
        partial(rotated_channels_form_pairs, model),
        partial(sequence_fits_indexer, run.data, model),
    ]
