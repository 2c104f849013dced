"""What each rule about memory refuses, and what it lets through; see test_rules.py."""

from megatron.config.rules import activation_offload as rules_activation_offload
from megatron.config.rules import cuda_graphs as rules_cuda_graphs
from megatron.config.rules import optimizer_offload as rules_optimizer_offload
from megatron.config.rules import recompute as rules_recompute

BALANCED = {"recompute_policy": "balanced", "activation_memory_budget": 0.5}
PARTS_MOVE = {"fine_grained_activation_offloading": True, "num_layers": 4}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OFFLOADED_WEIGHTS = {"cpu_offloading_weights": True, "cpu_offloading_num_layers": 1}
EXPERT_PARTS_MOVE = {
    **PARTS_MOVE,
    "num_experts": 4,
    "add_bias_linear": False,
    "offload_modules": ("core_attn", "mlp_act"),
}
EXPERTS = {"recompute_activations": True, "num_experts": 4, "add_bias_linear": False}
PP2 = {"pipeline_model_parallel_size": 2, "num_layers": 8}

GRAPHS = {"cuda_graph_impl": "local", "hidden_dropout": 0.0, "attention_dropout": 0.0}
_CP2 = {"context_parallel_size": 2}
_ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
# flags that graphs exclude, processes, words of the message
NOT_CAPTURED = [
    ({"num_experts": 4, "add_bias_linear": False}, 1, ["layers with experts", "give --cuda-graph-impl none"]),
    (
        {"experimental_attention_variant": "gdn", "linear_attention_freq": "2"},
        1,
        ["gated delta nets", "give --cuda-graph-impl none"],
    ),
    (
        {"position_embedding_type": "yarn", "llama_4_scaling_beta": 0.1},
        1,
        ["factors of queries", "give --cuda-graph-impl none"],
    ),
    ({"hidden_dropout": 0.1}, 1, ["dropout", "give --hidden-dropout 0 --attention-dropout 0"]),
    ({"lora_rank": 4, "load": "trained"}, 1, ["adapters", "give --cuda-graph-impl none"]),
    ({"fp8_format": "e4m3", "bf16": True}, 1, ["FP8 products", "remove --fp8-format"]),
    ({"reset_attention_mask": True}, 1, ["documents inside a sample", "remove --reset-attention-mask"]),
    (_CP2, 2, ["context parallelism", "remove --context-parallel-size"]),
    ({"tensor_model_parallel_size": 2, "tp_comm_overlap": True}, 2, ["remove --tp-comm-overlap"]),
    ({**PP2, "pipeline_schedule": "zb-h1"}, 2, ["two halves", "--pipeline-schedule 1f1b or interleaved"]),
    (FULL, 1, ["recompute of whole layers", "give --recompute-granularity selective"]),
    (BALANCED, 1, ["chosen by layer"]),
    (_ZERO3, 1, ["parameters whose memory moves", "--data-parallel-sharding-strategy optim"]),
    ({"overlapped_distributed_optimizer": True}, 1, ["gradients whose memory moves", "last-microbatch"]),
    ({"pipeline_offload_ratio": "0.5"}, 1, ["activations to host memory (ratio)"]),
    ({**PARTS_MOVE, "offload_modules": ("core_attn",)}, 1, ["activations to host memory (modules)"]),
    ({**OFFLOADED_WEIGHTS, "cpu_offloading": True}, 1, ["(layers)", "weights whose memory moves"]),
]

