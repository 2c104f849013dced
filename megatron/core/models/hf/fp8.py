"""Weights in FP8 with their scales, as publishers store them: `quantization_config` in config.json, and tensors.

A weight X is `scale * X`, with one scale for the whole tensor, for each row (an output channel), or for each block of
128 x 128 elements, of which the last ones may be smaller. The scales of `q_proj.weight` are `q_proj.weight_scale_inv`,
as DeepSeek-V3 and transformers name them, or `q_proj.weight_scale`, as in compressed-tensors and vLLM; both are
factors. Scales of activations belong to inference and are not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.models.hf.config_json import JsonFields
from megatron.core.models.hf.folder import HFFolder

QUANTIZATION = "quantization_config"
MXFP4 = "mxfp4"
BLOCK = 128  # rows and columns that share a scale, in all published models with blocks
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ACTIVATION_SCALES = ("input_scale", "activation_scale")
_STRATEGIES = ("tensor", "channel", "block")
# Which layers are quantised follows from the dtypes of their tensors, and the rest is about activations or bookkeeping.
_BESIDES = frozenset(
    ["activation_scheme", "modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize"]
    + ["ignore", "quantization_status", "global_compression_ratio", "version"]
)
_BESIDES_OF_GROUPS = frozenset(["targets", "input_activations", "output_activations", "format"])
_BESIDES_OF_WEIGHTS = frozenset(["observer", "observer_kwargs", "scale_dtype", "zp_dtype"])
_ADVICE = "if the weights do not depend on it, remove it from the file"


@dataclass(frozen=True)
class Scaling:
    """Which elements share a scale, and the endings of the names of scales, of which one is there.

    strategy: "tensor", "channel" (a row) or "block"; "mxfp4" for the format in mxfp4.py.
    """

    strategy: str
    endings: tuple[str, ...]

    def shapes(self, weight: Sequence[int]) -> list[tuple[int, ...]]:
        """The shapes that the scales of a weight of this shape may have."""
        *front, rows, columns = weight
        if self.strategy == "tensor":
            return [(), (1,)]
        if self.strategy == "channel":
            return [(*front, rows, 1)]
        return [(*front, -(-rows // BLOCK), -(-columns // BLOCK))]

    def rows(self, rows: slice) -> slice:
        """The rows of scales that belong to these rows of a matrix, which are in one row of blocks: one, or one
        each."""
        if self.strategy == "tensor":
            return slice(0, 1)
        return rows if self.strategy == "channel" else slice(rows.start // BLOCK, rows.start // BLOCK + 1)


def parse_scaling(fields: JsonFields) -> Scaling | None:
    """Returns the scaling that the fields of a config.json describe; None without `quantization_config`.

    Raises CheckpointError for a method other than fp8, compressed-tensors' FP8 and mxfp4, for other blocks than 128 x
    128, and for an unknown field.
    """
    values: dict[str, Any] | None = fields.take(QUANTIZATION, dict, None)
    if values is None:
        return None
    section = fields.below(QUANTIZATION, values)
    method = section.take("quant_method", str)
    if method == "fp8":
        scaling = _fine_grained(section)
    elif method == "compressed-tensors":
        scaling = _compressed(section)
    elif method == MXFP4:
        scaling = Scaling(MXFP4, ("_scales",))
    else:
        raise section.error(
            f"quant_method {method!r} is not supported; fp8, compressed-tensors with FP8 weights and mxfp4 are: give "
            "the model before its quantisation"
        )
    section.finish(_BESIDES, _ADVICE)
    return scaling


def _fine_grained(fields: JsonFields) -> Scaling:
    """The format of DeepSeek-V3 and of transformers; without blocks, that of vLLM."""
    fields.only("fmt", "e4m3")
    fields.only("expert_dtype", "fp8")
    fields.take("scale_fmt", str, None)  # how scales were rounded; the tensors say how they are stored
    block = fields.take("weight_block_size", list, None)
    if block is not None and block != [BLOCK, BLOCK]:
        raise fields.error(f"weight_block_size is {block}; only [{BLOCK}, {BLOCK}] is supported")
    return Scaling("tensor" if block is None else "block", ("_scale_inv", "_scale"))


def _compressed(fields: JsonFields) -> Scaling:
    """The format of llm-compressor."""
    for name in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        value = fields.take(name, dict, {})
        if value and value.get("format") != "dense":
            raise fields.error(f"{name} is {value}; only weights in FP8 without it are supported")
    fields.take("format", str, None)
    groups: dict[str, Any] = fields.take("config_groups", dict)
    strategies = {_strategy(fields.below("config_groups", groups), name) for name in groups}
    if len(strategies) != 1:
        raise fields.error(
            f"config_groups scales weights by {sorted(strategies) or 'nothing'}; only one way is supported"
        )
    return Scaling(strategies.pop(), ("_scale",))


def _strategy(groups: JsonFields, name: str) -> str:
    group = groups.below(name, groups.take(name, dict))
    weights = group.below("weights", group.take("weights", dict))
    group.finish(_BESIDES_OF_GROUPS, _ADVICE)
    for field, supported in (("num_bits", 8), ("type", "float"), ("symmetric", True), ("dynamic", False)):
        weights.only(field, supported)
    strategy = weights.take("strategy", str, "tensor")
    if strategy not in _STRATEGIES:
        raise weights.error(f"strategy is {strategy!r}; {', '.join(_STRATEGIES)} are supported")
    block = weights.take("block_structure", list, None)
    if strategy == "block" and block != [BLOCK, BLOCK]:
        raise weights.error(f"block_structure is {block}; only [{BLOCK}, {BLOCK}] is supported")
    for field in ("group_size", "actorder"):
        weights.only(field, None)
    weights.finish(_BESIDES_OF_WEIGHTS, _ADVICE)
    return strategy


class ScaledWeights:
    """The weights of a folder, of which those in FP8 are multiplied by their scales when they are read.

    scales: weight -> its scales. scale_shapes: scales -> their shape. unread: scales of activations, which the folder
    may hold.
    """

    def __init__(self, folder: HFFolder, scaling: Scaling | None, weights: Mapping[str, tuple[int, ...]]) -> None:
        """`weights` are the tensors that the model consists of, with their shapes; the folder may lack some.

        Raises CheckpointError for scales that are missing or of the wrong shape. Their values are checked when they are
        read.
        """
        self._folder, self._scaling = folder, scaling
        self.scales: dict[str, str] = {}
        self.scale_shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in weights.items():
            if name in folder.entries and folder.entries[name].dtype in FP8_DTYPES:
                self.scales[name] = scales = self._scales_of(name, shape)
                self.scale_shapes[scales] = folder.entries[scales].shape
        self.unread = {f"{name.rpartition('.')[0]}.{scale}" for name in self.scales for scale in _ACTIVATION_SCALES}

    def fill(self, out: Tensor, names: Sequence[str], box: Box) -> None:
        """Copies elements `box` of these weights into `out`, one behind the other, rounded once to its dtype.

        Weights are mapped one at a time; besides, memory is 128 of their rows in fp32. Raises CheckpointError for a
        scale that is negative or not finite; otherwise as HFFolder.fill.
        """
        if self.scales.keys().isdisjoint(names):
            return self._folder.fill(out, names, box)
        for part, name in zip(out.view(len(names), *box.shape), names, strict=True):
            if name in self.scales:
                self._fill_scaled(part, name, box)
            else:
                self._folder.fill(part, [name], box)

    def _scales_of(self, name: str, shape: tuple[int, ...]) -> str:
        entries, path = self._folder.entries, self._folder.path
        dtype = entries[name].dtype
        if self._scaling is None:
            raise CheckpointError(
                f"{path}: tensor {name} is in FP8, and config.json has no {QUANTIZATION} that describes its scales"
            )
        if dtype != torch.float8_e4m3fn or len(shape) < 2:
            raise CheckpointError(
                f"{path}: tensor {name} is {dtype} {list(shape)}; only matrices in float8_e4m3fn have scales"
            )
        scales_name = next((name + ending for ending in self._scaling.endings if name + ending in entries), None)
        if scales_name is None:
            raise CheckpointError(
                f"{path} holds no tensor {name}{self._scaling.endings[0]} with the scales of {name}, which is in FP8"
            )
        scales, expected = entries[scales_name], self._scaling.shapes(shape)
        if scales.shape not in expected or scales.dtype not in _SCALE_DTYPES:
            raise CheckpointError(
                f"{path}: tensor {scales_name} is {scales.dtype} {list(scales.shape)}; {name} {list(shape)}, scaled by "
                f"{self._scaling.strategy}, requires floating-point "
                f"{' or '.join(str(list(expected_shape)) for expected_shape in expected)}"
            )
        return scales_name

    def _fill_scaled(self, out: Tensor, name: str, box: Box) -> None:
        assert self._scaling is not None
        weight, scales = self._folder.view(name), self._folder.view(self.scales[name])
        if self._scaling.strategy == "tensor":
            scales = scales.view([1] * weight.dim()).expand(*weight.shape[:-2], 1, 1)
        quantized, first, end = narrow(weight, box), box.offset[-2], box.end(-2)
        column_of = torch.arange(box.offset[-1], box.end(-1)) // BLOCK
        for index, stored_index in _matrices(box):
            factors = scales[stored_index].float()
            if not bool((factors.isfinite() & (factors >= 0)).all()):
                raise CheckpointError(
                    f"{self._folder.path}: tensor {self.scales[name]} has scales that are negative or not finite; the "
                    "folder is damaged, copy the model again"
                )
            for start in range(first - first % BLOCK, end, BLOCK):
                rows = slice(max(start, first), min(start + BLOCK, end))
                factor = factors[self._scaling.rows(rows)]
                strip = slice(rows.start - first, rows.stop - first)
                values = quantized[index][strip].float()
                out[index][strip] = values.mul_(factor[:, column_of] if self._scaling.strategy == "block" else factor)


def _matrices(box: Box) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields the place in the box, and in the tensor, of each matrix of a stack that the box touches; () for a
    matrix."""
    sizes = box.shape[:-2]
    for place in itertools.product(*(range(size) for size in sizes)):
        yield place, tuple(start + index for start, index in zip(box.offset, place))
