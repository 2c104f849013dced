"""Eight steps under every way of sharing and overlapping: the same losses and the same parameters in the end."""

import functools

import pytest

from megatron.config.data_parallel import AUTO
from megatron.core import device
from megatron.core.distributed import data_parallel
from tests import pool
from tests.parallel.strategies import FEW, STRATEGIES, make_run, whole
from tests.unit.models.builds import GPT, LLAMA

STEPS = 8
# Of the same numbers added in another order, after a few steps; and of other layouts, where products have other shapes,
# too.
REORDERED, OTHER_LAYOUT = 1e-6, 1e-5
TIED = {**GPT, "num_layers": 1}
SMALL = {**LLAMA, "num_layers": 1}


def trained(rank, size, names, accumulation, options):
    """Name -> (losses, gradient norms, weights) of runs one after the other: a rank's part."""
    found = {}
    for name in names:
        run = make_run({**STRATEGIES[name], **options.get("settings", {})}, **options.get("run", {}))
        losses, norms = run.steps(STEPS, accumulation)
        found[name] = losses, norms, run.weights()
    return found


def results(world, names, accumulation=1, *, settings=None, **run):
    """Name -> (losses, norms, name -> global weight), the same on all ranks."""
    options = {"settings": settings or {}, "run": {"fields": SMALL, **run}}
    ranks = pool.run(world, trained, names, accumulation, options)
    for name in names:
        assert all(rank[name][:2] == ranks[0][name][:2] for rank in ranks), "ranks report different losses or norms"
    return {name: (*ranks[0][name][:2], whole([rank[name][2] for rank in ranks])) for name in names}


@functools.cache
def plain(world, accumulation=1):
    return results(world, ("plain",), accumulation)["plain"]


@functools.cache
def side_by_side(world, accumulation):
    return results(world, tuple(STRATEGIES) if world == 3 else ("plain, overlapped", *FEW), accumulation)


def assert_identical(found, expected):
    """Bit for bit, but for the last bit of a norm: its rows are added in fp64 in an order that depends on the cut."""
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], rel=1e-13)
    different = [name for name, tensor in expected[2].items() if not found[2][name].equal(tensor)]
    assert different == []


def distance(found, expected):
    """(largest relative difference of a loss, of a parameter as a vector)"""
    losses = max(abs(a - b) / b for a, b in zip(found[0], expected[0], strict=True))
    weights = max(float((found[2][n] - tensor).norm() / tensor.norm()) for n, tensor in expected[2].items())
    return losses, weights


def names_of(mode, world):
    chosen = STRATEGIES if world == 3 else ("plain, overlapped", *FEW)
    return [name for name in chosen if ("mode" in STRATEGIES[name]) == (mode == "every-microbatch")]


@pytest.mark.parametrize(
    ("world", "accumulation"), [(2, 4), *(pytest.param(world, 1, marks=pytest.mark.slow) for world in (3, 4))]
)
class TestReplicas:
    def test_same_bits_when_gradients_are_reduced_once(self, world, accumulation):
        """Sums are taken in rank order, whatever is sharded and whenever it travels."""
        found = side_by_side(world, accumulation)
        for name in names_of("last-microbatch", world):
            assert_identical(found[name], found["plain"])

    def test_reduced_after_every_microbatch(self, world, accumulation):
        """With one microbatch the same bits; with several, ranks are added first and microbatches then."""
        found = side_by_side(world, accumulation)
        names = names_of("every-microbatch", world)
        for name in names:
            assert_identical(found[name], found[names[0]])
            if accumulation == 1:
                assert_identical(found[name], found["plain"])
            else:
                losses, weights = distance(found[name], found["plain"])
                assert losses <= REORDERED and weights <= REORDERED

    def test_as_one_process(self, world, accumulation):
        for found in side_by_side(world, accumulation).values():
            losses, weights = distance(found, plain(1, accumulation))
            assert losses <= OTHER_LAYOUT and weights <= OTHER_LAYOUT


