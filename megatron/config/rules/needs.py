"""Reports flags without effect: one that only matters under a condition is named if the condition does not hold.

The conditions are part of the field, as its `needs` (config/flag.py). A flag of Megatron-LM is then a row of the
start-up table, because its users' command lines hold many such flags (--save-interval without --save). A flag of this
program's own is an error, and so is any with --strict-flags.

Only flags that the user typed are checked (`RunConfig.given`): defaults and presets may hold values that this run does
not use. A flag that asks for the run's behaviour anyway is honoured, and so needs nothing: --no-load-optim with
--finetune, for example. Conditions on the number of processes or on the machine are rows of the start-up table instead
(--sequence-parallel with tp 1). --skip-train asks for less than the script describes, so flags of training may stay.
"""

from __future__ import annotations

from megatron.config.features.feature import Note
from megatron.config.flag import Need, flag_of
from megatron.config.flag_table import read_flags
from megatron.config.model import RUNTIME_FIELDS
from megatron.config.run import RunConfig, flag_fields, flag_name

# For all fields of a model's shape, before their own conditions: Megatron-LM also takes the checkpoint's.
_SHAPE_OF_FLAGS = Need(
    lambda run: not run.checkpoint.use_checkpoint_args,
    "--use-checkpoint-args takes the model's shape from the checkpoint",
    "give one of the two",
)


def unneeded(run: RunConfig) -> dict[str, Need]:
    """Returns the fields of typed flags that have no effect in this run, with the first condition that fails."""
    typed = [name for name in flag_fields() if name in run.given]
    return {name: need for name in typed if (need := missing_need(run, name)) is not None}


def missing_need(run: RunConfig, name: str) -> Need | None:
    """Returns the first condition of the flag of this field that fails in a run, or None."""
    flag = flag_of(flag_fields()[name][1])
    assert flag is not None
    comes_from_file = _defines_model(name) and not run.checkpoint.takes(name)
    return next((need for need in (_SHAPE_OF_FLAGS,) * comes_from_file + flag.needs if not need.holds(run)), None)


def own_flags_have_an_effect(run: RunConfig) -> str | None:
    """A typed flag that only this program has changes the behaviour of the run."""
    typed = (name for name in flag_fields() if name in run.given)
    return next((problem for name in typed if (problem := flag_has_an_effect(run, name))), None)


def flag_has_an_effect(run: RunConfig, name: str) -> str | None:
    """The typed flag of this field changes the behaviour of the run, if only this program has it."""
    if not run.logging.strict_flags and flag_name(name) in read_flags():
        return None
    need = missing_need(run, name)
    if need is None:
        return None
    # Whoever typed a part of the model wants that model, and would train another one without the flag.
    fix = need.fix if _defines_model(name) else f"remove it, or {need.fix}"
    return f"{flag_name(name)} has no effect: {need.reason_in(run)}; {fix}"


def notes(run: RunConfig) -> list[Note]:
    """Returns Megatron-LM's typed flags without effect in this run: it ignores them, too, and scripts give them."""
    return [
        Note(flag_name(name), _shown(run.value(name)), "unused", need.reason_in(run))
        for name, need in unneeded(run).items()
        if flag_name(name) in read_flags()
    ]


def _defines_model(name: str) -> bool:
    """Returns whether the flag of this field is part of the function that is trained."""
    return flag_fields()[name][0] == "model" and name not in RUNTIME_FIELDS


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
