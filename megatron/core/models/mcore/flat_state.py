"""Opens the BucketState of a checkpoint from the buffers of the distributed optimizer, for each storage format."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.core.dist_checkpointing.pickles import load_objects
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.models.mcore.buckets import bucket_sizes, default_size, in_module_order, place
from megatron.core.models.mcore.classic import OPTIMIZER_FILE, ClassicFiles
from megatron.core.models.mcore.names import VOCABULARY, CheckpointLayout, table
from megatron.core.models.mcore.optimizer_state import SAVE_AGAIN, BucketState, only
from megatron.core.models.mcore.torch_dist import TorchDistFiles
from megatron.spec.decoder import OUTPUT_LAYER, WORD_EMBEDDINGS

GROUP = "optimizer.distributed.dp_group_idx_"
_BUCKET = re.compile(rf"{re.escape(GROUP)}(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.([a-z_]+)")
_LAYER = "decoder.layers.0."
Numels = Mapping[str, int]
Fits = Callable[[int, Numels], bool]


def of_buckets(files: TorchDistFiles, model: ModelConfig) -> BucketState:
    """Opens `dp_reshardable`: one tensor per key and bucket. Raises CheckpointError."""
    tp, pp = _sizes(files.arguments)
    stored: dict[tuple[int, int, int, str], str] = {}
    sizes: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for name, (shape, _) in files.folder.tensors.items():
        if match := _BUCKET.fullmatch(name):
            group, buffer, bucket, key = int(match[1]), int(match[2]), int(match[4]), match[5]
            if (group, buffer, bucket, key) in stored:
                raise CheckpointError(
                    f"{files.path}: its buffers are of several dtypes, which is not supported; {SAVE_AGAIN}"
                )
            stored[group, buffer, bucket, key] = name
            sizes[group, buffer][bucket] = shape[0]
    chunks = pp * _buffers({group: {b for g, b in sizes if g == group} for group, _ in sizes}, tp * pp, files)

    def place_of(rank: int, chunk: int) -> tuple[int, int]:
        return chunk % pp * tp + rank, chunk // pp

    def buckets(rank: int, chunk: int, numels: Numels) -> Sequence[int]:
        held = sizes[place_of(rank, chunk)]
        return [held[bucket] for bucket in sorted(held)]

    def fetch(rank: int, chunk: int, key: str, bucket: int, part: Box) -> Tensor:
        name = stored.get((*place_of(rank, chunk), bucket, key))
        if name is None:
            raise CheckpointError(f"{files.path}: its optimizer holds no {key} of chunk {chunk}, bucket {bucket}")
        return files.folder.read(name, part)

    def fits(chunk: int, numels: Numels) -> bool:
        return place(numels, buckets(0, chunk, numels)) is not None

    layout, numels = _derived(files, model, chunks, fits)
    return BucketState(layout, numels, buckets, fetch)


def of_gathered(files: TorchDistFiles, model: ModelConfig) -> BucketState:
    """Opens `dp_zero_gather_scatter`: one object per rank, like distrib_optim.pt. Raises CheckpointError."""
    tp, pp = _sizes(files.arguments)
    contents = {}
    for group in range(tp * pp):
        found = files.read_object(f"{GROUP}{group}.param_state")
        contents[group % tp, group // tp] = _content(found, f"{files.path}: {GROUP}{group}.param_state")
    chunks = pp * _buffers({place: set(content) for place, content in contents.items()}, tp * pp, files)
    gathered = _Gathered(contents, pp, files.arguments, _alone(model, pp))
    layout, numels = _derived(files, model, chunks, gathered.fits)
    return BucketState(layout, numels, gathered.buckets, gathered.fetch)


def of_files(files: ClassicFiles, model: ModelConfig) -> BucketState:
    """Opens distrib_optim.pt, which is next to each rank's file. Raises CheckpointError."""
    layout, contents = files.layout, {}
    for rank in range(layout.tp):
        for stage in range(layout.pp):
            path = files.path / layout.folder(rank, stage) / OPTIMIZER_FILE
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; take the weights alone with --no-load-optim")
            contents[rank, stage] = _content(load_objects(path, str(path), mapped=True), str(path))
    gathered = _Gathered(contents, layout.pp, files.arguments, _alone(model, layout.pp))

    def numels(rank: int, chunk: int) -> Numels:
        beginning = layout.key(rank, chunk, "")
        keys = [key for key in files.parameters(beginning.partition("/")[0]) if key.startswith(beginning)]
        return {key.removeprefix(beginning): math.prod(files.shapes[key]) for key in keys}

    return BucketState(layout, numels, gathered.buckets, gathered.fetch)


