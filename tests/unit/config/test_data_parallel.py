"""What the flags of data parallelism amount to."""

import itertools

import pytest

from megatron.config.data_parallel import AUTO, EVERY, LAST, DataParallelSettings, data_parallel_settings
from megatron.config.parallel import ParallelConfig

STRATEGIES = (None, "no_shard", "optim", "optim_grads", "optim_grads_params")
SHARDED_GRADIENTS = ("optim_grads", "optim_grads_params")
MODES = (None, LAST, EVERY, AUTO)
SWITCHES = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")


def settings(**flags):
    return data_parallel_settings(ParallelConfig(**flags))


def test_by_default_nothing_is_shared_or_overlapped():
    assert settings() == DataParallelSettings()
    assert settings() == DataParallelSettings(
        shards="no_shard",
        mode=LAST,
        overlap_reduce=False,
        overlap_gather=False,
        reduce_in_bf16=False,
        instances=1,
        bucket_size=None,
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"use_distributed_optimizer": True}, {"shards": "optim"}),
        ({"overlap_grad_reduce": True}, {"overlap_reduce": True}),
        (
            {"use_distributed_optimizer": True, "overlap_param_gather": True},
            {"shards": "optim", "overlap_gather": True},
        ),
        (
            {"overlapped_distributed_optimizer": True},
            {"shards": "optim", "mode": AUTO, "overlap_reduce": True, "overlap_gather": True},
        ),
        (
            {"overlapped_distributed_optimizer": True, "grad_reduce_mode": LAST},
            {"shards": "optim", "mode": LAST, "overlap_reduce": True, "overlap_gather": True},
        ),
        (
            {"overlapped_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim"},
            {"shards": "optim", "mode": LAST, "overlap_reduce": True, "overlap_gather": True},
        ),
        (
            {"data_parallel_sharding_strategy": "optim_grads"},
            {"shards": "optim_grads", "mode": EVERY, "overlap_reduce": True},
        ),
        (
            {"data_parallel_sharding_strategy": "optim_grads_params"},
            {"shards": "optim_grads_params", "mode": EVERY, "overlap_reduce": True, "overlap_gather": True},
        ),
        (
            {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
            {"shards": "optim", "instances": 2},
        ),
        ({"grad_reduce_in_bf16": True, "ddp_bucket_size": 7}, {"reduce_in_bf16": True, "bucket_size": 7}),
    ],
)
def test_by_hand(flags, expected):
    assert settings(**flags) == DataParallelSettings(**expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(("sharded", "reduce", "gather"), itertools.product([False, True], repeat=3))
def test_every_combination(strategy, mode, overlapped, sharded, reduce, gather):
    """What each flag promises holds beside any other. Contradictions are refused by rules, before."""
    found = settings(
        data_parallel_sharding_strategy=strategy,
        grad_reduce_mode=mode,
        overlapped_distributed_optimizer=overlapped,
        **dict(zip(SWITCHES, (sharded, reduce, gather), strict=True)),
    )
    assert found.shards == (strategy or ("optim" if sharded or overlapped else "no_shard")), "the strategy by name wins"
    if mode is not None:
        assert found.mode == mode
    elif found.shards in SHARDED_GRADIENTS:
        assert found.mode == EVERY, "a shard of the gradient cannot wait for the last microbatch"
    else:
        assert found.mode == (AUTO if overlapped and strategy is None else LAST)
    assert found.overlap_reduce == (overlapped or reduce or found.mode != LAST)
    assert found.overlap_gather == (overlapped or gather or found.shards == "optim_grads_params")
    assert (found.optimizer_instances is None) == (found.shards == "no_shard")


@pytest.mark.parametrize("instances", [1, 2])
def test_instances_are_of_the_sharded_optimizer(instances):
    flags = {"num_distributed_optimizer_instances": instances}
    assert settings(**flags).optimizer_instances is None, "every rank is one"
    assert settings(**flags, use_distributed_optimizer=True).optimizer_instances == instances
