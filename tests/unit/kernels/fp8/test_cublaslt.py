"""Sums of weight gradients in cuBLASLt's product, computed on the CPU by a library with its functions."""

import pytest
import torch

from megatron.config.fp8 import Fp8Config
from megatron.kernels import choose_fp8
from megatron.kernels.backends import cublaslt
from megatron.kernels.backends.cublaslt import CublasLt
from megatron.kernels.ops.fp8.emulated import Emulated
from megatron.kernels.ops.fp8.formats import FORMATS
from megatron.kernels.ops.fp8.scaled_mm import ScaledMM
from tests.unit.kernels.close import random
from tests.unit.kernels.fp8.cublaslt_fake import FakeCublasLt
from tests.unit.kernels.fp8.layer import draw, make_kernel

CPU, RECIPES = torch.device("cpu"), ("tensorwise", "delayed", "blockwise")


@pytest.fixture(autouse=True)
def of_torch(monkeypatch):
    """Its handle and its stream."""
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 11)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 22, raising=False)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_adds_the_product(recipe, formats):
    """The emulation's bits: the same numbers are multiplied. 256 tokens, and sizes that are no multiples of each
    other."""
    x, _, grad = tensors = draw(256, 128, 384)
    library, sums = FakeCublasLt(), []
    for product in (ScaledMM(recipe, CublasLt(library).add_product), Emulated()):
        main_grad = random(128, 384, seed=7)
        kernel = make_kernel(recipe, formats, tensors, product)
        for _ in range(2):
            kernel.weight_grad(main_grad, kernel.prepare(grad, for_weight=True), x, False)
        sums.append(main_grad)
    assert sums[0].equal(sums[1])
    assert library.objects == {}, "all are destroyed"


def test_alignments():
    """Weights lie anywhere in a bucket, and kernels differ in the alignment that they need."""
    tensors = draw(128, 128, 128)
    kernel_of = [make_kernel("blockwise", "e4m3", tensors, product) for product in (ScaledMM("blockwise"), Emulated())]
    a, b = (kernel_of[0]._quantize(of, x, rows=False, columns=True).columns for of, x in zip(
        (kernel_of[1]._operands.gradient, kernel_of[1]._operands.input), (tensors[2], tensors[0]), strict=True
    ))  # fmt: skip
    library, bucket = FakeCublasLt(), torch.zeros(128 * 128 + 256)
    start = next(i for i in range(256) if (bucket.data_ptr() + 4 * i) % 64 == 16)
    CublasLt(library).add_product(bucket[start : start + 128 * 128].view(128, 128), a, b)
    assert library.aligned[0][2:] == [16, 16] and all(16 <= each <= 256 for each in library.aligned[0])


def test_what_the_library_refuses(monkeypatch):
    tensors = draw(128, 128, 128)
    for library, reason in (
        (FakeCublasLt(kernels=0), "no kernel"),
        (FakeCublasLt(), "MatmulDescCreate returns status 7"),
    ):
        if "status" in reason:
            monkeypatch.setattr(library, "_create", lambda *arguments: 7)
        kernel = make_kernel("blockwise", "e4m3", tensors, ScaledMM("blockwise", CublasLt(library).add_product))
        with pytest.raises(RuntimeError, match=reason):
            kernel.weight_grad(torch.zeros(128, 128), kernel.prepare(tensors[2], for_weight=True), tensors[0], False)
        assert library.objects == {}


class TestChoice:
    CONFIG = Fp8Config(fp8_format="hybrid", fp8_recipe="blockwise")

    def test_is_tried(self, monkeypatch):
        monkeypatch.setattr(cublaslt, "loaded", FakeCublasLt)
        add, why = choose_fp8.choose_sums(self.CONFIG, CPU)
        assert add is not None and why is None

    def test_a_wrong_sum_is_left_out(self, monkeypatch):
        def add_twice(self, out, a, b):
            Emulated().add(a, b, out)
            Emulated().add(a, b, out)

        monkeypatch.setattr(cublaslt, "loaded", FakeCublasLt)
        monkeypatch.setattr(CublasLt, "add_product", add_twice)
        assert choose_fp8.choose_sums(self.CONFIG, CPU) == (None, "its results are wrong")

    def test_no_kernel(self, monkeypatch):
        monkeypatch.setattr(cublaslt, "loaded", lambda: FakeCublasLt(kernels=0))
        assert choose_fp8.choose_sums(self.CONFIG, CPU) == (None, "cuBLASLt has no kernel that adds this product")

    def test_without_the_library(self, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        assert choose_fp8.choose_sums(self.CONFIG, CPU) == (None, "this torch is built without CUDA")
        monkeypatch.setattr(torch.version, "cuda", "1.0")
        add, why = choose_fp8.choose_sums(self.CONFIG, CPU)
        assert add is None and "libcublasLt.so.1" in why


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_the_real_library_takes_the_attributes(monkeypatch):
    """All but the search for a kernel works without a GPU; that one comes after them."""
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    tensors = draw(128, 128, 128)
    kernel = make_kernel("blockwise", "hybrid", tensors, ScaledMM("blockwise", CublasLt(cublaslt.loaded()).add_product))
    with pytest.raises(RuntimeError, match="cublasLtMatmulAlgoGetHeuristic returns status"):
        kernel.weight_grad(torch.zeros(128, 128), kernel.prepare(tensors[2], for_weight=True), tensors[0], False)
