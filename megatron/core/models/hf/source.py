"""A folder in Hugging Face format as a source of weights. See core/models/source.py."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.models.carried import CarriedTensor, CarriedTensors
from megatron.core.models.hf.adapter import check_no_adapter
from megatron.core.models.hf.delta_names import BLOCK
from megatron.core.models.hf.families import (
    config_of,
    has_images,
    layers_for_prediction,
    read_config,
    read_scaling,
)
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.folder import HFFolder
from megatron.core.models.hf.fp8 import FP8_DTYPES, MXFP4, ScaledWeights
from megatron.core.models.hf.mxfp4 import PackedWeights
from megatron.core.models.hf.names import copied_tensors, first_router, stacked_experts, table
from megatron.spec.decoder import attention_core

SCORE = "score.weight"  # of a model for sequence classification


class HFSource:
    """A folder in Hugging Face format. Everything except the elements of weights is checked when it is opened.

    `dtype` is the one that most weights outside FP8 are stored in: it is what FP8 weights stand for. The model predicts
    as many further tokens as the folder has layers for, which a run need not load.
    """

    def __init__(self, path: Path, adapter: str | None = None, *, has_score: bool = False) -> None:
        """`adapter` is the folder of the adapter to be applied. `has_score`: the folder has a score in place of the
        head, and `model` then ties the head to the embedding, without a bias. Raises CheckpointError, see read_config,
        HFFolder, ScaledWeights and check_no_adapter; and OSError.
        """
        self.path = path
        check_no_adapter(path, adapter)
        self._family, self.model = read_config(path)
        self.folder = HFFolder(path, has_images=has_images(path), stored=self._family.stored)
        if has_score:
            self.model = dataclasses.replace(
                self.model, untie_embeddings_and_output_weights=False, add_output_layer_bias=False
            )
            self._check_score()
        if self._family.predicts:
            self.model = dataclasses.replace(self.model, mtp_num_layers=self._predictions())
        stacked = stacked_experts(self._family, self.model) in self.folder.entries
        # Check first, because a table for absurd sizes would take very long.
        self.folder.require(_last_layer(self._family, self.model))
        self.folder.require(first_router(self._family, self.model, stacked=stacked))
        self.table = table(self._family, self.model, stacked=stacked)
        names, constants = self._family.carried_among(self.folder.entries), self._check_constants()
        shapes = self.table.theirs | {name: self.folder.entries[name].shape for name in names}
        scaling = read_scaling(path)
        is_packed = scaling is not None and scaling.strategy == MXFP4
        self.weights: ScaledWeights | PackedWeights = (
            PackedWeights(self.folder, shapes, self._family.stored)
            if is_packed
            else ScaledWeights(self.folder, scaling, shapes)
        )
        # Copies that a folder lacks are written all the same when the model is converted back.
        self._copies = copied_tensors(self._family, self.model)
        missing = (self._copies.keys() | self.weights.scales.keys()) - self.folder.entries.keys()
        untied = self.model.untie_embeddings_and_output_weights
        self.folder.check(
            {name: shape for name, shape in shapes.items() if name not in missing} | self.weights.scale_shapes,
            tied_head=None if untied else "lm_head.weight",
            unread={*self.weights.unread, *constants, *([SCORE] if has_score else [])},
        )
        self.shapes = self.table.ours
        read = self.table.theirs.keys() - missing - self.weights.scales.keys()
        self.dtype = self.folder.dtype(read)
        scales = {*self.weights.scale_shapes, *self.weights.unread}
        self._carried_names = [name for name in names if name not in scales]

    @functools.cached_property
    def carried(self) -> CarriedTensors:
        """The tensors that are not weights, and the layers that predict further tokens."""
        return self.carried_with(self.model.mtp_num_layers)

    def carried_with(self, mtp_num_layers: int) -> CarriedTensors:
        """Returns the tensors that a run has no parameters for, which trains the first `mtp_num_layers` of the layers
        that predict further tokens. Copies of other tensors are not among them: whoever writes a folder makes them.
        """
        first, depths = self.model.num_layers or 0, range(mtp_num_layers, self.model.mtp_num_layers)
        layers = tuple(f"model.layers.{first + depth}." for depth in depths)
        further = [n for n in self.table.theirs if n.startswith(layers) and n not in self._copies] if layers else []
        names = [*further, *self._carried_names, *self.folder.others]
        return CarriedTensors(
            {name: self._carried_tensor(name) for name in names}, config_of(self.path), self.folder.prefix
        )

    def _carried_tensor(self, name: str) -> CarriedTensor:
        entry = self.folder.entries.get(name) or self.folder.others[name]
        if name not in self.folder.entries and entry.dtype in FP8_DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name} of a part for images is in FP8, and folders are written without FP8; give "
                "the model before its quantisation"
            )

        def read(box: Box) -> Tensor:
            if name not in self.weights.scales:
                return narrow(self.folder.view(name), box)
            out = torch.empty(box.shape, dtype=self.dtype)
            self.weights.fill(out, [name], box)
            return out

        return CarriedTensor(self.dtype if name in self.weights.scales else entry.dtype, entry.shape, read)

    def check_copies(self) -> None:
        """Raises CheckpointError if a layer that predicts a further token has an embedding or a head of its own: here it
        shares those of the model. Reads all of them."""
        for copy, original in self._copies.items():
            if copy not in self.folder.entries:
                continue
            both = [self.folder.view(name) for name in (copy, original)]
            if both[0].dtype != both[1].dtype or not torch.equal(*both):
                raise CheckpointError(
                    f"{self.path}: {copy} differs from {original}, which layers that predict further tokens share here"
                )

    def _check_constants(self) -> list[str]:
        """Returns the names of constants that the folder holds. Raises CheckpointError for another value."""
        assert self.model.num_layers
        constants = self._family.constants_of(self.model.num_layers)
        present = [name for name in constants if name in self.folder.entries]
        for name in present:
            stored = self.folder.view(name)
            if not torch.equal(stored, torch.tensor(constants[name], dtype=stored.dtype)):
                raise CheckpointError(
                    f"{self.path}: tensor {name} is {stored.tolist()}; only the number {constants[name]} is supported"
                )
        return present

    def _check_score(self) -> None:
        entry = self.folder.entries.get(SCORE)
        if entry is None:
            raise CheckpointError(
                f"{self.path} holds no tensor {SCORE}, so it gives no scores; give a model for sequence "
                "classification, as LlamaForSequenceClassification"
            )
        if entry.shape != (1, self.model.hidden_size):
            raise CheckpointError(
                f"{self.path}: tensor {SCORE} is {list(entry.shape)}, and a score is one number for "
                f"{self.model.hidden_size} channels; give a model with one label"
            )

    def _predictions(self) -> int:
        """Returns the number of layers behind the last one."""
        first = self.model.num_layers or 0
        numbers = range(layers_for_prediction(self.path))
        return sum(f"model.layers.{first + number}.eh_proj.weight" in self.folder.entries for number in numbers)

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Reads elements of a parameter; see Source. Rows of the vocabulary's padding are zero."""
        runs = self.table.runs(name, box)
        is_covered = sum(run.box.numel for run in runs) == box.numel
        out = (torch.empty if is_covered else torch.zeros)(box.shape, dtype=dtype)
        for run in runs:
            self.weights.fill(narrow(out, run.box.within(box)), run.names, run.their_box)
        return out


def _last_layer(family: Family, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns a tensor that bounds the number of layers, of channels and of heads."""
    assert model.num_layers and model.hidden_size and model.num_attention_heads
    if model.delta_layers[-1]:
        values = model.linear_num_value_heads * model.linear_value_head_dim
        module = "self_attn.o_proj" if model.decays_by_channel else f"{BLOCK}.out_proj"
        return {f"model.layers.{model.num_layers - 1}.{module}.weight": (model.hidden_size, values)}
    heads = attention_core(model, None).output_channels
    output = family.fused.get("self_attention.linear_proj", "o_proj")
    return {f"model.layers.{model.num_layers - 1}.self_attn.{output}.weight": (model.hidden_size, heads)}
