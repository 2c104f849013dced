"""The trial of attention kernels at set-up: kernels of the CPU pass, and broken ones do not."""

import pytest
import torch

from megatron.kernels.ops import attention, attention_lse
from megatron.kernels.ops.attention_lse import BlockKernel
from megatron.kernels.ops.attention_trial import try_attention, try_blocks

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def attend(kernel, dtype=torch.float32, *, head=64, v_dim=None, queries=4, windowed=True, dropout=0.0):
    v_dim = v_dim or head
    try_attention(kernel, CPU, dtype, qk_dim=head, v_dim=v_dim, queries=queries, windowed=windowed, dropout=dropout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [attention.unfused, attention.fused], ids=["unfused", "fused"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_kernels_of_the_cpu_pass(kernel, dtype, dropout):
    for head, queries in ((64, 4), (128, 1), (320, 2)):
        attend(kernel, dtype, head=head, queries=queries, dropout=dropout)
        attend(kernel, dtype, head=head, v_dim=head // 2, queries=queries, dropout=dropout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [attention_lse.reference, attention_lse.cpu], ids=["reference", "cpu"])
def test_kernels_of_blocks_pass(kernel, dtype):
    for head, queries in ((64, 4), (128, 1)):
        for v_dim in (head, head // 2, 2 * head):
            try_blocks(kernel, CPU, dtype, qk_dim=head, v_dim=v_dim, queries=queries, windowed=True)


def changed(change):
    """The reference, whose output is changed."""
    return lambda *args, **options: change(attention.unfused(*args, **options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out * 1.1, "wrong"),
        (lambda out: out * float("nan"), "not finite"),
        (lambda out: out.detach() + (out - out.detach()) * 0.5, "wrong"),  # only its gradient
    ],
    ids=["output", "nan", "gradient"],
)
def test_a_wrong_result_fails(change, message):
    with pytest.raises(RuntimeError, match=message):
        attend(changed(change))


@pytest.mark.parametrize("windowed", [True, False])
def test_a_kernel_that_fails_for_documents_fails(windowed):
    """As a build without kernels of variable length; it is told where three documents start."""
    asked = []

    def kernel(*args, segments, window, **options):
        if segments is not None:
            asked.append((segments.starts.tolist(), window))
            if window is not None or not windowed:
                raise RuntimeError("no kernel of variable length")
        return attention.fused(*args, segments=segments, window=window, **options)

    with pytest.raises(RuntimeError, match="no kernel of variable length"):
        attend(kernel, windowed=windowed)
    assert asked == [([0, 50, 100, 128], window) for window in ((None, 16) if windowed else (None,))]


def test_a_kernel_that_raises_only_in_backward_fails():
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("FlashAttention backward for head dim > 192 requires A100/A800 or H100/H800")

    with pytest.raises(RuntimeError, match="head dim > 192"):
        attend(changed(Forward.apply))


def test_a_kernel_without_windows_fails_only_where_one_is_needed():
    def kernel(*args, window, **options):
        if window is not None:
            raise RuntimeError("no local attention")
        return attention.unfused(*args, window=None, **options)

    attend(kernel, windowed=False)
    with pytest.raises(RuntimeError, match="no local attention"):
        attend(kernel, windowed=True)


def test_wrong_gradients_of_blocks_fail():
    def backward(*args):
        dq, dk, dv = attention_lse.reference.backward(*args)
        return dq, dk, dv * 2

    with pytest.raises(RuntimeError, match="wrong"):
        try_blocks(
            BlockKernel(attention_lse.reference.forward, backward),
            CPU,
            torch.float32,
            qk_dim=64,
            v_dim=64,
            queries=2,
            windowed=False,
        )


def test_random_numbers_go_on_as_if_nothing_had_been_tried():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    attend(attention.unfused, dropout=0.5)
    assert torch.rand(3).equal(expected)
