"""The content of a checkpoint, and how a run continues from one, under any layout.

Tensors: "model/NAME" (weights, and the bias of experts), "optimizer/NAME/exp_avg" ... (fp32, in the weight's global
shape), "load/NAME" (of experts in the batch before), "rng/STREAM/RANK", "fp8/LAYER" (largest values in earlier steps),
"carried/NAME" (tensors of a Hugging Face folder that are not trained, under their names there). Trained weights in half
precision are not written where "optimizer/NAME/master" is: they are read as its rounded values.
State (JSON): the run's configuration, its progress, the schedule, the loss scale, the layout under which it was saved,
the FP8 layers with largest values, the config.json of carried tensors, and earlier results.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.config.optimizer import OptimizerConfig
from megatron.config.run import RunConfig
from megatron.config.update_rules import rule_name
from megatron.core.dist_checkpointing.folders import find
from megatron.core.dist_checkpointing.local_save import LocalSave
from megatron.core.dist_checkpointing.pending_save import PendingSave
from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor
from megatron.core.dist_checkpointing.staging import Staging
from megatron.core.dist_checkpointing.whole import WholeReader
from megatron.core.groups import Groups
from megatron.core.models.carried import CarriedTensors
from megatron.core.models.hf.families import CONFIG_FILE
from megatron.core.optimizer.optimizer import Optimizer
from megatron.spec.lora import is_adapter
from megatron.training.carried import carried_in
from megatron.training.changed_settings import name_changed_settings
from megatron.training.checkpoint_tensors import (
    bias_tensors,
    carried_tensors,
    fp8_tensors,
    load_tensors,
    optimizer_tensors,
    rng_tensors,
    rounded_from_masters,
    weight_tensors,
)
from megatron.training.data_order import warn_of_another_order
from megatron.training.fp8 import Fp8Layers
from megatron.training.logging.line import format_loaded, format_loading, format_saved, format_saving
from megatron.training.result_state import ResultState
from megatron.training.saved_model import (
    begins_anew,
    check_begins,
    check_same_model,
    check_same_precision,
    model_config_of,
)
from megatron.training.saved_run import SavedRun, open_saved_run
from megatron.training.state import TrainState
from megatron.training.together import together
from megatron.training.trained_model import TrainedModel
from megatron.training.trainer import Trainer

log = get_logger(__name__)

# 1: groups of experts were scored by probabilities where they are scored by logits now (`ModelConfig.groups_by_logits`)
FORMAT = 2


def save_checkpoint(trainer: Trainer, *, prune: bool = True) -> Path:
    """Writes a checkpoint of the trainer's iteration under --save, and deletes those in excess of --save-retain.

    Without `prune` all older ones stay. Collective over the world. Raises CheckpointError on all ranks.
    """
    return finish_save(trainer, begin_save(trainer, prune=prune))


def begin_save(trainer: Trainer, staging: Staging | None = None, *, prune: bool = True) -> PendingSave:
    """Begins what `save_checkpoint` does; `finish_save` ends it.

    With `staging` the trainer may go on meanwhile. Without it the run must not change in between.
    """
    run = trainer.run
    assert run.checkpoint.save
    root, iteration = Path(run.checkpoint.save), trainer.state.iteration
    log.info(format_saving(iteration, root, datetime.now()))
    return PendingSave(
        root,
        iteration,
        _saved_tensors(trainer, staging),
        _state(trainer),
        group=trainer.groups.world,
        keep=run.checkpoint.save_retain if prune else None,
        staging=staging,
        constant=carried_tensors(trainer.carried, trainer.groups),
    )


def begin_local_save(trainer: Trainer, staging: Staging) -> LocalSave:
    """Begins a save of a local checkpoint, while the trainer goes on. Collective over the world. Raises
    CheckpointError on all ranks."""
    local = trainer.local_checkpoints
    assert local is not None and local.place is not None
    return LocalSave(
        local.place,
        trainer.state.iteration,
        _saved_tensors(trainer, staging),
        _state(trainer),
        group=trainer.groups.world,
        complete=local.complete,
        staging=staging,
    )


def _saved_tensors(trainer: Trainer, staging: Staging | None) -> list[ShardedTensor]:
    """Returns the tensors of a checkpoint that training changes. With staging, small ones are copies."""
    run, groups = trainer.run, trainer.groups
    trainer.data_parallel.synchronize()
    buffers = dict(trainer.model.named_buffers())
    tensors = weight_tensors(trainer.parameters, trainer.data_parallel, groups)
    changing = bias_tensors(buffers, groups) + load_tensors(buffers, groups)
    if run.checkpoint.save_optim:
        tensors = rounded_from_masters(tensors, trainer.data_parallel)
        tensors += optimizer_tensors(trainer.optimizer.pieces(), trainer.parameters, groups)
    if run.checkpoint.save_rng:
        changing += rng_tensors(trainer.rng.state(), groups.rank, writer=True)
    changing += fp8_tensors(_fp8_histories(trainer.step.features.fp8), groups)
    if staging is not None:
        # Unlike weights and states of the optimizer, these small tensors change during the next forward and backward.
        changing = [dataclasses.replace(tensor, data=tensor.data.clone()) for tensor in changing]
    return tensors + changing


def finish_save(trainer: Trainer, pending: PendingSave) -> Path:
    """Waits for the end of a save and returns its folder. Collective over the world. Raises CheckpointError."""
    path, groups = pending.finish(), trainer.groups
    if trainer.carried.tensors:
        # The next save reads them here: the checkpoint or the folder they came from may be deleted by then.
        trainer.carried = together(groups.world, lambda: carried_in(WholeReader(path)))
    log.info(format_saved(pending.iteration, path.parent, groups.tp.size, groups.pp.size, datetime.now()))
    return path


def load_checkpoint(path: Path, trained: TrainedModel, *, has_weights: bool = False) -> TrainState:
    """Loads the checkpoint in `path` into a model and all that trains it, and returns its progress.

    has_weights: those of the checkpoint have been read already, see `weights_to_convert` in initial_weights.py.
    Collective over the world; the layout may differ from the saved one. Raises CheckpointError.
    """
    run, groups = trained.run, trained.groups
    saved = open_saved_run(path, run.model, groups.world)
    check_model(path, saved, run)
    restored = _restored_parts(saved.state, trained)
    log.info(format_loading(path, saved.state["train"] and saved.state["train"]["iteration"]))
    if restored.optimizer:
        check_optimizer(path, saved.state, run.optimizer)
    if restored.progress and not run.train.skip_train:
        trained.schedule.resolve(saved.state["schedule"])
    _restore(path, saved, restored, trained, has_weights=has_weights)
    if not restored.random:
        _log_random_state(saved, restored, run)
    # Another layout changes the order of sums anyway, and invalidates the measured values.
    if restored.progress and saved.state.get("grad_reduce_mode") and saved.state["layout"] == _layout(groups):
        trained.data_parallel.take_mode(saved.state["grad_reduce_mode"])
    if restored.progress and not run.train.skip_train:
        name_changed_settings(path, saved.state["config"], run.to_dict())
        warn_of_another_order(path, saved.state, run.to_dict(), groups.mesh.dp)
    if restored.progress:
        trained.results = ResultState.of(saved.state.get("results"))
    progress = TrainState(**saved.state["train"]) if restored.progress else TrainState()
    log.info(format_loaded(path, progress.iteration, groups.tp.size, groups.pp.size))
    return progress


def check_model(path: Path, saved: SavedRun, run: RunConfig) -> None:
    """Raises CheckpointError unless a run can go on with the model of a checkpoint, or begin with it."""
    model, finetune = model_config_of(saved.state), begins_anew(saved.state, run.checkpoint)
    if finetune and model.lora_rank and run.checkpoint.load_adapter:
        raise CheckpointError(
            f"{path} holds LoRA adapters already; --load-adapter {run.checkpoint.load_adapter} needs a model "
            "without any: remove it, or merge them with tools/checkpoint/convert.py --loader megatron --saver megatron"
        )
    if not saved.is_foreign and saved.state.get("format", 1) < FORMAT and model.groups_by_logits:
        log.warning(
            "%s was trained with groups of experts that sums of probabilities chose; now sums of logits do, as in "
            "Megatron-LM, and some tokens go to other experts",
            path,
        )
    if finetune:
        check_begins(path, model, run.model, run.checkpoint)
    else:
        check_same_model(path, model, run.model, run.checkpoint.override_model_fields)
        check_same_precision(path, model, run.model)


def check_optimizer(path: Path, state: dict[str, Any], config: OptimizerConfig) -> None:
    """Raises CheckpointError unless a checkpoint with this state holds that of the run's optimizer."""
    if not state["optimizer"]:
        raise CheckpointError(
            f"{path} holds no optimizer state (it was saved with --no-save-optim); give --no-load-optim"
        )
    rule = rule_name(state["config"]["optimizer"]["optimizer"])
    if rule != config.rule:
        raise CheckpointError(
            f"{path} holds the state of optimizer {rule}, not {config.rule}; "
            f"give --optimizer {rule}, or --no-load-optim to start the optimizer afresh"
        )


