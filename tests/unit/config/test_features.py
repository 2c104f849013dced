import dataclasses

from megatron.config.features.feature import Facts, Feature, Note
from megatron.config.features.table import features, format_table, worth_a_line
from megatron.config.mesh import mesh_of, smallest_world
from megatron.config.rules.check import check
from megatron.config.settings import resolve
from tests.unit.config.dynamic_cases import DYNAMIC
from tests.unit.config.moe_cases import BIASED, COEFFICIENTS, MOE, TYPES
from tests.unit.config.runs import make_run

ALONE = Facts(
    device="cpu",
    backend=None,
    attention_choice="cuDNN (FlashAttention-3: it is not installed)",
    block_choice="fused blocks (torch's flash for CPUs)",
    fusion_missing=None,
    grouped_missing="torch's grouped product needs widths that are multiples of 4, not 22",
    experts_choice="none (the device is cpu)",
    fused_choice="none (the device is cpu)",
    layers_choice="local",
    upcast_products=False,
    separate_main_grads=False,
    buckets=3,
    shards=1,
    tp_overlap="off",
    tp_overlap_why="",
)


def rows(run, facts=ALONE, dp=1):
    """The table of a run on `dp` data-parallel replicas."""
    return features(run, resolve(run, mesh_of(run.parallel, dp * smallest_world(run.parallel))), facts)


def row(name, facts=ALONE, dp=1, **fields):
    (found,) = [r for r in rows(make_run(**fields), facts, dp) if r.name == name]
    return found.requested, found.in_effect, found.why


def test_tensor_parallelism():
    assert row("tensor parallelism") == ("off", "off", "")
    assert row("tensor parallelism", tensor_model_parallel_size=4) == ("tp 4", "tp 4", "")


TP = {"tensor_model_parallel_size": 2}


def test_sequence_parallelism_says_why_it_is_off():
    assert row("sequence parallelism") == ("off", "off", "")
    assert row("sequence parallelism", sequence_parallel=True) == ("on", "off", "tp = 1")
    assert row("sequence parallelism", **TP, sequence_parallel=True) == ("on", "on", "")


