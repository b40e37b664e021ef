"""What the service counts of itself, in plain numbers, and what it can tell of its present state (`penstock.metrics`)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from penstock import metrics
from penstock.callbacks.lanes import Lanes
from penstock.callbacks.ledger import Ledger
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.slow_pool import SlowPool
from penstock.callbacks.targets import Targets
from penstock.core.delivery import Dead, Delivered, Fate
from penstock.metrics import Sample

_BUCKETS = metrics.CALLBACK_SECONDS.buckets


class PathFigures:
    """What has happened on one of the two paths.

    Attributes:
        taken: records taken in.
        slow: calls that turned out slow.
        outcomes: calls that have ended, by what comes of them.
        seconds: of these, in all.
        counts: of these, by the bucket of their seconds.
    """

    __slots__ = ("counts", "outcomes", "seconds", "slow", "taken")

    def __init__(self) -> None:
        self.taken = 0
        self.slow = 0
        self.outcomes = dict.fromkeys(("delivered", "retried", "dead"), 0)
        self.seconds = 0.0
        self.counts = [0] * (len(_BUCKETS) + 1)

    def ended(self, fate: Fate, took_s: float, *, slow: bool) -> None:
        """A call has ended."""
        outcome = (
            "delivered" if isinstance(fate, Delivered) else "dead" if isinstance(fate, Dead) else "retried"
        )
        self.outcomes[outcome] += 1
        self.seconds += took_s
        self.counts[bisect_left(_BUCKETS, took_s)] += 1
        self.slow += slow


class Figures:
    """All figures of the service.

    Args:
        settings: for the sizes of pools.
        normal: lanes of the normal path.
        diverted: lanes of the diverted one.
        slow: calls that have turned out slow.
        ledger: knows what is held.
        targets: and their health.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        *,
        normal: Lanes,
        diverted: Lanes,
        slow: SlowPool,
        ledger: Ledger,
        targets: Targets,
    ) -> None:
        self._settings = settings
        self._lanes = {"normal": normal, "diverted": diverted}
        self._slow = slow
        self._ledger = ledger
        self._targets = targets
        self._paths = {path: PathFigures() for path in self._lanes}
        self._by_lanes = {id(lanes): self._paths[path] for path, lanes in self._lanes.items()}

    def of(self, lanes: Lanes) -> PathFigures:
        """Those of the path with these lanes."""
        return self._by_lanes[id(lanes)]

    def samples(self) -> Iterator[Sample]:
        """Everything as it is now."""
        for path, figures in self._paths.items():
            yield Sample(metrics.CALLBACK_TAKEN, figures.taken, (path,))
            for outcome, count in figures.outcomes.items():
                yield Sample(metrics.CALLBACK_CALLS, count, (path, outcome))
            yield Sample(metrics.CALLBACK_SLOW, figures.slow, (path,))
            yield Sample(metrics.CALLBACK_SECONDS, figures.seconds, (path,), figures.counts)
            yield Sample(metrics.CALLBACK_WAITING, self._lanes[path].waiting, (path,))
        yield Sample(metrics.CALLBACK_HELD, self._ledger.held)
        yield Sample(metrics.CALLBACK_GRANTED, self._targets.granted)
        settings = self._settings
        for pool, slots, used in (
            ("normal", settings.callback_slots, self._lanes["normal"].held),
            ("diverted", settings.callback_diverted_slots, self._lanes["diverted"].held),
            ("slow", settings.callback_slow_slots, len(self._slow)),
        ):
            yield Sample(metrics.CALLBACK_SLOTS, slots, (pool,))
            yield Sample(metrics.CALLBACK_SLOTS_USED, used, (pool,))
        states = Counter(self._targets.states())
        for state in ("normal", "abnormal", "disabled"):
            yield Sample(metrics.CALLBACK_TARGETS, states[state], (state,))
        yield Sample(metrics.CALLBACK_SUSPICION, int(self._targets.suspicious))
