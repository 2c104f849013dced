"""The time of a step: its parts add up, it follows the hardware, and on one device it is that of its layers."""

import dataclasses
import itertools

import numpy as np
import pytest

from megatron.base.errors import ConfigError
from megatron.config.data import DataConfig
from megatron.config.mesh import mesh_of
from megatron.config.optimizer_offload import OptimizerOffloadConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import RunConfig
from megatron.config.settings import resolve
from megatron.config.train import TrainConfig
from megatron.planner.time.constants import Constants, fitted, priors
from megatron.planner.time.hardware import BF16, FP8, Place, built_in, with_device
from megatron.planner.time.kernels import attention_rate, attention_seconds, gemm_seconds
from megatron.planner.time.messages import wire_bytes
from megatron.planner.time.operations import FusedAttention, Gemm
from megatron.planner.time.software import Software
from megatron.planner.time.stage_time import GEMM, Parts, Phases
from megatron.planner.time.step_time import PARTS, StepModel, step_seconds
from megatron.spec.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SHIFT
from tests.unit.planner.models import EXPERTS, LLAMA

H100 = built_in("h100")
SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
ZERO_3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
TP = {"tensor_model_parallel_size": 4, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 4}
LAYOUTS = {
    "one": (1, {}),
    "dp": (16, {}),
    "zero1": (16, SHARDED),
    "zero1 overlapped": (16, OVERLAPPED),
    "zero3": (16, ZERO_3),
    "instances": (32, {**OVERLAPPED, "num_distributed_optimizer_instances": 4}),
    "hybrid": (32, {**ZERO_3, "num_distributed_optimizer_instances": 4}),
    "tp": (4, TP),
    "tp overlapped": (4, {**TP, "tp_comm_overlap": True}),
    "tp without sp": (4, {"tensor_model_parallel_size": 4}),
    "cp": (4, {"context_parallel_size": 4}),
    "cp gathered": (4, {"context_parallel_size": 4, "cp_comm_type": ("all_gather",)}),
    "pp": (8, {**PP, **OVERLAPPED}),
    "pp waiting": (8, {**PP, "overlap_p2p_communication": False}),
    "interleaved": (8, {**PP, "num_virtual_stages_per_pipeline_rank": 2}),
    "zb-h1": (8, {**PP, "pipeline_schedule": "zb-h1"}),
    "zb-v": (8, {**PP, "pipeline_schedule": "zb-v"}),
    "all": (64, {**TP, **PP, **OVERLAPPED, "context_parallel_size": 2}),
}


def run_of(
    world=1,
    parallel=None,
    *,
    micro_batch=1,
    batch=64,
    seq=4096,
    model=LLAMA,
    recompute=None,
    **parts,
):
    run = RunConfig(
        model=model,
        parallel=ParallelConfig(**(parallel or {})),
        recompute=recompute or RecomputeConfig(),
        data=DataConfig(seq_length=seq),
        train=TrainConfig(micro_batch_size=micro_batch, global_batch_size=batch),
        **parts,
    )
    return run, resolve(run, mesh_of(run.parallel, world))


def model_of(*args, cluster=H100, software=None, **kwargs):
    return StepModel(*run_of(*args, **kwargs), cluster, software or Software())


def time_of(*args, **kwargs):
    model = model_of(*args, **kwargs)
    return model.time(model.clock(Constants()))


def constants_at(logarithms):
    return Constants.of(dict(zip(Constants.names(), np.exp(logarithms), strict=True)))


def layer_of(model):
    return model.layer(model.clock(Constants()), 0)