def test_cuda_graphs():
    name, asked = "CUDA graphs", {"cuda_graph_impl": "local", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    on_cuda = dataclasses.replace(ALONE, device="cuda")
    assert row(name) == ("off", "off", "")
    assert row(name, **asked) == ("layers", "off", "no CUDA device")
    assert row(name, on_cuda, **asked) == ("layers", "layers", "after 3 steps without")
    assert row(name, on_cuda, **asked, skip_train=True)[1:] == ("off", "evaluation only")


def test_options_of_nccl(tmp_path):
    nccl, gloo = (dataclasses.replace(ALONE, backend=each) for each in ("nccl", "gloo"))
    name = "NCCL options"
    (tmp_path / "nccl.yaml").write_text("dp_cp: {max_ctas: 16}\npos_embd: {max_ctas: 1}\n")
    asked = {"nccl_communicator_config_path": str(tmp_path / "nccl.yaml"), "high_priority_stream_groups": ("mp",)}
    assert row(name) == row(name, nccl) == ("off", "off", "")
    assert row(name, **asked) == ("dp_cp, pos_embd, mp", "off", "one process")
    assert row(name, gloo, **asked)[1:] == ("off", "gloo has no such options")
    assert row(name, nccl, **asked)[1:] == ("dp_cp, mp", "no group of this task here: pos_embd")


def test_pipeline_with_its_bubble():
    two = {"pipeline_model_parallel_size": 2, "num_layers": 8, "global_batch_size": 16}
    assert row("pipeline") == ("off", "off", "")
    assert row("pipeline", **two) == ("pp 2, 1f1b", "pp 2, 1f1b", "bubble 11% with 8 microbatches per step")
    assert row("pipeline", **two, num_virtual_stages_per_pipeline_rank=2)[1:] == (
        "pp 2, interleaved, 2 stages per rank",
        "bubble 6% with 8 microbatches per step",
    )
    assert row("pipeline", **{**two, "global_batch_size": None})[2] == "bubble 50% with 1 microbatch per step"
    assert row("pipeline", dp=4, **two)[2] == "bubble 33% with 2 microbatches per step"
    assert row("pipeline communication overlap") == ("on", "off", "pp = 1")
    assert row("pipeline communication overlap", **two) == ("on", "on", "")
    assert row("pipeline communication overlap", **two, overlap_p2p_communication=False) == ("off", "off", "")


def test_context_parallelism_with_its_kernels():
    name, four = "context parallelism", {"context_parallel_size": 4, "attention_dropout": 0.0}
    assert row(name) == ("off", "off", "")
    assert row(name, **four) == ("cp 4, p2p", "cp 4, p2p: fused blocks", "torch's flash for CPUs")
    assert row(name, **four, cp_comm_type=("a2a",)) == ("cp 4, a2a", "cp 4, a2a", "")
    assert row(name, **four, cp_comm_type=("a2a", "allgather"))[0] == "cp 4, a2a, all_gather"


def test_dynamic_context_parallelism():
    name, groups = "dynamic context parallelism", "groups of 1 to 4 ranks with 32 tokens each"
    assert row(name) == ("off", "off", "")
    assert row(name, dp=4, **DYNAMIC) == (f"{groups}, p2p", f"{groups}, p2p: fused blocks", "torch's flash for CPUs")
    assert row(name, dp=4, **DYNAMIC, cp_comm_type=("a2a",)) == (f"{groups}, a2a", f"{groups}, a2a", "")
    assert row(name, dp=4, **DYNAMIC, skip_train=True)[1:] == ("off", "evaluation only")
    assert row("context parallelism", dp=4, **DYNAMIC)[1] == "off"
    two = {"pipeline_model_parallel_size": 2}
    assert row("pipeline", dp=4, **DYNAMIC, **two)[2] == "the documents decide about the number of microbatches"


CHUNKS = dataclasses.replace(ALONE, tp_overlap="in chunks, gloo", tp_overlap_why="no symmetric memory: no GPU")
FUSED = dataclasses.replace(ALONE, tp_overlap="fused, symmetric memory")


def test_tensor_overlap():
    name, asked = "tensor-parallel overlap", {"tp_comm_overlap": True, "sequence_parallel": True}
    why = "no symmetric memory: no GPU; no user buffers: --transformer-impl local"
    both = "all-gather + reduce-scatter"
    assert row(name) == row(name, CHUNKS, sequence_parallel=True) == ("off", "off", "")
    alone = dataclasses.replace(ALONE, tp_overlap_why="tp = 1")
    assert row(name, alone, **asked) == (both, "off", "tp = 1")
    assert row(name, CHUNKS, **asked) == (both, f"{both}: in chunks, gloo", why)
    assert row(name, FUSED, **asked) == (both, f"{both}: fused, symmetric memory", "")
    assert row(name, FUSED, **asked, tp_comm_overlap_rs=False)[:2] == (
        "all-gather",
        "all-gather: fused, symmetric memory",
    )
    assert row(name, CHUNKS, **asked, tp_comm_overlap_ag=False)[0] == "reduce-scatter"
    assert row(name, CHUNKS, tp_comm_overlap=True) == ("all-reduce", "all-reduce: in chunks, gloo", why)


def test_tensor_bulk_overlap():
    name, both, two = "tensor-parallel bulk overlap", "dgrad + wgrad", TP
    off = {"tp_comm_bulk_dgrad": False, "tp_comm_bulk_wgrad": False}
    assert row(name) == (both, "off", "tp = 1")
    assert row(name, **off) == row(name, **two, **off) == ("off", "off", "")
    assert row(name, **two) == (both, "wgrad", "without --sequence-parallel nothing is gathered")
    assert row(name, **two, sequence_parallel=True) == (both, both, "")
    assert row(name, **two, sequence_parallel=True, tp_comm_bulk_wgrad=False) == ("dgrad", "dgrad", "")
    assert row(name, **two, tp_comm_bulk_dgrad=False) == ("wgrad", "wgrad", "")


GLOO = dataclasses.replace(ALONE, backend="gloo")
FOUR = {"dp": 4, "facts": GLOO}
SHARED = {"dp": 4, "facts": dataclasses.replace(GLOO, shards=4)}
ZERO1 = {"use_distributed_optimizer": True}
ZERO2 = {"data_parallel_sharding_strategy": "optim_grads"}
OVERLAPPED = {"overlapped_distributed_optimizer": True}


def test_data_parallel_sharding():
    name = "data-parallel sharding"
    assert row(name) == row(name, **FOUR) == ("off", "off", "")
    state = "optimizer state (ZeRO-1)"
    assert row(name, **SHARED, **ZERO1) == row(name, **SHARED, **OVERLAPPED) == (state, state, "over 4 ranks")
    assert row(name, **ZERO1) == (state, "off", "dp = 1: one rank per instance")
    both = "optimizer state, gradients (ZeRO-2)"
    assert row(name, **{**FOUR, "facts": dataclasses.replace(GLOO, shards=2)}, **ZERO2) == (both, both, "over 2 ranks")
    everything = "optimizer state, gradients, parameters (ZeRO-3)"
    found = row(name, **SHARED, data_parallel_sharding_strategy="optim_grads_params")
    assert found == (everything, everything, "over 4 ranks")


def test_gradient_reduction():
    name, late, early = "gradient reduction", "after backward", "overlapped"
    assert row(name) == (late, "off", "dp = 1")
    assert row(name, overlap_grad_reduce=True) == (early, "off", "dp = 1")
    assert row(name, **FOUR) == (late, "after backward: all-reduce, 3 buckets, gloo", "")
    assert row(name, **FOUR, overlap_grad_reduce=True) == (early, "overlapped: all-reduce, 3 buckets, gloo", "")
    one = {"dp": 4, "facts": dataclasses.replace(SHARED["facts"], buckets=1)}
    assert row(name, **one, **ZERO1) == (late, "after backward: reduce-scatter, 1 bucket, gloo", "")
    assert row(name, **SHARED, grad_reduce_in_bf16=True, **ZERO2) == (
        early,
        "overlapped: reduce-scatter, 3 buckets, gloo, bf16 on the wire",
        "",
    )
    two = {"dp": 4, "facts": dataclasses.replace(GLOO, shards=2)}
    assert row(name, **two, **ZERO1, num_distributed_optimizer_instances=2) == (
        late,
        "after backward: reduce-scatter + all-reduce between instances, 3 buckets, gloo",
        "",
    )


def test_when_gradients_are_reduced():
    name = "gradients reduced"
    assert row(name) == ("last-microbatch", "off", "dp = 1")
    assert row(name, **FOUR) == ("last-microbatch", "last-microbatch", "")
    assert row(name, **SHARED, **ZERO2) == ("every-microbatch", "every-microbatch", "")
    assert row(name, **SHARED, **OVERLAPPED) == (
        "auto",
        "every-microbatch at first",
        "decided after the first steps, and logged",
    )


def test_parameter_gather():
    name = "parameter gather"
    assert row(name) == row(name, **FOUR) == ("off", "off", "")
    assert row(name, **ZERO1) == ("after the update", "off", "nothing is shared")
    assert row(name, **SHARED, **ZERO1) == ("after the update", "after the update", "")
    found = row(name, **SHARED, **ZERO1, overlap_param_gather=True)
    assert found == row(name, **SHARED, **OVERLAPPED) == ("overlapped", "overlapped", "")


def test_attention_kernel_is_split_from_its_reason():
    assert row("attention kernel") == ("auto", "cuDNN", "FlashAttention-3: it is not installed")
    plain = dataclasses.replace(ALONE, attention_choice="unfused")
    assert row("attention kernel", plain, attention_backend="unfused") == ("unfused", "unfused", "")


def test_longrope_factors():
    name, asked = "LongRoPE factors", "short up to 8 tokens, long above"
    fields = {"position_embedding_type": "longrope", "rope_scaling_original_max_position_embeddings": 8}
    assert row(name) == ("off", "off", "")
    assert row(name, **fields, seq_length=8) == (asked, "short", "samples have 8 tokens")
    assert row(name, **fields, seq_length=9) == (asked, "long", "samples have 9 tokens")


def test_dynamic_ntk_scaling():
    name, asked = "dynamic NTK scaling", "2.5 above 8 tokens"
    fields = {"position_embedding_type": "rope", "dynamic_ntk_factor": 2.5, "max_position_embeddings": 8}
    assert row(name) == ("off", "off", "")
    assert row(name, **fields, seq_length=8) == (asked, "off", "samples have 8 tokens")
    assert row(name, **fields, seq_length=9) == (asked, asked, "samples have 9 tokens")


def test_attention_window():
    name, window = "attention window", {"window_size": "7,0"}
    assert row(name) == row(name, window_size="-1,0") == ("off", "off", "")
    assert row(name, **window) == ("8 tokens, 2 of 2 layers",) * 2 + ("",)
    some = "8 tokens, 3 of 4 layers"
    assert row(name, **window, num_layers=4, window_attn_skip_freq="4") == (some, some, "")
    assert row(name, **window, seq_length=8)[1:] == ("off", "a sample of 8 tokens fits in it")
    assert row(name, **window, seq_length=9)[1:] == ("8 tokens, 2 of 2 layers", "")


def test_fused_kernels():
    assert row("fused kernels") == ("auto", "none", "the device is cpu")
    on_cuda = dataclasses.replace(ALONE, fused_choice="norms, rotation (cross entropy not: no compiler)")
    assert row("fused kernels", on_cuda) == ("auto", "norms, rotation", "cross entropy not: no compiler")
    all_of_them = dataclasses.replace(ALONE, fused_choice="norms, rotation ()")
    assert row("fused kernels", all_of_them) == ("auto", "norms, rotation", "")


def test_gradient_accumulation_fusion():
    name = "gradient accumulation fusion"
    missing = dataclasses.replace(ALONE, fusion_missing="no such GEMM on cpu")
    assert row(name) == ("on", "on", "")
    assert row(name, missing) == ("on", "off", "no such GEMM on cpu")
    assert row(name, missing, gradient_accumulation_fusion=False) == ("off", "off", "")


def test_main_gradients():
    assert row("fp32 main gradients") == ("auto", "off", "parameters are fp32 themselves")
    half = dataclasses.replace(ALONE, separate_main_grads=True)
    assert row("fp32 main gradients", half, bf16=True) == ("auto", "on", "parameters are bfloat16")
    low = row("fp32 main gradients", half, bf16=True, main_grads_dtype="bf16", use_precision_aware_optimizer=True)
    assert low == ("off", "off", "kept in bf16, every sum rounded at random")


def test_dropout():
    assert row("dropout") == ("attention 0.1, hidden 0.1", "attention 0.1, hidden 0.1", "")
    assert row("dropout", attention_dropout=0.0, hidden_dropout=0.0) == ("off", "off", "")
    assert row("dropout", skip_train=True) == ("attention 0.1, hidden 0.1", "off", "evaluation only")


def test_loss_scaling():
    assert row("loss scaling", bf16=True) == ("auto", "off", "bfloat16 needs none")
    assert row("loss scaling", fp16=True, initial_loss_scale=64.0) == ("auto", "dynamic from 64", "float16")
    assert row("loss scaling", fp16=True, loss_scale=128.0) == ("fixed 128", "fixed 128", "")


def test_deterministic_mode():
    name, settings = "deterministic mode", "CUBLAS_WORKSPACE_CONFIG=:4096:8, NCCL_ALGO=Ring"
    on_cuda = dataclasses.replace(ALONE, device="cuda", deterministic=settings)
    assert row(name, deterministic_mode=True) == ("on", "on", "")
    assert row(name, on_cuda, deterministic_mode=True) == ("on", "on", settings)
    assert row(name, on_cuda) == ("off", "off", "")


def test_allocator_of_cuda():
    name, on_cuda = "CUDA memory allocator", dataclasses.replace(ALONE, device="cuda")
    growing, small = "expandable_segments:True", "max_split_size_mb:64"
    assert row(name) == ("off", "off", "")
    assert row(name, dataclasses.replace(on_cuda, allocator=growing))[:2] == ("auto", growing)
    assert row(name, dataclasses.replace(on_cuda, allocator=small)) == (small, small, "set in the environment")


def test_table_is_aligned():
    table = format_table([Feature("a", "on", "off", "tp = 1"), Feature("long name", "on", "on", "")])
    assert table == (
        "feature    asked  in effect  why\n"
        "a          on     off        tp = 1\n"
        "long name  on     on"
    )  # fmt: skip


def test_every_row_is_one_line():
    text = format_table(rows(make_run()))
    assert len(text.splitlines()) == 1 + len(rows(make_run()))


def test_products_of_a_slow_dtype_are_said_to_be_taken_in_fp32():
    slow = dataclasses.replace(ALONE, upcast_products=True)
    assert row("matrix products", slow, bf16=True) == ("bfloat16", "float32", "this CPU has no fast bfloat16 products")
    assert row("matrix products") == ("float32", "float32", "")


OFFLOAD, CPU_OFFLOAD = "optimizer offload", {"optimizer_cpu_offload": True}
OFFLOADED = dataclasses.replace(ALONE, cpu_chunks=(3, 10), device="cuda")


class TestOptimizerOffload:
    def test_off_and_a_fraction_of_0(self):
        assert row(OFFLOAD) == ("off", "off", "")
        assert row(OFFLOAD, **CPU_OFFLOAD, optimizer_offload_fraction=0.0) == ("fraction 0", "off", "")

    def test_static_and_auto(self):
        static = {**CPU_OFFLOAD, "optimizer_offload_fraction": 0.3}
        assert row(OFFLOAD, OFFLOADED, **static) == ("static 0.3", "static 0.3: 3 of 10 chunks in host memory", "")
        assert row(OFFLOAD, OFFLOADED, optimizer="hybridadam") == (
            "auto",
            "auto: 3 of 10 chunks in host memory at first",
            "",
        )

    def test_the_cpu_has_one_memory(self):
        here = dataclasses.replace(OFFLOADED, device="cpu")
        assert row(OFFLOAD, here, **CPU_OFFLOAD)[2] == "the device is the CPU, and host memory its own"
        on_disk = row(OFFLOAD, here, **CPU_OFFLOAD, offload_dir="folder")
        assert on_disk == ("static 1", "static 1: 3 of 10 chunks in files in folder", "")

    def test_states(self):
        assert row(OFFLOAD, OFFLOADED, offload_optimizer_states=True)[:2] == ("states", "states in host memory")

    def test_what_overlap_does_not_hide(self):
        overlap = {**CPU_OFFLOAD, "overlap_cpu_optimizer_d2h_h2d": True}
        assert row(OFFLOAD, OFFLOADED, **overlap)[::2] == ("static 1, overlapped", "")
        ranks = {"dp": 2, "facts": dataclasses.replace(OFFLOADED, shards=2)}
        assert row(OFFLOAD, **ranks, **overlap, use_distributed_optimizer=True)[2] == (
            "nothing is overlapped with backward: gradients are reduced after it; "
            "nothing is overlapped with the next forward: parameters are gathered before it"
        )
        assert row(OFFLOAD, **ranks, **overlap, overlapped_distributed_optimizer=True)[2] == ""


def test_optimizer_state():
    assert row("optimizer state") == ("fp32", "fp32", "")
    low = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "main_params_dtype": "bf16", "bf16": True}
    assert row("optimizer state", **low)[1] == "exp_avg bf16, masters bf16"


