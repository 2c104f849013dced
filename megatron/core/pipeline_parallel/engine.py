"""Runs a schedule. The engine knows actions and one callable; it never looks into a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from megatron.core.pipeline_parallel.schedule import Action, Kind


def run(
    actions: Sequence[Action], forward: Callable[[int], Tensor], backward: Callable[[int, Tensor], None] | None = None
) -> list[Tensor]:
    """Run the actions of one stage and return the outputs of its microbatches, detached, in microbatch order.

    `forward(m)` computes the stage's output for microbatch m; on the last stage a scalar. `backward(m, output)`
    differentiates it. An output and its graph live from its FORWARD to its BACKWARD.
    """
    alive: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    for action in actions:
        if action.kind is Kind.FORWARD:
            alive[action.microbatch] = forward(action.microbatch)
            outputs[action.microbatch] = alive[action.microbatch].detach()
        else:
            assert backward is not None
            backward(action.microbatch, alive.pop(action.microbatch))
    return [outputs[m] for m in sorted(outputs)]