@pytest.mark.parametrize("name", list(LAYOUTS))
class TestLayout:
    def test_parts_add_up(self, name):
        time = time_of(*LAYOUTS[name])
        assert set(time.parts) <= set(PARTS)
        assert time.seconds == pytest.approx(sum(time.parts.values()), rel=1e-12)
        assert all(seconds > -1e-9 for seconds in time.parts.values()), time.parts
        assert time.tokens_per_second == pytest.approx(64 * 4096 / time.seconds / time.ranks)

    def test_the_short_way_and_many_constants_say_the_same(self, name):
        model = model_of(*LAYOUTS[name])
        start, _ = priors()
        many = constants_at(np.stack([start, start + 0.1, start - 0.1], axis=1))
        found = step_seconds([model, model], many)
        assert found[0, 0] == pytest.approx(model.time(model.clock(Constants())).seconds, rel=1e-12)
        assert float(np.squeeze(model.seconds(model.clock(Constants())))) == pytest.approx(found[1, 0], rel=1e-12)
        assert found[0, 1] == pytest.approx(model.time(model.clock(constants_at(start + 0.1))).seconds, rel=1e-12)

    @pytest.mark.parametrize("change", ["flops", "bandwidth", "link", "network"])
    def test_better_hardware_is_never_slower(self, name, change):
        device = H100.device
        if change == "flops":
            better = {
                "peak": {kind: 1.2 * rate for kind, rate in device.peak.items()},
                "reached": {kind: 1.2 * rate for kind, rate in device.reached.items()},
            }
            cluster = dataclasses.replace(H100, device=dataclasses.replace(device, **better))
        elif change == "network":
            cluster = dataclasses.replace(H100, network=1.2 * H100.network)
        else:
            cluster = with_device(H100, **{change: 1.2 * getattr(device, change)})
        before = time_of(*LAYOUTS[name]).seconds
        after = time_of(*LAYOUTS[name], cluster=cluster).seconds
        assert after <= before * (1 + 1e-9)


def test_on_one_device_a_step_is_its_layers():
    """Without parallelism: microbatches x (layers + embedding + head), the update, and the fixed time."""
    model, constants = model_of(batch=8), Constants()
    clock = model.clock(constants)
    layer = model.layer(clock, 0)
    stage = model.stages(clock)[0]
    ends = [
        getattr(stage, phase).total - 8 * getattr(layer, phase).total
        for phase in ("forward", "input_grad", "weight_grad")
    ]
    assert all(seconds > 0 for seconds in ends)
    time = model.time(clock)
    work = sum(getattr(layer, phase).total for phase in ("forward", "input_grad", "weight_grad"))
    assert time.seconds == pytest.approx(
        8 * (8 * work + sum(ends)) + time.parts["optimizer"] + constants.step, rel=1e-12
    )
    assert {part for part, seconds in time.parts.items() if abs(seconds) > 1e-9} <= {
        "gemm",
        "attention",
        "memory",
        "host",
        "optimizer",
        "step",
    }


def test_microbatches_add_up():
    small, large = (time_of(batch=batch) for batch in (8, 16))
    fixed = small.parts["optimizer"] + small.parts["step"]
    assert large.seconds - fixed == pytest.approx(2 * (small.seconds - fixed), rel=1e-9)


def test_operations_are_those_of_the_flops_formula():
    """The products and the attention of a layer and of the head, times layers and microbatches, are the model's
    FLOPs."""
    for parallel, world in (({}, 1), (TP, 4), ({"context_parallel_size": 2}, 2)):
        model = model_of(world, parallel, batch=4)
        counted = 0.0
        for work, times in ((model.work.works[0], 8), (model.work.head, 1)):
            for operation in (*work.forward, *work.input_grad, *work.weight_grad):
                if isinstance(operation, Gemm):
                    counted += times * 2 * operation.m * operation.n * operation.k * operation.count
                elif isinstance(operation, FusedAttention):
                    # The kernel's backward computes the scores again: 2.5 and not 2 times the forward.
                    again = 2.5 / 2 if "gradient" in operation.name else 1.0
                    counted += times * operation.operations / again
        assert counted * 4 * world == pytest.approx(model.model_flops, rel=1e-9)


