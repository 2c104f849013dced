"""Sees every kernel that torch's dispatcher runs on a thread, with the tensors that it reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from tests.adversary.runtime import Runtime

# They allocate or describe, and read nothing but shapes.
_ALLOCATE = ("empty", "zeros", "ones", "full", "rand", "arange", "scalar_tensor")
_READ = ("aten._local_scalar_dense", "aten.equal")
_DESCRIBE = ("set_", "resize_", "is_same_size", "record_stream", "pin_memory", "is_pinned")


class _Plan(NamedTuple):
    """allocates: its arguments are not read. writes: by position, and by name."""

    allocates: bool
    by_position: tuple[bool, ...]
    by_name: dict[str, bool]


class Watch(TorchDispatchMode):
    """Reports the accesses of the calling thread's kernels to a runtime. Transfers report their own (transfers.py)."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch imports its compiler to skip it, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plan = _plan(func)
        if plan is None:
            return func(*args, **kwargs)
        reads, writes = _tensors_of(plan, args, kwargs)
        name, memory = str(func), self._runtime.memory
        agent = self._runtime.agent_of([*reads, *writes])
        if not plan.allocates:
            for tensor in reads:
                memory.access(tensor, agent, name, writes=False)
        for tensor in writes:
            memory.access(tensor, agent, name, writes=True)
        result = func(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        on_host = [memory.is_on_host(tensor) for tensor in (*reads, *writes)]
        for tensor in _flat([result]):
            if tensor.untyped_storage()._cdata not in given:
                memory.allocated(tensor, agent, host=agent is self._runtime.host)
                if not plan.allocates or "empty" not in name:
                    memory.access(tensor, agent, name, writes=True)
        # CUDA blocks the host for a copy between the two, and to read a number.
        if (writes and any(on_host)) or name.startswith(_READ):
            self._runtime.host_waits_for_compute(agent)
        return result


@functools.cache
def _plan(func: Any) -> _Plan | None:
    """None for what accesses no memory: views, and calls that only describe."""
    schema, name = func._schema, func._schema.name.rpartition("::")[2]
    if func.namespace != "aten":  # of torch.distributed, whose synchronous calls alone come here
        return None
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    if (views and not any(writes)) or name in _DESCRIBE:
        return None
    kind = name.removeprefix("new_").removeprefix("_").removesuffix("_like")
    allocates = kind.startswith(_ALLOCATE) and not any(writes)
    named = {argument.name: write for argument, write in zip(schema.arguments, writes, strict=True)}
    return _Plan(allocates, tuple(writes), named)


def _tensors_of(plan: _Plan, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for value, write in zip(args, plan.by_position):
        found[write].extend(_flat([value]))
    for key, value in kwargs.items():
        found[plan.by_name.get(key, False)].extend(_flat([value]))
    return found


def _flat(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _flat(value)
