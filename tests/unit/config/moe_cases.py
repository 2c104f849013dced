"""Cases of the rules about mixture of experts, and of flags that have no effect without them; see test_rules.py and
test_rules_needs.py.
"""

from megatron.config.rules import layout as rules_layout
from megatron.config.rules import model as rules_model
from megatron.config.rules import moe as rules_moe
from megatron.config.rules.ranges import numbers_are_in_range, values_are_known

MOE = {"num_experts": 8, "add_bias_linear": False}
TP2 = {**MOE, "tensor_model_parallel_size": 2, "sequence_parallel": True}
SIGMOID = {**MOE, "moe_router_score_function": "sigmoid"}
GROUPS = {**MOE, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
ODD_HIDDEN = {"hidden_size": 18, "num_attention_heads": 2, "ffn_hidden_size": 64}
ONE = {**MOE, "moe_router_topk": 1}
LORA = {**MOE, "lora_rank": 4, "load": "d"}
EP2 = {**MOE, "expert_model_parallel_size": 2}
SHARED = "moe_shared_expert_intermediate_size"
TYPES, COEFFICIENTS = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
SWITCH = {**SIGMOID, "moe_router_topk": 1, TYPES: ("sinkhorn",)}

HIDDEN = {**EP2, "overlap_moe_expert_parallel_comm": True}
PP = {"pipeline_model_parallel_size": 2, "num_layers": 2}
# Fields, and words of the message.
NOT_HIDDEN = [
    ({"moe_token_dispatcher_type": "allgather"}, ["--moe-token-dispatcher-type allgather", "give alltoall"]),
    ({**PP, "pipeline_schedule": "gpipe"}, ["--pipeline-schedule gpipe", "give 1f1b"]),
    ({**PP, "overlap_p2p_communication": False}, ["--no-overlap-p2p-communication", "remove it"]),
    (
        {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim_grads_params"},
        ["optim_grads_params, which frees", "give optim_grads"],
    ),
    ({"cpu_offloading_weights": True, "cpu_offloading_num_layers": 1}, ["--cpu-offloading-weights, which frees"]),
    ({"pipeline_offload_ratio": "0.5"}, ["activations to host memory (ratio)"]),
]

# rule, fields that break it, fields that do not, world size, parts of the message
MOE_CASES = [
    *((rules_moe.exchanges_can_be_hidden, {**HIDDEN, **fields}, HIDDEN, 4, words) for fields, words in NOT_HIDDEN),
    (
        rules_moe.experts_exist_to_be_shared,
        {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1},
        4,
        ["--expert-model-parallel-size 2 and --expert-tensor-parallel-size 2", "--num-experts"],
    ),
    (
        rules_layout.world_is_divisible,
        {**TP2, "expert_model_parallel_size": 2},
        {**TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        2,
        ["world size 2", "etp 2 x ep 2 x pp 1 = 4", "--expert-tensor-parallel-size"],
    ),
    (
        rules_model.experts_fit_layers,
        {**MOE, "moe_layer_freq": "[0,1,1]"},
        {**MOE, "moe_layer_freq": "[0,1]"},
        1,
        ["--moe-layer-freq [0,1,1] is for 3 layers", "--num-layers is 2"],
    ),
    (
        rules_model.experts_fit_layers,
        {**MOE, "moe_layer_freq": "[0]*2"},
        {**MOE, "moe_layer_freq": "3"},
        1,
        ["--moe-layer-freq [0]*2 leaves no layer for the 8 experts"],
    ),
    (
        rules_moe.ep_divides_experts,
        {**MOE, "expert_model_parallel_size": 3},
        {**MOE, "num_experts": 9, "expert_model_parallel_size": 3},
        3,
        ["--num-experts 8", "--expert-model-parallel-size 3"],
    ),
    (
        rules_moe.etp_divides_expert_width,
        {**MOE, "moe_ffn_hidden_size": 15, "expert_tensor_parallel_size": 2},
        {**MOE, "moe_ffn_hidden_size": 15, "ffn_hidden_size": 16},
        2,
        ["--moe-ffn-hidden-size 15", "--expert-tensor-parallel-size 2"],
    ),
    (
        rules_moe.etp_divides_expert_width,
        {**TP2, "ffn_hidden_size": 15},
        {**TP2, "ffn_hidden_size": 15, "expert_tensor_parallel_size": 1},
        2,
        ["--ffn-hidden-size 15", "--tensor-model-parallel-size 2", "give --expert-tensor-parallel-size 1"],
    ),
    (
        rules_layout.tp_divides_layers,
        {**TP2, "ffn_hidden_size": 15, "moe_ffn_hidden_size": 16, "moe_layer_freq": "[0,1]"},
        {**TP2, "ffn_hidden_size": 15, "moe_ffn_hidden_size": 16},
        2,
        ["--ffn-hidden-size 15 is not a multiple of --tensor-model-parallel-size 2"],
    ),
    (
        rules_moe.tp_divides_shared_expert,
        {**TP2, SHARED: 33},
        {**TP2, SHARED: 34},
        2,
        ["--moe-shared-expert-intermediate-size 33", "--tensor-model-parallel-size 2"],
    ),
    (rules_moe.experts_are_enough, {**MOE, "moe_router_topk": 9}, {**MOE, "moe_router_topk": 8}, 1, ["9", "8"]),
    (
        rules_moe.groups_are_chosen_from,
        {**MOE, "moe_router_num_groups": 4},
        {**MOE, "moe_router_num_groups": 1},
        1,
        ["--moe-router-num-groups 4", "give --moe-router-group-topk"],
    ),
    (
        rules_moe.groups_are_chosen_from,
        {**MOE, "moe_router_group_topk": 2},
        {**MOE, "moe_router_num_groups": 1, "moe_router_group_topk": 1},
        1,
        ["--moe-router-group-topk 2", "give --moe-router-num-groups"],
    ),
    (
        rules_moe.groups_divide_experts,
        {**GROUPS, "moe_router_num_groups": 3},
        GROUPS,
        1,
        ["--num-experts 8", "--moe-router-num-groups 3"],
    ),
    (
        rules_moe.groups_are_enough,
        {**GROUPS, "moe_router_group_topk": 5, "moe_router_topk": 5},
        {**GROUPS, "moe_router_group_topk": 4},
        1,
        ["--moe-router-group-topk 5", "--moe-router-num-groups 4"],
    ),
    (
        rules_moe.groups_hold_the_chosen,
        {**GROUPS, "moe_router_topk": 5},
        GROUPS,
        1,
        ["--moe-router-topk 5", "4 experts", "2 groups of 2"],
    ),
    (
        rules_moe.group_score_has_terms,
        {**GROUPS, "moe_router_topk": 2, "moe_router_group_topk": 3},
        {**GROUPS, "moe_router_topk": 2, "moe_router_group_topk": 3, "moe_router_group_score": "max"},
        1,
        ["best 2 / 3 experts", "--moe-router-group-score max", "--moe-router-group-topk 3 to 2"],
    ),
    (
        rules_moe.logits_have_no_bias,
        {**GROUPS, "moe_router_topk": 2, "moe_router_enable_expert_bias": True},
        {**GROUPS, "moe_router_topk": 2, "moe_router_enable_expert_bias": True, "moe_router_group_score": "max"},
        1,
        ["--moe-router-enable-expert-bias", "--moe-router-group-score max", "sigmoid"],
    ),
    (
        rules_moe.weights_depend_on_scores,
        ONE,
        {**ONE, "moe_router_pre_softmax": True},
        1,
        ["--moe-router-topk 1", "always 1", "give --moe-router-pre-softmax"],
    ),
    (
        rules_moe.weights_depend_on_scores,
        {**SIGMOID, **ONE, "moe_router_topk_normalization": "on"},
        {**SIGMOID, **ONE},
        1,
        ["always 1", "; remove --moe-router-topk-normalization on"],
    ),
    (
        rules_moe.softmax_has_one_form,
        {**MOE, "moe_router_topk_normalization": "off"},
        {**MOE, "moe_router_topk_normalization": "off", "moe_router_pre_softmax": True},
        1,
        ["--moe-router-topk-normalization off", "sums to 1", "--moe-router-pre-softmax"],
    ),
    (
        rules_moe.biases_of_experts_are_sharded,
        {**MOE, **ODD_HIDDEN, "add_mlp_bias": True, "expert_tensor_parallel_size": 4},
        {**MOE, **ODD_HIDDEN, "expert_tensor_parallel_size": 4},
        4,
        ["--hidden-size 18", "--expert-tensor-parallel-size 1"],
    ),
    (
        rules_moe.ranks_hold_different_tokens,
        {**TP2, "sequence_parallel": False},
        {**TP2, "sequence_parallel": False, "skip_train": True},
        2,
        ["--tensor-model-parallel-size 2", "add --sequence-parallel"],
    ),
    (
        rules_moe.balancing_types_are_apart,
        {**MOE, TYPES: ("none", "aux_loss"), COEFFICIENTS: (0.0, 0.1)},
        {**MOE, TYPES: ("none",)},
        1,
        ["--moe-router-load-balancing-type none aux_loss", "none excludes"],
    ),
    (
        rules_moe.balancing_types_are_apart,
        {**MOE, TYPES: ("aux_loss", "seq_aux_loss", "aux_loss"), COEFFICIENTS: (0.1, 0.1, 0.1)},
        {**MOE, TYPES: ("aux_loss", "seq_aux_loss", "global_aux_loss"), COEFFICIENTS: (0.1, 0.1, 0.1)},
        1,
        ["has aux_loss twice"],
    ),
    (
        rules_moe.coefficients_fit_types,
        {**MOE, TYPES: ("aux_loss", "seq_aux_loss"), COEFFICIENTS: (0.01,)},
        {**MOE, TYPES: ("aux_loss", "seq_aux_loss"), COEFFICIENTS: (0.01, 0.0)},
        1,
        ["--moe-aux-loss-coeff has 1 value for 2", "aux_loss seq_aux_loss"],
    ),
    (
        rules_moe.instances_divide_expert_copies,
        {**EP2, "num_distributed_optimizer_instances": 4, "use_distributed_optimizer": True},
        {**EP2, "num_distributed_optimizer_instances": 2, "use_distributed_optimizer": True},
        4,
        ["--num-distributed-optimizer-instances 4", "2 copies of each expert", "ep 2", "a divisor of 2"],
    ),
    (
        rules_moe.adapters_leave_experts,
        LORA,
        {**LORA, "lora_target_modules": ("linear_qkv", "o_proj")},
        1,
        ["--lora-target-modules all-linear", "give --lora-target-modules linear_qkv linear_proj"],
    ),
    (
        rules_moe.adapters_leave_experts,
        {**LORA, "lora_target_modules": ("q_proj", "linear_fc2")},
        {**LORA, "lora_target_modules": ("q_proj",)},
        1,
        ["--lora-target-modules q_proj linear_fc2"],
    ),
    (rules_moe.adapters_leave_experts, LORA, {**LORA, SHARED: 64}, 1, ["all MLPs are routed experts"]),
    (rules_moe.adapters_leave_experts, LORA, {**LORA, "moe_layer_freq": "[0,1]"}, 1, ["take no adapters"]),
    (numbers_are_in_range, {**MOE, COEFFICIENTS: (-0.1,)}, {**MOE, COEFFICIENTS: (0.1,)}, 1, ["-0.1", "0 or more"]),
    (values_are_known, {**MOE, TYPES: ("noaux_tc",)}, {**MOE, TYPES: ("none",)}, 1, ["noaux_tc", "global_aux_loss"]),
    (rules_moe.sinkhorn_chooses_alone, {**SWITCH, TYPES: ("sinkhorn", "aux_loss")}, SWITCH, 1, ["excludes the others"]),
    (rules_moe.sinkhorn_chooses_alone, {**SWITCH, COEFFICIENTS: (0.1,)}, SWITCH, 1, ["remove --moe-aux-loss-coeff"]),
    (
        rules_moe.sinkhorn_chooses_alone,
        {**SWITCH, "moe_router_score_function": "softmax"},
        SWITCH,
        1,
        ["give --moe-router-score-function sigmoid"],
    ),
    (
        rules_moe.sinkhorn_chooses_alone,
        {**SWITCH, "moe_expert_capacity_factor": 1.0, "moe_router_enable_expert_bias": True},
        SWITCH,
        1,
        ["remove --moe-router-enable-expert-bias and --moe-expert-capacity-factor"],
    ),
]

NONE, CAPACITY = {**MOE, TYPES: ("none",)}, {**MOE, "moe_expert_capacity_factor": 1.5}
BIASED = {**SIGMOID, "moe_router_enable_expert_bias": True}

# field, value that was typed, fields beside which it has no effect, fields beside which it has one, part of the message
MOE_NEEDS = [
    ("moe_layer_freq", "2", {}, MOE, "no experts"),
    ("moe_ffn_hidden_size", 32, {}, MOE, "no experts"),
    ("moe_router_topk", 4, {}, MOE, "no experts"),
    ("moe_router_score_function", "sigmoid", {}, MOE, "no experts"),
    ("moe_router_pre_softmax", True, {}, MOE, "no experts"),
    ("moe_router_pre_softmax", True, SIGMOID, MOE, "is sigmoid"),
    ("moe_router_topk_normalization", "off", {}, SIGMOID, "no experts"),
    ("moe_router_num_groups", 4, {}, GROUPS, "no experts"),
    ("moe_router_group_topk", 2, {}, GROUPS, "no experts"),
    ("moe_router_group_score", "max", {}, GROUPS, "no experts"),
    ("moe_router_group_score", "max", MOE, GROUPS, "not divided into groups"),
    ("moe_router_topk_scaling_factor", 2.5, {}, MOE, "no experts"),
    ("moe_router_dtype", "fp64", {}, MOE, "no experts"),
    ("moe_router_enable_expert_bias", True, {}, SIGMOID, "no experts"),
    (SHARED, 32, {}, MOE, "no experts"),
    ("moe_shared_expert_gate", True, MOE, {**MOE, SHARED: 32}, "no shared expert"),
    (TYPES, ("seq_aux_loss",), {}, MOE, "no experts"),
    (COEFFICIENTS, (0.01,), {}, MOE, "no experts"),
    (COEFFICIENTS, (0.01,), NONE, MOE, "type is none"),
    ("moe_z_loss_coeff", 1e-3, {}, MOE, "no experts"),
    ("moe_router_bias_update_rate", 1e-2, MOE, BIASED, "have no bias"),
    ("moe_expert_capacity_factor", 1.5, {}, MOE, "no experts"),
    ("moe_token_drop_policy", "position", MOE, CAPACITY, "no expert has a limit"),
    ("moe_token_dispatcher_type", "allgather", {}, MOE, "no experts"),
    ("overlap_moe_expert_parallel_comm", True, {}, MOE, "no experts"),
    ("moe_router_force_load_balancing", True, {}, MOE, "no experts"),
    ("moe_per_layer_logging", True, {}, MOE, "no experts"),
    ("expert_model_parallel_size", 1, {}, MOE, "no experts"),
    ("expert_tensor_parallel_size", 1, {}, MOE, "no experts"),
    ("ffn_hidden_size", 96, {**MOE, "moe_ffn_hidden_size": 32}, {**MOE, "moe_layer_freq": "2"}, "of their own width"),
    ("ffn_hidden_size", 96, None, MOE, ""),
]
