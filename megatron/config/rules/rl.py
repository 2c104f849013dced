"""Rules about learning from rewards, which samples its data from the model that it trains, and from preferences."""

from __future__ import annotations

from functools import partial

from megatron.config.mesh import mesh_of
from megatron.config.optimizer_offload import updates_on_cpu
from megatron.config.rl import MASK, RLOO, RLConfig
from megatron.config.rules.rule import ConfigRule
from megatron.config.rules.sources import shape_is_pending
from megatron.config.run import RunConfig
from megatron.config.update_rules import HYBRID

_GROUPS = "--grpo-group-size"
_LONGEST = "--rollout-max-response-len"


def prompts_are_given(rl: RLConfig) -> str | None:
    """Samples are answers to prompts."""
    return (
        None
        if rl.prompt_data
        else "there are no prompts; give their files with --prompt-data, or pairs of answers with --preference-data"
    )


def rewards_or_preferences(rl: RLConfig) -> str | None:
    """A step has answers of the policy, or pairs from files."""
    if rl.prompt_data is None or rl.preference_data is None:
        return None
    return (
        f"--prompt-data {' '.join(rl.prompt_data)} has prompts whose answers are sampled, and --preference-data "
        f"{' '.join(rl.preference_data)} has answers; give one of them"
    )


def prompts_are_the_only_data(run: RunConfig) -> str | None:
    """Other data would not be read."""
    data = run.data
    paths = {
        "--mock-data": data.mock_data,
        "--data-path": data.data_path is not None,
        "--train-data-path": data.train_data_path is not None,
        "--valid-data-path": data.valid_data_path is not None,
        "--test-data-path": data.test_data_path is not None,
        "--sft": data.sft,
    }
    typed = [name for name, is_on in paths.items() if is_on]
    if not typed:
        return None
    flag = "--prompt-data" if run.rl.preference_data is None else "--preference-data"
    return f"train_rl.py reads {flag}, and no {' or '.join(typed)}; remove it"


def one_reward(rl: RLConfig) -> str | None:
    """Answers are judged by a function of the user or of this program, by a model, or their tokens by a teacher."""
    if not rl.has_rewards and rl.opd_teacher_load is None:
        return (
            "nothing rewards the answers; give a function with --custom-rm-path FILE.py, or --rm-type, a model with "
            "--reward-model, or a teacher with --opd-teacher-load"
        )
    if rl.custom_rm_path is not None and rl.rm_type is not None:
        return f"--custom-rm-path {rl.custom_rm_path} and --rm-type {rl.rm_type} both reward; give one of them"
    return None


def answers_have_room(run: RunConfig) -> str | None:
    """A row of --seq-length tokens holds a prompt with its answer."""
    length, longest = run.data.seq_length, run.rl.rollout_max_response_len
    if longest is None:
        return f"{_LONGEST} is missing: the most tokens of an answer"
    prompt = 1 if run.rl.rollout_max_prompt_len is None else run.rl.rollout_max_prompt_len
    if length is None or prompt + longest <= length:
        return None
    return (
        f"a prompt of {prompt} tokens and {_LONGEST} {longest} are more than --seq-length {length}; give --seq-length "
        f"{prompt + longest} or more"
    )


def groups_are_compared(rl: RLConfig) -> str | None:
    """An advantage is a reward relative to those of other answers to the prompt. A teacher compares nothing."""
    if rl.grpo_group_size > 1 or not rl.has_rewards:
        return None
    other = "the other answers" if rl.advantage_estimator == RLOO else "the mean of its group"
    return f"with {_GROUPS} 1 no answer differs from {other}, so there is nothing to learn from; raise {_GROUPS}"


def rewards_are_compared(rl: RLConfig) -> str | None:
    """With a teacher alone all rewards are 0."""
    flags = {
        "--grpo-filter-groups-with-same-reward": rl.grpo_filter_groups_with_same_reward,
        "--eval-prompt-data": rl.eval_prompt_data is not None,
        "--overlong-buffer-len": rl.overlong_buffer_len is not None,
    }
    typed = [name for name, is_on in flags.items() if is_on]
    if rl.has_rewards or not typed:
        return None
    return (
        f"{' and '.join(typed)} compares rewards of answers, and --opd-teacher-load rates tokens alone; remove it, or "
        "give rewards with --custom-rm-path, --rm-type or --reward-model"
    )


