"""Logs the start-up table of a run, its size, and the placement of its memory."""

from __future__ import annotations

import math
import os

import torch

from megatron.base.cuda_environment import allocator_settings, deterministic_settings
from megatron.base.log import get_logger
from megatron.config.features.feature import Facts
from megatron.config.features.table import features, format_table, worth_a_line
from megatron.planner.memory.footprint import shards_of, weight_and_optimizer_footprint
from megatron.training.logging.footprint import MIB, format_footprint
from megatron.training.prepare import Prepared
from megatron.training.trainer import Trainer

log = get_logger(__name__)


def announce(trainer: Trainer, prepared: Prepared) -> None:
    """Logs the start-up table, with all rows under --print-flags, and the sizes of the run."""
    rows = features(trainer.run, trainer.settings, _facts(trainer, prepared))
    log.info("%s", format_table(rows if trainer.run.logging.print_flags else worth_a_line(rows)))
    _log_sizes(trainer)
    if carried := trainer.carried.tensors:
        log.info(
            "%d tensors (%.2f GB), such as %s, are not trained: checkpoints hold them, and --save-hf writes them back",
            len(carried),
            trainer.carried.nbytes / 1e9,
            next(iter(carried)),
        )


def _facts(trainer: Trainer, prepared: Prepared) -> Facts:
    buckets, kernels = trainer.data_parallel.buckets, prepared.shared.kernels
    dtypes = {bucket.dtype for bucket in buckets}
    return Facts(
        device=trainer.device.type,
        backend=prepared.backend,
        attention_choice=kernels.attention_choice,
        block_choice=kernels.block_choice,
        fusion_missing=kernels.fusion_missing,
        grouped_missing=kernels.grouped_missing,
        experts_choice=kernels.experts_choice,
        fused_choice=kernels.fused_choice,
        fp8_choice="" if trainer.step.features.fp8 is None else trainer.step.features.fp8.choice,
        fp8_experts_choice="" if trainer.step.features.fp8 is None else trainer.step.features.fp8.experts_choice,
        layers_choice=kernels.layers_choice,
        upcast_products=trainer.target.wide,
        separate_main_grads=dtypes != {torch.float32},
        buckets=len(buckets),
        shards=trainer.groups.view(None).shard.size,
        tp_overlap=prepared.shared.overlap.name,
        tp_overlap_why=prepared.overlap_why,
        cpu_chunks=trainer.optimizer.cpu_chunks,
        allocator=allocator_settings(os.environ) if trainer.device.type == "cuda" else "",
        deterministic=deterministic_settings(os.environ) if trainer.device.type == "cuda" else "",
        recomputed="" if prepared.balanced is None else str(prepared.balanced),
    )


def _log_sizes(trainer: Trainer) -> None:
    """Logs the first rank's parameters, and the bytes of weights and optimizer on the device and offloaded."""
    run, groups, buckets = trainer.run, trainer.groups, trainer.data_parallel.buckets
    count = sum(math.prod(p.info.shape) for p in trainer.parameters.values())
    log.info(" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): %d", count)
    frozen = sum(math.prod(p.info.shape) for p in trainer.parameters.values() if not p.requires_grad)
    if frozen:
        share = 100 * (count - frozen) / count
        names = " ".join(run.model.lora_projections) + ("; routed experts have none" if run.model.num_experts else "")
        log.info("training %d of them, %.2f %%: adapters of %s", count - frozen, share, names)
    offloaded = [
        parameter for bucket in buckets if bucket.offloaded is not None for parameter in bucket.parameters.values()
    ]
    host_weights = sum(math.prod(parameter.info.shape) for parameter in offloaded)
    footprint = weight_and_optimizer_footprint(
        count - frozen,
        run.optimizer,
        shards_of(trainer.data_parallel.settings, groups.view(None).shard.size),
        half=run.model.dtype_name != "float32",
        frozen=frozen,
        offloaded=host_weights,
    )
    log.info(format_footprint(footprint))
    if host_weights:
        log.info("%d parameters offloaded to host memory", host_weights)
    if trainer.optimizer.host_bytes:
        on_device, on_host = trainer.optimizer.device_bytes / MIB, trainer.optimizer.host_bytes / MIB
        log.info("optimizer states and buffers: %.2f MB on the device and %.2f MB offloaded", on_device, on_host)
