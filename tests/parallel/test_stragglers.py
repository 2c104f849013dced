"""What --log-straggler adds to a run: collectives, host reads, and nothing to its numbers. What a report of a hang asks
the job's store and PyTorch's recorder.
"""

import pickle
import time
from collections import Counter

import torch
from torch.distributed import TCPStore

from megatron.core.comm.collectives import all_reduce, barrier
from megatron.core.comm.flight_record import flight_record
from megatron.core.comm.link_times import link_times
from megatron.core.groups import StoreNotice
from megatron.tooling.host_reads import host_reads
from megatron.training import stragglers
from megatron.training.loop import Callback, fit
from megatron.training.setup import build
from megatron.training.stragglers import LogStragglers
from tests import pool
from tests.unit.config.runs import SHORT_RUN, make_run
from tests.unit.models.builds import CPU

RUN = {**SHORT_RUN, "num_layers": 1, "micro_batch_size": 2, "global_batch_size": 4, "train_iters": 9, "eval_iters": 0}


class Losses(Callback):
    def __init__(self):
        self.values = []

    def after_step(self, trainer, report):
        self.values.append((report.iteration, report.loss))


def trained(rank, size, watch, late, hosts):
    """Losses, calls by kind, and host reads of a run whose only sample is step 6, if it is watched."""
    stragglers.SUSPICIOUS_SECONDS = stragglers.SAMPLE_SECONDS = 1e9
    trainer = build(make_run(**RUN), pool.groups(), CPU)
    trainer.reads_late, losses = late, Losses()
    callbacks = [LogStragglers(1, 0 if hosts == 2 else rank)] if watch else []
    with trainer.groups.heartbeat.record() as calls, host_reads() as reads:
        fit(trainer, [*callbacks, losses])
    kinds = Counter(call if call.group == "world" else (call.op, call.group) for call in calls)
    return losses.values, kinds, Counter(reads)


def test_one_gather_per_sample():
    plain = pool.run(2, trained, False, True, 1)
    watched = pool.run(2, trained, True, True, 1)
    for (losses, calls, reads), (same, more, further) in zip(plain, watched, strict=True):
        assert losses == same and len(losses) == 9
        added = {(call.op, call.dtype, call.nbytes): count for call, count in (more - calls).items()}
        flag = 4  # bytes, whether a rank wants a sample: with the flags of a step, in one all-reduce
        assert added == {
            ("gather_objects", "object", 0): 1,  # the names of hosts, once
            ("all_reduce", "float32", flag): 9,
            ("all_gather", "float64", 64): 1,
        }
        # The gathered times; the gather of objects in set-up reads by itself.
        added_reads = [place.partition(":")[0] for place in (further - reads).elements()]
        assert [place for place in added_reads if place != "core/comm/collectives.py"] == ["core/streams/host_copy.py"]


def test_links_are_timed_once_between_hosts():
    for _, calls, _ in pool.run(2, trained, True, False, 2):
        swaps = calls["swap", "link 0-1"]
        assert swaps == 2 * (1 + 3 * 2)


def timed(rank, size):
    return link_times(pool.groups().world, [[(0, 2)], [(1, 2)]], CPU)


def test_link_times():
    first, second, third = pool.run(3, timed)
    assert set(first) == {(0, 2)} and set(second) == {(1, 2)} and set(third) == {(0, 2), (1, 2)}
    assert all(0 < seconds < 5 for times in (first, second, third) for seconds in times.values())


def recorded(rank, size):
    all_reduce(torch.ones(3), pool.groups().world)
    record = pickle.loads(flight_record())
    return [(entry["profiling_name"], entry["input_sizes"]) for entry in record["entries"]][-1]


def test_the_flight_record_holds_the_last_collective():
    assert pool.run(2, recorded) == [("gloo:all_reduce", [[3]])] * 2


def claimed(rank, size, port):
    store = TCPStore("127.0.0.1", port, size, rank == 0)
    notice = StoreNotice(store)
    before = notice.read("reporter 1")
    barrier(pool.groups().world)
    claims = [notice.claim(str(rank), "reporter 1"), notice.claim("other", "reporter 1")]
    notice.leave(f"stack of {rank}", f"stack {rank}")
    deadline = time.monotonic() + 20  # the store answers a claim, and takes a word without an answer
    while (stack := notice.read(f"stack {1 - rank}")) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    words = stack, notice.read()
    barrier(pool.groups().world)  # rank 0 is the store
    return before, claims, *words


def test_one_rank_claims_a_report():
    (before, first, stack, text), (_, second, other_stack, _) = pool.run(2, claimed, pool.free_port())
    assert before is None and text is None
    assert first == second and first[0] == first[1] and first[0] in ("0", "1")
    assert (stack, other_stack) == ("stack of 1", "stack of 0")
