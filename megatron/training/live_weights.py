"""The weights of a run while it trains, whole on its first rank: a source of exports without a checkpoint."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.core.comm.collectives import broadcast, gather_objects
from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.dist_checkpointing.whole import WRITERS
from megatron.training.checkpoint_tensors import bias_tensors, weight_tensors
from megatron.training.saved_run import MODEL_PREFIX
from megatron.training.trainer import Trainer

_END = -1


class LiveWeights:
    """The weights of a model in training: a Source for the first rank of the world, which reads.

    All other ranks call `follow` meanwhile, which sends their parts of a tensor when the first rank reads it, until
    that calls `close`. Nobody trains meanwhile. Memory: the tensors that are read at the moment, whole, on the first
    rank, and one part of a tensor on all others.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Communication: gathers of the ranks' descriptions of their parts, over the world."""
        trainer.data_parallel.synchronize()
        self.model, self.carried = trainer.run.model, trainer.carried
        self.dtype: torch.dtype = getattr(torch, trainer.run.model.dtype_name)
        self._world, self._device, self._lock = trainer.groups.world, trainer.device, threading.Lock()
        tensors = weight_tensors(trainer.parameters, trainer.data_parallel, trainer.groups)
        tensors += bias_tensors(dict(trainer.model.named_buffers()), trainer.groups)
        self._parts = [tensor for tensor in tensors if tensor.writer]
        descriptions = [_describe(tensor) for tensor in self._parts]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        # The parts of each tensor: (rank, number among the parts of that rank, rectangle)
        self._places: dict[str, list[tuple[int, int, Box]]] = {}
        for rank, of_rank in enumerate(gather_objects(descriptions, self._world)):
            for number, (name, shape, dtype, box) in enumerate(of_rank):
                self.shapes[name], self._dtypes[name] = shape, dtype
                self._places.setdefault(name, []).append((rank, number, box))
        self._names = list(self.shapes)
        self._is_open = True
        self._whole: OrderedDict[str, Tensor] = OrderedDict()  # the tensors that were read last

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Returns elements of a tensor, in host memory; see Source. Call it on the first rank, from any thread.

        Communication: broadcasts of the tensor's parts over the world, unless it is among those that were read last.
        Raises RuntimeError after `close`.
        """
        with self._lock:
            if not self._is_open:
                raise RuntimeError("the weights of a run can be read only while they are handed over")
            if name not in self._whole:
                self._tell(self._names.index(name))
                self._whole[name] = self._gather(name)
            self._whole.move_to_end(name)
            while len(self._whole) > WRITERS:
                self._whole.popitem(last=False)
            return narrow(self._whole[name], box).to("cpu", dtype, copy=True)

    def follow(self) -> None:
        """Sends this rank's parts until the first rank closes. All ranks but the first call it."""
        while (number := self._tell(_END)) != _END:
            self._gather(self._names[number])

    def close(self) -> None:
        """Ends `follow` on the other ranks. The first rank calls it."""
        with self._lock:
            self._is_open = False
            self._tell(_END)
            self._whole.clear()

    def _tell(self, number: int) -> int:
        """Returns the first rank's number, on all ranks."""
        return int(broadcast(torch.tensor(number, device=self._device), self._world))

    def _gather(self, name: str) -> Tensor:
        """Returns a whole tensor on the first rank, and an empty one on the others."""
        shape = self.shapes[name] if self._world.rank == 0 else (0,)
        whole = torch.empty(shape, dtype=self._dtypes[name], device=self._device)
        for rank, number, box in self._places[name]:
            if rank == self._world.rank:
                part = self._parts[number].data.contiguous()
            else:
                part = torch.empty(box.shape, dtype=self._dtypes[name], device=self._device)
            part = broadcast(part, self._world, rank)
            if self._world.rank == 0:
                narrow(whole, box).copy_(part)
        return whole


def _describe(tensor: ShardedTensor) -> tuple[str, tuple[int, ...], torch.dtype, Box]:
    return tensor.name.removeprefix(MODEL_PREFIX), tensor.global_shape, tensor.data.dtype, tensor.box
