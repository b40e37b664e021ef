"""Queued tasks with neither a record that somebody will still read nor anybody who has read it.

The topics are read in the order in which an attempt passes them (ready, heartbeats, stage-results) and PostgreSQL is
asked last: what moves meanwhile is met further on. What has left them all is `running` or ended in PostgreSQL.
Memory is bounded by `MOST_KEYS`, time by `READ_S` a topic; beyond that the answer is that it cannot be told.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime

import asyncpg

from penstock.checks.kafka import Topics
from penstock.checks.report import Found, Offender, Rule
from penstock.contracts.inbound import decode_heartbeat, decode_results
from penstock.contracts.ready import ReadyTask
from penstock.core.leases import Key
from penstock.errors import Invalid
from penstock.kafka.topics import HEARTBEATS, STAGE_RESULTS, ready, service_group, workers_group
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.settings import Platform

# Attempts named in unread records that are kept in mind: about 200 MB.
MOST_KEYS = 1_000_000
# Seconds in which the unread records of a topic must be read.
READ_S = 60.0
# Rows fetched at a time.
PAGE = 10_000


class Queued:
    """Finds the queued tasks without a record.

    Args:
        settings: for the names of groups.
        pool: of the database.
        topics: of Kafka.
        show: how many to name.
    """

    def __init__(
        self, settings: Platform, pool: asyncpg.Pool[asyncpg.Record], topics: Topics, show: int
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._topics = topics
        self._show = show
        self._since: datetime | None = None
        self._carried: set[Key] = set()
        self._noted: set[int] = set()

    async def look(self) -> dict[Hashable, Found]:
        """Those that have been queued since before the first look, and are without a record at this one.

        Raises:
            PostgresUnavailable, KafkaUnavailable: it cannot be told.
        """
        with translated():
            self._since = self._since or await self._pool.fetchval(query("checks.now"))
            types = [row["type"] for row in await self._pool.fetch(query("checks.queued_types"), self._since)]
            if not types:
                return {}
            noted = await self._pool.fetch(query("checks.noted"), MOST_KEYS)
        self._noted = {row["id"] for row in noted}
        self._carried.clear()
        try:
            await self._read(types)
        except TimeoutError:
            lacks = (
                f"more is unread, for one of {', '.join(types)}, on heartbeats or on stage-results, than can be read: "
                "it cannot be told which queued tasks have a record"
            )
            return {"unproven": Found([Offender(Rule.UNPROVEN, "topic", types[0], lacks)], 1)}
        first: list[Offender] = []
        count = 0
        async for names, keys in self.without_record():
            count += len(keys)
            for name, key in zip(names, keys, strict=True):
                if len(first) == self._show:
                    break
                lacks = f"is queued, but ready.{name} has no record of it left to read"
                first.append(Offender(Rule.RECORDLESS, "task", key[0], lacks))
        return {"recordless": Found(first, count)} if count else {}

    async def without_record(self) -> AsyncIterator[tuple[list[str], list[Key]]]:
        """Types and attempts of what the last look found without a record, a page at a time.

        Raises:
            PostgresUnavailable: no server.
        """
        with translated():
            async with self._pool.acquire() as connection, connection.transaction():
                cursor = await connection.cursor(query("checks.queued"), self._since)
                while rows := await cursor.fetch(PAGE):
                    names, keys = [], []
                    for row in rows:
                        key = (row["id"], row["step"], row["attempt"])
                        if key not in self._carried and row["id"] not in self._noted:
                            names.append(row["type"])
                            keys.append(key)
                    if keys:
                        yield names, keys

    async def release_again(self, keys: Sequence[Key]) -> int:
        """Makes ready those that are still queued as they were at the first look; returns how many.

        Raises:
            PostgresUnavailable: perhaps none was.
        """
        with translated():
            rows = await self._pool.fetch(
                query("checks.release_again"),
                [key[0] for key in keys],
                [key[1] for key in keys],
                [key[2] for key in keys],
                self._since,
            )
        return len(rows)

    async def _read(self, types: Iterable[str]) -> None:
        """Takes in the attempts named in records that somebody will still read: ready, claimed, or reported.

        Raises:
            TimeoutError: there are too many.
        """
        prefix = self._settings.prefix
        sources: list[tuple[str, str, Callable[[bytes], Iterable[Key]]]] = [
            (ready(name, 1).name, workers_group(prefix, name), _released) for name in types
        ]
        sources += [
            (HEARTBEATS.name, service_group(prefix, "heartbeats"), lambda v: decode_heartbeat(v).tasks),
            (STAGE_RESULTS.name, service_group(prefix, "stages"), _reported),
        ]
        for topic, group, keys_of in sources:
            unread = await self._topics.unread(topic, await self._topics.committed(group))
            async for value in self._topics.values(unread, READ_S):
                # A record that breaks its contract carries nothing: whoever reads it will park it.
                with suppress(Invalid):
                    self._carried.update(keys_of(value))
                if len(self._carried) > MOST_KEYS:
                    raise TimeoutError


def _released(value: bytes) -> Iterable[Key]:
    fence = ReadyTask.decode(value).fence
    return [(fence.id, fence.step, fence.attempt)]


def _reported(value: bytes) -> Iterable[Key]:
    _worker, results, _faults = decode_results(value)
    return [(result.fence.id, result.fence.step, result.fence.attempt) for result in results]
