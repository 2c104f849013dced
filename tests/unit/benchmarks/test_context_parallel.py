"""The arithmetic of the context-parallel table, and what it counts."""

import pytest
import torch

from benchmarks.cluster import context_parallel, context_worker
from benchmarks.cluster.context_parallel import HEADER, WAYS, check_same, line, make_rows, rate_for
from benchmarks.cluster.fleet import FleetError
from megatron.config.model import ModelConfig
from megatron.kernels.choose import choose_kernels


def test_driver_and_worker_mean_the_same_layer():
    """The driver imports no torch."""
    shapes = [(of.SEQUENCE, of.HIDDEN) for of in (context_parallel, context_worker)]
    assert shapes[0] == shapes[1]
    assert tuple(context_worker.WAYS) == WAYS
    assert context_worker.__name__ == context_parallel.WORKER


def test_rate():
    # A rank's keys and values: 2 x 4096 x 128 fp32 are 4.2 MB; at 70 % of 0.1 s that is 479 Mbit/s.
    assert rate_for(0.7, 0.1, 2) == pytest.approx(2 * 4096 * 128 * 4 * 8e-6 / 0.07)
    assert rate_for(0.7, 0.1, 4) == pytest.approx(rate_for(0.7, 0.1, 2) / 2)


def ranks_of(**seconds):
    def rank(factor):
        return {
            name: {
                "seconds": [factor * t for t in times],
                "alone": [factor * 1.0] * 3,
                "sent": [8e6] * 3,
                "gradient": 2.0,
            }
            for name, times in seconds.items()
        }

    return [rank(0.5), rank(1.0)]


TIMES = {name: [1.5, 2.0, 1.25] for name in WAYS}


def test_rows():
    flops = [{"p2p": 100}, {"p2p": 101}]
    rows = make_rows(2, 250.0, {name: name for name in WAYS}, ranks_of(**TIMES), flops)
    ring, peer = rows[0], rows[-1]
    assert (ring.step, ring.alone, ring.exposed, ring.share) == (1.5, 1.0, 0.5, pytest.approx(1 / 3))
    assert ring.at_best == pytest.approx(0.2)
    assert ring.flops == [100, 101] and peer.flops == []
    assert len(line(ring)) == len(HEADER)
    assert line(ring).split()[-1] == "1.00%"
    assert line(peer).split()[-2:] == ["20.0%", "8.0"]


def test_ways_must_agree():
    ranks = ranks_of(**TIMES)
    check_same(ranks)
    ranks[1]["a2a"]["gradient"] = 2.001
    with pytest.raises(FleetError, match="a2a computes another gradient on rank 1 than p2p"):
        check_same(ranks)


def test_counted_flops():
    """Causal attention of s tokens is s (s + 1) / 2 pairs, 14 d FLOPs each in forward and backward."""
    counter = context_worker.Counter()
    kernels = counter.wrap(choose_kernels(ModelConfig(**context_worker.SHAPE), torch.device("cpu")))
    x = torch.randn(6, 1, 4, 8)
    kernels.attention(x, x, x, scores=context_worker.SCORES, segments=None, window=None, dropout=0.0)
    assert counter.flops == 14 * 8 * 4 * 21
