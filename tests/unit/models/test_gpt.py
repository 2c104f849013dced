"""The whole decoder: names, counts, losses, and the published shapes."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.config.presets import PRESETS, preset
from megatron.core.models.gpt import GPTModel
from megatron.core.parameter import local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.kernels.ops.attention_segments import Segments
from tests import pool
from tests.unit.models.builds import CPU, FACTORS, GPT, LLAMA, VOCAB, losses, make_ids, make_model

# Of the models as published.
PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen3.5-9b": 8_953_803_264,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
}


def test_names_and_shapes():
    """What checkpoints and converters rely on."""
    layer = "decoder.layers.1."
    found = {name: tuple(p.shape) for name, p in local_parameters(make_model(LLAMA, pool.groups())).items()}
    assert {name: shape for name, shape in found.items() if ".layers.0." not in name} == {
        "embedding.word_embeddings.weight": (112, 32),
        layer + "input_layernorm.weight": (32,),
        layer + "self_attention.linear_qkv.weight": (4, 16, 32),  # 4 groups of 2 queries, a key and a value of 4
        layer + "self_attention.linear_proj.weight": (32, 32),
        layer + "pre_mlp_layernorm.weight": (32,),
        layer + "mlp.linear_fc1.weight": (2, 48, 32),
        layer + "mlp.linear_fc2.weight": (32, 48),
        "decoder.final_layernorm.weight": (32,),
        "output_layer.weight": (112, 32),
    }
    found = {name: tuple(p.shape) for name, p in local_parameters(make_model(GPT, pool.groups())).items()}
    assert {name: shape for name, shape in found.items() if ".layers.0." not in name} == {
        "embedding.word_embeddings.weight": (112, 32),
        "embedding.position_embeddings.weight": (64, 32),
        layer + "input_layernorm.weight": (32,),
        layer + "input_layernorm.bias": (32,),
        layer + "self_attention.linear_qkv.weight": (8, 12, 32),
        layer + "self_attention.linear_qkv.bias": (8, 12),
        layer + "self_attention.linear_proj.weight": (32, 32),
        layer + "self_attention.linear_proj.bias": (32,),
        layer + "self_attention.q_layernorm.weight": (4,),
        layer + "self_attention.q_layernorm.bias": (4,),
        layer + "self_attention.k_layernorm.weight": (4,),
        layer + "self_attention.k_layernorm.bias": (4,),
        layer + "pre_mlp_layernorm.weight": (32,),
        layer + "pre_mlp_layernorm.bias": (32,),
        layer + "mlp.linear_fc1.weight": (64, 32),
        layer + "mlp.linear_fc1.bias": (64,),
        layer + "mlp.linear_fc2.weight": (32, 64),
        layer + "mlp.linear_fc2.bias": (32,),
        "decoder.final_layernorm.weight": (32,),
        "decoder.final_layernorm.bias": (32,),
    }


@pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["llama", "gpt"])
class TestLoss:
    def test_is_the_cross_entropy_of_the_logits(self, fields):
        model, ids = make_model(fields, pool.groups(), spread=0.1), make_ids(3, 10)
        with torch.no_grad():
            logits = model(ids[:, :-1], torch.arange(10).unsqueeze(0))
            assert logits.shape == (10, 3, 112)
            loss = losses(model, ids)
        expected = F.cross_entropy(logits[..., :VOCAB].permute(1, 2, 0), ids[:, 1:], reduction="none")
        assert loss.shape == (3, 10) and loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected)

    def test_padding_of_the_vocabulary_does_not_matter(self, fields):
        ids = make_ids(2, 10)
        padded = make_model(fields, pool.groups())
        exact = make_model({**fields, "make_vocab_size_divisible_by": 1}, pool.groups())
        loss, expected = losses(padded, ids), losses(exact, ids)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        loss.sum().backward()
        expected.sum().backward()
        for name, parameter in exact.named_parameters():
            gradient = padded.get_parameter(name).grad
            assert gradient[parameter.shape[0] :].eq(0).all(), name
            scale = parameter.grad.abs().max().clamp(min=1e-3)
            torch.testing.assert_close(
                gradient[: parameter.shape[0]] / scale, parameter.grad / scale, rtol=0, atol=1e-5
            )

    def test_padding_of_the_vocabulary_takes_part_where_it_is_not_masked(self, fields):
        """As in Megatron-LM, to which the rows of the padding are rows like all others."""
        fields = {**fields, "mask_padded_vocabulary": False}
        ids, found, plain = make_ids(3, 10), make_model(fields, pool.groups()), make_model(fields, pool.groups())
        loss = losses(found, ids)
        logits = plain(ids[:, :-1], torch.arange(10).unsqueeze(0))
        expected = F.cross_entropy(logits.permute(1, 2, 0), ids[:, 1:], reduction="none")
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
        masked = make_model({**fields, "mask_padded_vocabulary": True}, pool.groups())
        assert (expected - losses(masked, ids)).min() > 1e-3
        loss.sum().backward()
        expected.sum().backward()
        for name, parameter in plain.named_parameters():
            gradient = found.get_parameter(name).grad
            scale = parameter.grad.abs().max().clamp(min=0.1)  # a bias of keys has none but by rounding
            torch.testing.assert_close(gradient / scale, parameter.grad / scale, rtol=0, atol=1e-5)

    def test_with_caches_only_the_last_position_has_logits(self, fields):
        """And they are those of the whole sequence."""

        class Cache:
            def append(self, k, v):
                return k, v

        model, tokens, positions = make_model(fields, pool.groups()), make_ids(3, 10), torch.arange(11).unsqueeze(0)
        with torch.no_grad():
            last = model(tokens, positions, caches=[Cache(), Cache()])
            torch.testing.assert_close(last, model(tokens, positions)[-1:])

    def test_samples_do_not_mix(self, fields):
        model, ids = make_model(fields, pool.groups()), make_ids(3, 10)
        alone = torch.cat([losses(model, row.unsqueeze(0)) for row in ids])
        torch.testing.assert_close(losses(model, ids), alone)

    def test_positions_are_read(self, fields):
        model, ids = make_model(fields, pool.groups(), spread=0.1), make_ids(1, 10)
        model.eval()
        shifted = torch.arange(10).unsqueeze(0) * 2
        loss = model(ids[:, :-1], shifted, labels=ids[:, 1:])
        assert loss[0, 1:].ne(losses(model, ids)[0, 1:]).all()

    def test_documents_do_not_mix(self, fields):
        """With segments and positions that start again, a packed row is two rows."""
        model, ids = make_model(fields, pool.groups(), spread=0.1), make_ids(1, 10)
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
        segments = Segments(torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]]))
        packed = model(ids[:, :-1], positions, labels=ids[:, 1:], segments=segments)
        alone = [losses(model, ids[:, 0:5]), losses(model, ids[:, 4:11])]
        torch.testing.assert_close(packed, torch.cat(alone, dim=1))


def test_embedding_dropout_in_training_only():
    model = make_model({**GPT, "hidden_dropout": 0.5}, pool.groups())
    tokens, positions = make_ids(2, 10)[:, :-1], torch.arange(10).unsqueeze(0)
    first, second = model.embedding(tokens, positions), model.embedding(tokens, positions)
    assert not first.equal(second) and 0.4 < first.eq(0).float().mean() < 0.6
    model.eval()
    assert model.embedding(tokens, positions).equal(model.embedding(tokens, positions))


def test_half_precision():
    """Parameters, logits and the loss's dtype; with fp32 residual the embedding's output, too."""
    for residual, expected in ((False, torch.bfloat16), (True, torch.float32)):
        model = make_model({**LLAMA, "bf16": True, "fp32_residual_connection": residual}, pool.groups())
        ids = make_ids(2, 10)
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        assert model.embedding(ids[:, :-1], torch.arange(10).unsqueeze(0)).dtype == expected
        assert model(ids[:, :-1], torch.arange(10).unsqueeze(0)).dtype == torch.bfloat16
        loss = losses(model, ids)
        exact = losses(make_model(LLAMA, pool.groups()), ids)
        assert loss.dtype == torch.float32
        assert (loss - exact).abs().max() < 0.1
        loss.sum().backward()
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_factors_are_those_of_the_weights_behind_them(fields, precision):
    """Powers of two change no rounding: with the factors on the weights instead, losses and gradients are the same
    bits."""
    fields = {**fields, **precision, "untie_embeddings_and_output_weights": True}
    found = make_model({**fields, **FACTORS}, pool.groups(), spread=0.1)
    plain = make_model(fields, pool.groups(), spread=0.1)
    factors = {}
    for name, parameter in local_parameters(plain).items():
        factors[name] = 1.0
        if "word_embeddings" in name:
            factors[name] = FACTORS["embedding_multiplier_scale"]
        elif "linear_proj" in name or "linear_fc2" in name:
            factors[name] = FACTORS["residual_multiplier"]
        elif "output_layer" in name:
            factors[name] = 1 / FACTORS["logits_scaling"]
        parameter.data *= factors[name]
    ids = make_ids(3, 10)
    tokens, positions = ids[:, :-1], torch.arange(10).unsqueeze(0)
    with torch.no_grad():
        assert found(tokens, positions).equal(plain(tokens, positions))
    loss, expected = losses(found, ids), losses(plain, ids)
    assert loss.equal(expected)
    loss.sum().backward()
    expected.sum().backward()
    for name, parameter in local_parameters(plain).items():
        assert local_parameters(found)[name].grad.equal(parameter.grad * factors[name]), name


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_factors_are_one_operation_each_way():
    """On the embeddings, on what each of four branches adds, and on the logits, which are divided in their own
    memory."""
    counts = []
    for factors in ({}, FACTORS):
        model = make_model({**LLAMA, **factors}, pool.groups())
        with Operations() as operations:
            losses(model, make_ids(2, 10)).sum().backward()
        counts.append(operations.counts)
    assert counts[1] - counts[0] == {"aten.mul.Tensor": 2 * (1 + 4), "aten.div_.Tensor": 1, "aten.div.Tensor": 1}
    assert not counts[0] - counts[1]


class TestPresets:
    @pytest.mark.parametrize("name", PARAMETERS)
    def test_number_of_parameters(self, name):
        config = ModelConfig(**preset(name))
        groups = pool.groups()
        nowhere = torch.device("meta")
        kernels = choose_kernels(config, CPU)
        model = GPTModel(Build(config, groups, False, kernels, RngTracker(0, groups, CPU), nowhere))
        assert sum(p.numel() for p in local_parameters(model).values()) == PARAMETERS[name]

    def test_every_published_one_is_counted(self):
        """Those with experts in tests/unit/spec/test_presets.py."""
        dense = {name for name, fields in PRESETS.items() if "num_experts" not in fields}
        assert dense - set(PARAMETERS) == {"llama-tiny"}

    def test_a_copy(self):
        preset("llama2-7b")["num_layers"] = 1
        assert preset("llama2-7b")["num_layers"] == 32

    def test_unknown(self):
        with pytest.raises(ConfigError, match="--preset llama9 is not known; choose one of llama-tiny, llama2-7b"):
            preset("llama9")
