"""The gated delta rule, forward and backward, beside the chunked function of transformers.

    python -m benchmarks.delta_rule

Both take turns in one process, on the same numbers in fp32; times are medians of milliseconds, and *of transformers* is
the median ratio within a round. The sizes are heads of a Qwen3-Next, and a model of a quarter of its width with more
tokens. Kept is the memory that a layer keeps for its backward, in bytes per token: what autograd saves, without the
arguments.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from megatron.kernels.ops.delta_rule import delta_rule


class Size(NamedTuple):
    """Sizes of a call. k_heads, v_heads: heads of keys and of values, each of `channels`."""

    tokens: int
    samples: int
    k_heads: int
    v_heads: int
    channels: int


SIZES = (Size(1024, 1, 4, 8, 128), Size(2048, 2, 2, 4, 64))


def arguments(size: Size) -> list[Tensor]:
    """q, k, v, decay and beta as a layer of random weights makes them."""
    draw = torch.Generator().manual_seed(1)

    def normal(heads: int, *channels: int) -> Tensor:
        return torch.randn(size.tokens, size.samples, heads, *channels, generator=draw)

    q, k = (torch.nn.functional.normalize(normal(size.k_heads, size.channels), dim=-1) for _ in range(2))
    decay = -torch.nn.functional.softplus(normal(size.v_heads))
    made = [q, k, normal(size.v_heads, size.channels), decay, normal(size.v_heads).sigmoid()]
    return [x.requires_grad_() for x in made]


def rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The rule of this tree; q is scaled as transformers does."""
    return delta_rule(q * q.shape[-1] ** -0.5, k, v, decay, beta)[0]


def peer(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The rule of transformers, with its order of dims."""
    out, _ = torch_chunk_gated_delta_rule.__wrapped__(
        *(x.transpose(0, 1) for x in (q, k, v)), decay.transpose(0, 1), beta.transpose(0, 1)
    )
    return out.transpose(0, 1)


def timed(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> tuple[float, float, int]:
    """Returns the milliseconds of forward and backward, and the bytes that autograd saves beyond the arguments."""
    known = {x.untyped_storage().data_ptr() for x in inputs}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    begin = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = function(*inputs)
    middle = time.perf_counter()
    torch.autograd.grad(out, inputs, grad)
    return (middle - begin) * 1e3, (time.perf_counter() - middle) * 1e3, sum(saved.values())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print("| tokens x samples | heads | channels | | forward ms | backward ms | of transformers | kept B/token |")
    print("|---|---|---|---|---|---|---|---|")
    for size in SIZES:
        inputs = arguments(size)
        grad = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(2))
        times = [[timed(function, inputs, grad) for function in (rule, peer)] for _ in range(rounds + 1)][1:]
        ratio = statistics.median(sum(ours[:2]) / sum(theirs[:2]) for ours, theirs in times)
        for name, column, of in (("here", 0, f"{ratio:.2f}"), ("transformers", 1, "1.00")):
            forward, backward = (statistics.median(turn[column][i] for turn in times) for i in range(2))
            kept = times[0][column][2] // (size.tokens * size.samples)
            print(
                f"| {size.tokens} x {size.samples} | {size.k_heads}/{size.v_heads} | {size.channels} | {name} "
                f"| {forward:.0f} | {backward:.0f} | {of} | {kept} |"
            )


if __name__ == "__main__":
    main()
