"""Graphs on the CPU: torch's operations are recorded at the capture, and run again on the same tensors at a replay.

A capture runs its function, because the CPU has no other way to record it, and then gives back what it wrote to tensors
from outside. It refuses what a CUDA graph cannot repeat: a value that the host reads, and random numbers. Before each
replay all tensors that were made in the capture are filled with NaN, so a result cannot come from the capture or from
another replay.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_HOST_READS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2")
_RANDOM = ("rand", "bernoulli", "dropout", "normal_", "uniform_", "exponential_")


class NotRepeatable(AssertionError):
    """The captured function does something that a graph cannot repeat."""


class FakePool:
    """See GraphPool. `log` gets the number of every graph that is replayed, in the order of captures."""

    def __init__(self, log=None):
        self.log, self.graphs = [] if log is None else log, []

    def graph(self):
        self.graphs.append(FakeGraph(self, len(self.graphs)))
        return self.graphs[-1]


class FakeGraph:
    """See Graph."""

    def __init__(self, pool, number):
        self._pool, self._number, self._recording = pool, number, None

    def capture(self, function):
        assert self._recording is None, "a graph is captured once"
        self._recording = _Recording()
        with self._recording:
            result = function()
        self._recording.undo()
        return result

    def replay(self):
        self._pool.log.append(("replay", self._number))
        self._recording.replay()


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self._calls, self._made, self._before = [], {}, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.name().removeprefix("aten::")
        if name.split(".")[0] in _HOST_READS:
            raise NotRepeatable(f"the host reads a value of the device: {name}")
        if name.startswith(_RANDOM):
            raise NotRepeatable(f"{name} would draw the same numbers at every replay")
        read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        for tensor in _written(function, args, kwargs):
            if _place(tensor) not in self._made and _place(tensor) not in self._before:
                self._before[_place(tensor)] = tensor.detach(), tensor.detach().clone()
        out = function(*args, **kwargs)
        known = {_place(each) for each in read}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _place(tensor) not in known:
                self._made.setdefault(_place(tensor), tensor.detach())
        self._calls.append((function, args, kwargs, out))
        return out

    def undo(self):
        """What the capture wrote to tensors from outside."""
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for tensor, before in self._before.values():
                tensor.copy_(before)

    def replay(self):
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for tensor in self._made.values():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
            for function, args, kwargs, recorded in self._calls:
                _copy(function(*args, **kwargs), recorded)


def _copy(found, recorded):
    """The results of an operation to where its first run put them; messages are waited for."""
    for new, old in zip(tree_leaves(found), tree_leaves(recorded), strict=True):
        if isinstance(new, torch.Tensor):
            if _place(new) != _place(old):
                old.copy_(new)
        elif isinstance(new, torch.ScriptObject):
            torch.distributed.Work.unbox(new).wait()


def _written(function, args, kwargs):
    """The tensors that an operation changes in place; of a message all that it is given."""
    if function.namespace == "c10d":
        return [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    arguments = function._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args)} | kwargs
    changed = [given[each.name] for each in arguments if each.is_write and each.name in given]
    return [each for each in tree_leaves(changed) if isinstance(each, torch.Tensor)]


def _place(tensor):
    return tensor.untyped_storage().data_ptr() or id(tensor)
