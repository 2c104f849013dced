"""Kimi delta attention, whose decay is that of each channel of a key, against transformers."""

import dataclasses

import pytest
import torch
from transformers import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from megatron.base.errors import ConfigError
from megatron.core.models.hf.families import read_config, write_config
from megatron.core.transformer.context import Positions
from megatron.core.transformer.delta_net import GatedDeltaNet
from megatron.spec.parameter import LEAST_STEP
from tests import pool
from tests.unit.kernels.close import random
from tests.unit.models.builds import LATENT_LITE, make_build, make_model
from tests.unit.models.hf_models import save_hf_model

HEADS, CHANNELS, HIDDEN = 4, 8, 32
FIELDS = {
    **LATENT_LITE,
    "experimental_attention_variant": "kda",
    "linear_attention_freq": "2",
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": CHANNELS,
    "linear_value_head_dim": CHANNELS,
    "linear_conv_kernel_dim": 3,
}


def theirs():
    """A layer with random weights, none of which is a constant."""
    config = KimiLinearConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_heads=HEADS,
        linear_head_dim=CHANNELS,
        linear_conv_kernel_dim=3,
        rms_norm_eps=1e-5,
    )
    torch.manual_seed(3)
    layer = KimiLinearDeltaAttention(config, 0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (1.0 if "norm" in name else 0.0))
            if name.endswith("A_log"):  # states that last for a sequence
                parameter.sub_(3.0)
    return layer


def in_our_layout(tensors):
    """Our names -> their weights or gradients, with the rows of a head together."""

    def heads(*names):
        return torch.cat([tensors[f"{name}.weight"].unflatten(0, (HEADS, -1)) for name in names], dim=1)

    convolutions = tensors["conv1d.weight"].unflatten(0, (3, HEADS, CHANNELS))
    return {
        "in_proj.weight": heads("q_proj", "k_proj", "v_proj", "b_proj"),
        "latent_proj.weight": torch.cat([tensors["forget_gate.f_a_proj.weight"], tensors["g_a_proj.weight"]]),
        "decay_proj.weight": heads("forget_gate.f_b_proj"),
        "gate_proj.weight": heads("g_b_proj"),
        "conv1d.weight": convolutions.transpose(0, 1).flatten(1, 2),
        "decay.A_log": tensors["forget_gate.A_log"].flatten(),
        "decay.dt_bias": tensors["forget_gate.dt_bias"].unflatten(0, (HEADS, CHANNELS)),
        "out_norm.weight": tensors["o_norm.weight"],
        "out_proj.weight": tensors["o_proj.weight"],
    }


def ours(reference, *, recomputes=False):
    """Our layer with the weights of theirs."""
    build = make_build(FIELDS, pool.groups())
    layer = GatedDeltaNet(build, build.spec.layers[0].attention, recomputes=recomputes)
    weights = in_our_layout(dict(reference.named_parameters()))
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return layer


def assert_close(a, b):
    assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("samples", "length"), [(1, 7), (3, 65), (2, 131)])
def test_outputs_and_gradients(samples, length, recomputes):
    """Lengths around the chunks of 64 tokens in which both compute the rule."""
    reference = theirs()
    layer = ours(reference, recomputes=recomputes)
    x, grad = random(length, samples, HIDDEN, seed=1), random(length, samples, HIDDEN, seed=2)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = layer(mine, Positions((), None))
    expected = reference(other.transpose(0, 1)).transpose(0, 1)
    assert_close(out, expected)
    out.backward(grad)
    expected.backward(grad)
    assert_close(mine.grad, other.grad)
    gradients = in_our_layout({name: parameter.grad for name, parameter in reference.named_parameters()})
    for name, parameter in layer.named_parameters():
        found = parameter.main_grad if parameter.grad is None else parameter.grad
        assert (found - gradients[name]).abs().max() <= 1e-5 * gradients[name].abs().max(), name


class OneState:
    """A StateCache of sequences without padding."""

    window = state = None

    def load(self, x):
        return x, self.window, self.state

    def store(self, window, state):
        self.window, self.state = window, state


def test_tokens_one_after_the_other():
    reference = theirs()
    layer, cache, x = ours(reference), OneState(), random(20, 2, HIDDEN, seed=1)
    with torch.no_grad():
        parts = [layer(part, Positions((), None), cache) for part in x.split([9, *[1] * 11])]
        assert_close(torch.cat(parts), reference(x.transpose(0, 1)).transpose(0, 1))


def test_steps_begin_where_those_of_the_published_model_do():
    """Before a token changes it, the step of a channel is log-uniform between 0.001 and 0.1."""
    model = make_model(FIELDS, pool.groups())
    bias = dict(model.named_parameters())["decoder.layers.0.self_attention.decay.dt_bias"].detach()
    steps = torch.nn.functional.softplus(bias)
    assert bias.shape == (HEADS, CHANNELS)
    assert LEAST_STEP * 0.999 <= steps.min() < 0.005 and 0.02 < steps.max() <= 0.1001


def test_is_not_written_as_a_model_with_the_other_form(tmp_path):
    save_hf_model("qwen3.5", tmp_path)
    _, model = read_config(tmp_path)
    with pytest.raises(ConfigError, match="experimental_attention_variant kda"):
        write_config(dataclasses.replace(model, experimental_attention_variant="kda"))
    same = dataclasses.replace(model, experimental_attention_variant="gated_delta_net")
    assert write_config(same)[1] == write_config(model)[1]
