"""When backward hands gradients over: each bucket is reduced during backward, and every hook runs on one thread.

On CUDA that thread is autograd's own for the device: what the hooks queue stays in one order, and needs no lock.
"""

import threading
from unittest import mock

import pytest

from megatron.core.distributed.bucket import Bucket
from tests import pool
from tests.unit.models.builds import CPU, GPT, LLAMA, losses, make_data_parallel, make_ids, make_model

MODELS = {"llama": LLAMA, "gpt": GPT}


def assert_buckets_leave_during_backward(fields, device):
    """Notes (what, thread) in order: "gradient" of a parameter, "reduction" of a bucket, "end" of autograd's part."""
    events = []

    def note(what, function):
        def noted(*args, **options):
            events.append((what, threading.get_ident()))
            return function(*args, **options)

        return noted

    model = make_model(fields, pool.groups(), device=device)
    data_parallel = make_data_parallel(model, pool.groups(), bucket_size=1000, overlap_reduce=True)
    for parameter in model.parameters():
        parameter.slot.written = note("gradient", parameter.slot.written)
        parameter.register_post_accumulate_grad_hook(note("gradient", lambda parameter: None))
    data_parallel.begin_step(1)
    data_parallel.begin_backward(last=True)
    loss = losses(model, make_ids(2, 16).to(device)).sum()
    with mock.patch.object(Bucket, "fill_missing", note("reduction", Bucket.fill_missing)):
        loss.backward()
        events.append(("end", threading.get_ident()))
        data_parallel.end_backward(last=True)
    data_parallel.finish_reduction()
    happened, buckets = [what for what, _ in events], len(data_parallel.buckets)
    assert buckets > 3 and happened.count("reduction") == buckets
    assert happened[-1] == "end", "end_backward has nothing left to reduce"
    last_gradient = len(happened) - 1 - happened[::-1].index("gradient")
    assert happened[:last_gradient].count("reduction") >= buckets - 2, "they do not wait for the last gradient"
    assert len({thread for what, thread in events if what != "end"}) == 1


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_buckets_leave_during_backward(fields):
    assert_buckets_leave_during_backward(fields, CPU)
