import pytest
import torch

from megatron.base.errors import ConfigError
from megatron.config.fp8 import Fp8Config
from megatron.kernels import choose_fp8 as module
from megatron.kernels.choose_fp8 import choose_fp8
from megatron.kernels.ops.fp8 import scaled_mm
from megatron.kernels.ops.fp8.emulated import Emulated
from megatron.kernels.ops.fp8.quantize import SEPARATE
from megatron.kernels.ops.fp8.scaled_mm import ScaledMM

CUDA = torch.device("cuda", 0)
BLOCKWISE = Fp8Config(fp8_format="hybrid", fp8_recipe="blockwise")


def test_a_cpu_emulates_every_recipe():
    for recipe in ("tensorwise", "delayed", "blockwise", "mxfp8"):
        found = choose_fp8(Fp8Config(fp8_format="e4m3", fp8_recipe=recipe), torch.device("cpu"), {"a": (16, 20)})
        assert isinstance(found.product, Emulated) and found.choice == "emulated in fp32 (the device is cpu)"


def test_a_gpu_without_fp8_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=r"--fp8-recipe blockwise cannot run on this GPU.*8.9.*A100 has 8.0.*--bf16"):
        choose_fp8(BLOCKWISE, CUDA, {})


@pytest.mark.parametrize(("recipe", "capability", "needs"), [("mxfp8", (9, 0), "10.0"), ("blockwise", (10, 0), "9.0")])
def test_a_recipe_that_the_gpu_lacks_is_refused_by_name(monkeypatch, recipe, capability, needs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    with pytest.raises(
        ConfigError, match=rf"--fp8-recipe {recipe} cannot run on this GPU: .*{needs}.*another --fp8-recipe"
    ):
        choose_fp8(Fp8Config(fp8_format="hybrid", fp8_recipe=recipe), CUDA, {})


@pytest.fixture
def no_sums(monkeypatch):
    monkeypatch.setattr(module, "choose_sums", lambda config, device: (None, "no kernel"))


def test_a_size_that_the_gpu_cannot_multiply_is_named(monkeypatch, no_sums):
    monkeypatch.setattr(scaled_mm, "why_not", lambda recipe, device, formats: None)
    monkeypatch.setattr(module, "choose_quantize", lambda device: (SEPARATE, None))
    assert isinstance(choose_fp8(BLOCKWISE, CUDA, {"a": (256, 384)}).product, ScaledMM)
    with pytest.raises(
        ConfigError, match=r"layers\.0\.mlp\.linear_fc1.*\[192, 256\].*128.*--tensor-model-parallel-size"
    ):
        choose_fp8(BLOCKWISE, CUDA, {"a": (256, 384), "decoder.layers.0.mlp.linear_fc1": (256, 192)})


def test_the_quantization_is_chosen_apart(monkeypatch, no_sums):
    """Triton's kernels where they run; the table says why not."""
    asked, found = [], SEPARATE._replace(per_block=lambda *args, **options: None)
    monkeypatch.setattr(scaled_mm, "why_not", lambda *args: asked.append(args))
    behind = "weight gradients are added behind their products: no kernel"
    for why, choice in ((None, f" ({behind})"), ("no Triton", f" (quantized in plain torch: no Triton; {behind})")):
        monkeypatch.setattr(module, "choose_quantize", lambda device, why=why: (found, why))
        chosen = choose_fp8(BLOCKWISE, CUDA, {})
        assert chosen.quantize is found and chosen.choice == f"torch's scaled products{choice}"
    assert asked == [("blockwise", CUDA, "hybrid")] * 2
    monkeypatch.setattr(module, "choose_sums", lambda config, device: (lambda out, a, b: out.fill_(5.0), None))
    chosen, out = choose_fp8(BLOCKWISE, CUDA, {}), torch.zeros(2)
    assert (
        chosen.choice
        == "torch's scaled products, cuBLASLt's for sums of weight gradients (quantized in plain torch: no Triton)"
    )
    chosen.product.add(None, None, out)
    assert out.tolist() == [5.0, 5.0]
