"""Instruction data under every layout: the same losses and weights as on one process, packed or not."""

import functools

import pytest

from megatron.config.data import DataConfig
from megatron.training.batch import BatchReader
from megatron.training.logging.timers import Timers
from megatron.training.step import TrainStep, token_weights
from tests import pool
from tests.parallel.strategies import DECAY, LR, STRATEGIES, make_run, whole
from tests.unit.models.builds import CPU, LLAMA, take_step
from tests.unit.training.conversations import alone, make_conversations, packed

S, STEPS, ACCUMULATION = 24, 3, 2
LIMIT = 1e-5  # other layouts and packings: products of other shapes, sums in another order
CONVERSATIONS = [make_conversations(12, S, seed) for seed in range(STEPS)]


def samples(packing):
    """[samples of a global batch, 3, s] of every step. Twelve and eight can be dealt to 1, 2 or 4 replicas."""
    return [packed(made, S, 8) if packing else alone(made, S) for made in CONVERSATIONS]


def trained(rank, size, settings, tp, sequence_parallel, packing, per_token):
    """(losses, weights) of a few steps of this rank."""
    run = make_run(settings, fields=LLAMA, tp=tp, sequence_parallel=sequence_parallel)
    groups = run.groups
    step = TrainStep(run.model, run.data_parallel, run.optimizer, groups, Timers(0, lambda: None), per_token=per_token)
    dp, mine = groups.dp.size, groups.dp.rank
    micro = [part for rows in samples(packing) for part in rows.chunk(dp)[mine].chunk(ACCUMULATION)]
    reader = BatchReader(
        iter(micro) if groups.tp.rank == 0 else None,  # the others get what they need by the broadcast
        DataConfig(seq_length=S, sft=True),
        eod=0,
        micro_batch_size=len(micro[0]),
        groups=groups,
        device=CPU,
    )
    losses = [take_step(step, reader.read(ACCUMULATION), LR, DECAY)[0] for _ in range(STEPS)]
    return losses, run.weights()


@functools.cache
def expected(packing, per_token):
    ((losses, weights),) = pool.run(1, trained, {}, 1, False, packing, per_token)
    return losses, whole([weights])


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("world", "tp", "sequence_parallel", "strategy", "packing"),
    [
        (2, 1, False, "plain", True),
        (2, 1, False, "plain", False),
        (2, 2, False, "plain", True),
        (2, 2, True, "plain", True),
        (2, 1, False, "optim, overlapped", True),
        (4, 2, True, "optim, overlapped", True),
        (4, 1, False, "params", True),
    ],
)
def test_training_is_that_of_one_process(world, tp, sequence_parallel, strategy, packing, per_token):
    losses, weights = expected(packing, per_token)
    ranks = pool.run(world, trained, STRATEGIES[strategy], tp, sequence_parallel, packing, per_token)
    assert all(found == pytest.approx(losses, rel=LIMIT) for found, _ in ranks)
    found = whole([pieces for _, pieces in ranks])
    far = {name: float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in weights.items()}
    assert max(far.values()) <= LIMIT, far


@pytest.mark.parametrize("per_token", [False, True])
def test_packing_changes_nothing(per_token):
    for found, other in zip(expected(True, per_token)[0], expected(False, per_token)[0], strict=True):
        assert found == pytest.approx(other, rel=LIMIT)


def calls(rank, size, packing):
    """Collectives of reading a step's data and weighing its tokens."""
    groups = pool.groups(tp=2)
    rows = samples(packing)[0].chunk(groups.dp.size)[groups.dp.rank]
    loader = iter([rows]) if groups.tp.rank == 0 else None
    data = DataConfig(seq_length=S, sft=True)
    reader = BatchReader(loader, data, eod=0, micro_batch_size=len(rows), groups=groups, device=CPU)
    with groups.heartbeat.record() as found:
        batches = reader.read(1)
        weights = token_weights(batches, groups, False)
    return [(call.op, call.group) for call in found], float(weights[0].sum())


@pytest.mark.parametrize("packing", [True, False])
def test_one_broadcast_and_one_number(packing):
    ranks = pool.run(4, calls, packing)
    assert all(found == [("broadcast", "tp"), ("all_reduce", "dp")] for found, _ in ranks)
    assert ranks[0][1] + ranks[2][1] == pytest.approx(1.0)
