"""The adversarial runtime itself, on a stream of one process."""

import pytest
import torch

from megatron.core.offload.copy_engine import CopyEngine
from megatron.core.offload.host_pool import HostPool
from megatron.core.streams.streams import Streams
from megatron.core.timeline import Timeline
from tests.adversary.memory import Race
from tests.adversary.runtime import LATE, SHUFFLED
from tests.adversary.seams import adversary

CPU = torch.device("cpu")


@pytest.fixture
def streams():
    with adversary(LATE):
        yield Streams(CPU, Timeline(CPU))


def make_streams():
    return Streams(CPU, Timeline(CPU))


def test_a_function_runs_when_it_is_waited_for(streams):
    done = []
    work = streams.stream("copies").run(lambda: done.append(1), "copy")
    assert not done and not work.is_completed()
    work.wait()
    assert done and work.is_completed()


def test_work_behind_other_work_brings_it_along(streams):
    done = []
    first = streams.stream("a").run(lambda: done.append("first"), "first")
    streams.stream("b").run(lambda: done.append("second"), "second", after=[first]).wait()
    assert done == ["first", "second"]


def test_functions_of_one_stream_are_not_ordered_but_those_of_the_host_are(streams):
    done = []
    for stream in (streams.stream("copies"), streams.host_stream("jobs")):
        stream.run(lambda: done.append("first"), "first", after=())
        stream.run(lambda: done.append("second"), "second", after=()).wait()
    assert done == ["second", "first", "second"]


def test_everything_runs_in_the_end():
    done = []
    with adversary(LATE):
        make_streams().stream("copies").run(lambda: done.append(1), "copy")
    assert done


def test_shuffled_orders_differ_by_seed_and_repeat():
    def order(seed):
        done = []
        with adversary(SHUFFLED, seed):
            stream = make_streams().stream("copies")
            for number in range(6):
                stream.run(lambda number=number: done.append(number), "copy")
        return tuple(done)

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(5)}) > 1


def test_reads_and_writes_of_a_copy_in_flight(streams):
    source, target = torch.ones(4), torch.zeros(4)
    work = streams.stream("copies").run(lambda: target.copy_(source), "copy", keep=[source, target])
    source.sum()  # both only read
    target[:2].add_(1)
    with pytest.raises(Race, match=r"copies: copy writes .*; compute .* by aten.add_"):
        work.wait()


def test_a_write_before_the_submission_is_ordered_unless_other_work_is_named(streams):
    source, target = torch.ones(4), torch.zeros(4)

    def submit(**after):
        return streams.stream("copies").run(lambda: target.copy_(source), "copy", keep=[source, target], **after)

    submit().wait()
    submit(after=[streams.mark()]).wait()
    with pytest.raises(Race, match=r"copies: copy reads .*; compute writes"):
        submit(after=()).wait()


def test_the_host_is_ordered_behind_a_copy_by_synchronize_alone(streams):
    pool, source = HostPool(pinned=False), torch.ones(4)
    block, tensors = pool.take_tensors({"state": (4, torch.float32)})
    copies = CopyEngine(streams)

    def copied():
        return copies.to_host("state", [(source, tensors["state"])], block)

    copied().synchronize()
    tensors["state"].add_(1)
    copied().wait()
    with pytest.raises(Race, match=r"the host writes .*; offload: state writes"):
        tensors["state"].add_(1)


def test_the_host_writes_before_a_copy_is_over(streams):
    pool, target = HostPool(pinned=False), torch.ones(4)
    block, tensors = pool.take_tensors({"state": (4, torch.float32)})
    tensors["state"].fill_(1)
    copy = CopyEngine(streams).to_device("state", [(tensors["state"], target)], block)
    tensors["state"].fill_(2)
    with pytest.raises(Race, match=r"reload: state reads .*; the host writes"):
        copy.synchronize()


def test_parts_of_a_tensor_are_told_apart(streams):
    target = torch.zeros(8)
    stream = streams.stream("copies")
    works = [stream.run(lambda part=part: part.fill_(1), "fill", keep=[part]) for part in target.chunk(2)]
    for work in works:
        work.wait()
    assert target.sum() == 8


def test_a_tensor_that_nothing_keeps(streams):
    source, target = torch.ones(4), torch.zeros(4)
    work = streams.stream("copies").run(lambda source=source: target.copy_(source), "copy", keep=[target])
    del source
    with pytest.raises(Race, match="a tensor of copies: copy was freed before it was waited for"):
        work.wait()


def test_an_error_of_a_function_is_raised_by_wait(streams):
    work = streams.stream("copies").run(lambda: {}["missing"], "copy")
    with pytest.raises(KeyError):
        work.wait()


def test_steps_of_communication_are_taken_in_order_and_the_last_when_it_is_waited_for(streams):
    done, stream = [], streams.stream("reduce")

    def operation(name):
        done.append(f"{name} starts")
        yield []
        done.append(f"{name} ends")

    stream.submit(operation("first"), "bucket").wait()
    first, second = stream.submit(operation("second"), "bucket"), stream.submit(operation("third"), "bucket")
    assert done[2:] == ["second starts", "third starts"]
    second.wait()
    assert done[4:] == ["second ends", "third ends"]
    first.wait()


def test_communication_that_nothing_waits_for():
    def operation():
        yield []

    with pytest.raises(Race, match="nothing waited for reduce: bucket"):
        with adversary(LATE):
            make_streams().stream("reduce").submit(operation(), "bucket")
