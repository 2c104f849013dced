"""The content of a checkpoint, and how a run continues from one, under any layout.

Tensors: "model/NAME" (weights, and the bias of experts), "optimizer/NAME/exp_avg" ... (fp32, in the weight's global shape),
"load/NAME" (of experts in the batch before), "rng/STREAM/RANK", "fp8/LAYER" (largest values in earlier steps).
State (JSON): the run's configuration, its progress, the schedule, the loss scale, the layout under which it was saved, and
the FP8 layers with largest values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.log import get_logger
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.model import OVERRIDABLE_FIELDS, ModelConfig
from megatron.config.run import RunConfig
from megatron.core.dist_checkpointing.folders import find
from megatron.core.dist_checkpointing.sharded_tensor import ShardedTensor, flat_slice
from megatron.core.dist_checkpointing.store import save
from megatron.core.distributed.data_parallel import DataParallel
from megatron.core.groups import Groups
from megatron.core.models.hf.families import CONFIG_FILE
from megatron.core.optimizer.lr_schedule import ParamSchedule
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parameter import Parameter, ParamInfo
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.moe.router import PREVIOUS_LOAD
from megatron.spec.buckets import Piece
from megatron.spec.decoder import decoder_spec
from megatron.spec.lora import is_adapter
from megatron.spec.moe import EXPERT_BIAS
from megatron.training.changed_settings import name_changed_settings
from megatron.training.data_order import warn_of_another_order
from megatron.training.fp8 import Fp8Layers
from megatron.training.logging.line import format_loaded, format_loading, format_saved, format_saving
from megatron.training.saved_run import (
    FP8_PREFIX,
    LOAD_PREFIX,
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    open_saved_run,
    read_run_state,
    stored_part,
)
from megatron.training.state import TrainState
from megatron.training.trainer import Trainer

log = get_logger(__name__)

# 1: groups of experts were scored by probabilities where they are scored by logits now (`ModelConfig.groups_by_logits`)
FORMAT = 2
_ROWS = {"vocab_size", "make_vocab_size_divisible_by", "fixed_padded_vocab_size"}  # fields about rows of the vocabulary


def save_checkpoint(trainer: Trainer, *, prune: bool = True) -> Path:
    """Writes a checkpoint of the trainer's iteration under --save, and deletes those in excess of --save-retain.

    Without `prune` all older ones stay. Collective over the world.
    """
    run, groups = trainer.run, trainer.groups
    assert run.checkpoint.save
    root, iteration = Path(run.checkpoint.save), trainer.state.iteration
    log.info(format_saving(iteration, root, datetime.now()))
    trainer.data_parallel.synchronize()
    buffers = dict(trainer.model.named_buffers())
    tensors = _weights(trainer.parameters, trainer.data_parallel, groups)
    tensors += bias_tensors(buffers, groups) + _load_tensors(buffers, groups)
    if run.checkpoint.save_optim:
        tensors += optimizer_tensors(trainer.optimizer.pieces(), trainer.parameters, groups)
    if run.checkpoint.save_rng:
        tensors += _rng_tensors(trainer.rng.state(), groups.rank, writer=True)
    tensors += _fp8_tensors(_fp8_histories(trainer.step.features.fp8), groups)
    keep = run.checkpoint.save_retain if prune else None
    path = save(root, iteration, tensors, _state(trainer), group=groups.world, keep=keep)
    log.info(format_saved(iteration, root, groups.tp.size, groups.pp.size, datetime.now()))
    return path


def load_checkpoint(
    path: Path,
    run: RunConfig,
    groups: Groups,
    device: torch.device,
    parameters: dict[str, Parameter],
    buffers: Mapping[str, Tensor],
    data_parallel: DataParallel,
    optimizer: Optimizer,
    *,
    rng: RngTracker,
    schedule: ParamSchedule,
    fp8: Fp8Layers | None = None,
    has_weights: bool = False,
) -> TrainState:
    """Loads the checkpoint in `path` into the built objects and returns its progress.

    has_weights: those of the checkpoint have been read already, see `weights_to_convert` in initial_weights.py. Collective
    over the world; the layout may differ from the saved one. Raises CheckpointError.
    """
    run_there = open_saved_run(path, run.model, groups.world)
    state = run_there.state
    saved = model_config_of(state)
    finetune = begins_anew(state, run.checkpoint)
    if finetune and saved.lora_rank and run.checkpoint.load_adapter:
        raise CheckpointError(
            f"{path} holds LoRA adapters already; --load-adapter {run.checkpoint.load_adapter} needs a model without any: "
            "remove it, or merge them with tools/checkpoint/convert.py --loader megatron --saver megatron"
        )
    begins_lora = finetune and saved.lora_rank is None and run.model.lora_rank is not None
    if not run_there.is_foreign and state.get("format", 1) < FORMAT and saved.groups_by_logits:
        log.warning(
            "%s was trained with groups of experts that sums of probabilities chose; now sums of logits do, as in "
            "Megatron-LM, and some tokens go to other experts",
            path,
        )
    if finetune:
        check_begins(path, saved, run.model, run.checkpoint)
    else:
        check_same_model(path, saved, run.model, run.checkpoint.override_model_fields)
        check_same_precision(path, saved, run.model)
    with_optimizer = run.checkpoint.load_optim and not finetune and not run.train.skip_train
    with_rng = run.checkpoint.load_rng and not finetune and state["rng"] == _generators(device, groups)
    log.info(format_loading(path, state["train"] and state["train"]["iteration"]))
    if with_optimizer and not state["optimizer"]:
        raise CheckpointError(
            f"{path} holds no optimizer state (it was saved with --no-save-optim); give --no-load-optim"
        )
    saved_rule = "sgd" if state["config"]["optimizer"]["optimizer"] == "sgd" else "adam"
    if with_optimizer and saved_rule != run.optimizer.rule:
        raise CheckpointError(
            f"{path} holds the state of optimizer {saved_rule}, not {run.optimizer.rule}; "
            f"give --optimizer {saved_rule}, or --no-load-optim to start the optimizer afresh"
        )
    if not (finetune or run.train.skip_train):
        schedule.resolve(state["schedule"])
    tensors = [] if has_weights else _weights(parameters, data_parallel, groups)
    tensors += bias_tensors(buffers, groups)
    if begins_lora:
        tensors = [tensor for tensor in tensors if not is_adapter(tensor.name)]
    if not (finetune or run_there.is_foreign):
        tensors += _load_tensors(buffers, groups)
    pieces = list(optimizer.pieces()) if with_optimizer else []
    tensors += optimizer_tensors(pieces, parameters, groups)
    random = rng.state()
    if with_rng:
        tensors += _rng_tensors(random, groups.rank, writer=False)
    histories = {} if finetune else _saved_histories(path, state, fp8)
    tensors += _fp8_tensors(histories, groups)
    run_there.fill(tensors, groups.world)
    if with_optimizer:
        optimizer.load(pieces)
        optimizer.steps = state["optimizer"]["steps"]
        if state["optimizer"]["loss_scale"] is not None:
            optimizer.loss_scale.load_state(state["optimizer"]["loss_scale"])
    else:
        optimizer.masters_from_parameters()
    if fp8 is not None:
        fp8.load(histories)
    if with_rng:
        rng.load_state(random)
    elif run_there.is_foreign and run.checkpoint.load_rng and not finetune:
        log.info("random state not restored: Megatron-LM's is of other generators; dropout starts anew from the seed")
    elif run.checkpoint.load_rng and not finetune and run.model.hidden_dropout + run.model.attention_dropout > 0:
        log.info("random state not restored: saved by %s; dropout starts anew from the seed", state["rng"] or "nobody")
    # Another layout changes the order of sums anyway, and invalidates the measured values.
    if not finetune and state.get("grad_reduce_mode") and state["layout"] == _layout(groups):
        data_parallel.take_mode(state["grad_reduce_mode"])
    if not finetune and not run.train.skip_train:
        name_changed_settings(path, state["config"], run.to_dict())
        warn_of_another_order(path, state, run.to_dict(), groups.mesh.dp)
    progress = TrainState() if finetune else TrainState(**state["train"])
    log.info(format_loaded(path, progress.iteration, groups.tp.size, groups.pp.size))
    return progress


def converted_state(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the state of a checkpoint with weights only, made by a conversion; loading it starts a new run.

    `config`: of the run, as `RunConfig.to_dict` returns it.
    """
    progress: dict[str, Any] = dict.fromkeys(("train", "schedule", "layout", "rng", "optimizer"))
    return {"format": FORMAT, "config": config, **progress}


