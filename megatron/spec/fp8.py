"""The layers with FP8 products, by name."""

from __future__ import annotations

from megatron.config.fp8 import Fp8Config
from megatron.spec.decoder import DecoderSpec
from megatron.spec.linear import LinearSpec
from megatron.spec.moe import MoESpec


def fp8_linears(spec: DecoderSpec, fp8: Fp8Config) -> dict[str, LinearSpec]:
    """Returns name -> linear layer of the whole model, in order: those of attention, MLPs and shared experts.

    The output layer, routers, experts and adapters are not among them.
    """
    return {
        f"decoder.layers.{number}.{path}": linear
        for number in fp8.layers(len(spec.layers))
        for path, linear in spec.layers[number].linears().items()
    }


def fp8_experts(spec: DecoderSpec, fp8: Fp8Config) -> list[str]:
    """Returns the names of the stacked weights of experts in layers with FP8 products, in order: two of each layer."""
    return [
        f"decoder.layers.{number}.mlp.experts.{path}"
        for number in fp8.layers(len(spec.layers))
        if isinstance(spec.layers[number].mlp, MoESpec)
        for path in ("linear_fc1", "linear_fc2")
    ]
