"""Log-probabilities of all pairs under the reference, in a file that is written once.

With them a step has one forward less, and no copy of the first weights is held.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron.base.errors import DataError
from megatron.base.log import get_logger
from megatron.base.write_file import replace_file
from megatron.core.comm.collectives import gather_objects
from megatron.rl.answers import pack, shares
from megatron.rl.forward import current_log_probabilities
from megatron.rl.preference_data import PreferencePair
from megatron.rl.reference import ReferenceWeights
from megatron.training.together import together
from megatron.training.trainer import Trainer

FLAG = "--precompute-ref-log-probs"
# Mean difference per token of the same model: more than that of bf16 under another layout, and less than training makes.
TOLERANCE = 0.02
log = get_logger(__name__)


def add_reference(trainer: Trainer, pairs: Sequence[PreferencePair], path: Path) -> None:
    """Gives each pair the log-probabilities of its answers under the reference: those in the file, which is written if
    it is not there.

    Collective over the world. Raises DataError for a file of other pairs or of another reference.
    """
    world, is_anew = trainer.groups.world, trainer.state.iteration == 0
    key = digest(pairs, trainer.run.rl.rollout_temperature)
    if all(gather_objects(path.is_file(), world)):
        values = together(world, lambda: read(path, key))
        if is_anew:
            _check_reference(trainer, pairs, values, path)
    else:
        reference = None if is_anew else ReferenceWeights(trainer, is_anew=False)
        with nullcontext() if reference is None else reference.in_place():
            values = log_probabilities_of(trainer, pairs)
        together(world, lambda: write(path, key, values) if world.rank == 0 else None)
        log.info("%s: log-probabilities of %d pairs are written", path, len(pairs))
    begin = 0
    for pair in pairs:
        middle = begin + len(pair.chosen.ids)
        end = middle + len(pair.rejected.ids)
        pair.reference = values[begin:middle], values[middle:end]
        begin = end


def log_probabilities_of(trainer: Trainer, pairs: Sequence[PreferencePair]) -> npt.NDArray[np.float32]:
    """Returns the log-probabilities of the tokens of all answers under the current weights, pair after pair.

    Communication: that of an evaluation and a gather over dp, for each global batch of pairs.
    """
    run, dp, count = trainer.run, trainer.groups.dp, trainer.batches.final_global_batch_size
    assert run.train.micro_batch_size and run.data.seq_length
    parts = []
    for first in range(0, len(pairs), count):
        packed = pack(
            [
                [answer for pair in share for answer in (pair.chosen, pair.rejected)]
                for share in shares(pairs[first : first + count], dp.size)
            ],
            dp.rank,
            seq_length=run.data.seq_length,
            micro_batch_size=run.train.micro_batch_size,
            device=trainer.device,
        )
        values = packed.values_of_tokens(current_log_probabilities(trainer, packed.batches))
        parts += gather_objects(values.float().cpu().numpy(), dp)
    return np.concatenate(parts)


def digest(pairs: Sequence[PreferencePair], temperature: float) -> str:
    """Returns a text that depends on the tokens of all pairs, on their order and on the temperature."""
    result = hashlib.sha256(repr(temperature).encode())
    for pair in pairs:
        for answer in (pair.chosen, pair.rejected):
            result.update(np.array([-1, *answer.prompt_ids, -1, *answer.ids], np.int32).tobytes())
    return result.hexdigest()


def write(path: Path, key: str, values: npt.NDArray[np.float32]) -> None:
    """Writes a file that is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(content, key=np.array(key), values=values)
    replace_file(path, content.getvalue())


def read(path: Path, key: str) -> npt.NDArray[np.float32]:
    """Returns the values of a file. Raises DataError for one of other pairs."""
    try:
        with np.load(path, allow_pickle=False) as file:
            stored, values = str(file["key"]), file["values"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{FLAG} {path} cannot be read: {error}; remove it, and it is written again") from error
    if stored != key:
        raise DataError(
            f"{FLAG} {path} has log-probabilities of other pairs, or for another --rl-default-temperature; give "
            "another file for these, or remove it"
        )
    return np.asarray(values, np.float32)


def _check_reference(
    trainer: Trainer, pairs: Sequence[PreferencePair], values: npt.NDArray[np.float32], path: Path
) -> None:
    """Raises DataError, on all ranks, unless the weights give the values of the first pairs."""
    computed = log_probabilities_of(trainer, pairs[: trainer.batches.final_global_batch_size])
    difference = float(np.abs(computed - values[: len(computed)]).mean())
    if difference > TOLERANCE:
        raise DataError(
            f"{FLAG} {path} is of another reference: log-probabilities of the first pairs differ by {difference:.3g} "
            "per token; give another file for this model, or remove it"
        )