def find_checkpoint(directory: str, step: int | None, *, required: bool) -> Path | None:
    """Returns the checkpoint that --load and --ckpt-step name; None if there is none and none is required."""
    found = find(Path(directory), step)
    if found is None and (Path(directory) / CONFIG_FILE).is_file():
        raise CheckpointError(f"--load {directory} holds a Hugging Face model; give it with --load-hf")
    if found is None and required:
        raise CheckpointError(
            f"--load {directory} holds no checkpoint, which --exit-on-missing-checkpoint and --use-checkpoint-args need; "
            "give another folder or start afresh without them"
        )
    if found is None:
        log.info("no checkpoint in %s, starting from iteration 0", directory)
    return found


def saved_model_config(path: Path) -> ModelConfig:
    """Returns the model configuration with which a checkpoint was saved."""
    return model_config_of(read_run_state(path))


def begins_anew(state: dict[str, Any], checkpoint: CheckpointConfig) -> bool:
    """Returns whether a run takes only the weights of a checkpoint with this state."""
    return checkpoint.finetune or state["train"] is None  # a converted model was not trained here


def has_rows_of(saved: ModelConfig, model: ModelConfig) -> bool:
    """Returns whether a saved model has the tokens and the padding of a run's. Megatron-LM may not have saved the former."""
    return saved.vocab_size in (None, model.vocab_size) and saved.padded_vocab_size == model.padded_vocab_size