def test_recompute():
    name, full = "activation recompute", {"recompute_granularity": "full", "recompute_num_layers": 2}
    assert row(name) == ("off", "off", "")
    assert row(name, recompute_granularity="selective")[1] == "core_attn"
    parts = {"recompute_modules": ("mlp_act", "layernorm"), "recompute_activations": True, "kaimm_recompute_norm": True}
    assert row(name, **parts) == ("norm mlp_act", "norm mlp_act", "")
    behind = {"pre_norm": False, "post_norm": True}
    assert row(name, **parts, **behind)[1:] == ("mlp_act", "--no-pre-norm: no norm stands before a linear layer")
    assert row(name, **parts, num_experts=4, moe_layer_freq="[0,1]")[2].startswith("layers with experts keep")
    assert row(name, **full, recompute_method="uniform")[1] == "layers, in groups of 2"
    assert row(name, **full, recompute_method="block")[1] == "layers, first 2 of a stage"
    assert row(name, **parts, skip_train=True) == ("norm mlp_act", "off", "evaluation only")


def test_more_layers_to_recompute_than_a_stage_has():
    name, many = "activation recompute", {"recompute_granularity": "full", "recompute_num_layers": 5}
    two = {"pipeline_model_parallel_size": 2, "num_layers": 8}
    why = "the largest stage has 4 layers"
    for method, words in (("uniform", "layers, in groups of {}"), ("block", "layers, first {} of a stage")):
        asked = {**many, "recompute_method": method}
        check(make_run(**asked, **two), world_size=2)
        assert row(name, **asked, **two) == (words.format(5), words.format(4), why)
        assert row(name, **asked, num_layers=5) == (words.format(5), words.format(5), "")


