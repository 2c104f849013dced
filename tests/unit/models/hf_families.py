"""Small configurations of families that are a table over the one decoder."""

# model_type -> what a configuration of the family has beside SHAPES; a function of the number of layers where it is one.
WIDE = {"wide": 4}  # heads are wider than hidden size / heads
SHARED = {
    "attention_bias": True,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 11,
    "routed_scaling_factor": 2.5,
}
TWO_BASES = {
    "full_attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 5e3,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
FAMILIES = {
    "glm4": {**WIDE, "attention_bias": True},
    "gemma": WIDE,
    "seed_oss": {**WIDE, "attention_bias": True, "mlp_bias": True},
    "ernie4_5": {**WIDE, "use_bias": True},
    "starcoder2": {"use_bias": True, "sliding_window": 7, "norm_epsilon": 1e-3},
    "exaone4": {"sliding_window": 5, "sliding_window_pattern": 2},
    "ministral": {**WIDE, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    "cwm": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "nemotron": {**WIDE, "attention_bias": True, "norm_eps": 1e-4},
    "arcee": {"mlp_bias": True},
    "helium": {"wide": 0, "attention_bias": True, "mlp_bias": True},
    "stablelm": {
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-4,
        "use_parallel_residual": True,
    },
    "hyperclovax": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.3,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "mlp_bias": True,
    },
    "vaultgemma": {**WIDE, "sliding_window": 5, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 1.5},
    "jais2": {"attention_bias": True, "mlp_bias": False},
    "dots1": {**SHARED, "sliding_window": 5, "max_window_layers": 1, "first_k_dense_replace": 1},
    "solar_open": {**SHARED, **WIDE},
    "flex_olmo": {"num_experts": 7, "num_experts_per_tok": 3},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_bigcode": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "num_key_value_heads": 1, "hidden_act": "gelu"},
    "gpt_neox": {"hidden_dropout": 0.0, "num_key_value_heads": None, "rotary_pct": 0.5, "layer_norm_eps": 1e-4},
    "granitemoe": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "attention_bias": True,
    },
    "gpt_oss": {**WIDE, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5, "swiglu_limit": 0.5},
}
FALCON_7B = {"new_decoder_architecture": False}
FAMILIES["falcon"] = {"new_decoder_architecture": True, "hidden_act": "gelu"}
FAMILIES["granite_swa"] = {
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention"],
    "attention_multiplier": 0.2,
    "logits_scaling": 0.3,
    "mlp_bias": True,
}
FAMILIES["iquestcoder"] = {**WIDE, "attention_bias": True}
FAMILIES["olmo3"] = {
    "attention_bias": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": TWO_BASES,
}
FAMILIES["ernie4_5_moe"] = {
    "moe_num_experts": 7,
    "moe_k": 3,
    "moe_intermediate_size": 11,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
FAMILIES["exaone_moe"] = {
    **WIDE,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "num_experts": 12,
    "num_experts_per_tok": 4,
    "n_group": 3,
    "topk_group": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 11,
    "first_k_dense_replace": 1,
}
FAMILIES["hy_v3"] = {
    **WIDE,
    "attention_bias": True,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 11,
}
FAMILIES["granitemoeshared"] = {**FAMILIES["granitemoe"], "shared_intermediate_size": 13}
FAMILIES["youtu"] = {
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
FAMILIES["phi"] = {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-4, "qk_layernorm": True}
FAMILIES["gptj"] = {"num_key_value_heads": None, "rotary_dim": 4}
FAMILIES["codegen"] = {"num_attention_heads": 4, "num_key_value_heads": None, "rotary_dim": 4, "hidden_act": "gelu"}
FAMILIES["persimmon"] = {"num_key_value_heads": None, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-4}
# transformers adds ALiBi twice to the scores of Falcon's eager attention: to the mask, and again where that is added.
FALCON_RW = {**FALCON_7B, "parallel_attn": False, "alibi": True, "attn_implementation": "sdpa"}
FAMILIES["bloom"] = {"hidden_dropout": 0.0, "seq_length": 128}
FAMILIES["cohere"] = {"attention_bias": True, "logit_scale": 0.3, "layer_norm_eps": 1e-3}
FAMILIES["cohere2"] = {
    "attention_bias": True,
    "logit_scale": 0.7,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
# The reference of shape "b" has a query one bit from 0.5, at whose sides gradients differ.
FAMILIES["olmo"] = {"clip_qkv": 0.6, "attention_bias": True}
FAMILIES["mpt"] = {"attn_config": {"clip_qkv": 0.6, "softmax_scale": 0.3}, "max_position_embeddings": 128}
FAMILIES["apertus"] = {
    **WIDE,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 300.0,
    },
}
HUNYUAN = {
    **WIDE,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "dynamic", "alpha": 30.0, "factor": 1.0, "beta_fast": 32, "rope_theta": 5e3},
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 5e3}}
FAMILIES["hunyuan_v1_dense"] = HUNYUAN
FAMILIES["hunyuan_v1_moe"] = {**HUNYUAN, "num_experts": 5, "num_experts_per_tok": 2}
FAMILIES["internlm3"] = {**WIDE, **DYNAMIC, "attention_bias": True, "mlp_bias": True}
FAMILIES["nanochat"] = {**WIDE, "attention_bias": True, "final_logit_softcapping": 2.0, "rms_norm_eps": 1e-4}
SCALED = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 5,
    "max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
