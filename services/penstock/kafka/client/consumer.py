"""The consumer of every reader of Kafka, and of Faust: aiokafka's, with what it lacks.

A connection whose broker has vanished ends (`links`). An idle consumer fetches seldom
(`fetch_wait`), and reports that it has lost Kafka (`reachability`). A log that was replaced is not
read (`fetch_guard`), and a commit has the identity of its log. `group_consumer` adds the checks of
a group's positions.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.structs import OffsetAndMetadata

from penstock.core.position import Position
from penstock.errors import Fatal
from penstock.kafka.client.fetch_guard import FetchGuard
from penstock.kafka.client.fetch_wait import RESTS, FetchWait, no_gap
from penstock.kafka.client.links import guard_connections
from penstock.kafka.client.member_data import MemberData, assignor
from penstock.kafka.client.reachability import Reachability
from penstock.kafka.client.security import arguments
from penstock.settings import Kafka

# Seconds within which a consumer leaves its group. A rebalance may take longer.
LEAVE_S = 8.0
# Seconds within which its tasks end when they are cancelled.
END_S = 2.0

# Seconds between two heartbeats of a member that is alone in its group, at most: only a second one
# that joins waits for it.
ALONE_S = 2.5


class Consumer(AIOKafkaConsumer):  # type: ignore[misc]  # aiokafka is untyped
    """A consumer with manual commits, not yet started; it begins at the first record.

    Args:
        settings: where, and how long a session lasts.
        group: its group; None for none.
        topics: their full names.
        name: its client id at the broker.
        notice_s: seconds within which it learns of a rebalance; a third of a session at most. A
            member that is alone in its group may take `ALONE_S`.
        member: what it says of itself to those who describe its group.
        may_be_deleted: whether records may be deleted before they are read.
        gap_s: see `FetchWait`.
        rests: see `FetchWait`.
        options: of aiokafka, in place of those that every consumer has.

    Attributes:
        guard: keeps it from reading a log that was replaced.
    """

    def __init__(
        self,
        settings: Kafka,
        group: str | None,
        *topics: str,
        name: str = "penstock",
        notice_s: float = math.inf,
        member: MemberData | None = None,
        may_be_deleted: bool = False,
        gap_s: Callable[[], float] = no_gap,
        rests: Sequence[tuple[float, float]] = RESTS,
        **options: Any,
    ) -> None:
        session_s = settings.session_timeout_s
        self._notice_s = min(session_s / 3, notice_s)
        self._alone_s = max(self._notice_s, min(session_s / 3, ALONE_S))
        given = {
            "client_id": name,
            "group_id": group,
            "enable_auto_commit": False,
            "auto_offset_reset": "earliest",
            "session_timeout_ms": int(session_s * 1000),
            # A broker that is frozen, and not gone. A rebalance waits for up to one session.
            "request_timeout_ms": int(session_s * 2000),
            "heartbeat_interval_ms": int(self._notice_s * 1000),
            "metadata_max_age_ms": 5_000,
            "isolation_level": "read_committed",
            "partition_assignment_strategy": (assignor(member, self._set_members),),
        }
        super().__init__(*topics, **arguments(settings) | given | options)
        self._waits = gap_s, rests
        self.guard = FetchGuard(self, may_be_deleted=may_be_deleted)

    @property
    def client(self) -> AIOKafkaClient:
        """The client of its connections, as a producer has it."""
        return self._client

    def _set_members(self, members: int | None) -> None:
        """Sets the time between heartbeats, of which each generation begins a new series."""
        interval_s = self._alone_s if members == 1 else self._notice_s
        self._coordinator._heartbeat_interval_ms = int(interval_s * 1000)  # noqa: SLF001 (the client has no setting that can change)

    async def start(self) -> None:
        """Connects, and joins the group."""
        guard_connections(self._client)
        await super().start()
        FetchWait(self._fetcher, time.monotonic, *self._waits)
        Reachability(self._client)

    async def stop(self) -> None:
        """Leaves the group and closes the connections; no task of the client is left.

        A consumer that cannot leave within `LEAVE_S` is ended without. Its group goes on without it
        at the end of its session.

        Raises:
            Fatal: a task of the client does not end, and may act as a member of the group.
        """
        leaving = asyncio.ensure_future(super().stop())
        try:
            await asyncio.wait({leaving}, timeout=LEAVE_S)
        finally:
            await self._end(leaving)
        if not leaving.cancelled():
            leaving.result()

    async def _end(self, leaving: asyncio.Future[None]) -> None:
        left = {task for task in (leaving, *self._tasks()) if not task.done()}
        for task in left:
            task.cancel()
        if left:
            _done, left = await asyncio.wait(left, timeout=END_S)
        # Also after a stop that failed before its last step.
        await self._client.close()
        if left:
            raise Fatal(f"a Kafka consumer does not end: {sorted(map(repr, left))}")

    def _tasks(self) -> list[asyncio.Future[Any]]:
        """The tasks of the client; it lists only some of them."""
        coordinator, fetcher = self._coordinator, self._fetcher
        names = ("_coordination_task", "_heartbeat_task", "_commit_refresh_task", "_reset_committed_task")
        found = [getattr(coordinator, name, None) for name in names]
        if fetcher is not None:
            found += [fetcher._fetch_task, *fetcher._pending_tasks]  # noqa: SLF001 (it has no other way in)
        return [task for task in found if task is not None]

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None) -> None:
        """Commits offsets, each with the identity of its position as metadata.

        An offset that comes with an identity keeps it.
        """
        if offsets is not None:
            given = {
                tp: OffsetAndMetadata(at, "") if isinstance(at, int) else at for tp, at in offsets.items()
            }
            offsets = {
                tp: at
                if at.metadata
                else OffsetAndMetadata(at.offset, self.guard.position(tp, at.offset).identity())
                for tp, at in given.items()
            }
        await super().commit(offsets)

    async def committed_positions(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, Position | None]:
        """The positions that its group has committed; None for a partition without one.

        Raises:
            KafkaError: no broker answered.
        """
        # `committed` drops the metadata.
        found = await self._coordinator.fetch_committed_offsets(list(partitions))
        return {
            tp: Position.from_stored(found[tp].offset, found[tp].metadata) if tp in found else None
            for tp in partitions
        }
