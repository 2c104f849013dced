"""Cases of the rules about --batch-invariant-mode; see test_rules.py."""

from megatron.config.rules import batch_invariant
from tests.unit.config.moe_cases import MOE

INVARIANT = {"batch_invariant_mode": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}
INVARIANT_EXPERTS = {**MOE, **INVARIANT}
CP2 = {**INVARIANT, "context_parallel_size": 2}
TP2 = {**INVARIANT, "tensor_model_parallel_size": 2}
DYNAMIC = {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 32, "reset_attention_mask": True}
LONGROPE = {
    "position_embedding_type": "longrope",
    "rope_scaling_original_max_position_embeddings": 16,
    "short_factor": "1,2,3,4,5,6,7,8",
    "long_factor": "2,3,4,5,6,7,8,9",
}
DYNAMIC_NTK = {"position_embedding_type": "rope", "dynamic_ntk_factor": 4.0}
LORA = {**INVARIANT, "load": "d", "lora_rank": 4}

# rule, fields that break it, fields that do not, world size, parts of the message
INVARIANT_CASES = [
    (
        batch_invariant.invariant_layers_are_our_own,
        {**INVARIANT, "transformer_impl": "transformer_engine"},
        INVARIANT,
        1,
        ["--transformer-impl transformer_engine", "give local"],
    ),
    (
        batch_invariant.invariant_products_are_not_in_fp8,
        {**INVARIANT, "fp8_format": "hybrid", "bf16": True},
        {**INVARIANT, "bf16": True},
        1,
        ["--fp8-format hybrid", "leave out"],
    ),
    (
        batch_invariant.invariant_tokens_are_not_dropped,
        {**INVARIANT, "attention_dropout": 0.1},
        INVARIANT,
        1,
        ["give --attention-dropout 0, not 0.1"],
    ),
    (
        batch_invariant.invariant_tokens_are_not_dropped,
        {**INVARIANT, "hidden_dropout": 0.2},
        INVARIANT,
        1,
        ["give --hidden-dropout 0, not 0.2"],
    ),
    (
        batch_invariant.invariant_tokens_are_not_dropped,
        {**LORA, "lora_dropout": 0.3},
        LORA,
        1,
        ["give --lora-dropout 0, not 0.3"],
    ),
    (
        batch_invariant.invariant_layers_have_attention,
        {**INVARIANT, "experimental_attention_variant": "gdn", "linear_attention_freq": "2"},
        INVARIANT,
        1,
        ["excludes --experimental-attention-variant gdn", "over one token in generation"],
    ),
    (
        batch_invariant.invariant_rotations_are_fixed,
        {**INVARIANT, **LONGROPE},
        LONGROPE,
        1,
        ["--position-embedding-type longrope"],
    ),
    (
        batch_invariant.invariant_rotations_are_fixed,
        {**INVARIANT, **DYNAMIC_NTK, "max_position_embeddings": 31},
        {**INVARIANT, **DYNAMIC_NTK, "max_position_embeddings": 32},
        1,
        ["--dynamic-ntk-factor 4.0 where --seq-length 32 is above --max-position-embeddings 31"],
    ),
    (
        batch_invariant.invariant_sequences_are_whole,
        {**CP2, "cp_comm_type": ("all_gather",)},
        {**CP2, "cp_comm_type": ("a2a",)},
        2,
        ["--cp-comm-type all_gather", "--context-parallel-size 2", "give --cp-comm-type a2a"],
    ),
    (
        batch_invariant.invariant_sequences_are_whole,
        {**INVARIANT, **DYNAMIC},
        {**DYNAMIC, "attention_dropout": 0.0},
        2,
        ["--dynamic-context-parallel"],
    ),
    (
        batch_invariant.invariant_sums_are_in_rank_order,
        {**TP2, "tp_comm_overlap": True},
        TP2,
        2,
        ["--tp-comm-overlap", "ring"],
    ),
    (
        batch_invariant.invariant_tokens_choose_alone,
        {**INVARIANT_EXPERTS, "moe_expert_capacity_factor": 1.0},
        INVARIANT_EXPERTS,
        1,
        ["--moe-expert-capacity-factor"],
    ),
    (
        batch_invariant.invariant_tokens_choose_alone,
        {**INVARIANT_EXPERTS, "moe_router_load_balancing_type": ("sinkhorn",), "moe_router_pre_softmax": True},
        INVARIANT_EXPERTS,
        1,
        ["--moe-router-load-balancing-type sinkhorn"],
    ),
    (
        batch_invariant.invariant_sums_are_a_tree,
        {**INVARIANT_EXPERTS, "moe_token_dispatcher_type": "allgather"},
        INVARIANT_EXPERTS,
        1,
        ["--moe-token-dispatcher-type allgather", "give alltoall"],
    ),
]
