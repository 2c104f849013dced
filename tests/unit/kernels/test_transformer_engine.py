"""Transformer Engine's kernels behind our interfaces, computed on the CPU by a package with its signatures."""

import importlib.metadata
import inspect
import operator
import os
import sys
from pathlib import Path

import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.kernels import choose_attention, fused
from megatron.kernels import transformer_engine as chooser
from megatron.kernels.choose import choose_kernels
from megatron.kernels.ops import activation, attention, norm, weight_grad
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, segments_of
from megatron.kernels.ops.linear import OutputGrad, PlainLinear
from tests import pool
from tests.unit.kernels import transformer_engine_fake as fake
from tests.unit.kernels import transformer_engine_signatures as real
from tests.unit.kernels.close import random
from tests.unit.models import builds
from tests.unit.models.builds import GPT, LLAMA, accumulate, gradients, losses, make_data_parallel, make_ids, make_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16, ASKED = torch.bfloat16, "transformer_engine"
SOURCE = os.environ.get("MEGATRON_TEST_TRANSFORMER_ENGINE")  # a folder with the package, and perhaps its csrc
FIX = "; install transformer_engine[pytorch] 2.12 or newer for this torch, or give --transformer-impl local"


@pytest.fixture
def calls(monkeypatch):
    return fake.install(monkeypatch)


@pytest.fixture
def engine(calls):
    found, why = chooser.find_engine(ASKED, CUDA)
    assert why == ""
    return found


def named(calls, name):
    return [given for each, given in calls if each == name]


class TestSignatures:
    @pytest.mark.parametrize("name", [*real.PYTHON, *real.COMPILED])
    def test_the_stand_in_has_them(self, name):
        expected = real.PYTHON.get(name) or real.COMPILED[name]
        found = operator.attrgetter(name.rpartition(":")[2])(fake)
        assert str(inspect.signature(found)) == f"({expected})"

    @pytest.mark.parametrize("name", real.KEYS)
    def test_the_stand_in_has_the_constants(self, name):
        assert set(real.KEYS[name]) == set(getattr(fake, name.rpartition(":")[2]))

    @pytest.fixture
    def source(self):
        if not SOURCE:
            pytest.skip("MEGATRON_TEST_TRANSFORMER_ENGINE names no folder with Transformer Engine's source")
        return Path(SOURCE)

    def test_they_are_those_of_the_source(self, source):
        (root,) = source.rglob("transformer_engine/pytorch")
        for place, expected in real.PYTHON.items():
            file, _, name = place.partition(":")
            assert real.in_source(root / file, name) == expected, name
        for place, expected in real.KEYS.items():
            file, _, name = place.partition(":")
            assert set(expected) <= set(real.keys_in_source(root / file, name)), name

    def test_those_of_compiled_functions_are_those_of_the_bindings(self, source):
        found = [path.parents[1] for path in source.rglob("csrc/extensions/pybind.cpp")]
        if not found:
            pytest.skip("the folder has no csrc, as the source package transformer_engine_torch has")
        for name, expected in real.COMPILED.items():
            assert real.in_bindings(found[0], name) == expected, name


