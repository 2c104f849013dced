"""Where the adversarial runtime takes the place of the real one. These names of megatron/ are all that it replaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from megatron.core.comm import all_to_all, bucket_comm, collectives, p2p, pairwise, pipeline_messages, transport
from megatron.core.offload.host_pool import HostPool
from megatron.core.streams.streams import Streams
from megatron.kernels.backends import cpu_adam
from tests.adversary.runtime import Runtime
from tests.adversary.streams import AdversarialStream, Marked
from tests.adversary.transfers import Distributed, Transfer


@contextlib.contextmanager
def adversary(mode: str, seed: int = 0) -> Iterator[Runtime]:
    """All asynchronous work of this process that is submitted in the body is done late, or shuffled; see the package.

    mode: LATE or SHUFFLED. The model, its streams and its memory must be made in the body. Raises Race where a race is
    found, and at the end for communication that nothing waited for.
    """
    runtime = Runtime(mode, seed)
    with contextlib.ExitStack() as stack:
        for owner, name, value in _replacements(runtime):
            stack.enter_context(mock.patch.object(owner, name, value))
        with runtime.watching():
            yield runtime


def _replacements(runtime: Runtime) -> Iterator[tuple[Any, str, Any]]:
    yield Streams, "stream", lambda self, name, **options: AdversarialStream(runtime, name, is_host=False)
    yield Streams, "host_stream", lambda self, name: AdversarialStream(runtime, name, is_host=True)
    yield Streams, "mark", lambda self: Marked(runtime)
    distributed = Distributed(runtime)
    for module in (all_to_all, collectives, p2p, pipeline_messages):
        yield module, "dist", distributed
    for module in (pairwise, transport):
        yield module, "receive", distributed.receive
        yield module, "send", distributed.send
    gather = collectives.gather_into
    yield (
        collectives,
        "gather_into",
        lambda full, shard, *, group, async_op: distributed.gather_into(gather, full, shard, group=group),
    )
    plain = collectives.in_flight
    for module in (all_to_all, bucket_comm, collectives, p2p, pipeline_messages):
        yield module, "in_flight", lambda *args, **kwargs: _named(plain(*args, **kwargs))
    yield HostPool, "_allocate", _allocating(runtime)
    yield cpu_adam, "step", _stepping(runtime)


def _named(handle: collectives.Handle) -> collectives.Handle:
    for transfer in (handle.work, *getattr(handle.work, "_works", ())):
        if isinstance(transfer, Transfer):
            transfer.title.text = f"{handle.op} on {handle.group.name}"
    return handle


def _allocating(runtime: Runtime) -> Any:
    plain = HostPool._allocate

    def allocate(pool: HostPool, nbytes: int) -> Any:
        block = plain(pool, nbytes)
        runtime.memory.put_on_host(block.bytes)
        return block

    return allocate


def _stepping(runtime: Runtime) -> Any:
    """The compiled update, which torch's dispatcher does not see."""
    plain = cpu_adam.step

    def step(param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, out: Any, coefficients: Any) -> None:
        written = [tensor for tensor in (param, exp_avg, exp_avg_sq, out) if tensor is not None]
        agent = runtime.agent_of([grad, *written])
        runtime.memory.access(grad, agent, "cpu_adam", writes=False)
        for tensor in written:
            runtime.memory.access(tensor, agent, "cpu_adam", writes=True)
        plain(param, grad, exp_avg, exp_avg_sq, out, coefficients)

    return step
