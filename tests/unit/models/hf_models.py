"""Small random models of transformers, one of every kind that is converted, saved as folders.

These are written as the installed transformers writes them; published.py has files as publishers wrote them.
"""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GraniteConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    Starcoder2Config,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32ForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM
from transformers.models.glm.modeling_glm import GlmForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeForCausalLM
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaForCausalLM
from transformers.models.granite.modeling_granite import GraniteForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2ForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
from transformers.models.olmo2.modeling_olmo2 import Olmo2ForCausalLM
from transformers.models.olmoe.modeling_olmoe import OlmoeForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM
from transformers.models.smollm3.modeling_smollm3 import SmolLM3ForCausalLM
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2ForCausalLM
from transformers.utils import logging as hf_logging

from tests.unit.models.published import PUBLISHED

# transformers lists it among models with images, and registers no class of its own again.
MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[Mistral4Config] = Mistral4ForCausalLM
SHAPE = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
    "attn_implementation": "eager",
    "experts_implementation": "eager",  # torch.grouped_mm wants widths of multiples of 16 bytes
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.25, 1.5, 1.0299999713897705],
    "long_factor": [0.2, 0.4, 0.1, 31.399999618530273],
}
PARTLY = {
    "partial_rotary_factor": 0.75,
    "short_factor": LONGROPE["short_factor"][1:],
    "long_factor": LONGROPE["long_factor"][1:],
}
CLASSES = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "mistral": (MistralForCausalLM, MistralConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config),
    "gemma3_text": (Gemma3ForCausalLM, Gemma3TextConfig),
    "glm": (GlmForCausalLM, GlmConfig),
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config),
    "kimi_k2": (DeepseekV3ForCausalLM, DeepseekV3Config),
    "glm4_moe_lite": (Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig),
    "deepseek_v32": (DeepseekV32ForCausalLM, DeepseekV32Config),
    "glm_moe_dsa": (GlmMoeDsaForCausalLM, GlmMoeDsaConfig),
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig),
    "granite": (GraniteForCausalLM, GraniteConfig),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config),
    "phi3": (Phi3ForCausalLM, Phi3Config),
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config),
    "minimax_m2": (MiniMaxM2ForCausalLM, MiniMaxM2Config),
    "mixtral": (MixtralForCausalLM, MixtralConfig),
    "qwen2_moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig),
    "qwen3_5_text": (Qwen3_5ForCausalLM, Qwen3_5TextConfig),
    "qwen3_5_moe_text": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig),
}
# As in Granite 3; Granite's mixtures of experts divide their logits by 6.
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
    "logits_scaling": 6.0,
}
GEMMA2 = {
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 5,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
# name -> (model_type, what it changes in SHAPE)
MODELS = {
    "llama": ("llama", {}),
    "llama without groups": ("llama", {"num_key_value_heads": 8}),
    "llama with one group": ("llama", {"num_key_value_heads": 1}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, biases of attention": ("llama", {"attention_bias": True}),
    "llama, biases of the MLP": ("llama", {"mlp_bias": True}),
    "llama with wide heads": ("llama", {"head_dim": 24, "vocab_size": 128}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "llama 3.2": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn between numbers": ("llama", {"rope_parameters": {**YARN, "truncate": False}}),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"vocab_size": 101}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3 with biases": ("qwen3", {"head_dim": 20, "attention_bias": True}),
    "glm": ("glm", {"head_dim": 12, "pad_token_id": 0}),
    "olmo2": ("olmo2", {"pad_token_id": 0}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "granite": ("granite", {**GRANITE, "tie_word_embeddings": True, "pad_token_id": 0}),
    "granite with biases": ("granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "gemma2": ("gemma2", {**GEMMA2, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}),
    "gemma2 without caps": (
        "gemma2",
        {
            **GEMMA2,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA2,
            "head_dim": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma3 without windows": (
        "gemma3_text",
        {**GEMMA2, "layer_types": ["full_attention"] * 3, "attention_bias": True, "final_logit_softcapping": 2.0},
    ),
    "phi3": ("phi3", {"sliding_window": 7, "pad_token_id": 0}),
    # The first is shorter, the second longer than its original length in the tests of logits; both outgrow it in those
    # of generation.
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 48, "pad_token_id": 0, "sliding_window": 17},
    ),
    "phi4 mini": (
        "phi3",
        {
            "rope_parameters": LONGROPE | PARTLY,
            "original_max_position_embeddings": 16,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2": ("starcoder2", {"rms_norm_eps": None, "sliding_window": 7}),
    "qwen3 tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}

SLIDES = {"use_sliding_window": True, "sliding_window": 5}
QWEN2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 4,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
# Latent attention; heads have 6 channels of queries and keys, 2 of them rotated, and more or fewer of values.
LATENTS = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 20,
}
# An indexer that chooses all keys of the sequences in tests of logits; more channels than are rotated.
INDEXER = {"index_topk": 80, "index_n_heads": 3, "index_head_dim": 6}
LATENT_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.9}
# The same with experts, whose widths are no multiples of 8.
EXPERTS = {
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44}),
    "mixtral with window": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 7, "tie_word_embeddings": True},
    ),
    "qwen2 moe": ("qwen2_moe", {**QWEN2_MOE, "decoder_sparse_step": 2}),
    "qwen2 moe with windows": (
        "qwen2_moe",
        {
            **QWEN2_MOE,
            **SLIDES,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen3 moe": (
        "qwen3_moe",
        {
            "head_dim": 20,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
        },
    ),
    "qwen3 moe with windows": (
        "qwen3_moe",
        {
            **SLIDES,
            "head_dim": 24,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 18,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ),
    "glm4 moe": (
        "glm4_moe",
        {
            "head_dim": 12,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "num_mtp_layers": 0,
        },
    ),
    "glm4 moe with groups": (
        "glm4_moe",
        {
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 12,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "num_mtp_layers": 0,
        },
    ),
    "deepseek v3": (
        "deepseek_v3",
        {**LATENTS, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0},
    ),
    "moonlight": (
        "deepseek_v3",
        {
            **LATENTS,
            "q_lora_rank": None,
            "v_head_dim": 9,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": LATENT_YARN,
            "num_mtp_layers": 0,
        },
    ),
    "deepseek v2": (
        "deepseek_v2",
        {
            **LATENTS,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "rope_parameters": LATENT_YARN,
            "first_k_dense_replace": 2,
        },
    ),
    "deepseek v2 lite": (
        "deepseek_v2",
        {**LATENTS, "q_lora_rank": None, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
    "glm 4.7 flash": (
        "glm4_moe_lite",
        {**LATENTS, "v_head_dim": 12, "mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": 18},
    ),
    "deepseek v3.2": (
        "deepseek_v32",
        {
            **LATENTS,
            **INDEXER,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "first_k_dense_replace": 1,
        },
    ),
    "glm 5": (
        "glm_moe_dsa",
        {
            **LATENTS,
            **INDEXER,
            "q_lora_rank": 18,
            "v_head_dim": 11,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "minimax m2": (
        "minimax_m2",
        {
            "head_dim": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 20,
            "rotary_dim": 12,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 20, "pad_token_id": 0}),
    "olmoe with one expert per token": (
        "olmoe",
        {
            "num_experts": 9,
            "num_experts_per_tok": 1,
            "intermediate_size": 14,
            "num_key_value_heads": 8,
            "pad_token_id": 0,
        },
    ),
}

_DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_DELTA_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
# Gated delta nets in most layers, which have a test file of their own.
DELTA_NETS = {
    "qwen3 next": (
        "qwen3_next",
        {**_DELTA, **_DELTA_EXPERTS, "mlp_only_layers": [1], "linear_conv_kernel_dim": 3},
    ),
    "qwen3.5": ("qwen3_5_text", {**_DELTA, "linear_num_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3.5 moe": ("qwen3_5_moe_text", {**_DELTA, **_DELTA_EXPERTS, "linear_num_value_heads": 12}),
}


def make_hf_model(name, dtype=torch.float32, **changes):
    """A model with weights that give it away when they are mixed up: norms and biases are no constants."""
    family, own = (MODELS | EXPERTS | DELTA_NETS)[name]
    cls, config = CLASSES[family]
    model = random_model(cls, config(**{**SHAPE, **own, **changes})).to(dtype)
    for module in model.modules():
        if "e_score_correction_bias" in module._buffers:  # which files hold in fp32
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    return model


@torch.no_grad()
def random_model(cls, config, seed=7):
    """The same model for the same configuration and seed, in fp32."""
    torch.manual_seed(seed)
    model = cls(config).eval()
    for key, parameter in model.named_parameters():
        if "norm" in key or key.endswith(("bias", "sinks")):
            parameter.add_(torch.randn(parameter.shape) * 0.1)
        if key.endswith("A_log"):  # states that last for a sequence: the first values forget most tokens at once
            parameter.sub_(5.0)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape) * 0.1)
    return model


def save_hf_model(name, folder, dtype=torch.float32, **options):
    """Write it with transformers and return the model."""
    model = make_hf_model(name, dtype)
    model.save_pretrained(folder, **options)
    return model


def attention_of(model_type):
    """torch's attention, where transformers can use it: it does not cap scores, and has no sinks."""
    alone = ("gemma2", "vaultgemma", "gpt_oss", "granite_swa", "granitemoe_swa", "gptj", "codegen", "bloom")
    return "eager" if model_type in alone else "sdpa"


def has_experts(model_type):
    return model_type in {"kimi_k2", *(family for family, _ in EXPERTS.values())}


def save_published(name, folder, dtype):
    """(a random model of transformers, its tensors), written under the config.json of PUBLISHED.

    Phi-3 without LongRoPE has its tensors as a Mistral has them: that is how it is exported.
    As in SHAPE weights are larger than the file says: with 0.02 so small a model says the same of every token.
    """
    fields = PUBLISHED[name]
    packed = fields["model_type"] == "baichuan"  # transformers has none: a Llama whose three projections are one tensor
    cls, config = (LlamaForCausalLM, LlamaConfig) if packed else CLASSES[fields["model_type"]]
    changed = {"initializer_range": 0.1, "attn_implementation": attention_of(fields["model_type"])}
    changed["model_type"] = fields["model_type"] if packed else config.model_type  # Kimi-K2's has another name
    model = random_model(cls, config.from_dict({**fields, **changed, "experts_implementation": "eager"}))
    for parameter in model.parameters():  # and not the rotary frequencies, which from_pretrained keeps in fp32, too
        parameter.data = parameter.to(dtype)
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if has_experts(fields["model_type"]):  # in memory their tensors are stacked
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
    stored = dict(tensors)
    for layer in range(fields["num_hidden_layers"] if packed else 0):
        at = f"model.layers.{layer}.self_attn."
        stored[f"{at}W_pack.weight"] = torch.cat([stored.pop(f"{at}{x}_proj.weight") for x in "qkv"])
        stored[f"{at}rotary_emb.inv_freq"] = torch.ones(4)
    if fields["model_type"] == "phi3" and fields["rope_scaling"] is None:
        heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
        rows = {x: model.config.hidden_size // heads * each for x, each in (("q", heads), ("k", groups), ("v", groups))}
        for layer in range(fields["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            qkv = tensors.pop(f"{at}self_attn.qkv_proj.weight").split(list(rows.values()))
            tensors |= {f"{at}self_attn.{x}_proj.weight": part for x, part in zip(rows, qkv, strict=True)}
            halves = tensors.pop(f"{at}mlp.gate_up_proj.weight").chunk(2)
            tensors |= {f"{at}mlp.{x}_proj.weight": half for x, half in zip(("gate", "up"), halves, strict=True)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**fields, "torch_dtype": str(dtype).removeprefix("torch.")}))
    return model, tensors


def load_quietly(folder, caplog, attention=None):
    """The model that transformers loads from a folder of ours, without a warning and with every tensor in its place.

    attention: its implementation; None for what this version of transformers takes by itself.
    """
    hf_logging.enable_propagation()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, experts_implementation="eager", attn_implementation=attention
        )
    finally:
        hf_logging.disable_propagation()
    assert not any(info.values()), info
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [], warnings
    return model


def edit_json(path, **changes):
    """Set fields of a JSON file; None deletes one."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content.pop(key, None)
        if value is not None:
            content[key] = value
    path.write_text(json.dumps(content))
