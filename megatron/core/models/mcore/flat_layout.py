"""The division of a model into chunks, and each chunk's parameters, derived from the sizes of the optimizer's buffers.

torch_dist does not say which stage holds which layers, nor how Megatron-LM named and ordered the modules. See
[Note: buffers].
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
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
from megatron.spec.decoder import OUTPUT_LAYER, POSITION_EMBEDDINGS, WORD_EMBEDDINGS

Numels = Mapping[str, int]
Fits = Callable[[int, Numels], bool]
_FINAL_NORM = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias")
_LAYER = re.compile(r"((?:decoder|mtp)\.layers)\.(\d+)\.(.*)")


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
    if files.arguments.get("mla_down_proj_fusion"):
        raise CheckpointError(
            f"{files.path}: the optimizer's buffers with --mla-down-proj-fusion are not told apart; {SAVE_ADVICE}"
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
        splits_delta_nets=False,
        cuts_latents=local or "rope_type" not in files.arguments,  # until core 0.13 both do
    )
    beginning = whole.key(0, 0, 0, "")
    shapes = {
        key.removeprefix(beginning): (rows, *shape[1:]) if key.endswith(VOCABULARY) else shape
        for key, shape in table(model, whole).theirs.items()
        if key.startswith(beginning) and not is_buffer(key)
    }
    if sizes.pp > 1 and not model.untie_embeddings_and_output_weights:
        shapes[OUTPUT_LAYER] = shapes[WORD_EMBEDDINGS]
    inside: dict[str, list[list[str]]] = {
        "decoder.layers": [[] for _ in range(model.num_layers)],
        "mtp.layers": [[] for _ in range(model.mtp_num_layers)],
    }
    for name in shapes:
        if match := _LAYER.fullmatch(name):
            inside[match[1]][int(match[2])].append(match[3])
    layers, predictions = ([in_module_order(names, local=local) for names in part] for part in inside.values())
    predicted = [f"mtp.layers.{depth}.{name}" for depth, names in enumerate(predictions) for name in names]

    def numels_of(chunk: int, first: int, count: int) -> Numels:
        is_last = chunk == chunks - 1
        before = (WORD_EMBEDDINGS, POSITION_EMBEDDINGS) if chunk == 0 or (is_last and predicted) else ()
        after = (*_FINAL_NORM, *predicted, OUTPUT_LAYER) if is_last else ()
        parameters = {name: shapes[name] for name in before if name in shapes}
        for number, names in enumerate(layers[first : first + count]):
            ours = f"decoder.layers.{first + number}."
            parameters |= {f"decoder.layers.{number}.{name}": shapes[ours + name] for name in names}
        parameters |= {name: shapes[name] for name in after if name in shapes}
        return {name: math.prod(shape) for name, shape in parameters.items()}

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


def own_buckets(model: ModelConfig, pp: int) -> Collection[str]:
    """Parameters with a bucket of their own: the embedding and its copy on the last stage, when there is one. With
    predictions of further tokens that copy has the embedding's name, and a tied output layer is not used.
    """
    if pp == 1:
        return ()
    if model.mtp_num_layers:
        return (WORD_EMBEDDINGS,)
    return () if model.untie_embeddings_and_output_weights else (WORD_EMBEDDINGS, OUTPUT_LAYER)