class TestComparisons:
    def test_overlap_helps(self):
        plain, overlapped = (time_of(16, parallel) for parallel in (SHARDED, OVERLAPPED))
        assert overlapped.parts["dp"] < plain.parts["dp"]
        in_pieces = {**TP, "tp_comm_overlap": True}
        assert time_of(4, in_pieces).parts["tp"] < time_of(4, TP).parts["tp"]

    def test_tensor_parallelism_across_nodes_is_slow(self):
        inside = time_of(4, TP)
        across = time_of(4, TP, cluster=dataclasses.replace(H100, node=1))
        assert across.parts["tp"] > 3 * inside.parts["tp"]

    def test_recompute_costs_a_forward(self):
        full = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        attention = RecomputeConfig(recompute_granularity="selective", recompute_modules=("core_attn",))
        plain, some, all_of_it = (time_of(recompute=chosen) for chosen in (None, attention, full))
        assert plain.parts["recompute"] == 0 < some.parts["recompute"] < all_of_it.parts["recompute"]
        forward = layer_of(model_of()).forward.total
        assert all_of_it.parts["recompute"] == pytest.approx(64 * 8 * forward, rel=1e-9)

    def test_part_of_a_stage_is_recomputed(self):
        chosen = RecomputeConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
        forward = layer_of(model_of()).forward.total
        assert time_of(recompute=chosen).parts["recompute"] == pytest.approx(64 * 2 * forward, rel=1e-9)

    def test_a_shared_norm_is_read_twice_and_computed_once(self):
        parallel = dataclasses.replace(LLAMA, parallel_residual=True)
        norms, one = (
            [op.name for op in model_of(model=model).work.works[0].forward if "norm" in op.name]
            for model in (parallel, dataclasses.replace(parallel, shared_norm=True))
        )
        assert len(norms) == len(one) + 1 and set(norms) - set(one) == {"MLP norm"}

    def test_chunks_of_experts_add_to_gradients_more_often(self):
        """The products are as many operations as without chunks, those of each chunk with fewer rows."""
        seconds, flops, counts = [], [], []
        for chunk in (None, 512):
            again = RecomputeConfig(recompute_granularity="selective", recompute_modules=("moe",), mlp_chunk_size=chunk)
            model = model_of(model=EXPERTS, recompute=again)
            work = model.work.works[-1]
            products = [op for op in (*work.forward, *work.weight_grad, *work.again) if isinstance(op, Gemm)]
            flops.append(sum(op.m * op.n * op.k * op.count for op in products))
            counts.append(next(op.count for op in work.weight_grad if op.name == "experts fc1, weight gradient"))
            seconds.append(time_of(model=EXPERTS, recompute=again).seconds)
        assert flops[0] == pytest.approx(flops[1], rel=1e-12)
        assert counts == [8, 8 * 4096 / 512] and seconds[0] < seconds[1]

    def test_the_bubble_of_schedules(self):
        waiting = {
            name: time_of(4, {**PP, "pipeline_schedule": name}, batch=8).parts["bubble"] for name in ("1f1b", "zb-v")
        }
        assert waiting["zb-v"] < 0.6 * waiting["1f1b"]

    def test_fp8_is_faster_and_not_twice(self):
        plain, fp8 = (time_of(software=Software(precision=kind)).seconds for kind in (BF16, FP8))
        assert plain / 2 < fp8 < plain

    def test_separate_products_of_attention_are_slower(self):
        fused, unfused = (time_of(software=Software(unfused_attention=kind)) for kind in (False, True))
        assert fused.seconds < unfused.seconds and fused.parts["memory"] < unfused.parts["memory"]
        assert "attention" in fused.parts and not unfused.parts.get("attention")

    def test_small_layers_wait_for_the_host(self):
        small = dataclasses.replace(LLAMA, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4)
        assert time_of(model=small, seq=256).parts["host"] > 0.5 * time_of(model=small, seq=256).seconds
        assert time_of(seq=8192).parts["host"] == 0

    def test_experts_exchange_tokens(self):
        model = dataclasses.replace(
            LLAMA, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=5632, moe_layer_freq="1"
        )
        parallel = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1, **OVERLAPPED}
        time = time_of(8, parallel, model=model)
        assert time.parts["ep"] > 0
        assert time.seconds == pytest.approx(sum(time.parts.values()))


class TestKernels:
    def test_a_large_product_reaches_the_measured_rate(self):
        device, constants = H100.device, dataclasses.replace(Constants(), edge=1e-9, depth=1e-9, wave=1e-9)
        size = 16384
        seconds = gemm_seconds(constants, device, size, size, size)
        assert 2 * size**3 / seconds == pytest.approx(device.reached[BF16], rel=1e-6)

    def test_a_thin_product_is_limited_by_the_memory(self):
        seconds = gemm_seconds(Constants(), H100.device, 16, 8192, 8192)
        assert seconds >= 2 * 8192**2 / H100.device.bandwidth

    def test_more_work_is_never_faster(self):
        """Rows in steps of whole tiles, so that waves fill and empty."""
        for count in (1, 2, 7, 16):
            times = [
                gemm_seconds(Constants(), H100.device, 128 * rows, 4096, 4096, count=count) for rows in range(1, 60)
            ]
            assert all(after >= before * (1 - 1e-9) for before, after in itertools.pairwise(times))

    def test_long_sequences_reach_a_higher_rate(self):
        best = attention_rate(Constants(), H100.device)
        rates = [1e12 / attention_seconds(Constants(), best, 1e12, keys, 128) for keys in (512, 4096, 65536)]
        assert rates == sorted(rates)


