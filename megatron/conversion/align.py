"""Compares a Hugging Face model with this program's: every site of every layer, logits, first choices, gradients.

Errors are counted in units in the last place (ulps) of the compared precision, so that 1 is one rounding. An ablation
then runs our model with one operation at a time computed as transformers computes it: an operation that reduces the
error is its cause.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from megatron.base.box import Box
from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.core.groups import Groups
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hf.families import read_config
from megatron.core.models.hf.family.family import Family
from megatron.core.models.hf.names import BLOCKS, table
from megatron.core.models.hf.source import HFSource
from megatron.core.models.source import Source, fill
from megatron.core.parameter import Parameter, local_parameters
from megatron.core.tensor_parallel.random import RngTracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.context import Build
from megatron.core.transformer.moe.layer import MoELayer
from megatron.core.transformer.norm import Norm
from megatron.kernels.choose import choose_kernels
from megatron.kernels.ops.activation import Activation
from megatron.kernels.ops.attention_scores import Scores
from megatron.spec.attention import AttentionSpec
from megatron.spec.decoder import DecoderSpec, LayerSpec, decoder_spec
from megatron.spec.delta_net import DeltaNetSpec
from megatron.spec.latent_attention import LatentAttentionSpec
from megatron.spec.linear import LinearSpec
from megatron.spec.moe import MoESpec
from megatron.spec.norm import NormSpec

SITES = (
    "norm",
    "q latent",
    "kv latent",
    "q",
    "kv",
    "k",
    "v",
    "q rotated",
    "k rotated",
    "attention",
    "o_proj",
    "o_proj norm",
    "mlp norm",
    "router",  # the weight of each expert, 0 for those that are not chosen
    "experts",  # the sum of a token's experts, and of the shared ones
    "gate",
    "up",
    "activation",
    "down",
    "down norm",
)
# Our norm in a layer, and a projection of a linear layer -> the site that holds its output.
_NORM_SITES = {
    "input_layernorm": "norm",
    "post_self_attn_layernorm": "o_proj norm",
    "pre_mlp_layernorm": "mlp norm",
    "post_mlp_layernorm": "down norm",
}
_LINEAR_SITES = {
    "q_a_proj": "q latent",
    "q_b_proj": "q",
    "kv_a_proj_with_mqa": "kv latent",
    "kv_b_proj": "kv",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o_proj",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
TIE = 2  # ulps
SiteTensors = dict[tuple[int, str], Tensor]  # (layer, site) -> [b, s, channels]; layer -1: after the last one


@dataclass(frozen=True)
class SiteDifference:
    """Two tensors at a site: largest and mean distance in ulps, and the fraction of elements that differ in their
    bits."""

    layer: int
    site: str
    max_ulps: float
    mean_ulps: float
    differing: float


def compare(layer: int, site: str, ours: Tensor, theirs: Tensor) -> SiteDifference:
    """Returns distances in ulps of the compared dtype at the larger element's size, at least its tensor's mean size.

    Without that lower limit an element that cancels to nearly zero would count as millions of ulps off.
    """
    a, b = ours.double(), theirs.double()
    ulps = _ulps(a, b, theirs.dtype, floor=float(b.abs().mean()))
    return SiteDifference(layer, site, float(ulps.max()), float(ulps.mean()), float((a != b).double().mean()))


@dataclass(frozen=True)
class Choices:
    """A comparison of the likeliest tokens of two models at a number of positions.

    `ties` counts the differing positions whose two tokens are at most TIE ulps apart in the other model's logits: one
    rounding of either swaps them. An untrained model has many such positions, a trained one few.
    """

    positions: int
    same: int
    ties: int

    def __add__(self, other: Choices) -> Choices:
        return Choices(self.positions + other.positions, self.same + other.same, self.ties + other.ties)


def first_choices(ours: Tensor, theirs: Tensor) -> Choices:
    """Compares logits [..., vocabulary]."""
    chosen, expected = (x.argmax(-1, keepdim=True) for x in (ours, theirs))
    apart = _ulps(theirs.gather(-1, chosen).double(), theirs.gather(-1, expected).double(), theirs.dtype)
    other = chosen != expected
    return Choices(other.numel(), int((~other).sum()), int((other & (apart <= TIE)).sum()))


def _ulps(a: Tensor, b: Tensor, dtype: torch.dtype, *, floor: float = 0.0) -> Tensor:
    """Returns distances of fp64 numbers in ulps of `dtype`, at the size of the larger one or of `floor`."""
    size = torch.maximum(a.abs(), b.abs()).clamp(min=floor + torch.finfo(torch.float64).tiny)
    return (a - b).abs() / (torch.finfo(dtype).eps * torch.exp2(size.log2().floor()))


class ModelPair:
    """One model in transformers and here, from the same folder, in the same dtype, on the CPU or one GPU."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, groups: Groups, device: torch.device, *, ours: Source | None
    ) -> None:
        """`ours` is the source of our weights; the same folder if None. Raises CheckpointError for a folder that cannot
        be read.
        """
        same = HFSource(folder)  # before transformers reads it, which may take a bad path for a name to download
        theirs: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        self.theirs = theirs.to(device)
        source = ours or same
        self.family = read_config(folder)[0]
        if not self.family.has_sites or same.model.has_delta_net:
            raise ConfigError(f"{folder} is a {self.family.model_type}, whose modules are not compared one by one")
        compared = dataclasses.replace(same.model, mtp_num_layers=0)  # transformers predicts no further tokens
        self.table = table(self.family, compared, stacked=True)  # as transformers has experts in memory
        self.config: ModelConfig = dataclasses.replace(
            source.model,
            attention_dropout=0.0,
            mtp_num_layers=0,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            attention_backend="unfused",
        )
        self._kernels = choose_kernels(self.config, device)
        self._recorder = _Recorder(self._kernels.attention)
        # Norms and rotations are replaced, and are sites of their own: they leave additions and the split alone.
        fused = self._kernels.fused
        fused = fused._replace(norm=fused.norm._replace(residual=None), split=None)
        self._kernels = dataclasses.replace(self._kernels, fused=fused)
        kernels = dataclasses.replace(self._kernels, attention=self._recorder.attention)
        build = Build(self.config, groups, False, kernels, RngTracker(0, groups, device), device)
        self.ours = GPTModel(build)
        self.parameters: dict[str, Parameter] = local_parameters(self.ours)
        fill(self.parameters, source, dict(self.ours.named_buffers()))
        self.device = device

    @torch.no_grad()
    def record(self, tokens: Tensor) -> tuple[SiteTensors, SiteTensors]:
        """Records all sites of both models for tokens [b, s]."""
        theirs = _record_theirs(self.theirs, self.family, decoder_spec(self.config), tokens)
        ours = self._recorder.record(self.ours, self.config, tokens)
        return ours, theirs

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Returns our logits, [b, s, vocabulary]."""
        return _logits(self.ours, self.config, tokens)

    @torch.no_grad()
    def choices(self, tokens: Tensor) -> Choices:
        """Returns the first choices of both models for tokens [b, s]."""
        return first_choices(self.logits(tokens), self.theirs(tokens).logits)

    def gradients(self, tokens: Tensor) -> Iterator[tuple[str, float]]:
        """Yields (our parameter, largest gradient difference divided by its largest gradient), for the mean loss."""
        labels = tokens[:, 1:]
        F.cross_entropy(self.theirs(tokens[:, :-1]).logits.float().flatten(0, 1), labels.flatten()).backward()
        positions = torch.arange(labels.shape[1], device=self.device).unsqueeze(0)
        self.ours(tokens[:, :-1], positions, labels=labels).mean().backward()
        theirs = dict(self.theirs.named_parameters())
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            difference, largest = 0.0, 0.0
            for box, other, their_box in self.table.of_ours(name, Box((0,) * parameter.dim(), tuple(parameter.shape))):
                expected = theirs[other].grad[_place(their_box)].view(box.shape).double()
                difference = max(difference, float((parameter.grad[_place(box)].double() - expected).abs().max()))
                largest = max(largest, float(expected.abs().max()))
            yield name, difference / largest if largest else difference


def differences(ours: SiteTensors, theirs: SiteTensors) -> list[SiteDifference]:
    """Returns the differences at every site, in the order of computation."""
    assert ours.keys() == theirs.keys()
    return [compare(layer, site, ours[layer, site], theirs[layer, site]) for layer, site in theirs]


def ablation(pair: ModelPair, tokens: Tensor, theirs: Tensor) -> list[tuple[str, SiteDifference]]:
    """Returns the logits' differences: unchanged, with each operation of transformers, and with all of them."""
    rows = [("as it is", compare(-1, "logits", pair.logits(tokens), theirs))]
    operations = _as_theirs(pair)
    for name, patches in {**operations, "all": [patch for held in operations.values() for patch in held]}.items():
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(_replaced(*patch))
            rows.append((f"{name} as theirs", compare(-1, "logits", pair.logits(tokens), theirs)))
    return rows


