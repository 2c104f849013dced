"""The memory plan: its parts against the model's own tensors, and its peak against what torch allocates."""

import importlib.util
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megatron.base.errors import ConfigError
from megatron.base.mesh import Mesh
from megatron.command_line.read import parse
from megatron.config.data_parallel import DataParallelSettings
from megatron.config.mesh import mesh_of
from megatron.config.pipeline import pipeline_settings
from megatron.config.presets import preset
from megatron.config.settings import resolve
from megatron.planner.memory.model_states import rank_buckets, rank_state
from megatron.planner.memory.plan import plan_memory
from megatron.planner.memory.rank_buckets import RankBuckets
from megatron.schedule.offload_pass import with_offload
from megatron.schedule.partition import whole_model
from megatron.schedule.validate import chunks_on_device
from megatron.spec.buckets import default_bucket_size, plan_all
from megatron.spec.decoder import Placed, decoder_spec
from megatron.spec.expert_rows import WORST
from megatron.spec.memory.trace import (
    ACTIVATIONS,
    BATCH,
    COMMUNICATION,
    GRADIENTS,
    KINDS,
    OPTIMIZER,
    PARAMETERS,
    profile_of,
)
from megatron.spec.parameter import Init, ParamSpec, Shard, local_numel
from megatron.spec.sizes import Target
from megatron.tooling.memory_check import COMMON, EXPERTS, GEMM_LAST, GPT, LLAMA, PARTS, RATIO, measure
from tests.unit.config.dynamic_cases import DYNAMIC
from tests.unit.config.runs import make_run
from tests.unit.spec import planned

