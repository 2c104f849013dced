"""Norm, attention, MLP and block with one process."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.parameter import initialize, local_parameters
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.block import TransformerBlock, TransformerLayer
from megatron.core.transformer.context import Positions
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import NoNorm, Norm
from megatron.kernels.ops import activation
from megatron.kernels.ops.attention_segments import Segments
from megatron.kernels.ops.norm import layer_norm, rms_norm
from megatron.kernels.ops.rope import rotary_frequencies, rotary_tables
from megatron.spec.decoder import output_scale
from tests import pool
from tests.unit.models.builds import CPU, GPT, LLAMA, make_build, spread_constants

NOWHERE = Positions((), None)


def run(block, x, where, caches=None):
    """Through all layers of a block."""
    numbers = [int(number) for number in block.layers]
    layers = range(numbers[0], numbers[-1] + 1)
    return block(x, where, caches, layers=layers, final_norm=block.final_layernorm is not None)


def built(cls, fields, *args, spread=0.3, **options):
    """A layer with its initial values and constants moved apart."""
    build = make_build(fields, pool.groups())
    if cls is Norm:
        layer = build.norm(build.spec.final_norm)
    elif cls is MLP:
        layer = MLP(build, build.spec.layers[0].mlp)
    elif cls is SelfAttention:
        layer = SelfAttention(build, build.spec.layers[0].attention, build.kernels.attention)
    else:
        layer = cls(build, *args, **options)
    initialize(local_parameters(layer), 3)
    spread_constants(local_parameters(layer), spread)
    return layer


def hidden(s=6, b=2, h=32, seed=0):
    return torch.randn(s, b, h, generator=torch.Generator().manual_seed(seed))


class TestNorm:
    def test_rms(self):
        norm, x = built(Norm, LLAMA), hidden()
        assert norm.bias is None
        assert norm(x).equal(rms_norm(x, norm.weight, 1e-5))

    def test_layer_norm(self):
        norm, x = built(Norm, {**GPT, "norm_epsilon": 1e-3}), hidden()
        assert norm(x).equal(layer_norm(x, norm.weight, norm.bias, 1e-3))

    @pytest.mark.parametrize(("fields", "parameters"), [(GPT, "weight"), (GPT, "none"), (LLAMA, "none")])
    def test_parameters_that_are_not_trained(self, fields, parameters):
        """The kind of norm stays what --normalization says, and only what is trained is a parameter."""
        norm, x = built(Norm, {**fields, "norm_parameters": parameters}), hidden()
        trained = [name for name, _ in norm.named_parameters()]
        assert trained == (["weight"] if parameters == "weight" else []) and not dict(norm.named_buffers())
        centered = x - x.mean(-1, keepdim=True) if fields is GPT else x
        expected = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
        torch.testing.assert_close(norm(x), expected)
        assert parameters == "weight" or norm.weight.eq(1).all()

    @pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["rms", "layer"])
    def test_stored_minus_one(self, fields):
        """--apply-layernorm-1p: the same function and gradient, another number in the checkpoint."""
        plain, shifted, x = built(Norm, fields), built(Norm, {**fields, "apply_layernorm_1p": True}), hidden()
        torch.testing.assert_close(shifted.weight, plain.weight - 1.0)
        out, expected = shifted(x), plain(x)
        torch.testing.assert_close(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(shifted.weight.grad, plain.weight.grad)

    @pytest.mark.parametrize(("shifted", "start"), [(False, 1.0), (True, 0.0)])
    def test_starts_as_identity(self, shifted, start):
        norm = built(Norm, {**GPT, "apply_layernorm_1p": shifted}, spread=0.0)
        assert norm.weight.eq(start).all() and norm.bias.eq(0).all()
        assert not norm.weight.info.spec.decay and not norm.bias.info.spec.decay


class TestMLP:
    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            # As Megatron-LM: its fused bias and GELU, which it takes wherever there are biases, is the tanh form.
            ({}, activation.gelu_tanh),
            ({"bias_gelu_fusion": False}, activation.gelu),
            ({"add_bias_linear": False}, activation.gelu),
            ({"add_bias_linear": False, "openai_gelu": True}, activation.gelu_tanh),
            ({"bias_gelu_fusion": False, "openai_gelu": True}, activation.gelu_tanh),
            ({"squared_relu": True}, activation.squared_relu),
            ({"swiglu": True}, activation.swiglu),
        ],
    )
    def test_activation(self, fields, expected):
        build = make_build({**GPT, **fields}, pool.groups())
        assert MLP(build, build.spec.layers[0].mlp).activation is expected

    def test_gated(self):
        mlp, x = built(MLP, LLAMA), hidden()
        gate, up = mlp.linear_fc1.weight
        expected = (F.silu(x @ gate.t()) * (x @ up.t())) @ mlp.linear_fc2.weight.t()
        torch.testing.assert_close(mlp(x), expected)

    def test_plain_with_biases(self):
        mlp, x = built(MLP, GPT), hidden()
        inner = F.gelu(F.linear(x, mlp.linear_fc1.weight, mlp.linear_fc1.bias), approximate="tanh")
        torch.testing.assert_close(mlp(x), F.linear(inner, mlp.linear_fc2.weight, mlp.linear_fc2.bias))

    def test_gated_with_biases(self):
        """The bias of the pair has the pair's shape."""
        mlp, x = built(MLP, {**LLAMA, "add_bias_linear": True}), hidden()
        assert tuple(mlp.linear_fc1.bias.shape) == (2, 48)
        gate, up = (F.linear(x, w, b) for w, b in zip(mlp.linear_fc1.weight, mlp.linear_fc1.bias, strict=True))
        expected = F.linear(F.silu(gate) * up, mlp.linear_fc2.weight, mlp.linear_fc2.bias)
        torch.testing.assert_close(mlp(x), expected)

    def test_clamped_gate(self):
        fields = {**LLAMA, "activation_func_clamp_value": 0.2, "glu_linear_offset": 1.0}
        mlp, x = built(MLP, fields), hidden()
        gate, up = (x @ weight.t() for weight in mlp.linear_fc1.weight)
        assert (gate > 0.2).any() and (up > 0.2).any() and (up < -0.2).any()
        expected = (F.silu(gate.clamp(max=0.2)) * (up.clamp(-0.2, 0.2) + 1)) @ mlp.linear_fc2.weight.t()
        torch.testing.assert_close(mlp(x), expected)


