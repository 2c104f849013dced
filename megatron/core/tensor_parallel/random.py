"""Random state for dropout: which ranks draw the same numbers and which must not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.groups import Groups


class RngTracker:
    """Two streams of the device's generator.

    "replicated": the same on all tp ranks, for activations that every tp rank holds whole. "sharded": different on each
    tp rank, for activations sharded over tp (heads, sequence shards). Both differ over dp, cp and pp. Dropout masks
    therefore depend on the layout; everything else in a run does not.

    A thread that replays a snapshot draws from states of its own, because a forward may go on in another thread
    meanwhile (core/streams/turns.py).
    """

    STREAMS = ("replicated", "sharded")

    def __init__(self, seed: int, groups: Groups, device: torch.device) -> None:
        at = groups.mesh.coordinates(groups.rank)
        replica = (at["pp"] * groups.mesh.dp + at["dp"]) * groups.mesh.cp + at["cp"]
        self._device = device
        self._states: dict[str, Tensor] = {}
        self._replayed = threading.local()
        for stream, number in (("replicated", 0), ("sharded", 1 + at["tp"])):
            generator = torch.Generator(device)
            generator.manual_seed(seed + 1_000_003 * (replica + 1) + 7919 * number)
            self._states[stream] = generator.get_state()

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Random operations of the body draw from stream `name`; the default stream is left as it was."""
        before, states = self._get(), self._current
        self._set(states[name])
        try:
            yield
        finally:
            states[name] = self._get()
            self._set(before)

    def snapshot(self) -> dict[str, Tensor]:
        """For `replay`. States are replaced, never changed: nothing is copied."""
        return dict(self._current)

    @contextlib.contextmanager
    def replay(self, snapshot: dict[str, Tensor]) -> Iterator[None]:
        """Streams of the body draw again what they drew after `snapshot` was taken, and are left as they were."""
        before, self._replayed.states = getattr(self._replayed, "states", None), dict(snapshot)
        try:
            yield
        finally:
            self._replayed.states = before

    def state(self) -> dict[str, Tensor]:
        """Generator states (uint8 tensors on the CPU) by stream, for the checkpoint."""
        return {name: state.clone() for name, state in self._states.items()}

    def load_state(self, states: dict[str, Tensor]) -> None:
        """Inverse of `state`."""
        self._states = {name: states[name].clone() for name in self.STREAMS}

    @property
    def _current(self) -> dict[str, Tensor]:
        replayed: dict[str, Tensor] | None = getattr(self._replayed, "states", None)
        return self._states if replayed is None else replayed

    def _get(self) -> Tensor:
        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()

    def _set(self, state: Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)
        else:
            torch.set_rng_state(state)
