"""Bytes of the tensors that operations of this thread have made and that are still alive: storage by storage."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`now` at any time; `peak` over all moments at which an operation had just made something."""

    def __init__(self):
        super().__init__()
        self._known, self._at_most, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        new = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for storage in new:
            if storage._cdata not in given:
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._at_most += storage.nbytes()
        if self._at_most > self.peak:  # else the dead need not be told from the living
            self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self):
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        self._at_most = sum(nbytes for _, nbytes in self._known.values())
        return self._at_most
