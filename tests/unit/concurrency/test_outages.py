"""A process tells which server it waits for, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from penstock.concurrency import outages
from penstock.concurrency.outages import SERVERS, Wait, waiting_s
from penstock.concurrency.retry import retry_until_available
from penstock.core.retry import Backoff
from penstock.errors import (
    KafkaUnavailable,
    LockConflict,
    ObjectsUnavailable,
    PostgresUnavailable,
    SessionLost,
    Throttled,
)
from penstock.metrics.text_page import TextPage

AT_ONCE = Backoff(base_s=0.0, factor=1, max_s=0.0, jitter=0.0)
NOTHING = dict.fromkeys(SERVERS, 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The current time, which a test sets."""
    now_s = [100.0]
    monkeypatch.setattr(outages.time, "monotonic", lambda: now_s[0])
    return now_s


def test_a_wait_counts_from_its_first_failure_until_its_end(clock: list[float]) -> None:
    """O4: the oldest wait for each server counts. Another error begins another wait."""
    with Wait() as first, Wait() as second:
        assert waiting_s() == NOTHING
        first.begin(PostgresUnavailable("away"))
        clock[0] = 110.0
        first.begin(LockConflict("away"))
        second.begin(PostgresUnavailable("away"))
        clock[0] = 130.0
        assert waiting_s() == {**NOTHING, "postgres": 30.0}
        first.begin(ObjectsUnavailable("away"))
        assert waiting_s() == {**NOTHING, "postgres": 20.0}
        second.begin(SessionLost("gone"))
        clock[0] = 131.0
        assert waiting_s() == {**NOTHING, "objects": 1.0, "session": 1.0}
        second.begin(Throttled("too fast"))
        first.end()
        assert waiting_s() == NOTHING
        first.begin(KafkaUnavailable("away"))
    assert waiting_s() == NOTHING, "work that ends with an error waits no longer"


def test_an_attempt_that_lasts_is_no_wait(clock: list[float]) -> None:
    """O4: a stream that was opened again after an outage runs; its next failure begins a wait."""
    with Wait() as wait:
        wait.begin(KafkaUnavailable("away"))
        clock[0] = 110.0
        wait.end_after(60.0)
        assert waiting_s()["kafka"] == 10.0
        clock[0] = 170.0
        assert waiting_s() == NOTHING
        wait.begin(KafkaUnavailable("away"))
        clock[0] = 175.0
        assert waiting_s()["kafka"] == 5.0


async def test_what_is_retried_is_on_the_page_of_each_process() -> None:
    """O4: the page of a process has every server, also when its service has no other series."""
    page = TextPage("worker", lambda: ())

    def exported() -> dict[str, float]:
        text = page.render("")[0].decode()
        lines = [line for line in text.splitlines() if line.startswith("penstock_waiting_seconds{")]
        return {line.split('"')[1]: float(line.split()[1]) for line in lines}

    failed, answers = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        if failed.is_set():
            await answers.wait()
            return
        failed.set()
        raise ObjectsUnavailable("away")

    assert exported() == NOTHING
    task = asyncio.create_task(retry_until_available(work, waiting_for="a test", backoff=AT_ONCE))
    await failed.wait()
    found = exported()
    assert found.pop("objects") > 0
    assert set(found.values()) == {0.0}
    answers.set()
    await task
    assert exported() == NOTHING
