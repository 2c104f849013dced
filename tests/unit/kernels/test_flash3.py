"""FlashAttention-3 through its operators, which stand-ins with the same schemas compute on the CPU."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.kernels.backends import flash3
from megatron.kernels.ops import attention, attention_lse
from megatron.kernels.ops.attention_rule import Rule
from megatron.kernels.ops.attention_scores import Scores
from megatron.kernels.ops.attention_segments import Segments, segments_of, with_lengths
from tests.unit.kernels.close import assert_same, random
from tests.unit.kernels.flash3_operator import install, register

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SCORES = {"plain": Scores(0.3), "capped": Scores(1.3, 1.5)}
# Lengths of the documents of each sample: several, all of one token, one token at either end.
PACKED = {"one sample": [(5, 2, 9)], "two samples": [(5, 2, 9), (1, 14, 1)], "tokens alone": [(1,) * 16]}
KERNEL = flash3.attention(attention.fused)


@pytest.fixture
def calls(monkeypatch):
    return install(monkeypatch)


def inputs(s, t, n, g, b=2, d=8):
    return [random(*shape, seed=seed) for seed, shape in enumerate([(s, b, n, d), (t, b, g, d), (t, b, g, d)])]


def options_of(**changed):
    return {"scores": SCORES["plain"], "segments": None, "window": None, "dropout": 0.0, **changed}


def packed(samples):
    rows = [[number for number, length in enumerate(lengths) for _ in range(length)] for lengths in samples]
    return segments_of(torch.tensor(rows), CPU)


def against_the_reference(data, options):
    """Output and gradients in fp32 against the reference with a mask in fp64.

    A gradient is a difference from the mean. In a window of one it is that of equal numbers, off by their rounding.
    """
    assert_same(lambda *x: KERNEL(*x, **options), lambda *x: attention.unfused(*x, **options), data, atol=3e-6)


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
class TestAsTheReference:
    @pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
    @pytest.mark.parametrize(("s", "t"), [(9, 9), (1, 9), (3, 9)])
    def test_sequences(self, calls, s, t, heads, window, scores):
        """Also new queries to a cache."""
        against_the_reference(inputs(s, t, *heads), options_of(scores=scores, window=window))
        assert [name for name, *_ in calls] == ["fwd", "bwd"]

    @pytest.mark.parametrize("name", PACKED)
    def test_documents(self, calls, name, window, scores):
        segments = packed(PACKED[name])
        data = inputs(16, 16, 4, 2, b=len(segments.ids))
        against_the_reference(data, options_of(scores=scores, window=window, segments=segments))
        assert [name for name, *_ in calls] == ["fwd", "bwd"]

    def test_ids_alone_are_a_mask(self, calls, window, scores):
        """Prompts of different lengths in a cache, for the other kernel."""
        segments = Segments(torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]))
        options = options_of(window=window, segments=segments)
        data = inputs(2, 5, 4, 2)
        assert KERNEL(*data, **options).equal(attention.fused(*data, **options)) and calls == []


def run(data, options):
    leaves = [x.detach().requires_grad_() for x in data]
    out = KERNEL(*leaves, **options)
    return out, torch.autograd.grad(out, leaves, random(*out.shape, seed=9))


class TestCalls:
    def test_views_without_copies(self, calls):
        """[s, b, heads, d] as [b, s, heads, d]: keys and values that are slices, and the output and gradients in
        place."""
        qkv = random(6, 2, 2, 4, 8)
        data = [qkv[:, :, :, :2].reshape(6, 2, 4, 8), qkv[:, :, :, 2], qkv[:, :, :, 3]]
        out, gradients = run(data, options_of())
        (_, forward, _), (_, backward, _) = calls
        for name, x in zip("qkv", data, strict=True):
            for tensors in (forward, backward):
                given = tensors[name]
                assert given.data_ptr() == x.data_ptr() and given.stride() == x.transpose(0, 1).stride(), name
        assert forward["out"].data_ptr() == backward["out"].data_ptr() == out.data_ptr() and out.is_contiguous()
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            given = backward[name]
            assert given.data_ptr() == gradient.data_ptr() and gradient.is_contiguous(), name
            assert given.stride() == gradient.transpose(0, 1).stride(), name

    def test_documents_are_told_by_their_starts(self, calls):
        segments = packed(PACKED["one sample"])
        data = inputs(16, 16, 4, 2, b=1)
        out, _ = run(data, options_of(segments=segments))
        for _, tensors, options in calls:
            assert tensors["q"].shape == (16, 4, 8) and tensors["q"].data_ptr() == data[0].data_ptr(), "no copy"
            assert options["cu_seqlens_q"] is options["cu_seqlens_k"] is segments.starts
            assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (9, 9)
        assert out._base is not None and out.is_contiguous()

    @pytest.mark.parametrize(
        ("changed", "expected"),
        [
            ({}, (True, -1, -1, 0.0)),
            ({"window": 3}, (False, 2, 0, 0.0)),
            ({"window": 9}, (True, -1, -1, 0.0)),
            ({"scores": Scores(0.3, 30.0)}, (True, -1, -1, 30.0)),
        ],
    )
    def test_flags(self, calls, changed, expected):
        run(inputs(9, 9, 2, 2), options_of(**changed))
        for _, _, options in calls:
            names = ("is_causal", "window_size_left", "window_size_right", "softcap")
            assert tuple(options[name] for name in names) == expected and options["softmax_scale"] == 0.3
            assert options["sm_margin"] == 0
        assert calls[1][2]["deterministic"] is False

    def test_multiprocessors_for_communication(self, calls):
        """The margin is that of torch's own products."""
        torch._C._set_sm_carveout_experimental(12)
        try:
            run(inputs(4, 4, 2, 2), options_of())
        finally:
            torch._C._set_sm_carveout_experimental(None)
        assert [options["sm_margin"] for *_, options in calls] == [12, 12]

    def test_deterministic(self, calls, monkeypatch):
        """As torch is told; telling torch itself here would import its compiler."""
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        run(inputs(4, 4, 2, 2), options_of())
        assert calls[1][2]["deterministic"] is True

    def test_an_expanded_gradient(self, calls):
        """As of a sum: the operator takes no stride of 0 in the channels."""
        data = [x.requires_grad_() for x in inputs(4, 4, 2, 2)]
        KERNEL(*data, **options_of()).sum().backward()
        assert calls[1][1]["dout"].is_contiguous() or calls[1][1]["dout"].stride(-1) == 1


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize(
    ("s", "t", "offset", "window"),
    [(6, 6, None, None), (4, 9, None, None), (6, 6, 0, None), (6, 6, 2, 4), (4, 9, 5, 3)],
)
def test_blocks(calls, scores, s, t, offset, window):
    """The log-sum-exp, and a gradient from that of all blocks."""
    kernel, reference = attention_lse.flash_attention_3, attention_lse.reference
    rule, data = Rule(scores, offset, window), inputs(s, t, 4, 2)
    grad, out, lse = random(s, 2, 4, 8, seed=7), random(s, 2, 4, 8, seed=8), random(3, s, 4, seed=9).abs() + 3
    lse = lse[:2].transpose(1, 2)  # of a part of the queries: not contiguous
    for found, expected in zip(kernel.forward(*data, rule), reference.forward(*data, rule), strict=True):
        torch.testing.assert_close(found, expected)
    pairs = zip(
        kernel.backward(grad, *data, out, lse, rule), reference.backward(grad, *data, out, lse, rule), strict=True
    )
    for found, expected in pairs:
        torch.testing.assert_close(found, expected)
    assert [name for name, *_ in calls] == ["fwd", "bwd"]