class _Restored(NamedTuple):
    """What a run takes from a checkpoint besides the weights.
    Without progress it is a new run, and takes nothing else."""

    progress: bool
    optimizer: bool
    random: bool
    adapters: bool


def _restored_parts(state: dict[str, Any], trained: TrainedModel) -> _Restored:
    run, progress, saved = trained.run, not begins_anew(state, trained.run.checkpoint), model_config_of(state)
    return _Restored(
        progress=progress,
        optimizer=progress and run.checkpoint.load_optim and not run.train.skip_train,
        random=progress and run.checkpoint.load_rng and state["rng"] == _generators(trained.device, trained.groups),
        adapters=progress or saved.lora_rank is not None or run.model.lora_rank is None,
    )


def _restore(path: Path, saved: SavedRun, restored: _Restored, trained: TrainedModel, *, has_weights: bool) -> None:
    """Reads the tensors of a checkpoint into the objects of a run. Collective over the world."""
    groups, optimizer, fp8 = trained.groups, trained.optimizer, trained.step.features.fp8
    tensors = _model_tensors(saved, restored, trained, has_weights=has_weights)
    pieces = list(optimizer.pieces()) if restored.optimizer else []
    tensors += optimizer_tensors(pieces, trained.parameters, groups)
    random = trained.rng.state()
    if restored.random:
        tensors += rng_tensors(random, groups.rank, writer=False)
    histories = _saved_histories(path, saved.state, fp8) if restored.progress else {}
    tensors += fp8_tensors(histories, groups)
    saved.fill(tensors, groups.world)
    if restored.optimizer:
        optimizer.load(pieces)
        _restore_scalars(optimizer, saved.state["optimizer"])
    else:
        optimizer.masters_from_parameters()
    if fp8 is not None:
        fp8.load(histories)
    if restored.random:
        trained.rng.load_state(random)


