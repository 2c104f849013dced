"""Bytes in use, followed through a list of events: what is taken, what is freed, and where the most of it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Profile:
    """What a piece of work does to memory, whatever was in use before it.

    net: bytes by kind that it leaves behind, negative where it frees more than it takes. top: bytes by kind, on top of
    what was there before, when it uses most; moment: its name.
    """

    net: Mapping[str, int]
    top: Mapping[str, int]
    moment: str

    @property
    def kept(self) -> int:
        """Bytes left behind."""
        return sum(self.net.values())

    @property
    def peak(self) -> int:
        """The most bytes in use at once, on top of what was there before."""
        return sum(self.top.values())


class Tally:
    """Bytes by kind, now and when their sum was largest."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.top: Counter[str] = Counter()
        self.moment = ""  # of `top`
        self._level = self._peak = 0
        self._doing: list[str] = []

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """A peak in the body is named after it, and after those that are around it."""
        self._doing.append(what)
        yield
        self._doing.pop()

    def take(self, kind: str, size: int) -> int:
        """`size` more bytes are in use; returns it."""
        self.now[kind] += size
        self._level += size
        self._look()
        return size

    def free(self, kind: str, size: int) -> None:
        """The opposite of `take`."""
        self.now[kind] -= size
        self._level -= size

    def brief(self, kind: str, size: int) -> None:
        """Taken and freed again."""
        self.take(kind, size)
        self.free(kind, size)

    def play(self, profile: Profile) -> None:
        """The events of a profile."""
        if self._level + profile.peak > self._peak:
            self._peak = self._level + profile.peak
            self.top = Counter(self.now)
            self.top.update(profile.top)
            self.moment = ": ".join([*self._doing, profile.moment])
        self.now.update(profile.net)
        self._level += profile.kept

    def profile(self) -> Profile:
        """All events so far as one piece of work."""
        return Profile(dict(self.now), dict(self.top), self.moment)

    def _look(self) -> None:
        if self._level > self._peak:
            self._peak, self.top, self.moment = self._level, Counter(self.now), ": ".join(self._doing)


def profile_of(work: Callable[[Tally], None]) -> Profile:
    """What the events that `work` reports come to."""
    tally = Tally()
    work(tally)
    return tally.profile()
