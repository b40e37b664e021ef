"""The worker's side towards the platform: it pulls, claims, reports, gives signs of life and hears what is taken back.

It runs in a loop on a thread of its own, so that a handler that blocks the worker's loop costs neither partitions nor
leases (W7). With the handlers' side it exchanges batches only: `start`, `drop` and results.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from penstock import process
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult
from penstock.contracts.revocation import Revocation
from penstock.core.leases import Key
from penstock.http.tokens import Credentials
from penstock.kafka.connection import make_producer, running
from penstock.worker.asking import Gateway
from penstock.worker.hand import Hand
from penstock.worker.heart import Heart
from penstock.worker.link import Link, Reports
from penstock.worker.over_http import HttpLink, HttpPuller
from penstock.worker.pull import Puller
from penstock.worker.revocations import listen
from penstock.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# How long pulling may take to end: leaving a group asks the broker.
LET_GO_S = 5.0

# The way to the platform, what pulls tasks of a type over it, and what else must run meanwhile.
Platform = tuple[Link | HttpLink, Callable[[str], Puller | HttpPuller], list[Coroutine[Any, Any, None]]]


class Liaison:
    """One worker's; made and run in its own loop, but for `add`, which any thread may call once it is told of attempts.

    Args:
        settings: of the worker.
        worker_id: who it speaks for.
        types: whose tasks are pulled; of each its stages that have their own limit of tries, with the limit.
        start: told of attempts to run.
        drop: told of attempts that nobody wants any more: they are to end without a result.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        worker_id: str,
        types: Mapping[str, Mapping[str, int]],
        start: Callable[[list[ReadyTask]], object],
        drop: Callable[[list[Key]], object],
    ) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._types = types
        self._start = start
        self._drop = drop
        self._stopping = asyncio.Event()
        self._drained = asyncio.Event()
        self._hand = Hand(settings.pool + settings.backlog)
        self._heart: Heart
        self._reports: Reports

    def add(self, result: StageResult) -> None:
        """A result to be reported."""
        self._reports.add(result)

    def stop(self) -> None:
        """Pull no more."""
        self._stopping.set()

    def finish(self) -> None:
        """Everything there will be was added: report it and end."""
        self._drained.set()

    async def run(
        self, ready: Callable[[], object], not_ready: Callable[[], object], pulled: Callable[[], object]
    ) -> None:
        """Works until it was told to stop and to finish.

        Args:
            ready: told when tasks can be had: over HTTP not before a gateway has answered, and again after `not_ready`.
            not_ready: told when the gateway no longer lets this worker in.
            pulled: told when nothing more will be started.

        Raises:
            KafkaUnavailable: no broker answered at the start.
            SettingsError: there is no gateway at the address, or it has not let this worker in for too long.
        """
        clock = asyncio.get_running_loop().time
        async with self._platform(ready, not_ready) as (link, make_puller, listening):
            self._heart = Heart(link, self._worker_id, clock, self._give_up)
            self._reports = Reports(link, self._worker_id, self._let_go, self._held)
            pulling = process.together(*(make_puller(name).run() for name in sorted(self._types)))

            async def work() -> None:
                await _until(self._stopping, pulling)
                pulled()
                await self._drained.wait()
                await self._reports.wait_sent()

            if not self._settings.worker_gateway:
                ready()
            await process.leading(
                work(),
                self._reports.run(),
                self._heart.run(),
                *listening,
                # This loop's, not the handlers', which may stand still as long as they like.
                process.keep_wound(process.STALL_S),
            )

    @asynccontextmanager
    async def _platform(
        self, let_in: Callable[[], object], shut_out: Callable[[], object]
    ) -> AsyncIterator[Platform]:
        """The platform as it is reached: over Kafka, or through a gateway."""
        settings, who = self._settings, self._worker_id
        if settings.worker_gateway:
            async with Gateway(
                settings.worker_gateway,
                Credentials(settings.api_key, settings.api_key_file),
                patience_s=settings.refused_timeout_s,
                let_in=let_in,
                shut_out=shut_out,
            ) as gateway:
                yield (
                    HttpLink(gateway, who),
                    lambda name: HttpPuller(
                        gateway, name, self._hand, self._heart, who, self._start, self._types[name]
                    ),
                    [],
                )
            return
        async with running(make_producer(settings)) as producer:
            link = Link(producer, settings, who)
            yield (
                link,
                lambda name: Puller(
                    settings, name, link, self._hand, self._heart, who, self._start, self._types[name]
                ),
                [listen(settings, self._revoked)],
            )

    def _held(self, keys: list[Key]) -> Hand:
        # Both loops wake together after a standstill, and a handler that ends then may be the first to be heard here.
        self._heart.cut_off(keys)
        return self._hand

    def _let_go(self, keys: list[Key]) -> None:
        self._hand.let_go(keys)
        self._heart.let_go(keys)

    def _give_up(self, keys: list[Key]) -> None:
        self._hand.let_go(keys)
        self._drop(keys)

    def _revoked(self, revocation: Revocation) -> None:
        here = [key for key in revocation.tasks if key in self._hand]
        if here:
            log.info("%d attempts were taken back: %s", len(here), revocation.why)
            self._let_go(here)
            self._drop(here)


async def _until(stopping: asyncio.Event, work: Any) -> None:
    """Runs `work` until `stopping` is set, then cancels it.

    Raises:
        Exception: what `work` raised before.
    """
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    for task in (working, waiting):
        task.cancel()
    await asyncio.wait({working, waiting}, timeout=LET_GO_S)
    if not working.done():
        # A client that waits for a broker that is away; it ends with this loop.
        log.warning("pulling did not end within %g s: going on without", LET_GO_S)
    elif not working.cancelled() and (error := working.exception()) is not None:
        raise error
