"""The work of operations, as the roofline counts it."""

import importlib.util

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import roofline
from benchmarks.roofline import ATTENTION, BACKWARD, FORWARD, LARGE, UPDATE, CountedWork, Work, total
from megatron.core.streams.simulated import H100, simulated_cuda
from megatron.spec.decoder import decoder_spec
from megatron.training.dry_run.simulated_torch import SimulatedTorch
from megatron.training.dry_run.traced_memory import TracedMemory

N, M, K = 6, 16, 8
BF16, CUDA = torch.bfloat16, torch.device("cuda", 0)
TOKENS, HEADS, HEAD = 32, 4, 16
SMALL = (
    f"--hidden-size {HEADS * HEAD} --ffn-hidden-size 96 --num-attention-heads {HEADS} --num-query-groups 2 "
    f"--seq-length {TOKENS} --vocab-size 512"
)


def work(run):
    """The work of a function of (a [N, M], b [M, K], c [N, M]) on CUDA, in bf16."""
    memory = TracedMemory(CUDA, str)
    with simulated_cuda(H100, lambda: 0), SimulatedTorch(), FakeTensorMode(), memory, CountedWork() as counted:
        shapes = (N, M), (M, K), (N, M)
        given = [torch.empty(shape, dtype=BF16, device=CUDA) for shape in shapes]
        run(*given)
    return sum(counted.found.values(), Work())


OPERATIONS = {
    "a view": (lambda a, b, c: a[2:].t().unsqueeze(0), Work()),
    "a copy of a transposed matrix": (lambda a, b, c: a.t().contiguous(), Work(1, 2 * N * M * 2)),
    "memory": (lambda a, b, c: torch.empty_like(a), Work()),
    "a sum": (lambda a, b, c: a + c, Work(1, 3 * N * M * 2)),
    "in place": (lambda a, b, c: a.add_(c), Work(1, 3 * N * M * 2)),
    "into given memory": (lambda a, b, c: torch.mul(a, 2.0, out=c), Work(1, 2 * N * M * 2)),
    "overwritten": (lambda a, b, c: a.copy_(c), Work(1, 2 * N * M * 2)),
    "zeros": (lambda a, b, c: a.zero_(), Work(1, N * M * 2)),
    "a row for all": (lambda a, b, c: a + c[:1].expand(N, M), Work(1, (2 * N + 1) * M * 2)),
    "some rows": (
        lambda a, b, c: a.index_select(0, torch.empty(2, dtype=torch.int64, device=CUDA)),
        Work(1, 2 * 2 * M * 2 + 2 * 8),
    ),
    "rows added to some": (
        lambda a, b, c: a.index_add_(0, torch.empty(2, dtype=torch.int64, device=CUDA), c[:2]),
        Work(1, 3 * 2 * M * 2 + 2 * 8),
    ),
    "a product": (lambda a, b, c: a @ b, Work(1, (N * M + M * K + N * K) * 2, 2 * N * M * K)),
    "a grouped product": (
        lambda a, b, c: torch._grouped_mm(a, b.expand(3, M, K), torch.empty(3, dtype=torch.int32, device=CUDA)),
        Work(1, (N * M + M * K + N * K) * 2 + 3 * 4, 2 * N * M * K),
    ),
    "on the host": (lambda a, b, c: torch.ones(3) + 1, Work()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation(name):
    run, expected = OPERATIONS[name]
    assert work(run) == expected


@pytest.mark.parametrize("divided", [False, True])
def test_of_two_gated_updates_one_counts(divided):
    """The other one returns at once."""

    def update(a, b, c):
        like = [torch.empty(M, device=CUDA) for _ in range(4)]
        gate, step = torch.empty(2, device=CUDA), torch.empty((), device=CUDA)
        torch._fused_adamw_(
            *([each] for each in like), [], [step], lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8,
            amsgrad=False, maximize=False, grad_scale=gate[0] if divided else None, found_inf=gate[1],
        )  # fmt: skip

    found = work(update)
    assert found.launches == 1 and (found.nbytes == 0) == divided


def test_a_layer_has_the_products_of_its_description():
    two, three = roofline.counted(SMALL, 2), roofline.counted(SMALL, 3)
    layer = {key: three[key] - two[key] for key in three}
    spec = decoder_spec(roofline.read(SMALL, 2).model).layers[0]
    of_weights = 2 * TOKENS * spec.multiply_adds
    for key in (("kernels.ops.gemm", FORWARD), ("kernels.ops.gemm", BACKWARD), ("kernels.ops.weight_grad", BACKWARD)):
        assert layer[key].flops == of_weights
        assert layer[key].launches == len(spec.linears())
    of_attention = 2 * HEADS * TOKENS**2 // 2 * HEAD
    assert layer[ATTENTION, FORWARD].flops == 2 * of_attention
    assert layer[ATTENTION, BACKWARD].flops == 5 * of_attention


def test_experts_have_the_products_of_their_rows():
    experts = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
    two, three = (roofline.counted(f"{SMALL} {experts}", layers) for layers in (2, 3))
    of_pairs = 2 * (2 * TOKENS) * (3 * 32 * HEADS * HEAD)
    for part in (FORWARD, BACKWARD):
        key = "kernels.ops.grouped_gemm", part
        assert three[key] - two[key] == Work(2, three[key].nbytes - two[key].nbytes, of_pairs)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_triton_kernels_move_few_bytes():
    """For the shape of Llama-3 8B; without them 101 launches, 14.08 GB, 78 and 42.6 bytes."""
    figures = roofline.figures_of(*roofline.layer_and_rest("", triton=True), "")
    assert figures.launches <= 40
    assert figures.small_bytes <= 3.6e9
    assert figures.loss_bytes <= 8
    assert figures.update_bytes <= 36


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("flags", "launches", "small_bytes"),
    [
        ("e4m3 --fp8-recipe blockwise", 32, 7.0e9),
        ("hybrid --fp8-recipe tensorwise", 48, 9.0e9),
        ("hybrid --fp8-recipe delayed", 32, 7.0e9),
    ],
)
def test_quantization_to_fp8_is_counted(flags, launches, small_bytes):
    """For the shape of Llama-3 8B; without FP8 28 launches and 3.38 GB."""
    figures = roofline.figures_of(*roofline.layer_and_rest(f"--fp8-format {flags}", triton=True), "")
    assert figures.launches <= launches
    assert 6.0e9 < figures.small_bytes < small_bytes + 0.01e9


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_further_microbatch_in_fp8():
    """The sums of weight gradients are read and written in their products, and nowhere else."""
    flags = "--fp8-format e4m3 --fp8-recipe blockwise --global-batch-size"
    one, two = (roofline.layer_and_rest(f"{flags} {samples}", triton=True)[0] for samples in (1, 2))
    more = {key: work - one.get(key, Work()) for key, work in two.items() if key[1] != UPDATE}
    spec = decoder_spec(roofline.read("", 2).model).layers[0]
    sums = more["kernels.ops.fp8.scaled_mm", BACKWARD]
    weights = sum(parameter.numel for _, parameter in spec.parameters() if len(parameter.shape) > 1)
    assert (sums.launches, sums.flops) == (4, 2 * 8192 * spec.multiply_adds)
    assert 8 * weights < sums.nbytes < 11 * weights
    assert total(more, lambda source, part: not source.startswith(LARGE)).nbytes < 6.2e9
