"""Length of the run, batches, evaluation, logging, exits, dry runs."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

from megatron.base.errors import ConfigError
from megatron.config.checkpoint import SAVES
from megatron.config.flag import Need, flag, on_by_default
from megatron.config.interval import COUNT, COUNT_OR_NONE, NOT_NEGATIVE, POSITIVE, RANKS, SEED, SIZE

_TIMELINE = Need(
    lambda run: run.logging.profile_timeline is not None, "no timeline is written", "add --profile-timeline"
)
_WANDB = Need(lambda run: run.logging.wandb_project is not None, "Weights & Biases is off", "add --wandb-project")
BATCH_STEPS_FLAG = "--step-batch-size-schedule"
LOSS_CHUNK = 2048  # tokens: enough for efficient products, and a small part of a long sequence
_BATCH_STEP = re.compile(r"(\d+\.?\d*|\.\d+)([KMBT]?):(\d+\.?\d*|\.\d+)([KMBT]?)", re.IGNORECASE)
# Of --rerun-mode. The last is also called REPORT in some versions of Megatron-LM.
DISABLED, VALIDATE, DETERMINISM, REPORT = "disabled", "validate_results", "report_determinism_stats", "report_stats"
TRANSIENT, PERSISTENT, CORRECT = INJECTIONS = ("transient_error", "persistent_error", "correct_result")
_SUFFIX = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


_VALIDATES = Need(
    lambda run: run.train.result_mode == VALIDATE, "no step is computed again", f"add --rerun-mode {VALIDATE}"
)


def _evaluates(run: Any) -> bool:
    """Whether there is something to evaluate: validation data, or prompts that are kept out of training."""
    if run.data.perform_rl_step:
        return run.rl.eval_prompt_data is not None
    return bool(run.eval.eval_iters > 0 and run.data.can_validate)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The length of the run, its batches and its end."""

    micro_batch_size: int | None = flag(None, "samples in one forward pass of one replica", within=SIZE)
    global_batch_size: int | None = flag(
        None, "samples in one optimizer step over all replicas; default micro batch size x dp", within=SIZE
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "START INCREMENT SAMPLES: begin with START samples per step and add INCREMENT in equal intervals over SAMPLES",
        nargs=3,
        metavar="N",
        within=SIZE,
    )
    step_batch_size_schedule: str | None = flag(
        None,
        "samples of an optimizer step from a number of tokens on, such as '0:768 250B:1536 500B:3072', with K, M, B or "
        "T; instead of --global-batch-size",
        metavar="'TOKENS:SIZE ...'",
    )
    train_iters: int | None = flag(None, "length of the run, optimizer steps", within=COUNT)
    train_samples: int | None = flag(None, "length of the run, samples", within=COUNT)
    seed: int = flag(1234, "seed of initial weights, data order and dropout", within=SEED)
    calculate_per_token_loss: bool = flag(
        False,
        "weight every token of the global batch equally, instead of every sample "
        "(they differ only if samples have different numbers of unmasked tokens)",
    )
    z_loss_coeff: float | None = flag(
        None,
        "coefficient of the squared log-sum-exp of each token's logits, which keeps them small; PaLM's is 1e-4. It "
        "changes gradients, and not the printed losses",
        within=NOT_NEGATIVE,
    )
    mtp_loss_scaling_factor: float = flag(
        0.1,
        "weight of the mean loss of the further tokens of --mtp-num-layers, added to that of the next token",
        within=NOT_NEGATIVE,
        needs=Need(
            lambda run: run.model.mtp_num_layers > 0, "only the next token is predicted", "give --mtp-num-layers"
        ),
    )
    cross_entropy_chunk_size: int = flag(
        LOSS_CHUNK,
        "tokens of a microbatch whose logits exist at once: head and loss are computed for so many of them after each "
        "other; with as many as the microbatch has, all logits exist at once",
        within=SIZE,
    )
    cuda_graph_impl: str = flag(
        "none",
        "local: run each layer's forward and backward as a CUDA graph, see docs/cuda_graphs.md",
        choices=("none", "local"),
    )
    cuda_graph_warmup_steps: int = flag(
        3,
        "steps of a run, also of a continued one, before graphs are captured",
        within=COUNT,
        needs=Need(
            lambda run: run.train.cuda_graph_impl != "none", "there are no graphs", "add --cuda-graph-impl local"
        ),
    )
    exit_interval: int | None = flag(None, "save and exit after an iteration that is a multiple of this", within=COUNT)
    exit_duration_in_mins: float | None = flag(None, "save and exit after this many minutes", within=POSITIVE)
    exit_signal_handler: bool = on_by_default(
        when_off="do not catch SIGTERM and SIGUSR1 to save and exit; exit immediately"
    )
    skip_train: bool = flag(False, "evaluate only")
    manual_gc: bool = flag(
        False, "run Python's garbage collector only every --manual-gc-interval steps, on all ranks at once"
    )
    manual_gc_interval: int = flag(
        0,
        "steps between collections with --manual-gc; 0 never collects",
        within=COUNT_OR_NONE,
        needs=Need(lambda run: run.train.manual_gc, "collection is automatic", "add --manual-gc"),
    )
    deterministic_mode: bool = flag(False, "choose deterministic kernels, and stop where there is none")
    max_consecutive_nan_iterations: int = flag(
        10,
        "stop with an error after so many consecutive iterations with non-finite gradients, except those that lower "
        "fp16's loss scale; 0 never stops",
        within=COUNT_OR_NONE,
    )
    check_weight_hash_across_dp_replicas_interval: int = flag(
        100,
        "iterations between comparisons of the weights and optimizer states that several ranks hold, which are "
        "compared before each save, too; the run stops and names those that differ; 0 never compares",
        within=COUNT_OR_NONE,
    )
    iterations_to_skip: tuple[int, ...] | None = flag(
        None,
        "iterations whose data is read but not trained on (to step over a loss spike); checkpoints keep them, and a "
        "run that goes on without this flag leaves out the same",
        nargs="+",
        within=COUNT,
    )
    check_for_spiky_loss: bool = flag(
        False,
        "examine a step in which the mean loss of a rank is at least 10 times the largest one of the run's first 100 "
        "steps, see --rerun-mode",
    )
    check_for_large_grads: bool = flag(
        False,
        "examine a step in which the norm of a rank's gradients, before or after their reduction, is at least 10 times "
        "the largest one of the run's first 100 steps, see --rerun-mode",
    )
    rerun_mode: str | None = flag(
        None,
        f"{VALIDATE}: compute a step that is examined, or whose loss or gradient is not finite, again, on the same rank "
        f"and on another, to tell a fault of a machine from one of the data; {DETERMINISM} (or {REPORT}): compute every "
        f"step twice, and print how much the numbers differ; {DISABLED}: only a warning. Default {VALIDATE} "
        f"with --check-for-spiky-loss, --check-for-large-grads or --error-injection-rate, otherwise {DISABLED}. See "
        "docs/logging.md",
        choices=(DISABLED, VALIDATE, DETERMINISM, REPORT),
    )
    skip_spiky_iterations: bool = flag(
        False,
        "leave out a step whose spiky loss or large gradient is due to its data: they count as read, the weights stay "
        "as they are, and checkpoints keep the iteration",
        needs=(
            _VALIDATES,
            Need(
                lambda run: run.train.check_for_spiky_loss or run.train.check_for_large_grads,
                "no step is examined for that",
                "add --check-for-spiky-loss or --check-for-large-grads",
            ),
        ),
    )
    error_injection_rate: int = flag(
        0,
        "for tests of the checks: pretend, once in so many steps of a rank, that its numbers are not finite; gradients "
        "stay as they are. 0 never does",
        within=COUNT_OR_NONE,
        needs=_VALIDATES,
    )
    error_injection_type: str = flag(
        "transient_error",
        "whose fault --error-injection-rate pretends: transient_error, of one computation; persistent_error, of all "
        "computations of a rank; correct_result, of the data",
        choices=INJECTIONS,
        needs=Need(
            lambda run: run.train.error_injection_rate > 0, "no error is injected", "add --error-injection-rate"
        ),
    )

    @property
    def result_mode(self) -> str:
        """The answer to suspicious numbers of a step: DISABLED, VALIDATE or DETERMINISM."""
        if self.rerun_mode is None:
            checks = self.check_for_spiky_loss or self.check_for_large_grads or self.error_injection_rate > 0
            return VALIDATE if checks else DISABLED
        return DETERMINISM if self.rerun_mode == REPORT else self.rerun_mode

    @property
    def final_global_batch_size(self) -> int | None:
        """Samples per step at the end of a ramp or a schedule; None if it is one microbatch per replica."""
        if self.step_batch_size_schedule is None:
            return self.global_batch_size
        return parse_steps(self.step_batch_size_schedule, None)[-1][1]


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation of validation and test loss."""

    eval_interval: int | None = flag(
        None,
        "steps between evaluations; default only after training",
        within=COUNT,
        needs=Need(
            _evaluates,
            lambda run: "--eval-iters 0 never evaluates" if run.eval.eval_iters == 0 else "there is no validation data",
            "raise --eval-iters and give --valid-data-path",
        ),
    )
    eval_iters: int = flag(100, "global batches an evaluation reads; 0 never evaluates", within=COUNT_OR_NONE)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Output during training."""

    print_flags: bool = flag(False, "list the value of every flag at the start, and every row of the start-up table")
    strict_flags: bool = flag(
        False, "stop for a flag that is accepted without an effect here, instead of listing it in the start-up table"
    )
    log_interval: int = flag(100, "steps between log lines", within=COUNT)
    log_throughput: bool = flag(False, "also print model TFLOP/s/GPU at Megatron-LM's position in the line")
    log_params_norm: bool = flag(False, "print the norm of all parameters")
    log_num_zeros_in_grad: bool = flag(False, "print the number of zeros in the gradient")
    log_memory_interval: int | None = flag(
        None, "steps between per-rank memory reports; default once, after the first log line", within=COUNT
    )
    log_memory: bool = flag(
        False,
        "print the planned and the measured peak of memory of each pipeline rank every --log-interval steps",
    )
    log_progress: bool = flag(False, "append starts and saves to SAVE/progress.txt", needs=SAVES)
    progress_bar: bool = on_by_default(when_off="no progress bar (it is off if the output is not a terminal)")
    timing_log_level: int = flag(
        0, "0: iteration time only; 1: also the parts of a step; 2: also every forward and backward", choices=(0, 1, 2)
    )
    log_straggler: bool = flag(
        False,
        "look for slow ranks, disks and links in some steps, warn of them, and print the slowest ranks with the log "
        "lines, see docs/logging.md",
        needs=Need(lambda run: not run.train.skip_train, "there is no step to measure", "remove --skip-train"),
    )
    straggler_minmax_count: int = flag(
        1,
        "slowest and fastest ranks that --log-straggler prints",
        within=COUNT,
        needs=Need(lambda run: run.logging.log_straggler, "no rank is measured", "add --log-straggler"),
    )
    plan: str | None = flag(
        None,
        "log the time of a step, and its parts, as the profile of this machine predicts them, next to the measured "
        "time: a file of tools/profile_machine.py",
        needs=Need(lambda run: not run.train.skip_train, "there is no step to predict", "remove --skip-train"),
    )
    profile_timeline: str | None = flag(
        None,
        "write a Chrome trace of some steps here, and log their fractions of compute, exposed communication, bubble",
    )
    profile_step_start: int = flag(
        3, "first step, counted from the start of this run, in the --profile-timeline", within=COUNT, needs=_TIMELINE
    )
    profile_step_end: int = flag(5, "the --profile-timeline ends before this step", within=COUNT, needs=_TIMELINE)
    tensorboard_dir: str | None = flag(None, "write TensorBoard events here")
    tensorboard_log_interval: int = flag(
        1,
        "steps between TensorBoard points",
        within=COUNT,
        needs=Need(
            lambda run: run.logging.tensorboard_dir is not None or run.logging.wandb_project is not None,
            "no TensorBoard events are written",
            "add --tensorboard-dir",
        ),
    )
    wandb_project: str | None = flag(None, "log to this Weights & Biases project (needs the wandb extra)")
    wandb_exp_name: str | None = flag(None, "name of the Weights & Biases run", needs=_WANDB)
    wandb_entity: str | None = flag(None, "Weights & Biases team or user", needs=_WANDB)
    wandb_save_dir: str | None = flag(None, "folder for Weights & Biases files; default SAVE/wandb", needs=_WANDB)
    loss_curve: str | None = flag(None, "draw training and validation loss as a PNG here at the end of the run")


