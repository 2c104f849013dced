"""Offloaded weights, and activation offload together with sharded or offloaded parameters, change no bit."""

import dataclasses

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.data_parallel import data_parallel_settings
from megatron.config.optimizer import OptimizerConfig
from megatron.config.optimizer_offload import OptimizerOffloadConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.rules.check import check
from megatron.core.distributed.bucket import Bucket
from megatron.tooling.layout_parity import reduced
from megatron.tooling.layouts import ParityLayout, under
from megatron.training.checkpoint import save_checkpoint
from megatron.training.setup import build
from megatron.training.step import evaluate
from tests import pool
from tests.parallel.strategies import boxes_of, whole
from tests.parallel.test_layout_parity import MODELS
from tests.unit.config.runs import make_run

STEPS, FEW_STEPS, LAYERS = 20, 4, 4
ALONE = ParityLayout(1, 1)
TWO = {"cpu_offloading_weights": True, "cpu_offloading_num_layers": 2}
ALL = {"cpu_offloading_weights": True, "cpu_offloading_num_layers": LAYERS}
BOTH = {"cpu_offloading_weights": True, "cpu_offloading": True, "cpu_offloading_num_layers": 2}
RATIO = {**TWO, "pipeline_offload_ratio": "1"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
GEMM_LAST = {"kaimm_recompute_norm": True, "kaimm_recompute_mlp_activation_func": True}
ZERO_1 = {"overlapped_distributed_optimizer": True, "grad_reduce_mode": "last-microbatch"}
ZERO_3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
CPU_UPDATES = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_chunk_size": 1024,
    "overlap_cpu_optimizer_d2h_h2d": True,
}
SOME_ON_CPU = {**CPU_UPDATES, "optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": False}
STATES_OFFLOADED = {"offload_optimizer_states": True, "optimizer_offload_chunk_size": 1024}
REMAINDERS = {"main_params_dtype": "bf16", "use_precision_aware_optimizer": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """offloaded: flags of the offload. both: fields of this run and of the one that it is compared with."""

    offloaded: dict
    both: dict = dataclasses.field(default_factory=dict)
    layout: ParityLayout = ALONE
    accumulation: int = 1
    family: str = "llama"
    bf16: bool = False
    dropout: float = 0.1

    def run(self, *, offloaded, **checkpoint):
        fields = {**self.both, "ddp_bucket_size": 4000}  # some end within a layer
        run = reduced(make_run(**MODELS[self.family]), STEPS)
        small = {"num_layers": LAYERS, "hidden_size": 32, "kv_channels": 8, "ffn_hidden_size": 32, "bf16": self.bf16}
        rates = {"hidden_dropout": self.dropout, "attention_dropout": self.dropout}
        offload = OptimizerOffloadConfig(**_fields_of(OptimizerOffloadConfig, fields))
        parallel = dataclasses.replace(run.parallel, **_fields_of(type(run.parallel), fields))
        samples = self.accumulation * self.layout.dp
        run = dataclasses.replace(
            run,
            model=dataclasses.replace(run.model, **small, **rates),
            train=dataclasses.replace(run.train, global_batch_size=samples, micro_batch_size=1),
            optimizer=dataclasses.replace(run.optimizer, **_fields_of(OptimizerConfig, fields)),
            optimizer_offload=offload,
            parallel=parallel,
            recompute=RecomputeConfig(**_fields_of(RecomputeConfig, fields)),
            activation_offload=ActivationOffloadConfig(**self.offloaded if offloaded else {}),
            checkpoint=dataclasses.replace(run.checkpoint, **checkpoint),
        )
        run = under(run, self.layout)
        check(run, self.layout.world_size)
        return run


def _fields_of(part, fields):
    known = {field.name for field in dataclasses.fields(part)}
    return {name: value for name, value in fields.items() if name in known}


def built(run):
    parallel = run.parallel
    groups = pool.groups(
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        instances=data_parallel_settings(parallel).optimizer_instances,
    )
    return build(run, groups, torch.device("cpu"))


def trained(rank, size, run, steps=STEPS):
    """(losses, weights, offloaded buckets, unsharded ones at once)"""
    trainer = built(run)
    alive = Alive()
    with alive:
        losses = [trainer.train_step().loss for _ in range(steps)]
    trainer.data_parallel.synchronize()
    offloaded = [bucket for bucket in trainer.data_parallel.buckets if bucket.offloaded is not None]
    assert all(p.numel() == 0 for bucket in offloaded for p in bucket.parameters.values())
    return losses, boxes_of(trainer.data_parallel), len(offloaded), alive.most


class Alive:
    """`most`: the largest number of unsharded buckets that were in memory at once, whatever held them."""

    def __enter__(self):
        self.most, self._made, self._plain = 0, [], Bucket.unshard
        alive = self

        def unshard(bucket):
            copy = alive._plain(bucket)
            alive._made.append(StorageWeakRef(bucket.whole.untyped_storage()))
            alive._made = [made for made in alive._made if not made.expired()]
            alive.most = max(alive.most, len(alive._made))
            return copy

        Bucket.unshard = unshard

    def __exit__(self, *error):
        Bucket.unshard = self._plain


CASES = {
    "fp32": Case(TWO),
    "bf16, all layers, 4 microbatches": Case(ALL, accumulation=4, bf16=True),
    "activations too, 4 microbatches": Case(BOTH, accumulation=4),
    "full recompute, activations by ratio": Case(RATIO, FULL),
    "GEMM-last, bf16, tied, biases": Case(BOTH, GEMM_LAST, family="gpt", bf16=True),
    "CPU updates, overlapped": Case(TWO, CPU_UPDATES, bf16=True),
    "CPU updates, fp32": Case(ALL, CPU_UPDATES),
    "half of the updates on the CPU": Case(ALL, SOME_ON_CPU, bf16=True, accumulation=2),
    "states in host memory": Case(TWO, STATES_OFFLOADED),
    "masters as remainders": Case(TWO, REMAINDERS, bf16=True),
}
PAIRS = {
    "ZeRO-3": Case(TWO, ZERO_3, ParityLayout(1, 2), accumulation=4),
    "ZeRO-3, bf16, activations, CPU updates": Case(BOTH, {**ZERO_3, **CPU_UPDATES}, ParityLayout(1, 2), bf16=True),
    "ZeRO-3, activations alone": Case({"pipeline_offload_ratio": "1"}, {**ZERO_3, **GEMM_LAST}, ParityLayout(1, 2)),
    "ZeRO-3, activations alone, recompute": Case(
        {"pipeline_offload_ratio": "0.5"}, {**ZERO_3, **FULL}, ParityLayout(1, 2)
    ),
    "ZeRO-1, overlapped": Case(TWO, ZERO_1, ParityLayout(1, 2), accumulation=2),
    "replicas": Case(ALL, {}, ParityLayout(1, 2)),
    "tp": Case(TWO, {}, ParityLayout(2, 1, True), family="gpt"),
    "1f1b": Case(TWO, {}, ParityLayout(1, 1, pp=2, schedule="1f1b"), accumulation=4),
    "interleaved": Case(
        {"cpu_offloading_weights": True, "cpu_offloading_num_layers": 1, "pipeline_offload_ratio": "1"},
        {},
        ParityLayout(1, 1, pp=2, schedule="interleaved", chunks=2),
        accumulation=4,
    ),
    "zb-h1": Case(TWO, {}, ParityLayout(1, 1, pp=2, schedule="zb-h1"), accumulation=4),
}

LONG = ("fp32", "bf16, all layers, 4 microbatches")
SLOW = (
    "CPU updates, fp32", "masters as remainders", "replicas", "tp", "1f1b", "ZeRO-3, activations alone, recompute",
)  # fmt: skip


def compared(world, cases, steps):
    for name, case in cases.items():
        plain, offloaded = (
            pool.run(world, trained, case.run(offloaded=offloaded), steps) for offloaded in (False, True)
        )
        weights = [whole([rank[1] for rank in ranks]) for ranks in (plain, offloaded)]
        assert [rank[0] for rank in offloaded] == [rank[0] for rank in plain], name
        assert [n for n, tensor in weights[0].items() if not weights[1][n].equal(tensor)] == [], name
        moves = bool(case.offloaded.get("cpu_offloading_weights"))
        assert all((rank[2] > 0) == moves for rank in offloaded), name
        # One is read, one is on its way; a third is about to go where backward is through with a bucket within a
        # module. A layer that is computed again has all of its three or four. Were one of a norm's weights kept by
        # autograd, all sixteen would be there.
        most = 5 if case.both.get("recompute_granularity") == "full" else 3
        assert all(0 < rank[3] <= most for rank in offloaded), (name, [rank[3] for rank in offloaded])


def some_are_slow(cases):
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in cases]


