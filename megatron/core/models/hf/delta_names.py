"""The tensors of gated delta nets in Hugging Face decoders, and the elements of ours that they are.

Ours have a dim for the key heads, so that the rows of a key head lie together. Theirs have the queries of all heads, then
all keys and then all values; Qwen3-Next has the rows of a key head together in its two projections, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron.base.box import Box
from megatron.core.models import mapping
from megatron.core.models.mapping import Part
from megatron.spec.delta_net import ConvolutionSpec, DecaySpec, DeltaCoreSpec, DeltaNetSpec
from megatron.spec.linear import LinearSpec

BLOCK = "linear_attn"
# Our linear layers of a delta net, which is at the place of attention.
LINEARS = ("self_attention.in_proj", "self_attention.out_proj")
FORGET_GATE = "forget_gate."  # the module with the decays of Kimi Linear, in memory
HeadRows = tuple[int, int]  # the first one, and their number


def delta_block(attention: object) -> str:
    """Returns their module of a delta net in a layer, which in Kimi Linear has the name of attention."""
    return "self_attn" if isinstance(attention, DeltaNetSpec) and attention.latents is not None else BLOCK


def delta_parameters(
    ours: str,
    theirs: str,
    spec: DeltaNetSpec,
    part: LinearSpec | ConvolutionSpec | DecaySpec,
    joined: Mapping[str, Sequence[str]],
    *,
    stacked: bool,
) -> Iterator[mapping.Mapping]:
    """Maps the parameters of a part of a delta net, without its norm and its last projection.

    joined: their tensor -> the projections that it holds, with the rows of a key head together; the other projections
    have tensors of their own. stacked: the names are those in transformers' memory. The form of Kimi Linear has there
    the decays in a module of their own, and in files a convolution each of queries, keys and values.
    """
    for name, parameter in part.parameters():
        mine, shape = ours + name, parameter.shape
        match part:
            case DecaySpec():
                tensor = f"{theirs}{FORGET_GATE if spec.latents is not None and stacked else ''}{name}"
                if len(shape) == 1:
                    whole = Box((0,), shape)
                    parts = [Part(mine, whole, tensor, whole)]
                else:
                    parts = [
                        Part(mine, Box((head, 0), (1, size)), tensor, Box((head * size,), (size,)))
                        for size in shape[1:]
                        for head in range(shape[0])
                    ]
            case ConvolutionSpec() if spec.latents is not None and not stacked:
                kinds = zip(("q_conv1d", "k_conv1d", "v_conv1d"), _kinds(spec.core), strict=True)
                parts = [
                    piece
                    for tensor, kind in kinds
                    for piece in head_rows(mine, f"{theirs}{tensor}.{name}", shape, [kind])
                ]
            case ConvolutionSpec():
                parts = list(head_rows(mine, f"{theirs}conv1d.{name}", shape, _kinds(spec.core)))
            case LinearSpec():
                rows = projection_rows(spec, joined)
                parts = [
                    piece
                    for tensor, kinds in rows.items()
                    for piece in head_rows(mine, f"{theirs}{tensor}.{name}", shape, kinds)
                ]
        yield mapping.Mapping(mine, shape, tuple(parts))


def projection_rows(spec: DeltaNetSpec, joined: Mapping[str, Sequence[str]]) -> dict[str, list[HeadRows]]:
    """Their tensor of the first projection -> the rows of a key head that it has for all heads, one after the other."""
    rows: dict[str, list[HeadRows]] = {}
    for projection in spec.in_proj.projections:
        (_, first), (_, count) = projection.outputs.offset, projection.outputs.shape
        tensor = next((name for name, names in joined.items() if projection.name in names), None)
        if tensor is None:
            rows[projection.name] = _kinds(spec.core) if count == spec.core.convolved else [(first, count)]
        elif tensor in rows:
            ((start, before),) = rows[tensor]
            rows[tensor] = [(start, before + count)]
        else:
            rows[tensor] = [(first, count)]
    return rows


def head_rows(ours: str, theirs: str, shape: tuple[int, ...], kinds: Sequence[HeadRows]) -> Iterator[Part]:
    """Maps rows of ours [heads, rows, ...] to theirs, which has for each of `kinds` the rows of all heads."""
    heads, _, *inner = shape
    zeros, there = (0,) * len(inner), 0
    for first, count in kinds:
        for head in range(heads):
            yield Part(
                ours,
                Box((head, first, *zeros), (1, count, *inner)),
                theirs,
                Box((there, *zeros), (count, *inner)),
            )
            there += count


def _kinds(core: DeltaCoreSpec) -> list[HeadRows]:
    """Queries, keys and values."""
    return [(0, core.qk_dim), (core.qk_dim, core.qk_dim), (2 * core.qk_dim, core.shared * core.v_dim)]
