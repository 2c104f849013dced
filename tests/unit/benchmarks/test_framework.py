"""The operations, sums and kernels of other frameworks, made from this project's own."""

import dataclasses
import random

import numpy as np
import pytest

from benchmarks.planner.calibration.framework import FLASH, FLASH_1, FUSED_SOFTMAX, TORCH, UNFUSED, Framework
from benchmarks.planner.calibration.framework_step import FrameworkStep
from benchmarks.planner.calibration.framework_work import PLAIN, as_framework
from benchmarks.planner.calibration.prediction import RowRun
from benchmarks.planner.calibration.rows import Planned
from megatron.base.errors import ConfigError
from megatron.config.mesh import mesh_of
from megatron.config.recompute import RecomputeConfig
from megatron.config.settings import resolve
from megatron.planner.time.constants import Constants, fitted
from megatron.planner.time.hardware import FP8, with_device
from megatron.planner.time.model_work import model_work
from megatron.planner.time.operations import Gemm, LayerMessage, Traffic
from megatron.planner.time.software import Software
from megatron.planner.time.step_time import StepModel, step_seconds
from megatron.spec.collectives import ALL_GATHER, ALL_REDUCE, Collective
from tests.unit.planner.models import EXPERTS, LLAMA
from tests.unit.planner.test_monotone import ROUNDING, better, random_cluster, random_run
from tests.unit.planner.test_step_time import H100, LAYOUTS, SHARDED, TP, ZERO_3, run_of

OURS = Framework()
PLAIN_TORCH = Framework(
    fused_norm=False, fused_pointwise=False, fused_loss=False, fused_accumulation=False, split_gate=True
)
FRAMEWORKS = (
    Framework(attention=FLASH, fused_norm=False, fused_pointwise=False, fused_loss=False, blocking_pipeline=True),
    Framework(attention=UNFUSED, fused_accumulation=False, split_gate=True, whole_logits=True),
    Framework(copies_sharded=True, half_on_wire=True),
    Framework(attention=TORCH, whole_sums=True, gathered_loss=True, keeps_gathered=True, recompute_half=True),
)
LATENTS = dataclasses.replace(
    LLAMA,
    group_query_attention=False,
    num_query_groups=None,
    multi_latent_attention=True,
    q_lora_rank=768,
    kv_lora_rank=512,
    qk_layernorm=True,
    mtp_num_layers=1,
)
PHASES = ("forward", "input_grad", "weight_grad")


def step_of(*args, framework=OURS, **kwargs):
    return FrameworkStep(*run_of(*args, **kwargs), H100, framework)


def time_of(*args, **kwargs):
    step = step_of(*args, **kwargs)
    return step.time(step.clock(Constants()))


def work_of(*args, framework=OURS, **kwargs):
    """(operations of this project, those of the framework)."""
    run, settings = run_of(*args, **kwargs)
    ours = model_work(run, settings, framework.software)
    return ours, as_framework(ours, run.recompute, framework)


def named(operations, name):
    return [operation for operation in operations if operation.name == name]


class TestOurOwn:
    @pytest.mark.parametrize("name", list(LAYOUTS))
    def test_a_framework_like_ours_has_our_times(self, name):
        step, model = step_of(*LAYOUTS[name]), StepModel(*run_of(*LAYOUTS[name]), H100, Software())
        assert step.work == model.work
        assert step.time(step.clock(Constants())).parts == model.time(model.clock(Constants())).parts

    def test_experts_and_recompute(self):
        some = RecomputeConfig(recompute_granularity="selective", recompute_modules=("core_attn", "mlp_act"))
        ours, theirs = work_of(model=EXPERTS, recompute=some, framework=Framework(precision=FP8))
        assert ours == theirs and ours.works[0].again

    def test_latents_and_predictions(self):
        ours, theirs = work_of(4, TP, model=LATENTS, framework=Framework(precision=FP8))
        assert ours == theirs
        assert named(ours.works[0].forward, "kv up") and named(ours.head.forward, "prediction's projection")