class TestProducts:
    @pytest.fixture
    def kernel(self, engine):
        return engine.linear(engine.weight_grad)

    def test_of_the_layer(self, kernel, calls):
        """The results of plain torch in fp32, rounded once."""
        x, weight, bias = random(5, 2, 8, dtype=BF16), random(4, 8, dtype=BF16, seed=1), random(4, dtype=BF16, seed=2)
        grad = random(5, 2, 4, dtype=BF16, seed=3)
        assert kernel.output(x, weight).equal((x.float() @ weight.float().t()).to(BF16))
        assert kernel.output(x, weight, bias).equal((x.float() @ weight.float().t() + bias.float()).to(BF16))
        assert kernel.input_grad(kernel.prepare(grad, for_weight=True), weight).equal(
            (grad.float() @ weight.float()).to(BF16)
        )
        assert [given["layout"] for given in named(calls, "general_gemm")] == ["TN", "TN", "NN"]
        assert [given["grad"] for given in named(calls, "general_gemm")] == [False, False, True]

    def test_in_pieces(self, kernel, calls):
        """Written where the rows are."""
        x, weight, bias = random(6, 8, dtype=BF16), random(4, 8, dtype=BF16, seed=1), random(4, dtype=BF16, seed=2)
        out, back = torch.full((6, 4), 9.0, dtype=BF16), torch.full((6, 8), 9.0, dtype=BF16)
        rows, of_gradient = kernel.output_rows(weight, bias), kernel.input_grad_rows(weight)
        assert (rows.columns, of_gradient.columns) == (4, 8)
        for piece in (slice(0, 2), slice(2, 6)):
            rows(x[piece], out[piece])
            of_gradient(out[piece], back[piece])
        assert out.equal(kernel.output(x, weight, bias)) and back.equal(kernel.input_grad(OutputGrad(out), weight))
        assert calls[0][1]["out"].data_ptr() == out.data_ptr()

    def test_weight_gradients_are_added_in_the_product(self, kernel, calls):
        x, grad = random(5, 2, 8, dtype=BF16), random(5, 2, 4, dtype=BF16, seed=3)
        expected = grad.flatten(0, 1).float().t() @ x.flatten(0, 1).float()
        main_grad = torch.full((4, 8), float("nan"))
        kernel.weight_grad(main_grad, OutputGrad(grad), x, True)
        torch.testing.assert_close(main_grad, expected)
        kernel.weight_grad(main_grad, OutputGrad(grad), x, False)
        torch.testing.assert_close(main_grad, 2 * expected)
        for given, added in zip(named(calls, "general_gemm"), (False, True), strict=True):
            assert given["out"] is main_grad and given["accumulate"] is added
            assert (given["layout"], given["out_dtype"], given["use_split_accumulator"]) == ("NT", torch.float32, True)

    def test_strided_operands_are_copied(self, kernel):
        """The stand-in refuses what is not contiguous."""
        x, weight = random(2, 5, 8, dtype=BF16).transpose(0, 1), random(8, 4, dtype=BF16, seed=1).t()
        grad = random(2, 5, 4, dtype=BF16, seed=2).transpose(0, 1)
        kernel.output(x, weight)
        kernel.input_grad(OutputGrad(grad), weight)
        kernel.weight_grad(torch.empty(4, 8), OutputGrad(grad), x, True)


