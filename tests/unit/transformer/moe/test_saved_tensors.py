"""The tensors that a layer with experts keeps for backward, one by one, are those of its description."""

import dataclasses
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.expert_parallel.dispatch import OnTheWay
from megatron.core.parameter import initialize, local_parameters
from megatron.core.transformer.moe.layer import MoELayer
from megatron.core.transformer.recompute import recompute
from megatron.spec.expert_rows import ExpertRows
from megatron.spec.memory.layer import LayerMemory
from megatron.spec.memory.trace import EXPERTS, ROUTER, SHARED_EXPERTS
from tests import pool
from tests.unit.models.builds import LLAMA, make_build
from tests.unit.spec import planned

SAMPLES, TOKENS, H, F, E, K = 2, 8, 32, 12, 8, 3
FIELDS = {**LLAMA, "num_experts": E, "moe_router_topk": K, "moe_ffn_hidden_size": F}
SHARED = {"moe_shared_expert_intermediate_size": 20}
MODELS = {
    "plain": FIELDS,
    "bf16": {**FIELDS, "bf16": True},
    "no gate, fp64 router": {**FIELDS, "swiglu": False, "moe_router_dtype": "fp64"},
    "shared": {**FIELDS, **SHARED},
    "shared with a gate, bf16": {**FIELDS, **SHARED, "moe_shared_expert_gate": True, "bf16": True},
}


def saved(forward, parameters):
    """Bytes of each storage that a forward saves, parameters excepted."""
    known, found = {each.untyped_storage().data_ptr() for each in parameters}, {}

    def count(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        out = forward()
    del out
    return Counter(found.values())


class Watched(NamedTuple):
    """Tokens on their way, whose arrival is noted."""

    on_the_way: OnTheWay
    arrived: list

    def finish(self):
        self.arrived.append(self.on_the_way.finish())
        return self.arrived[-1]


def watch(dispatcher):
    """The list to which the dispatcher will add what it brings here."""
    start, arrived = dispatcher.start, []
    dispatcher.start = lambda *arguments, **options: Watched(start(*arguments, **options), arrived)
    return arrived


def measured(rank, size, name, axes, modules):
    """(bytes of the saved storages, bytes as described, by the parts of the layer, the load)"""
    groups, fields = pool.groups(**axes, experts=True), MODELS[name]
    build = make_build(fields, groups, sequence_parallel=True)
    spec, parts = build.spec.layers[0], frozenset(modules)
    layer = MoELayer(build, spec.mlp, 0, parts)
    initialize(local_parameters(layer), 3 + rank)
    tp = groups.tp.size
    x = torch.randn(TOKENS // tp, SAMPLES, H).to(build.dtype).requires_grad_()
    received = watch(layer._dispatcher)
    run = (lambda: recompute(layer, x, build.rng, last=layer)) if "moe" in parts else lambda: layer(x)
    found = saved(run, layer.parameters())
    sent, tokens = received[0], x.shape[0] * x.shape[1]
    alone = groups.etp_ep.size == 1
    load = ExpertRows(
        ranks=groups.etp_ep.size,
        etp=groups.etp.size,
        experts=len(sent.assignments.sizes),
        sent=tokens if alone else len(sent.plan.tokens),
        assigned=tokens * K,
        received=len(sent.rows),
        worked=len(sent.weights),
        largest=max(sent.assignments.sizes),
    )
    sizes = planned.sizes_for(build.config, planned.CPU, TOKENS, SAMPLES, tp, sequence_parallel=tp > 1)
    memory = LayerMemory(spec, dataclasses.replace(sizes, load=load), parts)
    return found, {part: memory.kept_by_part()[part] for part in (ROUTER, SHARED_EXPERTS, EXPERTS)}, load, alone


def described(name, load, tokens, modules):
    """{bytes of a storage: how often}, written down by hand."""
    fields = MODELS[name]
    e = 2 if "bf16" in fields else 4
    x = tokens * H * e
    if "moe" in modules:
        return Counter([x])
    width, outputs = F // load.etp, (2 if fields["swiglu"] else 1) * F // load.etp
    logits = tokens * E * (8 if "moe_router_dtype" in fields else 4)
    of_all = [x, logits, tokens * K * 8]
    of_experts = [
        load.worked * outputs * e,
        load.worked * 4,
        load.worked * 8,
        load.received * 8,
    ]  # the order of the rows
    if "moe_act" not in modules:
        of_experts.append(load.worked * width * e)
    # One rank reads the tokens themselves; where weights are taken from the router's, autograd keeps the places.
    of_experts.append(load.assigned * 8 if load.ranks == 1 else load.received * H * e)
    return Counter([*of_all, *of_experts])


WAYS = {"": (), "moe_act": ("moe_act",), "moe": ("moe",)}


@pytest.mark.parametrize("modules", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", [name for name in MODELS if "shared" not in name])
@pytest.mark.parametrize(("size", "axes"), [(1, {}), (2, {"ep": 2}), (2, {"tp": 2}), (2, {"tp": 2, "ep": 2, "etp": 1})])
def test_every_tensor_is_described(size, axes, name, modules):
    for found, parts, load, alone in pool.run(size, measured, name, axes, modules):
        tokens = TOKENS * SAMPLES // axes.get("tp", 1)
        assert found == described(name, load, tokens, modules)
        indices = 0 if "moe" in modules else tokens * K * 8 + (load.assigned * 8 if alone else 0)
        assert sum(parts.values()) == sum(size * times for size, times in found.items()) - indices


@pytest.mark.parametrize("modules", [(), ("shared_experts",), ("moe",)], ids=" ".join)
@pytest.mark.parametrize("name", [name for name in MODELS if "shared" in name])
@pytest.mark.parametrize("axes", [{}, {"tp": 2}], ids=str)
def test_shared_experts_are_described(axes, name, modules):
    for found, parts, load, alone in pool.run(axes.get("tp", 1), measured, name, axes, modules):
        tokens = TOKENS * SAMPLES // axes.get("tp", 1)
        indices = 0 if "moe" in modules else tokens * K * 8 + (load.assigned * 8 if alone else 0)
        assert sum(parts.values()) == sum(size * times for size, times in found.items()) - indices
