"""Operations one by one: they add up to the parts of a step, and the bytes on each link are those of its
collectives."""

import pytest

from megatron.config.activation_offload import ActivationOffloadConfig
from megatron.config.data import DataConfig
from megatron.config.mesh import mesh_of
from megatron.config.optimizer_offload import OptimizerOffloadConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import RunConfig
from megatron.config.settings import resolve
from megatron.config.train import TrainConfig
from megatron.planner.search.itemize import HOST_LINK, NETWORK, NODE_LINK, links_by_load, operations_by_time
from megatron.planner.time.constants import fitted
from megatron.planner.time.hardware import built_in
from megatron.planner.time.software import Software
from megatron.planner.time.stage_time import ATTENTION, CP, EP, GEMM, MEMORY, RECOMPUTE, TP
from megatron.planner.time.step_time import StepModel
from tests.unit.planner.models import LLAMA
from tests.unit.planner.test_step_time import LAYOUTS, OVERLAPPED, ZERO_3
from tests.unit.planner.test_step_time import TP as TP_4

PP_2 = {"pipeline_model_parallel_size": 2}
FULL = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
PARTS_OF_A_LAYER = (GEMM, ATTENTION, MEMORY, RECOMPUTE, TP, CP, EP)
BATCH, SEQ, MICROBATCH = 64, 4096, 1


def planned(world, parallel, *, nodes_of=8, **parts):
    run, settings, cluster = asked(world, parallel, nodes_of=nodes_of, **parts)
    return StepModel(run, settings, cluster, Software()), settings, cluster


def asked(world, parallel, *, recompute=None, nodes_of=8, **parts):
    cluster = built_in(f"h100:{max(1, world // nodes_of)}x{nodes_of}")
    run = RunConfig(
        model=LLAMA,
        parallel=ParallelConfig(**parallel),
        recompute=recompute or RecomputeConfig(),
        data=DataConfig(seq_length=SEQ),
        train=TrainConfig(micro_batch_size=MICROBATCH, global_batch_size=BATCH),
        **parts,
    )
    return run, resolve(run, mesh_of(run.parallel, world)), cluster


def bytes_of(world, parallel, **keywords):
    run, settings, cluster = asked(world, parallel, **keywords)
    model = StepModel(run, settings, cluster, Software())
    return {load.link: load.nbytes for load in links_by_load(run, model, settings, cluster)}


@pytest.mark.parametrize("recompute", [None, FULL], ids=["kept", "repeated"])
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_operations_add_up(name, recompute):
    model, settings, _ = planned(*LAYOUTS[name], recompute=recompute)
    clock = model.clock(fitted())
    time = model.time(clock)
    items = operations_by_time(model, settings, clock, time)
    assert sum(item.seconds for item in items) == pytest.approx(time.seconds, rel=1e-9)
    for part in PARTS_OF_A_LAYER:  # nothing is left over that no operation explains
        listed = sum(item.seconds for item in items if item.part == part and item.times)
        assert listed == pytest.approx(time.parts.get(part, 0.0), rel=1e-9, abs=1e-12), part
    assert [item.seconds for item in items] == sorted((item.seconds for item in items), reverse=True)


def test_what_is_repeated_is_listed_apart():
    model, settings, _ = planned(1, {}, recompute=FULL)
    clock = model.clock(fitted())
    items = {item.name: item for item in operations_by_time(model, settings, clock, model.time(clock))}
    assert items["fc1, repeated"].part == RECOMPUTE and items["fc1"].part == GEMM
    assert items["fc1, repeated"].seconds == pytest.approx(items["fc1"].seconds)
    assert items["fc1"].times == LLAMA.num_layers * BATCH


class TestLinks:
    def test_one_rank_sends_nothing(self):
        assert bytes_of(1, {}) == {NODE_LINK: 0, NETWORK: 0, HOST_LINK: 0}

    def test_replicas_in_a_node_and_over_nodes(self):
        """Gradients of fp32 are reduced and bf16 parameters gathered; each interface carries an eighth of the ring."""
        parameters = planned(16, OVERLAPPED)[0].replicas.held[0].all
        sent = bytes_of(16, OVERLAPPED)
        assert sent[NODE_LINK] == pytest.approx(15 / 16 * (4 + 2) * parameters)
        assert sent[NETWORK] == pytest.approx(sent[NODE_LINK] / 8)
        assert bytes_of(8, OVERLAPPED) == {NODE_LINK: pytest.approx(7 / 8 * 6 * parameters), NETWORK: 0, HOST_LINK: 0}

    def test_sharded_parameters_are_gathered_twice_per_microbatch(self):
        parameters = planned(8, ZERO_3)[0].replicas.held[0].all
        microbatches = BATCH // 8
        assert bytes_of(8, ZERO_3)[NODE_LINK] == pytest.approx(7 / 8 * microbatches * (2 * 2 + 4) * parameters)

    def test_tensor_parallelism(self):
        """Per layer: 2 gathers and 2 sums forward, 4 gathers and 2 sums backward; and those of the two ends of the
        model."""
        rows = SEQ * MICROBATCH * LLAMA.hidden_size * 2
        ends = bytes_of(4, {**TP_4})[NODE_LINK] - BATCH * LLAMA.num_layers * 10 * 3 / 4 * rows
        assert 0 < ends < BATCH * 6 * rows

    def test_pipeline(self):
        """An inner rank sends outputs to the next one and gradients to the one before it, over the network with one
        device per node."""
        sent = bytes_of(2, PP_2, nodes_of=1)
        assert sent == {NODE_LINK: 0, NETWORK: BATCH * SEQ * LLAMA.hidden_size * 2, HOST_LINK: 0}
        assert bytes_of(2, PP_2)[NODE_LINK] == sent[NETWORK]

    def test_copies_to_the_host(self):
        """Gradients in fp32 of the offloaded half of a rank's slice; activations by their ratio."""
        half = OptimizerOffloadConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
        parameters = planned(8, OVERLAPPED)[0].replicas.held[0].all
        sent = bytes_of(8, OVERLAPPED, optimizer_offload=half)[HOST_LINK]
        assert sent == pytest.approx(4 * 0.5 * parameters / 8)
        some, more = (
            bytes_of(2, {**PP_2}, activation_offload=ActivationOffloadConfig(pipeline_offload_ratio=ratio))[HOST_LINK]
            for ratio in ("0.25", "0.5")
        )
        assert more == pytest.approx(2 * some) and some > BATCH * SEQ * LLAMA.hidden_size * LLAMA.num_layers / 2

    def test_recompute_of_whole_layers_repeats_their_messages(self):
        once, again = bytes_of(4, {**TP_4}), bytes_of(4, {**TP_4}, recompute=FULL)
        rows = SEQ * MICROBATCH * LLAMA.hidden_size * 2
        assert again[NODE_LINK] - once[NODE_LINK] == pytest.approx(BATCH * LLAMA.num_layers * 4 * 3 / 4 * rows)