def ratios_have_bounds(rl: RLConfig) -> str | None:
    """A ratio of 1, that of equal probabilities, changes nothing."""
    low, high = rl.tis_clip_low, rl.tis_clip
    if high is None or (low <= 1.0 <= high if rl.tis_mode == MASK else low < high):
        return None
    if rl.tis_mode == MASK:
        return (
            f"--tis-mode mask leaves out ratios outside --tis-clip-low {low:g} to --tis-clip {high:g}, and so tokens "
            "with equal probabilities, whose ratio is 1; give at most 1 and at least 1"
        )
    return f"--tis-clip-low {low:g} is not below --tis-clip {high:g}; lower --tis-clip-low"


def rejection_has_a_threshold(rl: RLConfig) -> str | None:
    """There is no threshold that suits every level."""
    if rl.rollout_rs is None or rl.rollout_rs_threshold is not None:
        return None
    return f"--rollout-rs {rl.rollout_rs} rejects nothing without a bound; give --rollout-rs-threshold"


def penalty_begins_within_answers(rl: RLConfig) -> str | None:
    """Rewards fall over the last tokens of the longest answers."""
    buffer, longest = rl.overlong_buffer_len, rl.rollout_max_response_len
    if buffer is None or longest is None or buffer <= longest:
        return None
    return f"--overlong-buffer-len {buffer} is more than {_LONGEST} {longest}; give {longest} or less"


def steps_are_whole(run: RunConfig, world_size: int) -> str | None:
    """A step trains on whole groups, equally many on each replica."""
    rl, batch = run.rl, run.train.global_batch_size or run.rl.answers_per_rollout
    answers, group, dp = rl.answers_per_rollout, rl.grpo_group_size, mesh_of(run.parallel, world_size).dp
    if batch % (group * dp):
        return (
            f"--global-batch-size {batch} is no multiple of {_GROUPS} {group} x data-parallel size {dp}; give a "
            f"multiple of {group * dp}"
        )
    if answers % batch:
        return (
            f"--grpo-prompts-per-step {rl.grpo_prompts_per_step} x {_GROUPS} {group} = {answers} answers are no whole "
            f"steps of --global-batch-size {batch}; give {answers}, or a divisor of it"
        )
    return None


def batches_are_constant(run: RunConfig) -> str | None:
    """Each rollout feeds the same number of steps."""
    ramps = {
        "--rampup-batch-size": run.train.rampup_batch_size is not None,
        "--step-batch-size-schedule": run.train.step_batch_size_schedule is not None,
    }
    typed = [name for name, is_on in ramps.items() if is_on]
    return f"learning from rewards has steps of one size; remove {typed[0]}" if typed else None


def saves_end_a_rollout(run: RunConfig) -> str | None:
    """A run that continues samples anew, from the weights with which the rollout began."""
    interval, steps = run.checkpoint.save_interval, steps_per_rollout(run)
    if run.checkpoint.save is None or interval is None or steps is None or interval % steps == 0:
        return None
    return (
        f"--save-interval {interval} would save between the {steps} steps that train on the same answers; give a "
        f"multiple of {steps}"
    )


