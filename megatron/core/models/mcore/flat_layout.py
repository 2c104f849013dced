"""The division of a model into chunks, and each chunk's parameters, derived from the sizes of the optimizer's buffers.

torch_dist does not say which stage holds which layers, nor how Megatron-LM named and ordered the modules. See
[Note: buffers].
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.base.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.core.models.mcore.buckets import in_module_order
from megatron.core.models.mcore.moe_arguments import check_shares
from megatron.core.models.mcore.names import (
    GROUPED,
    SEQUENTIAL,
    VOCABULARY,
    CheckpointLayout,
    is_expert,
    table,
)
from megatron.core.models.mcore.optimizer_state import SAVE_ADVICE
from megatron.core.models.mcore.torch_dist import TorchDistFiles
from megatron.core.models.source import is_buffer
from megatron.spec.decoder import OUTPUT_LAYER, WORD_EMBEDDINGS

Numels = Mapping[str, int]
Fits = Callable[[int, Numels], bool]
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")


@dataclass(frozen=True)
class RankCounts:
    """The numbers of model-parallel ranks."""

    tp: int
    pp: int
    ep: int
    etp: int


def sizes_of(arguments: Mapping[str, Any]) -> RankCounts:
    """Returns the sizes that the arguments contain. Raises CheckpointError."""
    values: list[Any] = [arguments.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline")]
    if arguments.get("num_experts") is not None:
        values.append(arguments.get("expert_model_parallel_size", 1))
        values.append(arguments.get("expert_tensor_parallel_size") or values[0])
    if not all(isinstance(size, int) and size > 0 for size in values):
        raise CheckpointError(f"its arguments do not contain valid sizes of tp, pp, ep and etp, but {values}")
    tp, pp, ep, etp = values if len(values) == 4 else (*values, 1, values[0])
    counts = RankCounts(tp, pp, ep, etp)
    check_shares(arguments, ep, "the optimizer's buffers")
    if counts.tp % counts.etp:
        raise CheckpointError(
            f"the optimizer's buffers with etp {counts.etp} and tp {counts.tp} are not told apart; {SAVE_ADVICE}"
        )
    return counts


def derived(
    files: TorchDistFiles, model: ModelConfig, chunks: int, fits: Fits, *, experts_apart: bool = False
) -> tuple[CheckpointLayout, Callable[[int], Numels]]:
    """Derives the division of the model into chunks, and the parameters of each, from the sizes of the buffers.

    experts_apart: the parameters that `fits` tells apart have no experts among them.
    """
    sizes = sizes_of(files.arguments)
    assert model.num_layers
    if files.layout.vocabulary % sizes.tp:
        raise CheckpointError(
            f"{files.path}: {files.layout.vocabulary} rows of the vocabulary cannot be cut {sizes.tp} times"
        )
    local = files.arguments.get("transformer_impl") == "local"
    rows = files.layout.vocabulary // sizes.tp
    whole = dataclasses.replace(
        files.layout,
        tp=sizes.tp,
        vocabulary=rows,
        ep=sizes.ep,
        etp=sizes.etp if model.num_experts else 1,
        experts=GROUPED if files.arguments.get("moe_grouped_gemm") and not local else SEQUENTIAL,
    )
    beginning = whole.key(0, 0, 0, "")
    shapes = {
        key.removeprefix(beginning): (rows, *shape[1:]) if key.endswith(VOCABULARY) else shape
        for key, shape in table(model, whole).theirs.items()
        if key.startswith(beginning) and not is_buffer(key)
    }
    if own_buckets(model, sizes.pp):
        shapes[OUTPUT_LAYER] = shapes[WORD_EMBEDDINGS]
    layers: list[list[str]] = [[] for _ in range(model.num_layers)]
    for name in shapes:
        if match := _LAYER.fullmatch(name):
            layers[int(match[1])].append(match[2])
    layers = [in_module_order(names, local=local) for names in layers]

    def numels_of(chunk: int, first: int, count: int) -> Numels:
        names = _chunk_names(layers, shapes, first, count, first_chunk=chunk == 0, last_chunk=chunk == chunks - 1)
        return {name: math.prod(shape) for name, shape in names.items()}

    def seen(numels: Numels) -> Numels:
        return {n: size for n, size in numels.items() if not (experts_apart and is_expert(n))}

    counts: list[int] = []
    for chunk in range(chunks):
        first = sum(counts)
        possible = range(model.num_layers - first + 1)
        count = next((n for n in possible if fits(chunk, seen(numels_of(chunk, first, n)))), None)
        if count is None:
            raise CheckpointError(
                f"{files.path}: the optimizer's buffer of chunk {chunk} cannot be told apart into parameters; "
                f"{SAVE_ADVICE}"
            )
        counts.append(count)
    if sum(counts) != model.num_layers:
        raise CheckpointError(f"{files.path}: its optimizer has {sum(counts)} layers, its model {model.num_layers}")
    layout = dataclasses.replace(whole, pp=sizes.pp, layers=tuple(counts))
    return layout, lambda chunk: numels_of(chunk, sum(counts[:chunk]), counts[chunk])


def _chunk_names(
    layers: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    first: int,
    count: int,
    *,
    first_chunk: bool,
    last_chunk: bool,
) -> dict[str, tuple[int, ...]]:
    """A chunk's parameters in the order of Megatron-LM's modules, with their shapes. first: its first layer's
    number."""
    before = [WORD_EMBEDDINGS, "embedding.position_embeddings.weight"] if first_chunk else []
    after = ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias", OUTPUT_LAYER] if last_chunk else []
    parameters = {name: shapes[name] for name in before if name in shapes}
    for number in range(count):
        ours = f"decoder.layers.{first + number}."
        parameters |= {f"decoder.layers.{number}.{name}": shapes[ours + name] for name in layers[first + number]}
    return parameters | {name: shapes[name] for name in after if name in shapes}


def own_buckets(model: ModelConfig, pp: int) -> Collection[str]:
    """Parameters with a bucket of their own: the embedding and its copy on the last stage, when there is one."""
    return (WORD_EMBEDDINGS, OUTPUT_LAYER) if pp > 1 and not model.untie_embeddings_and_output_weights else ()
