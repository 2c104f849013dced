"""Reports flags without effect: one that only matters under a condition is named if the condition does not hold.

The conditions are part of the field, as its `needs` (config/flag.py). A flag of Megatron-LM is then a row of the start-up
table, because its users' command lines hold many such flags (--save-interval without --save). A flag of this program's
own is an error, and so is any with --strict-flags.

Only flags that the user typed are checked (`RunConfig.given`): defaults and presets may hold values that this run does
not use. A flag that asks for the run's behaviour anyway is honoured, and so needs nothing: --no-load-optim with
--finetune, for example. Conditions on the number of processes or on the machine are rows of the start-up table instead
(--sequence-parallel with tp 1). --skip-train asks for less than the script describes, so flags of training may stay.
"""

from __future__ import annotations

from megatron.config.flag import Need, flag_of
from megatron.config.flag_table import read_flags
from megatron.config.model import RUNTIME_FIELDS
from megatron.config.note import Note
from megatron.config.run import RunConfig, flag_fields, flag_name

# For all fields of a model's shape, before their own conditions: Megatron-LM also takes the checkpoint's.
_SHAPE_OF_FLAGS = Need(
    lambda run: not run.checkpoint.use_checkpoint_args,
    "--use-checkpoint-args takes the model's shape from the checkpoint",
    "remove --use-checkpoint-args",
)


def unneeded(run: RunConfig) -> dict[str, Need]:
    """Returns the fields of typed flags that have no effect in this run, with the first condition that fails."""
    found: dict[str, Need] = {}
    for name, (part, spec) in flag_fields().items():
        flag = flag_of(spec)
        if name not in run.given or flag is None:
            continue
        is_shape = part == "model" and name not in RUNTIME_FIELDS
        missing = [need for need in (_SHAPE_OF_FLAGS,) * is_shape + flag.needs if not need.holds(run)]
        if missing:
            found[name] = missing[0]
    return found


def own_flags_have_an_effect(run: RunConfig) -> str | None:
    """A typed flag that only this program has changes the behaviour of the run."""
    for name, need in unneeded(run).items():
        if run.logging.strict_flags or flag_name(name) not in read_flags():
            return f"{flag_name(name)} has no effect: {need.reason_in(run)}; remove it, or {need.fix}"
    return None


def notes(run: RunConfig) -> list[Note]:
    """Returns Megatron-LM's typed flags without effect in this run: it ignores them, too, and scripts give them."""
    return [
        Note(flag_name(name), _shown(run.value(name)), "unused", need.reason_in(run))
        for name, need in unneeded(run).items()
        if flag_name(name) in read_flags()
    ]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
