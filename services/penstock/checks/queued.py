"""Finds queued tasks without a record that will still be read, and without a worker.

The topics are read in the order in which an attempt passes them (ready, heartbeats, stage-results),
and PostgreSQL is queried last: an attempt that moves meanwhile is found further on, or is `running`
or ended in PostgreSQL. Memory is bounded by `MAX_ATTEMPTS`, time by `READ_S` a topic. Beyond these
bounds the check is undecided (`Rule.UNPROVEN`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime

from penstock.checks.report import Offender, Offenders, Rule
from penstock.checks.rule import Candidates, Check, System, Writers
from penstock.contracts.inbound import decode_heartbeat, decode_results
from penstock.contracts.ready import ReadyTask
from penstock.core.attempt import AttemptId
from penstock.errors import Invalid
from penstock.kafka.topology.topics import HEARTBEATS, STAGE_RESULTS, ready, service_group, workers_group
from penstock.postgres import checks
from penstock.postgres.checks import BATCH

# Attempts of unread records that are kept in memory: about 200 MB.
MAX_ATTEMPTS = 1_000_000
# Seconds in which the unread records of a topic must be read.
READ_S = 60.0


class Queued(Check):
    """A queued task without a record. It is ready again, if it is still in the same attempt.

    Where too much is unread to decide, the type is undecided (`unproven`), and stays so.
    """

    rule, moves = Rule.RECORDLESS, True

    def __init__(self, system: System) -> None:
        super().__init__(system)
        # The database's time at the first search.
        self._since: datetime | None = None
        # Attempts with an unread record, and tasks of releases that Kafka has not confirmed, at the
        # last search.
        self._with_record: set[AttemptId] = set()
        self._in_releases: set[int] = set()

    async def find(self) -> Candidates:
        """The tasks that have been queued since before the first search and have no record now."""
        pool = self.system.pool
        self._since = self._since or (await checks.fetch(pool, "checks.now"))[0]["now"]
        types = [row["type"] for row in await checks.fetch(pool, "checks.queued_types", self._since)]
        if not types:
            return {}
        self._in_releases = {row["id"] for row in await checks.fetch(pool, "checks.noted", MAX_ATTEMPTS)}
        self._with_record.clear()
        try:
            await self._read(types)
        except TimeoutError:
            lacks = (
                "too many records are unread on heartbeats, on stage-results, or on the ready topic of "
                f"{' or '.join(types)}: which queued tasks have a record is unknown"
            )
            return {"unproven": Offenders([Offender(Rule.UNPROVEN, "topic", types[0], lacks)], 1)}
        first: list[Offender] = []
        count = 0
        async for page in self.without_record():
            count += len(page)
            for type_name, attempt_id in page[: self.system.show - len(first)]:
                lacks = f"is queued, but ready.{type_name} has no record of it left to read"
                first.append(Offender(Rule.RECORDLESS, "task", attempt_id.task_id, lacks))
        return {"recordless": Offenders(first, count)} if count else {}

    async def without_record(self) -> AsyncIterator[list[tuple[str, AttemptId]]]:
        """Types and attempts that the last search found without a record, a page at a time.

        Raises:
            PostgresUnavailable: no server.
        """
        if self._since is None:
            return
        async for page in checks.queued(self.system.pool, self._since):
            if found := [
                (type_name, attempt_id)
                for type_name, attempt_id in page
                if attempt_id not in self._with_record and attempt_id.task_id not in self._in_releases
            ]:
                yield found

    async def release_again(self, attempt_ids: Sequence[AttemptId]) -> int:
        """Makes the attempts ready that have been queued since the first search; returns how many.

        Raises:
            PostgresUnavailable: perhaps no task is.
        """
        rows = await checks.fetch(
            self.system.pool,
            "checks.release_again",
            id=[each.task_id for each in attempt_ids],
            step=[each.step for each in attempt_ids],
            attempt=[each.attempt for each in attempt_ids],
            since=self._since,
        )
        return len(rows)

    async def repair(self, _writers: Writers, /) -> int:
        """See `Check`."""
        released = 0
        async for page in self.without_record():
            attempt_ids = [attempt_id for _type_name, attempt_id in page]
            for begin in range(0, len(attempt_ids), BATCH):
                released += await self.release_again(attempt_ids[begin : begin + BATCH])
        return released

    async def _read(self, types: Iterable[str]) -> None:
        """Collects the attempts of records that will still be read: ready, claimed or reported.

        Raises:
            TimeoutError: there are too many.
        """
        prefix = self.system.settings.prefix
        sources: list[tuple[str, str, Callable[[bytes], Iterable[AttemptId]]]] = [
            (ready(name, 1).name, workers_group(prefix, name), _released) for name in types
        ]
        sources += [
            (HEARTBEATS.name, service_group(prefix, "heartbeats"), lambda v: decode_heartbeat(v)[0].tasks),
            (STAGE_RESULTS.name, service_group(prefix, "stages"), _reported),
        ]
        for topic, group, attempts_of in sources:
            unread = await self.system.topics.unread(topic, await self.system.topics.committed(group))
            async for value in self.system.topics.values(unread, READ_S):
                # A record that breaks its contract names no attempt; its reader will reject it.
                with suppress(Invalid):
                    self._with_record.update(attempts_of(value))
                if len(self._with_record) > MAX_ATTEMPTS:
                    raise TimeoutError


def _released(value: bytes) -> Iterable[AttemptId]:
    return [ReadyTask.decode(value).fence.attempt_id]


def _reported(value: bytes) -> Iterable[AttemptId]:
    _worker, results, _faults = decode_results(value)
    return [result.fence.attempt_id for result in results]