class Cache:
    """All keys and values so far."""

    def __init__(self):
        self.k = self.v = None

    def append(self, k, v):
        self.k, self.v = (new if old is None else torch.cat([old, new]) for old, new in ((self.k, k), (self.v, v)))
        return self.k, self.v


def positions(fields, start, end, segments=None):
    places = torch.arange(start, end).unsqueeze(0)
    rotaries = make_build(fields, pool.groups()).spec.rotaries
    tables = tuple(rotary_tables(places, *rotary_frequencies(rotary, CPU), torch.float32) for rotary in rotaries)
    return Positions(tables, segments)


SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
NO_ROPE = {**LLAMA, "position_embedding_type": "none", "qk_layernorm": True}


class TestAttention:
    @pytest.mark.parametrize("fields", [LLAMA, GPT, NO_ROPE], ids=["llama", "gpt", "rms without rope"])
    def test_with_a_cache_in_pieces(self, fields):
        """Prompt, then several tokens, then one: what the whole sequence gives at once."""
        layer, x = built(SelfAttention, fields), hidden(s=9)
        whole = layer(x, positions(fields, 0, 9))
        cache, parts = Cache(), []
        for start, end in ((0, 4), (4, 8), (8, 9)):
            parts.append(layer(x[start:end], positions(fields, start, end), cache))
        torch.testing.assert_close(torch.cat(parts), whole)

    @pytest.mark.parametrize("fields", [LLAMA, GPT, NO_ROPE], ids=["llama", "gpt", "rms without rope"])
    @pytest.mark.parametrize("kernel", ["auto", "unfused"])
    def test_gradients_reach_everything(self, fields, kernel):
        layer, x = built(SelfAttention, {**fields, "attention_backend": kernel}), hidden().requires_grad_()
        layer(x, positions(fields, 0, 6)).square().sum().backward()
        assert x.grad.abs().sum() > 0
        for name, parameter in layer.named_parameters():
            assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name

    def test_a_sink(self):
        """One that is 0 adds 1 to the sum over keys; a high one leaves nothing; a low one changes nothing."""
        layers = {kind: built(SelfAttention, {**LLAMA, "softmax_type": kind}) for kind in SOFTMAX_TYPES}
        offsets = layers["learnable"].core_attention.softmax_offset
        assert layers["off-by-one"].core_attention is None and offsets.shape == (LLAMA["num_attention_heads"],)
        x, places = hidden(), positions(LLAMA, 0, 6)
        for value, expected in ((0.0, "off-by-one"), (-60.0, "vanilla"), (60.0, None)):
            offsets.data.fill_(value)
            wanted = torch.zeros_like(x) if expected is None else layers[expected](x, places)
            torch.testing.assert_close(layers["learnable"](x, places), wanted)
        assert (layers["off-by-one"](x, places) - layers["vanilla"](x, places)).abs().max() > 1e-3

    def test_causal(self):
        layer, x = built(SelfAttention, LLAMA), hidden()
        out = layer(x, positions(LLAMA, 0, 6))
        x[4] += 1.0
        changed = layer(x, positions(LLAMA, 0, 6))
        assert changed[:4].equal(out[:4]) and not changed[4:].eq(out[4:]).any()

    def test_segments(self):
        layer, x = built(SelfAttention, GPT), hidden()
        segments = Segments(torch.tensor([[0, 0, 0, 1, 1, 1]]).expand(2, 6))
        out = layer(x, positions(GPT, 0, 6, segments))
        alone = [layer(x[r], NOWHERE) for r in (slice(0, 3), slice(3, 6))]
        torch.testing.assert_close(out, torch.cat(alone))

    def test_window(self):
        """Position 4 is seen from 4, 5 and 6, and no further; so it is with a cache, and in the unfused kernel."""
        fields = {**LLAMA, "window_size": "2,0"}
        layer, x = built(SelfAttention, fields), hidden(s=9)
        out = layer(x, positions(fields, 0, 9))
        changed = x.clone()
        changed[4] += 1.0
        differs = layer(changed, positions(fields, 0, 9)).ne(out).flatten(1).any(dim=1)
        assert differs.tolist() == [False] * 4 + [True] * 3 + [False] * 2
        cache, parts = Cache(), []
        for start, end in ((0, 5), (5, 8), (8, 9)):
            parts.append(layer(x[start:end], positions(fields, start, end), cache))
        torch.testing.assert_close(torch.cat(parts), out)
        reference = built(SelfAttention, {**fields, "attention_backend": "unfused"})
        torch.testing.assert_close(reference(x, positions(fields, 0, 9)), out)

    def test_dropout_in_training_only(self):
        layer, x = built(SelfAttention, {**GPT, "attention_dropout": 0.5}), hidden()
        before = torch.get_rng_state()
        first, second = layer(x, NOWHERE), layer(x, NOWHERE)
        assert not first.equal(second)
        assert torch.get_rng_state().equal(before), "dropout draws from its own stream"
        layer.eval()
        assert layer(x, NOWHERE).equal(built(SelfAttention, GPT).eval()(x, NOWHERE))


