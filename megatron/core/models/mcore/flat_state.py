"""Opens the BucketState of a checkpoint from the buffers of the distributed optimizer, for each storage format."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.core.dist_checkpointing.tensor_file import narrow
from megatron.core.models.mcore.buckets import bucket_sizes, default_size, place
from megatron.core.models.mcore.classic import OPTIMIZER_FILE, ClassicFiles
from megatron.core.models.mcore.flat_layout import Numels, derived, own_buckets, sizes_of
from megatron.core.models.mcore.names import is_expert
from megatron.core.models.mcore.optimizer_state import SAVE_ADVICE, BucketState, only
from megatron.core.models.mcore.torch_dist import TorchDistFiles

GROUP = "optimizer.distributed.dp_group_idx_"
_BUCKET = re.compile(
    rf"(?:chained_([01])\.)?{re.escape(GROUP)}(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)\.bucket_idx_(\d+)\.([a-z_]+)"
)


def of_buckets(files: TorchDistFiles, model: ModelConfig) -> BucketState:
    """Opens `dp_reshardable`: one tensor per key and bucket. Raises CheckpointError.

    With ep > 1 the experts have an optimizer of their own, and buffers for each rank of etp x ep x pp.
    """
    sizes = sizes_of(files.arguments)
    stored: dict[tuple[int, int, int, int, str], str] = {}
    lengths: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
    for name, (shape, _) in files.folder.tensors.items():
        if match := _BUCKET.fullmatch(name):
            optimizer, group, buffer, bucket = (int(match[n] or 0) for n in (1, 2, 3, 5))
            if (optimizer, group, buffer, bucket, match[6]) in stored:
                raise CheckpointError(
                    f"{files.path}: its buffers are of several dtypes, which is not supported; {SAVE_ADVICE}"
                )
            stored[optimizer, group, buffer, bucket, match[6]] = name
            lengths[optimizer, group, buffer][bucket] = shape[0]
    apart = any(optimizer for optimizer, _, _ in lengths)
    if sizes.ep > 1 and not apart:
        raise CheckpointError(f"{files.path} holds one optimizer for ep {sizes.ep}, which has two; {SAVE_ADVICE}")
    held: list[dict[int, set[int]]] = [defaultdict(set), defaultdict(set)]
    for optimizer, group, buffer in lengths:
        held[optimizer][group].add(buffer)
    count = _buffers(held[0], sizes.tp * sizes.pp, files)
    if apart and _buffers(held[1], sizes.etp * sizes.ep * sizes.pp, files) != count:
        raise CheckpointError(f"{files.path}: only some chunks of its model have experts; {SAVE_ADVICE}")

    def place_of(rank: int, chunk: int) -> tuple[int, int, int]:
        stage, buffer = chunk % sizes.pp, chunk // sizes.pp
        if rank < sizes.tp:
            return 0, stage * sizes.tp + rank, buffer
        return 1, stage * sizes.etp * sizes.ep + rank - sizes.tp, buffer

    def buckets(rank: int, chunk: int, numels: Numels) -> Sequence[int]:
        lengths_by_bucket = lengths[place_of(rank, chunk)]
        return [lengths_by_bucket[bucket] for bucket in sorted(lengths_by_bucket)]

    def fetch(rank: int, chunk: int, key: str, bucket: int, part: Box) -> Tensor:
        name = stored.get((*place_of(rank, chunk), bucket, key))
        if name is None:
            raise CheckpointError(f"{files.path}: its optimizer holds no {key} of chunk {chunk}, bucket {bucket}")
        return files.folder.read(name, part)

    def fits(chunk: int, numels: Numels) -> bool:
        return place(numels, buckets(0, chunk, numels)) is not None

    layout, numels = derived(files, model, sizes.pp * count, fits, experts_apart=apart)
    holders = [next(rank for rank in layout.ranks if rank[0] == tp_rank) for tp_rank in range(sizes.tp)]
    if apart:
        shards = ((etp_rank, ep_rank) for ep_rank in range(sizes.ep) for etp_rank in range(sizes.etp))
        holders += [layout.ranks_of(*shard)[0] for shard in shards]

    def of_rank(rank: int, chunk: int) -> Numels:
        chunk_numels = numels(chunk)
        return (
            {n: size for n, size in chunk_numels.items() if is_expert(n) == (rank >= sizes.tp)}
            if apart
            else chunk_numels
        )

    return BucketState(layout, of_rank, buckets, fetch, holders)


def of_gathered(files: TorchDistFiles, model: ModelConfig) -> BucketState:
    """Opens `dp_zero_gather_scatter`: one object per rank, like distrib_optim.pt. Raises CheckpointError."""
    sizes = sizes_of(files.arguments)
    tp, pp, contents = sizes.tp, sizes.pp, {}
    for group in range(tp * pp):
        state = files.read_object(f"{GROUP}{group}.param_state")
        contents[group % tp, group // tp] = _content(state, f"{files.path}: {GROUP}{group}.param_state")
    chunks = pp * _buffers({place: set(content) for place, content in contents.items()}, tp * pp, files)
    gathered = _Gathered(contents, pp, files.arguments, own_buckets(model, pp))
    layout, numels = derived(files, model, chunks, gathered.fits)
    return BucketState(layout, lambda rank, chunk: numels(chunk), gathered.buckets, gathered.fetch)


def of_files(files: ClassicFiles, model: ModelConfig) -> BucketState:
    """Opens distrib_optim.pt, which is next to each rank's file. Raises CheckpointError."""
    layout, contents = files.layout, {}
    for rank in range(layout.tp):
        for stage in range(layout.pp):
            path = files.path / layout.folder(rank, 0, stage) / OPTIMIZER_FILE
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; take the weights alone with --no-load-optim")
            contents[rank, stage] = _content(files.load(path), str(path))
    gathered = _Gathered(contents, layout.pp, files.arguments, own_buckets(model, layout.pp))

    def numels(rank: int, chunk: int) -> Numels:
        beginning = layout.key(rank, 0, chunk, "")
        keys = [key for key in files.parameters(beginning.partition("/")[0]) if key.startswith(beginning)]
        return {key.removeprefix(beginning): math.prod(files.shapes[key]) for key in keys}

    def fetch(rank: int, chunk: int, key: str, bucket: int, part: Box) -> Tensor:
        tensor = gathered.fetch(rank, chunk, key, bucket, part)
        files.check(files.path / layout.folder(rank, 0, chunk % layout.pp) / OPTIMIZER_FILE, tensor)
        return tensor

    return BucketState(layout, numels, gathered.buckets, fetch)


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
                f"parameters and arguments require {sum(sizes)}; {SAVE_ADVICE}"
            )
        self._sizes[rank, chunk] = sizes
        return sizes

    def fetch(self, rank: int, chunk: int, key: str, bucket: int, part: Box) -> Tensor:
        """See BucketState. Raises CheckpointError."""
        buffer = self._buffer(rank, chunk).get(key)
        if not isinstance(buffer, Tensor):
            raise CheckpointError(
                f"the optimizer's buffer of tp rank {rank}, chunk {chunk} holds no {key}; {SAVE_ADVICE}"
            )
        before = sum(self._sizes[rank, chunk][:bucket])
        return narrow(buffer, Box((before + part.offset[0],), part.shape))

    def _expected(self, chunk: int, numels: Numels) -> list[int]:
        stage, number, count = chunk % self._pp, chunk // self._pp, sum(numels.values())
        size = default_size(self._arguments, stage=stage, chunk=number, parameters=count)
        return bucket_sizes(numels, size, self._alone)

    def _total(self, rank: int, chunk: int) -> int:
        return int(self._buffer(rank, chunk)["numel_unpadded"])

    def _buffer(self, rank: int, chunk: int) -> Mapping[str, Any]:
        return self._contents[rank, chunk % self._pp][chunk // self._pp]


def _content(state: Any, where: str) -> dict[int, Mapping[str, Any]]:
    """Returns buffer's number -> key -> elements."""
    content: Mapping[Any, Any] = only(state)
    if not content.get("buckets_coalesced"):
        raise CheckpointError(f"{where} is in the form of before 2024-02-13, which is not read; {SAVE_ADVICE}")
    buffers = {number: of_dtype for number, of_dtype in content.items() if isinstance(number, int)}
    for number, of_dtype in buffers.items():
        if len(of_dtype) != 1 or "numel_unpadded" not in next(iter(of_dtype.values())):
            raise CheckpointError(f"{where}: buffer {number} is of several dtypes or without its size; {SAVE_ADVICE}")
    return {number: next(iter(of_dtype.values())) for number, of_dtype in buffers.items()}


def _buffers(held: Mapping[Any, set[int]], ranks: int, files: TorchDistFiles) -> int:
    """Returns the number of buffers, which is equal on all ranks."""
    numbers = next(iter(held.values()), set())
    if (
        len(held) != ranks
        or not numbers
        or any(numbers_of_rank != set(range(len(numbers))) for numbers_of_rank in held.values())
    ):
        raise CheckpointError(
            f"{files.path} holds the optimizer's buffers of {len(held)} ranks, or not the same of all; its arguments "
            f"say {ranks}; {SAVE_ADVICE}"
        )
    return len(numbers)