ROOT = Path(__file__).parents[3]
CUDA, CPU, WIDE = Target(cpu=False), Target(cpu=True), Target(cpu=True, wide=True)
LLAMA_LIKE = {
    "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
EXPERT_LIKE = {**LLAMA_LIKE, "num_experts": 8, "moe_ffn_hidden_size": 32}


def plan_of(run, world, target):
    """The plan of a run on `world` processes, with the settings that the run itself would use."""
    return plan_memory(run, resolve(run, mesh_of(run.parallel, world)), target)


def peak(target=CUDA, world=1, **fields):
    """The plan of the only pipeline rank, or of all."""
    ranks = plan_of(make_run(**fields), world, target)
    return ranks if len(ranks) > 1 else ranks[0]


def test_buckets_are_padded_and_whole():
    run = make_run(**LLAMA_LIKE)
    parameters = decoder_spec(run.model).rank_parameters([whole_model(2)])
    numels = {name: placed.spec.numel for name, placed in parameters.items()}
    buckets = RankBuckets(parameters).of(Mesh.create(3), DataParallelSettings(shards="optim"))
    assert [name for names in buckets.names for name in names] == list(reversed(parameters))
    assert not (buckets.sizes % (64 * 3)).any()
    assert len(buckets.sizes) > 1 and buckets.sizes.max() >= default_bucket_size(sum(numels.values()), 3)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("etp", [1, 2])
def test_buckets_are_those_of_a_run(tied, etp):
    """The sizes and the order that `plan_all` makes of the parameters of each rank, some of them in host memory."""
    run = make_run(**{**EXPERT_LIKE, "untie_embeddings_and_output_weights": not tied, "num_layers": 8},
                   pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)  # fmt: skip
    spec, mesh, settings = decoder_spec(run.model), Mesh.create(16, tp=2, pp=2, ep=2, etp=etp), DataParallelSettings()
    for rank in range(2):
        stages = run.pipeline_settings().stages_of(rank)
        parameters = dict(reversed(spec.rank_parameters(stages).items()))
        numels = {name: local_numel(placed.spec, mesh.sizes) for name, placed in parameters.items()}
        firsts = tuple(f"decoder.layers.{stage.layers[0]}." for stage in stages)
        hosted = {name for name in parameters if name.startswith(firsts)}
        kinds = {
            name: (mesh.view(placed.spec.axis), placed.stage, placed.on_both_ends, name in hosted)
            for name, placed in parameters.items()
        }
        layouts = plan_all(numels, kinds, default_bucket_size(sum(numels.values()), 1), dict.fromkeys(numels, 1))
        buckets = rank_buckets(spec, stages, 1).of(mesh, settings)
        assert list(map(list, buckets.names)) == [list(layout.offsets) for layout in layouts]
        assert buckets.sizes.tolist() == [layout.size for layout in layouts]
        assert buckets.on_host.tolist() == [not hosted.isdisjoint(layout.offsets) for layout in layouts]


def test_buckets_of_experts_are_cut_over_their_own_copies():
    """At tp 2 x dp 2 and etp 1: two copies of a dense parameter, of half its rows, and four of an expert one."""
    init = Init("normal", 1.0)
    parameters = {
        f"{axis}{number}": Placed(ParamSpec((128, 5), init, (Shard(axis, 0),)), stage=0)
        for axis in ("tp", "etp")
        for number in "ab"
    }
    mesh = Mesh.create(4, tp=2, etp=1)
    for shards, cuts in (("optim", {"tp": (2, 1), "etp": (4, 1)}), ("no_shard", {"tp": (1, 2), "etp": (1, 4)})):
        buckets = RankBuckets(parameters).of(mesh, DataParallelSettings(shards=shards, bucket_size=10**6))
        assert sorted(map(sorted, buckets.names)) == [["etpa", "etpb"], ["tpa", "tpb"]]
        for number, names in enumerate(buckets.names):
            axis = names[0][:-1]
            assert (buckets.shards[number], buckets.copies[number]) == cuts[axis]
            assert buckets.sizes[number] == 2 * (128 * 5 if axis == "etp" else 64 * 5)


def blocks_of(**fields):
    """Bytes of the blocks for gradients on the first pipeline rank of a run: those of most of a backward, and those in
    addition for the gradient of the embedding."""
    wide = {**LLAMA_LIKE, "vocab_size": 512, "make_vocab_size_divisible_by": 1, "ddp_bucket_size": 1}
    sharded = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim_grads"}
    run = make_run(**{**wide, **sharded, **fields}, num_layers=8)
    settings = resolve(run, mesh_of(run.parallel, 4))
    spec, stages = decoder_spec(run.model), settings.pipeline.stages_of(0)
    memory = rank_state(spec, stages, settings, run.optimizer, planned.sizes_of_run(run, CUDA), 0).memory
    return memory.blocks, memory.late_blocks


def test_the_gradient_of_the_embedding_needs_a_block_of_its_own_size():
    """Four blocks serve all buckets, which hold one parameter each: head and embedding are larger than any of a layer.
    While the embedding's gradient arrives, nothing of the layers is left, and so that much is counted apart."""
    run = make_run(**LLAMA_LIKE)
    h = run.model.hidden_size
    head, fc1 = 4 * 512 * h, 4 * 2 * run.model.ffn_dim * h
    assert fc1 < head
    assert blocks_of() == (head + 3 * fc1, head - fc1)
    tied = {"untie_embeddings_and_output_weights": False}  # the head adds to this gradient first
    assert blocks_of(**tied) == (head + 3 * fc1, 0)
    assert blocks_of(pipeline_model_parallel_size=2) == (head + 3 * fc1, 0)
    last = {"data_parallel_sharding_strategy": "optim", "grad_reduce_mode": "last-microbatch"}
    assert blocks_of(**last) == (0, 0)  # whole gradients are kept


MODULES = [(), ("norm",), ("mlp_act",), ("core_attn",), ("mlp",), ("norm", "mlp_act", "core_attn"), ("mlp", "norm")]
MOE_MODULES = [(), ("moe_act", "norm"), ("shared_experts",), ("moe", "core_attn")]
MOE_MODELS = {
    "experts": EXPERT_LIKE,
    "experts, shared": {
        **EXPERT_LIKE, "moe_router_topk": 3, "moe_shared_expert_intermediate_size": 64, "moe_router_dtype": "fp64",
    },
    "experts, shared with a gate, fp32 residual": {
        **EXPERT_LIKE, "moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True, "bf16": True,
        "fp32_residual_connection": True,
    },
    "experts, squared relu, norms behind": {
        **EXPERT_LIKE, "swiglu": False, "squared_relu": True, "pre_norm": False, "post_norm": True,
    },
}  # fmt: skip
MODELS = {
    "llama": LLAMA_LIKE,
    "llama, gqa": {**LLAMA_LIKE, "group_query_attention": True, "num_query_groups": 2},
    "llama, qk norm": {**LLAMA_LIKE, "qk_layernorm": True},
    "llama, qk norm after rotation": {**LLAMA_LIKE, "qk_layernorm": True, "qk_layernorm_after_rope": True},
    "llama, gates after rotation": {
        **LLAMA_LIKE, "qk_layernorm": True, "qk_layernorm_after_rope": True, "attention_output_gate": True,
        "group_query_attention": True, "num_query_groups": 2,
    },
    "llama, gates without norms": {
        **LLAMA_LIKE, "attention_output_gate": True, "group_query_attention": True, "num_query_groups": 2,
    },
    "llama, norms behind": {**LLAMA_LIKE, "pre_norm": False, "post_norm": True},
    "gpt, norms on both sides": {"attention_dropout": 0.0, "post_norm": True},
    "gpt, parallel": {"attention_dropout": 0.0, "hidden_dropout": 0.0, "parallel_residual": True},
    "gpt, one norm, dropout": {"attention_dropout": 0.0, "parallel_residual": True, "shared_norm": True},
    "llama, one norm": {**LLAMA_LIKE, "parallel_residual": True, "shared_norm": True, "bf16": True},
    "llama, parallel, factors, fp32 residual": {
        **LLAMA_LIKE, "parallel_residual": True, "residual_multiplier": 0.5, "bf16": True,
        "fp32_residual_connection": True,
    },
    "norms behind, fp32 residual": {
        "pre_norm": False, "post_norm": True, "bf16": True, "fp32_residual_connection": True,
    },
    "llama, clipped": {**LLAMA_LIKE, "clip_qkv": 2.0, "group_query_attention": True, "num_query_groups": 4},
    "llama, clipped, qk norm": {**LLAMA_LIKE, "clip_qkv": 2.0, "qk_layernorm": True},
    "gpt": {"attention_dropout": 0.0},
    "gpt, no dropout, no positions": {
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "position_embedding_type": "none",
        "num_attention_heads": 8, "group_query_attention": True, "num_query_groups": 4,
    },
    "layer norm, fp32 residual, 1p": {"bf16": True, "fp32_residual_connection": True, "apply_layernorm_1p": True},
    "llama, factors": {**LLAMA_LIKE, "residual_multiplier": 0.5},
    "gpt, factors, dropout, fp32 residual": {"residual_multiplier": 0.5, "fp32_residual_connection": True, "bf16": True},
    "xielu": {**LLAMA_LIKE, "swiglu": False, "xielu": True, "bf16": True},
    "squared relu, fp32 residual": {
        **LLAMA_LIKE, "swiglu": False, "squared_relu": True, "bf16": True, "fp32_residual_connection": True,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "modules"),
    [
        pytest.param(fields, modules, id=f"{name}: {' '.join(modules)}")
        for models, ways in ((MODELS, MODULES), (MOE_MODELS, MOE_MODULES))
        for (name, fields), modules in itertools.product(models.items(), ways)
        if not (fields.get("shared_norm") and "norm" in modules)  # a rule refuses it
    ],
)
def test_backward_frees_what_a_layer_keeps(fields, modules):
    for target, (tp, ep), bf16 in itertools.product((CUDA, CPU, WIDE), ((1, 1), (1, 4), (2, 2)), (False, True)):
        if ep > 1 and "num_experts" not in fields:
            ep = 1
        fields = {**fields, "bf16": bf16 or fields.get("bf16", False), "expert_model_parallel_size": ep}
        run = make_run(**fields, max_position_embeddings=32, tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
        layer = planned.layer_memory(run.model, planned.sizes_of_run(run, target), frozenset(modules))
        forward, backward = profile_of(layer.forward), profile_of(layer.backward)
        assert all(forward.net.get(k, 0) + backward.net.get(k, 0) == 0 for k in {*forward.net, *backward.net})
        assert forward.kept == sum(layer.kept_by_part().values()) > 0, "every byte belongs to a part"


STATE_SHAPE = {**LLAMA_LIKE, "hidden_size": 64, "vocab_size": 1024}
STEP_SHAPE = {**LLAMA_LIKE, "num_layers": 8, "hidden_size": 256, "vocab_size": 128, "seq_length": 512, "bf16": True}


class TestState:
    @pytest.mark.parametrize(
        ("fields", "parameters", "gradients", "optimizer"),
        [
            ({}, 4, 4, 8),
            ({"bf16": True}, 2, 4, 12),
            ({"bf16": True, "use_distributed_optimizer": True}, 2, 4, 12 / 4),
            ({"bf16": True, "data_parallel_sharding_strategy": "optim_grads"}, 2, 4 / 4, 12 / 4),
            ({"bf16": True, "data_parallel_sharding_strategy": "optim_grads_params"}, 2 / 4, 4 / 4, 12 / 4),
            ({"optimizer": "sgd"}, 4, 4, 4),
            ({"bf16": True, "use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2}, 2, 4, 12 / 2),
        ],
    )
    def test_bytes_a_parameter(self, fields, parameters, gradients, optimizer):
        rank = peak(world=4, **STATE_SHAPE, **fields)
        for kind, expected in ((PARAMETERS, parameters), (GRADIENTS, gradients), (OPTIMIZER, optimizer)):
            assert rank.at_peak[kind] / rank.parameters == pytest.approx(expected, rel=0.01)  # buckets are padded

    def test_offloaded_state_is_in_host_memory(self):
        here = peak(**STATE_SHAPE, bf16=True)
        away = peak(**STATE_SHAPE, bf16=True, optimizer_cpu_offload=True)
        assert here.host == 0 and here.at_peak[OPTIMIZER] > 0
        assert away.at_peak[OPTIMIZER] == 0 and away.host >= here.at_peak[OPTIMIZER]


class TestStep:
    def test_kinds_sum_to_the_peak(self):
        rank = peak(**STEP_SHAPE)
        assert rank.peak == sum(rank.at_peak[kind] for kind in KINDS if kind in rank.at_peak)
        assert min(rank.at_peak.values()) >= 0 and set(rank.at_peak) <= set(KINDS)

    @pytest.mark.parametrize(
        ("schedule", "kept"), [("1f1b", (4, 3, 2, 1)), ("gpipe", (8, 8, 8, 8)), ("zb-h1", (4, 4, 4, 4))]
    )
    def test_what_the_schedule_keeps_in_flight(self, schedule, kept):
        fields = {"pipeline_model_parallel_size": 4, "global_batch_size": 16, "pipeline_schedule": schedule}
        ranks = peak(world=4, **STEP_SHAPE, **fields)
        assert tuple(rank.in_flight for rank in ranks) == kept
        if schedule == "zb-h1":
            return  # some of what is in flight waits for its weights' gradients alone
        for rank in ranks[:-1]:
            activations = sum(rank.at_peak.get(kind, 0) for kind in ACTIVATIONS)
            assert activations == pytest.approx(rank.in_flight * rank.per_microbatch, rel=0.1)

    def test_more_microbatches_cost_their_tokens_alone(self):
        one, many = (peak(**STEP_SHAPE, global_batch_size=size) for size in (2, 64))
        assert 0 < many.peak - one.peak < 0.02 * one.peak

    def test_a_large_vocabulary_moves_the_peak_to_the_head(self):
        assert peak(**{**STEP_SHAPE, "vocab_size": 100_000}).moment.endswith(("logits", "loss"))
        assert not peak(**STEP_SHAPE).moment.endswith(("logits", "loss"))

    def test_sequence_parallelism_and_recompute_save(self):
        fields = STEP_SHAPE
        whole = peak(world=2, **fields, tensor_model_parallel_size=2)
        cut = peak(world=2, **fields, tensor_model_parallel_size=2, sequence_parallel=True)
        assert cut.per_microbatch < whole.per_microbatch and cut.peak < whole.peak
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        again = peak(world=2, **fields, **full, tensor_model_parallel_size=2)
        assert again.per_microbatch < 0.2 * whole.per_microbatch and again.peak < cut.peak

    @pytest.mark.parametrize(("schedule", "ratio"), [("1f1b", 0.5), ("gpipe", 1.0)])
    def test_offloaded_activations(self, schedule, ratio):
        """What the schedule moves is as much as `chunks_on_device` says of it."""
        fields = {"pipeline_model_parallel_size": 4, "global_batch_size": 16, "pipeline_schedule": schedule}
        kept = peak(world=4, **STEP_SHAPE, **fields)[0]
        moved = peak(world=4, **STEP_SHAPE, **fields, pipeline_offload_ratio=str(ratio))[0]
        run = make_run(**STEP_SHAPE, **fields)
        actions = with_offload(pipeline_settings(run.parallel, 8).schedule_of(8))
        near = chunks_on_device(actions, ratio)[0]
        saved = sum(kept.at_peak.get(kind, 0) - moved.at_peak.get(kind, 0) for kind in ACTIVATIONS)
        assert saved == pytest.approx((kept.in_flight - near) * kept.per_microbatch, rel=0.1) and saved > 0
        assert moved.host >= saved

    @pytest.mark.parametrize(
        "how",
        [
            {"cpu_offloading": True, "cpu_offloading_num_layers": 6},
            {"fine_grained_activation_offloading": True, "offload_modules": ("mlp_fc1", "core_attn")},
        ],
    )
    def test_layers_and_parts_move_for_as_long_as_others_run(self, how):
        fields = {"pipeline_model_parallel_size": 2, "num_layers": 16, "global_batch_size": 8}
        kept, moved = (peak(world=2, **{**STEP_SHAPE, **fields}, **more)[0] for more in ({}, how))
        assert moved.peak < kept.peak and moved.host > 0 and kept.host == 0

    @pytest.mark.parametrize(("ratio", "number"), [("1", 6), ("0.5", 3)])
    def test_without_a_pipeline_the_first_layers_are_away(self, ratio, number):
        """Of 8 layers. At the peak, where the backward begins, 6 of them are, or as many bytes."""
        kept = peak(**STEP_SHAPE)
        layer = sum(layer_bytes_of(make_run(**STEP_SHAPE)).values())
        by_ratio = peak(**STEP_SHAPE, pipeline_offload_ratio=ratio)
        by_number = peak(**STEP_SHAPE, cpu_offloading=True, cpu_offloading_num_layers=number)
        for moved in (by_ratio, by_number):
            assert kept.moment == moved.moment and moved.moment.startswith("backward")
            assert kept.peak - moved.peak == moved.host == pytest.approx(number * layer, abs=100)

    def test_moving_the_last_layer_but_one_lowers_no_peak(self):
        six, seven = (peak(**STEP_SHAPE, cpu_offloading=True, cpu_offloading_num_layers=n) for n in (6, 7))
        assert six.peak == seven.peak and six.host < seven.host

    @pytest.mark.parametrize(
        ("named", "again", "moved"),
        [
            (("mlp_act",), (), ("mlp_act",)),
            (("core_attn",), (), ("core_attn", "attn_proj")),  # a fused kernel keeps its output
            (("core_attn",), ("core_attn",), ("core_attn",)),
            (("attn_norm",), (), ("attn_norm", "post_attn_norm")),
            (("qkv_linear", "mlp_fc2"), ("norm", "mlp_act"), ("attn_norm", "mlp_act")),  # within the linear layers
        ],
    )
    def test_parts_take_along_what_they_save(self, named, again, moved):
        fields = {**STEP_SHAPE, "fine_grained_activation_offloading": True, "offload_modules": named, "post_norm": True}
        fields |= {"recompute_granularity": "selective", "recompute_modules": again} if again else {}
        parts = layer_bytes_of(make_run(**fields))
        assert peak(**fields).host == pytest.approx(6 * sum(parts[name] for name in moved), abs=100)

    def test_messages_and_gathered_keys_are_communication(self):
        assert COMMUNICATION not in +dict_of(peak(**STEP_SHAPE))
        pipeline = peak(world=2, **STEP_SHAPE, pipeline_model_parallel_size=2, global_batch_size=8)
        context = peak(world=2, **STEP_SHAPE, context_parallel_size=2, cp_comm_type=("all_gather",))
        assert pipeline[0].at_peak[COMMUNICATION] > 0 and context.at_peak[COMMUNICATION] > 0


def layer_bytes_of(run):
    return planned.layer_memory(run.model, planned.sizes_of_run(run, CUDA), run.recompute.modules).kept_by_part()


def dict_of(rank):
    return Counter(rank.at_peak)


@pytest.mark.parametrize("cp", [1, 2])
def test_dynamic_groups_are_planned_as_the_largest_with_the_longest_sequence(cp):
    """Four replicas read two samples of 32 tokens each: 256 tokens, 64 of them on a rank, 16 at a time."""
    dynamic = peak(world=4 * cp, context_parallel_size=cp, global_batch_size=8, micro_batch_size=1,
                   **{**DYNAMIC, "max_seqlen_per_dp_cp_rank": 16})  # fmt: skip
    fixed = peak(world=4 * cp, context_parallel_size=4 * cp, seq_length=64 * cp, micro_batch_size=1,
                 global_batch_size=256 // (64 * cp), max_position_embeddings=32, attention_dropout=0.0,
                 reset_attention_mask=True)  # fmt: skip
    assert dynamic.per_microbatch == fixed.per_microbatch and dynamic.moment == fixed.moment
    samples = dynamic.peak - fixed.peak  # as this replica has read them
    assert samples == dynamic.at_peak[BATCH] - fixed.at_peak[BATCH] > 0


def test_what_is_not_planned():
    with pytest.raises(ConfigError, match="--vocab-size"):
        plan_of(make_run(vocab_size=None), 1, CUDA)


def test_adapters_alone_have_gradients():
    """All weights are there, and the states of two matrices for every projection."""
    whole, adapted = peak(**LLAMA_LIKE), peak(**LLAMA_LIKE, lora_rank=4)
    run = make_run(**LLAMA_LIKE, lora_rank=4)
    spec = decoder_spec(run.model)
    adapters = sum(placed.spec.numel for placed in spec.rank_adapters([whole_model(2)]).values())
    assert adapters == 2 * spec.lora.multiply_adds(spec.layers[0].linears().values()) > 0
    assert adapted.parameters == whole.parameters + adapters
    padding = 64 * 4 * 16
    assert adapted.at_peak[GRADIENTS] == pytest.approx(4 * adapters, abs=padding)
    assert adapted.at_peak[OPTIMIZER] == pytest.approx(8 * adapters, abs=2 * padding)
    assert adapted.at_peak[PARAMETERS] == pytest.approx(4 * (adapters + whole.parameters), abs=padding)


SMALL = "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128"
FACTORS = "--embedding-multiplier-scale 4 --residual-multiplier 0.5 --logits-scaling 8"
GEMMA2 = "--post-norm --apply-layernorm-1p --attn-logit-softcapping 3 --final-logit-softcapping 9 --window-size 30,0"
CASES = {
    "llama": f"{LLAMA} --ffn-hidden-size 320",
    "llama, documents": f"{LLAMA} --reset-attention-mask",
    "llama, bf16, unfused, documents": f"{LLAMA} --bf16 --attention-backend unfused --reset-attention-mask",
    "llama, bf16, GEMM-last": f"{LLAMA} --bf16 --kaimm-recompute-norm --kaimm-recompute-mlp-activation-func",
    "llama, GQA, full": (
        f"{LLAMA} --group-query-attention --num-query-groups 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --global-batch-size 4"
    ),
    "llama, bf16, norms behind": f"{LLAMA} --bf16 --no-pre-norm --post-norm",
    "gpt, dropout, norms on both sides": f"{GPT} --post-norm",
    "llama, heads normed together": f"{LLAMA} --qk-layernorm --qk-layernorm-across-heads",
    "llama, bf16, heads normed after rotation": f"{LLAMA} --bf16 --qk-layernorm --qk-layernorm-after-rope",
    "gpt, dropout": GPT,
    "gpt, attention dropout, selective": "--recompute-activations",
    "tied, large vocabulary": f"{GPT} --vocab-size 5000 --num-layers 1 --optimizer sgd",
    "llama, bf16, capped scores": f"{LLAMA} --bf16 --attn-logit-softcapping 3",
    "capped scores, dropout, attention again": (
        f"{GPT} --attn-logit-softcapping 3 --attention-dropout 0.1 --recompute-activations"
    ),
    "gemma 2": f"{LLAMA.replace('--swiglu', '--geglu --openai-gelu')} {GEMMA2}",
    "tied, large vocabulary, capped, bf16": (
        f"{GPT} --vocab-size 5000 --num-layers 1 --optimizer sgd --bf16 --final-logit-softcapping 30"
    ),
    "tied, large vocabulary, capped": (
        f"{GPT} --vocab-size 5000 --num-layers 1 --optimizer sgd --final-logit-softcapping 30"
    ),
    "experts": f"{LLAMA} {EXPERTS}",
    "experts, bf16, activation again": (
        f"{LLAMA} {EXPERTS} --bf16 --recompute-granularity selective --recompute-modules moe_act norm"
    ),
    "experts, shared with a gate, all again": (
        f"{LLAMA} {EXPERTS} --moe-router-topk 4 --moe-shared-expert-intermediate-size 320 --moe-shared-expert-gate "
        "--recompute-granularity selective --recompute-modules moe --num-layers 2"
    ),
    "experts, full": (
        f"{LLAMA} {EXPERTS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--num-layers 2 --moe-aux-loss-coeff 0.01"
    ),
    "many thin experts": f"{LLAMA} {EXPERTS} --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 16",
    "llama, bf16, factors": f"{LLAMA} --bf16 {FACTORS}",
    "fp8, delayed, bf16": f"{LLAMA} --bf16 --fp8-format hybrid",
    "fp8, blockwise, GEMM-last, microbatches": (
        f"{LLAMA} {GEMM_LAST} --fp8-format e4m3 --fp8-recipe blockwise --global-batch-size 6"
    ),
    "experts, fp8 blockwise": f"{LLAMA} {EXPERTS} --fp8-format e4m3 --fp8-recipe blockwise",
    "experts, fp8 delayed, bf16, activation again": (
        f"{LLAMA} {EXPERTS} --bf16 --fp8-format hybrid --num-layers 2 --recompute-granularity selective "
        "--recompute-modules moe_act norm"
    ),
    "tied, large vocabulary, factors": f"{GPT} --vocab-size 5000 --num-layers 1 --optimizer sgd {FACTORS}",
}


@pytest.mark.parametrize("name", CASES)
def test_planned_is_measured(name):
    """In the issue's words within 3 %; here to 0.5 % and 20 KB, the states of random streams."""
    found = measure(0, 1, f"{SMALL} {CASES[name]}" if "vocab" in CASES[name] else f"{CASES[name]} {SMALL}")
    assert found.planned.peak == pytest.approx(found.peak, rel=0.005, abs=20_000), found.planned.moment


MOVING = {
    "ratio": f"{LLAMA} {RATIO} 0.5 --bf16",
    "layers, regions of 2": (
        f"{GPT} --cpu-offloading --cpu-offloading-num-layers 4 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 2"
    ),
    "parts, GEMM-last": f"{LLAMA} {PARTS} core_attn mlp_fc2 {GEMM_LAST}",
    "fp8, mxfp8, layers in bf16": (
        f"{LLAMA} {RATIO} 0.5 --bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --no-fp8-wgrad --first-last-layers-bf16"
    ),
    "all, attention again": f"{LLAMA} {RATIO} 1 --recompute-granularity selective --recompute-modules core_attn",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name.startswith("fp8") else []) for name in MOVING]
)
def test_planned_is_measured_where_activations_move(name):
    """What is cut in two is planned without the copy of its tail."""
    found = measure(0, 1, f"{MOVING[name]} {SMALL} --num-layers 6")
    assert found.planned.peak == pytest.approx(found.peak, rel=0.005, abs=20_000), found.planned.moment


class TestTool:
    FLAGS = f"{COMMON} {LLAMA}".split()

    @pytest.fixture(scope="class")
    def plan(self):
        spec = importlib.util.spec_from_file_location("plan", ROOT / "tools" / "plan.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return lambda *flags: module.main(["memory", *map(str, flags)])

    def test_a_column_a_rank(self, plan, capsys):
        flags = ["--pipeline-model-parallel-size", 2, "--global-batch-size", 8, "--world-size", 4]
        assert plan(*self.FLAGS, *flags) == 0
        out = capsys.readouterr().out
        rows = {line[:20].strip(): line[20:].split() for line in out.splitlines()}
        run = parse([*self.FLAGS, *map(str, flags[:-2])], description="")
        ranks = plan_of(run, 4, Target(cpu=True))
        assert rows["most at once"] == [f"{rank.peak / 2**20:.1f}" for rank in ranks]
        assert rows["layers"] == ["2", "2"]
        assert "dp 2 x pp 2, 2 microbatches per step, float32 on CPU" in out
        for rank in ranks:
            assert f"rank {rank.rank}: most, {rank.peak / 2**20:.1f} MiB, at {rank.moment}" in out

    @pytest.mark.parametrize(
        "flags",
        [
            ["--activation-memory-budget", 0.5, "--recompute-policy", "balanced"],
            ["--pipeline-offload-ratio", "auto"],
            ["--optimizer-cpu-offload", "--optimizer-offload-policy", "auto"],
        ],
    )
    def test_what_the_run_decides_is_said(self, plan, capsys, flags):
        assert plan(*self.FLAGS, *flags) == 0
        assert flags[-2] in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("flags", "word"),
        [
            (["--world-size", 3, "--tensor-model-parallel-size", 2], "world size 3"),
            (["--sequence-parallell"], "did you mean --sequence-parallel"),
        ],
    )
    def test_refusals_are_one_line(self, plan, capsys, flags, word):
        assert plan(*self.FLAGS, *flags) == 2
        error = capsys.readouterr().err
        assert word in error and error.count("\n") == 1

    def test_loads_of_experts(self, plan, capsys):
        flags = [*self.FLAGS, "--num-experts", 8, "--expert-model-parallel-size", 4, "--moe-load-imbalance", 1.5]
        assert plan(*flags, "--global-batch-size", 8) == 0
        out = capsys.readouterr().out
        assert "etp 1 x ep 4 x edp 1" in out and "routing" in out
        for load in ("balanced load", "1.5 times the mean load", "worst case"):
            assert f"{load}" in out
        assert plan(*self.FLAGS, *flags[-2:]) == 2
        assert "no layer has experts" in capsys.readouterr().err

    def test_it_starts_without_torch(self):
        code = (
            "import runpy, sys; sys.argv = ['plan.py', *sys.argv[1:]]\n"
            "try: runpy.run_path('tools/plan.py', run_name='__main__')\n"
            "except SystemExit as end: assert end.code == 0, end.code\n"
            "assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code, "memory", *self.FLAGS], cwd=ROOT, check=True, capture_output=True)


def table_of_experts():
    """ep -> the other numbers of its row in docs/memory.md"""
    lines = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").splitlines()
    rows = lines[next(number for number, line in enumerate(lines) if line.startswith("| ep | rows received")) + 2 :]
    cells = ([int(cell.replace(",", "")) for cell in line.strip("|").split("|")] for line in rows[:3])
    return {ep: numbers for ep, *numbers in cells}


def test_the_figures_of_qwen3_30b_a3b():
    """Bytes per token that experts keep. The rows received are two thirds of T k h at ep 8."""
    model = {**preset("qwen3-30b-a3b"), "bf16": True, "vocab_size": 151936, "max_position_embeddings": 4096}
    assert list(table_of_experts()) == [1, 4, 8]
    for ep, numbers in table_of_experts().items():
        run = make_run(**model, seq_length=4096, micro_batch_size=1, expert_model_parallel_size=ep)
        sizes, kept = planned.sizes_of_run(run, CUDA), []
        for modules in ((), ("moe_act",), ("moe",)):
            parts = planned.layer_memory(run.model, sizes, frozenset(modules)).kept_by_part()
            kept.append(round((parts["router"] + parts["experts"]) / 4096) - 2 * 2048)
        rows = sizes.load.received / 4096
        received = 0 if ep == 1 else round(rows * 2 * 2048)
        logits_weights_order = round(4 * 128 + 4 * 8 + 8 * 8 + 8 * rows)
        assert numbers == [received, 2 * 2 * 8 * 768, 2 * 8 * 768, logits_weights_order, *kept]
    assert received / (8 * 2 * 2048) == pytest.approx(0.67, abs=0.005)


def test_the_worst_load_has_the_largest_peak():
    fields = {**EXPERT_LIKE, "expert_model_parallel_size": 4, "seq_length": 512, "moe_ffn_hidden_size": 256}
    run = make_run(**fields)
    settings = resolve(run, mesh_of(run.parallel, 4))
    peaks = [plan_memory(run, settings, CUDA, load)[0].peak for load in (1.0, 1.5, WORST)]
    assert peaks == sorted(set(peaks))
    limited = make_run(**fields, moe_expert_capacity_factor=1.5)
    assert plan_memory(limited, settings, CUDA, WORST)[0].peak == peaks[1]