class _Recorder:
    """Records the tensors at the sites of our model as [b, s, channels], transposed from [s, b, channels]."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._layer, self._latents = kernel, 0, False
        self._record: SiteTensors = {}

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Calls the kernel and records rotated queries and keys, where transformers has them in our order."""
        if not self._latents:
            self._note("q rotated", q.flatten(2))
            self._note("k rotated", k.flatten(2))
        output: Tensor = self._kernel(q, k, v, **options)
        self._note("attention", output)
        return output

    def record(self, model: GPTModel, config: ModelConfig, tokens: Tensor) -> SiteTensors:
        """Runs one forward and returns its record."""
        self._record, self._latents = {}, config.multi_latent_attention
        hooks = []
        for number, layer in enumerate(_layers(model)):
            hooks += [
                layer.register_forward_pre_hook(lambda module, args, number=number: self._begin(number)),
                *self._on_attention(layer.self_attention, decoder_spec(config).layers[number].attention),
                *self._on_mlp(layer.mlp, ("gate", "up") if config.gated else ("up",)),
            ]
            norms = [(site, getattr(layer, path)) for path, site in _NORM_SITES.items()]
            hooks += [norm.register_forward_hook(self._noting(site)) for site, norm in norms if isinstance(norm, Norm)]
        assert model.decoder.final_layernorm is not None
        hooks.append(model.decoder.final_layernorm.register_forward_hook(lambda module, args, out: self._end(out)))
        try:
            self._record[-1, "logits"] = _logits(model, config, tokens)
        finally:
            for hook in hooks:
                hook.remove()
        return self._record

    def _on_attention(self, attention: Any, spec: AttentionSpec | LatentAttentionSpec | DeltaNetSpec) -> list[Any]:
        assert not isinstance(spec, DeltaNetSpec)
        linears = {path: part for path, part in spec.parts() if isinstance(part, LinearSpec)}
        sites = {path: _LINEAR_SITES[linear.projections[0].name] for path, linear in linears.items()}
        hooks = []
        if isinstance(spec, AttentionSpec):
            del sites["linear_qkv"]
            hooks.append(attention.linear_qkv.register_forward_hook(lambda _, args, out: self._note_qkv(out, spec)))
        for path, site in sites.items():
            hooks.append(attention.get_submodule(path).register_forward_hook(self._noting(site)))
        return hooks

    def _on_mlp(self, mlp: nn.Module, sites: tuple[str, ...]) -> list[Any]:
        """sites: of the first linear layer."""
        if isinstance(mlp, MoELayer):
            return [
                mlp.router.register_forward_hook(lambda module, args, out: self._note_router(module, args, *out)),
                mlp.register_forward_hook(self._noting("experts")),
            ]
        fc1, fc2 = mlp.get_submodule("linear_fc1"), mlp.get_submodule("linear_fc2")
        return [
            fc1.register_forward_hook(lambda module, args, out: self._note_parts(sites, out)),
            fc2.register_forward_pre_hook(lambda module, args: self._note("activation", args[0])),
            fc2.register_forward_hook(self._noting("down")),
        ]

    def _note_router(self, router: Any, args: tuple[Any, ...], indices: Tensor, weights: Tensor) -> None:
        samples = args[1]
        self._note("router", _weights_of_all(indices, weights, router.spec.experts).unflatten(0, (-1, samples)))

    def _begin(self, layer: int) -> None:
        self._layer = layer

    def _end(self, out: Tensor) -> None:
        self._layer = -1
        self._note("final norm", out)

    def _noting(self, site: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, args, out: self._note(site, out)

    def _note(self, site: str, value: Tensor) -> None:
        self._record[self._layer, site] = value.transpose(0, 1).clone()

    def _note_qkv(self, out: Tensor, spec: AttentionSpec) -> None:
        heads = out.unflatten(-1, (spec.core.groups, -1, spec.core.plain_dim))
        for site, held in (("q", heads[..., :-2, :]), ("k", heads[..., -2, :]), ("v", heads[..., -1, :])):
            self._note(site, held.flatten(2))

    def _note_parts(self, sites: tuple[str, ...], out: Tensor) -> None:
        for site, part in zip(sites, out.chunk(len(sites), dim=-1), strict=True):
            self._note(site, part)


def _their_modules(
    layer: Any, family: Family, spec: LayerSpec
) -> Iterator[tuple[tuple[str, ...], list[int], nn.Module]]:
    """(sites, channels of each, their module whose output holds them), of a layer."""
    for path, part in spec.parts():
        if isinstance(part, NormSpec):
            if path in _NORM_SITES:
                yield (_NORM_SITES[path],), [part.size], layer.get_submodule(family.norms[path])
            continue
        if isinstance(spec.mlp, MoESpec) and path.startswith("mlp."):
            continue
        assert isinstance(part, LinearSpec)
        block = layer.get_submodule(BLOCKS[path.split(".")[0]])
        sites, widths = (
            [_LINEAR_SITES[projection.name] for projection in part.projections],
            [projection.outputs.numel for projection in part.projections],
        )
        if path in family.fused:
            yield tuple(sites), widths, block.get_submodule(family.fused[path])
        else:
            for projection, site, width in zip(part.projections, sites, widths, strict=True):
                yield (site,), [width], block.get_submodule(projection.name)
    if isinstance(spec.mlp, MoESpec):
        yield ("experts",), [spec.mlp.router.hidden], _their_experts(family, layer)


def _their_experts(family: Family, layer: Any) -> Any:
    """Their module with the router and the experts of a layer."""
    assert family.experts is not None
    return layer.get_submodule(family.experts.of_modules.block)


def _record_theirs(model: Any, family: Family, spec: DecoderSpec, tokens: Tensor) -> SiteTensors:
    tensors: SiteTensors = {}
    hooks: list[Any] = []

    def note(layer: int, sites: tuple[str, ...], widths: list[int]) -> Callable[[Any, Any, Tensor], None]:
        def hook(module: Any, args: Any, out: Tensor) -> None:
            for site, part in zip(sites, out.reshape(*tokens.shape, -1).split(widths, dim=-1), strict=True):
                tensors[layer, site] = part.clone()

        return hook

    def note_input(layer: int, site: str) -> Callable[[Any, Any], None]:
        return lambda module, args: tensors.__setitem__((layer, site), args[0].flatten(2).clone())

    def note_router(layer: int) -> Callable[[Any, Any, tuple[Tensor, Tensor, Tensor]], None]:
        def hook(gate: Any, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
            logits, weights, indices = out
            tensors[layer, "router"] = _weights_of_all(indices, weights, logits.shape[-1]).view(*tokens.shape, -1)

        return hook

    # transformers looks this function up in its module at every call.
    modeling = inspect.getmodule(type(model.model.layers[0].self_attn))
    assert modeling is not None
    eager = modeling.eager_attention_forward

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        # With latents transformers orders the rotated channels in another way.
        grouped = isinstance(spec.layers[module.layer_idx].attention, AttentionSpec)
        for site, value in (("q rotated", q), ("k rotated", k)) if grouped else ():
            tensors[module.layer_idx, site] = value.transpose(1, 2).flatten(2).clone()
        return eager(module, q, k, v, mask, **options)

    for number, layer in enumerate(model.model.layers):
        for sites, widths, module in _their_modules(layer, family, spec.layers[number]):
            hooks.append(module.register_forward_hook(note(number, sites, widths)))
        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(note_input(number, "attention")))
        if isinstance(spec.layers[number].mlp, MoESpec):
            assert family.experts is not None
            # The module that chooses, which the linear layer is a part of in some families.
            router = _their_experts(family, layer).get_submodule(family.experts.of_modules.router.partition(".")[0])
            hooks.append(router.register_forward_hook(note_router(number)))
        else:
            down = layer.mlp.get_submodule(family.fused.get("mlp.linear_fc2", "down_proj"))
            hooks.append(down.register_forward_pre_hook(note_input(number, "activation")))
    hooks.append(model.model.norm.register_forward_hook(note(-1, ("final norm",), [spec.hidden_size])))
    try:
        with _replaced(modeling, "eager_attention_forward", attention):
            logits = model(tokens).logits
    finally:
        for hook in hooks:
            hook.remove()
    order = [(layer, site) for layer in range(len(model.model.layers)) for site in SITES if (layer, site) in tensors]
    return {
        **{key: tensors[key] for key in order},
        (-1, "final norm"): tensors[-1, "final norm"],
        (-1, "logits"): logits,
    }


def _weights_of_all(indices: Tensor, weights: Tensor, experts: int) -> Tensor:
    """[T, k] -> [T, experts]"""
    return weights.new_zeros(len(weights), experts).scatter(1, indices, weights)


Patch = tuple[Any, str, Any]  # object, attribute, replacement


def _as_theirs(pair: ModelPair) -> dict[str, list[Patch]]:
    """Returns operation -> replacements, so that it rounds and sums as transformers' eager modules do."""
    layers, config, family = _layers(pair.ours), pair.config, pair.family
    return {
        "RMSNorm": [(ours, "normalize", functools.partial(_normed, ours, theirs)) for ours, theirs in _norms(pair)],
        "RoPE": [
            (pair.ours, "rotary_dtype", _rotary_dtype(pair.theirs)),
            *((layer.self_attention, "rotate", _rotate) for layer in layers),
        ],
        "activation": [
            (layer.mlp, "activation", functools.partial(_gated, layer.mlp.activation.inner))
            for layer in layers
            if config.gated and not isinstance(layer.mlp, MoELayer)
        ],
        "experts": [
            (ours.mlp, "forward", functools.partial(_experts, family, ours.mlp, _their_experts(family, theirs)))
            for ours, theirs in zip(layers, pair.theirs.model.layers, strict=True)
            if isinstance(ours.mlp, MoELayer)
        ],
        "attention": [(layer.self_attention, "core", _attention) for layer in layers],
        "GEMM": [patch for layer in layers for patch in _separate_products(layer, config, family)],
    }


def _layers(model: GPTModel) -> list[Any]:
    """Returns our layers, because torch's types do not cover the content of a ModuleDict."""
    return list(model.decoder.layers.values())


@contextlib.contextmanager
def _replaced(owner: Any, attribute: str, replacement: Any) -> Iterator[None]:
    """`replacement` is an attribute of a module in the body."""
    held = vars(owner).get(attribute)
    vars(owner)[attribute] = replacement
    try:
        yield
    finally:
        if held is None:  # it was the class's
            del vars(owner)[attribute]
        else:
            vars(owner)[attribute] = held


def _norms(pair: ModelPair) -> Iterator[tuple[Any, nn.Module]]:
    """(our norm, theirs)"""
    spec = decoder_spec(pair.config)
    for layer, ours, theirs in zip(spec.layers, _layers(pair.ours), pair.theirs.model.layers, strict=True):
        for path, part in layer.parts():
            if isinstance(part, NormSpec):
                yield ours.get_submodule(path), theirs.get_submodule(pair.family.norms[path])
    yield pair.ours.decoder.final_layernorm, pair.theirs.model.norm


def _normed(ours: Norm, theirs: nn.Module, x: Tensor) -> Tensor:
    """Their norm of x, with our weight. It takes all heads that are normalized together as one dim."""
    weights = {name: ours.weight.view_as(weight) for name, weight in theirs.named_parameters() if name == "weight"}
    dims = 1 if any(weight.dim() > 1 for weight in weights.values()) else ours.weight.dim()
    output: Tensor = functional_call(theirs, weights, (x.flatten(-dims),))
    return output.view(x.shape)


def _experts(family: Family, ours: Any, theirs: nn.Module, x: Tensor, routing: object = None) -> Tensor:
    """Their router, experts and shared expert, with our weights. [s, b, h] -> the same."""
    assert family.experts is not None
    weights = {
        f"{family.experts.of_modules.router}.weight": ours.router.weight,
        "experts.gate_up_proj": ours.experts.linear_fc1.weight.flatten(1, 2),
        "experts.down_proj": ours.experts.linear_fc2.weight,
    }
    if ours.shared_experts is not None:
        shared = family.experts.of_modules.shared.removeprefix(f"{family.experts.of_modules.block}.")
        gate, up = ours.shared_experts.linear_fc1.weight
        weights |= {f"{shared}.gate_proj.weight": gate, f"{shared}.up_proj.weight": up}
        weights[f"{shared}.down_proj.weight"] = ours.shared_experts.linear_fc2.weight
        if ours.shared_experts.gate_weight is not None:
            weights["shared_expert_gate.weight"] = ours.shared_experts.gate_weight
    output: Tensor = functional_call(theirs, weights, (x.transpose(0, 1).contiguous(),))
    return output.transpose(0, 1)


def _rotary_dtype(theirs: Any) -> torch.dtype:
    """The dtype of their tables."""
    like = torch.empty(1, dtype=theirs.dtype, device=theirs.device)
    kinds = [kind for kind in ("full_attention",) if kind in (theirs.config.rope_parameters or {})]
    cos, _ = theirs.model.rotary_emb(like, torch.zeros(1, 1, dtype=torch.int64, device=theirs.device), *kinds)
    dtype: torch.dtype = cos.dtype
    return dtype


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    turned, passed = x.tensor_split([2 * cos.shape[-1]], dim=-1)
    if interleaved:
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
        swapped = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
    return torch.cat((((turned * cos) + (swapped * sin)).to(x.dtype), passed), dim=-1)


def _gated(inner: Activation, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return inner(gate) * up


def _attention(q: Tensor, k: Tensor, v: Tensor, *, scores: Scores, window: int | None, **options: Any) -> Tensor:
    """[s, b, n, d] -> [s, b, n d]; GEMMs in [b, n, s, d], the mask added as a number."""
    s, repeats = q.shape[0], q.shape[2] // k.shape[2]
    q, k, v = (t.permute(1, 2, 0, 3).contiguous() for t in (q, k, v))
    k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
    seen = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    mask = torch.zeros(s, s, dtype=q.dtype, device=q.device).masked_fill(~seen, torch.finfo(q.dtype).min)
    weights = scores.capped(torch.matmul(q, k.transpose(2, 3)) * scores.scale) + mask
    output = torch.matmul(F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype), v)
    return output.permute(2, 0, 1, 3).flatten(2)


def _separate_products(layer: Any, config: ModelConfig, family: Family) -> list[Patch]:
    """Uses separate GEMMs for queries, keys, values, gate and up where theirs does, and our model has one for all."""
    replacements: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {}
    if config.gated and not isinstance(layer.mlp, MoELayer):
        replacements["mlp.linear_fc1"] = (layer.mlp.linear_fc1, functools.partial(_gate_up, layer.mlp.linear_fc1))
    if isinstance(layer.self_attention, SelfAttention):
        replacements["self_attention.linear_qkv"] = _separate_qkv(layer.self_attention.linear_qkv, config)
    return [
        (module, "forward", forward) for path, (module, forward) in replacements.items() if path not in family.fused
    ]


def _separate_qkv(qkv: Any, config: ModelConfig) -> tuple[Any, Callable[[Tensor], Tensor]]:
    d = config.head_dim

    def project(x: Tensor) -> Tensor:
        def rows(tensor: Tensor) -> list[Tensor]:
            queries = (tensor.shape[1] // d - 2) * d
            return [part.flatten(0, 1) for part in tensor.split([queries, d, d], dim=1)]

        weights, biases = rows(qkv.weight), [None] * 3 if qkv.bias is None else rows(qkv.bias)
        products = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
        heads = [part.unflatten(-1, (config.num_kv_heads, -1)) for part in products]
        return torch.cat(heads, dim=-1).flatten(2)

    return qkv, project


def _gate_up(fc1: Any, x: Tensor) -> Tensor:
    biases = [None] * 2 if fc1.bias is None else list(fc1.bias)
    return torch.cat([F.linear(x, w, b) for w, b in zip(fc1.weight, biases, strict=True)], dim=-1)


def _logits(model: GPTModel, config: ModelConfig, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    logits: Tensor = model(tokens, positions)
    return logits[..., : config.vocab_size].transpose(0, 1)


def _place(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(box.offset, box.shape, strict=True))
