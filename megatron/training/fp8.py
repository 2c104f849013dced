"""The FP8 layers of a rank: their kernels, and the state that those keep within a step and between steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from megatron.config.fp8 import BLOCKWISE, DELAYED, MXFP8, Fp8Config
from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Group, Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import ExpertMatrices
from megatron.kernels.choose import Kernels
from megatron.kernels.choose_fp8 import Fp8Kernels
from megatron.kernels.choose_fp8_experts import Fp8Experts
from megatron.kernels.ops.fp8 import operands
from megatron.kernels.ops.fp8.formats import FORMATS
from megatron.kernels.ops.fp8.grouped import Fp8Grouped
from megatron.kernels.ops.fp8.linear import Fp8Linear, QuantizingKernel
from megatron.kernels.ops.fp8.measured import MeasuredGrouped, MeasuredLinear
from megatron.kernels.ops.grouped_linear import PlainGrouped
from megatron.kernels.ops.weight_grad import WeightGrad
from megatron.schedule.schedule import Schedule
from megatron.spec.decoder import DecoderSpec
from megatron.spec.fp8 import fp8_experts, fp8_linears
from megatron.spec.linear import COLUMN, ROW, LinearSpec
from megatron.training.fp8_scales import DelayedScales
from megatron.training.microbatches import Microbatches

MaxOverThree = tuple[operands.MaxOver, operands.MaxOver, operands.MaxOver]
Linear = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear
Layer = tuple[Linear, QuantizingKernel] | tuple[ExpertMatrices, Fp8Grouped]


class Fp8Layers:
    """The FP8 layers that this rank holds: linear layers, and the two products of the experts of a layer.

    scales: of all layers of the model; None unless the recipe is delayed.
    choice, experts_choice: for the start-up table.

    A quantized weight is kept from its first use in a step to the end of the step, or of an evaluation.
    """

    def __init__(
        self,
        config: Fp8Config,
        spec: DecoderSpec,
        model: GPTModel,
        groups: Groups,
        plain: Kernels,
        chosen: Fp8Kernels,
        experts: Fp8Experts,
        freed: Collection[str],
        device: torch.device,
    ) -> None:
        """Gives the layers their kernels. plain: the kernels of products that are not in FP8.

        freed: parameters whose memory is freed between two uses. Their quantized form is not kept either.
        """
        linears, modules = fp8_linears(spec, config), dict(model.named_modules())
        stacks = [] if experts.product is None else fp8_experts(spec, config)
        names = [*linears, *stacks]
        self.scales = DelayedScales(names, config, groups.world, device) if config.is_delayed else None
        self.choice, self.experts_choice = chosen.choice, experts.choice
        self._plain = plain
        self._layers: dict[str, Layer] = {}
        for name, linear in linears.items():
            if name in modules:
                module = modules[name]
                assert isinstance(module, Linear)
                self._layers[name] = (
                    module,
                    self._kernel(
                        name,
                        linear,
                        config,
                        groups,
                        chosen,
                        device,
                        keep_weight=f"{name}.weight" not in freed,
                        weight_grad=None if config.fp8_wgrad else plain.weight_grad,
                    ),
                )
        for name in stacks:
            if name in modules:
                module = modules[name]
                assert isinstance(module, ExpertMatrices) and experts.product is not None
                of_layer = self._operands(name, _max_over_experts(groups), config, chosen)
                keep = f"{name}.weight" not in freed
                self._layers[name] = module, Fp8Grouped(of_layer, experts.product, keep_weight=keep)
        self._measured: set[str] = set()
        self._measure(self._layers if config.is_delayed else ())

    def begin_step(self, schedule: Schedule, microbatches: Microbatches) -> None:
        """See StepPart. The weights of the step are new."""
        self.forget()
        if self.scales is not None:
            self.scales.begin_step()

    def end_step(self) -> None:
        """See StepPart. Communication: that of DelayedScales.end_step."""
        self.forget()
        if self.scales is not None:
            self.scales.end_step()
        if self._measured:
            self._measure(())

    def forget(self) -> None:
        """Frees the quantized weights."""
        for _, kernel in self._layers.values():
            kernel.forget()

    def skip_measuring(self) -> None:
        """From now on all products are in FP8, also those of layers without a history, whose scales are 1."""
        self._measure(())

    def load(self, histories: Mapping[str, Tensor]) -> None:
        """Continues with saved histories, by the names of layers; a layer without one begins anew."""
        if self.scales is not None:
            self._measure(self.scales.load(histories))

    def _measure(self, names: Iterable[str]) -> None:
        """From now on these layers have plain products, whose operands are measured, and all others FP8 products."""
        self._measured = {name for name in names if name in self._layers}
        for name, layer in self._layers.items():
            amaxes = self.scales.amaxes_of(name) if self.scales is not None and name in self._measured else None
            if isinstance(layer[1], Fp8Grouped):
                plain = PlainGrouped(self._plain.grouped, self._plain.experts.rows.gather)
                layer[0].kernel = layer[1] if amaxes is None else MeasuredGrouped(plain, amaxes)
            else:
                layer[0].kernel = layer[1] if amaxes is None else MeasuredLinear(self._plain.linear, amaxes)

    def _kernel(
        self,
        name: str,
        linear: LinearSpec,
        config: Fp8Config,
        groups: Groups,
        chosen: Fp8Kernels,
        device: torch.device,
        *,
        keep_weight: bool,
        weight_grad: WeightGrad | None,
    ) -> QuantizingKernel:
        if chosen.engine is None:
            of_layer = self._operands(name, _max_over(linear, groups), config, chosen)
            return Fp8Linear(of_layer, chosen.product, keep_weight=keep_weight, weight_grad=weight_grad)
        assert config.fp8_format is not None
        scales = amaxes = None
        if self.scales is not None:
            scales, amaxes = self.scales.scales_of(name), self.scales.amaxes_of(name)
        return chosen.engine.layer(
            config.fp8_recipe,
            FORMATS[config.fp8_format],
            device,
            scales,
            amaxes,
            _max_over(linear, groups),
            keep_weight=keep_weight,
            weight_grad=weight_grad,
        )

    def _operands(self, name: str, max_over: MaxOverThree, config: Fp8Config, chosen: Fp8Kernels) -> operands.Operands:
        assert config.fp8_format is not None
        formats, recipe = FORMATS[config.fp8_format], config.fp8_recipe
        if recipe == BLOCKWISE:
            return operands.blockwise(formats, chosen.quantize)
        if recipe == MXFP8:
            return operands.mxfp8(formats, chosen.quantize)
        if recipe == DELAYED:
            assert self.scales is not None
            return operands.delayed(formats, self.scales.scales_of(name), self.scales.amaxes_of(name), chosen.quantize)
        return operands.tensorwise(formats, 0, max_over, chosen.quantize)


def _max_over(linear: LinearSpec, groups: Groups) -> MaxOverThree:
    """Returns, for input, weight and gradient of a layer, a max all-reduce over the ranks that hold other parts of it.

    cp divides the tokens. tp divides the outputs of a column layer, the inputs of a row layer, and under sequence
    parallelism the tokens of a replicated layer.
    """
    tp, cp = groups.tp, groups.cp
    inner = (cp,) if linear.parallel == COLUMN else (tp, cp)
    outer = (cp,) if linear.parallel == ROW else (tp, cp)
    return _over(*inner), _over(tp), _over(*outer)


def _max_over_experts(groups: Groups) -> MaxOverThree:
    """Returns, for input, weight and gradient of the experts' products, a max all-reduce over ranks with other parts.

    The rows of a microbatch lie on the ranks of tp and cp. Those that exchange rows are some of these, or hold several
    microbatches together.
    """
    rows = max(groups.etp_ep, groups.tp_cp, key=lambda group: group.size)
    return _over(rows), _over(groups.etp_ep), _over(rows)


def _over(*parts: Group) -> operands.MaxOver:
    def reduce(amax: Tensor) -> None:
        for group in parts:
            all_reduce(amax, group, "max")

    return reduce
