"""The attempts that a worker runs without a claim, and the claims of those that last.

Nothing but the worker knows such an attempt. So its record stays uncommitted until either its
result or its claim is on Kafka: when the worker dies before, the record is read again.

A claim never follows the end of a lease: it names only attempts whose results are not on Kafka.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.concurrency.retry import WORKER_BACKOFF, retry_until_available
from penstock.contracts.heartbeat import Heartbeat, claims_of
from penstock.contracts.ready import ReadyTask
from penstock.core.attempt import AttemptId
from penstock.core.early_start import EARLY_START, EarlyStart
from penstock.core.going_on import is_follow
from penstock.worker.heartbeat_sender import HeartbeatSender, HeartbeatTransport


@dataclass(slots=True)
class _Entry:
    """An attempt without a claim on Kafka.

    Attributes:
        ready: the attempt.
        since_s: when its record was taken.
        tried: whether a claim was sent, which may be on Kafka.
        lost: whether this worker was cut off from Kafka for too long to run it.
    """

    ready: ReadyTask
    since_s: float
    tried: bool = False
    lost: bool = False


class UnclaimedAttempts:
    """The attempts in flight that have no claim yet.

    Args:
        transport: sends claims.
        heartbeats: keeps claimed attempts alive.
        worker_id: of the worker.
        limits: by type, most attempts by stage, for stages with a limit of their own.
        clock: seconds on a monotonic clock, as of `heartbeats`.
        waits: whether an attempt still waits for a handler.
        early_start: when attempts are claimed.
    """

    def __init__(
        self,
        transport: HeartbeatTransport,
        heartbeats: HeartbeatSender,
        worker_id: str,
        limits: Mapping[str, Mapping[str, int]],
        clock: Callable[[], float],
        waits: Callable[[AttemptId], bool] = lambda _attempt_id: False,
        early_start: EarlyStart = EARLY_START,
    ) -> None:
        self.early_start = early_start
        self._transport = transport
        self._heartbeats = heartbeats
        self._worker_id = worker_id
        self._limits = limits
        self._clock = clock
        self._waits = waits
        # In order of arrival, the oldest first.
        self._entries: dict[AttemptId, _Entry] = {}
        self._added = asyncio.Event()
        # One claim at a time, so that a second caller returns once the first one's claim is stored.
        self._claiming = asyncio.Lock()

    def __contains__(self, attempt_id: object) -> bool:
        return attempt_id in self._entries

    def add(self, tasks: Iterable[ReadyTask]) -> None:
        """Adds attempts whose records were taken."""
        now_s = self._clock()
        for ready in tasks:
            self._entries[ready.attempt_id] = _Entry(ready, now_s)
            self._added.set()

    def end(self, attempt_ids: Iterable[AttemptId]) -> set[AttemptId]:
        """Removes attempts that are over; returns those for which no claim was ever sent."""
        ended = {attempt_id: self._entries.pop(attempt_id, None) for attempt_id in attempt_ids}
        return {attempt_id for attempt_id, entry in ended.items() if entry is not None and not entry.tried}

    def lose(self, attempt_ids: Iterable[AttemptId]) -> None:
        """Marks attempts that this worker stopped because their claims did not reach Kafka."""
        for attempt_id in attempt_ids:
            if (entry := self._entries.get(attempt_id)) is None:
                continue
            if is_follow(entry.ready.fence.attempt):
                # No record brings it back: the platform finds it without a claim.
                del self._entries[attempt_id]
            else:
                entry.lost = True

    def lost(self, attempt_ids: Iterable[AttemptId]) -> list[AttemptId]:
        """Those of the attempts that are lost: only their records can bring them back."""
        return [
            attempt_id
            for attempt_id in attempt_ids
            if (entry := self._entries.get(attempt_id)) is not None and entry.lost
        ]

    async def claim(self, attempt_ids: Collection[AttemptId]) -> None:
        """Returns once these attempts are claimed or over; retries while Kafka is unavailable."""
        async with self._claiming:
            await retry_until_available(
                lambda: self._try_claim(attempt_ids), waiting_for="claims", backoff=WORKER_BACKOFF
            )

    async def _try_claim(self, attempt_ids: Iterable[AttemptId]) -> None:
        # Anew at each try: some may be over meanwhile.
        entries = [
            entry
            for attempt_id in attempt_ids
            if (entry := self._entries.get(attempt_id)) is not None and not entry.lost
        ]
        if not entries:
            return
        # Before sending: the platform may count the lease from this moment.
        now_s = self._clock()
        claims = self._claims(entries)
        self._heartbeats.add(self._claims([entry for entry in entries if not entry.tried]), now_s)
        for entry in entries:
            entry.tried = True
        # Together: one after the other, each would cost the poll a round trip.
        await asyncio.gather(*map(self._transport.try_heartbeat, claims))
        for entry in entries:
            if not entry.lost:
                self._entries.pop(entry.ready.attempt_id, None)

    def _claims(self, entries: Iterable[_Entry]) -> list[Heartbeat]:
        by_type: defaultdict[str, list[ReadyTask]] = defaultdict(list)
        for entry in entries:
            by_type[entry.ready.type].append(entry.ready)
        return [
            claim
            for type_name, tasks in by_type.items()
            for claim in claims_of(self._worker_id, tasks, self._limits.get(type_name, {}))
        ]

    async def run(self) -> None:
        """Claims attempts that last, until cancelled.

        Raises:
            Fatal: no claim can be sent any more.
        """
        while True:
            entries = [(each, entry.since_s) for each, entry in self._entries.items() if not entry.lost]
            if not entries:
                self._added.clear()
                await self._added.wait()
                continue
            policy = self.early_start
            due_s = {
                attempt_id: since_s
                + (policy.claim_waiting_after_s if self._waits(attempt_id) else policy.claim_after_s)
                for attempt_id, since_s in entries
            }
            now_s = self._clock()
            if due := [attempt_id for attempt_id, at_s in due_s.items() if at_s <= now_s]:
                await self.claim(due)
            else:
                # Not longer: one that waits may begin meanwhile.
                await asyncio.sleep(min(policy.claim_after_s, min(due_s.values()) - now_s))
