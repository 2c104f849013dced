"""Megatron-LM's classic layout (--ckpt-format torch): a folder mp_rank_XX[_YYY][_ZZZ] per rank of tp, pp and ep.

YYY is left out without pipeline stages, ZZZ without ranks of ep; a single number behind XX is one or the other, as the
arguments say. Each folder holds model_optim_rng.pt.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.core.dist_checkpointing.pickles import Checksums, load_objects
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.models.mcore.moe_arguments import check_shares
from megatron.core.models.mcore.names import (
    CLASSIC_PREDICTION_LAYER,
    FUSED_NORM,
    GROUPED,
    PREDICTION_LAYER,
    SEQUENTIAL,
    CheckpointLayout,
)
from megatron.core.models.source import is_buffer

FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_MODEL = re.compile(r"model\d*")
_EXPERTS = re.compile(r"\.mlp\.experts\.(?:(local_experts\.)|(linear_fc[12]\.weight\d)|(weight[12]$))")


class ClassicFiles:
    """The weights of all ranks; tensors are mapped, and read on demand.

    `shapes` maps the key of every tensor of the model, in the format of `CheckpointLayout.key`, to its shape. `common`
    holds the first rank's values except its weights. `arguments` are those of the run that wrote the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError."""
        self.path = path
        folders = {folder.name: match for folder in path.glob("mp_rank_*") if (match := _RANK.fullmatch(folder.name))}
        if not folders:
            raise CheckpointError(
                f"{path} holds no folder mp_rank_XX, with at most two numbers of three digits behind it"
            )
        self._checksums = Checksums()
        self._files = {name: self._load(path / name / FILE) for name in sorted(folders)}
        first = next(iter(self._files))
        self.common: Mapping[str, Any] = self._files[first]
        namespace = self.common.get("args")
        self.arguments: dict[str, Any] = vars(namespace) if isinstance(namespace, argparse.Namespace) else {}
        if not self.arguments:
            raise CheckpointError(
                f"{path / first / FILE} holds no arguments; it is not a checkpoint of Megatron-LM's training"
            )
        sizes = _sizes(path, list(folders.values()), self.arguments)
        self.shapes = {
            f"{folder}/{part}/{name}": tuple(value.shape)
            for folder, content in self._files.items()
            for part in content
            if _MODEL.fullmatch(part)
            for name, value in content[part].items()
            if isinstance(value, Tensor)
        }
        self.layout = self._layout(*sizes)

    def dtype(self, key: str) -> torch.dtype:
        """Returns the dtype of a tensor of the model."""
        return self._tensor(key).dtype

    def read(self, key: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """Returns elements `box` of a tensor of the model, which has `shape`."""
        tensor = self._tensor(key)
        self.check(self.path / key.partition("/")[0] / FILE, tensor)
        return narrow(tensor, box)

    def load(self, path: Path) -> Any:
        """Returns the content of a file, whose tensors are mapped. Raises CheckpointError."""
        content = load_objects(path, str(path), mapped=True)
        self._checksums.add(path)
        return content

    def check(self, path: Path, tensor: Tensor) -> None:
        """Raises CheckpointError if the bytes of a tensor in a file that `load` mapped are not those that were
        saved."""
        self._checksums.check(path, tensor)

    def rank(self, folder: str) -> Mapping[str, Any]:
        """Returns the content of the file of the rank with this folder."""
        return self._files[folder]

    def parameters(self, folder: str) -> list[str]:
        """Returns the keys of a rank's parameters in the order of its modules, chunk by chunk, as in its optimizer."""
        parts = sorted(part for part in self._files[folder] if _MODEL.fullmatch(part))
        keys = [f"{folder}/{part}/{name}" for part in parts for name in self._files[folder][part]]
        return [key for key in keys if key in self.shapes and "rotary_pos_emb" not in key and not is_buffer(key)]

    def _load(self, path: Path) -> dict[str, Any]:
        content = self.load(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} is not a checkpoint of Megatron-LM")
        return content

    def _tensor(self, key: str) -> Tensor:
        folder, part, name = key.split("/", 2)
        tensor: Tensor = self._files[folder][part][name]
        return tensor

    def _layout(self, tp: int, pp: int, ep: int, etp: int) -> CheckpointLayout:
        chunks = max(1, sum(bool(re.fullmatch(r"model\d+", key)) for key in self.common))
        shape = CheckpointLayout(tp, pp, (0,) * pp * chunks, True, 0, ep, etp)
        expected = {shape.folder(t, e, stage) for t, e in shape.ranks for stage in range(pp)}
        if expected != self._files.keys():
            wrong = sorted(expected ^ self._files.keys())
            raise CheckpointError(
                f"{self.path} holds {len(self._files)} folders mp_rank_..., tp {tp} x pp {pp}"
                + (f" x ep {ep} with etp {etp}" if ep > 1 or etp < tp else "")
                + f" need {len(expected)}: {wrong[0]} is {'missing' if wrong[0] in expected else 'too many'}"
            )
        held: list[set[str]] = []
        for chunk in range(pp * chunks):
            beginning = shape.key(0, 0, chunk, "")
            held.append({key.removeprefix(beginning) for key in self.shapes if key.startswith(beginning)})
        layers = tuple(len({match[1] for name in names if (match := _LAYER.match(name))}) for names in held)
        fused = any(name.endswith(FUSED_NORM) for names in held for name in names)
        # The padding of the rows is not always among the arguments.
        embedding = self.shapes.get(shape.key(0, 0, 0, "embedding.word_embeddings.weight"))
        if embedding is None:
            place = shape.key(0, 0, 0, "").rstrip("/")
            raise CheckpointError(f"{self.path}/{place} holds no tensor embedding.word_embeddings.weight")
        rows = embedding[0] if embedding else 0
        is_newer = any(f".{CLASSIC_PREDICTION_LAYER}." in name for names in held for name in names)
        return CheckpointLayout(
            tp,
            pp,
            layers,
            fused,
            rows,
            ep,
            etp,
            self._names_of_experts(),
            cuts_latents=self._cuts_latents(),
            prediction_layer=CLASSIC_PREDICTION_LAYER if is_newer else PREDICTION_LAYER,
        )

    def _cuts_latents(self) -> bool:
        """Returns whether a projection down to latents has fewer rows than channels. Raises CheckpointError."""
        if fused := next((key for key in self.shapes if ".linear_qkv_down_proj." in key), None):
            raise CheckpointError(
                f"{self.path}: {fused} is of --mla-down-proj-fusion, which is not read in this format; save it from "
                "Megatron-LM with --ckpt-format torch_dist"
            )
        channels = [self.arguments.get(name) or 0 for name in ("kv_lora_rank", "qk_pos_emb_head_dim")]
        downs = (shape for key, shape in self.shapes.items() if key.endswith(".linear_kv_down_proj.weight"))
        return any(shape[0] != sum(channels) for shape in downs)

    def _names_of_experts(self) -> str:
        """Returns how the weights of experts are named. Raises CheckpointError for other names, or both at once."""
        keys_by_form = {match.lastindex: key for key in self.shapes if (match := _EXPERTS.search(key))}
        if 3 in keys_by_form:
            raise CheckpointError(
                f"{self.path}: {keys_by_form[3]} is of --moe-use-legacy-grouped-gemm, whose weights are transposed, "
                "which is not read; save it from Megatron-LM with --ckpt-format torch_dist"
            )
        if len(keys_by_form) > 1:
            raise CheckpointError(f"{self.path} holds its experts twice, as {keys_by_form[1]} and as {keys_by_form[2]}")
        return SEQUENTIAL if 1 in keys_by_form else GROUPED


def _sizes(path: Path, folders: list[re.Match[str]], arguments: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Returns the sizes of tp, pp, ep and etp. Raises CheckpointError for such that cannot be in a folder."""
    tp = 1 + max(int(match[1]) for match in folders)
    if arguments.get("num_experts") is None:
        if triple := next((match for match in folders if match[3]), None):
            raise CheckpointError(
                f"{path}/{triple[0]} belongs to expert parallelism, and the arguments have no experts"
            )
        return tp, 1 + max(int(match[2] or 0) for match in folders), 1, tp
    sizes: dict[str, Any] = {}
    for kind in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor"):
        name = f"{kind}_parallel_size"
        sizes[kind] = arguments.get(name) or (sizes["tensor_model"] if kind == "expert_tensor" else 1)
        if not isinstance(sizes[kind], int) or sizes[kind] < 1:
            raise CheckpointError(f"{path}: argument {name} is {sizes[kind]!r}, which is not supported")
    tp, pp, ep, etp = sizes.values()
    if tp % etp:
        raise CheckpointError(
            f"{path}: argument expert_tensor_parallel_size is {etp} and tensor_model_parallel_size {tp}; files are "
            "named by the ranks of the latter, so that they do not hold all experts; save it with --ckpt-format "
            "torch_dist"
        )
    check_shares(arguments, ep, str(path))
    return tp, pp, ep, etp
