"""Small models with experts, and the layouts and features under which each of them must train the same."""

import dataclasses

from megatron.tooling.layout_parity import reduced
from megatron.tooling.layouts import ParityLayout
from tests.parallel.test_layout_parity import MODELS as DENSE
from tests.unit.config.runs import make_run

SAMPLES = 8
LLAMA = {**DENSE["llama"], "num_experts": 8}
LATENTS = {
    **{name: value for name, value in LLAMA.items() if "group" not in name},
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_layernorm": True,
    "moe_shared_expert_intermediate_size": 40,
}
MODELS = {
    "mixtral": {**LLAMA, "moe_router_topk": 2, "moe_aux_loss_coeff": (0.02,)},
    "qwen2-moe": {
        **LLAMA,
        "add_qkv_bias": True,
        "moe_router_topk": 4,
        "moe_router_pre_softmax": True,
        "moe_layer_freq": "[0,1]",
        "moe_shared_expert_intermediate_size": 40,
        "moe_shared_expert_gate": True,
        "moe_router_load_balancing_type": ("seq_aux_loss", "aux_loss"),
        "moe_aux_loss_coeff": (0.02, 0.01),
        "moe_z_loss_coeff": 1e-2,
    },
    "olmoe": {
        **LLAMA,
        "group_query_attention": False,
        "num_query_groups": None,
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "moe_router_topk": 4,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": ("global_aux_loss",),
        "moe_aux_loss_coeff": (0.02,),
    },
    "deepseek": {
        **LLAMA,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
        "moe_shared_expert_intermediate_size": 40,
        "moe_router_load_balancing_type": ("seq_aux_loss",),
        "moe_aux_loss_coeff": (1e-3,),
    },
    "deepseek-v3": {
        **LATENTS,
        "q_lora_rank": 24,
        "latent_norm_epsilon": 1e-6,
        "position_embedding_type": "yarn",
        "mscale_all_dim": 1.0,
        "rope_scaling_original_max_position_embeddings": 10,
        "llama_4_scaling_beta": 0.5,
        "mtp_num_layers": 1,
        "moe_layer_freq": "[0,1]",
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
        "moe_router_load_balancing_type": ("seq_aux_loss",),
        "moe_aux_loss_coeff": (1e-3,),
    },
    "deepseek-v2-lite": {
        **LATENTS,
        "v_head_dim": 256,
        "moe_router_topk": 4,
        "moe_router_pre_softmax": True,
        "moe_router_topk_normalization": "off",
        "moe_aux_loss_coeff": (1e-3,),
    },
    "biases": {
        **LLAMA,
        "add_bias_linear": True,
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": (0.02,),
        "moe_shared_expert_intermediate_size": 40,
    },
    # The limit cuts a third of the gates and two thirds of the other values, because initial weights are small.
    "gpt-oss": {
        **{name: value for name, value in LLAMA.items() if name != "swiglu"},
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 0.05,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "window_size": "15,0",
        "window_attn_skip_freq": "2",
        "position_embedding_type": "yarn",
        "yarn_correction_range_round_to_int": False,
        "moe_router_topk": 4,
        "moe_aux_loss_coeff": (0.02,),
    },
    "switch": {
        **LLAMA,
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": ("sinkhorn",),
    },
}
ZERO_1 = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
ZERO_2 = {**ZERO_1, "data_parallel_sharding_strategy": "optim_grads"}
ZERO_3 = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim_grads_params"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {**FULL, "recompute_method": "block"}
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True}
CHUNKS = {"mlp_chunk_size": 24}
PER_TOKEN = {"calculate_per_token_loss": True, "eod_mask_loss": True, "micro_batch_size": 2}


def again(*parts):
    """Flags that recompute these parts of a layer."""
    return {"recompute_granularity": "selective", "recompute_modules": parts}


