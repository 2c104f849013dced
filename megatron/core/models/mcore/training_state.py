"""The training state, in addition to the weights, that Megatron-LM needs to continue a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.config.model import ModelConfig
from megatron.core.models.mcore.arguments import arguments_of
from megatron.core.models.mcore.names import SEQUENTIAL, CheckpointLayout

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Adam:
    """The state of Adam. `updates` is the number of applied updates. `loss_scale` is None unless it is dynamic.

    `read(name, key, box)` returns fp32 elements of the "master", "exp_avg" or "exp_avg_sq" of parameter `name`, in
    memory that the caller owns.
    """

    updates: int
    betas: tuple[float, float]
    eps: float
    loss_scale: dict[str, Any] | None
    read: Callable[[str, str, Box], Tensor]


@dataclass(frozen=True)
class TrainingState:
    """The progress of a run. A model that was only converted has the defaults.

    `scheduler` is the state of the learning rate and weight decay, in samples. `arguments` are those of the run, in
    addition to those of the model.
    """

    iteration: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    floating_point_operations: float = 0.0
    adam: Adam | None = None

    @property
    def folder(self) -> str:
        """Name of the checkpoint's folder: its iteration, or Megatron-LM's name for one that no run of its own
        saved."""
        return f"iter_{self.iteration:07d}" if self.scheduler else "release"

    @property
    def tracker(self) -> str:
        """Content of the tracker file."""
        return str(self.iteration) if self.scheduler else "release"

    def common(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """Returns the values other than tensors that every checkpoint holds."""
        values = {"args": arguments, "checkpoint_version": 3.0, "iteration": self.iteration}
        if self.scheduler:
            values["opt_param_scheduler"] = self.scheduler
            values["num_floating_point_operations_so_far"] = self.floating_point_operations
        return values


def arguments_for(
    model: ModelConfig, layout: CheckpointLayout, dtype: torch.dtype, training: TrainingState
) -> argparse.Namespace:
    """Returns the arguments that Megatron-LM's --use-checkpoint-args reads or that it compares when it continues.

    Random states are not saved, because they belong to generators that this program does not use.
    """
    beside = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        **_experts(model, layout),
        # for reading it back here; Megatron-LM does not know it
        "mask_padded_vocabulary": model.mask_padded_vocabulary,
        "padded_vocab_size": layout.vocabulary * layout.tp,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "iteration": training.iteration,
        "no_save_rng": True,
        "no_save_optim": training.adam is None,
    }
    return argparse.Namespace(**arguments_of(model) | beside | training.arguments)


def _experts(model: ModelConfig, layout: CheckpointLayout) -> dict[str, Any]:
    if model.num_experts is None:
        return {}
    return {
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "moe_grouped_gemm": layout.experts != SEQUENTIAL,
    }


def param_groups(adam: Adam, scheduler: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the parameter groups of Megatron-LM's Adam without the parameters: matrices, then those without weight
    decay.

    They have the fields of torch's AdamW and of the fused ones of Transformer Engine and Apex: Megatron-LM uses the
    installed one, and uses the groups of the checkpoint unchanged. Its scheduler sets the rates of both when it loads.
    """
    return [
        {
            "wd_mult": decay,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": scheduler["max_lr"],
            "min_lr": scheduler["min_lr"],
            "lr": scheduler["max_lr"],
            "weight_decay": scheduler["start_wd"] * decay,
            "betas": adam.betas,
            "eps": adam.eps,
            "bias_correction": True,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
            "step": adam.updates,
        }
        for decay in (1.0, 0.0)
    ]