class TestNorms:
    @pytest.mark.parametrize("dtype", [torch.float32, BF16])
    def test_rms_norm(self, engine, calls, dtype):
        self.against_ours(engine, norm.rms_norm, dtype, bias=())
        assert [name for name, _ in calls] == ["rmsnorm_fwd", "rmsnorm_bwd"]

    @pytest.mark.parametrize("dtype", [torch.float32, BF16])
    def test_layer_norm(self, engine, calls, dtype):
        self.against_ours(engine, norm.layer_norm, dtype, bias=(random(16, dtype=dtype, seed=3),))
        assert [name for name, _ in calls] == ["layernorm_fwd", "layernorm_bwd"]

    @pytest.mark.parametrize("centered", [False, True])
    @pytest.mark.parametrize("read", [False, True])
    def test_of_a_sum(self, engine, calls, centered, read):
        """read: the sum is read beside its norm, so a gradient is added; that of RMSNorm in its kernel."""
        x, branch = random(5, 3, 16, dtype=BF16), random(5, 3, 16, dtype=BF16, seed=1)
        weight, upstream = random(16, dtype=BF16, seed=2), random(5, 3, 16, dtype=BF16, seed=3)
        bias = random(16, dtype=BF16, seed=4) if centered else None
        results = []
        for kernel in (engine.norm, norm.separate):
            leaves = [each.detach().clone().requires_grad_() for each in (x, branch, weight, bias) if each is not None]
            total, out = norm.add_norm(*leaves[:3], leaves[3] if centered else None, 1e-5, kernel)
            results.append([total, out, *torch.autograd.grad((out + total) if read else out, leaves, upstream)])
        for a, b in zip(*results, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            torch.testing.assert_close(a, b, rtol=2e-2, atol=3e-2)
        backward = "layernorm_bwd" if centered else "rmsnorm_bwd_add" if read else "rmsnorm_bwd"
        assert [name for name, _ in calls] == ["layernorm_fwd" if centered else "rmsnorm_fwd", backward]

    def against_ours(self, engine, function, dtype, bias):
        x, weight = random(5, 3, 16, dtype=dtype).transpose(0, 1), random(16, dtype=dtype, seed=1)
        upstream = random(3, 5, 16, dtype=dtype, seed=2)
        results = []
        for kernel in (engine.norm, norm.separate):
            leaves = [each.detach().clone().requires_grad_() for each in (x, weight, *bias)]
            out = function(*leaves, 1e-5, kernel=kernel)
            results.append([out, *torch.autograd.grad(out, leaves, upstream)])
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for a, b in zip(*results, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

    def test_what_it_has_no_kernel_for(self, engine, calls):
        """A stream in fp32, sharded channels, LayerNorm without a bias, no rows: as ours, to the bit."""
        x, weight = random(5, 16), random(16, dtype=BF16, seed=1)
        half = x.to(BF16)
        for args in (
            (x, weight, 1e-5, norm.own),
            (half, weight, 1e-5, lambda mean: mean / 2),
            (half[:0], weight, 1e-5),
        ):
            for a, b in zip(engine.norm.compute_rms_norm(*args), norm.compute_rms_norm(*args), strict=True):
                assert a.equal(b)
        out, statistics = engine.norm.compute_layer_norm(half, weight, None, 1e-5)
        assert out.equal(norm.compute_layer_norm(half, weight, None, 1e-5)[0])
        *found, none = engine.norm.gradient_layer_norm(half, half, weight, None, statistics)
        assert none is None and len(found) == 2 and calls == []

    def test_a_weight_of_two_dims(self, engine):
        """Queries of all heads as one row."""
        x, weight = random(5, 2, 4, 8, dtype=BF16), random(4, 8, dtype=BF16, seed=1)
        out, rstd = engine.norm.compute_rms_norm(x, weight, 1e-5, norm.own)
        expected, of_ours = norm.compute_rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(rstd, of_ours)
        found = engine.norm.gradient_rms_norm(x, x, weight, rstd, norm.own)
        for a, b in zip(found, norm.gradient_rms_norm(x, x, weight, rstd), strict=True):
            assert a.shape == b.shape
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


class TestActivations:
    @pytest.mark.parametrize("name", ["swiglu", "geglu_tanh", "gelu_tanh", "squared_relu"])
    def test_as_ours(self, engine, calls, name):
        ours, theirs = fused.SEPARATE.activations[name], engine.activations[name]
        x, results = random(4, 3, 16, scale=2.0), []
        upstream = random(*ours(x).shape, seed=1)
        for each in (theirs, ours):
            leaf = x.detach().clone().requires_grad_()
            out = each(leaf)
            results.append(
                (out, *torch.autograd.grad(out, leaf, upstream), each.compute(x)[0], *each.gradient(upstream, None, x))
            )
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            assert theirs(x).equal(results[0][0])
        assert len(calls) == 5 and not theirs(x[:0]).numel() and len(calls) == 5
        assert theirs.gradient_of_input(upstream[:0], x[:0]).shape == x[:0].shape

    def test_the_exact_gelu_is_ours(self, engine):
        assert not {"gelu", "geglu"} & set(engine.activations)


PACKED = {"one sample": [(5, 2, 9)], "two samples": [(5, 2, 9), (1, 14, 1)]}


def packed(samples):
    rows = [[number for number, length in enumerate(lengths) for _ in range(length)] for lengths in samples]
    return segments_of(torch.tensor(rows), CPU)


def inputs(s, n, g, b=2, d=8, t=None):
    shapes = (s, b, n, d), (t or s, b, g, d), (t or s, b, g, d)
    return [random(*shape, dtype=BF16, seed=seed) for seed, shape in enumerate(shapes)]


def options_of(**changed):
    return {"scores": Scores(0.3), "segments": None, "window": None, "dropout": 0.0, **changed}


class TestAttention:
    def check(self, engine, data, options):
        """Output and gradients are those of the reference in fp32, up to one rounding to bf16."""
        results = []
        for kernel, inputs_ in ((engine.attention_alone, data), (attention.unfused, [x.float() for x in data])):
            leaves = [x.detach().clone().requires_grad_() for x in inputs_]
            out = kernel(*leaves, **options)
            upstream = random(*out.shape, dtype=BF16, seed=9).to(out.dtype)
            results.append([out, *torch.autograd.grad(out, leaves, upstream)])
        for a, b in zip(*results, strict=True):
            assert a.dtype == BF16
            torch.testing.assert_close(a.float(), b, rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize("window", [None, 1, 3, 100])
    @pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
    def test_sequences(self, engine, calls, heads, window):
        self.check(engine, inputs(9, *heads), options_of(window=window))
        assert [name for name, _ in calls] == ["get_fused_attn_backend", "fused_attn_fwd", "fused_attn_bwd"]
        for given in (calls[1][1], calls[2][1]):
            assert given["window_size"] == ((-1, 0) if window in (None, 100) else (window - 1, 0))
            assert given["cu_seqlens_q"].tolist() == [0, 9, 18] and given["attn_scale"] == 0.3

    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize("name", PACKED)
    def test_documents(self, engine, calls, name, window):
        segments = packed(PACKED[name])
        self.check(engine, inputs(16, 4, 2, b=len(segments.ids)), options_of(segments=segments, window=window))
        for given in (calls[1][1], calls[2][1]):
            assert given["cu_seqlens_q"] is given["cu_seqlens_kv_padded"] is segments.starts
            assert given["max_seqlen_q"] == 64, "lengths are rounded up, so that graphs are found again"

    def test_slices_of_the_projection_are_copied(self, engine):
        qkv = random(6, 2, 2, 4, 8, dtype=BF16)
        self.check(engine, [qkv[:, :, :, :2].reshape(6, 2, 4, 8), qkv[:, :, :, 2], qkv[:, :, :, 3]], options_of())

    def test_dropout_is_the_same_in_backward_and_when_recomputed(self, engine):
        data, options = [x.requires_grad_() for x in inputs(6, 2, 2)], options_of(dropout=0.4)
        outs = []
        for recorded in (True, False):
            torch.manual_seed(3)
            with torch.set_grad_enabled(recorded):
                outs.append(engine.attention_alone(*data, **options))
        assert outs[0].equal(outs[1]), "without gradients, too"
        values = data[2]
        for scale in (1.0, 2.0):  # linear in the values, with the same probabilities
            torch.manual_seed(3)
            out = engine.attention_alone(data[0], data[1], values * scale, **options)
            (gradient,) = torch.autograd.grad(out.float().sum(), values)
            torch.testing.assert_close(
                (gradient.float() * values.float()).sum(), out.float().sum(), rtol=2e-2, atol=0.3
            )

    def test_deterministic(self, engine, calls, monkeypatch):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        self.check(engine, inputs(4, 2, 2), options_of())
        assert calls[0][1]["deterministic"] is True and calls[2][1]["deterministic"] is True

    @pytest.mark.parametrize(
        ("data", "changed", "none"),
        [
            (inputs(2, 4, 2, t=5), {}, ()),
            (inputs(2, 4, 2, t=5), {"segments": Segments(torch.tensor([[0, 0, 1, 1, 1]] * 2))}, ()),
            (inputs(5, 4, 2), {"segments": Segments(torch.tensor([[0, 0, 1, 1, 1]] * 2))}, ()),
            (inputs(5, 4, 2), {"window": 3}, ("window",)),
            (inputs(5, 4, 2), {"window": 3}, ("only 512",)),
            (inputs(5, 4, 2, d=264), {}, ()),
        ],
        ids=["a cache", "a cache of prompts", "ids alone", "no windows", "no windows in this kernel", "wide heads"],
    )
    def test_what_has_no_kernel_goes_to_another(self, engine, calls, data, changed, none):
        fake.NONE.update(none)
        options = options_of(**changed)
        assert engine.attention(*data, **options).equal(attention.fused(*data, **options))
        assert not named(calls, "fused_attn_fwd")
        with pytest.raises(RuntimeError, match="its fused attention has no kernel"):
            engine.attention_alone(*data, **options)


class TestFound:
    """With a package, without one, and with one that does not work."""

    @pytest.fixture(autouse=True)
    def no_child(self, monkeypatch):
        """As if a child process had found nothing: test_child_trial.py has those that do."""
        monkeypatch.setattr(chooser, "failure_in_child", lambda trial, device, library: None)

    def test_not_asked_for(self, monkeypatch):
        monkeypatch.setattr(importlib.metadata, "version", None)
        assert chooser.find_engine("local", CUDA) == (None, "")

    def test_a_cpu_takes_ours(self):
        assert chooser.find_engine(ASKED, CPU) == (None, "Transformer Engine needs CUDA, the device is cpu")
        kernels = choose_kernels(ModelConfig(**LLAMA, transformer_impl=ASKED), CPU)
        assert kernels.layers_choice == "local (Transformer Engine needs CUDA, the device is cpu)"
        assert isinstance(kernels.linear, PlainLinear)

    def test_a_traced_run_takes_ours(self, calls):
        with torch._subclasses.fake_tensor.FakeTensorMode():
            assert chooser.find_engine(ASKED, CUDA) == (None, "the run is only traced")

    def refusal(self):
        with pytest.raises(ConfigError) as refused:
            choose_kernels(ModelConfig(**LLAMA, bf16=True, transformer_impl=ASKED), CUDA)
        message, start = str(refused.value), "--transformer-impl transformer_engine cannot run here: "
        assert message.startswith(start) and message.endswith(FIX) and "\n" not in message
        return message.removeprefix(start).removesuffix(FIX)

    def test_not_installed(self, monkeypatch):
        def missing(name):
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", missing)
        assert self.refusal() == "transformer_engine is not installed"

    @pytest.mark.parametrize("version", ["1.13.0+abc", "2.9.0", "2.11"])
    def test_too_old(self, monkeypatch, version):
        fake.install(monkeypatch, version)
        assert self.refusal() == (f"transformer_engine {version} is installed, version 2.12 is the oldest that works")

    @pytest.mark.parametrize("version", ["2.12.0", "2.12.0.dev0+1234", "2.20.2", "3.0"])
    def test_new_enough(self, monkeypatch, version):
        fake.install(monkeypatch, version)
        found, _ = chooser.find_engine(ASKED, CUDA)
        assert found.version == version

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("raise OSError('libcublasLt.so.13: undefined symbol: cublasLtGrouped\\nmore')", "undefined symbol"),
            ("raise ImportError('libtransformer_engine.so: cannot open')", "cannot open"),
            ("raise AssertionError", "AssertionError"),
        ],
    )
    def test_broken_at_import(self, monkeypatch, tmp_path, source, said):
        fake.install(monkeypatch)
        for name in [each for each in sys.modules if each.startswith("transformer_engine")]:
            monkeypatch.delitem(sys.modules, name)
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine" / "__init__.py").write_text("")
        (tmp_path / "transformer_engine" / "pytorch.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        found = self.refusal()
        assert found.startswith("transformer_engine 2.12.0 cannot be loaded: ") and said in found

    def test_a_function_is_gone(self, monkeypatch, calls):
        monkeypatch.delattr(sys.modules["transformer_engine.pytorch.cpp_extensions"], "general_gemm")
        assert "cannot be loaded: cannot import name 'general_gemm'" in self.refusal()


def layers(engine, fields=LLAMA, **changed):
    config = ModelConfig(**{**fields, "bf16": True, **changed})
    plain = PlainLinear(weight_grad.separate)
    return chooser.choose_layers(engine, config, CPU, getattr(torch, config.dtype_name), plain), plain


class TestChosen:
    def test_all(self, engine):
        chosen, plain = layers(engine)
        assert chosen.choice == "Transformer Engine 2.12.0: matrix products, norms, swiglu"
        assert chosen.linear is not plain and chosen.fused.norm is engine.norm
        assert chosen.fused.activations["swiglu"] is engine.activations["swiglu"]
        assert chosen.fused.rotate_once is fused.SEPARATE.rotate_once

    def test_our_fused_kernels_have_the_rest(self, engine, monkeypatch):
        """Not tried for what Transformer Engine does; tried where it does not."""
        monkeypatch.setattr(fused, "missing", lambda device: None)
        monkeypatch.setattr(fused, "load", lambda: fused.SEPARATE)
        chosen, _ = layers(engine, swiglu=False, geglu=True, normalization="LayerNorm")
        assert chosen.choice == "Transformer Engine 2.12.0: matrix products, norms (geglu not: it has none)"
        assert chosen.fused_choice.startswith(
            "gated activation, rotation, cross entropy (norms not: Transformer Engine's is in use"
        )

    def test_fp32(self, engine):
        chosen, plain = layers(engine, bf16=False)
        assert chosen.linear is plain
        assert chosen.choice == (
            "Transformer Engine 2.12.0: norms, swiglu (matrix products not: it multiplies fp32 in TF32)"
        )

    def test_flags(self, engine, calls):
        chosen, _ = layers(
            engine, persist_layer_norm=False, bias_swiglu_fusion=False, gradient_accumulation_fusion=False
        )
        reasons = "norms not: --no-persist-layer-norm; swiglu not: --no-bias-swiglu-fusion"
        assert chosen.choice == f"Transformer Engine 2.12.0: matrix products ({reasons})"
        calls.clear()
        chosen.linear.weight_grad(
            torch.empty(4, 8), OutputGrad(random(6, 4, dtype=BF16)), random(6, 8, dtype=BF16), True
        )
        assert calls == [], "the product of the weight gradient is not fused with its addition"

    def test_one_that_fails_or_is_wrong_is_left_out(self, engine):
        def broken(*args):
            raise RuntimeError("cuBLAS Error: not supported\nmore")

        engine = engine._replace(
            norm=engine.norm._replace(compute_rms_norm=broken),
            activations={"swiglu": activation.geglu_tanh},
            weight_grad=lambda main_grad, grad, x, overwrite: main_grad.zero_(),
        )
        chosen, plain = layers(engine)
        assert chosen.choice == "Transformer Engine 2.12.0: none (" + (
            "matrix products not: its results are wrong; norms not: cuBLAS Error: not supported; "
            "swiglu not: its results are wrong)"
        )
        assert chosen.linear is plain and chosen.fused == fused.SEPARATE

    def test_attention(self, engine, monkeypatch):
        """Before our own candidates, tried without those; `flash` asks for others."""
        needs = choose_attention.Needs(CPU, BF16, 64, 64, 2, False, 0.0, None, True)
        monkeypatch.setattr(choose_attention.flash, "missing", lambda device, dtype: None)
        name = "Transformer Engine's cuDNN"
        for asked in ("auto", "fused"):
            of_engine = choose_attention._of_engine(asked, engine)
            assert choose_attention._of_sequences(asked, needs, of_engine) == (engine.attention, name)
        assert choose_attention._of_engine("flash", engine) == choose_attention._of_engine("auto", None) == []

        fake.NONE.add("thd_thd_thd")
        monkeypatch.setattr(choose_attention, "candidates", lambda asked: [])
        reason = f"{name}: its fused attention has no kernel for this model on this GPU"
        of_engine = choose_attention._of_engine("auto", engine)
        assert choose_attention._of_sequences("auto", needs, of_engine)[1] == f"math ({reason})"
        with pytest.raises(ConfigError, match="--attention-backend fused cannot run here"):
            choose_attention._of_sequences("fused", needs, of_engine)
        for changed, why in (
            ({"qk_dim": 264, "v_dim": 264}, "has no kernel"),
            ({"v_dim": 32}, "it takes no values of 32 channels beside keys of 64"),
            ({"windowed": True, "dropout": 0.1, "documents": False}, "has no kernel"),
            ({"softcap": 30.0}, "it has no --attn-logit-softcapping"),
        ):
            _, choice = choose_attention._of_sequences("auto", needs.__class__(**{**vars(needs), **changed}), of_engine)
            assert choice.startswith("math (") and why in choice


HEADS = {"num_attention_heads": 4}  # of 8 channels


@pytest.mark.parametrize(
    "fields", [{**LLAMA, **HEADS, "num_query_groups": 2}, {**GPT, **HEADS, "openai_gelu": True}], ids=["llama", "gpt"]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_model_trains_the_same(engine, monkeypatch, calls, fields, dtype):
    """Loss and gradients of two microbatches through the engine's kernels, and through ours."""
    groups, ids = pool.groups(), [make_ids(2, 10, seed=seed) for seed in (1, 2)]
    fields = {**fields, "bf16": dtype == "bf16"}
    ours = choose_kernels(ModelConfig(**fields), CPU)
    chosen, _ = layers(engine, fields, bf16=dtype == "bf16")
    attend = engine.attention_alone if dtype == "bf16" else ours.attention
    # On a CPU, torch's LayerNorm in bf16 is too rough for the trial of the norms to pass.
    fused_theirs = chosen.fused._replace(norm=engine.norm)
    theirs = {**vars(ours), "linear": chosen.linear if dtype == "bf16" else ours.linear, "fused": fused_theirs}
    found = []
    for kernels in (ours, type(ours)(**{**theirs, "attention": attend})):
        monkeypatch.setattr(builds, "choose_kernels", lambda *args, kernels=kernels, **options: kernels)
        calls.clear()
        model = make_model(fields, groups, spread=0.1)
        data_parallel = make_data_parallel(model, groups)
        accumulate(model, data_parallel, ids)
        found.append((losses(model, ids[0]).detach().float(), gradients(data_parallel), {name for name, _ in calls}))
    (expected, of_ours, none), (loss, of_theirs, used) = found
    tolerance = 1e-5 if dtype == "fp32" else 2e-2
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    largest = max(float(gradient.abs().max()) for gradient in of_ours.values())  # some are zero but for rounding
    for name, gradient in of_ours.items():
        assert float((of_theirs[name] - gradient).abs().max()) <= tolerance * largest, name
    rms, gated = fields.get("normalization") == "RMSNorm", "swiglu" in fields
    assert not none and used == (
        ({"rmsnorm_fwd", "rmsnorm_bwd", "rmsnorm_bwd_add"} if rms else {"layernorm_fwd", "layernorm_bwd"})
        | ({"swiglu", "dswiglu"} if gated else {"gelu", "dgelu"})
        | ({"general_gemm", "fused_attn_fwd", "fused_attn_bwd", "get_fused_attn_backend"} if dtype == "bf16" else set())
    )
