"""Small tensors that the host reads while the device goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.streams.cuda import everything_queued


class HostCopy:
    """A copy for the host, under way from the current stream. The host may do other things before it reads it."""

    def __init__(self, tensor: Tensor) -> None:
        """On CUDA into page-locked memory: the host would wait for a copy to any other."""
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._values.copy_(tensor, non_blocking=True)
        self._copied = everything_queued(tensor.device) if tensor.is_cuda else None

    def read(self) -> Any:
        """Returns the numbers, as Tensor.tolist does, when they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