class TestOperations:
    @pytest.mark.parametrize("framework", [PLAIN_TORCH, *FRAMEWORKS])
    def test_every_operation_of_latents_and_predictions_is_known(self, framework):
        ours, theirs = work_of(4, TP, model=LATENTS, framework=framework)
        for phase in PHASES:
            products = [each.name for each in getattr(ours.works[0], phase) if isinstance(each, Gemm)]
            assert products == [each.name for each in getattr(theirs.works[0], phase) if isinstance(each, Gemm)]

    def test_whole_logits_of_a_prediction(self):
        """Forward has both heads and both losses, and backward begins with the gradient of a loss."""
        _, work = work_of(4, TP, model=LATENTS, framework=Framework(whole_logits=True))
        for name, count in (("head", 2), ("loss", 2)):
            kind = Gemm if name == "head" else Traffic
            found = [each for each in named(work.head.forward, name) if isinstance(each, kind)]
            assert len(found) == count
            assert not [each for each in named(work.head.input_grad, name) if isinstance(each, kind)]
        assert len(named(work.head.input_grad, "loss gradient")) == 2
        assert len(named(work.head.input_grad, "head, input gradient")) == 2

    def test_traffic_of_plain_torch(self):
        """The counts of the table at the head of framework_work.py, in channels per token."""
        _, work = work_of(framework=PLAIN_TORCH)
        tokens, hidden, ffn = 4096, LLAMA.hidden_size, LLAMA.ffn_hidden_size
        rotary = (LLAMA.num_attention_heads + LLAMA.num_query_groups) * 128
        counts = {
            "forward": {"attention norm": 18 * hidden, "MLP norm": 18 * hidden, "residual": 3 * hidden}
            | {"rotary": 25 * rotary, "activation": 5 * ffn},
            "input_grad": {"attention norm, gradient": 30 * hidden, "residual gradient": 2 * hidden}
            | {"rotary gradient": 25 * rotary, "activation gradient": 11 * ffn, "sum of two gradients": 3 * hidden},
        }
        for phase, channels in counts.items():
            for name, count in channels.items():
                for traffic in named(getattr(work.works[0], phase), name):
                    assert traffic.nbytes == 2 * tokens * count, name
                    assert (traffic.kind == PLAIN) != (name.startswith("residual") or name.startswith("sum")), name
                assert named(getattr(work.works[0], phase), name), name
        loss = [named(work.head.input_grad, name)[0].nbytes / tokens for name in ("loss", "loss gradient")]
        assert loss == [34 * 32000, 20 * 32000]
        _, work = work_of(model=dataclasses.replace(LLAMA, swiglu=False), framework=PLAIN_TORCH)
        names = {"forward": "activation", "input_grad": "activation gradient"}
        found = [named(getattr(work.works[0], phase), name)[0].nbytes for phase, name in names.items()]
        assert found == [2 * tokens * ffn * count for count in (4, 5)]
        assert not named(work.works[0].input_grad, "sum of two gradients")

    def test_sums_of_weight_gradients_in_kernels_of_their_own(self):
        """The products that they follow write in half precision, also where they hide a message."""
        for half, nbytes in ((False, 10), (True, 6)):
            framework = Framework(fused_accumulation=False, half_gradients=half)
            _, work = work_of(4, TP, framework=framework)
            layer = work.works[0]
            products = [operation for operation in layer.weight_grad if isinstance(operation, Gemm)]
            behind = [operation.behind for operation in layer.weight_grad if isinstance(operation, LayerMessage)]
            assert len(products) == 4 and len(behind) == 2 and not any(each.accumulates for each in products + behind)
            for product in products:
                (added,) = named(layer.weight_grad, f"{product.name.split(',')[0]}, sum of gradients")
                assert added.nbytes == nbytes * product.m * product.n
            assert all(each.accumulates for each in work.head.weight_grad)

    def test_a_split_gate_communicates_twice(self):
        ours, work = work_of(4, TP, framework=Framework(split_gate=True))
        for phase, count in zip(PHASES, (1, 1, 1)):
            before, after = (
                [each for each in named(getattr(layers.works[0], phase), "fc1") if isinstance(each, LayerMessage)]
                for layers in (ours, work)
            )
            assert (len(before), len(after)) == (count, 2 * count)
        _, once = work_of(4, TP, framework=Framework(split_gate=True, keeps_gathered=True))
        assert len([each for each in once.works[0].forward if each.name == "fc1"]) == 2  # a product and its message

    def test_a_gathered_norm_is_not_gathered_again(self):
        def gathers(work, phase):
            operations = (*getattr(work.works[0], phase), *getattr(work.head, phase))
            calls = [each for each in operations if isinstance(each, LayerMessage) and each.call.op == ALL_GATHER]
            return [each.name for each in calls]

        ours, work = work_of(4, TP, framework=Framework(keeps_gathered=True, whole_logits=True))
        assert gathers(ours, "forward") == ["qkv", "fc1"]
        assert gathers(ours, "input_grad") == ["qkv", "proj", "fc1", "fc2", "head", "head"]
        assert gathers(work, "forward") == ["qkv", "fc1", "head"]
        assert gathers(work, "input_grad") == ["proj", "fc2"]

    def test_gathered_logits(self):
        ours, work = work_of(4, TP, framework=Framework(gathered_loss=True, whole_logits=True))
        logits = 4096 * 32000
        (gather,) = [each for each in named(work.head.forward, "loss") if isinstance(each, LayerMessage)]
        assert (gather.call.op, gather.call.nbytes) == (ALL_GATHER, 2 * logits // 4)
        assert named(work.head.forward, "copies of the logits")[0].nbytes == 8 * logits
        for phase, name, nbytes in (("forward", "loss", 10), ("input_grad", "loss gradient", 6)):
            (traffic,) = [each for each in getattr(work.head, phase) if isinstance(each, Traffic) and each.name == name]
            assert traffic.nbytes == nbytes * logits
        assert ours.works == work.works
        alone = [work_of(framework=Framework(gathered_loss=gathered))[1].head for gathered in (False, True)]
        assert alone[0] == alone[1]  # without tensor parallelism

    def test_every_second_product_is_repeated(self):
        _, work = work_of(4, TP, framework=Framework(recompute_half=True))
        again = work.works[0].again
        assert [each.name for each in again if isinstance(each, Gemm)] == ["proj", "fc2"]
        assert [each for each in again if isinstance(each, Traffic)] == [
            each for each in work.works[0].forward if isinstance(each, Traffic)
        ]
        assert not any(isinstance(each, LayerMessage) for each in again)

    def test_repeated_modules_are_changed_as_well(self):
        some = RecomputeConfig(recompute_granularity="selective", recompute_modules=("norm", "mlp"))
        _, work = work_of(recompute=some, framework=PLAIN_TORCH)
        assert [each.name for each in work.works[0].again] == [
            *("attention norm", "residual", "MLP norm", "residual", "fc1", "activation", "fc2"),
        ]
        assert all(each in work.works[0].forward for each in work.works[0].again)

    def test_an_unknown_operation_is_refused_by_name(self):
        run, settings = run_of()
        work = model_work(run, settings, Software())
        layer = work.works[0]
        message = LayerMessage("gate", Collective(ALL_REDUCE, "tp", 1))
        for operation in (Traffic("gate", 1.0), Gemm("gate, weight gradient", 1, 1, 1), message):
            wider = dataclasses.replace(layer, weight_grad=(*layer.weight_grad, operation))
            for framework in (OURS, PLAIN_TORCH):
                with pytest.raises(ConfigError, match="'gate' is not known for other frameworks"):
                    as_framework(dataclasses.replace(work, works=(wider,)), run.recompute, framework)


class TestTimes:
    def test_kernels_of_attention(self):
        seconds = {
            kind: time_of(framework=Framework(attention=kind), seq=16384, batch=4).seconds
            for kind in (FLASH, FLASH_1, TORCH, FUSED_SOFTMAX, UNFUSED)
        }
        assert seconds[FLASH] < seconds[TORCH] < seconds[FLASH_1] < seconds[UNFUSED]
        assert seconds[FLASH] < seconds[FUSED_SOFTMAX] < seconds[UNFUSED]
        assert time_of(seq=16384, batch=4).seconds < seconds[FLASH]  # FlashAttention 3 on Hopper

    def test_plain_kernels_cost_memory_traffic(self):
        fused = time_of()
        plain = time_of(framework=Framework(fused_norm=False, fused_pointwise=False, fused_loss=False))
        assert plain.parts["memory"] > 3 * fused.parts["memory"] and plain.parts["gemm"] == fused.parts["gemm"]

    def test_the_host_queues_more_kernels_of_plain_torch(self):
        small = dataclasses.replace(LLAMA, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4)
        fused, plain = (time_of(model=small, seq=256, framework=each) for each in (OURS, PLAIN_TORCH))
        assert plain.parts["host"] > 2 * fused.parts["host"]

    def test_how_a_framework_communicates(self):
        """Whole sums of gradients and gathered logits cost time; a norm that is gathered once saves some."""
        plain = time_of(8, TP, framework=Framework(fused_loss=False))
        gathered = time_of(8, TP, framework=Framework(fused_loss=False, gathered_loss=True, whole_logits=True))
        assert gathered.parts["tp"] > plain.parts["tp"] and gathered.parts["memory"] > plain.parts["memory"]
        one = time_of(8, framework=Framework(fused_loss=False))
        assert time_of(8, framework=Framework(fused_loss=False, gathered_loss=True)).seconds == one.seconds
        kept = time_of(8, TP, framework=Framework(fused_loss=False, keeps_gathered=True))
        assert kept.parts["tp"] < plain.parts["tp"] and kept.parts["gemm"] == plain.parts["gemm"]
        sharded, whole = (time_of(8, SHARDED, framework=Framework(whole_sums=kind)) for kind in (False, True))
        assert whole.parts["dp"] > 1.4 * sharded.parts["dp"]

    def test_whole_sums_are_all_reduces_between_all_replicas(self):
        calls = []

        class Clock:
            def traffic(self, nbytes):
                calls.append(("copies", nbytes))
                return 0.0

            def bucket(self, place, op, nbytes):
                calls.append((op, place.size, nbytes))
                return 0.0

        step = step_of(8, {**SHARDED, "num_distributed_optimizer_instances": 2}, framework=Framework(whole_sums=True))
        (held,) = step.replicas.held
        step.replicas.reduce(Clock(), held)
        assert calls == [("copies", 24 * held.all), (ALL_REDUCE, 4, 4 * held.all), (ALL_REDUCE, 2, 4 * held.all)]

    def test_gradients_in_half_precision(self):
        wire, whole = (time_of(8, SHARDED, framework=Framework(half_on_wire=kind)) for kind in (True, False))
        assert wire.parts["dp"] < whole.parts["dp"]
        sums = [
            time_of(framework=Framework(fused_accumulation=False, half_gradients=kind)).parts["memory"]
            for kind in (True, False)
        ]
        assert sums[0] < sums[1]

    def test_copies_around_sharded_parameters(self):
        """4 and 10 bytes per parameter of forward and backward, in each microbatch."""
        step, plain = (step_of(16, ZERO_3, framework=Framework(copies_sharded=kind)) for kind in (True, False))
        clock = step.clock(Constants())
        copied, (stage,) = step.stages(clock)[0], plain.stages(clock)
        moved = clock.traffic(step.replicas.held[0].all)
        assert copied.forward["memory"] == pytest.approx(stage.forward["memory"] + 4 * moved)
        assert copied.input_grad["memory"] == pytest.approx(stage.input_grad["memory"] + 10 * moved)
        assert copied.forward.get("dp", 0.0) <= stage.forward.get("dp", 0.0)
        assert copied.input_grad["dp"] == stage.input_grad["dp"]
        alone = time_of(framework=Framework(copies_sharded=True))
        assert alone.parts == time_of().parts  # nothing is sharded

    def test_a_pipeline_that_waits_for_messages(self):
        flags = {"pipeline_model_parallel_size": 4}
        waiting = time_of(8, flags, framework=Framework(blocking_pipeline=True))
        assert waiting.seconds > time_of(8, flags).seconds
        assert waiting.seconds == time_of(8, {**flags, "overlap_p2p_communication": False}).seconds


def cases(seed, count):
    rng = random.Random(seed)
    while count:
        drawn = random_run(rng)
        if drawn is not None:
            count -= 1
            yield rng, *drawn, random_cluster(rng), rng.choice(FRAMEWORKS)


def step_on(run, ranks, cluster, framework):
    return FrameworkStep(run, resolve(run, mesh_of(run.parallel, ranks)), cluster, framework)


def test_better_hardware_is_never_slower():
    for rng, run, ranks, cluster, framework in cases(1, 30):
        names = ("flops", "bandwidth", "link", "network", "host")
        clusters = [cluster, *(better(cluster, name, 10 ** rng.uniform(0.01, 2)) for name in names)]
        before, *after = step_seconds([step_on(run, ranks, each, framework) for each in clusters], fitted())[:, 0]
        slower = {name: seconds / before for name, seconds in zip(names, after) if seconds > before * (1 + ROUNDING)}
        assert not slower, (slower, run.parallel, run.train, run.data.seq_length, cluster, framework)


def test_parts_add_up():
    for _, run, ranks, cluster, framework in cases(2, 20):
        step = step_on(run, ranks, cluster, framework)
        time = step.time(step.clock(fitted()))
        assert sum(time.parts.values()) == pytest.approx(time.seconds, rel=ROUNDING)
        assert float(np.squeeze(step_seconds([step], fitted()))) == pytest.approx(time.seconds, rel=ROUNDING)
        assert all(seconds > -ROUNDING * time.seconds for seconds in time.parts.values()), time.parts


def test_more_memory_removes_no_layout():
    """A run that fits a device fits one with more memory."""
    fitted_once = 0
    for rng, run, ranks, cluster, framework in cases(5, 6):
        settings = resolve(run, mesh_of(run.parallel, ranks))
        fits = []
        for memory in sorted(2**30 * 10 ** rng.uniform(0, 2.5) for _ in range(6)):
            planned = Planned(run, settings, with_device(cluster, memory=memory), framework)
            fits.append(RowRun({}, planned, None).fits)
        assert fits == sorted(fits)
        fitted_once += fits[-1]
    assert fitted_once
