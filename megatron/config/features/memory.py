"""The rows of the start-up table about memory: sharded, recomputed, offloaded, and of low precision."""

from __future__ import annotations

import dataclasses

from megatron.base.mesh import Mesh
from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.data_parallel import DataParallelSettings
from megatron.config.features.feature import Facts, Feature
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import OFF, STATES, updates_on_cpu
from megatron.config.pipeline import PipelineSettings
from megatron.config.recompute import NORM, RECOMPUTE_MODULES, RecomputeConfig
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.schedule.offload_pass import moved_groups

_LAYERS_THAT_STAY = 2  # of a stage, where layers are offloaded one by one


def memory_features(run: RunConfig, settings: RunSettings, facts: Facts) -> list[Feature]:
    """Returns the rows about activations, weights and the optimizer's state."""
    trains, on_cpu = not run.train.skip_train, updates_on_cpu(run.optimizer, run.optimizer_offload)
    return [
        _optimizer_sharding(settings.data_parallel, settings.mesh, facts),
        _recompute(run.recompute, run.model, settings.pipeline, facts, trains=trains),
        _activation_offload(run.activation_offload, settings),
        _weight_offload(run.activation_offload, run.optimizer_offload.offload_dir, facts),
        _optimizer_offload(settings, facts, on_cpu=on_cpu),
        _optimizer_state(run.optimizer),
    ]


_SHARED = {
    "no_shard": "off",
    "optim": "optimizer state (ZeRO-1)",
    "optim_grads": "optimizer state, gradients (ZeRO-2)",
    "optim_grads_params": "optimizer state, gradients, parameters (ZeRO-3)",
}


def _optimizer_sharding(settings: DataParallelSettings, mesh: Mesh, facts: Facts) -> Feature:
    requested = _SHARED[settings.shards]
    if requested == "off" or facts.shards > 1:
        return Feature(
            "data-parallel sharding", requested, requested, f"over {facts.shards} ranks" if requested != "off" else ""
        )
    return Feature("data-parallel sharding", requested, "off", f"dp = {mesh.dp}: one rank per instance")


def _recompute(
    recompute: RecomputeConfig, model: ModelConfig, pipeline: PipelineSettings, facts: Facts, *, trains: bool
) -> Feature:
    name, requested = "activation recompute", str(recompute)
    if requested != "off" and not trains:
        return Feature(name, requested, "off", "evaluation only")
    largest = _largest_stage(pipeline)
    if recompute.is_full and largest < (recompute.recompute_num_layers or 0):
        in_effect = str(dataclasses.replace(recompute, recompute_num_layers=largest))
        return Feature(name, requested, in_effect, f"the largest stage has {largest} layer{'s' if largest > 1 else ''}")
    if not model.pre_norm and NORM in recompute.modules and not recompute.is_full:
        parts = " ".join(part for part in RECOMPUTE_MODULES if part in recompute.modules - {NORM})
        return Feature(name, requested, parts or "off", "--no-pre-norm: no norm stands before a linear layer")
    if NORM in recompute.modules and any(model.moe_layers):
        return Feature(name, requested, requested, "layers with experts keep the output of the norm before them")
    return Feature(name, requested, facts.recomputed or requested, "layers on this rank" if facts.recomputed else "")


def _largest_stage(pipeline: PipelineSettings) -> int:
    """Returns the number of layers of the largest pipeline stage."""
    return max(len(stage.layers) for stage in pipeline.stages)