class _Gathered:
    """Buffers of concatenated buckets: (tp rank, stage) -> buffer's number -> key -> elements."""

    def __init__(
        self,
        contents: Mapping[tuple[int, int], Mapping[int, Mapping[str, Any]]],
        pp: int,
        arguments: Mapping[str, Any],
        alone: Collection[str],
    ) -> None:
        self._contents, self._pp, self._arguments, self._alone = contents, pp, arguments, alone
        self._sizes: dict[tuple[int, int], list[int]] = {}

    def fits(self, chunk: int, numels: Numels) -> bool:
        """Returns whether a chunk's buffer may hold these parameters."""
        return sum(self._expected(chunk, numels)) == self._total(0, chunk)

    def buckets(self, rank: int, chunk: int, numels: Numels) -> Sequence[int]:
        """See BucketState. Raises CheckpointError."""
        sizes = self._expected(chunk, numels)
        if sum(sizes) != self._total(rank, chunk):
            raise CheckpointError(
                f"the optimizer's buffer of tp rank {rank}, chunk {chunk} has {self._total(rank, chunk)} elements, its "
                f"parameters and arguments require {sum(sizes)}; {SAVE_AGAIN}"
            )
        self._sizes[rank, chunk] = sizes
        return sizes

    def fetch(self, rank: int, chunk: int, key: str, bucket: int, part: Box) -> Tensor:
        """See BucketState. Raises CheckpointError."""
        found = self._buffer(rank, chunk).get(key)
        if not isinstance(found, Tensor):
            raise CheckpointError(
                f"the optimizer's buffer of tp rank {rank}, chunk {chunk} holds no {key}; {SAVE_AGAIN}"
            )
        before = sum(self._sizes[rank, chunk][:bucket])
        return narrow(found, Box((before + part.offset[0],), part.shape))

    def _expected(self, chunk: int, numels: Numels) -> list[int]:
        stage, number, count = chunk % self._pp, chunk // self._pp, sum(numels.values())
        size = default_size(self._arguments, stage=stage, chunk=number, parameters=count)
        return bucket_sizes(numels, size, self._alone)

    def _total(self, rank: int, chunk: int) -> int:
        return int(self._buffer(rank, chunk)["numel_unpadded"])

    def _buffer(self, rank: int, chunk: int) -> Mapping[str, Any]:
        return self._contents[rank, chunk % self._pp][chunk // self._pp]


def _content(found: Any, where: str) -> dict[int, Mapping[str, Any]]:
    """Returns buffer's number -> key -> elements."""
    content: Mapping[Any, Any] = only(found)
    if not content.get("buckets_coalesced"):
        raise CheckpointError(f"{where} is in the form of before 2024-02-13, which is not read; {SAVE_AGAIN}")
    buffers = {number: of_dtype for number, of_dtype in content.items() if isinstance(number, int)}
    for number, of_dtype in buffers.items():
        if len(of_dtype) != 1 or "numel_unpadded" not in next(iter(of_dtype.values())):
            raise CheckpointError(f"{where}: buffer {number} is of several dtypes or without its size; {SAVE_AGAIN}")
    return {number: next(iter(of_dtype.values())) for number, of_dtype in buffers.items()}


def _buffers(held: Mapping[Any, set[int]], ranks: int, files: TorchDistFiles) -> int:
    """Returns the number of buffers, which is equal on all ranks."""
    numbers = next(iter(held.values()), set())
    if len(held) != ranks or not numbers or any(each != set(range(len(numbers))) for each in held.values()):
        raise CheckpointError(
            f"{files.path} holds the optimizer's buffers of {len(held)} ranks, or not the same of all; its arguments say "
            f"{ranks}; {SAVE_AGAIN}"
        )
    return len(numbers)


def _derived(
    files: TorchDistFiles, model: ModelConfig, chunks: int, fits: Fits
) -> tuple[CheckpointLayout, Callable[[int, int], Numels]]:
    """Derives the division of the model into chunks, and the parameters of each, from the sizes of the buffers."""
    tp, pp = _sizes(files.arguments)
    assert model.num_layers
    if files.layout.vocabulary % tp:
        raise CheckpointError(
            f"{files.path}: {files.layout.vocabulary} rows of the vocabulary cannot be cut {tp} times"
        )
    rows, fused = files.layout.vocabulary // tp, files.layout.fused_norms
    whole = CheckpointLayout(tp, 1, (model.num_layers,), fused, rows)
    beginning = whole.key(0, 0, "")
    shapes = {
        key.removeprefix(beginning): (rows, *shape[1:]) if key.endswith(VOCABULARY) else shape
        for key, shape in table(model, whole).theirs.items()
        if key.startswith(beginning)
    }
    if _alone(model, pp):
        shapes[OUTPUT_LAYER] = shapes[WORD_EMBEDDINGS]
    local = files.arguments.get("transformer_impl") == "local"
    layer = in_module_order([n.removeprefix(_LAYER) for n in shapes if n.startswith(_LAYER)], local=local)

    def numels_of(chunk: int, layers: int) -> Numels:
        names = _chunk_names(layer, shapes, layers, first=chunk == 0, last=chunk == chunks - 1)
        return {name: math.prod(shape) for name, shape in names.items()}

    counts = []
    for chunk in range(chunks):
        count = next((n for n in range(model.num_layers + 1) if fits(chunk, numels_of(chunk, n))), None)
        if count is None:
            raise CheckpointError(
                f"{files.path}: the optimizer's buffer of chunk {chunk} cannot be told apart into parameters; {SAVE_AGAIN}"
            )
        counts.append(count)
    if sum(counts) != model.num_layers:
        raise CheckpointError(f"{files.path}: its optimizer has {sum(counts)} layers, its model {model.num_layers}")
    return CheckpointLayout(tp, pp, tuple(counts), fused, rows), lambda rank, chunk: numels_of(chunk, counts[chunk])


def _chunk_names(
    layer: Sequence[str], shapes: Mapping[str, tuple[int, ...]], layers: int, *, first: bool, last: bool
) -> dict[str, tuple[int, ...]]:
    """A chunk's parameters in the order of Megatron-LM's modules, with their shapes."""
    before = [WORD_EMBEDDINGS, "embedding.position_embeddings.weight"] if first else []
    after = ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias", OUTPUT_LAYER] if last else []
    inside = {f"decoder.layers.{number}.{name}": shapes[_LAYER + name] for number in range(layers) for name in layer}
    outside = {name: shapes[name] for name in (*before, *after) if name in shapes}
    return {n: s for n, s in outside.items() if n in before} | inside | {n: s for n, s in outside.items() if n in after}


def _alone(model: ModelConfig, pp: int) -> Collection[str]:
    """Parameters with a bucket of their own: the embedding and its copy on the last stage, when there is one."""
    return (WORD_EMBEDDINGS, OUTPUT_LAYER) if pp > 1 and not model.untie_embeddings_and_output_weights else ()


def _sizes(arguments: Mapping[str, Any]) -> tuple[int, int]:
    tp, pp = (arguments.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline"))
    if not (isinstance(tp, int) and isinstance(pp, int) and tp > 0 and pp > 0):
        raise CheckpointError(
            f"its arguments do not contain valid tensor and pipeline parallel sizes, but {tp} and {pp}"
        )
    return tp, pp