def check_begins(path: Path, saved: ModelConfig, model: ModelConfig, checkpoint: CheckpointConfig) -> None:
    """Raises CheckpointError unless a new run of `model` can begin with the weights of the saved model: with the same
    function, or adapters on it, but with any precision and at least its tokens.
    """
    if saved.vocab_size and model.vocab_size and model.vocab_size < saved.vocab_size:
        raise CheckpointError(
            f"{path} has {saved.vocab_size} tokens, and --vocab-size {model.vocab_size} would drop some of them; give "
            f"--vocab-size {saved.vocab_size} or more, or leave it out"
        )
    base = model if saved.lora_rank else dataclasses.replace(model, lora_rank=None)
    resized = dataclasses.replace(saved, **{name: getattr(model, name) for name in _ROWS})
    check_same_model(path, resized, base, checkpoint.override_model_fields)


def check_same_model(path: Path, saved: ModelConfig, model: ModelConfig, override: Collection[str]) -> None:
    """Raises CheckpointError naming every difference between the checkpoint's model and this run's.

    override: fields that may differ as long as no tensor does; both values of each are logged.
    """
    if saved.lora_rank and not model.lora_rank:
        raise CheckpointError(
            f"{path} holds LoRA adapters (--lora-rank {saved.lora_rank}); give its LoRA flags to go on with them, or merge "
            "them into the model with tools/checkpoint/convert.py --loader megatron --saver megatron"
        )
    there, here = decoder_spec(saved), decoder_spec(model)
    if there == here:
        return
    overridden = dataclasses.replace(saved, **{name: getattr(model, name) for name in override})
    has_same_tensors = there.parameters() == here.parameters()
    if not has_same_tensors or decoder_spec(overridden) != here:
        differences = _differences(saved, model)
        fix = "give the same model flags or --use-checkpoint-args"
        if has_same_tensors and differences.keys() <= set(OVERRIDABLE_FIELDS):
            fix += f", or to go on with this run's --override-model-fields {' '.join(differences)}"
        elif differences.keys() <= _ROWS and (saved.vocab_size or 0) <= (model.vocab_size or 0):
            fix += ", or --finetune to start a new run with its weights"
        described = "; ".join(f"{name} is {old} there and {new} here" for name, (old, new) in differences.items())
        raise CheckpointError(f"{path} is a checkpoint of another model: {described}; {fix}")
    for name in override:
        if getattr(saved, name) != getattr(model, name):
            log.warning("%s: %s in the checkpoint, %s in this run", name, getattr(saved, name), getattr(model, name))


