"""What each rule about reinforcement learning refuses, and the flags that have no effect without it; see test_rules.py
and test_rules_needs.py."""

from megatron.config.rules import rl as rules_rl

RL = {
    "perform_rl_step": True,
    "mock_data": None,
    "prompt_data": ("p.jsonl",),
    "rm_type": "exact",
    "rollout_max_response_len": 16,
    "grpo_prompts_per_step": 8,
    "grpo_group_size": 4,
    "global_batch_size": 32,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
# A run that learns from preferences, beside RL's other fields.
PREFERENCES = {**RL, "prompt_data": None, "rm_type": None, "preference_data": ("p.jsonl",), "global_batch_size": 8}
LAGS = {**RL, "rl_generation_lag": 1, "rl_external_sampler": "e.py", "tis_clip": 2.0}
_SAVES = {"save": "d", "grpo_iterations": 2, "global_batch_size": 16}
_IDLE = {"rl_offload_optimizer_during_inference": True}
_INVARIANT = {"batch_invariant_mode": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}
_EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}
_REPLAY = {**_EXPERTS, "moe_enable_routing_replay": True}
_PIPELINE = {"pipeline_model_parallel_size": 2, "num_layers": 8}

# rule, a run that it stops, the same run mended, world size, words of its message
RL_CASES = [
    (rules_rl.prompts_are_given, {**RL, "prompt_data": None}, RL, 1, ["give their files with --prompt-data"]),
    (
        rules_rl.rewards_or_preferences,
        {**RL, "preference_data": ("q.jsonl",)},
        PREFERENCES,
        1,
        ["--prompt-data p.jsonl", "--preference-data q.jsonl", "give one of them"],
    ),
    (
        rules_rl.prompts_are_the_only_data,
        {**PREFERENCES, "mock_data": True},
        PREFERENCES,
        1,
        ["reads --preference-data, and no --mock-data", "remove it"],
    ),
    (
        rules_rl.model_is_sampled_as_trained,
        {**PREFERENCES, "skip_train": True},
        PREFERENCES,
        1,
        ["the forward for log"],
    ),
    (rules_rl.nothing_is_dropped, {**PREFERENCES, "hidden_dropout": 0.1}, PREFERENCES, 1, ["the forward for log"]),
    (rules_rl.prompts_are_the_only_data, {**RL, "mock_data": True}, RL, 1, ["no --mock-data", "remove it"]),
    (rules_rl.prompts_are_the_only_data, {**RL, "data_path": ("a",)}, RL, 1, ["no --data-path"]),
    (rules_rl.one_reward, {**RL, "rm_type": None}, RL, 1, ["--custom-rm-path FILE.py, or --rm-type"]),
    (rules_rl.one_reward, {**RL, "custom_rm_path": "r.py"}, RL, 1, ["--custom-rm-path r.py and --rm-type exact"]),
    (rules_rl.answers_have_room, {**RL, "rollout_max_response_len": None}, RL, 1, ["--rollout-max-response-len"]),
    (
        rules_rl.answers_have_room,
        {**RL, "rollout_max_prompt_len": 20},
        {**RL, "rollout_max_prompt_len": 16},
        1,
        ["a prompt of 20 tokens", "--seq-length 32", "give --seq-length 36"],
    ),
    (
        rules_rl.groups_are_compared,
        {**RL, "grpo_group_size": 1},
        RL,
        1,
        ["--grpo-group-size 1", "the mean of its group", "raise --grpo-group-size"],
    ),
    (
        rules_rl.groups_are_compared,
        {**RL, "grpo_group_size": 1, "advantage_estimator": "rloo"},
        RL,
        1,
        ["the other answers"],
    ),
    (
        rules_rl.steps_are_whole,
        {**RL, "global_batch_size": 4},
        {**RL, "global_batch_size": 8},
        2,
        ["--global-batch-size 4", "data-parallel size 2", "a multiple of 8"],
    ),
    (
        rules_rl.steps_are_whole,
        {**RL, "global_batch_size": 24},
        {**RL, "global_batch_size": 16},
        1,
        ["= 32 answers", "steps of --global-batch-size 24", "give 32"],
    ),
    (
        rules_rl.rewards_are_compared,
        {**RL, "rm_type": None, "opd_teacher_load": "d", "grpo_filter_groups_with_same_reward": True},
        {**RL, "rm_type": None, "opd_teacher_load": "d", "grpo_group_size": 1, "global_batch_size": 8},
        1,
        ["--grpo-filter-groups-with-same-reward compares rewards", "remove it"],
    ),
    (
        rules_rl.ratios_have_bounds,
        {**RL, "tis_clip": 2.0, "tis_clip_low": 2.0},
        {**RL, "tis_clip": 2.0, "tis_clip_low": 0.5},
        1,
        ["--tis-clip-low 2 is not below --tis-clip 2"],
    ),
    (
        rules_rl.ratios_have_bounds,
        {**RL, "tis_clip": 0.8, "tis_mode": "mask"},
        {**RL, "tis_clip": 5.0, "tis_clip_low": 0.5, "tis_mode": "mask"},
        1,
        ["outside --tis-clip-low 0 to --tis-clip 0.8", "at least 1"],
    ),
    (
        rules_rl.rejection_has_a_threshold,
        {**RL, "rollout_rs": "geometric"},
        {**RL, "rollout_rs": "geometric", "rollout_rs_threshold": 1.001},
        1,
        ["--rollout-rs geometric", "give --rollout-rs-threshold"],
    ),
    (
        rules_rl.penalty_begins_within_answers,
        {**RL, "overlong_buffer_len": 17},
        {**RL, "overlong_buffer_len": 16},
        1,
        ["--overlong-buffer-len 17", "--rollout-max-response-len 16", "give 16 or less"],
    ),
    (
        rules_rl.batches_are_constant,
        {**RL, "rampup_batch_size": (16, 16, 100)},
        RL,
        1,
        ["remove --rampup-batch-size"],
    ),
    (
        rules_rl.saves_end_a_rollout,
        {**RL, **_SAVES, "save_interval": 6},
        {**RL, **_SAVES, "save_interval": 8},
        1,
        ["--save-interval 6", "the 4 steps", "a multiple of 4"],
    ),
    (
        rules_rl.model_is_sampled_as_trained,
        {**RL, "mtp_num_layers": 1, "position_embedding_type": "rope"},
        RL,
        1,
        ["--mtp-num-layers", "remove it"],
    ),
    (rules_rl.model_is_sampled_as_trained, {**RL, "skip_train": True, "eval_iters": 1}, RL, 1, ["--skip-train"]),
    (
        rules_rl.external_sampler_gets_whole_weights,
        {**RL, "rl_external_sampler": "e.py", "lora_rank": 4, "load": "d"},
        {**RL, "lora_rank": 4, "load": "d"},
        1,
        ["--rl-external-sampler e.py", "--lora-rank 4", "remove one"],
    ),
    (
        rules_rl.reward_model_reads_one_answer,
        {**RL, "reward_model": "scores", "custom_environment_path": "e.py"},
        {**RL, "reward_model": "scores"},
        1,
        ["--reward-model scores", "--custom-environment-path e.py", "remove one"],
    ),
    (
        rules_rl.lag_has_other_devices,
        {**RL, "rl_generation_lag": 1, "tis_clip": 2.0},
        LAGS,
        1,
        ["--rl-generation-lag 1", "give --rl-external-sampler"],
    ),
    (rules_rl.lag_is_corrected, {**LAGS, "tis_clip": None}, LAGS, 1, ["--rl-generation-lag 1", "give --tis-clip 2"]),
    *(
        (rules_rl.idle_states_are_on_the_device, {**RL, **_IDLE, **fields}, {**RL, **_IDLE}, 1, [flag, "remove one"])
        for fields, flag in (
            ({"offload_optimizer_states": True}, "--offload-optimizer-states keeps"),
            ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload keeps"),
            ({"optimizer": "hybridadam"}, "--optimizer hybridadam keeps"),
        )
    ),
    (
        rules_rl.replayed_experts_take_all_tokens,
        {**RL, **_REPLAY, "moe_expert_capacity_factor": 1.5},
        {**RL, **_REPLAY},
        1,
        ["--moe-expert-capacity-factor 1.5 would leave", "remove one"],
    ),
    (rules_rl.nothing_is_dropped, {**RL, "hidden_dropout": 0.1}, RL, 1, ["--hidden-dropout 0.1", "give 0"]),
    (
        rules_rl.one_stage_per_rank,
        {**RL, **_PIPELINE, "num_virtual_stages_per_pipeline_rank": 2},
        {**RL, **_PIPELINE},
        2,
        ["a rank has 2", "remove the virtual stages"],
    ),
]

