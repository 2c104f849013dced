"""The parts of a flat tensor that an optimizer updates alike."""

from __future__ import annotations

from typing import NamedTuple


class UpdateRun(NamedTuple):
    """The elements from start to stop, which have the same learning rate and weight decay.

    decay: weight decay applies. decoupled: the other learning rate of a step applies.
    """

    start: int
    stop: int
    decay: bool
    decoupled: bool
