"""The sizes of a run's datasets, and a warning if their order changes when a run is continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.base.log import get_logger
from megatron.config.batch_schedule import BatchSchedule
from megatron.config.data import DataConfig
from megatron.config.train import EvalConfig, TrainConfig
from megatron.core.datasets.sample import Splits
from megatron.training.changed_settings import name_blend, name_split
from megatron.training.state import TrainState

log = get_logger(__name__)


def dataset_sizes(
    data: DataConfig, train: TrainConfig, evaluation: EvalConfig, batches: BatchSchedule, state: TrainState
) -> Splits[int | None]:
    """Returns the samples that training, all evaluations and the test will have read at the end of the run.

    Samples read before a resume count even if batches or evaluations had another size then. With
    --data-order megatron the flags alone decide, as in Megatron-LM.
    """
    if data.data_order == "megatron":
        return megatron_sizes(train, evaluation, batches)
    per_evaluation = evaluation.eval_iters * batches.final_global_batch_size
    if train.skip_train:
        return Splits(None, per_evaluation, per_evaluation)
    every, last = evaluation.eval_interval, batches.last_iteration(state.iteration, state.consumed_samples)
    evaluations = (last // every - state.iteration // every if every else 0) + 1
    valid = state.consumed_valid_samples + evaluations * per_evaluation
    left = batches.samples_left(state.iteration, state.consumed_samples)
    return Splits(state.consumed_samples + left, valid, per_evaluation)


def megatron_sizes(train: TrainConfig, evaluation: EvalConfig, batches: BatchSchedule) -> Splits[int | None]:
    """The samples that Megatron-LM asks its datasets for, which decide their order; None is not read.

    Training: --train-samples, or --train-iters global batches. Validation: an evaluation at every interval and one at
    the end. Test: one evaluation.
    """
    per_evaluation = evaluation.eval_iters * batches.final_global_batch_size
    if train.skip_train:
        return Splits(None, per_evaluation, per_evaluation)
    samples = train.train_samples or batches.total_iterations * batches.final_global_batch_size
    every = evaluation.eval_interval
    evaluations = (batches.total_iterations // every if every else 0) + 1
    return Splits(samples, evaluations * per_evaluation, per_evaluation)


def warn_of_another_order(path: Path, saved: dict[str, Any], config: dict[str, dict[str, Any]], dp: int) -> None:
    """Logs the settings because of which this run's samples do not continue those of a checkpoint's run.

    saved: the checkpoint's state. config: of this run, as a checkpoint holds it. dp: replicas of this run. Says nothing
    unless one of the two reads in Megatron-LM's order: the stable one goes on under another length and other batches.
    """
    old = _order_of(saved["config"], saved["layout"]["dp"])
    new = _order_of(config, dp)
    if "megatron" not in (old["--data-order"], new["--data-order"]):
        return
    differences = [
        f"{name} {old.get(name)} there and {new.get(name)} here"
        for name in (old | new)
        if old.get(name) != new.get(name)
    ]
    if differences:
        log.warning(
            "the order of samples is another one than before %s: %s; with --data-order megatron each of these changes "
            "it, so this run reads some samples again and never reads some others",
            *(path, ", ".join(differences)),
        )


def _order_of(config: dict[str, dict[str, Any]], dp: int) -> dict[str, Any]:
    """Returns the settings that determine the order of samples, by flag, from a configuration in a checkpoint.

    Datasets count by name: a folder may have moved.
    """
    data, train = config["data"], config["train"]
    batch = train["global_batch_size"] or train["micro_batch_size"] * dp
    order = {
        "--data-order": data.get("data_order", "stable"),
        "--train-samples": train["train_samples"] or (train["train_iters"] or 0) * batch,
        "--seed": train["seed"],
        "--seq-length": data["seq_length"],
        "--split": name_split(data["split"]) if data["data_path"] else "of whole datasets",
        "--data-path": name_blend(data["data_path"] or data["train_data_path"], "--data-path"),
        "--dataloader-type": data["dataloader_type"],
    }
    if data["dataloader_type"] == "cyclic":
        order |= {"--micro-batch-size": train["micro_batch_size"], "data-parallel replicas": dp}
        order["--no-data-sharding"] = not data.get("data_sharding", True)
    return order
