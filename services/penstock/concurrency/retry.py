"""Retry with exponential back-off and jitter, for as long as a server is unavailable.

There are three policies. `SERVICE_BACKOFF` is for the platform's services, `WORKER_BACKOFF` for
workers, of which there are many, and `STARTUP_BACKOFF` for a server that is starting, whose caller
gives a deadline.

The loop is our own because it runs once for each Kafka record: tenacity costs 45 µs a call, and
`Retry-After` and the fresh start after a long attempt would have to be added to it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.concurrency.outages import Wait, count_failed_attempt
from penstock.core.retry import Backoff
from penstock.errors import PenstockError, Throttled, Unavailable

log = logging.getLogger(__name__)

SERVICE_BACKOFF = Backoff(base_s=0.1, factor=2, max_s=2.0, jitter=0.3)
WORKER_BACKOFF = Backoff(base_s=0.2, factor=2, max_s=5.0, jitter=0.3)
STARTUP_BACKOFF = Backoff(base_s=0.2, factor=1, max_s=0.2, jitter=0.0)

# A connection that held for so many seconds had reached its server. Failing to connect takes less.
LASTING_ATTEMPT_S = 60.0

R = TypeVar("R")


async def retry_until_available(
    work: Callable[[], Awaitable[R]],
    *,
    waiting_for: str,
    backoff: Backoff = SERVICE_BACKOFF,
    retry_on: tuple[type[PenstockError], ...] = (Unavailable,),
    within_s: float | None = None,
    restarts_after_s: float | None = None,
    chance: Callable[[], float] = random.random,
    wait: Wait | None = None,
) -> R:
    """Calls `work` until it returns, with delays by `backoff`, or as long as a `Throttled` asks.

    Without `within_s` it never gives up, and logs each new error. An outage is no stall: each
    failure starts the times of the stall detector anew.

    Args:
        work: one attempt; called again, so it must be safe to repeat.
        waiting_for: what the log names as delayed, such as "commit of results".
        backoff: how delays grow.
        retry_on: errors after which `work` is called again; any other leaves at once.
        within_s: seconds after which the error leaves; None is never.
        restarts_after_s: seconds after which an attempt counts as a success that ended: delays
            start anew. None for work that is short.
        chance: random numbers from 0 to 1, for jitter.
        wait: of work that ends it itself, once it has its servers.

    Raises:
        PenstockError: an error of `retry_on` after `within_s` seconds.
        Exception: any other error of `work`.
    """
    with wait or Wait() as counted:
        return await _retry(
            counted,
            work,
            waiting_for=waiting_for,
            backoff=backoff,
            retry_on=retry_on,
            within_s=within_s,
            restarts_after_s=restarts_after_s,
            ends_after_s=restarts_after_s if wait is None else None,
            chance=chance,
        )


async def _retry(
    wait: Wait,
    work: Callable[[], Awaitable[R]],
    *,
    waiting_for: str,
    backoff: Backoff,
    retry_on: tuple[type[PenstockError], ...],
    within_s: float | None,
    restarts_after_s: float | None,
    ends_after_s: float | None,
    chance: Callable[[], float],
) -> R:
    began_s = time.monotonic()
    failures = 0
    logged = ""
    while True:
        attempt_s = time.monotonic()
        try:
            return await work()
        except retry_on as error:
            count_failed_attempt()
            wait.begin(error)
            now_s = time.monotonic()
            if within_s is not None and now_s - began_s > within_s:
                raise
            if isinstance(error, Throttled):
                delay_s = error.retry_after_s
            else:
                lasted = restarts_after_s is not None and now_s - attempt_s > restarts_after_s
                failures = 1 if lasted else failures + 1
                delay_s = backoff.delay_s(failures, chance())
            # An outage of an hour would otherwise be thousands of equal lines.
            if within_s is None and str(error) != logged:
                logged = str(error)
                log.warning(
                    "A server is unavailable; trying again",
                    extra={
                        "event": "retry_scheduled",
                        "waiting_for": waiting_for,
                        "error": logged,
                        "delay_s": round(delay_s, 3),
                    },
                )
        await asyncio.sleep(delay_s)
        if ends_after_s is not None:
            wait.end_after(ends_after_s)
