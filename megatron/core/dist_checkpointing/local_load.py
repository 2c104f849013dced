"""Loads of local checkpoints: the newest one of which all files exist on some host, and the exchange of their tensors.

A rank reads what its folders hold. What they lack, it receives from a rank that sees the file: those elements only that
it needs, so that no host needs memory for files of others, and any layout loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron.base.box import Box
from megatron.base.errors import CheckpointError
from megatron.base.log import get_logger
from megatron.base.read_file import read_regular
from megatron.core.comm.collectives import gather_objects
from megatron.core.comm.p2p import send_and_receive
from megatron.core.dist_checkpointing.coordination import on_all, patient
from megatron.core.dist_checkpointing.folders import begin, publish
from megatron.core.dist_checkpointing.local_folders import LocalPart, make_rank_folder, parts
from megatron.core.dist_checkpointing.manifest import MANIFEST, Manifest, read_manifest
from megatron.core.dist_checkpointing.storage import SafetensorsReader, verify_files
from megatron.core.dist_checkpointing.tensor_file import DamagedError, TensorFile, open_tensor_file
from megatron.core.groups import Group

log = get_logger(__name__)


def newest_local(run: Path, run_id: str, *, after: int, group: Group) -> Path | None:
    """Returns this rank's folder of the newest local checkpoint that all ranks together hold without damage.

    run: the folder of the run on this host. after: the iteration must be above this. A damaged file is deleted with a
    warning, because a replica may be whole. Collective over `group`: gathers of small objects; the ranks share the work
    of reading the files of each candidate in full. Raises CheckpointError on all ranks.
    """
    with patient(group):
        return _newest_whole(run, run_id, after, group)


def _newest_whole(run: Path, run_id: str, after: int, group: Group) -> Path | None:
    mine = on_all(group, "checkpoint list", lambda: parts(run, run_id))
    seen = gather_objects(mine, group)
    candidates = {(part.iteration, part.manifest_crc) for rank in seen for part in rank if part.iteration > after}
    for iteration, crc in sorted(candidates, reverse=True):
        of_ranks = [[part for part in rank if (part.iteration, part.manifest_crc) == (iteration, crc)] for rank in seen]
        missing = _missing(of_ranks, group)
        if not missing:
            return _with_manifest(of_ranks, run, run_id, group)
        if group.rank == 0:
            log.warning(
                "the local checkpoint of iteration %d is not whole: no host here holds %s", iteration, _listed(missing)
            )
    return None


def _missing(of_ranks: Sequence[Sequence[LocalPart]], group: Group) -> list[str]:
    """Returns the names of files of a checkpoint that no rank sees undamaged."""
    checked: list[tuple[set[str], list[str]]] = []
    mine = [part for part in of_ranks[group.rank] if _verifiers(of_ranks)[part.identity] == group.rank]

    def check() -> None:
        for part in mine:
            try:
                manifest = read_manifest(part.path)
            except CheckpointError as error:
                log.warning("%s", error)
                continue
            checked.append((_whole_files(part.path, manifest), sorted(manifest.files)))

    on_all(group, "checkpoint verify", check)
    results = [entry for rank in gather_objects(checked, group) for entry in rank]
    whole = {name for names, _ in results for name in names}
    return sorted({name for _, names in results for name in names} - whole) if results else [MANIFEST]


def _verifiers(of_ranks: Sequence[Sequence[LocalPart]]) -> dict[str, int]:
    """Returns which rank reads the files of each folder: of those that see it the one that reads the fewest."""
    seen_by: dict[str, list[int]] = {}
    for rank, rank_parts in enumerate(of_ranks):
        for part in rank_parts:
            seen_by.setdefault(part.identity, []).append(rank)
    loads, result = [0] * len(of_ranks), {}
    for identity, ranks in sorted(seen_by.items()):
        result[identity] = min(ranks, key=lambda rank: loads[rank])
        loads[result[identity]] += 1
    return result


def _whole_files(path: Path, manifest: Manifest) -> set[str]:
    """Returns the names of undamaged files in a folder; deletes the others."""
    whole = set()
    for name in sorted(manifest.files):
        if not (path / name).exists():
            continue
        try:
            verify_files(path, manifest, [name])
            whole.add(name)
        except (DamagedError, OSError) as error:
            log.warning("%s; a replica is used if there is one", error)
            (path / name).unlink(missing_ok=True)
    return whole


def _with_manifest(of_ranks: Sequence[Sequence[LocalPart]], run: Path, run_id: str, group: Group) -> Path:
    """Returns this rank's folder of the checkpoint; one that it lacks is made, with metadata.json alone."""
    source = next(rank for rank, rank_parts in enumerate(of_ranks) if rank_parts)
    part = of_ranks[source][0]
    iteration = part.iteration
    contents = gather_objects(read_regular(part.path / MANIFEST) if group.rank == source else None, group)

    def make() -> Path:
        root = make_rank_folder(run, run_id, group.rank)
        path = root / part.path.name
        if all(path != mine.path for mine in of_ranks[group.rank]):
            temporary = begin(root, iteration)
            (temporary / MANIFEST).write_bytes(contents[source])
            publish(root, iteration, temporary)
        return path

    return on_all(group, "checkpoint metadata", make)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more files" if len(names) > 3 else "")