FAMILIES["ministral3"] = {**WIDE, "rope_parameters": SCALED}
FAMILIES["mistral4"] = {
    "rope_parameters": {**SCALED, "mscale": 0.7},
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 11,
    "first_k_dense_replace": 1,
}
FAMILIES["granitemoe_swa"] = {
    **{name: value for name, value in FAMILIES["granite_swa"].items() if name != "mlp_bias"},
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 13,
}
FAMILIES["mellum"] = {
    **WIDE,
    "attention_bias": True,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 11,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": TWO_BASES,
}
FAMILIES["kimi_linear"] = {
    "tie_word_embeddings": False,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 11,
    "linear_head_dim": 6,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
FORMS = [
    ("kimi_linear", {"q_lora_rank": 20, "linear_conv_kernel_dim": 3, "norm_topk_prob": False}),
    ("granitemoe_swa", {"layer_rope_theta": [0, 50.0, 0], "shared_intermediate_size": 0}),
    ("mellum", {"norm_topk_prob": False, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    ("ministral3", {"sliding_window": 7}),
    ("mistral4", {"q_lora_rank": None, "norm_topk_prob": False, "first_k_dense_replace": 0}),
    ("nanochat", {"final_logit_softcapping": None, "attention_bias": False}),
    ("youtu", {"q_lora_rank": None, "v_head_dim": 12}),
    ("exaone_moe", {"layer_types": ["full_attention"], "norm_topk_prob": False}),
    ("hy_v3", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_num_shared_experts": 1}),
    ("phi", {"qk_layernorm": False, "hidden_act": "gelu"}),
    ("codegen", {"num_attention_heads": 12}),
    ("persimmon", {"qk_layernorm": False}),
    ("cohere", {"use_qk_norm": True}),
    ("cohere2", {"layer_types": ["full_attention"]}),
    ("mpt", {"attn_config": None}),
    ("olmo", {"clip_qkv": None}),
    ("olmoe", {"clip_qkv": 0.5, "num_experts": 5, "num_experts_per_tok": 2}),
    ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    ("hunyuan_v1_dense", {**DYNAMIC, "attention_bias": False}),
    ("hunyuan_v1_moe", {"rope_parameters": None}),
    ("iquestcoder", DYNAMIC),
    ("stablelm", {"use_parallel_residual": False}),
    ("falcon", {"num_ln_in_parallel_attn": 1}),
    ("falcon", {**FALCON_7B, "bias": True}),
    ("falcon", {**FALCON_7B, "multi_query": False, "num_key_value_heads": None, "hidden_act": "gelu_pytorch_tanh"}),
    ("falcon", {**FALCON_7B, "parallel_attn": False}),
    ("falcon", {**FALCON_RW, "bias": True, "multi_query": False, "num_key_value_heads": None}),
    ("falcon", {**FALCON_RW, "parallel_attn": True}),
]
# What a model is written as without the config.json that it came from, where another family describes it, too.
SUBSETS = ("codegen", "hy_v3")  # another family describes the model, too, in other tensors; the folder decides
WRITTEN_AS = {"cwm": "ministral", "iquestcoder": "llama", "internlm3": "llama"}
