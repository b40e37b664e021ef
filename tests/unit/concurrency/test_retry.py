"""Retry until a server is available again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from penstock.concurrency import retry
from penstock.concurrency.retry import STARTUP_BACKOFF, retry_until_available
from penstock.core.retry import Backoff
from penstock.errors import KafkaUnavailable, PostgresUnavailable, Throttled, UnknownType

BACKOFF = Backoff(base_s=0.1, factor=2, max_s=0.5, jitter=0.0)


class Clock:
    """Stands in for time: sleeping advances it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.delays_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        self.delays_s.append(delay_s)
        self.now_s += delay_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr(retry.time, "monotonic", clock.monotonic)
        patch.setattr(retry.asyncio, "sleep", clock.sleep)
        yield clock


async def _run(
    errors: list[Exception | None],
    clock: Clock,
    *,
    took_s: float = 0.0,
    restarts_after_s: float | None = None,
) -> None:
    async def work() -> None:
        error = errors.pop(0)
        if error is not None:
            clock.now_s += took_s
            raise error

    await retry_until_available(
        work, waiting_for="a test", backoff=BACKOFF, restarts_after_s=restarts_after_s
    )


async def test_delays_grow_to_the_longest(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is away for long is asked ever more rarely; each retry leaves a record with its
    event."""
    with caplog.at_level(logging.WARNING):
        await _run([*[KafkaUnavailable("away")] * 5, None], clock)
    assert clock.delays_s == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])
    found = {(record.event, record.waiting_for, record.error) for record in caplog.records}  # type: ignore[attr-defined]
    assert found == {("retry_scheduled", "a test", "away")}


async def test_a_lasting_attempt_starts_the_delays_anew(clock: Clock) -> None:
    """A connection that held for long had reached its server: the next attempt follows soon."""
    errors = [*[PostgresUnavailable("away")] * 3, None]
    await _run(errors, clock, took_s=10.0, restarts_after_s=5.0)
    assert clock.delays_s == pytest.approx([0.1, 0.1, 0.1])


async def test_a_slow_failure_lengthens_the_delays(clock: Clock) -> None:
    """A connection that times out has reached no server, however long it took."""
    await _run([*[PostgresUnavailable("away")] * 3, None], clock, took_s=10.0)
    assert clock.delays_s == pytest.approx([0.1, 0.2, 0.4])


async def test_an_error_that_stays_the_same_is_logged_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage of an hour leaves a warning for each new error, and not for each attempt."""
    away, refused = KafkaUnavailable("away"), KafkaUnavailable("refused")
    with caplog.at_level(logging.WARNING):
        await _run([away, away, away, refused, refused, None], clock)
    assert [record.error for record in caplog.records] == ["away", "refused"]  # type: ignore[attr-defined]


async def test_a_server_that_throttles_names_the_delay(clock: Clock) -> None:
    """Retry-After counts instead of the back-off, and does not lengthen it."""
    busy = Throttled("busy", retry_after_s=7.0)
    await _run([KafkaUnavailable("away"), busy, KafkaUnavailable("away"), None], clock)
    assert clock.delays_s == pytest.approx([0.1, 7.0, 0.2])


async def test_other_errors_leave_at_once(clock: Clock) -> None:
    """Only errors that may pass are worth another attempt."""
    with pytest.raises(UnknownType):
        await _run([UnknownType("no such type")], clock)
    assert clock.delays_s == []


async def test_a_deadline_ends_the_retries(clock: Clock) -> None:
    """The last error leaves once the time is up."""

    async def work() -> None:
        raise KafkaUnavailable("starting")

    with pytest.raises(KafkaUnavailable, match="starting"):
        await retry_until_available(work, waiting_for="a test", backoff=STARTUP_BACKOFF, within_s=1.0)
    assert 1.0 < clock.now_s < 1.5


async def test_a_cancellation_ends_the_retries() -> None:
    """A process that stops does not wait for a server that is away."""
    tried = asyncio.Event()

    async def work() -> None:
        tried.set()
        raise KafkaUnavailable("away")

    task = asyncio.create_task(retry_until_available(work, waiting_for="a test"))
    await tried.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
