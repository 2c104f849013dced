"""What a forward keeps for its backward, as groups of storages that move to far memory and back.

[Note: a storage moves, not a tensor]
Autograd saves tensors, often several views of one storage, with any strides. What takes memory, and what all of them keep
alive, is the storage. So a group counts each storage once, moves it as plain bytes, and makes the views anew in what came
back, strides and all. Memory is freed by letting go of it, never by resizing a storage: a message that is still being
sent, or a tensor that somebody else holds, keeps what it has.

[Note: exactly the ratio]
Of a group of n bytes floor(ratio x n) go out. Whole storages are chosen, large ones first, and one more is cut: its head
goes out, its tail waits in a tensor of its own, and both meet again in the storage that comes back.

[Note: who frees what comes back]
Each storage comes back in memory of its own, and only what autograd saved holds it. So backward gives it up node by
node, as it does without offload. A split backward lets go of what its first half used; what its second half still needs,
inputs of linear layers, their jobs hold. A staging buffer would live as long as the last tensor in it; here the ping-pong
of two is in the order of moves alone: while one group is read by backward, one other comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.memory.copier import Copier, Copy, Move
from megatron.core.memory.tiers import Block, FarMemory


class Piece:
    """One storage. `near`: uint8 [nbytes], or None while a part of it is away."""

    def __init__(self, near: Tensor, group: Group, *, movable: bool) -> None:
        self.near: Tensor | None = near
        self.nbytes, self.device, self.group, self.movable = near.numel(), near.device, group, movable
        self.head, self.start = 0, 0  # bytes that go out, and where in the group's block
        self.tail: Tensor | None = None
        self.coming: Copy | None = None

    def storage(self) -> torch.UntypedStorage:
        """Near memory with the bytes in it; waits for them if they are on their way, and fetches them if they are not."""
        if self.near is None:
            self.group.reload()
        if self.coming is not None:
            self.coming.wait()
            self.coming = self.tail = None
        assert self.near is not None
        return self.near.untyped_storage()


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd keeps of a saved tensor: a view of a piece."""

    piece: Piece
    group: Group  # that saved it, which may not be the one that moves the piece
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor, in near memory."""
        self.group.enter()
        storage = self.piece.storage()
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """What autograd keeps of a saved tensor that is a part of a parameter which comes and goes: not its memory.

    Autograd hands hooks an alias of a leaf. Kept, that would hold the whole bucket until backward.
    """

    parameter: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the parameter's beginning

    def tensor(self) -> Tensor:
        """The tensor in the memory of this moment. Backward has brought the parameter."""
        data = self.parameter.detach()
        assert data.numel(), f"backward reads a parameter that is not there: {self}"
        return data.as_strided(self.shape, self.stride, int(data.storage_offset()) + self.offset)


class Group:
    """Storages that go out together and come back together: of a stage's microbatch, or of one layer of it."""

    def __init__(self, name: str, copier: Copier, far: FarMemory, on_enter: Callable[[], None] | None = None) -> None:
        """`on_enter`: called when backward first asks for something of the group."""
        self.name, self.total, self.away = name, 0, 0
        self._copier, self._far, self._on_enter = copier, far, on_enter
        self._pieces: list[Piece] = []
        self._block: Block | None = None
        self._leaving: Copy | None = None

    def add(self, near: Tensor, *, movable: bool) -> Piece:
        """A storage that the group did not hold yet, as uint8 [nbytes]."""
        piece = Piece(near, self, movable=movable)
        self._pieces.append(piece)
        self.total += piece.nbytes
        return piece

    @property
    def movable(self) -> int:
        """Bytes that may be moved, before `start_out`."""
        return sum(piece.nbytes for piece in self._pieces if piece.movable)

    def take_over(self, piece: Piece, near: Tensor) -> None:
        """A storage, `near`, that an earlier group has saved as well. Backward comes to this group first: it moves here."""
        before = piece.group
        before._pieces = [other for other in before._pieces if other is not piece]
        before.away -= piece.head
        # Whoever saved it again had it in near memory, wherever it was to be.
        piece.near, piece.tail, piece.head, piece.group = near, None, 0, self
        self._pieces.append(piece)

    def enter(self) -> None:
        """Backward asks for something of the group."""
        if self._on_enter is not None:
            called, self._on_enter = self._on_enter, None
            called()

    def start_out(self, nbytes: int) -> None:
        """Start to move exactly so many bytes, of pieces that may be moved."""
        movable = [piece for piece in self._pieces if piece.movable]
        for piece, head in zip(movable, split([piece.nbytes for piece in movable], nbytes), strict=True):
            piece.head = head
        if nbytes == 0:
            self._pieces = []  # only autograd holds them now
            return
        self._block = self._far.take(nbytes)
        moves, start = list[Move](), 0
        for piece in movable:
            if piece.head:
                assert piece.near is not None
                piece.start, start = start, start + piece.head
                moves.append((piece.near[: piece.head], self._block.bytes[piece.start : start]))
        self._pieces = [piece for piece in movable if piece.head]
        self._leaving, self.away = self._copier.out(self.name, moves, self._block), nbytes

    def finish_out(self) -> None:
        """Give up near memory of what has left, when it has."""
        if self._leaving is None:
            return
        self._leaving.wait()
        self._leaving = None
        for piece in self._pieces:
            assert piece.near is not None
            if piece.head < piece.nbytes:
                piece.tail = piece.near[piece.head :].clone()
            piece.near = None

    def reload(self) -> None:
        """Start to bring back what is away. What has not left yet stays: it is there."""
        if self._block is None:
            return
        pieces, block, self._pieces, self._block = self._pieces, self._block, [], None
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
        else:
            self._bring(pieces, block)
        self._far.give(block)

    def _bring(self, pieces: Iterable[Piece], block: Block) -> None:
        moves, brought = list[Move](), list[Piece]()
        for piece in pieces:
            near = torch.empty(piece.nbytes, dtype=torch.uint8, device=piece.device)
            moves.append((block.bytes[piece.start : piece.start + piece.head], near[: piece.head]))
            if piece.tail is not None:
                moves.append((piece.tail, near[piece.head :]))
            piece.near = near
            brought.append(piece)
        copy = self._copier.back(self.name, moves, block)
        for piece in brought:
            piece.coming = copy


def split(sizes: Sequence[int], nbytes: int) -> list[int]:
    """How much of each piece goes out, `nbytes` in all: large ones whole while they fit, then the head of a small one."""
    heads, left = [0] * len(sizes), nbytes
    by_size = sorted(range(len(sizes)), key=lambda number: sizes[number], reverse=True)
    for number in by_size:
        if sizes[number] <= left:
            heads[number] = sizes[number]
            left -= sizes[number]
    if left:
        # All that did not fit are larger than what is left.
        smallest = next(number for number in reversed(by_size) if not heads[number])
        heads[smallest] = left
    return heads


class Storages:
    """The storages of one forward, found again by what they are while they live."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, Piece]] = {}

    def find(self, storage: torch.UntypedStorage) -> Piece | None:
        """The piece of a storage that has been seen; None for one that is new, though it may have the address of a
        dead one."""
        known = self._known.get(storage._cdata)
        return None if known is None or known[0].expired() else known[1]

    def remember(self, storage: torch.UntypedStorage, piece: Piece) -> None:
        """Without keeping it alive."""
        self._known[storage._cdata] = (StorageWeakRef(storage), piece)
