"""Starts the flows of backfills: runs of a schedule over a past range.

Each batch is one transaction with the position of its backfill. A flow that fails holds up no other
flow, and a tick whose inputs fail is recorded as skipped.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice

import asyncpg

from penstock import metrics
from penstock.core.access import namespace_of
from penstock.core.schedule import Ticks
from penstock.core.schedule_policy import Skip, SkipReason
from penstock.cron import parse_cron
from penstock.errors import Invalid, ObjectsUnavailable
from penstock.flows.scheduled import reason, scheduled_start
from penstock.metrics import Sample
from penstock.objects import ObjectStore
from penstock.postgres import backfills, schedule_rows, schedules
from penstock.postgres.connection import translated
from penstock.postgres.flow_definitions import DefinitionCache
from penstock.postgres.flow_starts import FlowStart, start
from penstock.postgres.schedule_rows import Settings

log = logging.getLogger(__name__)

# Ticks of one batch.
BATCH = 500
# Seconds after which a backfill looks at its running flows without a notification.
LOOK_AGAIN_S = 5.0
_AWAY_S = 10.0


@dataclass(slots=True)
class _Batch:
    """The outcome of the next ticks of a backfill."""

    starts: list[FlowStart] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    already_run: int = 0
    position: datetime | None = None
    is_away: bool = False


class BackfillLoop:
    """Runs backfills, a batch at a time.

    Args:
        pool: the database.
        objects: stores inputs above the inline limit.
        definitions: those of this process.

    Attributes:
        started: flows started by this process.
        steps: batches and ticks so far, for the stall detector.
    """

    def __init__(
        self,
        pool: asyncpg.Pool[asyncpg.Record],
        objects: ObjectStore,
        definitions: DefinitionCache,
    ) -> None:
        self._pool = pool
        self._objects = objects
        self._definitions = definitions
        self.started = 0
        self.steps = 0

    def samples(self) -> Iterator[Sample]:
        """The metrics of this loop."""
        yield Sample(metrics.BACKFILL_STARTED, self.started)

    async def run_batch(self, ended: Collection[str]) -> bool:
        """Starts the next batch of a backfill that is due; returns whether there was one.

        Args:
            ended: schedules of which a flow has ended.

        Raises:
            PostgresUnavailable: nothing is changed; a later call starts the same batch.
        """
        self.steps += 1
        with translated():
            async with self._pool.acquire() as connection, connection.transaction():
                row = await backfills.claim(connection, ended)
                if row is None:
                    return False
                try:
                    await self._run(connection, row)
                except Invalid as error:
                    log.warning(
                        "A backfill failed",
                        extra={"event": "backfill_failed", "backfill": row["id"], "error": error},
                    )
                    await backfills.fail(connection, row["id"], reason(error))
        return True

    async def _run(
        self, connection: asyncpg.pool.PoolConnectionProxy[asyncpg.Record], row: asyncpg.Record
    ) -> None:
        if row["name"] is None:
            raise Invalid("the schedule was removed")
        settings = schedule_rows.settings_of(dict(row))
        ticks = parse_cron(settings.cron, settings.zone)
        limit = row["max_running"]
        running = await backfills.running(connection, row["id"]) if limit is not None else 0
        # One second's worth, so that the rate is kept.
        most = BATCH if row["rate"] is None else max(1, min(BATCH, int(row["rate"])))
        room = most if limit is None else min(most, limit - running)
        batch = await self._next_batch(connection, settings, ticks, row, max(room, 0))
        # A tick may have got its flow since the batch was read.
        started = sum(each.created for each in await start(connection, batch.starts))
        await schedules.record_skips(connection, ((settings.name, skip) for skip in batch.skips))
        is_waiting = batch.position is None
        ended = is_waiting and room > 0 and not await backfills.running(connection, row["id"])
        await backfills.advance(
            connection,
            row["id"],
            batch.position or row["position"],
            started=started,
            already_run=batch.already_run + len(batch.starts) - started,
            refused=len(batch.skips),
            wait_s=_AWAY_S if batch.is_away else LOOK_AGAIN_S if is_waiting else None,
            ended=ended and not batch.is_away,
        )
        self.started += started

    async def _next_batch(
        self,
        connection: asyncpg.pool.PoolConnectionProxy[asyncpg.Record],
        settings: Settings,
        ticks: Ticks,
        row: asyncpg.Record,
        room: int,
    ) -> _Batch:
        batch = _Batch()
        found = list(islice(ticks.between(row["position"], row["until"]), room))
        if not found:
            return batch
        existing = await backfills.flows_of_ticks(connection, settings.name, found)
        reached = await self._definitions.reach([(settings.flow, settings.version)], executor=connection)
        for tick in found:
            self.steps += 1
            rerun_of = existing.get(tick)
            if rerun_of is not None and not row["rerun"]:
                batch.already_run += 1
            else:
                try:
                    each = scheduled_start(settings, tick, reached, backfill=row["id"], rerun_of=rerun_of)
                    inputs = await self._objects.check_in(each.inputs, namespace_of(each.name))
                except Invalid as error:
                    batch.skips.append(Skip(tick, tick, 1, SkipReason.ERROR, reason(error)))
                except ObjectsUnavailable as error:
                    log.warning(
                        "A backfill waits for the object store",
                        extra={"event": "backfill_delayed", "backfill": row["id"], "error": error},
                    )
                    batch.is_away = True
                    break
                else:
                    batch.starts.append(dataclasses.replace(each, inputs=inputs))
            batch.position = tick
        return batch
