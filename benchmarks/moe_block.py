"""A layer with experts (router, exchange on one rank, experts) beside transformers' implementations of the same block.

All run with the same weights on the same tokens, forward and backward, and take turns in one process; figures are
medians of CPU milliseconds on one thread. *fastest peer / ours* is the median of the ratio within a round; above 1 ours
is faster. The last column is the time of a heavily skewed choice (half of all assignments to one expert in eight, the
others evenly) divided by that of an even one, at equal FLOPs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks.moe_kernels import measured
from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.config.model import ModelConfig
from megatron.core.groups import create_groups
from megatron.core.parameter import GradSlot, initialize, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.core.transformer.moe.layer import MoELayer
from megatron.core.transformer.moe.microbatch import MicrobatchRouting
from megatron.kernels.choose import choose_kernels
from megatron.spec.decoder import decoder_spec
from megatron.spec.moe import MoESpec

CPU = torch.device("cpu")
PEERS = ("eager", "grouped_mm")  # "batched_mm" copies two matrices per assignment: 13 GB here
SHAPES = {8: (2, 768), 64: (8, 256)}  # experts -> (experts per token, width)


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.tokens} tokens, h {args.hidden}, fp32, torch {torch.__version__}, {args.rounds} rounds")
    print(f"| experts | k | f | ours | {' | '.join(PEERS)} | fastest peer / ours | skewed / even |")
    print("|---|---|---|---|---|---|---|---|")
    for experts, (topk, width) in SHAPES.items():
        block = Block(args.tokens, args.hidden, experts, topk, width)
        ways = {"ours": block.ours(None), **{name: block.theirs(name) for name in PEERS}}
        ways |= {"even": block.ours(block.choice(skewed=False)), "skewed": block.ours(block.choice(skewed=True))}
        outputs = {name: way() for name, way in ways.items()}
        for name in PEERS:
            torch.testing.assert_close(outputs[name], outputs["ours"], rtol=1e-4, atol=1e-5)
        rounds = measured(ways, args.rounds)
        ms = " | ".join(f"{statistics.median(taken[name] for taken in rounds):.1f}" for name in ("ours", *PEERS))
        faster = statistics.median(min(taken[name] for name in PEERS) / taken["ours"] for taken in rounds)
        skew = statistics.median(taken["skewed"] / taken["even"] for taken in rounds)
        print(f"| {experts} | {topk} | {width} | {ms} | {faster:.2f} | {skew:.2f} |", flush=True)


class Block:
    """The same block in every implementation."""

    def __init__(self, tokens: int, hidden: int, experts: int, topk: int, width: int) -> None:
        torch.manual_seed(1)
        config = ModelConfig(
            num_layers=1,
            hidden_size=hidden,
            num_attention_heads=4,
            vocab_size=8,
            position_embedding_type="none",
            swiglu=True,
            add_bias_linear=False,
            num_experts=experts,
            moe_router_topk=topk,
            moe_ffn_hidden_size=width,
        )
        groups = create_groups(Mesh.create(1), 0, Heartbeat(0), 60.0)
        build = Build(config, groups, False, choose_kernels(config, CPU), RngTracker(0, groups, CPU), CPU)
        spec = decoder_spec(config).layers[0].mlp
        assert isinstance(spec, MoESpec)
        self._layer, self._spec = MoELayer(build, spec, 0, frozenset()), spec
        self._parameters = local_parameters(self._layer)
        initialize(self._parameters, 1)
        for parameter in self._parameters.values():
            parameter.slot = GradSlot(lambda: None)
            parameter.slot.main_grad = torch.zeros(parameter.shape)
        self._x = torch.randn(tokens, 1, hidden).requires_grad_()
        self._grad = torch.randn(tokens, 1, hidden)

    def choice(self, *, skewed: bool) -> Tensor:
        """Experts of each token [T, k], different ones."""
        experts, topk, tokens = self._spec.router.experts, self._spec.router.topk, len(self._x)
        even = (torch.arange(tokens).unsqueeze(1) * topk + torch.arange(topk)) % experts
        if not skewed:
            return even
        busy = experts // 8
        chosen = (torch.arange(tokens).unsqueeze(1) * topk + torch.arange(topk)) % (experts - busy) + busy
        half = max(1, topk // 2) if topk > 2 else 1
        for slot in range(min(half, busy)):
            chosen[:, slot] = slot
        return chosen

    def ours(self, forced: Tensor | None) -> Callable[[], Tensor]:
        """The framework's, following the choices `forced` if they are given."""

        def step() -> Tensor:
            for parameter in self._parameters.values():
                assert parameter.slot is not None
                parameter.slot.fresh = True
            routing = None
            if forced is not None:
                routing = MicrobatchRouting(torch.arange(len(self._x)), len(self._x), None, forced={0: forced})
            out = self._layer(self._x, routing)
            out.backward(self._grad)
            return out.detach().transpose(0, 1)

        return step

    def theirs(self, implementation: str) -> Callable[[], Tensor]:
        """transformers'."""
        spec = self._spec
        theirs = Qwen3MoeConfig(
            hidden_size=spec.router.hidden,
            num_experts=spec.router.experts,
            num_experts_per_tok=spec.router.topk,
            moe_intermediate_size=spec.experts.width,
            norm_topk_prob=True,
        )
        theirs._experts_implementation = implementation
        block = Qwen3MoeSparseMoeBlock(theirs)
        found = {name: parameter.detach() for name, parameter in self._parameters.items()}
        with torch.no_grad():
            block.gate.weight.copy_(found["router.weight"])
            block.experts.gate_up_proj.copy_(found["experts.linear_fc1.weight"].flatten(1, 2))
            block.experts.down_proj.copy_(found["experts.linear_fc2.weight"])
        x = self._x.detach().transpose(0, 1).requires_grad_()

        def step() -> Tensor:
            block.zero_grad(set_to_none=True)
            out = block(x)
            out.backward(self._grad.transpose(0, 1))
            return out.detach()

        return step


if __name__ == "__main__":
    main()
