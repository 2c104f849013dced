"""Messages between pipeline ranks: what is kept and for how long, when spans end."""

import time
import weakref
from collections import Counter

import pytest
import torch

from megatron.core.comm.pipeline_messages import Mailbox
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from tests import pool
from tests.parallel.test_pipeline_checkpoints import built, pipeline
from tests.unit.models.builds import CPU

LATE = 0.4


def box_of(size):
    groups, timeline = pool.groups(pp=size), Timeline(CPU)
    return groups, Mailbox(groups, Streams(CPU, timeline)), timeline


def both_ways(rank, size):
    """A few messages to every other rank at once, each way in order."""
    _, box, _ = box_of(size)
    others = [peer for peer in range(size) if peer != rank]
    coming = {peer: [box.receive((3,), torch.float32, peer, str(n)) for n in range(3)] for peer in others}
    for n in range(3):
        for peer in others:
            box.send(torch.full((3,), 100.0 * rank + n), peer, str(n))
    found = {peer: [float(message.take().unique()) for message in coming[peer]] for peer in others}
    box.flush()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_each_way_keeps_its_order(size):
    for rank, found in enumerate(pool.run(size, both_ways)):
        assert found == {peer: [100.0 * peer + n for n in range(3)] for peer in range(size) if peer != rank}


def freed(rank, size):
    """Whether what was sent is still held: after the first of two messages has been received, and after both."""
    groups, box, _ = box_of(size)
    held = []
    if rank == 0:
        tensors = [torch.ones(4) for _ in range(2)]
        seen = [weakref.ref(tensor) for tensor in tensors]
        for number in range(2):
            box.send(tensors[number], 1, str(number))
        del tensors
    for number in range(2):
        if rank == 1:
            box.receive((4,), torch.float32, 0, str(number)).take()
        torch.distributed.barrier(groups.pp.process_group)
        if rank == 0:
            time.sleep(0.1)
            held.append([ref() is not None for ref in seen])
        torch.distributed.barrier(groups.pp.process_group)
    box.flush()
    return held


@pytest.mark.alone
def test_a_message_is_freed_when_it_has_left():
    """Not at the end of the step: a schedule's activations would all be kept until then."""
    assert pool.run(2, freed)[0] == [[False, True], [False, False]]


def timed(rank, size):
    """Rank 0 sends at once what rank 1 asks for late; then asks at once for what rank 1 sends late, and needs it
    later."""
    groups, box, timeline = box_of(size)
    torch.distributed.barrier(groups.pp.process_group)
    timeline.start()
    if rank == 0:
        box.send(torch.ones(4), 1, "out")
        message = box.receive((4,), torch.float32, 1, "back")
        time.sleep(3 * LATE)
        message.take()
    else:
        time.sleep(LATE)
        box.receive((4,), torch.float32, 0, "out").take()
        box.send(torch.ones(4), 0, "back")
    box.flush()
    return {span.name: (span.start, span.stop) for span in timeline.stop()}


@pytest.mark.alone
def test_spans_end_when_the_message_has_moved():
    """Neither when the sender next looks, nor when the receiver at last needs it."""
    spans = pool.run(2, timed)[0]
    assert set(spans) == {"send out", "receive back"}
    for start, stop in spans.values():
        assert start < LATE / 2 and LATE * 0.9 < stop < 2 * LATE


def recorded(rank, size, fields):
    """(op, group, shape) of what a training step sends and of its all-reduces on pp and on both ends."""
    trainer = built(size, fields)
    trainer.train_step()
    with trainer.groups.heartbeat.record() as calls:
        trainer.train_step()
    return Counter((call.op, call.group, call.shape) for call in calls if call.group.startswith(("pp", "ends")))


# Activations and gradients that each rank sends a microbatch.
SENDS = {
    "1f1b": [(1, 0), (0, 1)],
    "zb-h1": [(1, 0), (1, 1), (1, 1), (0, 1)],
    "interleaved": [(2, 1), (2, 2), (2, 2), (1, 2)],
    "zb-v": [(1, 1), (2, 2), (2, 2), (1, 1)],
}


@pytest.mark.parametrize("schedule", SENDS)
def test_the_messages_of_a_step(schedule):
    """As docs/sharding.md has them: four microbatches [16, 3, 32], one embedding [120, 32] on both ends."""
    size = len(SENDS[schedule])
    fields = pipeline(size, schedule, 2 if schedule == "interleaved" else None)
    found = pool.run(size, recorded, fields)
    received = Counter()
    for rank, (calls, (activations, gradients)) in enumerate(zip(found, SENDS[schedule], strict=True)):
        sent = sum(count for (op, group, _), count in calls.items() if op == "send" and group.startswith(f"pp {rank}>"))
        assert sent == 4 * (activations + gradients)
        assert {shape for op, _, shape in calls if op in ("send", "receive")} == {(16, 3, 32)}
        received.update({group: count for (op, group, _), count in calls.items() if op == "receive"})
        assert [count for (op, group, _), count in calls.items() if (op, group) == ("all_reduce", "pp")] == [1]
        tied = [(shape, count) for (op, group, shape), count in calls.items() if (op, group) == ("all_reduce", "ends")]
        on_both_ends = schedule != "zb-v" and rank in (0, size - 1)
        assert tied == ([((120 * 32,), 1)] if on_both_ends else [])
    sends = Counter()
    for calls in found:
        sends.update({group: count for (op, group, _), count in calls.items() if op == "send"})
    assert sends == received
