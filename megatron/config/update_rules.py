"""The update rules of optimizers as data: all that flags, memory plans and checkpoints need to know of them.

Their tensors are in core/optimizer/rules. docs/adding_an_optimizer.md adds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RuleSpec:
    """An update rule without its tensors.

    state: name of each tensor of state, with an element per element of the model -> the field of OptimizerConfig that
    holds its dtype; None: it is fp32. updates_on_cpu: the CPU has a kernel for chunks of state in host memory.
    counts_updates: the update depends on the number of updates before.
    """

    state: Mapping[str, str | None]
    updates_on_cpu: bool = False
    counts_updates: bool = False

    @property
    def has_dtypes(self) -> bool:
        """Whether flags choose the dtype of some state."""
        return any(field is not None for field in self.state.values())


ADAM, SGD = "adam", "sgd"
RULES: Mapping[str, RuleSpec] = {
    ADAM: RuleSpec(
        {"exp_avg": "exp_avg_dtype", "exp_avg_sq": "exp_avg_sq_dtype"}, updates_on_cpu=True, counts_updates=True
    ),
    SGD: RuleSpec({"momentum_buffer": None}),
}
HYBRID = "hybridadam"  # adam with flags of its own for offload


def rule_name(optimizer: str) -> str:
    """Returns the rule of a value of --optimizer."""
    return ADAM if optimizer == HYBRID else optimizer


def rules_that(*, update_on_cpu: bool = False, have_dtypes: bool = False) -> str:
    """Returns the names of the rules with these properties, joined by "or"."""
    names = (
        name for name, rule in RULES.items() if rule.updates_on_cpu >= update_on_cpu and rule.has_dtypes >= have_dtypes
    )
    return " or ".join(names)
