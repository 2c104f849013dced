"""A folder in Hugging Face format as a source of weights. See core/models/source.py."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.models.hf.families import read_config
from megatron.core.models.hf.folder import HFFolder
from megatron.core.models.hf.names import table
from megatron.core.models.mapping import gather


class HFSource:
    """A folder in Hugging Face format. Everything but the tensors' elements is checked when it is opened."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError, see read_config and HFFolder."""
        self.path = path
        family, self.model = read_config(path)
        self.folder = HFFolder(path)
        self.table = table(family, self.model)
        untied = self.model.untie_embeddings_and_output_weights
        self.folder.check(self.table.theirs, tied_head=None if untied else "lm_head.weight")
        self.shapes = self.table.own
        self.dtype = self.folder.dtype()

    def read(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        """See Source. Rows of the vocabulary's padding are zero."""
        return gather(self.table.of_own(name, box), box, dtype, self.folder.read)