@dataclass(frozen=True, kw_only=True)
class DryRunConfig:
    """Whether to trace a run instead of starting it, and for how many processes."""

    dry_run: bool = flag(
        False,
        "start nothing: trace a step of this run for its first and its last pipeline rank, on a machine without "
        "devices or data, and print the memory that it takes",
    )
    dry_run_world_size: int | None = flag(
        None,
        "processes of the run that --dry-run traces; default the launcher's number, which is 1 without one",
        name="--world-size",
        within=RANKS,
        needs=Need(lambda run: run.dry_run.dry_run, "the launcher sets the number of processes", "add --dry-run"),
    )

    def ranks(self, launched: int) -> int:
        """Returns the processes of the run, of which `launched` have been started."""
        return self.dry_run_world_size or launched


def parse_steps(text: str, seq_length: int | None) -> tuple[tuple[int, int], ...]:
    """Returns (first sample, batch size) of each step, in order, from "THRESHOLD:BATCH_SIZE THRESHOLD:BATCH_SIZE ...".

    As in Megatron-LM, thresholds are tokens in samples of `seq_length`, rounded down to whole samples, or samples if it
    is None; numbers may end in K, M, B or T; commas are spaces; entries may have any order. Raises ConfigError.
    """
    steps = []
    for entry in text.replace(",", " ").split():
        match = _BATCH_STEP.fullmatch(entry)
        threshold, size = (_number(*match.group(1, 2)), _number(*match.group(3, 4))) if match else (0, 0)
        if size < 1:
            raise ConfigError(f"{BATCH_STEPS_FLAG}: '{entry}' is not THRESHOLD:BATCH_SIZE, such as 0:768 or 250B:1536")
        steps.append((threshold // (seq_length or 1), size))
    steps.sort()
    if not steps:
        raise ConfigError(f"{BATCH_STEPS_FLAG} has no step; give one such as 0:768")
    if steps[0][0] != 0:
        raise ConfigError(f"{BATCH_STEPS_FLAG} '{text}' begins at {steps[0][0]}; let it begin at 0")
    for (first, _), (second, _) in itertools.pairwise(steps):
        if first == second:
            raise ConfigError(f"{BATCH_STEPS_FLAG} '{text}': two steps begin at sample {first}; leave one of them out")
    return tuple(steps)


def _number(digits: str, suffix: str) -> int:
    return int(float(digits) * _SUFFIX[suffix.upper()])