# name -> model, layout, flags; all accumulate over 8 / dp microbatches unless global_batch_size says otherwise.
CASES = {
    # Two processes: each axis alone.
    "ep 2": ("mixtral", ParityLayout(1, 2, ep=2), {}),
    "ep 2 over tp": ("qwen2-moe", ParityLayout(2, 1, True, ep=2, etp=1), {}),
    "etp 2": ("deepseek", ParityLayout(1, 2, etp=2), {}),
    "etp 2 over tp": ("olmoe", ParityLayout(2, 1, True), {}),
    "ep 2 over cp": ("deepseek", ParityLayout(1, 1, cp=2, ep=2), {}),
    "all-gather": ("mixtral", ParityLayout(1, 2, ep=2), {"moe_token_dispatcher_type": "allgather"}),
    "moe_act, shared experts": ("deepseek", ParityLayout(1, 2, ep=2), again("moe_act", "shared_experts", "norm")),
    "optimizer offload": ("mixtral", ParityLayout(1, 2, ep=2), {**ZERO_1, "optimizer_cpu_offload": True}),
    "per-token loss, micro batch 2": ("qwen2-moe", ParityLayout(2, 1, True, etp=1, ep=2), PER_TOKEN),
    "position": (
        "mixtral",
        ParityLayout(2, 1, True),
        {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "position"},
    ),
    "sinkhorn over tp": ("switch", ParityLayout(2, 1, True, ep=2, etp=1), {}),
    "documents": ("deepseek", ParityLayout(1, 1, cp=2, ep=2), DOCUMENTS),
    "a2a": ("mixtral", ParityLayout(1, 1, cp=2, ep=2, comm_type="a2a"), {}),
    "gathered keys": ("mixtral", ParityLayout(1, 1, cp=2, ep=2, comm_type="all_gather"), {}),
    "biases of experts": ("biases", ParityLayout(2, 1, True, ep=2, etp=1), {}),
    "latents over tp": ("deepseek-v3", ParityLayout(2, 1, True, ep=2, etp=1), again("norm")),
    "latents, core_attn": ("deepseek-v2-lite", ParityLayout(2, 1, True, ep=2, etp=1), again("norm", "core_attn")),
    "latents over cp": ("deepseek-v3", ParityLayout(1, 1, cp=2, ep=2), DOCUMENTS),
    "latents, gathered keys": ("deepseek-v2-lite", ParityLayout(1, 1, cp=2, etp=2, comm_type="all_gather"), {}),
    "latents, a2a": ("deepseek-v3", ParityLayout(1, 1, cp=2, ep=2, comm_type="a2a"), again("core_attn")),
    "latents, mla_up_proj": ("deepseek-v3", ParityLayout(2, 1, True, ep=2, etp=1), again("mla_up_proj", "norm")),
    "latents, mla_up_proj, core_attn": (
        "deepseek-v2-lite",
        ParityLayout(1, 1, cp=2, ep=2),
        again("mla_up_proj", "core_attn", "moe"),
    ),
    "latents, mla_up_proj, norm": ("deepseek-v2-lite", ParityLayout(1, 2, ep=2), again("mla_up_proj", "norm")),
    "latents, mla_up_proj, gathered keys": (
        "deepseek-v3",
        ParityLayout(1, 1, cp=2, ep=2, comm_type="all_gather"),
        again("mla_up_proj"),
    ),
    "latents, ZeRO-1": ("deepseek-v2-lite", ParityLayout(1, 2, ep=2), {**ZERO_1, **again("norm", "moe")}),
    "latents offload": (
        "deepseek-v2-lite",
        ParityLayout(1, 2, ep=2),
        {"num_layers": 4, "fine_grained_activation_offloading": True, "offload_modules": ("core_attn", "qkv_linear")},
    ),
    "sinks over tp": ("gpt-oss", ParityLayout(2, 1, True, ep=2, etp=1), again("norm", "moe_act")),
    "sinks over cp": ("gpt-oss", ParityLayout(1, 1, cp=2, ep=2), DOCUMENTS),
    "sinks, gathered keys": ("gpt-oss", ParityLayout(1, 1, cp=2, etp=2, comm_type="all_gather"), again("core_attn")),
    "sinks, a2a": ("gpt-oss", ParityLayout(1, 1, cp=2, ep=2, comm_type="a2a"), again("core_attn", "moe")),
    "sinks, unfused": ("gpt-oss", ParityLayout(1, 2, etp=2), {"attention_backend": "unfused"}),
    # Four: pairs of axes, and the memory features.
    "sinks, a2a+p2p": ("gpt-oss", ParityLayout(1, 1, cp=4, ep=2, etp=2, comm_type="a2a+p2p"), {}),
    "sinks, ZeRO-3": ("gpt-oss", ParityLayout(2, 2, True, ep=2), {**ZERO_3, **FULL}),
    "sinks, zb-h1": ("gpt-oss", ParityLayout(2, 1, True, pp=2, schedule="zb-h1"), {**ZERO_1, **again("norm")}),
    "sinks, chunks": (
        "gpt-oss",
        ParityLayout(1, 2, pp=2, ep=2, schedule="zb-v"),
        {**again("moe"), **CHUNKS},
    ),
    "sinks, capacity": ("gpt-oss", ParityLayout(1, 2, cp=2, ep=4), {"moe_expert_capacity_factor": 1.0}),
    "sinks, pp 4": ("gpt-oss", ParityLayout(1, 1, pp=4), {}),
    "latents, a2a+p2p": ("deepseek-v3", ParityLayout(1, 1, cp=4, ep=4, comm_type="a2a+p2p"), {}),
    "latents, ZeRO-2": ("deepseek-v3", ParityLayout(1, 4, ep=2, etp=2), ZERO_2),
    "latents, ZeRO-3": ("deepseek-v2-lite", ParityLayout(2, 2, True, ep=2), ZERO_3),
    "latents, pp 2": ("deepseek-v3", ParityLayout(2, 1, True, pp=2), {**FULL, **ZERO_1}),
    "latents, zb-h1": ("deepseek-v2-lite", ParityLayout(2, 1, True, pp=2, schedule="zb-h1"), again("norm")),
    "latents, mla_up_proj, zb-h1": (
        "deepseek-v3",
        ParityLayout(2, 1, True, pp=2, schedule="zb-h1"),
        again("mla_up_proj"),
    ),
    "latents, mla_up_proj, ZeRO-3": (
        "deepseek-v2-lite",
        ParityLayout(2, 2, True, ep=2),
        {**ZERO_3, **again("mla_up_proj")},
    ),
    "latents, zb-v": ("deepseek-v3", ParityLayout(1, 2, pp=2, ep=2, schedule="zb-v"), {}),
    "latents, interleaved": (
        "deepseek-v3",
        ParityLayout(1, 2, pp=2, etp=2, schedule="interleaved", chunks=2),
        {"pipeline_offload_ratio": "0.5"},
    ),
    "latents, pp 4": ("deepseek-v2-lite", ParityLayout(1, 1, pp=4, schedule="gpipe"), {}),
    "latents, pp 4, zb-v": ("deepseek-v3", ParityLayout(1, 1, pp=4, schedule="zb-v"), {}),
    "latents, weights offload": (
        "deepseek-v2-lite",
        ParityLayout(2, 2, True, ep=2, etp=1),
        {**ZERO_1, "cpu_offloading_weights": True, "cpu_offloading_num_layers": 1},
    ),
    "latents, optimizer offload": ("deepseek-v3", ParityLayout(1, 4, ep=4), {**ZERO_2, "optimizer_cpu_offload": True}),
    "biases, ep 2 x etp 2": ("biases", ParityLayout(2, 2, True, ep=2), {**ZERO_1, **again("moe_act")}),
    "biases, cp 2": ("biases", ParityLayout(1, 2, cp=2, ep=4), again("moe")),
    "biases, zb-h1": ("biases", ParityLayout(1, 2, pp=2, etp=2, schedule="zb-h1"), ZERO_1),
    "biases, pp 4": ("biases", ParityLayout(1, 1, pp=4), {}),
    "ep 4, ZeRO-1": ("deepseek", ParityLayout(1, 4, ep=4), ZERO_1),
    "ep 2 x etp 2": ("qwen2-moe", ParityLayout(1, 4, ep=2, etp=2), {}),
    "ep 2, ZeRO-2": ("olmoe", ParityLayout(1, 4, ep=2), ZERO_2),
    "ep 2, ZeRO-3": ("deepseek", ParityLayout(1, 4, ep=2), ZERO_3),
    "ep 4 over tp and dp, moe": ("qwen2-moe", ParityLayout(2, 2, True, ep=4, etp=1), again("moe")),
    "ep 4 over tp and cp": ("deepseek", ParityLayout(2, 1, True, cp=2, ep=4, etp=1), {}),
    "ep 2 over cp, capacity": ("mixtral", ParityLayout(1, 2, cp=2, ep=2), {"moe_expert_capacity_factor": 1.0}),
    "a2a+p2p": ("mixtral", ParityLayout(1, 1, cp=4, ep=4, comm_type="a2a+p2p"), {}),
    "a2a+p2p, etp 2": ("qwen2-moe", ParityLayout(1, 1, cp=4, ep=2, etp=2, comm_type="a2a+p2p"), again("core_attn")),
    "a2a+p2p, edp 2": ("deepseek", ParityLayout(1, 1, cp=4, ep=2, comm_type="a2a+p2p"), ZERO_1),
    "documents over tp and cp": ("olmoe", ParityLayout(2, 1, True, cp=2, ep=2), DOCUMENTS),
    "position, ep 2 x etp 2": (
        "mixtral",
        ParityLayout(2, 2, True, ep=2),
        {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "position"},
    ),
    "per-token loss, ep 2 x etp 2": ("qwen2-moe", ParityLayout(2, 2, True, ep=2), PER_TOKEN),
    "sinkhorn over tp and cp": ("switch", ParityLayout(2, 1, True, cp=2, ep=2), again("moe")),
    "sinkhorn, pp 4": ("switch", ParityLayout(1, 1, pp=4), {}),
    "sinkhorn, per-token loss": ("switch", ParityLayout(2, 2, True, ep=2), PER_TOKEN),
    "no loss": (
        "mixtral",
        ParityLayout(1, 4, ep=2),
        {"moe_router_load_balancing_type": ("none",), "moe_aux_loss_coeff": (0.0,)},
    ),
    "all losses": (
        "deepseek",
        ParityLayout(2, 2, True, ep=2, etp=1),
        {
            "moe_router_load_balancing_type": ("global_aux_loss", "aux_loss", "seq_aux_loss"),
            "moe_aux_loss_coeff": (0.02, 0.01, 0.03),
            "moe_z_loss_coeff": 1e-2,
        },
    ),
    "forced balance": ("deepseek", ParityLayout(1, 2, cp=2, ep=4), {"moe_router_force_load_balancing": True}),
    "all-gather, etp 2": ("olmoe", ParityLayout(1, 4, ep=2, etp=2), {"moe_token_dispatcher_type": "allgather"}),
    "overlapped tp": ("qwen2-moe", ParityLayout(2, 2, True, ep=4, etp=1), {"tp_comm_overlap": True}),
    "moe_act, shared experts, etp 2": (
        "deepseek",
        ParityLayout(2, 2, True, ep=2),
        again("moe_act", "shared_experts", "core_attn"),
    ),
    "moe and mlp": ("qwen2-moe", ParityLayout(1, 2, cp=2, ep=2), again("moe", "mlp")),
    "block": ("olmoe", ParityLayout(1, 2, cp=2, ep=4), BLOCK),
    "optimizer offload, edp 2": ("deepseek", ParityLayout(1, 4, ep=2), {**ZERO_2, "optimizer_cpu_offload": True}),
    "optimizer states offload": ("qwen2-moe", ParityLayout(1, 4, ep=2), {**ZERO_1, "offload_optimizer_states": True}),
    "layers offload": (
        "mixtral",
        ParityLayout(2, 2, True, ep=2, etp=1),
        {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
    ),
    "weights offload": (
        "qwen2-moe",
        ParityLayout(1, 4, ep=2),
        {**ZERO_1, "cpu_offloading_weights": True, "cpu_offloading_num_layers": 1},
    ),
    "modules offload": (
        "olmoe",
        ParityLayout(1, 4, ep=4),
        {"num_layers": 4, "fine_grained_activation_offloading": True, "offload_modules": ("core_attn", "qkv_linear")},
    ),
    # Four, by accumulation and sharding; with ep 4 every expert has one copy.
    "accumulation 1, edp 2, not sharded": ("olmoe", ParityLayout(1, 4, ep=2), {"global_batch_size": 4}),
    "accumulation 1, edp 2, ZeRO-1": ("deepseek", ParityLayout(1, 4, ep=2), {**ZERO_1, "global_batch_size": 4}),
    "accumulation 1, edp 2, ZeRO-2": ("mixtral", ParityLayout(1, 4, ep=2), {**ZERO_2, "global_batch_size": 4}),
    "accumulation 1, edp 2, ZeRO-3": ("qwen2-moe", ParityLayout(1, 4, ep=2), {**ZERO_3, "global_batch_size": 4}),
    "accumulation 1, edp 1, ZeRO-1": ("olmoe", ParityLayout(1, 4, ep=4), {**ZERO_1, "global_batch_size": 4}),
    "accumulation 1, edp 1, ZeRO-2": ("qwen2-moe", ParityLayout(1, 4, ep=4), {**ZERO_2, "global_batch_size": 4}),
    "accumulation 1, edp 1, ZeRO-3": ("mixtral", ParityLayout(1, 4, ep=4), {**ZERO_3, "global_batch_size": 4}),
    "accumulation 4, ZeRO-1": ("olmoe", ParityLayout(2, 2, True, ep=2, etp=1), ZERO_1),
    "accumulation 4, every microbatch": (
        "mixtral",
        ParityLayout(1, 4, ep=2),
        {**ZERO_2, "global_batch_size": 16, "grad_reduce_mode": "every-microbatch"},
    ),
    "accumulation 4, ZeRO-3": ("deepseek", ParityLayout(1, 4, ep=4), {**ZERO_3, "global_batch_size": 16}),
    "instances": ("mixtral", ParityLayout(1, 4, ep=2), {**ZERO_1, "num_distributed_optimizer_instances": 2}),
    # Pipelines of two stages.
    "pp 2": ("deepseek", ParityLayout(1, 2, pp=2, ep=2), FULL),
    "pp 2, zb-h1": ("qwen2-moe", ParityLayout(1, 2, pp=2, ep=2, schedule="zb-h1"), {}),
    "pp 2, interleaved": ("mixtral", ParityLayout(1, 2, pp=2, ep=2, schedule="interleaved", chunks=2), {}),
    "pp 2, interleaved, half offload": (
        "deepseek",
        ParityLayout(1, 2, pp=2, ep=2, schedule="interleaved", chunks=2),
        {"pipeline_offload_ratio": "0.5"},
    ),
    "zb-v": ("olmoe", ParityLayout(1, 2, pp=2, ep=2, schedule="zb-v"), {}),
    "gpipe": ("deepseek", ParityLayout(1, 2, pp=2, etp=2, schedule="gpipe"), {}),
    # Of four.
    "pp 4": ("deepseek", ParityLayout(1, 1, pp=4), BLOCK),
    "pp 4, gpipe": ("olmoe", ParityLayout(1, 1, pp=4, schedule="gpipe"), {}),
    "pp 4, interleaved": ("qwen2-moe", ParityLayout(1, 1, pp=4, schedule="interleaved", chunks=2), again("moe")),
    "pp 4, zb-h1": ("mixtral", ParityLayout(1, 1, pp=4, schedule="zb-h1"), {}),
    "pp 4, zb-v": ("qwen2-moe", ParityLayout(1, 1, pp=4, schedule="zb-v"), {}),
    # Chunks of 24 of the 64 tokens of a sample.
    "chunks": ("biases", ParityLayout(1, 1), {**again("moe"), **CHUNKS}),
    "chunks, ep 2 x etp 2, ZeRO-3": ("deepseek", ParityLayout(2, 2, True, ep=2), {**FULL, **ZERO_3, **CHUNKS}),
    "chunks, capacity": (
        "mixtral",
        ParityLayout(1, 2, cp=2, ep=2),
        {**again("moe"), **CHUNKS, "moe_expert_capacity_factor": 1.0},
    ),
    "chunks, all-gather": (
        "olmoe",
        ParityLayout(1, 2, ep=2),
        {**again("moe"), **CHUNKS, "moe_token_dispatcher_type": "allgather"},
    ),
    "chunks, zb-v": ("qwen2-moe", ParityLayout(1, 2, pp=2, ep=2, schedule="zb-v"), {**again("moe", "mlp"), **CHUNKS}),
    "chunks, zb-h1": (
        "deepseek-v3",
        ParityLayout(2, 1, True, pp=2, schedule="zb-h1"),
        {**again("moe"), **CHUNKS, **ZERO_1},
    ),
    "chunks, half offload": (
        "deepseek",
        ParityLayout(1, 2, pp=2, ep=2, schedule="interleaved", chunks=2),
        {**FULL, **CHUNKS, "pipeline_offload_ratio": "0.5"},
    ),
    "chunks, micro batch 2": ("qwen2-moe", ParityLayout(2, 1, True, etp=1, ep=2), {**FULL, **CHUNKS, **PER_TOKEN}),
    "chunks, sinkhorn": ("switch", ParityLayout(2, 1, True, ep=2, etp=1), {**again("moe"), **CHUNKS}),
    # Eight.
    "latents over 8": ("deepseek-v3", ParityLayout(2, 2, True, cp=2, ep=4, etp=1), {**ZERO_2, **again("core_attn")}),
    "latents over 8, pp 2": ("deepseek-v2-lite", ParityLayout(2, 1, True, pp=2, cp=2, ep=2, etp=2), ZERO_1),
    "ep 8": ("mixtral", ParityLayout(1, 8, ep=8), ZERO_3),
    "ep 4 x etp 2": ("mixtral", ParityLayout(1, 8, ep=4, etp=2), {}),
    "tp 2 x cp 2 x ep 4 x edp 2": ("qwen2-moe", ParityLayout(2, 2, True, cp=2, ep=4, etp=1), ZERO_2),
    "a2a+p2p over tp": ("olmoe", ParityLayout(2, 1, True, cp=4, ep=4, etp=1, comm_type="a2a+p2p"), {}),
    "pp 2 x ep 4 x tp 2": ("deepseek", ParityLayout(2, 2, True, pp=2, ep=4, etp=1), ZERO_1),
    "pp 2 x ep 2 x edp 2": ("olmoe", ParityLayout(1, 4, pp=2, ep=2), ZERO_2),
    "pp 4 x ep 2": ("mixtral", ParityLayout(1, 2, pp=4, ep=2), ZERO_1),
    "pp 4 x ep 2, gpipe": ("qwen2-moe", ParityLayout(1, 2, pp=4, ep=2, schedule="gpipe"), FULL),
    "pp 4 x ep 2, interleaved": ("deepseek", ParityLayout(1, 2, pp=4, ep=2, schedule="interleaved", chunks=2), {}),
    "pp 4 x ep 2, zb-h1": ("olmoe", ParityLayout(1, 2, pp=4, ep=2, schedule="zb-h1"), ZERO_1),
    "pp 4 x ep 2, zb-v": ("deepseek", ParityLayout(1, 2, pp=4, ep=2, schedule="zb-v"), again("moe_act", "norm")),
    "pp 4 x ep 2 over tp": ("qwen2-moe", ParityLayout(2, 1, True, pp=4, ep=2, etp=1), {}),
    "pp 4 x ep 2 over cp": ("mixtral", ParityLayout(1, 1, pp=4, cp=2, ep=2, schedule="zb-h1"), {}),
}
# Each axis, schedule and feature once; the others combine them differently, and train longer.
QUICK = {
    "latents over tp",
    "latents, core_attn",
    "latents, mla_up_proj",
    "latents, gathered keys",
    "latents, a2a",
    "latents, zb-h1",
    "latents, zb-v",
    "ep 2 over tp",
    "sinks over tp",
    "sinks over cp",
    "sinks, gathered keys",
    "sinks, a2a",
    "etp 2",
    "etp 2 over tp",
    "ep 2 over cp",
    "all-gather",
    "ep 2, ZeRO-3",
    "ep 4 over tp and dp, moe",
    "ep 2 over cp, capacity",
    "pp 2",
    "pp 2, zb-h1",
    "documents",
    "sinkhorn over tp and cp",
    "moe_act, shared experts",
    "optimizer offload",
    "a2a+p2p",
    "accumulation 1, edp 2, ZeRO-1",
    "pp 4",
    "chunks",
    "chunks, ep 2 x etp 2, ZeRO-3",
    "chunks, capacity",
    "chunks, zb-v",
}
# Every model meets each of them.
AXES = {
    "tp": lambda layout: layout.tp > 1 and layout.sequence_parallel,
    "cp": lambda layout: layout.cp > 1,
    "pp": lambda layout: layout.pp > 1,
    "pp 4": lambda layout: layout.pp == 4,
    "ep": lambda layout: layout.ep > 1,
    "etp": lambda layout: (layout.etp or layout.tp) > 1,
}
# Flags that change the numbers, so that the reference needs them, too.
NUMERIC = (
    "calculate_per_token_loss",
    "eod_mask_loss",
    "global_batch_size",
    "micro_batch_size",
    "moe_aux_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_router_force_load_balancing",
    "moe_router_load_balancing_type",
    "moe_token_drop_policy",
    "moe_z_loss_coeff",
    "reset_attention_mask",
    "reset_position_ids",
)


def layers_of(layout, flags):
    """As many as the stages or the flags need."""
    return flags.get("num_layers", layout.layers)


def small(model, flags, steps, layers):
    """A run of one of MODELS."""
    made = make_run(**{**MODELS[model], **flags})
    run = reduced(made, steps, layers)
    shape = {"hidden_size": 32, "kv_channels": 8, "ffn_hidden_size": 32}
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, **shape),
        train=dataclasses.replace(
            run.train,
            global_batch_size=flags.get("global_batch_size", SAMPLES),
            micro_batch_size=flags.get("micro_batch_size", 1),
        ),
        recompute=made.recompute,
        optimizer_offload=made.optimizer_offload,
        activation_offload=made.activation_offload,
    )
