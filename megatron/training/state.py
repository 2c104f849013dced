"""The state of a run between steps, and the report of one step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TrainState:
    """Progress of the run. Saved in every checkpoint; all fields are plain numbers."""

    iteration: int = 0  # optimizer steps done
    consumed_samples: int = 0  # training samples read
    schedule_position: int = 0  # steps (--train-iters) or samples (--train-samples) that were applied, not skipped
    consumed_valid_samples: int = 0
    consumed_prompts: int = 0  # in reinforcement learning, whose samples are answers to them
    skipped_iterations: int = 0  # steps not applied: fp16 overflow, or --iterations-to-skip
    nan_iterations: int = 0  # steps not applied because gradients were not finite (bf16, fp32)
    floating_point_operations: float = 0.0  # model FLOPs so far, all replicas


@dataclass(frozen=True)
class ExpertReport:
    """Balance and load of the experts in one step, the same on every rank.

    layers: numbers of those with experts. losses: name -> value of each of them, without its coefficient. imbalance:
    the largest load of an expert in each of them, divided by the mean.
    """

    layers: tuple[int, ...]
    losses: dict[str, tuple[float, ...]]
    imbalance: tuple[float, ...]

    @property
    def means(self) -> dict[str, float]:
        """Each loss, averaged over the layers."""
        return {name: sum(values) / len(values) for name, values in self.losses.items()}

    @property
    def worst(self) -> tuple[float, int]:
        """(the largest imbalance, the number of its layer)"""
        return max(zip(self.imbalance, self.layers, strict=True))


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, the same on every rank."""

    iteration: int
    loss: float  # mean over the global batch's unmasked tokens; NaN without any
    grad_norm: float
    loss_scale: float
    learning_rate: float  # of the next step, as printed by Megatron-LM
    global_batch_size: int  # samples
    tokens: int  # tokens read in this step over all replicas, padding of rows included
    seconds: float
    skipped: bool = False
    nan: bool = False
    num_zeros: int | None = None
    params_norm: float | None = None
    has_labels: bool = True  # whether the global batch has unmasked tokens
    further_losses: tuple[float, ...] = ()  # as `loss`, of each depth of multi-token prediction
    experts: ExpertReport | None = None  # balance losses and load, of a model with experts
    consumed_samples: int = 0  # training samples read up to the end of this step
    stop_wanted: bool = False  # something asked a rank to stop, before the end of this step
    sample_wanted: bool = False  # a rank found its step remarkably long
    save_remaining: int | None = None  # parts of a background save that the slowest rank has left; None without one
    timers: dict[str, float] = field(default_factory=dict)  # part of the step -> seconds on this rank
    packed_rows: int | None = None  # rows of --seq-length tokens in which samples are packed; None: a row per sample

    @property
    def rows(self) -> int:
        """Rows of --seq-length tokens that the step has computed."""
        return self.global_batch_size if self.packed_rows is None else self.packed_rows
