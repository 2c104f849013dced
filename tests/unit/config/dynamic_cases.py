"""What each rule about --dynamic-context-parallel refuses, and what it lets through; see test_rules.py."""

from megatron.config.rules import cuda_graphs as rules_cuda_graphs
from megatron.config.rules import dynamic_context as rules_dynamic

DYNAMIC = {
    "dynamic_context_parallel": True,
    "max_seqlen_per_dp_cp_rank": 32,
    "reset_attention_mask": True,
    "attention_dropout": 0.0,
}
_EXPERTS = {**DYNAMIC, "num_experts": 4, "add_bias_linear": False}
_GRAPHS = {"cuda_graph_impl": "local", "hidden_dropout": 0.0}
_GLOBAL = {"moe_router_load_balancing_type": ("global_aux_loss",), "moe_aux_loss_coeff": (0.01,)}
_BALANCED = {"recompute_policy": "balanced", "activation_memory_budget": 0.5}
_CHUNKS = {
    "recompute_granularity": "selective",
    "recompute_modules": ("moe",),
    "mlp_chunk_size": 16,
    **_GLOBAL,
}
_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}

# rule, a run that it stops, the same run mended, world size, words of its message
DYNAMIC_CASES = [
    (
        rules_dynamic.documents_are_separate,
        {**DYNAMIC, "reset_attention_mask": False},
        DYNAMIC,
        4,
        ["attention crosses their ends", "add --reset-attention-mask"],
    ),
    (
        rules_dynamic.rank_length_is_given,
        {**DYNAMIC, "max_seqlen_per_dp_cp_rank": None},
        DYNAMIC,
        4,
        ["give --max-seqlen-per-dp-cp-rank, such as 32"],
    ),
    (
        rules_dynamic.rank_length_is_cut_evenly,
        {**DYNAMIC, "max_seqlen_per_dp_cp_rank": 33},
        DYNAMIC,
        4,
        ["--max-seqlen-per-dp-cp-rank 33", "2 chunks", "give 34"],
    ),
    (
        rules_dynamic.rank_length_is_cut_evenly,
        {**DYNAMIC, **_SP, "max_seqlen_per_dp_cp_rank": 18},
        {**DYNAMIC, **_SP, "max_seqlen_per_dp_cp_rank": 20},
        4,
        ["2 x --tensor-model-parallel-size 2", "give 20"],
    ),
    (
        rules_dynamic.smallest_group_divides_ranks,
        {**DYNAMIC, "min_dynamic_context_parallel_size": 3},
        {**DYNAMIC, "min_dynamic_context_parallel_size": 2},
        6,
        ["size 3 is not a power of two", "6 ranks", "up to 2"],
    ),
    (
        rules_dynamic.smallest_group_divides_ranks,
        {**DYNAMIC, "min_dynamic_context_parallel_size": 8},
        {**DYNAMIC, "min_dynamic_context_parallel_size": 4},
        4,
        ["size 8", "4 ranks"],
    ),
    (
        rules_dynamic.largest_group_holds_samples,
        {**DYNAMIC, "max_seqlen_per_dp_cp_rank": 6},
        {**DYNAMIC, "max_seqlen_per_dp_cp_rank": 8},
        4,
        ["--seq-length 32 is longer than --max-seqlen-per-dp-cp-rank 6 x", "4 ranks", "24 tokens", "8 or more"],
    ),
    (
        rules_dynamic.attention_is_ring_or_a2a,
        {**DYNAMIC, "cp_comm_type": ("p2p", "allgather")},
        {**DYNAMIC, "cp_comm_type": ("p2p", "a2a")},
        4,
        ["--cp-comm-type all_gather", "give p2p or a2a"],
    ),
    (
        rules_dynamic.heads_fit_every_group,
        {**DYNAMIC, "cp_comm_type": ("a2a",)},
        {**DYNAMIC, "cp_comm_type": ("p2p",)},
        8,
        ["groups of up to 8 ranks", "4 query heads"],
    ),
    (
        rules_dynamic.probabilities_are_kept,
        {**DYNAMIC, "attention_dropout": 0.1},
        DYNAMIC,
        4,
        ["--attention-dropout 0.1", "give 0"],
    ),
    (
        rules_dynamic.balance_counts_no_samples,
        {**_EXPERTS, "moe_aux_loss_coeff": (0.01,)},
        {**_EXPERTS, **_GLOBAL},
        4,
        ["--moe-router-load-balancing-type aux_loss", "give global_aux_loss"],
    ),
    (
        rules_dynamic.balance_counts_no_samples,
        {**_EXPERTS, **_GLOBAL, "moe_expert_capacity_factor": 1.5},
        {**_EXPERTS, **_GLOBAL},
        4,
        ["--moe-expert-capacity-factor 1.5", "remove it"],
    ),
    (
        rules_dynamic.products_are_scaled_alone,
        {**DYNAMIC, "fp8_format": "e4m3", "bf16": True},
        {**DYNAMIC, "bf16": True},
        4,
        ["--fp8-format e4m3", "remove one"],
    ),
    (
        rules_dynamic.recompute_is_not_measured,
        {**DYNAMIC, **_BALANCED},
        DYNAMIC,
        4,
        ["--recompute-policy balanced", "--recompute-modules"],
    ),
    (
        rules_dynamic.experts_have_equal_chunks,
        {**_EXPERTS, **_CHUNKS, "expert_model_parallel_size": 2},
        {**_EXPERTS, **_CHUNKS},
        4,
        ["different numbers of tokens", "--mlp-chunk-size 16", "remove one of them"],
    ),
    (
        rules_dynamic.run_has_documents,
        {**DYNAMIC, "dry_run": True},
        DYNAMIC,
        4,
        ["--dry-run traces", "--dynamic-context-parallel"],
    ),
    (rules_cuda_graphs.layers_can_be_captured, {**DYNAMIC, **_GRAPHS}, DYNAMIC, 4, ["sequences of --dynamic"]),
]
