"""Layers train by graphs as without, bit for bit, under the layouts that allow it. The graphs are
tests/fake_graph.py."""

import dataclasses
import functools

import pytest

from megatron.schedule.validate import most_under_way
from megatron.training.graphs import build_graphs
from megatron.training.setup import build
from tests import pool
from tests.fake_graph import FakePool
from tests.unit.config.runs import SHORT_RUN, make_run
from tests.unit.models.builds import CPU

QUICK = ("dp 2, sharded and overlapped", "pp 2, interleaved", "tp 2, sequence parallel", "fp16 with skipped steps")
LAYERS = 4
BASE = {
    **SHORT_RUN,
    "num_layers": LAYERS,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 5,
    "eval_iters": 0,
    "clip_grad": 1.0,
    "ddp_bucket_size": 4000,
    "cuda_graph_impl": "local",
    "cuda_graph_warmup_steps": 2,
}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
}
# The scale is too large for the first steps, of which the third one is the first with graphs. How many there are
# depends on the processor: some have instructions that add in fp16.
OVERFLOWS = {"fp16": True, "initial_loss_scale": 2.0**24, "hysteresis": 1, "train_iters": 10}
SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
}


class Trained:
    """What a run of some steps leaves: losses, norms, skipped steps, weights, the buckets in order and the replays."""

    def __init__(self, fields, *, graphs):
        sizes = {axis: fields[name] for name, axis in SIZES.items() if name in fields}
        instances = 1 if fields.get("use_distributed_optimizer") else None
        run = make_run(**{**BASE, **fields})
        trainer = build(run, pool.groups(**sizes, instances=instances), CPU)
        self.log, pools = [], []

        def make_pool():
            in_flight = trainer.data_parallel._params._gatherer._gathering
            assert not in_flight, "a captured kernel cannot wait for a gather that was started before"
            pools.append(FakePool(self.log))
            return pools[-1]

        if graphs:
            rank = trainer.groups.pp.rank
            graphs = build_graphs(run.train, trainer.model, trainer.data_parallel, rank, make_pool)
            trainer.step.features = dataclasses.replace(trainer.step.features, graphs=graphs)
        reduce = trainer.data_parallel._reduce
        trainer.data_parallel._reduce = lambda bucket: (self.log.append(("reduce", bucket.index)), reduce(bucket))
        self.reports, self.gradients = [], []
        for _ in range(trainer.total_iterations):
            self.reports.append(trainer.train_step())
            self.gradients.append([(n, at, piece.clone()) for n, at, piece in trainer.data_parallel.gradients()])
        trainer.data_parallel.synchronize()
        self.weights = {name: p.detach().clone() for name, p in trainer.parameters.items()}
        self.graphs = [len(each.graphs) for each in pools]

    def numbers(self):
        """Everything that has to be equal, in a form that travels; NaN equals itself."""
        steps = [(str(r.loss), str(r.grad_norm), r.skipped, r.loss_scale) for r in self.reports]
        gradients = [[(n, at, piece.numpy().tobytes()) for n, at, piece in each] for each in self.gradients]
        return steps, gradients, {n: w.float().numpy().tobytes() for n, w in self.weights.items()}, self.reduced

    @property
    def reduced(self):
        """The buckets in the order in which they left."""
        return [number for what, number in self.log if what == "reduce"]


def train(rank, size, fields):
    """(numbers without graphs, numbers with them, graphs per pool, log with graphs)"""
    plain, graphed = Trained(fields, graphs=False), Trained(fields, graphs=True)
    return plain.numbers(), graphed.numbers(), graphed.graphs, graphed.log


OVERLAPPED = {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "overlap_param_gather": True}
PP2 = {"pipeline_model_parallel_size": 2}
CASES = {
    "one process": (1, LLAMA, [8]),
    "one process, learned positions and biases": (1, {}, [8]),
    "dp 2, overlapped": (2, {**LLAMA, "overlap_grad_reduce": True}, [8]),
    "dp 2, sharded and overlapped": (2, {**LLAMA, **OVERLAPPED}, [8]),
    "pp 2, 1f1b": (2, {**LLAMA, **PP2}, None),
    "pp 2, interleaved": (2, {**LLAMA, **PP2, "num_virtual_stages_per_pipeline_rank": 2}, None),
    "tp 2": (2, {**LLAMA, "tensor_model_parallel_size": 2}, [8]),
    "tp 2, sequence parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, [8]),
    "fp16 with skipped steps": (1, {**LLAMA, **OVERFLOWS}, [8]),
    "bf16, parts recomputed": (
        1,
        {
            **LLAMA,
            "bf16": True,
            "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "norm", "mlp_act"),
        },
        [8],
    ),
}


@functools.cache
def trained(name):
    size, fields, _ = CASES[name]
    return pool.run(size, train, fields)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CASES])
def test_same_bits(name):
    for plain, graphed, graphs, log in trained(name):
        for what, one, other in zip(("steps", "gradients", "weights", "order of buckets"), plain, graphed, strict=True):
            assert one == other, what
        assert sum(what == "replay" for what, _ in log) > 0
        expected = CASES[name][2]
        assert expected is None or graphs == expected


def test_a_pipeline_has_as_many_slots_as_microbatches_under_way():
    """Under the interleaved schedule: a slot has the forward and the backward of the one layer of a stage."""
    first, last = (graphs for _, _, graphs, _ in trained("pp 2, interleaved"))
    schedule = make_run(**{**BASE, **CASES["pp 2, interleaved"][1]}).pipeline_settings().schedule_of(4)
    assert (first, last) == tuple([2] * sum(most_under_way(actions).values()) for actions in schedule.actions)
    assert len(first) > len(last) > 2


def test_steps_were_skipped():
    ((plain, _, _, _),) = trained("fp16 with skipped steps")
    skipped = [skipped for _, _, skipped, _ in plain[0]]
    assert skipped[2] and not skipped[-1], "one of those with graphs"


def test_buckets_leave_between_the_layers():
    """In the last backward of a step: the reduction of the last layers is under way while the first ones are
    computed."""
    for _, _, _, log in trained("dp 2, sharded and overlapped"):
        kinds = [what for what, _ in log]
        last = len(kinds) - 1 - kinds[::-1].index("replay")
        first_backward = [at for at, what in enumerate(kinds) if what == "replay"][-LAYERS]
        assert "reduce" in kinds[first_backward:last]
