"""The metrics of the callbacks service (`penstock.metrics`)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from penstock import metrics
from penstock.callbacks.lanes import Lanes
from penstock.callbacks.ledger import Ledger
from penstock.callbacks.requeuer import Drainer, Requeuer
from penstock.callbacks.router import Router
from penstock.callbacks.secret_cache import SecretCache
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.target_cache import TargetCache
from penstock.core.delivery import Dead, Delivered, Outcome
from penstock.metrics import Sample

_BUCKETS = metrics.CALLBACK_SECONDS.buckets


class PathMetrics:
    """Counters of one path.

    Attributes:
        received: callbacks received.
        slow: calls that turned out slow.
        outcomes: ended calls, by outcome.
        seconds: their total duration.
        counts: their number, by bucket of their duration.
    """

    __slots__ = ("counts", "outcomes", "received", "seconds", "slow")

    def __init__(self) -> None:
        self.received = 0
        self.slow = 0
        self.outcomes = dict.fromkeys(("delivered", "retried", "dead"), 0)
        self.seconds = 0.0
        self.counts = [0] * (len(_BUCKETS) + 1)

    def record_call(self, outcome: Outcome, took_s: float, *, slow: bool) -> None:
        """Counts a call that has ended."""
        label = (
            "delivered"
            if isinstance(outcome, Delivered)
            else "dead"
            if isinstance(outcome, Dead)
            else "retried"
        )
        self.outcomes[label] += 1
        self.seconds += took_s
        self.counts[bisect_left(_BUCKETS, took_s)] += 1
        self.slow += slow


class Metrics:
    """All metrics of the service.

    Args:
        settings: for the sizes of pools.
        router: has the lanes of both paths, and the slow calls.
        ledger: counts held callbacks.
        cache: has the state of the targets.
        drainer: counts drained callbacks.
        secret_cache: counts secrets that cannot be used.
        requeuer: counts the callbacks of all processes, if it is the active one.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        router: Router,
        ledger: Ledger,
        cache: TargetCache,
        drainer: Drainer,
        secret_cache: SecretCache,
        requeuer: Requeuer,
    ) -> None:
        self._settings = settings
        self._lanes = {"normal": router.normal, "diverted": router.diverted}
        self._slow_pool = router.slow_pool
        self._ledger = ledger
        self._cache = cache
        self._drainer = drainer
        self._secret_cache = secret_cache
        self._requeuer = requeuer
        self._paths = {path: PathMetrics() for path in self._lanes}
        self._by_lanes = {id(lanes): self._paths[path] for path, lanes in self._lanes.items()}

    def of(self, lanes: Lanes) -> PathMetrics:
        """The counters of the path with these lanes."""
        return self._by_lanes[id(lanes)]

    def samples(self) -> Iterator[Sample]:
        """The current values."""
        for path, counters in self._paths.items():
            yield Sample(metrics.CALLBACK_RECEIVED, counters.received, (path,))
            for outcome, count in counters.outcomes.items():
                yield Sample(metrics.CALLBACK_CALLS, count, (path, outcome))
            yield Sample(metrics.CALLBACK_SLOW, counters.slow, (path,))
            yield Sample(metrics.CALLBACK_SECONDS, counters.seconds, (path,), counters.counts)
            yield Sample(metrics.CALLBACK_WAITING, self._lanes[path].waiting, (path,))
        yield Sample(metrics.CALLBACK_HELD, self._ledger.held)
        yield Sample(metrics.CALLBACK_REQUEUED, self._drainer.drained)
        settings = self._settings
        for pool, slots, used in (
            ("normal", settings.callback_slots, self._lanes["normal"].slots_in_use),
            ("diverted", settings.callback_diverted_slots, self._lanes["diverted"].slots_in_use),
            ("slow", settings.slow_slots, len(self._slow_pool)),
        ):
            yield Sample(metrics.CALLBACK_SLOTS, slots, (pool,))
            yield Sample(metrics.CALLBACK_SLOTS_USED, used, (pool,))
        states = Counter(self._cache.states())
        for state in ("normal", "abnormal", "disabled"):
            yield Sample(metrics.CALLBACK_TARGETS, states[state], (state,))
        yield Sample(metrics.CALLBACK_HOSTS_ABNORMAL, self._cache.hosts.abnormal)
        yield Sample(metrics.CALLBACK_SELF_CHECK, int(self._cache.in_self_check))
        yield Sample(metrics.CALLBACK_SECRETS_UNUSABLE, self._secret_cache.unusable)
        yield from self._requeuer.samples()
