"""The targets that a process knows, in the order in which they were used. No I/O.

More than a process can remember come by in time, so those that nobody has used for longest are forgotten; what is in use
is passed over, however many there are. Each load looks at a few of them only, so that a load costs what it brings.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from penstock.callbacks.calling import Met
from penstock.callbacks.settings import CallbacksSettings
from penstock.contracts.event import Callback
from penstock.core.drain import Drain
from penstock.core.health import HealthWindow
from penstock.core.target import TargetId
from penstock.postgres.targets import Kept

# Attempts that are shown.
SHOWN = 10


class Attempt(NamedTuple):
    """An attempt as it is shown.

    Attributes:
        at_s: when it ended, seconds since 1970.
        callback: its id.
        attempt: which one, from 1.
        took_ms: milliseconds.
        status: what the target answered; None when it did not.
        message: what it met, in one sentence.
    """

    at_s: float
    callback: str
    attempt: int
    took_ms: int
    status: int | None
    message: str

    @classmethod
    def of(cls, callback: Callback, met: Met, at_s: float) -> Attempt:
        """The one that a callback's call was, which ended just now."""
        took_ms = round(met.took_s * 1000)
        return cls(at_s, callback.id, callback.attempt + 1, took_ms, met.status, met.message)


class Target:
    """One target, as its judge knows it; made by `Targets`."""

    __slots__ = ("attempts", "disabled", "drain", "hanging", "partition", "rate", "window")

    def __init__(self, kept: Kept, partition: int, settings: CallbacksSettings) -> None:
        self.partition = partition
        self.disabled = kept.disabled
        self.rate = kept.rate
        self.window = HealthWindow(settings.health, kept.vitals)
        self.window.failures = kept.failures
        self.drain = Drain(settings.drain)
        self.attempts: deque[Attempt] = deque((Attempt(**kept) for kept in kept.attempts), maxlen=SHOWN)
        # Its latest call was slow; one that was kept as abnormal has to prove itself first.
        self.hanging = kept.vitals.abnormal

    def kept(self, which: TargetId, now_s: float) -> Kept:
        """What is written down of it.

        Args:
            which: its name.
            now_s: seconds since 1970.
        """
        return Kept(
            target=which,
            vitals=self.window.vitals(now_s),
            failures=self.window.failures,
            attempts=[attempt._asdict() for attempt in self.attempts],
        )


class Known:
    """Targets by what names them, the one used last at the end."""

    def __init__(self) -> None:
        self._targets: OrderedDict[TargetId, Target] = OrderedDict()
        # How many targets an address is.
        self._addresses: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def addresses(self) -> int:
        """Different URLs among them."""
        return len(self._addresses)

    def __contains__(self, which: object) -> bool:
        return which in self._targets

    def values(self) -> Iterator[Target]:
        """All of them."""
        return iter(self._targets.values())

    def get(self, which: TargetId) -> Target | None:
        """What is known of one, without using it."""
        return self._targets.get(which)

    def use(self, which: TargetId) -> Target | None:
        """What is known of one, which is the one used last from now on."""
        target = self._targets.get(which)
        if target is not None:
            self._targets.move_to_end(which)
        return target

    def put(self, which: TargetId, target: Target) -> None:
        """Knows it, or knows it anew; attempts that were not kept yet are shown all the same."""
        before = self._targets.get(which)
        if before is not None and before.attempts:
            last = target.attempts[-1].at_s if target.attempts else 0.0
            target.attempts.extend(one for one in before.attempts if one.at_s > last)
        self._addresses[which.url] += before is None
        self._targets[which] = target
        self._targets.move_to_end(which)

    def drop(self, which: TargetId) -> None:
        """Knows it no more."""
        if self._targets.pop(which, None) is not None:
            self._left(which)

    def drop_all_of(self, partitions: Collection[int]) -> None:
        """Knows none of these partitions any more."""
        for which in [which for which, target in self._targets.items() if target.partition in partitions]:
            self.drop(which)

    def forget(self, most: int, looks: int, in_use: Callable[[TargetId, Target], bool]) -> None:
        """Forgets those unused for longest, until there are no more than `most`.

        Args:
            most: as many may stay.
            looks: at how many to look now, at most.
            in_use: whether one must stay; it counts as used just now, so that others are looked at next.
        """
        for _ in range(min(looks, len(self._targets) - most)):
            which, target = next(iter(self._targets.items()))
            if in_use(which, target):
                self._targets.move_to_end(which)
            else:
                self.drop(which)

    def _left(self, which: TargetId) -> None:
        self._addresses[which.url] -= 1
        if not self._addresses[which.url]:
            del self._addresses[which.url]
