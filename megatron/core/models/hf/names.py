"""The tensors of Hugging Face decoders, and the elements of ours that they are. See core/models/mapping.py.

Every linear layer of the description names its projections as transformers does, so the table is derived from it: a
family only says how its modules are called, and which projections it stores as one tensor.

[Note: stacked experts] On the hub a projection of an expert is a tensor, and so it is written. In memory transformers 5
stacks them, as gate_up_proj [E, 2 f, h] and down_proj [E, h, f] of `mlp.experts`, and writes them so if asked to
(save_original_format=False); such a folder is read, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from megatron.base.box import Box
from megatron.config.model import ModelConfig
from megatron.core.models.hf.delta_names import BLOCK, FORGET_GATE, LINEARS, delta_block, delta_parameters
from megatron.core.models.hf.family.family import ExpertNames, Family
from megatron.core.models.mapping import Mapping, Part, Stack, Table
from megatron.spec.attention import SinksSpec
from megatron.spec.decoder import (
    EMBEDDING_NORM,
    OUTPUT_BIAS,
    OUTPUT_LAYER,
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
    LayerSpec,
    PredictionSpec,
    decoder_spec,
)
from megatron.spec.delta_net import ConvolutionSpec, DecaySpec, DeltaNetSpec
from megatron.spec.linear import LinearSpec
from megatron.spec.mlp import XieluSpec
from megatron.spec.moe import EXPERT_BIAS, ExpertsSpec, GateSpec, RouterSpec
from megatron.spec.norm import NormSpec
from megatron.spec.parameter import ParamSpec

# Projections of the decays of Kimi Linear -> their names in memory.
_OF_DECAYS = {name: FORGET_GATE + name for name in ("f_a_proj", "f_b_proj")}
# Our module with linear layers -> theirs, of a layer.
BLOCKS = {"self_attention": "self_attn", "mlp": "mlp"}
# In a layer that predicts a further token: copies of the word embeddings and of the output layer.
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def table(family: Family, model: ModelConfig, *, stacked: bool = False, carried_depths: int = 0) -> Table:
    """The table of a decoder of this family, without predictions of further tokens if its folders hold none.

    stacked: see [Note: stacked experts]. carried_depths: layers behind those of the model that predict further tokens,
    which are carried but for their copies.
    """
    spec = decoder_spec(model)
    depths = range(len(spec.predictions) if family.predicts else 0)
    first = len(spec.layers)
    copies = [
        [f"model.layers.{first + depth}.{name}" for depth in range(len(depths) + carried_depths)] for name in COPIES
    ]
    words = [*copies[0], *(copies[1] if spec.tied else [])]
    mappings = [_rows(WORD_EMBEDDINGS, "model.embed_tokens.weight", spec.embedding.words, spec.vocabulary, words)]
    if spec.embedding.positions is not None:
        mappings.append(_same(POSITION_EMBEDDINGS, "model.embed_positions.weight", spec.embedding.positions))
    if spec.embedding.norm is not None:
        for name, parameter in spec.embedding.norm.parameters():
            mappings.append(_norm(f"{EMBEDDING_NORM}.{name}", f"model.embed_layernorm.{name}", parameter))
    for number, layer in enumerate(spec.layers):
        mappings += _layer(f"decoder.layers.{number}.", f"model.layers.{number}.", family, layer, stacked)
    for name, parameter in spec.final_norm.parameters():
        mappings.append(_norm(f"decoder.final_layernorm.{name}", f"model.norm.{name}", parameter))
    if not spec.tied:
        mappings.append(_rows(OUTPUT_LAYER, "lm_head.weight", spec.output.weight, spec.vocabulary, copies[1]))
    if spec.output.bias is not None:
        mappings.append(_rows(OUTPUT_BIAS, "lm_head.bias", spec.output.bias, spec.vocabulary))
    for depth in depths:
        ours, theirs = f"mtp.layers.{depth}.", f"model.layers.{first + depth}."
        mappings += _prediction(ours, theirs, family, spec.predictions[depth], stacked)
    return Table(mappings)


def copied_tensors(family: Family, model: ModelConfig) -> dict[str, str]:
    """Returns name -> name of the tensor of which a layer that predicts a further token holds a copy."""
    first, head = (
        model.num_layers or 0,
        "lm_head" if model.untie_embeddings_and_output_weights else "model.embed_tokens",
    )
    return {
        f"model.layers.{first + depth}.{copy}": original
        for depth in range(model.mtp_num_layers if family.predicts else 0)
        for copy, original in zip(COPIES, ("model.embed_tokens.weight", f"{head}.weight"), strict=True)
    }


def stacked_experts(family: Family, model: ModelConfig) -> str | None:
    """Returns a tensor that only a folder with experts as in memory holds; None for a model without experts."""
    if family.experts is None or not any(model.moe_layers):
        return None
    names = family.experts.of_modules
    assert names.stacked is not None
    return f"model.layers.{model.moe_layers.index(True)}.{names.block}.{names.stacked[0]}"


def first_router(family: Family, model: ModelConfig, *, stacked: bool) -> dict[str, tuple[int, ...]]:
    """Returns the name and the shape of a tensor that bounds the number of experts; nothing for a model without
    experts."""
    if family.experts is None or not any(model.moe_layers):
        return {}
    assert model.num_experts and model.hidden_size
    names = family.experts.of_modules if stacked else family.experts
    layer = f"model.layers.{model.moe_layers.index(True)}"
    return {f"{layer}.{names.block}.{names.router}.weight": (model.num_experts, model.hidden_size)}


def block_of(path: str, shared: str) -> str:
    """Their module in a layer that holds the projections of our linear layer `path`. shared: see ExpertNames."""
    if path in LINEARS:
        return BLOCK
    block = path.rpartition(".")[0]
    return shared if block == "mlp.shared_experts" else BLOCKS[block]


def _layer(ours: str, theirs: str, family: Family, layer: LayerSpec, stacked: bool) -> Iterator[Mapping]:
    by_family = family.experts or ExpertNames()
    names = by_family.of_modules if stacked else by_family
    has_other_norms = layer.parallel and not layer.shares_norm
    norms = {**family.norms, **(family.parallel_norms if has_other_norms else {})}
    for path, part in layer.parts():
        if isinstance(part, ExpertsSpec):
            block = f"{theirs}{names.block}."
            if names.stacked is None:
                yield from _experts(f"{ours}{path}.", f"{block}experts.", names.projections, part)
            else:
                yield from _stacked_experts(f"{ours}{path}.", block, names.stacked, part, names.biases)
            continue
        if isinstance(layer.attention, DeltaNetSpec) and (
            path == LINEARS[0] or isinstance(part, ConvolutionSpec | DecaySpec)
        ):
            assert isinstance(part, LinearSpec | ConvolutionSpec | DecaySpec)
            block = f"{theirs}{delta_block(layer.attention)}."
            yield from delta_parameters(f"{ours}{path}.", block, layer.attention, part, family.joined, stacked=stacked)
            continue
        for name, parameter in part.parameters():
            mine = f"{ours}{path}.{name}"
            match part:
                case LinearSpec():
                    block = block_of(path, names.shared)
                    block = delta_block(layer.attention) if block == BLOCK else block
                    yield _linear(
                        mine,
                        f"{theirs}{block}.{{}}.{name}",
                        part,
                        parameter,
                        family,
                        family.fused.get(path),
                        _OF_DECAYS if stacked else {},
                    )
                case RouterSpec():
                    yield _same(mine, f"{theirs}{names.block}.{names.router}.{name}", parameter)
                case SinksSpec():
                    yield _same(mine, f"{theirs}self_attn.sinks", parameter)
                case XieluSpec():
                    yield _same(mine, f"{theirs}mlp.act_fn.{name}", parameter)
                case GateSpec():
                    yield _same(mine, f"{theirs}{names.block}.shared_expert_gate.weight", parameter)
                case NormSpec():
                    convert = _same if part.per_head else _norm
                    yield convert(mine, f"{theirs}{norms[path]}.{name}", parameter)
        if isinstance(part, RouterSpec) and part.has_bias:
            choice = Box((0,), (part.experts,))
            mine = f"{ours}{path}.{EXPERT_BIAS}"
            yield Mapping(
                mine, choice.shape, (Part(mine, choice, f"{theirs}{names.block}.{names.choice_bias}", choice),)
            )


def _prediction(ours: str, theirs: str, family: Family, spec: PredictionSpec, stacked: bool) -> Iterator[Mapping]:
    for path, norm in (("enorm", spec.embedding_norm), ("hnorm", spec.hidden_norm)):
        for name, parameter in norm.parameters():
            yield _norm(f"{ours}{path}.{name}", f"{theirs}{path}.{name}", parameter)
    yield _same(f"{ours}eh_proj.weight", f"{theirs}eh_proj.weight", spec.projection.weight)
    yield from _layer(f"{ours}transformer_layer.", theirs, family, spec.layer, stacked)
    for name, parameter in spec.final_norm.parameters():
        yield _norm(f"{ours}final_layernorm.{name}", f"{theirs}shared_head.norm.{name}", parameter)


def _same(ours: str, theirs: str, parameter: ParamSpec) -> Mapping:
    whole = Box((0,) * len(parameter.shape), parameter.shape)
    return Mapping(ours, parameter.shape, (Part(ours, whole, theirs, whole),))


def _experts(ours: str, theirs: str, projections: tuple[str, str, str], experts: ExpertsSpec) -> Iterator[Mapping]:
    """Ours [E, 2, f, h] and [E, h, f]; theirs f"{expert}.{projection}.weight", [f, h] and [h, f]."""
    gate, up, down = projections
    for name, parameter, projection_names in (
        ("linear_fc1.weight", experts.linear_fc1, (gate, up)),
        ("linear_fc2.weight", experts.linear_fc2, (down,)),
    ):
        *front, rows, columns = parameter.shape
        names = [
            f"{theirs}{number}.{projection}.weight" for number in range(front[0]) for projection in projection_names
        ]
        yield Mapping(ours + name, parameter.shape, Stack(ours + name, names, tuple(front), (rows, columns)))


def _stacked_experts(
    ours: str, theirs: str, names: tuple[str, str], experts: ExpertsSpec, biases: tuple[str, str] | None
) -> Iterator[Mapping]:
    """Theirs are two tensors, [E, 2 f, h] with the rows of up behind those of gate, and [E, h, f] of down; with biases
    four, in the shapes of ours."""
    gate_up, down = names
    if biases is not None:
        their_names = {"linear_fc1.weight": gate_up, "linear_fc2.weight": down}
        their_names |= {"linear_fc1.bias": biases[0], "linear_fc2.bias": biases[1]}
        for name, parameter in experts.parameters():
            yield _same(f"{ours}{name}", theirs + their_names[name], parameter)
        return
    shape = experts.linear_fc1.shape
    count, halves, rows, columns = shape
    fc1 = [
        Part(
            f"{ours}linear_fc1.weight",
            Box((0, half, 0, 0), (count, 1, rows, columns)),
            theirs + gate_up,
            Box((0, half * rows, 0), (count, rows, columns)),
            extra=1,
        )
        for half in range(halves)
    ]
    yield Mapping(f"{ours}linear_fc1.weight", shape, tuple(fc1))
    yield _same(f"{ours}linear_fc2.weight", theirs + down, experts.linear_fc2)


def _norm(ours: str, theirs: str, parameter: ParamSpec) -> Mapping:
    """Theirs has one dim, in which the heads of ours follow each other."""
    *heads, size = parameter.shape
    parts = [
        Part(ours, Box((*at, 0), (*(1 for _ in heads), size)), theirs, Box((number * size,), (size,)))
        for number, at in enumerate(itertools.product(*(range(n) for n in heads)))
    ]
    return Mapping(ours, parameter.shape, tuple(parts))


def _rows(ours: str, theirs: str, parameter: ParamSpec, vocabulary: int, copies: Sequence[str] = ()) -> Mapping:
    """The rows of the vocabulary, without our padding."""
    shape = parameter.shape
    rows = Box((0,) * len(shape), (vocabulary, *shape[1:]))
    return Mapping(ours, shape, (Part(ours, rows, theirs, rows),), [Part(ours, rows, copy, rows) for copy in copies])


def _linear(
    ours: str,
    theirs: str,
    linear: LinearSpec,
    parameter: ParamSpec,
    family: Family,
    fused: str | None,
    renamed: dict[str, str],
) -> Mapping:
    """The weight or the bias of a linear layer. `theirs` has a place for the name of a projection; `fused` is that of
    the tensor that holds all projections, if there is one. renamed: projection -> its name in memory."""
    columns = parameter.shape[len(linear.out_shape) :]
    zeros, first = tuple(0 for _ in columns), 0
    parts = []
    if family.blocks is not None and len(linear.out_shape) == 2:
        parts = _blocks_of_heads(ours, theirs.format(fused), linear, columns, family.blocks)
        return Mapping(ours, parameter.shape, parts)
    if family.by_group and len(linear.out_shape) == 2:
        groups, rows = linear.out_shape
        for group in range(groups):
            our_box = Box((group, 0, *zeros), (1, rows, *columns))
            their_box = Box((group * rows, *zeros), (rows, *columns))
            parts.append(Part(ours, our_box, theirs.format(fused), their_box))
        return Mapping(ours, parameter.shape, tuple(parts))
    for projection in linear.projections:
        *front, start = projection.outputs.offset
        *repeats, rows = projection.outputs.shape
        their_name = renamed.get(projection.name, projection.name)
        is_rotated = projection.name in ("q_proj", "k_proj")
        half = linear.projections[1].outputs.shape[-1] // 2 if family.swaps_halves and is_rotated else 0
        # With a dim in front (key/value groups, or gate and up), their rows follow each other along it.
        for index in range(math.prod(repeats)):
            for at, their_at, height in _runs(rows, half):
                our_box = Box(
                    (*(place + index for place in front), start + at, *zeros), (*(1 for _ in front), height, *columns)
                )
                their_box = Box((first + index * rows + their_at, *zeros), (height, *columns))
                parts.append(Part(ours, our_box, theirs.format(fused or their_name), their_box))
        first += projection.outputs.numel if fused else 0
    return Mapping(ours, parameter.shape, tuple(parts))


def _runs(rows: int, half: int) -> Iterator[tuple[int, int, int]]:
    """(first row of ours, first row of theirs, number of rows) of runs of equal order: all rows, or the halves of each
    head, which are swapped, of `half` rows."""
    if not half:
        yield 0, 0, rows
        return
    for head in range(0, rows, 2 * half):
        yield head, head + half, half
        yield head + half, head, half


def _blocks_of_heads(ours: str, theirs: str, linear: LinearSpec, columns: tuple[int, ...], blocks: int) -> list[Part]:
    """Theirs has a block for each of `blocks` equal parts of the heads: their queries, their values, and their keys."""
    groups, rows = linear.out_shape
    queries, keys, values = linear.projections
    size, zeros, parts = groups // blocks, tuple(0 for _ in columns), list[Part]()
    for group in range(groups):
        block, place = divmod(group, size)
        first = block * size * rows
        for projection in (queries, values, keys):
            offset, height = projection.outputs.offset[-1], projection.outputs.shape[-1]
            our_box = Box((group, offset, *zeros), (1, height, *columns))
            their_box = Box((first + place * height, *zeros), (height, *columns))
            parts.append(Part(ours, our_box, theirs, their_box))
            first += size * height
    return parts
