"""The form of a rule: a named function of the parts of a run that it concerns, bound to the parts of one run.

Called, it returns None, or one line with the problem, the values and the fix. Rules are called in order: a later one
may rely on conditions that an earlier one has checked.
"""

from __future__ import annotations

from functools import partial

ConfigRule = partial[str | None]
