"""A folder in Hugging Face format as a source of weights. See core/models/source.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.config.model import ModelConfig
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.models.hf.adapter import check_no_adapter
from megatron.core.models.hf.families import has_images, layers_for_prediction, read_config, read_scaling
from megatron.core.models.hf.folder import HFFolder
from megatron.core.models.hf.fp8 import ScaledWeights
from megatron.core.models.hf.names import copied_tensors, first_router, stacked_experts, table
from megatron.spec.decoder import attention_core

log = get_logger(__name__)


class HFSource:
    """A folder in Hugging Face format. Everything except the tensors' elements is checked when it is opened.

    `dtype` is the one that most weights outside FP8 are stored in: it is what FP8 weights stand for. The model predicts
    as many further tokens as the folder has layers for, which a run need not load.
    """

    def __init__(self, path: Path, adapter: str | None = None) -> None:
        """`adapter` is the folder of the adapter to be applied. Raises CheckpointError, see read_config, HFFolder,
        ScaledWeights and check_no_adapter.
        """
        self.path = path
        check_no_adapter(path, adapter)
        family, self.model = read_config(path)
        self.folder = HFFolder(path, has_images=has_images(path))
        if family.predicts:
            self.model = dataclasses.replace(self.model, mtp_num_layers=self._predictions())
        if self.folder.others:
            log.info("%s: %d tensors of parts for images are left out", path, self.folder.others)
        stacked = stacked_experts(self.model) in self.folder.entries
        # Check first, because a table for absurd sizes would take very long.
        self.folder.require(_last_layer(self.model))
        self.folder.require(first_router(family, self.model, stacked=stacked))
        self.table = table(family, self.model, stacked=stacked)
        self.weights = ScaledWeights(self.folder, read_scaling(path), self.table.theirs)
        # Copies that a folder lacks are written all the same when the model is converted back.
        self._copies = copied_tensors(family, self.model)
        missing = self._copies.keys() - self.folder.entries.keys()
        untied = self.model.untie_embeddings_and_output_weights
        self.folder.check(
            {name: shape for name, shape in self.table.theirs.items() if name not in missing}
            | self.weights.scale_shapes,
            tied_head=None if untied else "lm_head.weight",
            unread=self.weights.unread,
        )
        self.shapes = self.table.ours
        read = self.table.theirs.keys() - missing - self.weights.scales.keys()
        self.dtype = self.folder.dtype(read)

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


def _last_layer(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns a tensor that bounds the number of layers, of channels and of heads."""
    assert model.num_layers and model.hidden_size and model.num_attention_heads
    heads = attention_core(model, None).output_channels
    return {f"model.layers.{model.num_layers - 1}.self_attn.o_proj.weight": (model.hidden_size, heads)}
