"""Learning from rewards or preferences by train_rl.py: prompts, sampling, rewards, pairs of answers, objectives."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.config.interval import (
    AT_LEAST_ONE,
    BELOW_HALF,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SCORE,
    SHARE,
    SIZE,
    WORKERS,
)

# Advantages: rewards of a group less their mean, divided by their standard deviation or not; or less that of others.
GRPO, DR_GRPO, RLOO = "grpo", "dr_grpo", "rloo"
# Objectives, as megatron/rl/objectives.py names them.
PPO, GSPO, CISPO, REINFORCE = "ppo", "gspo", "cispo", "reinforce"
# Losses of pairs, as megatron/rl/preferences.py names them.
SIGMOID, SIGMOID_NORM, IPO = "sigmoid", "sigmoid_norm", "ipo"
# What counts alike in the objective: tokens of the global batch, its answers, or places of the longest answer.
TOKEN, SEQUENCE, CONSTANT = "token", "sequence", "constant"
# Ratios of trainer to sampler: of a token, of its answer, or the geometric mean over the answer.
LEVELS = (TOKEN, SEQUENCE, "geometric")
# Ratios beyond their bounds are limited to them, or their tokens are left out.
TRUNCATE, MASK = "truncate", "mask"

_RL = Need(lambda run: run.data.perform_rl_step, "the run does not learn from rewards", "train with train_rl.py")
_SAMPLES = (
    _RL,
    Need(
        lambda run: run.rl.preference_data is None,
        "--preference-data has the answers, so none are sampled or rewarded",
        "give --prompt-data in place of --preference-data",
    ),
)
_PREFERS = (
    _RL,
    Need(
        lambda run: run.rl.preference_data is not None,
        "the run does not learn from preferences",
        "give --preference-data",
    ),
)
_CLIPS = Need(
    lambda run: run.rl.rl_objective in (PPO, GSPO), lambda run: f"--rl-objective is {run.rl.rl_objective}", "give ppo"
)
_CORRECTS = Need(
    lambda run: run.rl.tis_clip is not None, "nothing is weighted by ratios of trainer to sampler", "give --tis-clip"
)
_REJECTS = Need(lambda run: run.rl.rollout_rs is not None, "nothing is rejected", "give --rollout-rs")
_KL = Need(lambda run: run.rl.grpo_kl_beta > 0, "--grpo-kl-beta is 0", "raise it")
_EXPERTS = Need(lambda run: bool(run.model.num_experts), "the model has no experts", "give --num-experts")
_INVARIANT = Need(
    lambda run: run.model.batch_invariant_mode,
    "log-probabilities of sampler and trainer are equal only in batch-invariant mode",
    "add --batch-invariant-mode",
)
_EVALUATES = Need(
    lambda run: run.rl.eval_prompt_data is not None, "no prompts are kept out of training", "give --eval-prompt-data"
)
_INSIDE = Need(
    lambda run: run.rl.rl_external_sampler is None,
    "--rl-external-sampler gets all requests at once",
    "limit them in its class",
)
_MODEL_SAMPLES = Need(
    lambda run: run.rl.rl_external_sampler is None,
    lambda run: f"--rl-external-sampler {run.rl.rl_external_sampler} answers, and not the model itself",
    "remove it",
)
_TURNS = Need(
    lambda run: run.rl.custom_environment_path is not None,
    "no environment continues a conversation",
    "give --custom-environment-path",
)


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """How a run learns from rewards or preferences.

    With rewards samples are answers: a prompt has --grpo-group-size of them. With preferences they are pairs."""

    prompt_data: tuple[str, ...] | None = flag(
        None, "files of prompts: JSON lines or parquet, see docs/rl.md", nargs="+", metavar="FILE", needs=_RL
    )
    input_key: str = flag("prompt", "key of the prompt, a text or a list of messages", needs=_RL)
    label_key: str | None = flag(
        None, "key of the label, which the reward function gets; default label, or verl's reward_model", needs=_SAMPLES
    )
    add_bos: bool = flag(False, "prompts that are texts begin with the tokenizer's bos", needs=_RL)
    apply_chat_template: bool = flag(
        False, "prompts that are texts are a user's turn in the tokenizer's chat template", needs=_RL
    )
    rollout_max_prompt_len: int | None = flag(
        None,
        "prompts with more tokens are left out; default --seq-length less --rollout-max-response-len",
        within=SIZE,
        needs=_SAMPLES,
    )
    grpo_prompts_per_step: int = flag(
        32,
        "prompts that are answered before each update of the policy",
        aliases=("--rollout-batch-size",),
        within=SIZE,
        needs=_SAMPLES,
    )
    grpo_group_size: int = flag(
        8, "answers to each prompt", aliases=("--n-samples-per-prompt",), within=SIZE, needs=_SAMPLES
    )
    grpo_iterations: int = flag(1, "passes over the answers before new ones are sampled", within=COUNT, needs=_SAMPLES)
    rollout_max_response_len: int | None = flag(
        None,
        "longest answer, in tokens; with an environment of all turns behind the prompt together",
        within=SIZE,
        needs=_SAMPLES,
    )
    rollout_temperature: float = flag(
        1.0,
        "temperature of sampling, and of the distribution that is trained",
        name="--rl-default-temperature",
        aliases=("--rollout-temperature", "--grpo-default-temperature"),
        within=POSITIVE,
        needs=_RL,
    )
    rl_generation_batch_size: int | None = flag(
        None,
        "answers of a replica that are sampled at the same time; default all of a step",
        within=SIZE,
        needs=(*_SAMPLES, _INSIDE),
    )
    rl_external_sampler: str | None = flag(
        None,
        "class that answers prompts in place of the model that is trained, as FILE.py or FILE.py:CLASS, see docs/rl.md",
        metavar="FILE",
        needs=_SAMPLES,
    )
    rl_generation_lag: int = flag(
        0,
        "1: the external sampler answers for the next step while this one trains, from the weights before its update",
        choices=(0, 1),
        needs=_SAMPLES,
    )
    custom_rm_path: str | None = flag(
        None, "reward function, as FILE.py or FILE.py:NAME, see docs/rl.md", metavar="FILE", needs=_SAMPLES
    )
    rm_type: str | None = flag(
        None, "reward function of this program", choices=("exact", "regex", "number", "length"), needs=_SAMPLES
    )
    rm_argument: str | None = flag(
        None,
        "regex: the pattern, in place of the label; length: characters of an answer with the reward 1",
        needs=(
            *_SAMPLES,
            Need(
                lambda run: run.rl.rm_type in ("regex", "length"),
                "no other reward takes one",
                "give --rm-type regex or length",
            ),
        ),
    )
    rm_timeout: float = flag(
        60.0,
        "seconds that a reward function, or an environment, may take for an answer",
        within=POSITIVE,
        needs=_SAMPLES,
    )
    rm_workers: int = flag(
        2, "processes of a replica that compute rewards, and as many for an environment", within=WORKERS, needs=_SAMPLES
    )
    rm_on_error: float | None = flag(
        None,
        "reward of an answer for which the function, or the environment, fails; default: the run stops",
        within=SCORE,
        needs=_SAMPLES,
    )
    reward_model: str | None = flag(
        None,
        "Hugging Face folder of a reward model for sequence classification with one label, whose scores are rewards or "
        "are added to those of a function",
        metavar="DIR",
        needs=_SAMPLES,
    )
    reward_model_coef: float = flag(
        1.0,
        "coefficient of the reward model's scores",
        within=POSITIVE,
        needs=(
            *_SAMPLES,
            Need(lambda run: run.rl.reward_model is not None, "there is no reward model", "give --reward-model"),
        ),
    )
    opd_teacher_load: str | None = flag(
        None,
        "on-policy distillation: Hugging Face folder of a teacher with the tokens of the policy; each sampled token has "
        "the advantage log-probability of the teacher less that of the policy, and that of its reward",
        metavar="DIR",
        needs=_SAMPLES,
    )
    opd_kl_coef: float = flag(
        1.0,
        "coefficient of the teacher's advantages",
        within=POSITIVE,
        needs=(
            *_SAMPLES,
            Need(lambda run: run.rl.opd_teacher_load is not None, "there is no teacher", "give --opd-teacher-load"),
        ),
    )
    custom_environment_path: str | None = flag(
        None,
        "function that continues a conversation behind an answer, such as a tool, as FILE.py or FILE.py:NAME, see "
        "docs/rl.md",
        metavar="FILE",
        needs=_SAMPLES,
    )
    rl_max_turns: int = flag(8, "most answers of a conversation", within=SIZE, needs=(*_SAMPLES, _TURNS))
    advantage_estimator: str = flag(
        GRPO,
        "grpo: reward less the mean of its group, divided by the standard deviation; dr_grpo: not divided; rloo: less "
        "the mean of the other answers",
        choices=(GRPO, DR_GRPO, RLOO),
        needs=_SAMPLES,
    )
    rl_objective: str = flag(
        PPO,
        "ppo: the ratio of each token is clipped; gspo: that of each answer; cispo: clipped weights, so that every "
        "token keeps a gradient; reinforce: no ratio",
        choices=(PPO, GSPO, CISPO, REINFORCE),
        needs=_SAMPLES,
    )
    grpo_clamp_eps_lower: float = flag(
        0.2, "ratios are clipped below 1 less this", aliases=("--eps-clip",), within=NOT_NEGATIVE, needs=_SAMPLES
    )
    grpo_clamp_eps_upper: float = flag(
        0.2, "ratios are clipped above 1 plus this", aliases=("--eps-clip-high",), within=NOT_NEGATIVE, needs=_SAMPLES
    )
    eps_clip_c: float | None = flag(
        None,
        "dual clip: the loss of an answer with a negative advantage is at most this times it",
        within=POSITIVE,
        needs=(*_SAMPLES, _CLIPS),
    )
    rl_loss_aggregation: str = flag(
        TOKEN,
        "token: all tokens of the global batch count alike; sequence: all answers; constant: all tokens, and the sum "
        "is divided by answers x --rollout-max-response-len",
        choices=(TOKEN, SEQUENCE, CONSTANT),
        needs=_SAMPLES,
    )
    grpo_kl_beta: float = flag(
        0.0,
        "coefficient of the divergence from the weights with which training began",
        aliases=("--kl-loss-coef",),
        within=NOT_NEGATIVE,
        needs=_SAMPLES,
    )
    kl_loss_type: str = flag(
        "k3",
        "estimator of the divergence: k1, k2, k3, or k3+, which has the value of k3 and the gradient of k2",
        choices=("k1", "k2", "k3", "k3+"),
        needs=(*_SAMPLES, _KL),
    )
    tis_clip: float | None = flag(
        None,
        "truncated importance sampling: weight tokens by the ratio of trainer to sampler, at most this",
        name="--rl-importance-sampling-truncation-coef",
        aliases=("--tis-clip",),
        within=POSITIVE,
        needs=_SAMPLES,
    )
    tis_clip_low: float = flag(
        0.0,
        "the lower bound beside --tis-clip, which is the upper one",
        within=NOT_NEGATIVE,
        needs=(*_SAMPLES, _CORRECTS),
    )
    tis_mode: str = flag(
        TRUNCATE,
        "truncate: ratios beyond their bounds are limited to them; mask: their tokens are left out (IcePop)",
        choices=(TRUNCATE, MASK),
        needs=(*_SAMPLES, _CORRECTS),
    )
    tis_level: str = flag(
        TOKEN,
        "ratio that weighs a token: its own, that of its answer, or the geometric mean over its answer",
        choices=LEVELS,
        needs=(*_SAMPLES, _CORRECTS),
    )
    rollout_rs: str | None = flag(
        None,
        "rejection: leave out tokens whose ratio of trainer to sampler lies outside the thresholds; the ratio is that "
        "of the token, of its answer, or the geometric mean over its answer",
        choices=LEVELS,
        needs=_SAMPLES,
    )
    rollout_rs_threshold: float | None = flag(
        None, "largest ratio that is not rejected", within=AT_LEAST_ONE, needs=(*_SAMPLES, _REJECTS)
    )
    rollout_rs_threshold_lower: float | None = flag(
        None,
        "smallest ratio that is not rejected; default 1 / --rollout-rs-threshold",
        within=SHARE,
        needs=(*_SAMPLES, _REJECTS),
    )
    overlong_buffer_len: int | None = flag(
        None,
        "soft punishment of long answers (DAPO): the reward falls over this many tokens before "
        "--rollout-max-response-len",
        within=SIZE,
        needs=_SAMPLES,
    )
    overlong_penalty_factor: float = flag(
        1.0,
        "what the longest answers lose of their reward",
        within=POSITIVE,
        needs=(
            *_SAMPLES,
            Need(
                lambda run: run.rl.overlong_buffer_len is not None,
                "long answers are not punished",
                "give --overlong-buffer-len",
            ),
        ),
    )
    use_rollout_logprobs: bool = flag(
        False,
        "take the sampler's log-probabilities as the trainer's, which are the same; saves a forward",
        needs=(*_SAMPLES, _MODEL_SAMPLES, _INVARIANT),
    )
    rollout_logprobs_interval: int = flag(
        10,
        "one of this many rollouts computes the log-probabilities all the same, and compares",
        within=COUNT,
        needs=(
            *_SAMPLES,
            Need(
                lambda run: run.rl.use_rollout_logprobs,
                "all rollouts are compared",
                "add --use-rollout-logprobs",
            ),
        ),
    )
    rl_offload_optimizer_during_inference: bool = flag(
        False, "optimizer states are in host memory while answers are sampled", needs=(*_SAMPLES, _MODEL_SAMPLES)
    )
    moe_enable_routing_replay: bool = flag(
        False,
        "training takes the experts that the sampler chose for each token; their weights are the current router's",
        aliases=("--use-rollout-routing-replay",),
        needs=(*_SAMPLES, _MODEL_SAMPLES, _EXPERTS),
    )
    grpo_filter_groups_with_same_reward: bool = flag(
        False,
        "leave out groups whose answers have equal rewards, and sample further prompts in their place",
        needs=_SAMPLES,
    )
    rl_max_sampling_rounds: int = flag(
        4,
        "rounds of sampling in which groups with equal rewards are replaced; then the step does with fewer",
        within=SIZE,
        needs=(
            *_SAMPLES,
            Need(
                lambda run: run.rl.grpo_filter_groups_with_same_reward,
                "groups with equal rewards are not replaced",
                "add --grpo-filter-groups-with-same-reward",
            ),
        ),
    )
    save_rollouts: str | None = flag(
        None,
        "folder for the answers of every step, as JSON lines and a page to read them",
        metavar="DIR",
        needs=_SAMPLES,
    )
    eval_prompt_data: tuple[str, ...] | None = flag(
        None,
        "files of prompts that are kept out of training and answered every --eval-interval steps",
        nargs="+",
        metavar="FILE",
        needs=_SAMPLES,
    )
    eval_prompts: int | None = flag(
        None,
        "prompts of --eval-prompt-data that are answered; default all",
        within=WORKERS,
        needs=(*_SAMPLES, _EVALUATES),
    )
    preference_data: tuple[str, ...] | None = flag(
        None,
        "files of pairs of answers, of which one is preferred: JSON lines or parquet, see docs/preferences.md; in "
        "place of --prompt-data",
        nargs="+",
        metavar="FILE",
        needs=_RL,
    )
    eval_preference_data: tuple[str, ...] | None = flag(
        None,
        "files of pairs that are kept out of training, and compared with the reference every --eval-interval steps",
        nargs="+",
        metavar="FILE",
        needs=_PREFERS,
    )
    precompute_ref_log_probs: str | None = flag(
        None,
        "file of the reference's log-probabilities of all pairs, which is written if it is not there: steps have one "
        "forward less, and no copy of the first weights",
        metavar="FILE",
        needs=_PREFERS,
    )
    dpo_beta: float = flag(
        0.1,
        "how closely the policy stays to the weights with which training began: the beta of DPO and IPO",
        within=POSITIVE,
        needs=_PREFERS,
    )
    dpo_loss_type: str = flag(
        SIGMOID,
        "sigmoid: DPO; sigmoid_norm: DPO of means over the tokens of an answer; ipo: IPO, of the same means",
        choices=(SIGMOID, SIGMOID_NORM, IPO),
        needs=_PREFERS,
    )
    dpo_label_smoothing: float = flag(
        0.0, "share of pairs that are expected to be the wrong way round", within=BELOW_HALF, needs=_PREFERS
    )
    dpo_sft_coefficient: float = flag(
        0.0,
        "coefficient of the mean loss per token of the chosen answer, which is added",
        aliases=("--rpo-alpha",),
        within=NOT_NEGATIVE,
        needs=_PREFERS,
    )

    @property
    def has_rewards(self) -> bool:
        """Whether answers have rewards. A teacher alone gives none."""
        return self.custom_rm_path is not None or self.rm_type is not None or self.reward_model is not None

    @property
    def answers_per_rollout(self) -> int:
        """Answers that are sampled before each update of the policy."""
        return self.grpo_prompts_per_step * self.grpo_group_size