@pytest.mark.parametrize("name", some_are_slow(CASES))
def test_no_bit_changes(name):
    compared(1, {name: CASES[name]}, STEPS if name in LONG else FEW_STEPS)


@pytest.mark.parametrize("name", some_are_slow(PAIRS))
def test_no_bit_changes_on_two_ranks(name):
    compared(2, {name: PAIRS[name]}, FEW_STEPS)


def session(rank, size, run, steps, then_save=False):
    trainer = built(run)
    losses = [trainer.train_step().loss for _ in range(steps)]
    if then_save:
        save_checkpoint(trainer)
    trainer.data_parallel.synchronize()
    return losses, boxes_of(trainer.data_parallel)


@pytest.mark.parametrize("bf16", [False, True])
def test_saved_with_and_loaded_without_and_back(tmp_path, bf16):
    """The bytes in host memory are the checkpoint's, in both directions."""
    case = Case(TWO, bf16=bf16)
    straight = pool.run(1, session, case.run(offloaded=False), 6)[0]
    for first, then in ((True, False), (False, True), (True, True)):
        folder = str(tmp_path / f"{first} {then}")
        losses, _ = pool.run(1, session, case.run(offloaded=first, save=folder, save_interval=3), 3, True)[0]
        assert losses == straight[0][:3]
        on, ended = pool.run(1, session, case.run(offloaded=then, load=folder), 3)[0]
        assert on == straight[0][3:]
        expected, found = whole([straight[1]]), whole([ended])
        assert all(found[name].equal(tensor) for name, tensor in expected.items())


