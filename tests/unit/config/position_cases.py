"""Bad runs about positions, and the same runs mended: see test_rules.py."""

from megatron.config.rules import model as rules_model

ROPE = {"position_embedding_type": "rope"}
DYNAMIC_NTK = {"position_embedding_type": "rope", "dynamic_ntk_factor": 4.0}
LONGROPE = {
    "position_embedding_type": "longrope",
    "short_factor": "1,2,3,4,5,6,7,8",
    "long_factor": "2,3,4,5,6,7,8,9",
}
YARN = {"position_embedding_type": "yarn"}
# rule, a run that it stops, the same run mended, world size, words of its message
POSITION_CASES = [
    (
        rules_model.sequence_fits_positions,
        {"max_position_embeddings": 31},
        {"max_position_embeddings": 32},
        1,
        ["32", "31"],
    ),
    (
        rules_model.sequence_fits_positions,
        {**DYNAMIC_NTK, "max_position_embeddings": 31, "perform_rl_step": True},
        {**DYNAMIC_NTK, "max_position_embeddings": 31},
        1,
        ["--seq-length 32 is above --max-position-embeddings 31"],
    ),
    (
        rules_model.one_rotary_scaling,
        {**DYNAMIC_NTK, "rotary_seq_len_interpolation_factor": 2.0},
        DYNAMIC_NTK,
        1,
        ["--rotary-seq-len-interpolation-factor and --dynamic-ntk-factor are different"],
    ),
    (
        rules_model.dynamic_base_exists,
        {**DYNAMIC_NTK, "kv_channels": 2},
        {**DYNAMIC_NTK, "kv_channels": 4},
        1,
        ["--dynamic-ntk-factor 4.0 stretches none of the 2 rotated channels"],
    ),
    (rules_model.windows_fit_layers, {"window_size": "127"}, {"window_size": "127,0"}, 1, ["127 must be LEFT,RIGHT"]),
    (rules_model.windows_fit_layers, {"window_size": "7,3"}, {"window_size": "(7, 0)"}, 1, ["causal", "give 7,0"]),
    (rules_model.windows_fit_layers, {"window_size": "-2,0"}, {"window_size": "(-1,0)"}, 1, ["got -2"]),
    (
        rules_model.windows_fit_layers,
        {"window_size": "7,0", "window_attn_skip_freq": "[1,0]*2"},
        {"window_size": "7,0", "window_attn_skip_freq": "[1,0]"},
        1,
        ["--window-attn-skip-freq [1,0]*2 is for 4 layers", "--num-layers is 2"],
    ),
    (
        rules_model.windows_fit_layers,
        {"window_size": "7,0", "window_attn_skip_freq": "0"},
        {"window_size": "7,0", "window_attn_skip_freq": "2"},
        1,
        ["--window-attn-skip-freq 0 must be 1 or more"],
    ),
    (
        rules_model.rotary_rotates,
        {**ROPE, "kv_channels": 12, "rotary_percent": 0.25},
        {**ROPE, "kv_channels": 12, "rotary_percent": 0.5},
        1,
        ["0.25", "12", "3 channels", "--kv-channels"],
    ),
    (rules_model.rotary_rotates, {**YARN, "kv_channels": 7}, {**YARN, "kv_channels": 8}, 1, ["7 channels"]),
    (
        rules_model.rotary_rotates,
        {**ROPE, "rotary_percent": 0.1},
        {**ROPE, "rotary_percent": 0.25},
        1,
        ["0.1", "16"],
    ),
    (
        rules_model.one_rotary_scaling,
        {**ROPE, "use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2.0},
        {**ROPE, "use_rope_scaling": True},
        1,
        ["--use-rope-scaling and --rotary-seq-len-interpolation-factor"],
    ),
    (rules_model.one_rotary_scaling, {**YARN, "use_rope_scaling": True}, YARN, 1, ["yarn", "--use-rope-scaling"]),
    (rules_model.one_rotary_scaling, {"use_rope_scaling": True}, {}, 1, ["learned_absolute"]),
    (
        rules_model.rotary_bands_are_ordered,
        {**ROPE, "use_rope_scaling": True, "rope_scaling_low_freq_factor": 4.0},
        {**ROPE, "use_rope_scaling": True, "rope_scaling_low_freq_factor": 3.0},
        1,
        ["4.0"],
    ),
    (
        rules_model.rotary_pairs_exist,
        {"rotary_interleaved": True},
        {**ROPE, "rotary_interleaved": True},
        1,
        ["--rotary-interleaved", "learned_absolute"],
    ),
    (
        rules_model.one_rotary_scaling,
        {**LONGROPE, "use_rope_scaling": True},
        LONGROPE,
        1,
        ["longrope", "--use-rope-sc"],
    ),
    (
        rules_model.longrope_is_complete,
        {**LONGROPE, "short_factor": None},
        LONGROPE,
        1,
        ["--short-factor", "8 numbers"],
    ),
    (
        rules_model.longrope_is_complete,
        {**LONGROPE, "rotary_percent": 0.5},
        {**LONGROPE, "rotary_percent": 0.5, "short_factor": "1,1,1,1", "long_factor": "1,1,1,1"},
        1,
        ["--short-factor has 8 numbers", "4 pairs"],
    ),
    (
        rules_model.longrope_is_complete,
        {**LONGROPE, "long_factor": "1,1,1,1,1,1,1,0"},
        {**LONGROPE, "long_factor": "1,1,1,1,1,1,1,1e-3"},
        1,
        ["--long-factor has 0;", "above 0"],
    ),
    (
        rules_model.longrope_is_complete,
        {**LONGROPE, "long_factor": "1,1,1,1,1,1,1,nan"},
        LONGROPE,
        1,
        ["--long-factor has nan;"],
    ),
    (
        rules_model.longrope_is_complete,
        {**LONGROPE, "long_factor": "1,1,1,1,1,1,,x"},
        LONGROPE,
        1,
        ["--long-factor has ''", "no number"],
    ),
    (
        rules_model.longrope_is_complete,
        {**LONGROPE, "rope_scaling_original_max_position_embeddings": 1},
        {**LONGROPE, "rope_scaling_original_max_position_embeddings": 2},
        1,
        ["at least 2"],
    ),
    (rules_model.rotary_bands_are_ordered, {**YARN, "yarn_beta_slow": 40.0}, YARN, 1, ["40.0", "32.0"]),
]