class TestMissing:
    @pytest.fixture
    def hopper(self, monkeypatch, calls):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        return monkeypatch

    def reason(self, device=CUDA, dtype=torch.bfloat16, head=128, dropout=0.0):
        return flash3.missing(device, dtype, (head, head), dropout)

    def test_none(self, hopper):
        assert self.reason() is None and self.reason(dtype=torch.float16, head=256) is None

    def test_reasons(self, hopper):
        assert self.reason(CPU) == "the device is cpu"
        assert self.reason(dtype=torch.float32) == "the dtype is float32, it needs bf16 or fp16"
        for head in (20, 264):
            assert self.reason(head=head) == f"the head size is {head}, it needs a multiple of 8 up to 256"
        assert self.reason(dropout=0.1) == "it has no dropout, and --attention-dropout is 0.1"
        hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
        assert self.reason() == "the GPU is sm_86, it needs sm_90"

    def test_not_installed(self, hopper):
        hopper.delitem(sys.modules, "flash_attn_interface")
        assert self.reason() == "flash_attn_interface is not installed"

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            (
                "raise ImportError('flash_attn_3/_C.abi3.so: undefined symbol: _ZN3c10\\nmore')",
                "undefined symbol: _ZN3c10",
            ),
            ("raise OSError('libcudart.so.12: cannot open shared object file')", "cannot open shared object file"),
            ("x = ", "invalid syntax"),
        ],
    )
    def test_broken_at_import(self, hopper, tmp_path, source, said):
        (tmp_path / "flash_attn_interface.py").write_text(source)
        hopper.delitem(sys.modules, "flash_attn_interface")
        hopper.syspath_prepend(tmp_path)
        found = self.reason()
        assert found.startswith("flash_attn_interface cannot be loaded: ") and said in found and "\n" not in found

    def test_a_package_of_something_else(self, hopper):
        hopper.setattr(torch.ops, "flash_attn_3", torch.ops.nothing_of_this_name, raising=False)
        assert self.reason().startswith("flash_attn_interface cannot be loaded: ")


class Bytes(TorchDispatchMode):
    """The bytes of the storages that operations make, all together and of the largest."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.made[storage._cdata] = (storage.nbytes(), x)  # held, so that no other gets its number
        return out


@pytest.mark.parametrize("b", [1, 2])
def test_memory_is_linear_in_the_length(b):
    """What is kept for backward, and all that is made in forward and backward: 16 documents of a quarter, and of
    all."""
    register()
    kept, made = zip(*(_bytes_of(length, b) for length in (4096, 16384)), strict=True)
    assert kept[1] == 4 * kept[0] and made[1] == 4 * made[0]
    n, g, d = 8, 2, 64
    of_a_token = 2 * d * (2 * n + 2 * g) + 4 * n  # q, out, k and v in bf16, and the log-sum-exp
    assert kept[0] == 4096 * b * of_a_token


def _bytes_of(s, b, n=8, g=2, d=64):
    saved = {}

    def keep(x):
        saved[x.untyped_storage()._cdata] = (x.untyped_storage().nbytes(), x)
        return x

    heads = (n, g, g)
    leaves = [torch.empty(s, b, h, d, dtype=torch.bfloat16, device="meta", requires_grad=True) for h in heads]
    ids = torch.empty(b, s, dtype=torch.int64, device="meta")
    segments = with_lengths(ids, [s // 16] * 16 * b)
    with Bytes() as made, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = KERNEL(*leaves, **options_of(segments=segments))
        torch.autograd.grad(out, leaves, torch.empty_like(out))
    return sum(size for size, _ in saved.values()), sum(size for size, _ in made.made.values())