class TestRefused:
    def test_without_a_vocabulary(self):
        with pytest.raises(ConfigError, match="--vocab-size"):
            model_of(model=dataclasses.replace(LLAMA, vocab_size=None, fixed_padded_vocab_size=32000))

    @pytest.mark.parametrize(
        ("fields", "word"),
        [
            ({"model": dataclasses.replace(LLAMA, lora_rank=8)}, "--lora-rank"),
            (
                {
                    "optimizer_offload": OptimizerOffloadConfig(
                        optimizer_cpu_offload=True, optimizer_offload_policy="auto"
                    )
                },
                "--optimizer-offload-policy auto",
            ),
            (
                {"optimizer_offload": OptimizerOffloadConfig(offload_optimizer_states=True, offload_dir="x")},
                "--offload-dir",
            ),
            ({"recompute": RecomputeConfig(recompute_policy="balanced")}, "balanced"),
            (
                {"parallel": {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 4096}},
                "--dynamic-context-parallel",
            ),
        ],
    )
    def test_features_whose_time_is_not_planned(self, fields, word):
        with pytest.raises(ConfigError, match=word):
            model_of(**fields)

    def test_a_device_without_the_precision(self):
        with pytest.raises(ConfigError, match="a100 has no fp8 products"):
            model_of(cluster=built_in("a100"), software=Software(precision=FP8))

    def test_too_many_ranks(self):
        with pytest.raises(ConfigError, match="a world of 16 ranks does not fit 1 nodes of 8"):
            model_of(16, cluster=built_in("h100:1x8"))


def test_the_shipped_constants_are_complete():
    assert all(0 < getattr(fitted(), name) < 1e4 for name in Constants.names())


class TestWireBytes:
    """Bytes that each rank sends, of 8 ranks in a node of 8 or in two nodes of 4."""

    @pytest.mark.parametrize(
        ("op", "one_node", "two_nodes"),
        [
            (ALL_GATHER, (700, 0), (700, 175)),  # the ring's 700 bytes pass the border on one of 4 interfaces at a time
            (REDUCE_SCATTER, (700, 0), (700, 175)),
            (ALL_REDUCE, (1400, 0), (1400, 350)),
            (ALL_TO_ALL, (700, 0), (300, 400)),
            (SHIFT, (800, 0), (0, 800)),
        ],
    )
    def test_by_link(self, op, one_node, two_nodes):
        assert wire_bytes(Place(8, 8), op, 800) == one_node
        assert wire_bytes(Place(8, 4), op, 800) == two_nodes
        assert wire_bytes(Place(1, 1), op, 800) == (0, 0)


