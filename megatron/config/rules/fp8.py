"""Rules about FP8 products."""

from __future__ import annotations

from functools import partial

from megatron.config.fp8 import TENSORWISE, Fp8Config
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.rules.rule import ConfigRule
from megatron.config.rules.sources import shape_is_pending
from megatron.config.run import RunConfig


def fp8_has_no_loss_scale(fp8: Fp8Config, model: ModelConfig) -> str | None:
    """Gradients in FP8 have scales of their own, which the loss scale of fp16 would work against."""
    if model.fp16:
        return f"--fp8-format {fp8.fp8_format} trains in bf16 and not in fp16; give --bf16 instead of --fp16"
    return None


def fp8_results_are_in_bf16(fp8: Fp8Config, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """GPUs multiply FP8 with results in bf16. A CPU emulates any."""
    if not (model.bf16 or model.fp16) and parallel.device != "cpu":
        return (
            f"--fp8-format {fp8.fp8_format} needs --bf16; give it (fp32 parameters are for the emulation by "
            "--device cpu)"
        )
    return None


def fp8_layers_are_left(fp8: Fp8Config, model: ModelConfig) -> str | None:
    """Not all layers stay in bf16."""
    assert model.num_layers
    if len(fp8.layers(model.num_layers)) == 0:
        return (
            f"--first-last-layers-bf16 with --num-layers-at-start-in-bf16 {fp8.num_layers_at_start_in_bf16} and "
            f"--num-layers-at-end-in-bf16 {fp8.num_layers_at_end_in_bf16} leaves none of the {model.num_layers} layers "
            "in FP8; lower them, or remove --fp8-format"
        )
    return None


def fp8_sizes_are_multiples(fp8: Fp8Config, model: ModelConfig, parallel: ParallelConfig) -> str | None:
    """Inputs and outputs of every FP8 layer, as a tensor-parallel rank holds them, are multiples of 16, or of mxfp8's
    32."""
    assert model.num_attention_heads and model.hidden_size
    tp = parallel.tensor_model_parallel_size
    shares = f"tp {tp}"
    widths = {"linear_fc2": model.ffn_dim} if not all(model.moe_layers) else {}
    if model.moe_shared_expert_intermediate_size is not None and any(model.moe_layers):
        widths["shared_experts.linear_fc2"] = model.moe_shared_expert_intermediate_size
    attention = (_latent_sizes if model.multi_latent_attention else _attention_sizes)(model, tp)
    sizes = {"the hidden states (--hidden-size)": (model.hidden_size, "")} | attention
    if model.has_delta_net:
        sizes |= _delta_sizes(model, tp)
    sizes |= {f"the inputs of {name}": (width // tp, shares) for name, width in widths.items()}
    for name, (size, where) in sizes.items():
        if size % fp8.multiple:
            ranks = f" of a rank with {where}" if where and tp > 1 else ""
            return (
                f"FP8 products need sizes that are multiples of {fp8.multiple}: {name}{ranks} are {size}; change the "
                "size" + (", or lower --tensor-model-parallel-size" if ranks else "") + ", or remove --fp8-format"
            )
    return None


def _attention_sizes(model: ModelConfig, tp: int) -> dict[str, tuple[int, str]]:
    """Name -> (size, the ranks that share it)."""
    assert model.num_attention_heads
    d, shares = model.head_dim, f"tp {tp}"
    queries, groups = model.num_attention_heads // tp * d, max(1, model.num_kv_heads // tp)
    gates = queries if model.attention_output_gate else 0
    return {
        "the outputs of linear_qkv (heads and key/value heads times --kv-channels)": (
            queries + gates + 2 * groups * d,
            shares,
        ),
        "the inputs of linear_proj (heads times --kv-channels)": (queries, shares),
    }


def _delta_sizes(model: ModelConfig, tp: int) -> dict[str, tuple[int, str]]:
    keys, values = model.linear_num_key_heads // tp, model.linear_num_value_heads // tp
    channels, shares = values * model.linear_value_head_dim, f"tp {tp}"
    return {
        "the outputs of in_proj (--linear-num-key-heads and -value-heads, their dims)": (
            2 * keys * model.linear_key_head_dim + 2 * channels + 2 * values,
            shares,
        ),
        "the inputs of out_proj (--linear-num-value-heads times --linear-value-head-dim)": (channels, shares),
    }


def _latent_sizes(model: ModelConfig, tp: int) -> dict[str, tuple[int, str]]:
    assert model.num_attention_heads and model.kv_lora_rank
    heads, shares, rotated = model.num_attention_heads // tp, f"tp {tp}", model.qk_pos_emb_head_dim
    return {
        "latents of queries (--q-lora-rank)": (model.q_lora_rank or 0, ""),
        "latents of keys and values (--kv-lora-rank)": (model.kv_lora_rank, ""),
        "outputs of linear_kv_down_proj (--kv-lora-rank and --qk-pos-emb-head-dim)": (model.kv_lora_rank + rotated, ""),
        "queries (heads times --qk-head-dim and --qk-pos-emb-head-dim)": (heads * model.head_dim, shares),
        "keys and values (heads times --qk-head-dim and --v-head-dim)": (
            heads * (model.qk_head_dim + model.v_head_dim),
            shares,
        ),
        "the inputs of linear_proj (heads times --v-head-dim)": (heads * model.v_head_dim, shares),
    }


def fp8_scale_is_known_before_chunks(fp8: Fp8Config, parallel: ParallelConfig) -> str | None:
    """The scale of a whole tensor is known when all of it has arrived, and chunks are multiplied before."""
    tp = parallel.tensor_model_parallel_size
    if fp8.fp8_recipe == TENSORWISE and parallel.tp_comm_overlap and tp > 1:
        return (
            f"--fp8-recipe {TENSORWISE} needs a whole tensor for its scale, and --tp-comm-overlap multiplies the "
            "chunks of one as they arrive; give --fp8-recipe delayed or blockwise, or remove --tp-comm-overlap"
        )
    return None


def rules(run: RunConfig) -> list[ConfigRule]:
    """Returns the rules about FP8, if it is asked for: those about the layers only once their shape is known."""
    if not run.fp8.enabled:
        return []
    always = [
        partial(fp8_has_no_loss_scale, run.fp8, run.model),
        partial(fp8_results_are_in_bf16, run.fp8, run.model, run.parallel),
        partial(fp8_scale_is_known_before_chunks, run.fp8, run.parallel),
    ]
    if shape_is_pending(run.model, run.checkpoint):
        return always
    return [
        *always,
        partial(fp8_layers_are_left, run.fp8, run.model),
        partial(fp8_sizes_are_multiples, run.fp8, run.model, run.parallel),
    ]