def _differences(saved: ModelConfig, model: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Returns field -> the values in effect there and here, for fields that make another model."""
    found = {}
    for field in dataclasses.fields(ModelConfig):
        there, here = saved.in_effect(field.name), model.in_effect(field.name)
        if there != here and (_matters(field.name, saved, model) or _matters(field.name, model, saved)):
            found[field.name] = (there, here)
    return found


def _matters(name: str, model: ModelConfig, other: ModelConfig) -> bool:
    """Whether the other model's value of a field makes another decoder of this model."""
    try:
        return decoder_spec(dataclasses.replace(model, **{name: getattr(other, name)})) != decoder_spec(model)
    except ConfigError:  # it does not go with the other fields
        return True


def check_same_precision(path: Path, saved: ModelConfig, model: ModelConfig) -> None:
    """Raises CheckpointError if the weights have another dtype than this run's."""
    fixes = {"bfloat16": "give --bf16", "float16": "give --fp16", "float32": "leave out --bf16 and --fp16"}
    if saved.dtype_name != model.dtype_name:
        raise CheckpointError(
            f"{path} holds {saved.dtype_name} weights and this run asks for {model.dtype_name}; "
            f"{fixes[saved.dtype_name]}, or --finetune to start a new run with its weights"
        )


def model_tensors(parameters: dict[str, Parameter], groups: Groups) -> list[ShardedTensor]:
    """Returns every weight of this rank with its position in the global model."""
    return [
        sharded
        for number, (name, parameter) in enumerate(parameters.items())
        for sharded in _sharded(MODEL_PREFIX + name, parameter, groups, number)
    ]


def bias_tensors(buffers: Mapping[str, Tensor], groups: Groups) -> list[ShardedTensor]:
    """Returns the biases of the experts. buffers: of the model, by name."""
    return _replicated(MODEL_PREFIX, EXPERT_BIAS, buffers, groups)


def _load_tensors(buffers: Mapping[str, Tensor], groups: Groups) -> list[ShardedTensor]:
    return _replicated(LOAD_PREFIX, PREVIOUS_LOAD, buffers, groups)


def _replicated(prefix: str, kind: str, buffers: Mapping[str, Tensor], groups: Groups) -> list[ShardedTensor]:
    """The buffers of a kind, which all ranks of a stage hold."""
    writer = groups.tp.rank == 0 and groups.dp_cp.rank == 0
    return [
        ShardedTensor(prefix + name, buffer, tuple(buffer.shape), (0,), writer)
        for name, buffer in buffers.items()
        if name.endswith(f".{kind}")
    ]


def _weights(parameters: dict[str, Parameter], data_parallel: DataParallel, groups: Groups) -> list[ShardedTensor]:
    """This rank's weights; of those whose memory is freed after use, its slices alone.

    What stays must be loaded whole, also where ranks share its optimizer: nothing gathers it before the first update.
    """
    sharded_names = data_parallel.sharded_names
    staying = {name: parameter for name, parameter in parameters.items() if name not in sharded_names}
    return model_tensors(staying, groups) + [
        sharded
        for number, (piece, tensor) in enumerate(data_parallel.weights())
        if piece.name in sharded_names
        for sharded in _flat(MODEL_PREFIX + piece.name, tensor, piece, parameters[piece.name].info, groups, number)
    ]


def optimizer_tensors(
    pieces: Iterable[tuple[Piece, str, Tensor]], parameters: dict[str, Parameter], groups: Groups
) -> list[ShardedTensor]:
    """Returns masters and moments of this rank, `pieces` of its optimizer, as rectangles of the global tensors."""
    return [
        sharded
        for number, (piece, key, tensor) in enumerate(pieces)
        for sharded in _flat(
            f"{OPTIMIZER_PREFIX}{piece.name}/{key}", tensor, piece, parameters[piece.name].info, groups, number
        )
    ]


def _flat(name: str, data: Tensor, piece: Piece, info: ParamInfo, groups: Groups, number: int) -> list[ShardedTensor]:
    section = info.section_at(piece.start)
    # Instances of the optimizer hold copies and take turns.
    replicas = groups.view(info.spec.axis).replicas
    writer = replicas.rank == number % replicas.size and info.held_first(section, groups)
    return flat_slice(
        name,
        data,
        start=piece.start - section.start,
        shape=section.shape,
        global_shape=info.spec.shape,
        offset=section.offset,
        writer=writer,
    )


def _sharded(name: str, parameter: Parameter, groups: Groups, number: int) -> list[ShardedTensor]:
    info = parameter.info
    # Copies over dp x cp or edp take turns, so that all hosts' disks write; copies over tp leave it to the first of them.
    copies = groups.view(info.spec.axis).copies
    turn, data = copies.rank == number % copies.size, parameter.detach()
    return [
        ShardedTensor(name, part.of(data), info.spec.shape, part.offset, turn and info.held_first(part, groups))
        for part in info.sections
    ]


def _rng_tensors(states: dict[str, Tensor], rank: int, *, writer: bool) -> list[ShardedTensor]:
    return [
        ShardedTensor(f"rng/{stream}/{rank}", state, tuple(state.shape), (0,), writer)
        for stream, state in states.items()
    ]


def _fp8_histories(fp8: Fp8Layers | None) -> dict[str, Tensor]:
    return {} if fp8 is None or fp8.scales is None else fp8.scales.histories()


def _fp8_tensors(histories: Mapping[str, Tensor], groups: Groups) -> list[ShardedTensor]:
    """The histories [3, length] of layers of the whole model, which all ranks hold."""
    return [
        ShardedTensor(FP8_PREFIX + name, history, tuple(history.shape), (0, 0), groups.world.rank == 0)
        for name, history in histories.items()
    ]


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


def model_config_of(state: dict[str, Any]) -> ModelConfig:
    """Returns the model configuration in a checkpoint's state. Raises CheckpointError for one that no run has saved."""
    # Older than the flag: its GELU was exact unless --openai-gelu said not.
    return stored_part(ModelConfig, state, "model", bias_gelu_fusion=False)


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
        "layout": _layout(trainer.groups),
        "grad_reduce_mode": trainer.data_parallel.decided_mode(),
        "rng": _generators(trainer.device, trainer.groups) if trainer.run.checkpoint.save_rng else None,
        "optimizer": (
            {"steps": optimizer.steps, "loss_scale": optimizer.loss_scale.state()}
            if trainer.run.checkpoint.save_optim
            else None
        ),
        "fp8": ({"layers": list(histories), "length": trainer.run.fp8.fp8_amax_history_len} if histories else None),
    }