_OWN = {
    "prompt_data": ("q.jsonl",),
    "input_key": "question",
    "label_key": "answer",
    "apply_chat_template": True,
    "rollout_max_prompt_len": 8,
    "grpo_prompts_per_step": 16,
    "grpo_group_size": 8,
    "grpo_iterations": 2,
    "rollout_max_response_len": 8,
    "rollout_temperature": 0.7,
    "rl_generation_batch_size": 4,
    "rl_external_sampler": "s.py",
    "rm_type": "number",
    "add_bos": True,
    "rm_timeout": 5.0,
    "rm_workers": 3,
    "rm_on_error": -1.0,
    "custom_environment_path": "e.py",
    "advantage_estimator": "rloo",
    "rl_objective": "gspo",
    "grpo_clamp_eps_lower": 0.1,
    "grpo_clamp_eps_upper": 0.3,
    "rl_loss_aggregation": "sequence",
    "grpo_kl_beta": 0.01,
    "tis_clip": 2.0,
    "overlong_buffer_len": 4,
    "opd_teacher_load": "d",
    "reward_model": "d",
    "grpo_filter_groups_with_same_reward": True,
    "rl_offload_optimizer_during_inference": True,
    "save_rollouts": "d",
    "eval_prompt_data": ("e.jsonl",),
}
# The flags among these that say how rows are read and the distribution that is trained.
_OF_BOTH = ("prompt_data", "input_key", "apply_chat_template", "rollout_temperature", "add_bos")
_PREFERENCE_FLAGS = {
    "eval_preference_data": ("e.jsonl",),
    "precompute_ref_log_probs": "f.npz",
    "dpo_beta": 0.2,
    "dpo_loss_type": "ipo",
    "dpo_label_smoothing": 0.1,
    "dpo_sft_coefficient": 1.0,
}
_NOT_RL = "does not learn from rewards"
_TIS, _RS = {**RL, "tis_clip": 5.0}, {**RL, "rollout_rs": "token", "rollout_rs_threshold": 2.0}
# field, value, a run beside which it has an effect, what its absence in another run is called
_DEPENDENT = [
    ("tis_clip_low", 0.5, _TIS, "give --tis-clip"),
    ("tis_mode", "mask", _TIS, "give --tis-clip"),
    ("tis_level", "sequence", _TIS, "give --tis-clip"),
    ("rollout_rs_threshold", 3.0, _RS, "give --rollout-rs"),
    ("rollout_rs_threshold_lower", 0.9, _RS, "give --rollout-rs"),
    ("reward_model_coef", 0.5, {**RL, "reward_model": "d"}, "give --reward-model"),
    ("opd_kl_coef", 0.5, {**RL, "opd_teacher_load": "d"}, "give --opd-teacher-load"),
    ("overlong_penalty_factor", 0.5, {**RL, "overlong_buffer_len": 4}, "give --overlong-buffer-len"),
]