# rule, a run that it stops, the same run mended, world size, words of its message
MEMORY_CASES = [
    *(
        (rules_cuda_graphs.layers_can_be_captured, {**GRAPHS, **fields}, GRAPHS, world, words)
        for fields, world, words in NOT_CAPTURED
    ),
    (
        rules_activation_offload.offloaded_modules_exist,
        EXPERT_PARTS_MOVE,
        {**EXPERT_PARTS_MOVE, "moe_layer_freq": "[0,1,1,1]"},
        1,
        ["mlp_act names parts of an MLP", "--pipeline-offload-ratio"],
    ),
    (
        rules_recompute.full_recompute_is_complete,
        {"recompute_granularity": "full"},
        FULL,
        1,
        ["--recompute-method and --recompute-num-layers"],
    ),
    (
        rules_recompute.full_recompute_is_complete,
        {**FULL, "recompute_num_layers": None},
        {"recompute_granularity": "selective"},
        1,
        ["needs --recompute-num-layers;"],
    ),
    (
        rules_recompute.full_recompute_is_alone,
        {**FULL, "recompute_activations": True},
        {"recompute_granularity": "selective", "recompute_activations": True},
        1,
        ["--recompute-activations asks for parts"],
    ),
    (
        rules_recompute.full_recompute_is_alone,
        {**FULL, "kaimm_recompute_norm": True},
        {"kaimm_recompute_norm": True, "kaimm_recompute_mlp_activation_func": True},
        1,
        ["--kaimm-recompute-norm", "full"],
    ),
    (
        rules_recompute.balanced_recompute_is_alone,
        {**BALANCED, "recompute_activations": True},
        BALANCED,
        1,
        ["--recompute-activations", "balanced", "remove one"],
    ),
    (
        rules_recompute.balanced_recompute_has_a_budget,
        {"recompute_policy": "balanced"},
        BALANCED,
        1,
        ["--activation-memory-budget", "0.5"],
    ),
    (
        rules_recompute.recomputed_parts_are_apart,
        {"recompute_activations": True, "recompute_modules": ("mlp",), "kaimm_recompute_mlp_activation_func": True},
        {"recompute_activations": True, "recompute_modules": ("mlp", "layernorm"), "kaimm_recompute_norm": True},
        1,
        ["mlp_act", "remove one"],
    ),
    (
        rules_recompute.recomputed_parts_are_apart,
        {**EXPERTS, "recompute_modules": ("moe", "moe_act")},
        {**EXPERTS, "recompute_modules": ("moe_act", "norm")},
        1,
        ["moe recomputes moe_act", "remove one"],
    ),
    (
        rules_recompute.recomputed_parts_exist,
        {"recompute_activations": True, "recompute_modules": ("moe_act",)},
        {**EXPERTS, "recompute_modules": ("moe_act",)},
        1,
        ["moe_act", "--num-experts"],
    ),
    (
        rules_recompute.recomputed_parts_exist,
        {**EXPERTS, "recompute_modules": ("shared_experts",)},
        {**EXPERTS, "recompute_modules": ("shared_experts",), "moe_shared_expert_intermediate_size": 32},
        1,
        ["shared_experts", "--moe-shared-expert-intermediate-size"],
    ),
    (
        rules_recompute.recomputed_parts_exist,
        {**EXPERTS, "recompute_modules": ("mlp", "norm")},
        {**EXPERTS, "recompute_modules": ("mlp", "norm"), "moe_layer_freq": "[0,1]"},
        1,
        ["mlp is for layers without experts", "moe instead"],
    ),
    (
        rules_optimizer_offload.one_optimizer_offload,
        {"offload_optimizer_states": True, "optimizer": "hybridadam"},
        {"offload_optimizer_states": True},
        1,
        ["--optimizer hybridadam", "--offload-optimizer-states", "remove one"],
    ),
    (
        rules_optimizer_offload.one_optimizer_offload,
        {"offload_optimizer_states": True, "optimizer_cpu_offload": True},
        {"optimizer_cpu_offload": True},
        1,
        ["--optimizer-cpu-offload updates"],
    ),
    (
        rules_optimizer_offload.cpu_offload_is_adam,
        {"optimizer_cpu_offload": True, "optimizer": "sgd"},
        {"offload_optimizer_states": True, "optimizer": "sgd"},
        1,
        ["sgd", "--offload-optimizer-states instead"],
    ),
    (
        rules_optimizer_offload.chunks_are_aligned,
        {"optimizer_offload_chunk_size": 1000},
        {"optimizer_offload_chunk_size": 960},
        1,
        ["1000", "give 960"],
    ),
    (
        rules_optimizer_offload.low_precision_state_is_allowed,
        {"exp_avg_sq_dtype": "bf16"},
        {"exp_avg_sq_dtype": "bf16", "use_precision_aware_optimizer": True},
        1,
        ["--exp-avg-sq-dtype bf16 needs --use-precision-aware-optimizer"],
    ),
    (
        rules_optimizer_offload.low_precision_state_is_allowed,
        {"optimizer": "sgd", "use_precision_aware_optimizer": True},
        {"optimizer": "hybridadam", "use_precision_aware_optimizer": True},
        1,
        ["is for adam", "sgd"],
    ),
    (
        rules_optimizer_offload.remainders_have_weights,
        {"main_params_dtype": "bf16", "use_precision_aware_optimizer": True, "fp16": True},
        {"main_params_dtype": "bf16", "use_precision_aware_optimizer": True, "bf16": True},
        1,
        ["float16", "give --bf16"],
    ),
    (
        rules_optimizer_offload.remainders_have_weights,
        {
            "main_params_dtype": "bf16",
            "use_precision_aware_optimizer": True,
            "bf16": True,
            "optimizer_cpu_offload": True,
        },
        {
            "main_params_dtype": "bf16",
            "use_precision_aware_optimizer": True,
            "bf16": True,
            "offload_optimizer_states": True,
        },
        1,
        ["host memory", "--offload-optimizer-states"],
    ),
    (
        rules_optimizer_offload.low_precision_state_is_allowed,
        {"main_grads_dtype": "bf16"},
        {"main_grads_dtype": "bf16", "use_precision_aware_optimizer": True},
        1,
        ["--main-grads-dtype bf16 needs --use-precision-aware-optimizer"],
    ),
    (
        rules_activation_offload.offload_ratio_is_a_share,
        {"pipeline_offload_ratio": "half"},
        {"pipeline_offload_ratio": "auto"},
        1,
        ["half", "0 to 1"],
    ),
    (
        rules_activation_offload.offload_ratio_is_a_share,
        {"pipeline_offload_ratio": "1.5"},
        {"pipeline_offload_ratio": "1"},
        1,
        ["1.5", "auto"],
    ),
    (
        rules_activation_offload.offload_ratio_is_a_share,
        {"pipeline_offload_ratio": "nan"},
        {"pipeline_offload_ratio": "0"},
        1,
        ["nan"],
    ),
    (
        rules_activation_offload.one_way_of_activation_offload,
        {"pipeline_offload_ratio": "0.5", "cpu_offloading": True},
        {"pipeline_offload_ratio": "0.5"},
        1,
        ["--pipeline-offload-ratio and --cpu-offloading", "one of them"],
    ),
    (
        rules_activation_offload.offloaded_inputs_have_one_reader,
        {"pipeline_offload_ratio": "0.5", "parallel_residual": True},
        {"pipeline_offload_ratio": "0.5"},
        1,
        ["--parallel-residual", "--kaimm-recompute-norm"],
    ),
    (
        rules_activation_offload.offloaded_weights_are_trained,
        {**OFFLOADED_WEIGHTS, "lora_rank": 4, "load": "trained"},
        {**OFFLOADED_WEIGHTS, "data_parallel_sharding_strategy": "optim_grads_params"},
        2,
        ["--cpu-offloading-weights", "--lora-rank 4"],
    ),
    (
        rules_activation_offload.offloaded_weights_exist,
        {**PP2, **OFFLOADED_WEIGHTS, "cpu_offloading_num_layers": 5},
        {**PP2, **OFFLOADED_WEIGHTS, "cpu_offloading_num_layers": 4},
        2,
        ["--cpu-offloading-num-layers 5", "1 to 4", "--cpu-offloading-weights"],
    ),
    (
        rules_activation_offload.offloaded_weights_exist,
        {"cpu_offloading_weights": True},
        OFFLOADED_WEIGHTS,
        1,
        ["--cpu-offloading-num-layers 0"],
    ),
    (
        rules_activation_offload.offloaded_layers_exist,
        {**OFFLOADED_WEIGHTS, "cpu_offloading": True, "cpu_offloading_num_layers": 2},
        {**OFFLOADED_WEIGHTS, "cpu_offloading": True},
        1,
        ["1 to 1"],
    ),
    (
        rules_activation_offload.offloaded_layers_exist,
        {**PP2, "cpu_offloading": True, "cpu_offloading_num_layers": 4},
        {**PP2, "cpu_offloading": True, "cpu_offloading_num_layers": 3},
        2,
        ["1 to 3", "2 needs the least"],
    ),
    (
        rules_activation_offload.offloaded_layers_exist,
        {**PP2, "num_layers": 2, "cpu_offloading": True, "cpu_offloading_num_layers": 1},
        {**PP2, "num_layers": 4, "cpu_offloading": True, "cpu_offloading_num_layers": 1},
        2,
        ["one layer", "fewer pipeline stages"],
    ),
    (
        rules_activation_offload.offloaded_modules_are_given,
        {"fine_grained_activation_offloading": True, "num_layers": 4},
        {"fine_grained_activation_offloading": True, "num_layers": 4, "offload_modules": ("mlp_act",)},
        1,
        ["--offload-modules"],
    ),
    (
        rules_activation_offload.offloaded_modules_are_given,
        {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)},
        {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",), "num_layers": 3},
        1,
        ["2 layers at most"],
    ),
    (
        rules_activation_offload.offloaded_modules_keep_something,
        {**PARTS_MOVE, "offload_modules": ("attn_norm", "mlp_fc1"), "kaimm_recompute_norm": True},
        {**PARTS_MOVE, "offload_modules": ("attn_norm",), "kaimm_recompute_norm": True, "post_norm": True},
        1,
        ["attn_norm names", "norm"],
    ),
    (
        rules_activation_offload.offloaded_modules_keep_something,
        {**PARTS_MOVE, "offload_modules": ("core_attn",), **FULL},
        {**PARTS_MOVE, "offload_modules": ("core_attn",)},
        1,
        ["core_attn"],
    ),
]
