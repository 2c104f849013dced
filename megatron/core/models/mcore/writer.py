"""Writes Megatron-LM's classic checkpoints, which it loads with --ckpt-format torch."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.core.models.mapping import Read, Table, gather
from megatron.core.models.mcore.arguments import refuse_what_has_no_argument
from megatron.core.models.mcore.classic import FILE
from megatron.core.models.mcore.delta_arguments import check_implementation
from megatron.core.models.mcore.moe_arguments import check_expert_shards
from megatron.core.models.mcore.names import (
    CLASSIC_PREDICTION_LAYER,
    GROUPED,
    SEQUENTIAL,
    CheckpointLayout,
    is_expert,
    padded_rows,
    table,
)
from megatron.core.models.mcore.publish import published
from megatron.core.models.mcore.training_state import MOMENTS, Adam, TrainingState, arguments_for, param_groups
from megatron.core.models.mcore.zero_centered import with_zero_centered
from megatron.core.models.source import Source, is_buffer, stored_dtype
from megatron.spec.decoder import OUTPUT_LAYER

_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)\.")


def write_mcore(
    source: Source,
    root: Path,
    *,
    tp: int,
    pp: int,
    ep: int = 1,
    etp: int | None = None,
    fused_norms: bool,
    dtype: torch.dtype,
    training: TrainingState,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> Path:
    """Writes the checkpoint of `training` under `root` for tp x pp ranks, and the tracker.

    ep, etp: ranks that share the experts, see [Note: files of experts]; etp is tp by default. The optimizer is the one
    that is not distributed; `fused_norms` selects Transformer Engine's layers, with its grouped experts, and Adam.
    Memory: one rank's weights and optimizer state. Raises CheckpointError if the checkpoint exists, ConfigError for an
    impossible layout or a model that Megatron-LM has no arguments for, and OSError, leaving nothing.
    """
    model = source.model
    assert model.num_layers
    if model.num_layers % pp:
        raise ConfigError(f"--target-pipeline-parallel-size {pp} does not divide the model's {model.num_layers} layers")
    refuse_what_has_no_argument(model)
    check_implementation(model, local=not fused_norms)
    etp = (tp if model.num_experts else 1) if etp is None else etp
    check_expert_shards(model, tp=tp, ep=ep, etp=etp)
    _check_cut_rows(model, tp=tp, local=not fused_norms)
    layout = CheckpointLayout(
        tp,
        pp,
        (model.num_layers // pp,) * pp,
        fused_norms,
        padded_rows(model, tp),
        ep,
        etp,
        experts=GROUPED if fused_norms else SEQUENTIAL,
        cuts_latents=not fused_norms,
        prediction_layer=CLASSIC_PREDICTION_LAYER,
    )
    if training.adam:
        _check_optimizers(model, layout)
    source, training = with_zero_centered(source, training)
    names = table(model, layout, copies=True)
    arguments = arguments_for(model, layout, dtype, training)
    with published(root, training) as temporary:
        for folder in (layout.folder(*rank, stage) for stage in range(pp) for rank in layout.ranks):
            rank = _Rank(names, layout, folder, on_bytes)
            _save(temporary / folder, rank.content(source, arguments, dtype, training))
    return root / training.folder


class _Rank:
    """The tensors of one rank."""

    def __init__(self, names: Table, layout: CheckpointLayout, folder: str, on_bytes: Callable[[int], None]) -> None:
        self._names, self._layout, self._on_bytes = names, layout, on_bytes
        keys = {key.split("/", 2)[2]: key for key in names.theirs if key.startswith(f"{folder}/")}
        self._keys = {name: keys[name] for name in _in_order(list(keys))}

    def content(
        self, source: Source, arguments: argparse.Namespace, dtype: torch.dtype, training: TrainingState
    ) -> dict[str, Any]:
        """Returns the content of the rank's file."""
        weights = {name: self._weight(source, name, stored_dtype(name, dtype)) for name in self._keys}
        content = training.common(arguments) | {"model": weights}
        if training.adam and training.scheduler:
            content["optimizer"] = self._optimizer(training.adam, training.scheduler, dtype)
        return content

    def _optimizer(self, adam: Adam, scheduler: dict[str, Any], dtype: torch.dtype) -> Any:
        """Returns the state of the optimizer; with ep > 1 a list of two, of all but the experts and of the experts."""
        names = [name for name in self._keys if not is_buffer(name)]
        groups = param_groups(adam, scheduler)
        if self._layout.ep == 1:
            return self._state_of(names, groups, adam, dtype)
        dense, experts = ([name for name in names if is_expert(name) == kind] for kind in (False, True))
        of_experts = [groups[0] | {"is_expert_parallel": True}]
        return [self._state_of(dense, groups, adam, dtype), self._state_of(experts, of_experts, adam, dtype)]

    def _state_of(
        self, names: list[str], groups: list[dict[str, Any]], adam: Adam, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Returns the state of one optimizer in the format of the Adam that will load it.

        groups: the parameter group of matrices, and that of other parameters if there may be some.

        [Note: formats of Adam's step count]
        torch's Adam, which Megatron-LM uses if neither Transformer Engine nor Apex is installed, counts updates per
        parameter, in a separate tensor; those two count them per group, and Transformer Engine's fails on unknown
        entries.
        """
        matrices = [name for name in names if len(self._names.theirs[self._keys[name]]) > 1]
        vectors = [name for name in names if name not in matrices]
        state = {
            number: {key: self._state(adam, key, name) for key in MOMENTS}
            for number, name in enumerate((*matrices, *vectors))
        }
        if not self._layout.fused_norms:
            for held in state.values():
                held["step"] = torch.tensor(float(adam.updates))
        numbers = list(range(len(matrices))), list(range(len(matrices), len(names)))
        optimizer_state = {
            "state": state,
            "param_groups": [g | {"params": params} for g, params in zip(groups, numbers)],
        }
        if dtype == torch.float32:
            return optimizer_state
        masters = [
            [self._state(adam, "master", name) for name in group] for group in (matrices, vectors)[: len(groups)]
        ]
        wrapped: dict[str, Any] = {"optimizer": optimizer_state, "fp32_from_fp16_params": masters}
        return wrapped | ({"grad_scaler": adam.loss_scale} if adam.loss_scale else {})

    def _weight(self, source: Source, name: str, dtype: torch.dtype) -> Tensor:
        return self._read(name, dtype, lambda ours, box: source.read(ours, box, dtype))

    def _state(self, adam: Adam, key: str, name: str) -> Tensor:
        return self._read(name, torch.float32, lambda ours, box: adam.read(ours, key, box))

    def _read(self, name: str, dtype: torch.dtype, read: Read) -> Tensor:
        key = self._keys[name]
        shape = self._layout.full_shape(name, self._names.theirs[key])
        whole = Box((0,) * len(shape), shape)
        weight = gather(self._names.of_theirs(key, whole), whole, dtype, read)
        self._on_bytes(weight.nbytes)
        return weight


def _check_cut_rows(model: ModelConfig, *, tp: int, local: bool) -> None:
    """Raises ConfigError unless Megatron-LM's ranks can share the rows of projections that all ranks hold here."""
    rows: dict[str, int | None] = {"--hidden-size": model.hidden_size} if model.mtp_num_layers else {}
    if model.has_delta_net and model.linear_num_key_heads % tp:
        raise ConfigError(
            f"{tp} tensor-parallel ranks cannot share the {model.linear_num_key_heads} heads of "
            "--linear-num-key-heads equally; give another --target-tensor-parallel-size"
        )
    if local and model.multi_latent_attention:
        assert model.kv_lora_rank
        rows["--q-lora-rank"] = model.q_lora_rank
        rows["--kv-lora-rank + --qk-pos-emb-head-dim"] = model.kv_lora_rank + model.qk_pos_emb_head_dim
    for flag, count in rows.items():
        if count is not None and count % tp:
            raise ConfigError(
                f"{tp} tensor-parallel ranks cannot share the {count} rows of {flag} equally; give another "
                "--target-tensor-parallel-size"
            )


def _check_optimizers(model: ModelConfig, layout: CheckpointLayout) -> None:
    """Raises ConfigError where versions of Megatron-LM differ in whether the experts have an optimizer of their own."""
    without, first = "give --no-load-optim to take the weights alone", 0
    if model.num_experts is not None and layout.ep == 1 and layout.etp != layout.tp:
        raise ConfigError(
            f"--target-expert-tensor-parallel-size {layout.etp} with tp {layout.tp} and ep 1: some versions of "
            f"Megatron-LM have two optimizers then and others one; give --target-expert-parallel-size, or {without}"
        )
    for stage, count in enumerate(layout.layers):
        if layout.ep > 1 and not any(model.moe_layers[first : first + count]):
            raise ConfigError(
                f"stage {stage} of --target-pipeline-parallel-size {layout.pp} would have no layer with experts, and "
                f"some versions of Megatron-LM have two optimizers there and others one; {without}"
            )
        first += count


def _in_order(names: list[str]) -> list[str]:
    """Sorts a rank's tensors as its modules: one MLP of an expert after the other, a copy of the embedding last."""
    first: dict[str, int] = {}

    def place(position: int) -> tuple[int, int, int]:
        name = names[position]
        if match := _EXPERT.match(name):
            return first.setdefault(match[1], position), int(match[2]), position
        return len(names) if name == OUTPUT_LAYER else position, 0, position

    return [names[position] for position in sorted(range(len(names)), key=place)]


def _save(folder: Path, content: Mapping[str, Any]) -> None:
    folder.mkdir()
    with open(folder / FILE, "xb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
