"""Kernels of a mixture-of-experts layer on the CPU: the experts and their peers, and the share of the routing.

All implementations compute the same experts with the same weights and assignments, forward and backward, and take turns
in one process, with another one first in each round. Figures are medians over the rounds, in ms of CPU time on one
thread, so that other work on the machine counts as little as possible. *fastest peer / ours* is the median of the ratio
within a round; above 1 ours is faster. Gradients of the weights go to memory that is there already (ours), or to a new
tensor (peers).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.config.model import ModelConfig
from megatron.core.groups import create_groups
from megatron.core.parameter import GradSlot, initialize, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.core.transformer.moe.experts import Experts
from megatron.kernels.choose import choose_kernels
from megatron.kernels.ops import routing
from megatron.kernels.ops.assignments import Assignments
from megatron.kernels.ops.grouped_gemm import GroupedGemm, loop
from megatron.spec.mlp import SWIGLU
from megatron.spec.moe import ExpertsSpec, RouterSpec

CPU = torch.device("cpu")


def main() -> None:
    """Prints one table for the experts, and one for the routing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--assignments", type=int, nargs="+", default=[64, 512, 4096], help="rows times experts per row"
    )
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"h {args.hidden}, f {args.width}, {args.dtype}, torch {torch.__version__}, {args.rounds} rounds")
    print("\n| experts | assignments | ours | ours by a loop | grouped_mm | loop of Linear | fastest peer / ours |")
    print("|---|---|---|---|---|---|---|")
    for experts in args.experts:
        for assignments in args.assignments:
            print_experts(args, experts, assignments)
    print("\n| experts | tokens | router | plan | experts | router and plan, share |\n|---|---|---|---|---|---|")
    for experts in args.experts:
        print_routing(args, experts)


