"""What is known of one owned type, and how its window learns what workers take and get done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    KafkaError,
    NotCoordinatorForGroupError,
)
from aiokafka.structs import OffsetAndMetadata

from penstock.core.window import Reason, Window, WindowPolicy
from penstock.errors import KafkaUnavailable
from penstock.kafka.connection import translated
from penstock.kafka.topics import ready, workers_group
from penstock.postgres import release
from penstock.postgres.session import Session
from penstock.postgres.types import TaskType
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Seconds between looks at what has ended of what was released, while a window holds tasks back.
MEASURE_S = 0.2
# Nor where nothing was taken for so long: there is nothing to learn, and there may be hundreds of such types.
STILL_S = 10.0
# A full window of which nothing was taken for some seconds is looked at again after a tenth of them, and so on.
PATIENT = 10
LONGEST_PATIENCE_S = 1.0
# Said while a group has no coordinator, or it is on its way to another broker.
_NO_COORDINATOR = (
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    NotCoordinatorForGroupError,
)


@dataclass(slots=True)
class Gate:
    """What is known of one owned type.

    Attributes:
        type: its configuration.
        topic: full name of its ready topic.
        window: how many records may wait there, unless its rate says less (`sized`).
        written: records the topic holds in all, all partitions added up.
        taken: of these, how many the workers have taken.
        dirty: something may be ready.
        queued: something may be queued.
        next_partition: where the next slice goes.
        looked_s: when `taken` was last read, on the loop's clock.
        moved_s: when `taken` was last found to have grown, on the loop's clock.
        patience_s: how long to wait before reading it again.
        measured_s: when the window was last told what has ended, on the loop's clock.
        released: tasks brought there by this process.
        told: what the window's size went by when it was last logged.
        filled: the window was full, and more than half of it waits still.
    """

    type: TaskType
    topic: str
    window: Window
    written: int = 0
    taken: int = 0
    dirty: bool = True
    queued: bool = True
    next_partition: int = 0
    looked_s: float = float("-inf")
    moved_s: float = float("-inf")
    patience_s: float = 0.0
    measured_s: float = float("-inf")
    released: int = 0
    told: Reason = Reason.FLOOR
    filled: bool = False

    @property
    def lag(self) -> int:
        """Records that no worker has taken."""
        return max(0, self.written - self.taken)

    def room(self) -> int:
        """How many more records may wait on the ready topic.

        Once that was none, it is none until half of them are taken: whatever is released one by one as room comes up is
        claimed, run and committed in as many batches.
        """
        size, lag = self.sized()[0], self.lag
        self.filled = lag >= size or (self.filled and lag * 2 > size)
        return 0 if self.filled else size - lag

    def wants_look(self, now_s: float) -> bool:
        """Whether something may be ready for a window that is at least half full and not known well enough."""
        return self.dirty and self.lag * 2 > self.sized()[0] and now_s - self.looked_s >= self.patience_s

    def sized(self) -> tuple[int, Reason]:
        """Most records that may wait, and what that goes by.

        Of a type with a rate no more than a second's starts: a worker that comes late begins them at once.
        """
        rate = self.type.starts_per_s
        if rate is not None and max(1, ceil(rate)) < self.window.size:
            return max(1, ceil(rate)), Reason.RATE
        return self.window.size, self.window.reason


class Looking:
    """Looks at ready topics and at what became of their tasks.

    Args:
        settings: of the service.
        session: the one that owns the types.
        admin: reads the workers' offsets.
    """

    def __init__(self, settings: TaskSyncSettings, session: Session, admin: AIOKafkaAdminClient) -> None:
        self._settings = settings
        self._session = session
        self._admin = admin
        # The broker that keeps a group's offsets, by group, as far as it is known.
        self._coordinators: dict[str, int] = {}

    async def look(self, gate: Gate) -> None:
        """Reads how much of the topic the workers have taken."""
        group = workers_group(self._settings.prefix, gate.type.name)
        try:
            committed = await self._committed(group)
        except KafkaUnavailable as error:
            if not isinstance(error.__cause__, _NO_COORDINATOR):
                raise
            # A broker that has only just started has yet to appoint it: what is known holds until the next look.
            log.info("%s: what its workers have taken is not known yet: %s", gate.type.name, error)
            taken = gate.taken
        else:
            taken = sum(
                meta.offset for tp, meta in committed.items() if tp.topic == gate.topic and meta.offset > 0
            )
        gate.looked_s = asyncio.get_running_loop().time()
        if taken != gate.taken:
            gate.taken, gate.moved_s = taken, gate.looked_s
        # Where nobody takes anything there is no hurry to look again. Who takes much at once does it now and then.
        patience_s = (gate.looked_s - gate.moved_s) / PATIENT
        gate.patience_s = max(self._settings.lag_poll_s, min(patience_s, LONGEST_PATIENCE_S))

    async def _committed(self, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
        """A group's offsets, from the broker that kept them last time, or from whoever keeps them now."""
        found: dict[TopicPartition, OffsetAndMetadata] = {}
        with translated():
            keeper = self._coordinators.pop(group, None)
            if keeper is not None:
                with suppress(KafkaError):
                    found = await self._admin.list_consumer_group_offsets(group, keeper)
            if not found:
                # Also what the client makes of a broker's answer that it does not keep them any more.
                keeper = await self._admin.find_coordinator(group)
                found = await self._admin.list_consumer_group_offsets(group, keeper)
        if found and keeper is not None:
            self._coordinators[group] = keeper
        return found

    async def open(self, taken: Sequence[TaskType], offsets: AIOKafkaConsumer) -> list[Gate]:
        """Gates of types that are owned now; together, for a replica that is lost may leave hundreds.

        Args:
            taken: the types; their topics exist.
            offsets: reads where these end.
        """
        settings = self._settings
        policy = WindowPolicy(settings.window_floor, settings.window, settings.window_s)
        gates = [
            Gate(one, settings.prefix + ready(one.name, one.partitions).name, Window(policy)) for one in taken
        ]
        partitions = [
            TopicPartition(gate.topic, number) for gate in gates for number in range(gate.type.partitions)
        ]
        with translated():
            ends = await offsets.end_offsets(partitions)
        for gate in gates:
            gate.written = sum(end for partition, end in ends.items() if partition.topic == gate.topic)
        await asyncio.gather(*map(self.look, gates))
        return gates

    async def look_at_full(self, gates: Sequence[Gate]) -> None:
        """As `look`, of windows that are at least half full: tells them what their workers have left and got done."""
        # Of hundreds of types that nobody works on, each after the other would make those wait that are worked on.
        await asyncio.gather(*map(self.look, gates))
        for gate in gates:
            await self._measure(gate)
            _tell(gate)

    async def _measure(self, gate: Gate) -> None:
        if gate.sized()[1] is not Reason.RATE:
            # Of what a rate lets through, workers leave little however well they are fed.
            gate.window.left(gate.lag, gate.looked_s)
        if gate.looked_s - gate.measured_s < MEASURE_S or gate.looked_s - gate.moved_s > STILL_S:
            return
        window = gate.window
        under_way = await release.under_way(self._session, window.watched())
        gate.measured_s = asyncio.get_running_loop().time()
        window.looked(under_way, gate.measured_s)


def _tell(gate: Gate) -> None:
    """Logs what the window's size goes by, when that has changed."""
    size, reason = gate.sized()
    if reason is not gate.told:
        gate.told = reason
        log.debug(
            "%s: window of %d records by its %s: %.1f tasks/s end, %d records wait for workers",
            gate.type.name,
            size,
            reason,
            gate.window.drain_per_s,
            gate.lag,
        )