class TestBlock:
    def test_layer_is_two_residuals(self):
        layer, x = built(TransformerLayer, LLAMA, 0), hidden()
        where = positions(LLAMA, 0, 6)
        middle = x + layer.self_attention(layer.input_layernorm(x), where)
        expected = middle + layer.mlp(layer.pre_mlp_layernorm(middle))
        assert layer(x, where).equal(expected)

    def test_norms_behind_attention_and_mlp(self):
        layer, x = built(TransformerLayer, {**GPT, "post_norm": True}, 0), hidden()
        behind = layer.post_self_attn_layernorm(layer.self_attention(layer.input_layernorm(x), NOWHERE))
        middle = x + behind
        expected = middle + layer.post_mlp_layernorm(layer.mlp(layer.pre_mlp_layernorm(middle)))
        assert layer(x, NOWHERE).equal(expected) and not middle.equal(x + layer.self_attention(x, NOWHERE))

    def test_no_norms_before_them(self):
        fields = {**GPT, "pre_norm": False, "post_norm": True}
        layer, x = built(TransformerLayer, fields, 0), hidden()
        assert isinstance(layer.input_layernorm, NoNorm) and isinstance(layer.pre_mlp_layernorm, NoNorm)
        middle = x + layer.post_self_attn_layernorm(layer.self_attention(x, NOWHERE))
        assert layer(x, NOWHERE).equal(middle + layer.post_mlp_layernorm(layer.mlp(middle)))

    def test_hidden_dropout(self):
        layer, x = built(TransformerLayer, {**GPT, "hidden_dropout": 0.5}, 0), hidden()
        assert not layer(x, NOWHERE).equal(layer(x, NOWHERE))
        layer.eval()
        assert layer(x, NOWHERE).equal(built(TransformerLayer, GPT, 0)(x, NOWHERE))

    def test_part_of_the_layers(self):
        """Names are those of the whole model, and so are the values."""
        whole = built(TransformerBlock, LLAMA, range(0, 2), final_norm=True, spread=0.0)
        part = built(TransformerBlock, LLAMA, range(1, 2), final_norm=False, spread=0.0)
        assert part.final_layernorm is None and list(part.layers) == ["1"]
        assert set(part.state_dict()) < set(whole.state_dict())
        for name, tensor in part.state_dict().items():
            assert tensor.equal(whole.state_dict()[name])
        x, where = hidden(), positions(LLAMA, 0, 6)
        assert run(part, x, where).equal(whole.layers["1"](x, where))

    def test_a_layer_has_the_window_of_its_number(self):
        """In a part of the model too: layer 1 is the one with full attention."""
        fields = {**LLAMA, "window_size": "2,0", "window_attn_skip_freq": "2"}
        x, where = hidden(), positions(fields, 0, 6)
        without, whole, part = (
            built(TransformerBlock, f, range(first, 2), final_norm=False, spread=0.0)
            for f, first in ((LLAMA, 0), (fields, 0), (fields, 1))
        )
        assert not whole.layers["0"](x, where).equal(without.layers["0"](x, where))
        assert whole.layers["1"](x, where).equal(without.layers["1"](x, where))
        assert run(part, x, where).equal(whole.layers["1"](x, where))

    def test_a_cache_a_layer(self):
        block, x = built(TransformerBlock, LLAMA, range(0, 2), final_norm=True), hidden()
        caches = [Cache(), Cache()]
        parts = [run(block, x[a:b], positions(LLAMA, a, b), caches) for a, b in ((0, 5), (5, 6))]
        torch.testing.assert_close(torch.cat(parts), run(block, x, positions(LLAMA, 0, 6)))
        assert not caches[0].k.equal(caches[1].k)

    def test_fp32_residual(self):
        block = built(
            TransformerBlock, {**LLAMA, "bf16": True, "fp32_residual_connection": True}, range(1), final_norm=False
        )
        frequencies, factor = rotary_frequencies(make_build(LLAMA, pool.groups()).spec.rotaries[0], CPU)
        tables = rotary_tables(torch.arange(6).unsqueeze(0), frequencies, factor, torch.bfloat16)
        x = hidden() + 1e-4  # what bf16 cannot hold stays
        out = run(block, x, Positions((tables,), None))
        assert out.dtype == torch.float32 and (out - x).abs().max() > 0.01
        assert out.ne(out.bfloat16().float()).float().mean() > 0.9

    @pytest.mark.parametrize(
        ("fields", "inner", "output"),
        [
            ({}, ("normal", 0.1), ("normal", 0.1 / 2)),  # two layers: 1 / sqrt(2 x 2)
            ({"apply_output_scale_init": False}, ("normal", 0.1), ("normal", 0.1)),
            ({"init_method_xavier_uniform": True}, ("xavier", 1.0), ("xavier", 1.0)),
        ],
    )
    def test_initial_values(self, fields, inner, output):
        layer = make_build({**GPT, **fields}, pool.groups()).spec.layers[0]
        found = (layer.mlp.linear_fc1.init, layer.mlp.linear_fc2.init)
        assert (layer.attention.linear_qkv.init, layer.attention.linear_proj.init) == found
        for init, (kind, scale) in zip(found, (inner, output), strict=True):
            assert init.kind == kind and init.scale == pytest.approx(scale)

    def test_output_scale(self):
        assert output_scale(8) == 0.25

    def test_who_starts_smaller(self):
        layer = built(TransformerLayer, LLAMA, 0, spread=0.0)
        spreads = {name: float(p.detach().std()) for name, p in layer.named_parameters() if p.dim() > 1}
        assert spreads.pop("self_attention.linear_proj.weight") == pytest.approx(0.05, rel=0.1)
        assert spreads.pop("mlp.linear_fc2.weight") == pytest.approx(0.05, rel=0.1)
        assert list(spreads.values()) == pytest.approx([0.1, 0.1], rel=0.1)
