"""Small random models of transformers, one of every kind that is converted, saved as folders."""

import json

import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

SHAPE = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
    "attn_implementation": "eager",
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
# name -> (model class, configuration class, what it changes in SHAPE)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama without groups": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 8}),
    "llama with one group": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama with biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": (LlamaForCausalLM, LlamaConfig, {"head_dim": 24, "vocab_size": 128}),
    "llama 3.1": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama 3.2": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR}),
    "llama, yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "mistral without window": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"vocab_size": 101}),
    "qwen2 tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2 with windows": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 20}),
    "qwen3 tied": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True}),
}


@torch.no_grad()
def make_hf_model(name, dtype=torch.float32, **changes):
    """A model with weights that give it away when they are mixed up: norms and biases are no constants."""
    cls, config, own = MODELS[name]
    torch.manual_seed(7)
    model = cls(config(**{**SHAPE, **own, **changes})).eval()
    for key, parameter in model.named_parameters():
        if "norm" in key or key.endswith("bias"):
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.to(dtype)


def save_hf_model(name, folder, dtype=torch.float32, **options):
    """Write it with transformers and return the model."""
    model = make_hf_model(name, dtype)
    model.save_pretrained(folder, **options)
    return model


def edit_json(path, **changes):
    """Set fields of a JSON file; None deletes one."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content.pop(key, None)
        if value is not None:
            content[key] = value
    path.write_text(json.dumps(content))
