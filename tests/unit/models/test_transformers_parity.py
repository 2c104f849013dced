"""The whole decoder against transformers' models with the same weights: logits, loss and every gradient."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from tests import pool
from tests.unit.models.builds import LLAMA, VOCAB, assert_gradients, losses, make_ids, make_model

H, HEADS, GROUPS, FFN, D = 64, 8, 2, 96, 8
OURS = {**LLAMA, "hidden_size": H, "num_attention_heads": HEADS, "num_query_groups": GROUPS, "ffn_hidden_size": FFN}
THEIRS = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": D,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attention_dropout": 0.0,
    "initializer_range": 0.1,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "use_rope_scaling": True,
    "rope_scaling_factor": 4.0,
    "rope_scaling_original_max_position_embeddings": 32,
    "rotary_base": 500000.0,
}
WINDOW, SKIP = {"window_size": "4,0"}, {"window_attn_skip_freq": "2"}
ROPE3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# name -> (our fields, their class, their configuration)
FAMILIES = {
    "llama untied": ({}, LlamaForCausalLM, LlamaConfig(**THEIRS, tie_word_embeddings=False)),
    "llama tied": (
        {"untie_embeddings_and_output_weights": False},
        LlamaForCausalLM,
        LlamaConfig(**THEIRS, tie_word_embeddings=True),
    ),
    "llama 3.1": (LLAMA3, LlamaForCausalLM, LlamaConfig(**THEIRS, tie_word_embeddings=False, rope_parameters=ROPE3)),
    "llama with biases": (
        {"add_bias_linear": True},
        LlamaForCausalLM,
        LlamaConfig(**THEIRS, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    ),
    "qwen2": ({"add_qkv_bias": True}, Qwen2ForCausalLM, Qwen2Config(**THEIRS, tie_word_embeddings=False)),
    # Their sliding_window counts the query's own key, LEFT of --window-size does not.
    "mistral with a window": (
        {"window_size": "4,0"},
        MistralForCausalLM,
        MistralConfig(**THEIRS, tie_word_embeddings=False, sliding_window=5),
    ),
    "qwen2 with a window in its last layer": (
        {"add_qkv_bias": True, "window_size": "4,0", "window_attn_skip_freq": "[0]+[1]"},
        Qwen2ForCausalLM,
        Qwen2Config(
            **THEIRS, tie_word_embeddings=False, use_sliding_window=True, sliding_window=5, max_window_layers=1
        ),
    ),
    "qwen3": ({"qk_layernorm": True}, Qwen3ForCausalLM, Qwen3Config(**THEIRS, tie_word_embeddings=True)),
}
FAMILIES["qwen3"][0]["untie_embeddings_and_output_weights"] = False


def fused_qkv(q, k, v):
    """Per group of heads: its queries, then key, then value. Works for weights [heads * d, h] and biases."""
    parts = [x.unflatten(0, (GROUPS, -1)) for x in (q, k, v)]
    return torch.cat(parts, dim=1)


def fused_gate_up(gate, up):
    return torch.stack([gate, up])


def in_our_names(tensors):
    """Their named tensors (weights or gradients) as ours: name -> tensor without the vocabulary's padding."""
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    found = {ours: tensors[theirs] for ours, theirs in names.items() if theirs in tensors}
    for layer in range(2):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for mine, other in (
            ("input_layernorm", "input_layernorm"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
            ("self_attention.linear_proj", "self_attn.o_proj"),
            ("self_attention.q_layernorm", "self_attn.q_norm"),
            ("self_attention.k_layernorm", "self_attn.k_norm"),
            ("mlp.linear_fc2", "mlp.down_proj"),
        ):
            for kind in ("weight", "bias"):
                if f"{theirs}{other}.{kind}" in tensors:
                    found[f"{ours}{mine}.{kind}"] = tensors[f"{theirs}{other}.{kind}"]
        for kind in ("weight", "bias"):
            if f"{theirs}self_attn.q_proj.{kind}" in tensors:
                qkv = [tensors[f"{theirs}self_attn.{x}_proj.{kind}"] for x in "qkv"]
                found[f"{ours}self_attention.linear_qkv.{kind}"] = fused_qkv(*qkv)
            if f"{theirs}mlp.gate_proj.{kind}" in tensors:
                pair = [tensors[f"{theirs}mlp.{x}_proj.{kind}"] for x in ("gate", "up")]
                found[f"{ours}mlp.linear_fc1.{kind}"] = fused_gate_up(*pair)
    return found


@torch.no_grad()
def both(family, **more):
    """(our model, theirs) with the same weights; norms and biases are moved off their initial constants."""
    fields, cls, config = FAMILIES[family]
    torch.manual_seed(7)
    theirs = cls(config).eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    ours = make_model({**OURS, **fields, **more}, pool.groups())
    mine, others = dict(ours.named_parameters()), in_our_names(dict(theirs.named_parameters()))
    assert mine.keys() == others.keys(), "every parameter of each model has its partner"
    for name, parameter in mine.items():
        rows = VOCAB if parameter.shape[0] == 112 else parameter.shape[0]  # the padding keeps our values
        parameter[:rows] = others[name]
    return ours, theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_loss_and_gradients(family):
    ours, theirs = both(family)
    ids = make_ids(2, 40)
    tokens, labels = ids[:, :-1], ids[:, 1:]
    with torch.no_grad():
        logits = ours(tokens, torch.arange(40).unsqueeze(0))[..., :VOCAB].transpose(0, 1)
    expected = theirs(tokens).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    loss = losses(ours, ids)
    true_loss = F.cross_entropy(expected.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(loss, true_loss, rtol=1e-5, atol=1e-5)
    loss.mean().backward()
    true_loss.mean().backward()
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, gradient in found.items():
        if gradient.shape[0] == 112:
            assert gradient[VOCAB:].eq(0).all(), f"{name}: padding rows have no gradient"
            found[name] = gradient[:VOCAB]
    assert_gradients(found, in_our_names({n: p.grad for n, p in theirs.named_parameters()}))


@torch.no_grad()
def test_a_window_changes_the_model():
    """The same weights with every window agree up to its length, and differ after it."""
    tokens, positions = make_ids(1, 12)[:, :-1], torch.arange(12).unsqueeze(0)
    full, windowed, half = (both("llama untied", **more)[0] for more in ({}, WINDOW, {**WINDOW, **SKIP}))
    logits = [model(tokens, positions) for model in (full, windowed, half)]
    for a, b in itertools.combinations(logits, 2):
        torch.testing.assert_close(a[:5], b[:5])
        assert ((a[5:] - b[5:]).abs().amax(dim=(1, 2)) > 1e-3).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits(family):
    """Rounding in the same places gives the same bits nearly everywhere."""
    ours, theirs = both(family)
    rounded = {**OURS, **FAMILIES[family][0], "bf16": True, "attention_backend": "unfused"}
    ours_bf16 = make_model(rounded, pool.groups())
    ours_bf16.load_state_dict(ours.state_dict())
    tokens, positions = make_ids(40, 8)[:, :-1], torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        true = theirs(tokens).logits
        frequencies = theirs.model.rotary_emb.inv_freq.clone()
        theirs = theirs.bfloat16()
        theirs.model.rotary_emb.inv_freq = frequencies  # a model loaded in bf16 keeps them in fp32, too
        expected = theirs(tokens).logits
        logits = ours_bf16(tokens, positions)[..., :VOCAB].transpose(0, 1)
    assert logits.dtype == expected.dtype == torch.bfloat16
    # A row-parallel bias is added after the sum over tp, so it rounds on its own: about a fifth of the logits are
    # equal. All else rounds as theirs does, but a last bit in fp32 may tip a rounding, and so all that follows in its
    # sample.
    if family != "llama with biases":
        assert logits.eq(expected).float().mean() > 0.8
    ours_off, theirs_off = ((x.float() - true).abs().mean() for x in (logits, expected))
    assert ours_off < 1.1 * theirs_off
