"""Low-rank adapters: against the merged weights' mathematics with one process, and the same numbers over tp."""

import itertools

import pytest
import torch

from megatron.base.box import Box
from megatron.config.model import ModelConfig
from megatron.core.models.carried import CarriedTensors
from megatron.core.models.merge import MergedSource
from megatron.core.parameter import local_parameters
from megatron.core.transformer.lora import freeze_all_but_adapters
from megatron.spec.decoder import decoder_spec
from megatron.spec.lora import adapter_names, is_adapter
from tests import pool
from tests.unit.models.builds import (
    GPT,
    LATENT,
    LATENT_LITE,
    LLAMA,
    accumulate,
    assemble,
    assert_gradients,
    losses,
    make_data_parallel,
    make_ids,
    make_model,
    pieces,
)

ALL = {"lora_rank": 3, "lora_alpha": 5.0}
SOME = {**ALL, "lora_target_modules": ("q_proj", "v_proj", "up_proj", "linear_proj")}
MODELS = {
    "llama": {**LLAMA, **ALL},
    "llama, some": {**LLAMA, **SOME},
    "gpt": {**GPT, **ALL},
    "one group": {**LLAMA, "num_query_groups": 1, **SOME},
    "two groups": {**LLAMA, "num_query_groups": 2, **ALL},
    "latents": {**LATENT, **ALL},
    "latents, some": {**LATENT_LITE, **ALL, "lora_target_modules": ("q_proj", "kv_a_proj_with_mqa", "linear_proj")},
    "shared experts": {
        **LLAMA,
        **ALL,
        "num_experts": 4,
        "moe_layer_freq": "[0,1]",
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "moe_shared_expert_gate": True,
    },
}
BATCHES = 2


class InMemory:
    """A model's parameters as a Source."""

    def __init__(self, model):
        self.tensors = {name: p.detach() for name, p in local_parameters(model).items()}
        self.model, self.dtype, self.carried = model._build.config, torch.float32, CarriedTensors()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name, box, dtype):
        place = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape))
        return self.tensors[name][place].to(dtype).clone()


def adapted(fields, groups, **options):
    """B is not zero; only adapters are trained."""
    model = make_model(fields, groups, spread=0.3, **options)
    freeze_all_but_adapters(local_parameters(model))
    return model


def plain(fields):
    return {name: value for name, value in fields.items() if not name.startswith("lora")}


def merged_model(model, fields):
    """The same without adapters, all of it trained."""
    source = MergedSource(InMemory(model))
    other = make_model(plain(fields), pool.groups())
    parameters = local_parameters(other)
    assert source.shapes == {name: p.info.spec.shape for name, p in parameters.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            # In two blocks each way, whose border lies within groups, halves and rows.
            for ranges in itertools.product(*(_two(size) for size in parameter.shape)):
                box = Box(tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges))
                parameter[tuple(slice(*ends) for ends in ranges)] = source.read(name, box, torch.float32)
    return other


def _two(size):
    return [(0, size // 3), (size // 3, size)] if size > 2 else [(0, size)]


def gradient(model, groups):
    data_parallel = make_data_parallel(model, groups)
    accumulate(model, data_parallel, [make_ids(2, 8, seed) for seed in range(BATCHES)])
    return data_parallel


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_merged_model_and_its_gradient(name):
    """With W' = W + c B A:  dB = c dW' A^T  and  dA = c B^T dW'."""
    fields, groups = MODELS[name], pool.groups()
    model = adapted(fields, groups)
    other = merged_model(model, fields)
    ids = make_ids(2, 8, seed=9)
    with torch.no_grad():
        torch.testing.assert_close(losses(model, ids), losses(other, ids), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(losses(model, ids), losses(make_model(plain(fields), groups, spread=0.3), ids))
    whole = assemble([pieces(gradient(other, groups))])
    found = assemble([pieces(gradient(model, groups))])
    config, parameters = model._build.config, local_parameters(model)
    expected, scale = {}, fields["lora_alpha"] / fields["lora_rank"]
    for layer in range(config.num_layers):
        for path, linear in decoder_spec(config).layers[layer].linears().items():
            prefix = f"decoder.layers.{layer}.{path}"
            for projection in linear.projections:
                if projection.name not in config.lora_projections:
                    continue
                a, b = adapter_names(prefix, projection.name)
                outputs = projection.outputs
                place = tuple(slice(o, o + n) for o, n in zip(outputs.offset, outputs.shape))
                of_weight = whole[f"{prefix}.weight"][place].flatten(0, -2) * scale
                expected[b] = (of_weight @ parameters[a].T).view(parameters[b].shape)
                expected[a] = parameters[b].flatten(0, -2).T @ of_weight
    assert expected and all(is_adapter(key) for key in found)
    assert_gradients(found, {key: tensor.detach() for key, tensor in expected.items()})


def share(rank, size, fields, sequence_parallel):
    """(losses, gradient pieces with what is partial over tp summed) of this rank."""
    holders = decoder_spec(ModelConfig(**fields)).first_core.group_holders(size)
    groups = pool.groups(tp=size, holders=holders)
    model = adapted(fields, groups, sequence_parallel=sequence_parallel)
    with torch.no_grad():
        found = losses(model, make_ids(2, 8, seed=9))
    return found.numpy(), pieces(gradient(model, groups))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, size) for name in ("llama", "llama, some", "gpt") for size in (2, 4)),
        ("one group", 2),
        ("two groups", 4),
        ("latents", 2),
        ("latents, some", 4),
    ],
)
def test_the_same_over_tp(name, size, sequence_parallel):
    fields = MODELS[name]
    ((one, expected),) = pool.run(1, share, fields, False)
    ranks = pool.run(size, share, fields, sequence_parallel)
    for found, _ in ranks:
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(one), rtol=1e-5, atol=1e-6)
    assert_gradients(assemble([part for _, part in ranks]), assemble([expected]))


def masks(rank, size, sequence_parallel):
    """Outputs of a layer's adapters beside each other, with dropout, twice from the same random state."""
    groups = pool.groups(tp=size)
    found = []
    for _ in range(2):
        model = adapted({**LLAMA, **ALL, "lora_dropout": 0.5}, groups, sequence_parallel=sequence_parallel).train()
        found.append(losses(model, make_ids(2, 8)).detach())
    with torch.no_grad():
        quiet = losses(model.eval(), make_ids(2, 8))
    return [tensor.numpy() for tensor in (*found, quiet)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_the_same_on_every_rank_of_tp_and_off_in_evaluation(sequence_parallel):
    ranks = pool.run(2, masks, sequence_parallel)
    for first, second, quiet in ranks:
        assert (first == second).all() and (first == ranks[0][0]).all()
        assert abs(first - quiet).max() > 1e-3


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_frozen_keeps_no_input(frozen):
    model = make_model(LLAMA, pool.groups())
    saved = []
    for layer in (model.decoder.layers["0"].mlp.linear_fc1, model.decoder.layers["0"].self_attention.linear_proj):
        layer.weight.requires_grad_(not frozen)
        x = torch.randn(8, 2, layer.weight.shape[-1], requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
            layer(x).sum().backward()
        assert (x.data_ptr() in saved) == (not frozen) and x.grad is not None
        assert (layer.weight.grad is None) == frozen