def steps_per_rollout(run: RunConfig) -> int | None:
    """Optimizer steps between two rollouts; None if they are not whole."""
    answers, batch = run.rl.answers_per_rollout, run.train.global_batch_size or run.rl.answers_per_rollout
    return None if answers % batch else run.rl.grpo_iterations * (answers // batch)


def one_stage_per_rank(run: RunConfig) -> str | None:
    """A step of generation passes each pipeline rank once."""
    assert run.model.num_layers
    stages = run.pipeline_settings().stages_of(0)
    if len(stages) == 1:
        return None
    return (
        f"learning from rewards samples from one stage per pipeline rank, and a rank has {len(stages)}; remove the "
        "virtual stages, or give another --pipeline-schedule"
    )


def reward_model_reads_one_answer(rl: RLConfig) -> str | None:
    """Its chat template would have to render the turns between."""
    if rl.reward_model is None or rl.custom_environment_path is None:
        return None
    return (
        f"--reward-model {rl.reward_model} reads a prompt with one answer, and --custom-environment-path "
        f"{rl.custom_environment_path} makes conversations of several; remove one of them"
    )


def lag_has_other_devices(rl: RLConfig) -> str | None:
    """Without an engine of its own, sampling ahead would only make answers older."""
    if not rl.rl_generation_lag or rl.rl_external_sampler is not None:
        return None
    return (
        f"--rl-generation-lag {rl.rl_generation_lag} samples while a step trains, and the model itself can do only one "
        "of both; give --rl-external-sampler, or --rl-generation-lag 0"
    )


def lag_is_corrected(rl: RLConfig) -> str | None:
    """Answers of older weights are not from the distribution that is trained."""
    if not rl.rl_generation_lag or rl.tis_clip is not None:
        return None
    return (
        f"--rl-generation-lag {rl.rl_generation_lag} trains on answers of older weights, which nothing corrects for; "
        "give --tis-clip 2, or --rl-generation-lag 0"
    )


def external_sampler_gets_whole_weights(run: RunConfig) -> str | None:
    """Adapters are no tensors of a Hugging Face model."""
    name, rank = run.rl.rl_external_sampler, run.model.lora_rank
    if name is None or rank is None:
        return None
    return (
        f"--rl-external-sampler {name} gets the weights of a whole model, and --lora-rank {rank} trains adapters; "
        "remove one of them"
    )


def idle_states_are_on_the_device(run: RunConfig) -> str | None:
    """States that are in host memory, or move between steps, have their place."""
    if not run.rl.rl_offload_optimizer_during_inference:
        return None
    flag = "--offload-optimizer-states" if run.optimizer_offload.offload_optimizer_states else None
    if updates_on_cpu(run.optimizer, run.optimizer_offload):
        flag = "--optimizer hybridadam" if run.optimizer.optimizer == HYBRID else "--optimizer-cpu-offload"
    if flag is None:
        return None
    return (
        f"--rl-offload-optimizer-during-inference moves optimizer states to host memory while answers are sampled, and "
        f"{flag} keeps them there in training; remove one of the two"
    )


def model_is_sampled_as_trained(run: RunConfig) -> str | None:
    """A feature of training that changes the function would make another policy of the sampler, and of the forward
    that computes log-probabilities."""
    model = run.model
    features = {
        "--fp8-format": run.fp8.fp8_format is not None,
        "--mtp-num-layers": model.mtp_num_layers > 0,
        "--dynamic-context-parallel": run.parallel.dynamic_context_parallel,
        "--dry-run": run.dry_run.dry_run,
        "--skip-train": run.train.skip_train,
    }
    typed = [name for name, is_on in features.items() if is_on]
    if not typed:
        return None
    other = "the sampler" if run.rl.preference_data is None else "the forward for log-probabilities"
    return f"train_rl.py does not work with {' or '.join(typed)}: {other} has no such thing; remove it"


def replayed_experts_take_all_tokens(run: RunConfig) -> str | None:
    """The sampler reads token by token, and so no expert has a capacity there."""
    factor = run.moe.moe_expert_capacity_factor
    if factor is None or not run.rl.moe_enable_routing_replay:
        return None
    return (
        f"--moe-enable-routing-replay trains with the experts of the sampler, and --moe-expert-capacity-factor "
        f"{factor:g} would leave some of them out; remove one of the two"
    )


def nothing_is_dropped(run: RunConfig) -> str | None:
    """Dropout would train another distribution than the one that is sampled or compared."""
    model = run.model
    rates = {
        "--attention-dropout": model.attention_dropout,
        "--hidden-dropout": model.hidden_dropout,
        "--lora-dropout": model.lora_dropout if model.lora_rank else 0.0,
    }
    typed = [f"{name} {rate:g}" for name, rate in rates.items() if rate]
    if not typed:
        return None
    other = "the sampler" if run.rl.preference_data is None else "the forward for log-probabilities"
    return f"{other} drops nothing, and training would with {' and '.join(typed)}; give 0"


def rules(run: RunConfig, world_size: int) -> list[ConfigRule]:
    """Returns the rules of a run that learns from rewards or preferences."""
    if not run.data.perform_rl_step:
        return []
    rl, samples = run.rl, run.rl.preference_data is None
    of_samples = [
        partial(prompts_are_given, rl),
        partial(one_reward, rl),
        partial(answers_have_room, run),
        partial(groups_are_compared, rl),
        partial(rewards_are_compared, rl),
        partial(ratios_have_bounds, rl),
        partial(rejection_has_a_threshold, rl),
        partial(penalty_begins_within_answers, rl),
        partial(batches_are_constant, run),
        partial(steps_are_whole, run, world_size),
        partial(saves_end_a_rollout, run),
        partial(external_sampler_gets_whole_weights, run),
        partial(reward_model_reads_one_answer, rl),
        partial(lag_has_other_devices, rl),
        partial(lag_is_corrected, rl),
        partial(replayed_experts_take_all_tokens, run),
        partial(idle_states_are_on_the_device, run),
    ]
    of_data = [
        partial(rewards_or_preferences, rl),
        partial(prompts_are_the_only_data, run),
        *(of_samples if samples else []),
        partial(model_is_sampled_as_trained, run),
    ]
    if shape_is_pending(run.model, run.checkpoint):
        return of_data
    has_stages = samples and rl.rl_external_sampler is None
    return [*of_data, partial(nothing_is_dropped, run), *([partial(one_stage_per_rank, run)] if has_stages else [])]