def files_of_ranks(path: Path, manifest: Manifest, group: Group) -> tuple[dict[str, Path], dict[str, list[int]]]:
    """Returns (file -> where this rank sees it, file -> ranks that see it) of a local checkpoint, by this rank's folder
    of it. Communication: a gather of names. Raises CheckpointError on all ranks if no rank sees a file."""

    def look() -> dict[str, Path]:
        folders = sorted(path.parent.parent.glob(f"*/{path.name}"))
        content = read_regular(path / MANIFEST)
        alike = [
            folder for folder in folders if (folder / MANIFEST).is_file() and read_regular(folder / MANIFEST) == content
        ]
        return {
            name: folder / name
            for folder in (*alike, path)
            for name, nbytes in manifest.files.items()
            if (folder / name).is_file() and (folder / name).stat().st_size == nbytes
        }

    mine = on_all(group, "checkpoint sizes", look)
    holders: dict[str, list[int]] = {name: [] for name in manifest.files}
    for rank, names in enumerate(gather_objects(sorted(mine), group)):
        for name in names:
            holders[name].append(rank)
    if missing := sorted(name for name, ranks in holders.items() if not ranks):
        raise DamagedError(f"no host holds {_listed(missing)}")
    return mine, holders


@dataclass(frozen=True)
class _Request:
    """A rectangle of a chunk, which a rank asks another for."""

    name: str
    chunk: int  # its number among the chunks of the tensor
    part: Box


class LocalReader(SafetensorsReader):
    """Reads parts of chunks from the files that this rank sees, and receives those of other files. Its `read_data` is
    collective over the group."""

    def __init__(
        self, path: Path, manifest: Manifest, group: Group, files: dict[str, Path], holders: Mapping[str, Sequence[int]]
    ) -> None:
        """files, holders: see `files_of_ranks`."""
        super().__init__(path, manifest, group.heartbeat.working)
        self._group, self._files, self._holders = group, files, holders
        self._opened: dict[str, TensorFile] = {}  # those from which other ranks are sent something

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See SafetensorsReader. Raises CheckpointError on all ranks."""
        near: list[ReadItem] = []
        far: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            name = self._chunk(item.storage_index.fqn, item.storage_index.index).file
            ranks = self._holders[name]
            if name in self._files:
                near.append(item)
            else:
                far.setdefault(ranks[self._group.rank % len(ranks)], []).append(item)
        requests = gather_objects(
            {rank: [_request(item) for item in items] for rank, items in far.items()}, self._group
        )
        demands = {rank: of_rank.get(self._group.rank, []) for rank, of_rank in enumerate(requests)}

        def read() -> None:
            with self._working("reading its files"):
                super(LocalReader, self).read_data(LoadPlan(near), planner)
                for of_rank in demands.values():
                    for request in of_rank:  # checks its blocks: no rank shall wait for what another cannot read
                        self._view(request)

        on_all(self._group, "checkpoint read", read)
        self._exchange(demands, far, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _path(self, name: str) -> Path:
        return self._files[name]

    def _view(self, request: _Request) -> Tensor:
        chunk = self._chunk(request.name, request.chunk)
        if chunk.file not in self._opened:
            self._opened[chunk.file] = open_tensor_file(self._files[chunk.file], self._manifest.files[chunk.file])
        return self._opened[chunk.file].read(chunk.key, chunk.dtype, chunk.box.shape, chunk.crc32, request.part)

    def _bytes(self, request: _Request) -> Tensor:
        """Returns the elements of a request, rounded to the dtype of their tensor, as bytes."""
        dtype = self._manifest.tensors[request.name].dtype
        return self._view(request).to(dtype).contiguous().view(-1).view(torch.uint8)

    def _exchange(
        self, demands: Mapping[int, Sequence[_Request]], far: Mapping[int, Sequence[ReadItem]], planner: LoadPlanner
    ) -> None:
        """Sends what other ranks have asked for and receives what this one has, tensor by tensor."""
        group, device = self._group, _device_of(self._group)
        for step in range(1, group.size):
            to, source = (group.rank + step) % group.size, (group.rank - step) % group.size
            wanted = list(far.get(source, []))
            for number in range(max(len(demands[to]), len(wanted))):
                outgoing = self._bytes(demands[to][number]).to(device) if number < len(demands[to]) else None
                target = planner.resolve_tensor(wanted[number]) if number < len(wanted) else None
                size = 0 if target is None else target.numel() * target.element_size()
                incoming = None if target is None else torch.empty(size, dtype=torch.uint8, device=device)
                send_and_receive(outgoing, to, incoming, source, group).wait()
                if target is not None and incoming is not None:
                    target.copy_(incoming.view(target.dtype).view(target.shape))


def _request(item: ReadItem) -> _Request:
    assert item.storage_index.index is not None
    part = Box(tuple(item.storage_offsets), tuple(item.lengths))
    return _Request(item.storage_index.fqn, item.storage_index.index, part)


def _device_of(group: Group) -> torch.device:
    """Returns where the tensors of messages of a group are."""
    if group.process_group is not None and dist.get_backend(group.process_group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
