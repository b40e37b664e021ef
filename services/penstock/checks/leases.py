"""The rules of leases: an attempt runs only as long as its lease can expire, and until it has.

Leases are in the memory of the heartbeat processors. The check sees the records that they are made
of: an attempt is silent when its worker has sent no claim and no beat of it for its whole lease.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from aiokafka import TopicPartition

from penstock.checks import in_transit
from penstock.checks.kafka import Unread
from penstock.checks.report import Offender, Offenders, Rule
from penstock.checks.rule import GRACE_S, Candidates, Check, RowCheck, System, Writers
from penstock.contracts.heartbeat import Kind
from penstock.contracts.inbound import decode_heartbeat
from penstock.core.attempt import AttemptId
from penstock.core.endings import ExpiredLease
from penstock.core.task import State
from penstock.errors import Invalid
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import HEARTBEATS, STAGE_RESULTS, service_group
from penstock.postgres import checks, leases
from penstock.postgres.checks import BATCH
from penstock.postgres.expiry import expire

log = logging.getLogger(__name__)

# Attempts that are kept in memory.
MAX_ATTEMPTS = 1_000_000
# Seconds in which the heartbeats of the longest lease must be read.
READ_S = 60.0
# Seconds behind a lease in which the repair still expects a heartbeat.
MARGIN_S = 5.0
# The longest lease that it waits for.
LONGEST_S = 900.0


@dataclass(frozen=True, slots=True)
class _Lease:
    """The lease of a running attempt, as its row has it.

    Attributes:
        worker: its holder.
        lease_s: seconds that it lasts without a heartbeat.
    """

    worker: str
    lease_s: float


class Unwatched(RowCheck):
    """A running attempt without a heartbeats partition. It ends, as by an expired lease.

    It stays while a result is unread, because that may be its own.
    """

    rule, what = Rule.UNWATCHED, "task"
    lacks = (
        "is running on {worker}, and its heartbeats partition {lease_partition} does not exist: "
        "no lease of it can expire"
    )

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self.arguments = (partitions_of(system.settings, HEARTBEATS),)

    async def repair(self, writers: Writers, /) -> int:
        """See `Check`."""
        total = 0
        while True:
            rows = await checks.fetch(self.system.pool, "checks.unwatched", BATCH, *self.arguments)
            if rows and not await _are_committed(
                self.system, await self.system.topics.ends(STAGE_RESULTS.name)
            ):
                log.warning(
                    "Unwatched attempts may have an unread result; they do not expire before the stage processor has read it",
                    extra={"event": "expiry_postponed", "attempts": len(rows)},
                )
                break
            ended = await _end(
                self.system,
                writers,
                [
                    ExpiredLease(
                        AttemptId(row["id"], row["step"], row["attempt"]),
                        row["worker"],
                        f"no lease of worker {row['worker']} could expire; ended by `penstock check --repair`",
                    )
                    for row in rows
                ],
            )
            total += ended
            if len(rows) < BATCH or not ended:
                break
        return total


class Silent(Check):
    """A running attempt whose lease should have expired. It ends, as by an expired lease.

    No processor watches it, or its lease cannot expire. A processor that starts gives each attempt
    a whole new lease, so an attempt counts only after its lease and `GRACE_S` seconds.

    The age of a heartbeat is a difference between two clocks, of which one may be wrong. So the
    repair trusts none: it waits for a lease, and ends an attempt only if no heartbeat has arrived
    meanwhile. Attempts with a lease above `LONGEST_S` stay findings.
    """

    rule = Rule.UNWATCHED

    async def find(self) -> Candidates:
        """See `Check`; waits for the results that were on Kafka, if an attempt is silent."""
        try:
            silent = await self._find()
        except TimeoutError:
            lacks = "has too many records: which running attempts have a silent worker is unknown"
            return {"unproven": Offenders([Offender(Rule.UNPROVEN, "topic", HEARTBEATS.name, lacks)], 1)}
        first = [
            Offender(
                self.rule,
                "task",
                attempt_id.task_id,
                f"is running on {lease.worker}, which has sent no heartbeat of it for its lease of "
                f"{lease.lease_s:g} s and {GRACE_S:.0f} s more: no process watches its lease",
            )
            for attempt_id, lease in list(silent.items())[: self.system.show]
        ]
        return {"silent": Offenders(first, len(silent))} if silent else {}

    async def repair(self, writers: Writers, /) -> int:
        """See `Check`."""
        with suppress(TimeoutError):
            ends = [
                ExpiredLease(
                    attempt_id,
                    lease.worker,
                    f"no heartbeat from worker {lease.worker}, and no lease that expired; ended by "
                    "`penstock check --repair`",
                    # The row does not say whether its handler had begun.
                    begun=None,
                )
                for attempt_id, lease in (await self._watched()).items()
            ]
            return sum(
                [
                    await _end(self.system, writers, ends[begin : begin + BATCH])
                    for begin in range(0, len(ends), BATCH)
                ]
            )
        return 0

    async def _watched(self) -> dict[AttemptId, _Lease]:
        """The attempts of which no heartbeat arrives for a whole lease, by this process's timer.

        Raises:
            TimeoutError: too many attempts or heartbeats to tell.
        """
        topics = self.system.topics
        leased = {each: lease for each, lease in (await self._find()).items() if lease.lease_s <= LONGEST_S}
        if not leased:
            return {}
        begins = await topics.ends(HEARTBEATS.name)
        wait_s = max(lease.lease_s for lease in leased.values()) + MARGIN_S
        log.warning(
            "Attempts without a heartbeat are watched for one lease before they expire",
            extra={"event": "silent_watched", "attempts": len(leased), "seconds": wait_s},
        )
        await asyncio.sleep(wait_s)
        ends = await topics.ends(HEARTBEATS.name)
        arrived = {tp: Unread(begins[tp], end) for tp, end in ends.items() if begins.get(tp, end) < end}
        await self._leave_out_heard(leased, arrived, None)
        return await self._unended(leased, await topics.ends(STAGE_RESULTS.name))

    async def _find(self) -> dict[AttemptId, _Lease]:
        """The silent attempts that no result ends.

        Raises:
            TimeoutError: too many attempts or heartbeats to tell.
        """
        pool = self.system.pool
        leased: dict[AttemptId, _Lease] = {}
        partitions = partitions_of(self.system.settings, HEARTBEATS)
        async for rows in checks.by_cursor(pool, "checks.leased", partitions, GRACE_S):
            leased |= {
                AttemptId(row["id"], row["step"], row["attempt"]): _Lease(row["worker"], row["lease_s"])
                for row in rows
            }
            if len(leased) > MAX_ATTEMPTS:
                raise TimeoutError
        if not leased:
            return {}
        # After the query: a result that ends one of these attempts is before these ends.
        ends = await self.system.topics.ends(STAGE_RESULTS.name)
        longest_s = max(lease.lease_s for lease in leased.values()) + GRACE_S
        recent = await self.system.topics.newest(HEARTBEATS.name, sys.maxsize, longest_s)
        await self._leave_out_heard(leased, recent, time.time())
        return await self._unended(leased, ends)

    async def _unended(
        self, leased: Mapping[AttemptId, _Lease], ends: Mapping[TopicPartition, int]
    ) -> dict[AttemptId, _Lease]:
        """Those of some attempts that run still, once the results before some ends are applied."""
        if not leased or not await _are_committed(self.system, ends):
            return {}
        holders = await leases.holders(self.system.pool, list(leased))
        return {
            attempt_id: lease
            for attempt_id, lease in leased.items()
            if (holder := holders.get(attempt_id)) is not None
            and holder.state == State.RUNNING
            and holder.worker == lease.worker
        }

    async def _leave_out_heard(
        self, leased: dict[AttemptId, _Lease], records: dict[TopicPartition, Unread], now_s: float | None
    ) -> None:
        """Removes the attempts of which their workers have sent a claim or beat.

        Args:
            leased: attempts.
            records: heartbeats to read.
            now_s: the present time, if the age of a record counts.
        """
        async for record in self.system.topics.records(records, READ_S):
            if not leased:
                break
            # A record that breaks its contract renews no lease.
            with suppress(Invalid):
                heartbeat, _faults = decode_heartbeat(record.value or b"")
                if heartbeat.kind is Kind.RELEASE:
                    continue
                age_s = 0.0 if now_s is None else now_s - record.timestamp / 1000
                for attempt_id in heartbeat.tasks:
                    lease = leased.get(attempt_id)
                    if (
                        lease is not None
                        and lease.worker == heartbeat.worker
                        and age_s < lease.lease_s + GRACE_S
                    ):
                        del leased[attempt_id]


async def _are_committed(system: System, ends: Mapping[TopicPartition, int]) -> bool:
    """Whether the stage processor commits all results before some ends, within `SETTLE_S`."""
    topics, group = system.topics, service_group(system.settings.prefix, "stages")
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + in_transit.SETTLE_S
    while True:
        unread = await topics.unread(STAGE_RESULTS.name, await topics.committed(group))
        if all(stretch.begin >= ends.get(tp, 0) for tp, stretch in unread.items()):
            return True
        if loop.time() >= deadline_s:
            return False
        await asyncio.sleep(in_transit.SEARCH_EVERY_S)


async def _end(system: System, writers: Writers, expired: Sequence[ExpiredLease]) -> int:
    """Ends attempts as the heartbeat processor does, and returns how many."""
    expiry = await expire(system.pool, expired, chance=random.random, source=system.settings.event_source)
    await writers.publish(expiry.outbox)
    return len(expiry.ended)
