"""The bounds of a search's memory: never above the exact plan, and close to it."""

import random

import numpy as np
import pytest

from megatron.base.errors import ConfigError
from megatron.config.mesh import mesh_of
from megatron.config.settings import resolve
from megatron.planner.memory.plan import plan_memory
from megatron.planner.search.layout import Candidates, Layout, choices_of
from megatron.planner.search.memory_bounds import MemoryBounds
from megatron.planner.search.space import space_of
from megatron.spec.sizes import Target
from tests.unit.config.runs import make_run

WORLD = 16
CUDA, CPU = Target(cpu=False), Target(cpu=True)
LLAMA = {
    "bf16": True, "num_layers": 16, "hidden_size": 1024, "ffn_hidden_size": 2816, "num_attention_heads": 16,
    "group_query_attention": True, "num_query_groups": 4, "seq_length": 2048, "swiglu": True, "add_bias_linear": False,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "vocab_size": 32000, "attention_dropout": 0.0,
    "hidden_dropout": 0.0, "global_batch_size": 64, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
GPT = {
    "bf16": True, "num_layers": 8, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024, "vocab_size": 50257,
    "global_batch_size": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 512, "moe_layer_freq": "([0]*2+[1]*14)"}
MODELS = {
    "dense": LLAMA,
    "tied": {**LLAMA, "num_layers": 8, "untie_embeddings_and_output_weights": False},
    "gpt": GPT,
    "experts": {**LLAMA, **EXPERTS},
    "fp8": {**LLAMA, "fp8_format": "hybrid", "first_last_layers_bf16": True, "grad_reduce_in_bf16": True},
    "bf16 gradients": {**LLAMA, "main_grads_dtype": "bf16", "use_precision_aware_optimizer": True},
    "predictions": {**LLAMA, **EXPERTS, "mtp_num_layers": 2},
    "windows": {**LLAMA, "num_layers": 8, "window_size": "512,0", "window_attn_skip_freq": "2"},
}


def random_layouts(run, number, seed=0):
    """Layouts that the rules accept, of a wide space."""
    wide = {
        "sequence_parallel": (False, True),
        "cp": (1, 2, 4),
        "cp_inner": (1, 2, 4),
        "group": (0, 3, 4, 8),
        "micro_batch": (1, 2, 4),
        "dp_overlap": (False, True),
        "recompute": ("none", "core_attn", "norm", "norm+mlp_act", "mlp", "full", "full:1", "full/2"),
        "offload": (0.0, 0.3, 1.0),
    }
    if run.model.num_experts is not None:
        wide |= {"etp": (1, 2), "recompute": ("none", "norm", "norm+moe_act", "moe", "full", "full:2", "full/2")}
    choices, rng, found = {**choices_of(run, WORLD), **wide}, random.Random(seed), []
    while len(found) < number:
        some = {axis: tuple(rng.sample(values, min(2, len(values)))) for axis, values in choices.items()}
        candidates = space_of(run, WORLD, some)
        found += [candidates.layout(place) for place in rng.sample(range(len(candidates)), min(4, len(candidates)))]
    return found[:number]


def planned(run, layout, target):
    run = layout.apply(run)
    return max(rank.peak for rank in plan_memory(run, resolve(run, mesh_of(run.parallel, WORLD)), target))


def gaps_of(model, number, target=CUDA, seed=0, **fields):
    """The part of the exact figure by which each bound is lower."""
    run = make_run(**{**MODELS[model], **fields})
    layouts = random_layouts(run, number, seed)
    bounds = MemoryBounds(run, WORLD, target).nbytes(Candidates.of(layouts))
    exact = np.array([planned(run, layout, target) for layout in layouts])
    above = np.flatnonzero(bounds > exact)
    assert not len(above), [(layouts[n], bounds[n], exact[n]) for n in above[:3]]
    return (exact - bounds) / exact


@pytest.mark.parametrize(
    ("model", "target"), [("dense", CUDA), ("experts", CUDA), ("gpt", CPU), ("fp8", CPU), ("predictions", CUDA)]
)
def test_bounds_are_below_and_close(model, target):
    gaps = gaps_of(model, 12, target)
    assert gaps.max() < 1e-6  # activations that move are rounded down


@pytest.mark.slow
@pytest.mark.parametrize("target", [CUDA, CPU], ids=["cuda", "cpu"])
@pytest.mark.parametrize("model", MODELS)
def test_bounds_of_many(model, target):
    assert gaps_of(model, 420, target, seed=1).max() < 1e-6


@pytest.mark.parametrize(
    "fields",
    [
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "main_params_dtype": "bf16"},
        {"offload_optimizer_states": True},
        {"cpu_offloading": True, "cpu_offloading_num_layers": 2},
        {"cpu_offloading_weights": True, "cpu_offloading_num_layers": 1},
        {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn", "mlp_act")},
        {"overlap_p2p_communication": False},
        {**EXPERTS, "moe_layer_freq": "([0]*2+[1]*6)", "mlp_chunk_size": 512},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_other_flags_of_the_run(fields):
    """Bounds hold with flags that are no axes. Two are less close: weights that a step fetches from host memory count as
    none, and without overlap a receive may be posted early."""
    run = make_run(**{**MODELS["tied"], **fields})
    layouts = random_layouts(run, 4)
    bounds = MemoryBounds(run, WORLD, CUDA).nbytes(Candidates.of(layouts))
    gap = 0.03 if fields.keys() & {"cpu_offloading_weights", "overlap_p2p_communication"} else 1e-6
    for layout, bound in zip(layouts, bounds, strict=True):
        assert (1 - gap) * planned(run, layout, CUDA) <= bound <= planned(run, layout, CUDA), layout


def test_without_offload_to_the_host_bounds_are_exact():
    run = make_run(**MODELS["dense"])
    layouts = [layout for layout in random_layouts(run, 40, 3) if not (layout.offload or layout.optimizer_offload)][:8]
    bounds = MemoryBounds(run, WORLD, CUDA).nbytes(Candidates.of(layouts))
    assert bounds.tolist() == [planned(run, layout, CUDA) for layout in layouts]


def test_bounds_of_host_memory():
    run = make_run(**MODELS["dense"])
    layouts = [layout for layout in random_layouts(run, 60, 4) if layout.offload and not layout.optimizer_offload][:10]
    memory = MemoryBounds(run, WORLD, CUDA)
    bounds = memory.bounds(Candidates.of(layouts)).host
    exact = np.array([peaks.host for peaks in memory.exact(layouts)])
    assert len(exact) == 10 and (bounds <= exact).all()
    assert np.median(bounds[exact > 0] / exact[exact > 0]) > 0.7


def test_exact_is_the_plan():
    run = make_run(**MODELS["gpt"])
    layouts = random_layouts(run, 3)
    bounds = MemoryBounds(run, WORLD, CUDA)
    again = [*layouts, *(Layout(**{**vars(layout), "tp_overlap": not layout.tp_overlap}) for layout in layouts)]
    peaks = bounds.exact(again)
    for layout, found in zip(again, peaks, strict=True):
        assert found.device == planned(run, layout, CUDA) == max(rank.peak for rank in found.ranks)
        assert found.host == max(rank.host for rank in found.ranks)
    assert peaks[0] is peaks[3], "tp_overlap takes no memory"


def test_no_layouts_have_no_bounds():
    run = make_run(**MODELS["gpt"])
    none = Candidates.of([Layout()]).take(np.zeros(0, np.int64))
    assert MemoryBounds(run, WORLD, CUDA).nbytes(none).shape == (0,)


def test_adapters_are_refused():
    with pytest.raises(ConfigError, match="--lora-rank 4"):
        MemoryBounds(make_run(**GPT, lora_rank=4), WORLD, CUDA)
