"""torch's FlashAttention operator for documents of different lengths, which has no kernel for the CPU."""

import itertools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels.ops import attention_lse
from megatron.kernels.ops.attention_rule import Rule
from megatron.kernels.ops.attention_scores import Scores


class VariableLengthOperator(TorchDispatchMode):
    """The operator and its gradient, as their documentation describes them, on CPU tensors [tokens, heads, d].

    Autograd is torch's own, so the gradient is right only if the operator's node passes everything on.
    """

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._flash_attention_forward.default:
            self.calls += 1
            return self.forward(*args, **(kwargs or {}))
        if operator is torch.ops.aten._flash_attention_backward.default:
            return self.backward(*args, **(kwargs or {}))
        return operator(*args, **(kwargs or {}))

    def forward(self, q, k, v, starts, starts_k, longest, longest_k, dropout, causal, debug, **options):
        assert q.dim() == 3 and all(x.stride(-1) == 1 for x in (q, k, v)) and q.shape[-1] % 8 == 0
        assert starts is starts_k and starts.dtype == torch.int32 and starts.is_contiguous()
        assert starts[0] == 0 and starts[-1] == len(q) == len(k) and longest == longest_k >= starts.diff().max()
        assert longest > 1, "torch takes another path where every query is alone"
        assert dropout == 0.0 and not debug
        parts = [
            attention_lse.reference.forward(*each, rule)
            for each, rule in self._documents((q, k, v), starts, causal, **options)
        ]
        out, lse = (torch.cat(each, dim) for each, dim in zip(zip(*parts, strict=True), (0, 2), strict=True))
        return out.squeeze(1).to(q.dtype), lse.squeeze(0), *[torch.empty(0)] * 3  # of dropout, and to debug

    def backward(self, grad, q, k, v, out, lse, starts, starts_k, longest, longest_k, dropout, causal, *_, **options):
        gradients = []
        for each, rule in self._documents((grad, q, k, v, out, lse.t()), starts, causal, **options):
            *tokens, rows = each
            gradients.append(attention_lse.reference.backward(*tokens, rows.squeeze(1).t().unsqueeze(0), rule))
        return tuple(torch.cat(each).squeeze(1).to(q.dtype) for each in zip(*gradients, strict=True))

    @staticmethod
    def _documents(tensors, starts, causal, *, scale, window_size_left=None, window_size_right=None):
        assert window_size_right == (None if causal else 0), "causal either way"
        rule = Rule(Scores(scale), 0, None if window_size_left is None else window_size_left + 1)
        for start, stop in itertools.pairwise(starts.tolist()):
            yield [x[start:stop].unsqueeze(1) for x in tensors], rule
