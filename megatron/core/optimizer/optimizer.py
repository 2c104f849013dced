"""AdamW or SGD over gradient buffers, with fp32 masters where the model is in half precision.

The update itself is torch's fused kernel (one pass at the memory's speed on CPU and CUDA). Loss unscaling and clipping
are one divisor inside that pass, not passes of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.core.distributed.grad_buffer import GradBuffer
from megatron.core.groups import Groups
from megatron.core.optimizer.grad_norm import counted_here, global_norm, global_zeros
from megatron.core.optimizer.loss_scale import LossScale


@dataclass(frozen=True)
class Update:
    """What one step did. `applied` is False when gradients were not finite; nothing was changed then."""

    applied: bool
    grad_norm: float  # of the unscaled gradient, before clipping
    num_zeros: int | None


class Optimizer:
    """Plain data parallelism: every dp rank holds and updates the whole state of its tp x pp shard.

    state: parameter name -> {"exp_avg", "exp_avg_sq"} (adam) or {"momentum_buffer"} (sgd), plus "master" when the
    model is not in fp32; all fp32, in the parameter's local shape.
    """

    def __init__(self, config: OptimizerConfig, buffers: list[GradBuffer], groups: Groups, *, fp16: bool) -> None:
        self.loss_scale = LossScale(config, fp16)
        self._config, self._buffers, self._groups = config, buffers, groups
        # An fp32 model is its own master.
        self._masters = [b.params if b.params.dtype == torch.float32 else b.params.float() for b in buffers]
        self.state: dict[str, dict[str, Tensor]] = {}
        decayed, undecayed = self._make_state()
        self._torch = _torch_optimizer(config, decayed, undecayed)
        for name, tensor in self._steppable.items():
            moments = {key: value for key, value in self.state[name].items() if key != "master"}
            if config.optimizer == "adam":
                moments["step"] = torch.zeros((), device=tensor.device)
            self._torch.state[tensor].update(moments)

    @property
    def steps(self) -> int:
        """Updates applied so far (adam's bias correction counts them)."""
        if self._config.optimizer != "adam":
            return 0
        return int(next(iter(self._torch.state.values()))["step"])

    @steps.setter
    def steps(self, value: int) -> None:
        if self._config.optimizer == "adam":
            for state in self._torch.state.values():
                state["step"].fill_(value)

    def clear_gradients(self) -> None:
        """Before the first microbatch of a step."""
        for buffer in self._buffers:
            buffer.clear()

    def step(self, lr: float, weight_decay: float, *, count_zeros: bool = False) -> Update:
        """Update masters and parameters from reduced gradients. See grad_norm.py for the communication."""
        scale = self.loss_scale.value
        norm = global_norm(self._counted_gradients(), self._groups) / scale
        if not math.isfinite(norm) and (self._config.check_for_nan_in_loss_and_grad or self.loss_scale.dynamic):
            self.loss_scale.update(overflow=True)
            return Update(False, norm, None)
        num_zeros = global_zeros(self._counted_gradients(), self._groups) if count_zeros else None
        clip = self._config.clip_grad
        divisor = scale * max(1.0, norm / clip) if clip > 0 else scale
        self._apply(lr, weight_decay, divisor)
        self.loss_scale.update(overflow=False)
        return Update(True, norm, num_zeros)

    def params_norm(self) -> float:
        """2-norm of all parameters (of the masters). Communication as `global_norm`."""
        kept = (
            buffer.slice_of(master, name)
            for buffer, master in zip(self._buffers, self._masters, strict=True)
            for name, parameter in buffer.parameters.items()
            if counted_here(parameter, self._groups)
        )
        return global_norm(kept, self._groups)

    def masters_from_parameters(self) -> None:
        """Rebuild the fp32 masters from the model's weights, after weights were loaded without optimizer state."""
        for buffer, master in zip(self._buffers, self._masters, strict=True):
            if master is not buffer.params:
                master.copy_(buffer.params)

    def parameters_from_masters(self) -> None:
        """Round the masters into the model's weights."""
        for buffer, master in zip(self._buffers, self._masters, strict=True):
            if master is not buffer.params:
                buffer.params.copy_(master)

    def _make_state(self) -> tuple[list[Tensor], list[Tensor]]:
        """Allocate moments; return the tensors the torch optimizer steps, with and without weight decay."""
        keys = ("exp_avg", "exp_avg_sq") if self._config.optimizer == "adam" else ("momentum_buffer",)
        self._steppable: dict[str, Tensor] = {}
        groups: tuple[list[Tensor], list[Tensor]] = ([], [])
        for buffer, master in zip(self._buffers, self._masters, strict=True):
            flat = {key: torch.zeros_like(buffer.grads) for key in keys}
            for name, parameter in buffer.parameters.items():
                tensor = buffer.slice_of(master, name)
                tensor.grad = buffer.slice_of(buffer.grads, name)
                self._steppable[name] = tensor
                groups[0 if parameter.info.decay else 1].append(tensor)
                self.state[name] = {key: buffer.slice_of(flat[key], name) for key in keys}
                if master is not buffer.params:
                    self.state[name]["master"] = tensor.detach()
        return groups

    def _counted_gradients(self) -> list[Tensor]:
        return [
            buffer.slice_of(buffer.grads, name)
            for buffer in self._buffers
            for name, parameter in buffer.parameters.items()
            if counted_here(parameter, self._groups)
        ]

    def _apply(self, lr: float, weight_decay: float, divisor: float) -> None:
        for group in self._torch.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay if group["decay"] else 0.0
        # The fused kernels divide gradients by `grad_scale`: torch's own GradScaler hands it over the same way.
        device = self._buffers[0].grads.device
        divisor_tensor = torch.full((), divisor, device=device) if divisor != 1.0 else None
        self._torch.grad_scale = divisor_tensor  # type: ignore[union-attr]
        self._torch.step()
        self.parameters_from_masters()


def _torch_optimizer(
    config: OptimizerConfig, decayed: list[Tensor], undecayed: list[Tensor]
) -> torch.optim.AdamW | torch.optim.SGD:
    groups = [
        {"params": tensors, "decay": decay} for tensors, decay in ((decayed, True), (undecayed, False)) if tensors
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)
