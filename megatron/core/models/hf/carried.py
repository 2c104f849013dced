"""Which carried tensors (core/models/carried.py) a folder that is written can hold."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from megatron.base.log import get_logger
from megatron.config.model import ModelConfig
from megatron.core.models.carried import CarriedTensors, decoder_name
from megatron.core.models.hf.families import WITH_IMAGES
from megatron.core.models.hf.family.family import Family

log = get_logger(__name__)
_LAYER = re.compile(r"model\.layers\.(\d+)\..+")


def writable(
    carried: CarriedTensors, family: Family, model: ModelConfig, config: Mapping[str, Any]
) -> tuple[CarriedTensors, int]:
    """Returns the carried tensors for a folder of `family` with this config.json, and the number of the layers among
    them that predict further tokens. One log line says how many others are dropped.

    Layers for prediction that the model has itself are not taken, nor any behind a gap.
    """
    has_images = config.get("model_type") in WITH_IMAGES
    first = (model.num_layers or 0) + model.mtp_num_layers
    depths = 0
    while family.predicts and f"model.layers.{first + depths}.eh_proj.weight" in carried.tensors:
        depths += 1
    names = {*family.carried_among(carried.tensors)}
    for name in carried.tensors:
        if carried.prefix and decoder_name(name) is None and not _LAYER.fullmatch(name):
            names |= {name} if has_images else set()
        elif (layer := _LAYER.fullmatch(name)) and first <= int(layer[1]) < first + depths:
            names.add(name)
    if dropped := [name for name in carried.tensors if name not in names]:
        log.warning(
            "%d tensors that were carried, such as %s, are dropped: a folder of %s does not hold them",
            len(dropped),
            dropped[0],
            config.get("model_type"),
        )
    tensors = {name: tensor for name, tensor in carried.tensors.items() if name in names}
    prefix = carried.prefix if has_images else ""
    return dataclasses.replace(carried, tensors=tensors, prefix=prefix), depths