def _model_tensors(
    saved: SavedRun, restored: _Restored, trained: TrainedModel, *, has_weights: bool
) -> list[ShardedTensor]:
    groups, buffers = trained.groups, dict(trained.model.named_buffers())
    tensors = [] if has_weights else weight_tensors(trained.parameters, trained.data_parallel, groups)
    tensors += bias_tensors(buffers, groups)
    if not restored.adapters:
        tensors = [tensor for tensor in tensors if not is_adapter(tensor.name)]
    if restored.progress and not saved.is_foreign:
        tensors += load_tensors(buffers, groups)
    return tensors


def _restore_scalars(optimizer: Optimizer, state: dict[str, Any]) -> None:
    optimizer.steps = state["steps"]
    if state["loss_scale"] is not None:
        optimizer.loss_scale.load_state(state["loss_scale"])


def _log_random_state(saved: SavedRun, restored: _Restored, run: RunConfig) -> None:
    """Says why the random state of a checkpoint was not restored, where the run asked for it."""
    if not restored.progress or not run.checkpoint.load_rng:
        return
    if saved.is_foreign:
        log.info("random state not restored: Megatron-LM's is of other generators; dropout starts anew from the seed")
    elif run.model.hidden_dropout + run.model.attention_dropout > 0:
        writer = saved.state["rng"] or "nobody"
        log.info("random state not restored: saved by %s; dropout starts anew from the seed", writer)


