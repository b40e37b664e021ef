"""The counts of a worker, and its metrics server: /metrics, /livez and /readyz.

The platform client's loop serves it, so a handler that blocks the loop of handlers fails no probe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from penstock.contracts.ready import ReadyTask
from penstock.core.log_limits import DROP_REASONS
from penstock.errors import PenstockError
from penstock.metrics import (
    WORKER_ATTEMPTS,
    WORKER_BLOCKED,
    WORKER_LOG_LINES_DROPPED,
    WORKER_RUNNING,
    WORKER_SLOTS,
    WORKER_WAITING,
    Sample,
)
from penstock.worker.settings import WorkerSettings

if TYPE_CHECKING:
    # That module imports this one.
    from penstock.worker.handler_pool import HandlerPool
    from penstock.worker.log_buffer import LogBuffer

NAME = "worker"
# The stage of attempts for which the worker has no handler: tasks may name any number of stages.
NO_STAGE = ""

# Dropped attempts have no outcome, and are counted under this label.
CANCELLED = "cancelled"

Stage = tuple[str, str]
# Returns when the worker is ready, and raises a PenstockError otherwise.
Probe = Callable[[], Awaitable[None]]


class AttemptCounts:
    """Counts the attempts of a worker that have ended.

    Args:
        stages: (type, stage) of its handlers.
    """

    def __init__(self, stages: Collection[Stage]) -> None:
        self.stages = stages
        # By type, stage and outcome.
        self.ended: Counter[tuple[str, str, str]] = Counter()

    def add(self, ready: ReadyTask, outcome: str) -> None:
        """Adds an attempt that has ended."""
        stage = ready.fence.stage
        if (ready.type, stage) not in self.stages:
            stage = NO_STAGE
        self.ended[ready.type, stage, outcome] += 1


def samples(
    pool: HandlerPool, slots: int, logs: LogBuffer | None, blocked: Mapping[Stage, int]
) -> Iterator[Sample]:
    """The current values of a worker.

    Args:
        pool: runs the attempts.
        slots: most handlers at once.
        logs: the lines of handlers; None when task logs are off.
        blocked: times that a handler blocked the event loop, by (type, stage).
    """
    yield Sample(WORKER_SLOTS, slots)
    yield Sample(WORKER_WAITING, pool.waiting)
    for ended, count in sorted(pool.counts.ended.items()):
        yield Sample(WORKER_ATTEMPTS, count, ended)
    running = Counter((ready.type, ready.fence.stage) for ready in pool.running_attempts)
    for stage in sorted(pool.counts.stages):
        yield Sample(WORKER_RUNNING, running[stage], stage)
        yield Sample(WORKER_BLOCKED, blocked.get(stage, 0), stage)
    for reason in DROP_REASONS:
        yield Sample(WORKER_LOG_LINES_DROPPED, 0 if logs is None else logs.dropped[reason], (reason,))


@asynccontextmanager
async def serving(
    settings: WorkerSettings, count: Callable[[], Iterable[Sample]], probe: Probe
) -> AsyncIterator[None]:
    """Runs the metrics server while the block runs, unless the port is 0.

    Args:
        settings: the address to listen on.
        count: gives the current values; called for each scrape.
        probe: whether the worker can reach Kafka or its gateway, and goes on.

    Raises:
        CannotStart: the address cannot be listened on.
    """
    if not settings.metrics_port:
        yield
        return
    from penstock.metrics.server import serving_page  # noqa: PLC0415 (the server is not needed otherwise)
    from penstock.metrics.text_page import TextPage  # noqa: PLC0415 (as above)

    page = TextPage(NAME, count)
    check = "gateway" if settings.worker_gateway else "kafka"
    async with serving_page(settings, page, {check: probe}):
        yield


async def stand_in(settings: WorkerSettings, error: PenstockError) -> None:
    """Runs the metrics server of a worker that waits for its start: alive, and not ready."""
    if settings.metrics_port:
        from penstock.metrics.server import stand_in_page  # noqa: PLC0415 (as above)
        from penstock.metrics.text_page import TextPage  # noqa: PLC0415 (as above)

        await stand_in_page(settings, TextPage(NAME, lambda: ()), error)


async def end_stand_in(settings: WorkerSettings) -> None:
    """Ends the server of `stand_in`, if it runs."""
    if settings.metrics_port:
        from penstock.metrics.server import end_stand_in as end  # noqa: PLC0415 (as above)

        await end()
