"""What one rank computes and sends for a microbatch in each layer of a run, before any clock measures it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.base.mesh import COPY_AXES
from megatron.config.recompute import LayerChoices
from megatron.config.run import RunConfig
from megatron.config.settings import RunSettings
from megatron.planner.memory.sizes import sizes_of
from megatron.planner.time.clock import Places
from megatron.planner.time.hardware import Cluster, Place, place, stride
from megatron.planner.time.operations import LayerWork, Overlap, embedding_work, head_work, layer_work
from megatron.planner.time.software import Software
from megatron.spec.decoder import DecoderSpec, decoder_spec
from megatron.spec.sizes import Sizes, Target


@dataclass(frozen=True)
class ModelWork:
    """The operations of a model on one rank. works: those of the kinds of layers; kinds: of each layer, its place
    there, those of predictions behind the others."""

    spec: DecoderSpec
    sizes: Sizes
    works: tuple[LayerWork, ...]
    kinds: tuple[int, ...]
    head: LayerWork
    embedding: LayerWork

    def layer(self, number: int) -> LayerWork:
        """Returns the operations of a layer."""
        return self.works[self.kinds[number]]


def model_work(
    run: RunConfig, settings: RunSettings, software: Software, choices: LayerChoices | None = None
) -> ModelWork:
    """Returns the operations of a run's model. Its sequence length and micro batch size are known.

    choices: the recompute of its layers, if the flags leave it to a measurement.
    """
    seq_length, micro_batch_size = run.data.seq_length, run.train.micro_batch_size
    assert seq_length and micro_batch_size
    model = dataclasses.replace(run.model, max_position_embeddings=run.model.max_position_embeddings or seq_length)
    spec = decoder_spec(model)
    sizes = sizes_of(
        model,
        settings,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        loss_chunk=run.train.cross_entropy_chunk_size,
        mlp_chunk=run.recompute.mlp_chunk_size,
        documents=False,
        target=Target(cpu=False),
        moe=run.moe,
    )
    overlap = overlap_of(run, settings)
    places: dict[tuple[int, frozenset[str]], int] = {}
    works: list[LayerWork] = []
    kinds: list[int] = []
    for number in range(len(spec.layers) + len(spec.predictions)):
        layer = spec.layer(number)
        recomputed = (choices or run.recompute).parts_of(number)
        key = id(layer), recomputed  # alike layers are one object
        if key not in places:
            places[key] = len(works)
            works.append(layer_work(layer, sizes, software, overlap, recomputed))
        kinds.append(places[key])
    return ModelWork(
        spec, sizes, tuple(works), tuple(kinds), head_work(spec, sizes), embedding_work(spec.embedding, sizes)
    )


def places_of(settings: RunSettings, cluster: Cluster) -> Places:
    """Returns where the ranks of each group of a run are.

    ends: the first and the last rank of a pipeline; boundaries.py has its neighbours. VIEW_shard: ranks that share the
    optimizer's state of a view's parameters, a run of neighbours among those that hold copies; VIEW_replicas: those
    with the same slice in other instances.
    """
    mesh = settings.mesh
    copies: dict[str, Place] = {}
    for view, axes in COPY_AXES.items():
        instances = settings.data_parallel.optimizer_instances or mesh.copies(view)
        shards, near = mesh.copies(view) // instances, cluster.node // stride(mesh, axes[0])
        copies[f"{view}_shard"] = Place(shards, max(1, min(shards, near)))
        copies[f"{view}_replicas"] = Place(instances, max(1, min(instances, near // shards)))
    context = place(mesh, cluster, ("cp",))
    inside = stride(mesh, "pp") * mesh.pp <= cluster.node
    return {
        "tp": place(mesh, cluster, ("tp",)),
        "cp": context,
        "cp_inner": Place(settings.context_inner, min(settings.context_inner, context.together)),
        "cp_outer": context,
        "etp_ep": place(mesh, cluster, ("etp", "ep")),
        **copies,
        "ends": Place(min(2, mesh.pp), min(2, mesh.pp) if inside else 1),
    }


def overlap_of(run: RunConfig, settings: RunSettings) -> Overlap:
    """Returns which communication of tensor parallelism a run overlaps."""
    pieces = run.parallel.tp_comm_overlap
    split = settings.pipeline.schedule.splits_backward
    return Overlap(
        gathers=pieces and run.parallel.tp_comm_overlap_ag,
        sums=pieces and run.parallel.tp_comm_overlap_rs,
        bulk_gather=run.parallel.tp_comm_bulk_dgrad,
        bulk_sum=run.parallel.tp_comm_bulk_wgrad and not split,
    )