def test_it_learns():
    """Losses that do not move would hide a wrong gradient; and clipping takes part."""
    losses, norms, _ = plain(1)
    assert losses[-1] < 0.95 * losses[0] and norms[0] > 0.5


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_with_tensor_parallelism(sequence_parallel):
    """Tied embeddings, biases and norms whose gradients are parts over tp, and slices that cut them."""
    names = ("plain", "optim", "grads, overlapped", "params")
    found = results(4, names, fields=TIED, tp=2, sequence_parallel=sequence_parallel)
    for name in names:
        assert_identical(found[name], found["plain"])
    expected = results(1, ("plain",), fields=TIED)["plain"]
    # Not the weights: the bias of all keys has no gradient but rounding, which adam makes a step of.
    assert distance(found["plain"], expected)[0] <= OTHER_LAYOUT


@pytest.mark.parametrize("name", ["optim, overlapped", "grads, overlapped"])
def test_bucket_size_changes_nothing(name):
    """A bucket a parameter, several of either, and all in one."""
    found = [results(3, (name,), bucket_size=size)[name] for size in (1, 2000, 10**6)]
    for other in found[1:]:
        assert_identical(other, found[0])


def test_two_instances():
    """Four ranks, a shard on two of them each: instances are added after their ranks."""
    names = ("optim", "optim, overlapped", "grads, overlapped", "params")
    found = results(4, names, settings={"instances": 2})
    for name in names:
        assert_identical(found[name], found["optim"])
    losses, weights = distance(found["optim"], plain(4))
    assert losses <= REORDERED and weights <= REORDERED


HALF = 2.0**-8  # bf16 has 8 significant bits: a number is rounded by at most half of that of itself


def test_bf16_parameters():
    """With fp32 masters and fp32 gradients every strategy gives the same bits here, too."""
    found = results(3, FEW, fields={**SMALL, "bf16": True})
    for name in FEW:
        assert_identical(found[name], found["plain"])
    assert distance(found["plain"], plain(1))[0] <= HALF


def test_bf16_on_the_wire():
    """Each rank's gradient is off by at most 2^-9 of itself, which leaves a loss within bf16's precision of its value.

    Without shards the sum travels too, and is rounded once more.
    """
    names = ("plain", "optim", "optim, overlapped", "grads, overlapped")
    found = results(3, names, settings={"reduce_in_bf16": True})
    exact = plain(3)
    for name in names[2:]:
        assert_identical(found[name], found["optim"])
    for name in names:
        assert found[name][0] != exact[0], "nothing was rounded"
        assert distance(found[name], exact)[0] <= HALF


def automatic(rank, size, full_on):
    """[(loss, whether whole gradients are kept)] of five steps; no memory is left on rank `full_on`."""
    if rank == full_on:
        data_parallel.headroom = lambda device: 0
    try:
        run = make_run({**STRATEGIES["optim, overlapped"], "mode": AUTO}, fields=LLAMA, bucket_size=1000)
        found = [
            (*run.steps(1, MICROBATCHES, first=number)[0], run.data_parallel.keeps_grads)
            for number in range(AUTO_STEPS)
        ]
        return found, run.weights()
    finally:
        data_parallel.headroom = device.headroom


MICROBATCHES, AUTO_STEPS = 4, 5


def plainly(rank, size):
    return make_run({}, fields=LLAMA).steps(AUTO_STEPS, MICROBATCHES)[0]


@pytest.mark.parametrize("full_on", [None, 1])
def test_auto_decides_after_two_steps(full_on):
    """From then on whole gradients are kept if all ranks have the memory; the losses do not show it."""
    ranks = pool.run(3, automatic, full_on)
    losses, keeps = zip(*ranks[0][0], strict=True)
    assert keeps == (False, False, *[full_on is None] * 3)
    assert all(rank[0] == ranks[0][0] for rank in ranks)
    whole([weights for _, weights in ranks])
    (expected,) = pool.run(1, plainly)
    assert losses == pytest.approx(expected, rel=REORDERED)
