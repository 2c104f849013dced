"""Cases of the rules about FP8, and of flags that have no effect without it; see test_rules.py and
test_rules_needs.py."""

from megatron.config.rules import fp8 as rules_fp8
from megatron.config.rules.ranges import numbers_are_in_range, values_are_known
from tests.unit.config.moe_cases import MOE

FP8 = {"fp8_format": "hybrid", "bf16": True}
BLOCKWISE = {**FP8, "fp8_recipe": "blockwise"}
ENDS = {**FP8, "first_last_layers_bf16": True, "num_layers": 3}
CHUNKS = {**FP8, "tensor_model_parallel_size": 2, "tp_comm_overlap": True}
TENSORWISE = {"fp8_recipe": "tensorwise"}

# Two key heads and eight value heads, of 16 channels, have 32 more outputs than heads have channels.
DELTA = {
    "experimental_attention_variant": "gdn",
    "linear_attention_freq": "2",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
# rule, fields that break it, fields that do not, world size, parts of the message
FP8_CASES = [
    (values_are_known, {"fp8_format": "e5m2"}, FP8, 1, ["--fp8-format", "e5m2", "hybrid"]),
    (numbers_are_in_range, {**FP8, "fp8_amax_history_len": 0}, FP8, 1, ["--fp8-amax-history-len", "got 0"]),
    (rules_fp8.fp8_has_no_loss_scale, {"fp8_format": "e4m3", "fp16": True}, FP8, 1, ["--fp8-format e4m3", "--fp16"]),
    (
        rules_fp8.fp8_results_are_in_bf16,
        {"fp8_format": "e4m3"},
        {"fp8_format": "e4m3", "device": "cpu"},
        1,
        ["--fp8-format e4m3 needs --bf16", "--device cpu"],
    ),
    (
        rules_fp8.fp8_layers_are_left,
        {**ENDS, "num_layers": 2},
        ENDS,
        1,
        ["--num-layers-at-start-in-bf16 1", "--num-layers-at-end-in-bf16 1", "none of the 2 layers"],
    ),
    (
        rules_fp8.fp8_sizes_are_multiples,
        {**FP8, "ffn_hidden_size": 72},
        {**FP8, "ffn_hidden_size": 80},
        1,
        ["multiples of 16", "the inputs of linear_fc2 are 72"],
    ),
    (
        rules_fp8.fp8_sizes_are_multiples,
        {**FP8, "ffn_hidden_size": 80, "tensor_model_parallel_size": 2},
        {**FP8, "ffn_hidden_size": 96, "tensor_model_parallel_size": 2},
        2,
        ["the inputs of linear_fc2 of a rank with tp 2 are 40", "lower --tensor-model-parallel-size"],
    ),
    (
        rules_fp8.fp8_sizes_are_multiples,
        {**FP8, "fp8_recipe": "mxfp8", "ffn_hidden_size": 80},
        {**FP8, "fp8_recipe": "mxfp8", "ffn_hidden_size": 96},
        1,
        ["multiples of 32", "the inputs of linear_fc2 are 80"],
    ),
    (
        rules_fp8.fp8_sizes_are_multiples,
        {**FP8, "hidden_size": 60, "kv_channels": 16},
        {**FP8, "hidden_size": 80, "kv_channels": 16},
        1,
        ["the hidden states (--hidden-size) are 60"],
    ),
    (
        rules_fp8.fp8_sizes_are_multiples,
        {**FP8, "kv_channels": 10, "tensor_model_parallel_size": 4},
        {**FP8, "kv_channels": 16, "tensor_model_parallel_size": 4},
        4,
        ["the outputs of linear_qkv", "with tp 4 are 30"],
    ),
    (
        rules_fp8.fp8_sizes_are_multiples,
        {**FP8, **MOE, "moe_shared_expert_intermediate_size": 40},
        {**FP8, **MOE, "moe_shared_expert_intermediate_size": 48, "moe_ffn_hidden_size": 20},
        1,
        ["the inputs of shared_experts.linear_fc2 are 40"],
    ),
    (
        rules_fp8.fp8_sizes_are_multiples,
        {**FP8, **DELTA, "linear_num_value_heads": 4},
        {**FP8, **DELTA},
        1,
        ["the outputs of in_proj", "are 136"],
    ),
    (
        rules_fp8.fp8_scale_is_known_before_chunks,
        {**CHUNKS, **TENSORWISE},
        CHUNKS,
        2,
        ["--fp8-recipe tensorwise", "--tp-comm-overlap", "give --fp8-recipe delayed or blockwise"],
    ),
]

# field, value that was typed, fields beside which it has no effect, fields beside which it has one, part of the message
FP8_NEEDS = [
    ("fp8_recipe", "blockwise", {}, FP8, "in the dtype of the parameters"),
    ("fp8_margin", 1, {}, FP8, "in the dtype of the parameters"),
    ("fp8_margin", 1, BLOCKWISE, FP8, "--fp8-recipe blockwise"),
    ("fp8_amax_history_len", 16, BLOCKWISE, FP8, "--fp8-recipe blockwise"),
    ("fp8_amax_compute_algo", "max", BLOCKWISE, FP8, "--fp8-recipe blockwise"),
    ("fp8_wgrad", False, {}, BLOCKWISE, "in the dtype of the parameters"),
    ("first_last_layers_bf16", True, {}, {**FP8, "num_layers": 3}, "in the dtype of the parameters"),
    ("num_layers_at_start_in_bf16", 1, FP8, ENDS, "no layer stays in bf16"),
    ("num_layers_at_end_in_bf16", 1, FP8, ENDS, "no layer stays in bf16"),
]