def converted_state(config: dict[str, dict[str, Any]], carried: CarriedTensors) -> dict[str, Any]:
    """Returns the state of a checkpoint with weights only, made by a conversion; loading it starts a new run.

    `config`: of the run, as `RunConfig.to_dict` returns it. carried: tensors that the checkpoint holds, too.
    """
    progress: dict[str, Any] = dict.fromkeys(("train", "schedule", "layout", "rng", "optimizer"))
    return {"format": FORMAT, "config": config, "carried": carried.state(), **progress}


def find_checkpoint(directory: str, step: int | None, *, required: bool) -> Path | None:
    """Returns the checkpoint that --load and --ckpt-step name; None if there is none and none is required."""
    path = find(Path(directory), step)
    if path is None and (Path(directory) / CONFIG_FILE).is_file():
        raise CheckpointError(f"--load {directory} holds a Hugging Face model; give it with --load-hf")
    if path is None and required:
        raise CheckpointError(
            f"--load {directory} holds no checkpoint, which --exit-on-missing-checkpoint and --use-checkpoint-args "
            "need; give another folder or start afresh without them"
        )
    if path is None:
        log.info("no checkpoint in %s, starting from iteration 0", directory)
    return path


def _fp8_histories(fp8: Fp8Layers | None) -> dict[str, Tensor]:
    return {} if fp8 is None or fp8.scales is None else fp8.scales.histories()


def _saved_histories(path: Path, state: dict[str, Any], fp8: Fp8Layers | None) -> dict[str, Tensor]:
    """Returns memory for the saved histories that this run uses, and says where saved and used ones differ."""
    used, saved = _fp8_histories(fp8), state.get("fp8") or {"layers": [], "length": 0}
    missing = [name for name in used if name not in saved["layers"]]
    if missing:
        log.info(
            "%s holds no largest values of %d FP8 layers (%s ...): their first step is not in FP8 and finds them",
            path,
            len(missing),
            missing[0],
        )
    elif saved["layers"] and not used:
        log.info("%s holds largest values of FP8 layers, which this run has no use for", path)
    return {
        name: history.new_empty(history.shape[0], saved["length"])
        for name, history in used.items()
        if name in saved["layers"]
    }


def _layout(groups: Groups) -> dict[str, int]:
    return dataclasses.asdict(groups.mesh)


def _generators(device: torch.device, groups: Groups) -> dict[str, Any]:
    """Identifies the generators of saved random states: they only fit generators of the same kind on the same ranks."""
    return {"device": device.type, **_layout(groups)}


def _state(trainer: Trainer) -> dict[str, Any]:
    optimizer, histories = trainer.optimizer, _fp8_histories(trainer.step.features.fp8)
    return {
        "format": FORMAT,
        "config": trainer.run.to_dict(),
        "train": dataclasses.asdict(trainer.state),
        "schedule": trainer.schedule.state(),
        "results": trainer.results.to_dict(),
        "layout": _layout(trainer.groups),
        "grad_reduce_mode": trainer.data_parallel.decided_mode(),
        "rng": _generators(trainer.device, trainer.groups) if trainer.run.checkpoint.save_rng else None,
        "optimizer": (
            {"steps": optimizer.steps, "loss_scale": optimizer.loss_scale.state()}
            if trainer.run.checkpoint.save_optim
            else None
        ),
        "carried": trainer.carried.state(),
        "fp8": ({"layers": list(histories), "length": trainer.run.fp8.fp8_amax_history_len} if histories else None),
    }