class TestInstances:
    """Several instances of the optimizer: sums inside of each, then sums of slices between them."""

    LAYOUT = (32, {**SHARDED, "num_distributed_optimizer_instances": 4})

    def test_groups_are_those_of_the_mesh(self):
        model = model_of(*self.LAYOUT)
        mesh = mesh_of(ParallelConfig(**self.LAYOUT[1]), 32)
        groups = mesh.optimizer_groups(4)
        for kind in ("shard", "replicas"):
            place = model.places[f"dense_{kind}"]
            nodes = [{rank // H100.node for rank in ranks} for ranks in groups[kind]]
            assert {len(ranks) for ranks in groups[kind]} == {place.size}
            assert {len(found) for found in nodes} == {place.nodes}

    def test_the_sum_is_a_reduce_scatter_inside_and_an_all_reduce_between(self):
        model = model_of(*self.LAYOUT)
        clock = model.clock(Constants())
        parameters = model.replicas.held[0].all
        inside, between = Place(8, 8), Place(4, 1)
        seconds = (
            clock.collective(inside, REDUCE_SCATTER, 4 * parameters)
            + clock.collective(between, ALL_REDUCE, 4 * parameters / 8)
            + clock.collective(inside, ALL_GATHER, 2 * parameters)
        )
        assert model.time(clock).parts["dp"] == pytest.approx(seconds, rel=1e-9)
        assert model.time(clock).parts["optimizer"] == pytest.approx(clock.update(parameters / 8), rel=1e-9)

    @pytest.mark.parametrize("mode", ["optim", "optim_grads", "optim_grads_params"])
    def test_one_instance_is_the_default_and_many_of_one_rank_gather_nothing(self, mode):
        asked = {"data_parallel_sharding_strategy": mode}
        one = time_of(16, {**asked, "num_distributed_optimizer_instances": 1})
        assert one.parts == time_of(16, asked).parts
        each = model_of(16, {**asked, "num_distributed_optimizer_instances": 16})
        assert each.places["dense_shard"].size == 1
        assert each.replicas.reductions(each.clock(Constants())).slowing == 0.0

    def test_gathers_inside_of_nodes_are_faster(self):
        """With sharded parameters the gathers of every microbatch stay on the link of a node."""
        network = dataclasses.replace(H100, network=H100.network / 20)
        one, four = (
            time_of(32, {**ZERO_3, "num_distributed_optimizer_instances": number}, cluster=network) for number in (1, 4)
        )
        assert four.parts["dp"] < one.parts["dp"]


@pytest.mark.parametrize("pipeline", [{}, {**PP, "num_virtual_stages_per_pipeline_rank": 2}], ids=["one stage", "pp"])
def test_exchanges_are_hidden_behind_another_microbatch(pipeline):
    """The computation takes as long; a pipeline's longer warm-up costs a part of what is saved."""
    experts = dataclasses.replace(LLAMA, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=5632)
    alone, together = (
        time_of(
            32,
            {"expert_model_parallel_size": 4, "overlap_moe_expert_parallel_comm": hides, **pipeline},
            model=experts,
            batch=512,
        )
        for hides in (False, True)
    )
    assert 0 < together.parts["ep"] < 0.5 * alone.parts["ep"]
    assert together.parts["gemm"] == alone.parts["gemm"]
    assert together.seconds < alone.seconds
    assert sum(together.parts.values()) == pytest.approx(together.seconds)


def test_updated_parameters_are_gathered_unless_they_stay_sharded():
    gathers = {}
    for mode in ("optim", "optim_grads", "optim_grads_params"):
        model = model_of(16, {"data_parallel_sharding_strategy": mode})
        reductions = model.replicas.reductions(model.clock(Constants()))
        gathers[mode] = reductions.exposed + reductions.slowing
    assert gathers["optim_grads"] > 0 == gathers["optim_grads_params"]


def test_the_first_forward_waits_for_gathers_that_it_does_not_hide():
    model = model_of(16, OVERLAPPED)
    clock = model.clock(Constants())

    def late(forward):
        return model.replicas.late_gathers(clock, [Phases(Parts({GEMM: forward}), Parts(), Parts())])

    gather, first = late(0.0), late(1e9)
    assert gather < model_of(16, SHARDED).replicas.reductions(clock).exposed, "there the sums are exposed, too"
    assert 0 < first < gather / 2, "the first of several buckets"
    assert late(gather / 2) == pytest.approx(gather - gather / 2 * (1 - first / gather))
    assert model_of(16, SHARDED).replicas.late_gathers(clock, []) == 0.0, "they are not overlapped"


class TestTiedEmbedding:
    """Both ends of a pipeline sum the gradients of the embedding that they share."""

    TIED = dataclasses.replace(LLAMA, untie_embeddings_and_output_weights=False)

    @pytest.mark.parametrize("cluster", [H100, dataclasses.replace(H100, node=1)])
    def test_the_sum_is_an_all_reduce_of_two(self, cluster):
        model = model_of(4, PP, model=self.TIED, cluster=cluster)
        clock = model.clock(Constants())
        words = 32000 * 2048
        seconds = clock.collective(Place(2, min(2, cluster.node)), ALL_REDUCE, 4 * words)
        assert model.time(clock).parts["dp"] == pytest.approx(seconds, rel=1e-9)
        sharded = model_of(16, {**PP, **OVERLAPPED}, model=self.TIED)
        nothing = model_of(16, {**PP, **OVERLAPPED}, model=self.TIED).replicas
        nothing = dataclasses.replace(nothing, shared_by_ends=0)
        added = sharded.replicas.reductions(clock).exposed - nothing.reductions(clock).exposed
        slices = clock.collective(sharded.places["ends"], ALL_REDUCE, 4 * words / 4)
        assert added == pytest.approx(slices, rel=1e-9)

    def test_nothing_if_one_rank_holds_both_ends(self):
        assert model_of(model=self.TIED).replicas.shared_by_ends == 0
        assert model_of(4, {**PP, "pipeline_schedule": "zb-v"}, model=self.TIED).replicas.shared_by_ends == 0
        assert model_of(4, PP).replicas.shared_by_ends == 0