SHARED = {
    "optim": {"use_distributed_optimizer": True},
    "optim, overlapped": ZERO_1,
    "optim_grads": {"data_parallel_sharding_strategy": "optim_grads", "overlap_param_gather": True},
    "optim_grads_params": ZERO_3,
}


@pytest.mark.parametrize("strategy", SHARED)
def test_loaded_where_ranks_share_what_stays_on_the_device(tmp_path, strategy):
    """Ranks share every bucket's optimizer, and some buckets stay: they are loaded whole, from either side's files."""
    case = Case(TWO, SHARED[strategy], ParityLayout(1, 2), bf16=strategy == "optim, overlapped")
    found = {}
    for first in (True, False):
        folder = str(tmp_path / str(first))
        pool.run(2, session, case.run(offloaded=first, save=folder, save_interval=3), 3, True)
        for then in (True, False):
            found[first, then] = pool.run(2, session, case.run(offloaded=then, load=folder), 2)[0][0]
    assert len({str(losses) for losses in found.values()}) == 1, found


def evaluated(rank, size, run):
    """Losses of evaluations between steps, which read weights and give them up as training does."""
    trainer = built(run)
    found = []
    for _ in range(3):
        found.append(trainer.train_step().loss)
        batches = trainer.readers.train.read(1)
        found.append(
            evaluate(trainer.model, lambda batches=batches: batches, 2, trainer.groups, trainer.settings.pipeline)
        )
    return found


def test_evaluation_between_steps():
    case = Case(ALL)
    assert pool.run(1, evaluated, case.run(offloaded=True)) == pool.run(1, evaluated, case.run(offloaded=False))