# field, value that was typed, fields beside which it has no effect, fields beside which it has one, part of the message
RL_NEEDS = [
    *((name, value, {}, RL, _NOT_RL) for name, value in _OWN.items()),
    *((name, value, {}, run, _NOT_RL) for name, value, run, _ in _DEPENDENT),
    *((name, value, RL, run, part) for name, value, run, part in _DEPENDENT),
    ("rollout_rs", "token", {}, {**RL, "rollout_rs_threshold": 2.0}, _NOT_RL),
    ("preference_data", ("q.jsonl",), {}, PREFERENCES, _NOT_RL),
    *((name, value, {}, PREFERENCES, _NOT_RL) for name, value in _PREFERENCE_FLAGS.items()),
    *((name, value, RL, PREFERENCES, "not learn from preferences") for name, value in _PREFERENCE_FLAGS.items()),
    *(
        (name, value, PREFERENCES, RL, "--preference-data has the answers")
        for name, value in _OWN.items()
        if name not in _OF_BOTH
    ),
    ("custom_rm_path", "r.py", {}, {**RL, "rm_type": None}, _NOT_RL),
    ("rm_argument", "a+", {}, {**RL, "rm_type": "regex"}, _NOT_RL),
    ("rm_argument", "a+", RL, {**RL, "rm_type": "regex"}, "give --rm-type regex"),
    ("eps_clip_c", 3.0, {}, RL, _NOT_RL),
    ("eps_clip_c", 3.0, {**RL, "rl_objective": "cispo"}, RL, "--rl-objective is cispo"),
    ("kl_loss_type", "k1", {}, {**RL, "grpo_kl_beta": 0.1}, _NOT_RL),
    ("kl_loss_type", "k1", RL, {**RL, "grpo_kl_beta": 0.1}, "--grpo-kl-beta is 0"),
    ("rl_generation_lag", 1, {}, LAGS, _NOT_RL),
    ("rl_generation_lag", 1, PREFERENCES, LAGS, "--preference-data has the answers"),
    ("rl_generation_batch_size", 4, {**RL, "rl_external_sampler": "s.py"}, RL, "gets all requests at once"),
    *(
        (name, True, {**RL, **others, "rl_external_sampler": "s.py"}, {**RL, **others}, "answers, and not the model")
        for name, others in (
            ("use_rollout_logprobs", _INVARIANT),
            ("rl_offload_optimizer_during_inference", {}),
            ("moe_enable_routing_replay", _EXPERTS),
        )
    ),
    ("rl_max_turns", 2, {}, {**RL, "custom_environment_path": "e.py"}, _NOT_RL),
    ("rl_max_turns", 2, RL, {**RL, "custom_environment_path": "e.py"}, "no environment continues"),
    ("use_rollout_logprobs", True, _INVARIANT, {**RL, **_INVARIANT}, _NOT_RL),
    ("use_rollout_logprobs", True, RL, {**RL, **_INVARIANT}, "add --batch-invariant-mode"),
    ("rollout_logprobs_interval", 5, _INVARIANT, {**RL, **_INVARIANT, "use_rollout_logprobs": True}, _NOT_RL),
    ("rollout_logprobs_interval", 5, RL, {**RL, **_INVARIANT, "use_rollout_logprobs": True}, "all rollouts are"),
    ("moe_enable_routing_replay", True, _EXPERTS, {**RL, **_EXPERTS}, _NOT_RL),
    ("moe_enable_routing_replay", True, RL, {**RL, **_EXPERTS}, "the model has no experts"),
    ("rl_max_sampling_rounds", 2, {}, {**RL, "grpo_filter_groups_with_same_reward": True}, _NOT_RL),
    ("rl_max_sampling_rounds", 2, RL, {**RL, "grpo_filter_groups_with_same_reward": True}, "are not replaced"),
    ("eval_prompts", 8, {}, {**RL, "eval_prompt_data": ("e.jsonl",)}, _NOT_RL),
    ("eval_prompts", 8, RL, {**RL, "eval_prompt_data": ("e.jsonl",)}, "give --eval-prompt-data"),
]
