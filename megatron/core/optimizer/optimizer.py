"""AdamW or SGD on this rank's slices of the buckets, with fp32 masters where the model is in half precision.

One optimizer for every sharding: a slice is the whole bucket when nothing is sharded. The update itself is torch's fused
kernel (one pass at the memory's speed on CPU and CUDA). Loss unscaling and clipping are one divisor inside that pass, not
passes of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.core.distributed.bucket import Bucket
from megatron.core.distributed.buckets import Piece
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Groups
from megatron.core.optimizer.grad_norm import counted_here, global_norm, global_zeros
from megatron.core.optimizer.loss_scale import LossScale


@dataclass(frozen=True)
class Update:
    """What one step did. `applied` is False when gradients were not finite; nothing was changed then."""

    applied: bool
    grad_norm: float  # of the unscaled gradient, before clipping
    num_zeros: int | None


class Slice:
    """State and update of this rank's slice of one bucket.

    state: "exp_avg", "exp_avg_sq" (adam) or "momentum_buffer" (sgd), plus "master" when the model is not in fp32; each
    fp32, of the slice's size. An fp32 model is its own master.
    """

    def __init__(self, config: OptimizerConfig, bucket: Bucket) -> None:
        self.bucket, self._config = bucket, config
        half = bucket.param_shard.dtype != torch.float32
        self.master = bucket.param_shard.float() if half else bucket.param_shard
        keys = ("exp_avg", "exp_avg_sq") if config.optimizer == "adam" else ("momentum_buffer",)
        self.state = {key: torch.zeros_like(self.master) for key in keys}
        self._runs = bucket.runs(lambda parameter: parameter.info.decay)
        self._tensors = [self.master[start:stop] for start, stop, _ in self._runs]
        self._torch = _torch_optimizer(config, self._tensors, [decay for _, _, decay in self._runs])
        for tensor, (start, stop, _) in zip(self._tensors, self._runs, strict=True):
            moments = {key: value[start:stop] for key, value in self.state.items()}
            if config.optimizer == "adam":
                moments["step"] = torch.zeros((), device=tensor.device)
            assert self._torch is not None
            self._torch.state[tensor].update(moments)
        if half:
            self.state["master"] = self.master
        self._gradient: Tensor | None = None

    def update(self, lr: float, weight_decay: float, divisor: Tensor | None) -> None:
        """Step the master with the slice's gradient over `divisor`, and round it into the parameters."""
        if self._torch is None:
            return
        if self._gradient is not self.bucket.grad_shard:  # gradient memory is moved when the run changes its mode
            self._gradient = self.bucket.grad_shard
            for tensor, (start, stop, _) in zip(self._tensors, self._runs, strict=True):
                tensor.grad = self._gradient[start:stop]
        for group in self._torch.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay if group["decay"] else 0.0
        # The fused kernels divide gradients by `grad_scale`: torch's own GradScaler hands it over the same way.
        self._torch.grad_scale = divisor  # type: ignore[union-attr]
        self._torch.step()
        self.parameters_from_master()

    def set_steps(self, steps: int) -> None:
        """Tell adam how many updates were applied before: its bias correction counts them."""
        if self._torch is not None and self._config.optimizer == "adam":
            for state in self._torch.state.values():
                state["step"].fill_(steps)

    def master_from_parameters(self) -> None:
        """Rebuild the fp32 master from the model's weights."""
        if self.master is not self.bucket.param_shard:
            self.master.copy_(self.bucket.param_shard)

    def parameters_from_master(self) -> None:
        """Round the master into the model's weights."""
        if self.master is not self.bucket.param_shard:
            self.bucket.param_shard.copy_(self.master)


class Optimizer:
    """Updates a model's parameters from reduced gradients, bucket by bucket in forward order."""

    def __init__(self, config: OptimizerConfig, data_parallel: DataParallel, groups: Groups, *, fp16: bool) -> None:
        self.loss_scale = LossScale(config, fp16)
        self.slices = [Slice(config, bucket) for bucket in data_parallel.buckets]
        self._config, self._data_parallel, self._groups = config, data_parallel, groups
        self._steps = 0
        self._device = data_parallel.device

    @property
    def steps(self) -> int:
        """Updates applied so far."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value
        for owned in self.slices:
            owned.set_steps(value)

    def step(self, lr: float, weight_decay: float, *, count_zeros: bool = False) -> Update:
        """Update masters and parameters from reduced gradients. Communication: grad_norm.py; then the gathers."""
        scale, timeline = self.loss_scale.value, self._data_parallel.timeline
        with timeline.span("step", "gradient norm"):
            gradients = self._counted([owned.bucket.grad_shard for owned in self.slices])
            norm = global_norm(gradients, self._groups, self._device) / scale
        if not math.isfinite(norm) and (self._config.check_for_nan_in_loss_and_grad or self.loss_scale.dynamic):
            self.loss_scale.update(overflow=True)
            return Update(False, norm, None)
        num_zeros = global_zeros(self._counted_gradients(), self._groups, self._device) if count_zeros else None
        clip = self._config.clip_grad
        divisor = scale * max(1.0, norm / clip) if clip > 0 else scale
        on_device = torch.full((), divisor, device=self._device) if divisor != 1.0 else None
        for owned in reversed(self.slices):
            with timeline.span("step", owned.bucket.label):
                owned.update(lr, weight_decay, on_device)
            self._data_parallel.publish(owned.bucket)
        self._data_parallel.end_step()
        self._steps += 1
        self.loss_scale.update(overflow=False)
        return Update(True, norm, num_zeros)

    def params_norm(self) -> float:
        """2-norm of all parameters (of the masters). Communication as `global_norm`."""
        return global_norm(self._counted([owned.master for owned in self.slices]), self._groups, self._device)

    def pieces(self) -> Iterator[tuple[Piece, str, Tensor]]:
        """This rank's state by parameter: (piece, key, its elements [stop - start])."""
        for owned in self.slices:
            for piece in owned.bucket.pieces:
                for key, flat in owned.state.items():
                    yield piece, key, flat[piece.at : piece.at + piece.stop - piece.start]

    def masters_from_parameters(self) -> None:
        """Rebuild the fp32 masters from the model's weights, after weights were loaded without optimizer state."""
        for owned in self.slices:
            owned.master_from_parameters()

    def parameters_from_masters(self) -> None:
        """Round the masters into this rank's slices of the model's weights."""
        for owned in self.slices:
            owned.parameters_from_master()

    def _counted(self, flat: list[Tensor]) -> Iterator[Tensor]:
        """The runs of each slice, given as a tensor of its size, that this rank counts."""
        for owned, tensor in zip(self.slices, flat, strict=True):
            for start, stop, counted in owned.bucket.runs(lambda parameter: counted_here(parameter, self._groups)):
                if counted:
                    yield tensor[start:stop]

    def _counted_gradients(self) -> Iterator[Tensor]:
        """The same of gradients, without padding."""
        for owned in self.slices:
            for piece in owned.bucket.pieces:
                if counted_here(owned.bucket.parameters[piece.name], self._groups):
                    yield owned.bucket.grad_shard[piece.at : piece.at + piece.stop - piece.start]


def _torch_optimizer(
    config: OptimizerConfig, tensors: list[Tensor], decayed: list[bool]
) -> torch.optim.AdamW | torch.optim.SGD | None:
    groups = [
        {"params": [tensor for tensor, its in zip(tensors, decayed, strict=True) if its == decay], "decay": decay}
        for decay in set(decayed)
    ]
    if not groups:
        return None
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)
