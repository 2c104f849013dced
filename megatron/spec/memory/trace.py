"""A memory trace: bytes in use, followed through a list of events, with what is in use when it is most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from megatron.config.activation_offload import OFFLOAD_MODULES

_Item = TypeVar("_Item")

# Kinds of memory, in the order of tables.
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
QUANTIZED = "FP8 weights"  # during a step
ATTENTION, MLP, NORMS, RESIDUAL, DROPOUT = "attention", "mlp", "norms", "residual", "dropout"
ROUTING = "routing"  # of tokens to experts, which recompute keeps
EMBEDDING, LOGITS, BATCH = "embedding", "logits", "batch"
CACHE = "cache"  # of the answers that are sampled
REFERENCE = "reference"  # weights with which training began, on a CPU: elsewhere they are in host memory
BACKWARD, COMMUNICATION, WORK = "backward", "communication", "work space"
ACTIVATIONS = (ATTENTION, MLP, NORMS, RESIDUAL, DROPOUT, ROUTING, EMBEDDING, LOGITS, BATCH)
KINDS = (PARAMETERS, QUANTIZED, GRADIENTS, OPTIMIZER, REFERENCE, CACHE, *ACTIVATIONS, BACKWARD, COMMUNICATION, WORK)

# Parts of a layer that save activations: those of --offload-modules; those of a layer with experts, and the routing,
# which stays; the norms behind attention and MLP, which move with those before them; and the dropout of hidden states.
ATTN_NORM, QKV_LINEAR, CORE_ATTN, ATTN_PROJ, MLP_NORM, MLP_FC1, MLP_ACT, MLP_FC2 = OFFLOAD_MODULES
SHARED_EXPERTS, ROUTER, EXPERTS = "shared_experts", "router", "experts"
POST_ATTN_NORM, POST_MLP_NORM = "post_attn_norm", "post_mlp_norm"
PARTS = (*OFFLOAD_MODULES, SHARED_EXPERTS, ROUTER, EXPERTS, ROUTING, POST_ATTN_NORM, POST_MLP_NORM, DROPOUT)


@dataclass(frozen=True)
class Profile:
    """The effect of some work on memory, whatever was in use before it.

    net: bytes by kind that it leaves behind, negative where it frees more than it takes. top: bytes by kind at its
    peak, on top of the bytes that were in use before. moment: the name of the peak. parts: the bytes left behind that a
    part of a layer saves for its backward.
    """

    net: Mapping[str, int]
    top: Mapping[str, int]
    moment: str
    parts: Mapping[str, int]

    @cached_property
    def kept(self) -> int:
        """Bytes left behind."""
        return sum(self.net.values())

    @cached_property
    def peak(self) -> int:
        """The most bytes in use at once, on top of those that were there before."""
        return sum(self.top.values())


class _Named(AbstractContextManager[None]):
    """A name is the last of a list during the body. A plan enters many bodies, so this is no generator."""

    def __init__(self, names: list[str], name: str) -> None:
        self._names, self._name = names, name

    def __enter__(self) -> None:
        self._names.append(self._name)

    def __exit__(self, *_: object) -> None:
        self._names.pop()


class MemoryTrace:
    """Bytes by kind, now and when their sum was largest; and bytes by the part of a layer that saves them."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.top: Counter[str] = Counter()
        self.parts: Counter[str] = Counter()
        self.moment = ""  # of `top`
        self._level = self._peak = 0
        self._doing: list[str] = []

    def doing(self, name: str) -> AbstractContextManager[None]:
        """A peak in the body is named `name`, after the names of the bodies around it."""
        return _Named(self._doing, name)

    def take(self, kind: str, size: int, part: str | None = None) -> None:
        """`size` more bytes are in use. part: the part of the layer that saves them."""
        self.now[kind] += size
        self._level += size
        if part is not None:
            self.parts[part] += size
        if self._level > self._peak:
            self._peak, self.top, self.moment = self._level, Counter(self.now), ": ".join(self._doing)

    def free(self, kind: str, size: int, part: str | None = None) -> None:
        """The opposite of `take`."""
        self.now[kind] -= size
        self._level -= size
        if part is not None:
            self.parts[part] -= size

    def use(self, kind: str, size: int) -> None:
        """Taken and freed again."""
        self.take(kind, size)
        self.free(kind, size)

    def replay(self, profile: Profile) -> None:
        """The events of a profile."""
        if self._level + profile.peak > self._peak:
            self._peak = self._level + profile.peak
            self.top = Counter(self.now)
            self.top.update(profile.top)
            self.moment = ": ".join([*self._doing, profile.moment] if profile.moment else self._doing)
        for kind, size in profile.net.items():
            self.now[kind] += size
        for part, size in profile.parts.items():
            self.parts[part] += size
        self._level += profile.kept

    def repeat(self, alike: Sequence[_Item], work: Callable[[Any, _Item], None]) -> None:
        """Reports `work` of this trace and each of the items, which take the same memory."""
        for item in alike:
            work(self, item)

    def profile(self) -> Profile:
        """All events so far as one profile."""
        return Profile(dict(self.now), dict(self.top), self.moment, dict(self.parts))


def profile_of(work: Callable[[MemoryTrace], None]) -> Profile:
    """The profile of the events that `work` reports."""
    trace = MemoryTrace()
    work(trace)
    return trace.profile()


class LevelTrace(MemoryTrace):
    """A trace of the sum of all kinds, several times faster: it keeps no kinds, no names and no parts.

    level: bytes in use. peak: the most at once. residual: bytes of the residual stream. routing, routing_at_peak: bytes
    of the routing of tokens, now and then.
    """

    def __init__(self) -> None:
        self.level = self.peak = self.residual = self.routing = self.routing_at_peak = 0

    def doing(self, name: str) -> AbstractContextManager[None]:
        """Names are not kept."""
        return _UNNAMED

    def take(self, kind: str, size: int, part: str | None = None) -> None:
        """See MemoryTrace."""
        self.level += size
        if kind == RESIDUAL:
            self.residual += size
        elif kind == ROUTING:
            self.routing += size
        if self.level > self.peak:
            self.peak, self.routing_at_peak = self.level, self.routing

    def free(self, kind: str, size: int, part: str | None = None) -> None:
        """See MemoryTrace."""
        self.level -= size
        if kind == RESIDUAL:
            self.residual -= size
        elif kind == ROUTING:
            self.routing -= size

    def use(self, kind: str, size: int) -> None:
        """See MemoryTrace."""
        if self.level + size > self.peak:
            self.peak, self.routing_at_peak = self.level + size, self.routing

    def replay(self, profile: Profile) -> None:
        """See MemoryTrace."""
        if self.level + profile.peak > self.peak:
            self.peak = self.level + profile.peak
            self.routing_at_peak = self.routing + profile.top.get(ROUTING, 0)
        self.level += profile.kept
        self.residual += profile.net.get(RESIDUAL, 0)
        self.routing += profile.net.get(ROUTING, 0)


_UNNAMED = nullcontext()