def test_communication_backend():
    name, gloo = "communication backend", GLOO
    assert row(name) == ("auto", "off", "one process")
    assert row(name, distributed_backend="nccl") == ("nccl", "off", "one process")
    assert row(name, gloo) == ("auto", "gloo", "")
    assert row(name, gloo, distributed_backend="gloo") == ("gloo", "gloo", "")
    assert row(name, gloo, distributed_backend="nccl") == ("nccl", "gloo", "no CUDA device")


def test_activation_offload_says_what_moves():
    name, four = "activation offload", {"pipeline_model_parallel_size": 4, "num_layers": 16, "global_batch_size": 16}
    assert row(name) == row(name, pipeline_offload_ratio="0") == ("off", "off", "")
    by_layer = "all but the last 2 of a stage, one by one"
    half = "0.5 of the bytes"
    assert row(name, pipeline_offload_ratio="0.5", num_layers=8) == (half, f"{half}: layers, {by_layer}", "")
    assert row(name, pipeline_offload_ratio="0.5") == (
        half,
        "off",
        "a stage has 2 layers, which its backward needs at once",
    )
    assert row(name, pipeline_offload_ratio="0.5", **four)[1] == (
        f"{half}: whole microbatches on 2 of 4 ranks; where a backward follows sooner layers, {by_layer}"
    )
    gpipe = {**four, "num_layers": 8, "pipeline_schedule": "gpipe"}
    assert row(name, pipeline_offload_ratio="0.5", **gpipe)[1] == f"{half}: whole microbatches"
    auto = row(name, pipeline_offload_ratio="auto", **gpipe)
    assert auto == ("auto", "off at first", "decided after the second step, and logged; whole microbatches")
    layers = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
    assert row(name, **layers)[:2] == ("first 1 layers of a stage",) * 2
    modules = {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn", "mlp_act")}
    assert row("weight offload", **layers) == ("off", "off", "")
    assert row(name, **modules) == ("core_attn mlp_act",) * 2 + ("in all layers but a stage's last 2",)


def test_weight_offload_says_which_layers_and_where():
    name, two = "weight offload", {"cpu_offloading_weights": True, "cpu_offloading_num_layers": 2}
    asked = "first 2 layers of a stage"
    assert row("activation offload", **two) == row(name) == ("off", "off", "")
    assert row(name, **two) == (asked, f"{asked}: in host memory", "the device is the CPU, and host memory its own")
    assert row(name, dataclasses.replace(ALONE, device="cuda"), **two)[1:] == (f"{asked}: in host memory", "")
    assert row(name, **two, offload_dir="folder")[1:] == (f"{asked}: in files in folder", "")


def test_what_nobody_asked_for_is_left_out():
    found = [Feature("a", "off", "off", ""), Feature("b", "on", "off", "why"), Feature("c", "auto", "off", "")]
    assert worth_a_line(found) == found[1:]


def test_flags_without_an_effect_have_a_row():
    run = dataclasses.replace(
        make_run(("save_interval", "lr"), save_interval=5),
        notes=(Note("--async-save", "on", "saved in the step", "why"),),
    )
    assert rows(run)[-2:] == [
        Feature("--save-interval", "5", "unused", "nothing is saved"),
        Feature("--async-save", "on", "saved in the step", "why"),
    ]


def test_layers():
    """Whose kernels were asked for and are in use, and the reasons for those that are not."""
    assert row("layers") == ("local", "local", "")
    asked = {"transformer_impl": "transformer_engine"}
    facts = dataclasses.replace(ALONE, layers_choice="local (Transformer Engine needs CUDA, the device is cpu)")
    why = "Transformer Engine needs CUDA, the device is cpu"
    assert row("layers", facts, **asked) == ("transformer_engine", "local", why)
    choice = "Transformer Engine 2.12.0: matrix products, norms (geglu not: it has none)"
    found = row("layers", dataclasses.replace(ALONE, layers_choice=choice), **asked)
    assert found == (
        "transformer_engine",
        "Transformer Engine 2.12.0: matrix products, norms",
        "geglu not: it has none",
    )


class TestExperts:
    def test_a_dense_model_has_no_rows(self):
        assert not {"experts", "router", "expert balance"} & {r.name for r in rows(make_run())}

    def test_where_they_are(self):
        asked = "2 of 8, ep 1, etp 1"
        assert row("experts", **MOE)[:2] == (asked, f"{asked}: 2 of 2 layers, 8 experts per rank, edp 1")
        folded = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
        some = {"moe_layer_freq": "[0,1]", "moe_shared_expert_intermediate_size": 32, "expert_model_parallel_size": 8}
        asked = "2 of 8, ep 8, etp 1, and shared ones of width 32"
        where = "1 of 2 layers, 1 expert per rank, edp 2"
        assert row("experts", dp=2, **MOE, **folded, **some)[:2] == (asked, f"{asked}: {where}")

    def test_the_routers_rule(self):
        def rule(**fields):
            return row("router", **fields)[1]

        assert rule(**MOE) == "softmax over the chosen, fp32"
        assert rule(**MOE, moe_router_pre_softmax=True) == "softmax over all, fp32"
        groups = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_dtype": "fp64"}
        assert rule(**BIASED, **groups) == "sigmoid, normalized, best 2 of 4 groups by sum, fp64"
        assert rule(**BIASED, moe_router_topk=1) == "sigmoid, fp32"
        forced = row("router", **MOE, moe_router_force_load_balancing=True)
        assert forced[1:] == ("experts in turn", "--moe-router-force-load-balancing")

    def test_what_balances_them(self):
        def balance(**fields):
            return row("expert balance", **fields)

        assert balance(**MOE) == ("aux_loss 0", "off", "--moe-aux-loss-coeff is 0")
        assert balance(**MOE, **{TYPES: ("none",)}) == ("off", "off", "")
        several = {TYPES: ("seq_aux_loss", "global_aux_loss"), COEFFICIENTS: (1e-4, 1e-2)}
        shown = "seq_aux_loss 0.0001, global_aux_loss 0.01"
        why = "loads of seq_aux_loss: each sample; loads of global_aux_loss: the global batch before, "
        why += "dp times as strong as in Megatron-LM"
        assert balance(**MOE, **several) == (shown, shown, why)
        asked = "aux_loss 0.01, z-loss 0.001, bias 0.001 per step"
        more = {COEFFICIENTS: (0.01,), "moe_z_loss_coeff": 1e-3}
        assert balance(**BIASED, **more) == (asked, asked, "loads of aux_loss: a microbatch")
        assert balance(**BIASED, **more, skip_train=True) == (asked, "off", "evaluation only")

    def test_capacity(self):
        assert row("expert capacity", **MOE) == ("off", "off", "")
        limited = {**MOE, "moe_expert_capacity_factor": 1.25}
        asked = "1.25 x the mean load of a sample"
        why = "an expert keeps the {}; the others skip it"
        assert row("expert capacity", **limited) == (asked, asked, why.format("tokens with the highest weights"))
        first = row("expert capacity", **limited, moe_token_drop_policy="position")
        assert first[2] == why.format("first tokens")

    def test_the_exchange_of_tokens(self):
        assert row("token dispatcher", **MOE)[:2] == ("alltoall", "off")
        four = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
        found = row("token dispatcher", **MOE, **four, moe_token_dispatcher_type="allgather")
        assert found == ("allgather", "allgather over 4 ranks", "")

    def test_the_hidden_exchange(self):
        name, four = "exchange of tokens overlap", {**MOE, "expert_model_parallel_size": 4}
        hides = {"overlap_moe_expert_parallel_comm": True}
        assert row(name, **MOE) == ("off", "off", "")
        assert row(name, **MOE, **hides) == ("on", "off", "ep x etp = 1: nothing is exchanged")
        assert row(name, **four) == ("off", "off", "")
        assert row(name, **four, moe_shared_expert_intermediate_size=64) == ("off", "behind shared experts", "")
        assert row(name, **four, **hides) == ("on", "behind another microbatch", "more microbatches are in flight")
        assert row(name, **four, **hides, skip_train=True) == ("on", "off", "evaluation only")


def test_products_of_experts():
    """Off in a dense model; else grouped, or the reason why not."""
    name, experts = "products of experts", {"num_experts": 4}
    assert row(name) == ("off", "off", "")
    assert row(name, **experts) == ("grouped", "one per expert", ALONE.grouped_missing)
    grouped = dataclasses.replace(ALONE, grouped_missing=None)
    assert row(name, grouped, **experts) == ("grouped", "grouped", "")


def test_fused_kernels_of_experts():
    name, experts = "fused kernels of experts", {"num_experts": 4}
    assert row(name) == ("off", "off", "")
    assert row(name, **experts) == ("auto", "none", "the device is cpu")
    on_cuda = dataclasses.replace(ALONE, experts_choice="rows (weight gradients not: no compiler)")
    assert row(name, on_cuda, **experts) == ("auto", "rows", "weight gradients not: no compiler")


def test_fp8_products():
    here = dataclasses.replace(ALONE, fp8_choice="emulated in fp32 (the device is cpu)")
    ends = {"fp8_format": "hybrid", "bf16": True, "num_layers": 6, "first_last_layers_bf16": True}
    history = {**ends, "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max", "fp8_margin": 1}
    assert not [each for each in rows(make_run()) if "FP8" in each.name]
    assert row("FP8 products", here, **ends) == (
        "hybrid, delayed", "emulated in fp32: 4 of 6 layers, not the head", "the device is cpu"
    )  # fmt: skip
    assert row("FP8 scales", here, **ends)[1] == "for the largest values of the last step, margin 0"
    assert row("FP8 scales", here, **history)[:2] == (
        "max of 16 steps, margin 1", "for the largest values of the last 16 steps, margin 1"
    )  # fmt: skip
    assert row("FP8 scales", here, **ends, fp8_recipe="blockwise")[:2] == ("blockwise", "of the present values")
    name = "weight gradients of FP8 layers"
    assert row(name, here, **ends) == ("FP8", "FP8", "")
    assert row(name, here, **ends, fp8_wgrad=False) == ("bfloat16", "bfloat16", "--no-fp8-wgrad")


def test_fp8_products_of_experts():
    name, fields = "FP8 products of experts", {"fp8_format": "hybrid", "bf16": True, "num_experts": 4}
    inside = "the rows of an expert do not end with a block"
    for choice, in_effect, why in (
        ("emulated in fp32 (the device is cpu)", "emulated in fp32", f"the device is cpu; {inside}"),
        ("grouped products in Triton", "grouped products in Triton", inside),
    ):
        here = dataclasses.replace(ALONE, fp8_experts_choice=choice)
        assert row(name, here, **fields) == ("FP8", f"{in_effect}, but for weight gradients: bfloat16", why)
    here = dataclasses.replace(ALONE, fp8_experts_choice="none (Triton is not installed)")
    assert row(name, here, **fields) == ("FP8", "bfloat16", "Triton is not installed")
