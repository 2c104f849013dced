"""The FP8 layers of a rank: their kernels, and the state that those keep within a step and between steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from megatron.config.fp8 import BLOCKWISE, DELAYED, MXFP8, Fp8Config
from megatron.core.comm.collectives import all_reduce
from megatron.core.groups import Group, Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron.kernels.choose import Kernels
from megatron.kernels.choose_fp8 import Fp8Kernels
from megatron.kernels.ops.fp8 import operands
from megatron.kernels.ops.fp8.formats import FORMATS
from megatron.kernels.ops.fp8.linear import Fp8Linear, QuantizingKernel
from megatron.kernels.ops.fp8.measured import MeasuredLinear
from megatron.kernels.ops.weight_grad import WeightGrad
from megatron.spec.decoder import DecoderSpec
from megatron.spec.fp8 import fp8_linears
from megatron.spec.linear import COLUMN, LinearSpec
from megatron.training.fp8_scales import DelayedScales


class Fp8Layers:
    """The FP8 layers that this rank holds. scales: of all layers of the model; None unless the recipe is delayed.

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
        freed: Collection[str],
        device: torch.device,
    ) -> None:
        """Gives the layers their kernels. plain: the kernels of products that are not in FP8.

        freed: parameters whose memory is freed between two uses. Their quantized form is not kept either.
        """
        linears, modules = fp8_linears(spec, config), dict(model.named_modules())
        self.scales = DelayedScales(list(linears), config, groups.world, device) if config.is_delayed else None
        self.choice = chosen.choice
        self._plain = plain
        self._layers: dict[str, tuple[ColumnParallelLinear | RowParallelLinear, QuantizingKernel]] = {}
        for name, linear in linears.items():
            if name in modules:
                module = modules[name]
                assert isinstance(module, ColumnParallelLinear | RowParallelLinear)
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
        self._measured: set[str] = set()
        self._measure(self._layers if config.is_delayed else ())

    def begin_step(self) -> None:
        """Before the first forward of a step, whose weights are new."""
        self.forget()
        if self.scales is not None:
            self.scales.begin_step()

    def end_step(self) -> None:
        """After the last backward of a step. Communication: that of DelayedScales.end_step."""
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
        for name, (module, kernel) in self._layers.items():
            module.kernel = kernel
            if name in self._measured and self.scales is not None:
                module.kernel = MeasuredLinear(self._plain.linear, self.scales.amaxes_of(name))

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
            of_layer = self._operands(name, linear, config, groups, chosen)
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

    def _operands(
        self, name: str, linear: LinearSpec, config: Fp8Config, groups: Groups, chosen: Fp8Kernels
    ) -> operands.Operands:
        assert config.fp8_format is not None
        formats, recipe = FORMATS[config.fp8_format], config.fp8_recipe
        if recipe == BLOCKWISE:
            return operands.blockwise(formats, chosen.quantize)
        if recipe == MXFP8:
            return operands.mxfp8(formats, chosen.quantize)
        if recipe == DELAYED:
            assert self.scales is not None
            return operands.delayed(formats, self.scales.scales_of(name), self.scales.amaxes_of(name), chosen.quantize)
        return operands.tensorwise(formats, 0, _max_over(linear, groups), chosen.quantize)


def _max_over(linear: LinearSpec, groups: Groups) -> tuple[operands.MaxOver, operands.MaxOver, operands.MaxOver]:
    """Returns, for input, weight and gradient of a layer, a max all-reduce over the ranks that hold other parts of it.

    cp divides the tokens. tp divides the outputs of a column layer and the inputs of a row layer.
    """
    tp, cp = groups.tp, groups.cp
    inner, outer = ((cp,), (tp, cp)) if linear.parallel == COLUMN else ((tp, cp), (cp,))

    def over(*parts: Group) -> operands.MaxOver:
        def reduce(amax: Tensor) -> None:
            for group in parts:
                all_reduce(amax, group, "max")

        return reduce

    return over(*inner), over(tp), over(*outer)
