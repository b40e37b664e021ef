"""A callback target in memory: its health, and its latest attempts. No I/O."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from penstock.callbacks.caller import CallResult
from penstock.callbacks.hosts import Host
from penstock.callbacks.settings import CallbacksSettings
from penstock.contracts.event import Callback
from penstock.core.drain import Drain
from penstock.core.health import HealthWindow
from penstock.core.target import TargetId
from penstock.postgres.targets import StoredTarget

# Attempts of a target that operators can see.
SHOWN_ATTEMPTS = 10


class Attempt(NamedTuple):
    """An attempt as operators see it.

    Attributes:
        at_s: when it ended, seconds since 1970.
        callback: id of the callback.
        attempt: number of the attempt, from 1.
        took_ms: duration in milliseconds.
        status: HTTP status of the answer; None without one.
        message: the result in one sentence.
    """

    at_s: float
    callback: str
    attempt: int
    took_ms: int
    status: int | None
    message: str

    @classmethod
    def of(cls, callback: Callback, result: CallResult, at_s: float) -> Attempt:
        """The attempt of a call that has just ended."""
        took_ms = round(result.took_s * 1000)
        return cls(at_s, callback.id, callback.attempt + 1, took_ms, result.status, result.message)


class Target:
    """One target in memory.

    Attributes:
        partition: of the records of its callbacks.
        disabled: whether nothing may be sent to it.
        rate: most calls per second; None without a limit.
        window: its health.
        drain: how many of its held callbacks may be drained.
        attempts: the last few.
        unresponsive: whether its latest call was slow.
        trusted: whether its latest call was answered in time.
        host: its host, which it shares with other targets.
    """

    __slots__ = (
        "attempts",
        "disabled",
        "drain",
        "host",
        "partition",
        "rate",
        "trusted",
        "unresponsive",
        "window",
    )

    def __init__(self, stored: StoredTarget, partition: int, settings: CallbacksSettings, host: Host) -> None:
        self.partition = partition
        self.host = host
        self.disabled = stored.disabled
        self.rate = stored.rate
        self.window = HealthWindow(settings.health, stored.health)
        self.window.failures = stored.failures
        self.drain = Drain(settings.drain)
        self.attempts: deque[Attempt] = deque(
            (Attempt(**attempt) for attempt in stored.attempts), maxlen=SHOWN_ATTEMPTS
        )
        # A target that was stored as abnormal must be probed first.
        self.unresponsive = stored.health.abnormal
        self.trusted = False

    def to_stored(self, target_id: TargetId, now_s: float) -> StoredTarget:
        """The state to save.

        Args:
            target_id: its identity.
            now_s: seconds since 1970.
        """
        return StoredTarget(
            target=target_id,
            health=self.window.snapshot(now_s),
            failures=self.window.failures,
            attempts=[attempt._asdict() for attempt in self.attempts],
        )