def _activation_offload(offload: ActivationOffloadConfig, settings: RunSettings) -> Feature:
    name = "activation offload"
    if offload.kind is None:
        return Feature(name, "off", "off", "")
    if offload.kind == "layers":
        requested = f"first {offload.cpu_offloading_num_layers} layers of a stage"
        return Feature(name, requested, requested, "")
    if offload.kind == "modules":
        requested = " ".join(offload.offload_modules or ())
        return Feature(name, requested, requested, f"in all layers but a stage's last {_LAYERS_THAT_STAY}")
    requested = "auto" if offload.ratio is None else f"{offload.ratio:g} of the bytes"
    where, why = _where_a_ratio_works(settings)
    if where and offload.ratio is None:
        return Feature(name, requested, "off at first", f"decided after the second step, and logged; {where}")
    return Feature(name, requested, f"{requested}: {where}" if where else "off", why)


def _where_a_ratio_works(settings: RunSettings) -> tuple[str, str]:
    """What the ranks of the pipeline offload, or "" and why they offload nothing."""
    pipeline, most = settings.pipeline, _largest_stage(settings.pipeline)
    schedule = pipeline.schedule_of(settings.batches.final_num_microbatches, offload=True)
    ranks, whole = len(schedule.actions), sum(bool(moved_groups(actions)) for actions in schedule.actions)
    if not whole and most <= _LAYERS_THAT_STAY:
        return "", f"a stage has {most} layers, which its backward needs at once"
    by_layer = f"all but the last {_LAYERS_THAT_STAY} of a stage, one by one"
    if not whole:
        return f"layers, {by_layer}", ""
    ranks_text = "" if whole == ranks else f" on {whole} of {ranks} ranks"
    layers_text = f"; where a backward follows sooner layers, {by_layer}" if most > _LAYERS_THAT_STAY else ""
    return f"whole microbatches{ranks_text}{layers_text}", ""


def _weight_offload(offload: ActivationOffloadConfig, directory: str | None, facts: Facts) -> Feature:
    name, count = "weight offload", offload.offloaded_weight_layers
    if not count:
        return Feature(name, "off", "off", "")
    requested = f"first {count} layer{'s' if count > 1 else ''} of a stage"
    where = f"files in {directory}" if directory else "host memory"
    same = "the device is the CPU, and host memory its own" if facts.device == "cpu" and not directory else ""
    return Feature(name, requested, f"{requested}: in {where}", same)


def _optimizer_offload(settings: RunSettings, facts: Facts, *, on_cpu: bool) -> Feature:
    """on_cpu: the flags ask for updates on the CPU, if only of a fraction of 0."""
    name, offload, data_parallel = "optimizer offload", settings.optimizer_offload, settings.data_parallel
    memory = f"files in {offload.directory}" if offload.directory else "host memory"
    same = "the device is the CPU, and host memory its own" if facts.device == "cpu" and not offload.directory else ""
    if offload.mode == STATES:
        return Feature(name, "states", f"states in {memory}", same)
    if offload.mode == OFF:
        return Feature(name, "fraction 0" if on_cpu else "off", "off", "")
    requested = "auto" if offload.is_auto else f"static {offload.fraction:g}"
    number, chunks = facts.cpu_chunks
    in_effect = f"{requested}: {number} of {chunks} chunks in {memory}" + (" at first" if offload.is_auto else "")
    if not offload.overlap:
        return Feature(name, requested, in_effect, same)
    late = []
    if not data_parallel.overlap_reduce and settings.mesh.dp * settings.mesh.cp > 1:
        late.append("nothing is overlapped with backward: gradients are reduced after it")
    if not data_parallel.overlap_gather and facts.shards > 1:
        late.append("nothing is overlapped with the next forward: parameters are gathered before it")
    why = "; ".join([*late, *([same] if same else [])])
    return Feature(name, f"{requested}, overlapped", f"{in_effect}, overlapped", why)


def _optimizer_state(o: OptimizerConfig) -> Feature:
    stored = {"exp_avg": o.exp_avg_dtype, "exp_avg_sq": o.exp_avg_sq_dtype, "masters": o.main_params_dtype}
    low = ", ".join(f"{name} {dtype}" for name, dtype in stored.items() if dtype != "fp32")
    return Feature("optimizer state", low or "fp32", low or "fp32", "")
