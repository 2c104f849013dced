"""A chunk is a part of this rank's slice of a bucket with its optimizer state, and is updated, placed and copied
whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.core.distributed.bucket import Bucket
from megatron.core.optimizer.precision import DTYPES, Scratch, read, split, write
from megatron.core.optimizer.rules.table import UPDATE_RULES
from megatron.core.optimizer.update_rule import Inputs
from megatron.kernels.ops.adam import MakeAdamW
from megatron.kernels.ops.update_run import UpdateRun
from megatron.spec.buckets import Piece
from megatron.spec.optimizer_state import state_layout


class OptimizerChunk:
    """The elements from start to stop of the slice, both multiples of 64.

    state: its stored tensors by key, flat, on the device or in host memory: moments, and "master", or "remainder" and
    "ties" (see precision.py). The weights of an fp32 model are the masters as long as the device updates them. on_cpu:
    the CPU updates the chunk, in host memory.
    """

    def __init__(
        self, config: OptimizerConfig, bucket: Bucket, start: int, stop: int, make_adamw: MakeAdamW | None = None
    ) -> None:
        """make_adamw: makes the AdamW with which the device updates its chunks; None stands for torch's kernels."""
        self.bucket, self.start, self.stop = bucket, start, stop
        self.half = bucket.param_shard.dtype != torch.float32
        self.on_cpu = False
        self.state: dict[str, Tensor] = {}
        self.runs = [
            UpdateRun(max(first, start) - start, min(last, stop) - start, *kind)
            for first, last, kind in bucket.runs(lambda info, section: (info.spec.decay, info.spec.embedding_or_output))
            if max(first, start) < min(last, stop)
        ]
        self._config = config
        one_pass = None if make_adamw is None else make_adamw(self.runs, bucket.device)
        self._rule = UPDATE_RULES[config.rule](config, self.runs, one_pass)

    @property
    def label(self) -> str:
        """The name of the chunk in timelines."""
        return f"{self.bucket.label} from {self.start}"

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def parameters(self) -> Tensor:
        """The model's parameters [size] in their dtype, on the device, or in host memory if the bucket is offloaded."""
        return self.bucket.param_shard[self.start : self.stop]

    @property
    def gradient(self) -> Tensor:
        """The gradient [size] in the dtype of main gradients, on the device."""
        return self.bucket.grad_shard[self.start : self.stop]

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(tensor.nbytes for tensor in self.state.values())

    def shapes(self, *, on_cpu: bool) -> dict[str, tuple[int, torch.dtype]]:
        """Returns stored tensor -> (elements, dtype), for a chunk that the CPU or the device updates."""
        layout = state_layout(self._config, half=self.half, on_cpu=on_cpu)
        return {key: (self.size // share, DTYPES[dtype]) for key, (dtype, share) in layout.items()}

    def on_device(self) -> dict[str, Tensor]:
        """Returns undefined tensors for the state on the device."""
        device = self.bucket.device
        return {k: torch.empty(n, dtype=dtype, device=device) for k, (n, dtype) in self.shapes(on_cpu=False).items()}

    def begin(self, state: dict[str, Tensor], *, on_cpu: bool) -> None:
        """Takes undefined tensors as `state`, and sets moments to zero and masters to the parameters."""
        self.state, self.on_cpu = state, on_cpu
        for tensor in state.values():
            tensor.zero_()
        self.master_from_parameters()

    def move(self, state: dict[str, Tensor], *, on_cpu: bool) -> None:
        """Moves the state to tensors in another place. The masters of an fp32 model come from or go to its
        parameters."""
        for key, tensor in state.items():
            tensor.copy_(self.state.get(key, self.parameters))
        self.state, self.on_cpu = state, on_cpu

    def step(
        self, stored: Mapping[str, Tensor], gradient: Tensor, parameters: Tensor, scratch: Scratch, inputs: Inputs
    ) -> None:
        """Updates `stored`, the state or a copy of it, by the gradient, and rounds its masters into `parameters`.

        All tensors are in the same place: on the device, or in host memory.
        """
        values = read(stored, parameters, scratch.take)
        out = None if values["master"] is parameters else parameters
        if gradient.dtype != torch.float32:
            gradient = scratch.take("gradient", len(gradient)).copy_(gradient)
        step = self._rule.step_on_cpu if self.on_cpu else self._rule.step
        step(values, gradient, out, inputs)
        write(stored, values, functools.partial(self._random_bits, inputs.step, gradient.device))

    def master(self) -> Tensor:
        """Returns the master [size] in fp32, in the place of the state: the stored tensor or a new one."""
        device = next(iter(self.state.values())).device
        return read(self.state, self.parameters.to(device), Scratch(device).take)["master"]

    def master_from_parameters(self) -> None:
        """Sets the master to the model's weights."""
        if "master" in self.state:
            self.state["master"].copy_(self.parameters)
        elif "remainder" in self.state:
            self.state["remainder"].zero_()
            self.state["ties"].zero_()

    def pieces(self) -> Iterator[tuple[Piece, str, Tensor]]:
        """Yields (part of a parameter, key, elements in fp32): views of the state, or copies in host memory.

        The keys are those of a state in fp32: moments, and "master" unless the model is fp32.
        """
        values = self._unpacked()
        for piece in self._owned_pieces():
            for key, flat in values.items():
                yield piece, key, flat[self._place(piece)]

    def stored(self) -> Iterator[tuple[Piece, str, Tensor]]:
        """Yields (part of a parameter, key, elements as they are stored): views of the state.

        Left out are the ties of packed masters, bits that several elements share: they follow from masters and weights.
        """
        for piece in self._owned_pieces():
            for key, flat in self.state.items():
                if len(flat) == self.size:
                    yield piece, key, flat[self._place(piece)]

    def load(self, pieces: Mapping[tuple[str, int, str], Tensor]) -> None:
        """Takes over the values that were written into those tensors of `pieces` that are copies, by (name, start,
        key).

        The masters of an fp32 model are its weights, which must have been loaded before.
        """
        master = torch.zeros(self.size)
        for piece in self._owned_pieces():
            for key, tensor in self.state.items():
                if tensor.dtype == torch.bfloat16:
                    tensor[self._place(piece)] = pieces[piece.name, piece.start, key].to(tensor)
            if "remainder" in self.state:
                master[self._place(piece)] = pieces[piece.name, piece.start, "master"]
        if "remainder" in self.state:
            self.parameters.copy_(master)
            split(master.to(self.state["remainder"].device), self.state["remainder"], self.state["ties"])
        if not self.half:
            self.master_from_parameters()

    def _owned_pieces(self) -> Iterator[Piece]:
        """Yields the parts of parameters that lie in this chunk; `at` counts from the beginning of the slice."""
        for piece in self.bucket.pieces:
            first, last = max(self.start, piece.at), min(self.stop, piece.at + piece.stop - piece.start)
            if first < last:
                yield Piece(piece.name, piece.start + first - piece.at, piece.start + last - piece.at, first)

    def _place(self, piece: Piece) -> slice:
        return slice(piece.at - self.start, piece.at - self.start + piece.stop - piece.start)

    def _unpacked(self) -> dict[str, Tensor]:
        values = {key: tensor for key, tensor in self.state.items() if tensor.dtype == torch.float32}
        if len(values) < len(self.state):
            host = torch.device("cpu")
            copies = {key: tensor.to(host) for key, tensor in self.state.items()}
            values = {**read(copies, self.parameters.to(host), Scratch(host).take), **values}
        if not self.half:
            values.pop("master", None)
        return values

    def _random_bits(self, step: int, device: torch.device, first: int, last: int) -> Tensor:
        return self.bucket.random_bits(str(step), device, self.start + first, self.start + last)
