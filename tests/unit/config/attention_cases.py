"""What each rule about latent attention, ALiBi and delta nets refuses, and what it lets through; see test_rules.py."""

from megatron.config.rules import delta_net as rules_delta
from megatron.config.rules import latent_attention as rules_latent
from megatron.config.rules import model as rules_model
from megatron.config.rules import recompute as rules_recompute
from tests.unit.config.dynamic_cases import DYNAMIC

LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 32,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
DELTA = {
    "experimental_attention_variant": "gdn",
    "linear_attention_freq": "2",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
UP_AGAIN = {**LATENT, "recompute_granularity": "selective", "recompute_modules": ("mla_up_proj",)}
CP2 = {"context_parallel_size": 2, "attention_dropout": 0.0}

ATTENTION_CASES = [
    (rules_latent.latents_have_a_width, {**LATENT, "kv_lora_rank": None}, LATENT, 1, ["--kv-lora-rank"]),
    (
        rules_latent.heads_have_sizes_of_latent_attention,
        {**LATENT, "group_query_attention": True},
        LATENT,
        1,
        ["--group-query-attention has no meaning", "remove it"],
    ),
    (
        rules_latent.heads_have_sizes_of_latent_attention,
        {**LATENT, "rotary_percent": 0.5, "rotary_interleaved": True},
        LATENT,
        1,
        ["--rotary-percent and --rotary-interleaved have no meaning", "remove them"],
    ),
    (
        rules_latent.heads_have_sizes_of_latent_attention,
        {**LATENT, "qk_layernorm": True, "qk_layernorm_after_rope": True},
        {**LATENT, "qk_layernorm": True},
        1,
        ["--qk-layernorm-after-rope has no meaning", "remove it"],
    ),
    (rules_latent.latents_have_no_bias, {**LATENT, "add_bias_linear": True}, LATENT, 1, ["--disable-bias-linear"]),
    (rules_latent.latents_have_no_bias, {**LATENT, "add_qkv_bias": True}, LATENT, 1, ["remove --add-qkv-bias"]),
    (
        rules_latent.latents_have_plain_softmax,
        {**LATENT, "softmax_type": "learnable"},
        LATENT,
        1,
        ["--softmax-type learnable", "give vanilla"],
    ),
    (
        rules_latent.rotated_channels_form_pairs,
        {**LATENT, "qk_pos_emb_head_dim": 5},
        {**LATENT, "qk_pos_emb_head_dim": 6},
        1,
        ["--qk-pos-emb-head-dim 5", "pairs"],
    ),
    (
        rules_latent.sequence_fits_indexer,
        {**LATENT, "indexer_topk": 16, "seq_length": 17},
        {**LATENT, "indexer_topk": 16, "seq_length": 16},
        1,
        ["--seq-length 17 is above --indexer-topk 16", "give --seq-length 16 or less", "--override-model-fields"],
    ),
    (
        rules_delta.delta_layers_are_chosen,
        {**DELTA, "linear_attention_freq": None},
        DELTA,
        1,
        ["--experimental-attention-variant gdn needs", "give --linear-attention-freq"],
    ),
    (
        rules_delta.delta_layers_are_chosen,
        {**DELTA, "linear_attention_freq": "[1,1]"},
        {**DELTA, "linear_attention_freq": "[1,0]"},
        1,
        ["--linear-attention-freq [1,1] gives no layer attention", "give both kinds"],
    ),
    (
        rules_delta.delta_layers_are_chosen,
        {**DELTA, "linear_attention_freq": "[1,0,1]"},
        DELTA,
        1,
        ["--linear-attention-freq [1,0,1] is for 3 layers"],
    ),
    (
        rules_delta.key_heads_serve_value_heads,
        {**DELTA, "linear_num_value_heads": 6},
        DELTA,
        1,
        ["--linear-num-value-heads 6 is not a multiple of --linear-num-key-heads 4"],
    ),
    (
        rules_delta.key_heads_serve_value_heads,
        {**DELTA, "linear_num_key_heads": 1, "tensor_model_parallel_size": 2},
        {**DELTA, "tensor_model_parallel_size": 2},
        2,
        ["--linear-num-key-heads 1 is not a multiple of --tensor-model-parallel-size 2"],
    ),
    (
        rules_delta.key_heads_serve_value_heads,
        {**DELTA, **CP2, "linear_num_key_heads": 1, "cp_comm_type": ("a2a",)},
        {**DELTA, **CP2, "linear_num_key_heads": 1},
        2,
        ["--cp-comm-type a2a", "1 key heads", "give p2p"],
    ),
    (
        rules_delta.states_are_passed_in_one_group,
        {**DELTA, **DYNAMIC},
        DYNAMIC,
        4,
        ["not available with --dynamic-context-parallel", "give --context-parallel-size"],
    ),
    (
        rules_delta.gates_go_with_grouped_heads,
        {**LATENT, "attention_output_gate": True},
        {"attention_output_gate": True},
        1,
        ["--attention-output-gate is not available with --multi-latent-attention"],
    ),
    (
        rules_delta.decays_of_channels_go_with,
        {**DELTA, "experimental_attention_variant": "kda", "lora_rank": 4, "load": "trained"},
        {**DELTA, "lora_rank": 4, "load": "trained"},
        1,
        ["--experimental-attention-variant kda is not available with --lora-rank", "give --experimental"],
    ),
    (
        rules_delta.decays_of_channels_go_with,
        {**DELTA, "experimental_attention_variant": "kda", "bf16": True, "fp8_format": "hybrid"},
        {**DELTA, "bf16": True, "fp8_format": "hybrid"},
        1,
        ["--experimental-attention-variant kda is not available with --fp8-format", "give --experimental"],
    ),
    (
        rules_recompute.projections_up_exist,
        {**UP_AGAIN, "multi_latent_attention": False, "kv_lora_rank": None},
        UP_AGAIN,
        1,
        ["--recompute-modules mla_up_proj", "give --multi-latent-attention"],
    ),
    (
        rules_recompute.projections_up_are_not_offloaded,
        {**UP_AGAIN, "cpu_offloading": True, "cpu_offloading_num_layers": 1, "num_layers": 4},
        UP_AGAIN,
        1,
        ["mla_up_proj", "offload of activations", "remove one"],
    ),
    *(
        (
            rules_model.alibi_fits_scores,
            {"position_embedding_type": "alibi", **fields},
            {"position_embedding_type": "alibi"},
            1,
            [flag, "--position-embedding-type alibi"],
        )
        for fields, flag in (
            ({"softmax_type": "learnable"}, "--softmax-type learnable"),
            ({"attn_logit_softcapping": 30.0}, "--attn-logit-softcapping"),
            ({"max_position_embeddings": 65537}, "--max-position-embeddings 65537"),
            ({"multi_latent_attention": True, "kv_lora_rank": 32}, "--multi-latent-attention"),
        )
    ),
]
