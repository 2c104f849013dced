"""FP8 layers of a run: their scales, and the products of each step."""

import functools
import hashlib
import math

import numpy as np
import pytest
import torch

from megatron.config.fp8 import Fp8Config
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import ExpertMatrices
from megatron.core.transformer.moe.router import Router
from megatron.kernels.ops.fp8.grouped import Fp8Grouped
from megatron.kernels.ops.fp8.linear import Fp8Linear
from megatron.kernels.ops.fp8.measured import MeasuredGrouped, MeasuredLinear
from megatron.kernels.ops.grouped_linear import PlainGrouped
from megatron.kernels.ops.linear import PlainLinear
from megatron.tooling.host_reads import host_reads
from megatron.training.checkpoint import save_checkpoint
from megatron.training.fp8_scales import DelayedScales
from megatron.training.setup import build
from tests import pool
from tests.unit.config.moe_cases import MOE
from tests.unit.config.runs import SHORT_RUN, make_run
from tests.unit.models.builds import CPU

RUN = {
    **SHORT_RUN,
    "num_layers": 2,
    "num_attention_heads": 2,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 6,
    "bf16": True,
}
DELAYED = {**RUN, "fp8_format": "hybrid", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
BLOCKWISE = {**RUN, "fp8_format": "e4m3", "fp8_recipe": "blockwise"}
EXPERTS = {**MOE, "moe_ffn_hidden_size": 20, "swiglu": True}
LAYERS = [
    f"decoder.layers.{number}.{path}"
    for number in range(2)
    for path in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
]


def scales_after(steps, **fields):
    """(scales, state) of a layer after steps with these largest values of input, weight and gradient."""
    config = Fp8Config(fp8_format="hybrid", **fields)
    state = DelayedScales(["a", "b"], config, pool.groups().world, CPU)
    for amaxes in steps:
        state.begin_step()
        for cell, value in zip(state.amaxes_of("b"), amaxes, strict=True):
            cell.fill_(value)
        state.end_step()
    return [cell.item() for cell in state.scales_of("b")], state


class TestDelayedScales:
    STEPS = ((2.0, 3.0, 0.001), (8.0, 1.0, 0.0005), (1.0, 1.5, 0.0007))

    @pytest.mark.parametrize(
        ("fields", "amaxes"),
        [
            ({}, (1.0, 1.5, 0.0007)),
            ({"fp8_amax_history_len": 3}, (1.0, 1.5, 0.0007)),
            ({"fp8_amax_history_len": 2, "fp8_amax_compute_algo": "max"}, (8.0, 1.5, 0.0007)),
            ({"fp8_amax_history_len": 8, "fp8_amax_compute_algo": "max", "fp8_margin": 2}, (8.0, 3.0, 0.001)),
        ],
    )
    def test_they_follow_the_last_step_or_the_largest(self, fields, amaxes):
        found, _ = scales_after(self.STEPS, **fields)
        most = np.float32([448, 448, 57344])
        expected = most / np.float32(amaxes) / np.float32(2.0 ** fields.get("fp8_margin", 0))
        assert np.array_equal(np.float32(found), expected)

    @pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
    def test_a_value_without_size_leaves_history_and_scale(self, bad):
        fields = {"fp8_amax_history_len": 2, "fp8_amax_compute_algo": "max"}
        expected, before = scales_after(self.STEPS, **fields)
        found, after = scales_after([*self.STEPS, (bad, 4.0, bad)], **fields)
        assert (found[0], found[2]) == (expected[0], expected[2]) and found[1] == 448 / 4.0
        history, old = after.histories()["b"], before.histories()["b"]
        assert torch.equal(history[[0, 2]], old[[0, 2]]) and history[1].tolist() == [4.0, 1.5]

    def test_a_layer_that_never_ran_has_none(self):
        _, state = scales_after(self.STEPS)
        assert [cell.item() for cell in state.scales_of("a")] == [1.0, 1.0, 1.0]
        assert state.load({name: history.clone() for name, history in state.histories().items()}) == {"a"}

    @pytest.mark.parametrize("length", [1, 2, 5])
    def test_a_history_of_another_length_goes_on(self, length):
        _, saved = scales_after(self.STEPS, fp8_amax_history_len=3)
        _, state = scales_after((), fp8_amax_history_len=length)
        assert state.load({"b": saved.histories()["b"].clone()}) == {"a"}
        kept = [1.0, 8.0, 2.0][:length]
        assert state.histories()["b"][0].tolist() == kept + [0.0] * (length - len(kept))
        assert state.scales_of("b")[0].item() == 448.0

    def test_a_gradient_that_nobody_wants_makes_no_layer_new(self):
        _, state = scales_after([(1.0, 1.0, 0.0)])
        assert state.load({"a": torch.ones(3, 1), "b": state.histories()["b"].clone()}) == set()


def trainer_of(fields):
    return build(make_run(**fields), pool.groups(), CPU)


def kernels(trainer):
    """Name of a linear layer -> the class of its kernel."""
    kinds = ColumnParallelLinear, RowParallelLinear
    return {name: type(module.kernel) for name, module in trainer.model.named_modules() if isinstance(module, kinds)}


def of_experts(trainer):
    """The kernels of the products of experts."""
    return [module.kernel for module in trainer.model.modules() if isinstance(module, ExpertMatrices)]


def losses(trainer, steps):
    return [trainer.train_step().loss for _ in range(steps)]


def digest(trainer):
    """Of all parameters."""
    found = hashlib.sha256()
    for parameter in trainer.parameters.values():
        found.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class TestLayers:
    def test_the_linear_layers_of_the_decoder_and_not_the_head(self):
        found = kernels(trainer_of(BLOCKWISE))
        assert found == dict.fromkeys(LAYERS, Fp8Linear) | {"output_layer": PlainLinear}

    def test_first_and_last_layers_stay(self):
        fields = {"num_layers": 4, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2}
        found = kernels(trainer_of(BLOCKWISE | fields))
        assert {name for name, kind in found.items() if kind is Fp8Linear} == {
            name.replace("layers.0", "layers.1") for name in LAYERS[:4]
        }

    def test_experts_and_shared_experts_and_not_routers(self):
        trainer = trainer_of(BLOCKWISE | EXPERTS | {"moe_shared_expert_intermediate_size": 32})
        found = {name.partition("layers.0.")[2] for name, kind in kernels(trainer).items() if kind is Fp8Linear}
        shared = {"mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"}
        assert found - {""} == {"self_attention.linear_qkv", "self_attention.linear_proj"} | shared
        assert [type(kernel) for kernel in of_experts(trainer)] == [Fp8Grouped] * 4
        assert any(isinstance(module, Router) for module in trainer.model.modules())
        assert all(math.isfinite(loss) for loss in losses(trainer, 3))

    def test_experts_stay_where_no_kernel_multiplies_them(self):
        trainer = trainer_of(BLOCKWISE | EXPERTS | {"fp8_recipe": "mxfp8", "hidden_size": 64, "ffn_hidden_size": 64})
        assert [type(kernel) for kernel in of_experts(trainer)] == [PlainGrouped] * 4
        assert trainer.step.features.fp8.experts_choice == "none (there are no grouped products with mxfp8 scales)"


class TestExperts:
    @pytest.mark.parametrize("fields", [DELAYED, BLOCKWISE], ids=["delayed", "blockwise"])
    def test_losses_are_near_those_of_bf16(self, fields):
        """As near as those of a dense model; and not the same."""
        plain, trainer = trainer_of(RUN | EXPERTS), trainer_of(fields | EXPERTS)
        expected, found = losses(plain, 6), losses(trainer, 6)
        assert found[-1] != expected[-1] and found == pytest.approx(expected, rel=2e-3)

    def test_the_first_step_with_delayed_scales_measures_and_is_that_of_bf16(self):
        plain, trainer = trainer_of(RUN | EXPERTS), trainer_of(DELAYED | EXPERTS)
        assert [type(kernel) for kernel in of_experts(trainer)] == [MeasuredGrouped] * 4
        assert losses(trainer, 1) == losses(plain, 1) and digest(trainer) == digest(plain)
        assert [type(kernel) for kernel in of_experts(trainer)] == [Fp8Grouped] * 4
        histories = trainer.step.features.fp8.scales.histories()
        for path in ("linear_fc1", "linear_fc2"):
            first = histories[f"decoder.layers.1.mlp.experts.{path}"]
            assert (first[:, 0] > 0).all() and (first[:, 1:] == 0).all()

    def test_a_run_continues_with_the_histories_of_experts(self, tmp_path):
        fields = DELAYED | EXPERTS | {"save": str(tmp_path)}
        whole, first = trainer_of(fields), trainer_of(fields)
        losses(first, 2)
        save_checkpoint(first)
        rest = trainer_of(fields | {"load": str(tmp_path)})
        assert [type(kernel) for kernel in of_experts(rest)] == [Fp8Grouped] * 4
        assert torch.equal(rest.step.features.fp8.scales.history, first.step.features.fp8.scales.history)
        assert losses(whole, 4)[2:] == losses(rest, 2) and digest(whole) == digest(rest)

    @pytest.mark.parametrize("fields", [DELAYED, BLOCKWISE], ids=["delayed", "blockwise"])
    @pytest.mark.parametrize("again", [("moe",), ("moe_act", "norm")], ids=str)
    def test_recompute_changes_no_bit(self, fields, again):
        more = {"recompute_granularity": "selective", "recompute_modules": again}
        plain, trainer = trainer_of(fields | EXPERTS), trainer_of(fields | EXPERTS | more)
        assert losses(plain, 3) == losses(trainer, 3) and digest(plain) == digest(trainer)


class TestSteps:
    def test_the_first_step_with_delayed_scales_measures_and_is_that_of_bf16(self):
        plain, trainer = trainer_of(RUN), trainer_of(DELAYED)
        assert {kernels(trainer)[name] for name in LAYERS} == {MeasuredLinear}
        assert losses(trainer, 1) == losses(plain, 1)
        assert digest(trainer) == digest(plain)
        assert {kernels(trainer)[name] for name in LAYERS} == {Fp8Linear}
        first = next(iter(trainer.step.features.fp8.scales.histories().values()))
        assert (first[:, 0] > 0).all() and (first[:, 1:] == 0).all()
        (in_fp8,), (in_bf16,) = losses(trainer, 1), losses(plain, 1)
        assert in_fp8 != in_bf16 and in_fp8 == pytest.approx(in_bf16, rel=1e-3)

    @pytest.mark.parametrize(
        "fields", [DELAYED, pytest.param(BLOCKWISE, marks=[pytest.mark.slow])], ids=["delayed", "blockwise"]
    )
    def test_an_evaluation_changes_no_step(self, fields):
        plain, evaluated = trainer_of(fields), trainer_of(fields | {"eval_iters": 1, "eval_interval": 1})
        for _ in range(4):
            evaluated.evaluate(evaluated.readers.valid)
            assert losses(plain, 1) == losses(evaluated, 1)
        assert digest(plain) == digest(evaluated)

    def test_the_order_of_microbatches_changes_no_scale(self):
        """Amaxes are maxima over the step, so its microbatches may come in any order or size."""
        small, large = trainer_of(DELAYED | {"micro_batch_size": 1}), trainer_of(DELAYED | {"micro_batch_size": 4})
        losses(small, 1)
        losses(large, 1)
        assert torch.equal(small.step.features.fp8.scales.history, large.step.features.fp8.scales.history)

    def test_weight_gradients_in_bf16(self):
        one, other = trainer_of(BLOCKWISE), trainer_of(BLOCKWISE | {"fp8_wgrad": False})
        assert losses(one, 1) == losses(other, 1), "the forward is the same"
        assert losses(one, 2) != losses(other, 2)

    def test_the_host_reads_once_per_step(self):
        trainer = trainer_of(DELAYED)
        trainer.reads_late = True
        for _ in range(3):
            trainer.queue_step()
        with host_reads() as reads:
            trainer.queue_step()
        assert len(reads) == 1, reads

    def test_a_step_with_nan_leaves_histories_and_scales(self):
        trainer = trainer_of(DELAYED)
        losses(trainer, 2)
        scales = trainer.step.features.fp8.scales
        before = scales.history.clone(), scales._scales.clone()
        weight = trainer.parameters["decoder.final_layernorm.weight"]
        kept = weight.detach().clone()
        weight.data.fill_(math.nan)
        trainer.train_step()
        gradients = torch.arange(len(before[1])) % 3 == 2
        assert torch.equal(scales.history[gradients], before[0][gradients])
        assert torch.equal(scales._scales[gradients], before[1][gradients])
        weight.data.copy_(kept)
        assert all(math.isfinite(loss) for loss in losses(trainer, 2))


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FEATURES = {
    "recompute": FULL,
    "gemm-last": {"kaimm_recompute_norm": True, "kaimm_recompute_mlp_activation_func": True},
    "mlp again": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "core_attn")},
    "activation offload": {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
    "parts offloaded": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ("mlp_fc1", "mlp_act", "attn_proj"),
    },
    "optimizer states offloaded": {"offload_optimizer_states": True},
    "optimizer updates offloaded": {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
    "weights offloaded": {"cpu_offloading_weights": True, "cpu_offloading_num_layers": 1},
}
QUICK = {("hybrid", "recompute"), ("e4m3", "gemm-last")}


@functools.cache
def plain_run(delayed):
    trainer = trainer_of(DELAYED if delayed else BLOCKWISE)
    return losses(trainer, 4), digest(trainer)


@pytest.mark.parametrize(
    ("delayed", "feature"),
    [
        pytest.param(
            delayed, name, marks=[] if ("hybrid" if delayed else "e4m3", name) in QUICK else [pytest.mark.slow]
        )
        for delayed in (True, False)
        for name in FEATURES
    ],
)
def test_where_tensors_are_changes_no_bit(delayed, feature):
    trainer = trainer_of((DELAYED if delayed else BLOCKWISE) | FEATURES[feature])
    found = losses(trainer, 4)
    trainer.data_parallel.synchronize()
    if feature == "weights offloaded":
        assert found == plain_run(delayed)[0]
        kept = {name: kernel.weight.keep for name, (_, kernel) in trainer.step.features.fp8._layers.items()}
        assert kept == {name: "layers.1" in name for name in LAYERS}, "a quantized copy would stay on the device"
    else:
        assert (found, digest(trainer)) == plain_run(delayed)
