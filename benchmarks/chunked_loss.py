"""Head and loss of a microbatch, forward and backward, in chunks of tokens beside whole logits.

All sizes of chunks take turns in one process; times are medians of milliseconds, and *of whole* is the median ratio
within a round. Memory is the peak of the tensors that a step makes or writes: the main gradient of the head, the
gradient of the hidden states, logits and work space.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import torch

from megatron.base.heartbeat import Heartbeat
from megatron.base.mesh import Mesh
from megatron.config.model import ModelConfig
from megatron.core.device import synchronize
from megatron.core.groups import create_groups
from megatron.core.models.gpt import GPTModel
from megatron.core.parameter import GradSlot, initialize, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.context import Build
from megatron.kernels.choose import choose_kernels
from megatron.schedule.partition import Stage
from megatron.training.dry_run.traced_memory import TracedMemory


class Head:
    """The last stage of a model without layers, whose gradients have their memory. tokens: of a microbatch."""

    def __init__(self, args: argparse.Namespace, words: int, chunk: int, device: torch.device) -> None:
        config = ModelConfig(
            num_layers=1,
            hidden_size=args.hidden,
            num_attention_heads=1,
            vocab_size=words,
            make_vocab_size_divisible_by=1,
            normalization="RMSNorm",
            add_bias_linear=False,
            untie_embeddings_and_output_weights=True,
            max_position_embeddings=args.tokens,
            bf16=args.bf16,
        )
        groups = create_groups(Mesh.create(1), 0, Heartbeat(0), 60.0)
        kernels, rng = choose_kernels(config, device), RngTracker(1, groups, device)
        build = Build(config, groups, False, kernels, rng, device, loss_chunk=chunk)
        self._model = GPTModel(build, [Stage(0, range(0), embedding=False, head=True)])
        initialize(local_parameters(self._model), 1)
        for parameter in local_parameters(self._model).values():
            memory = torch.zeros(parameter.shape, dtype=torch.float32, device=device)
            parameter.slot = GradSlot(functools.partial(_no_memory))
            parameter.slot.main_grad = memory
        self._device = device
        self._x = torch.randn(args.tokens, 1, args.hidden, dtype=build.dtype, device=device).requires_grad_()
        self._labels = torch.randint(words, (1, args.tokens), device=device)
        self._positions = torch.arange(args.tokens, device=device).unsqueeze(0)

    def step(self) -> None:
        """Forward and backward of a microbatch."""
        self._x.grad = None
        losses = self._model(
            self._labels, self._positions, labels=self._labels, received=self._x, loss_in_backward=True
        )
        losses.sum().backward()

    def seconds(self) -> float:
        """Returns the time of a step."""
        synchronize(self._device)
        begin = time.perf_counter()
        self.step()
        synchronize(self._device)
        return time.perf_counter() - begin

    def peak(self) -> int:
        """Returns the most bytes of a step."""
        self._x.grad = None
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step()
            return torch.cuda.max_memory_allocated() - before
        with TracedMemory(self._device, lambda: "") as memory:
            self.step()
        return memory.peak


def _no_memory() -> None:
    raise AssertionError("a slot that has memory asks for some")


def main() -> None:
    """Prints one table per size of the vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--words", type=int, nargs="+", default=[32000, 128256])
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.tokens} tokens, hidden size {args.hidden}, {'bf16' if args.bf16 else 'fp32'}, {args.device}")
    print("   words   chunk   ms a step   of whole   peak MiB")
    for words in args.words:
        sizes = [args.tokens, *args.chunks]
        heads = [Head(args, words, chunk, torch.device(args.device)) for chunk in sizes]
        for head in heads:
            head.step()
        rounds = [[head.seconds() for head in heads] for _ in range(args.rounds)]
        for place, (chunk, head) in enumerate(zip(sizes, heads, strict=True)):
            ratio = statistics.median(times[place] / times[0] for times in rounds)
            milliseconds = 1e3 * statistics.median(times[place] for times in rounds)
            peak = head.peak() / 2**20
            print(f"{words:8,} {chunk:7,} {milliseconds:11,.0f} {ratio:10.3f} {peak:10,.0f}")


if __name__ == "__main__":
    main()
