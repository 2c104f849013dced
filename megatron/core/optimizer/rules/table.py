"""Every update rule by its name in config/update_rules.py."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.config.update_rules import ADAM, SGD
from megatron.core.optimizer.rules import adamw, sgd
from megatron.core.optimizer.update_rule import UpdateRule

UPDATE_RULES: Mapping[str, type[UpdateRule]] = {ADAM: adamw.AdamW, SGD: sgd.SGD}