def print_experts(args: argparse.Namespace, experts: int, count: int) -> None:
    """Prints a row of the first table."""
    topk = min(args.topk, experts)
    case = Case(args, experts, max(1, count // topk), topk)
    ways = {"ours": case.ours(), "ours by loop": case.ours(loop)}
    peers = {"grouped_mm": case.grouped_mm(), "loop": case.linear_layers()}
    case.check({**ways, **peers})
    rounds = measured({**ways, **peers}, args.rounds)
    ms = {name: statistics.median(taken[name] for taken in rounds) for name in rounds[0]}
    ratio = statistics.median(min(taken[peer] for peer in peers) / taken["ours"] for taken in rounds)
    print(f"| {experts} | {count} | " + " | ".join(f"{value:.1f}" for value in ms.values()) + f" | {ratio:.2f} |")


def print_routing(args: argparse.Namespace, experts: int) -> None:
    """Prints a row of the second table; the experts get as many rows as in the last row of the first table."""
    topk = min(args.topk, experts)
    case = Case(args, experts, max(args.assignments) // topk, topk)
    weight = torch.randn(experts, args.hidden).mul_(0.02).requires_grad_()
    rule = RouterSpec(args.hidden, experts, topk, "softmax", normalized=True)

    def router() -> tuple[Tensor, Tensor]:
        scores = routing.scores(F.linear(case.x.float(), weight), rule)
        indices = routing.choose(scores, None, rule)
        weights = routing.weigh(scores, indices, rule)
        weights.sum().backward()
        return indices, weights

    indices, weights = router()
    steps = {"router": router, "plan": lambda: assign(indices, weights, experts), "experts": case.ours()}
    rounds = measured(steps, args.rounds)
    ms = [statistics.median(taken[name] for taken in rounds) for name in steps]
    share = statistics.median((taken["router"] + taken["plan"]) / sum(taken.values()) for taken in rounds)
    print(f"| {experts} | {len(case.x)} | " + " | ".join(f"{value:.2f}" for value in ms) + f" | {100 * share:.1f} % |")


def measured(ways: Mapping[str, Callable[[], object]], rounds: int) -> list[dict[str, float]]:
    """Returns each round's milliseconds of CPU time by name, after a round that does not count."""
    found, names = [], list(ways)
    for round_ in range(rounds + 1):
        first, taken = round_ % len(names), dict.fromkeys(names, 0.0)
        for name in (*names[first:], *names[:first]):
            started = time.process_time()
            ways[name]()
            taken[name] = (time.process_time() - started) * 1000
        found.append(taken)
    return found[1:]


def assign(indices: Tensor, weights: Tensor, experts: int) -> tuple[Assignments, Tensor]:
    """Returns the assignments and their weights, where all experts are on this rank."""
    flat = indices.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts)
    ends = counts.cumsum(0).int()
    return Assignments(order // indices.shape[1], ends, counts.tolist()), weights.detach().flatten()[order]


class Case:
    """Weights of experts and rows for them, with every implementation of a forward and backward."""

    def __init__(self, args: argparse.Namespace, experts: int, rows: int, topk: int) -> None:
        torch.manual_seed(1)
        self._config = ModelConfig(
            bf16=args.dtype == "bfloat16", hidden_size=args.hidden, num_experts=experts, moe_ffn_hidden_size=args.width
        )
        self._spec = ExpertsSpec(args.hidden, experts, args.width, SWIGLU, gated=True)
        dtype = getattr(torch, args.dtype)
        self.x = torch.randn(rows, args.hidden).to(dtype).requires_grad_()
        self._grad = torch.randn(rows, args.hidden).to(dtype)
        chosen = torch.rand(rows, topk), torch.rand(rows, experts).topk(topk).indices
        self._assignments, weights = assign(chosen[1], chosen[0], experts)
        self._weights = weights.requires_grad_()
        self._fc1, self._fc2 = (p.detach() for p in self._experts(None).parameters())

    def check(self, ways: Mapping[str, Callable[[], None]]) -> None:
        """Fails unless all implementations give the same gradients of rows and weights."""
        found: dict[str, list[Tensor]] = {}
        for name, way in ways.items():
            self.x.grad = self._weights.grad = None
            way()
            assert self.x.grad is not None and self._weights.grad is not None
            found[name] = [self.x.grad.float(), self._weights.grad.float()]
        expected = next(iter(found.values()))
        for name, grads in found.items():
            for grad, same in zip(grads, expected):
                off = (grad - same).abs().max() / same.abs().max()
                assert off < (1e-4 if self.x.dtype == torch.float32 else 0.05), f"{name} is off by {off:.1e}"

    def ours(self, kernel: GroupedGemm | None = None) -> Callable[[], None]:
        """The framework's, by the product that it chooses here or by `kernel`."""
        experts = self._experts(kernel)
        for parameter in experts.parameters():
            slot = GradSlot(lambda: None)
            slot.main_grad = torch.zeros(parameter.shape)
            parameter.slot = slot  # type: ignore[attr-defined]

        def step() -> None:
            for parameter in experts.parameters():
                parameter.slot.fresh = True  # type: ignore[attr-defined]
            experts(self.x, self._weights, self._assignments).backward(self._grad)

        return step

    def grouped_mm(self) -> Callable[[], None]:
        """torch's grouped product under autograd, on gathered rows."""
        fc1, fc2 = (w.clone().requires_grad_() for w in (self._fc1.flatten(1, 2), self._fc2))
        rows, ends, _ = self._assignments

        def step() -> None:
            fc1.grad = fc2.grad = None
            gate, up = F.grouped_mm(self.x[rows], fc1.transpose(1, 2), offs=ends).chunk(2, dim=-1)
            inner = (F.silu(gate) * up * self._weights.unsqueeze(-1)).to(self.x.dtype)
            out = F.grouped_mm(inner, fc2.transpose(1, 2), offs=ends)
            torch.zeros_like(self.x).index_add(0, rows, out).backward(self._grad)

        return step

    def linear_layers(self) -> Callable[[], None]:
        """Three linear layers per expert, as models are usually written."""
        layers = nn.ModuleList(nn.ModuleList(map(_linear, (*fc1, fc2))) for fc1, fc2 in zip(self._fc1, self._fc2))
        rows, _, sizes = self._assignments

        def step() -> None:
            layers.zero_grad(set_to_none=True)
            out = torch.zeros_like(self.x)
            for places, weights, (gate, up, down) in zip(rows.split(sizes), self._weights.split(sizes), layers):
                if len(places):
                    x = self.x[places]
                    inner = down(F.silu(gate(x)) * up(x))
                    out = out.index_add(0, places, (inner * weights.unsqueeze(-1)).to(x.dtype))
            out.backward(self._grad)

        return step

    def _experts(self, kernel: GroupedGemm | None) -> Experts:
        groups = create_groups(Mesh.create(1), 0, Heartbeat(0), 60.0)
        kernels = choose_kernels(self._config, CPU)
        if kernel is not None:
            kernels = dataclasses.replace(kernels, grouped=kernel)
        experts = Experts(Build(self._config, groups, False, kernels, RngTracker(1, groups, CPU), CPU), self._spec)
        initialize(local_parameters(experts), 1)
        return experts


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    return layer


if __name__ == "__main__":
    main()
