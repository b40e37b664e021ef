"""The queries of a check to Kafka: committed offsets, unread records, assigned partitions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupCoordinatorNotAvailableError
from aiokafka.structs import ConsumerRecord

from penstock.concurrency.retry import STARTUP_BACKOFF, retry_until_available
from penstock.core.position import Position, Start, taken
from penstock.errors import KafkaUnavailable
from penstock.kafka.client import positions
from penstock.kafka.client.connection import translated
from penstock.kafka.topology.group_members import describe
from penstock.settings import Kafka

# Seconds to wait for a group's coordinator: a broker that has just started appoints it late.
COORDINATOR_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Unread:
    """Offsets of a partition that its reader has not committed: from `begin`, before `end`."""

    begin: int
    end: int


class Topics:
    """Reads topics without joining a group.

    Args:
        settings: for the prefix.
        admin: started.
        consumer: started, without group and topics.
    """

    def __init__(self, settings: Kafka, admin: AIOKafkaAdminClient, consumer: AIOKafkaConsumer) -> None:
        self._prefix = settings.prefix
        self._admin = admin
        self._consumer = consumer

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        """The offsets that a group has committed.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        return {tp: position.offset for tp, position in (await self.positions(group)).items()}

    async def positions(self, group: str) -> dict[TopicPartition, Position]:
        """The positions that a group has committed, with their identities.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        answer = await _ask_coordinator(lambda: self._admin.list_consumer_group_offsets(group))
        return {
            tp: Position.from_stored(meta.offset, meta.metadata)
            for tp, meta in answer.items()
            if meta.offset >= 0
        }

    async def check(self, stored: Mapping[TopicPartition, Position]) -> dict[TopicPartition, Start]:
        """See `kafka.client.positions.check`; leaves out partitions that do not exist.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        if not stored:
            return {}
        with translated():
            existing = set(await self._admin.list_topics()) & {tp.topic for tp in stored}
            described = await self._admin.describe_topics(sorted(existing)) if existing else []
        partitions = {
            TopicPartition(topic["topic"], part["partition"])
            for topic in described
            for part in topic["partitions"]
        }
        return await positions.check(
            self._consumer, {tp: at for tp, at in stored.items() if tp in partitions}
        )

    async def ends(self, topic: str) -> dict[TopicPartition, int]:
        """The ends of the partitions of a topic, named without the prefix; empty without the topic.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        with translated():
            # The consumer would wait for a topic that does not exist.
            if self._prefix + topic not in await self._admin.list_topics():
                return {}
            [described] = await self._admin.describe_topics([self._prefix + topic])
            partitions = [
                TopicPartition(self._prefix + topic, p["partition"]) for p in described["partitions"]
            ]
            ends: dict[TopicPartition, int] = await self._consumer.end_offsets(partitions)
        return ends

    async def unread(self, topic: str, committed: dict[TopicPartition, int]) -> dict[TopicPartition, Unread]:
        """The partitions of a topic, named without the prefix, that have uncommitted records.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        ends = await self.ends(topic)
        if not ends:
            return {}
        with translated():
            begins = await self._consumer.beginning_offsets(list(ends))
        ranges = {tp: Unread(taken(committed.get(tp, -1), begins[tp], end), end) for tp, end in ends.items()}
        return {tp: unread for tp, unread in ranges.items() if unread.begin < unread.end}

    async def newest(self, topic: str, most: int, age_s: float) -> dict[TopicPartition, Unread]:
        """The newest records of each partition of a topic, named without the prefix.

        Args:
            topic: its name.
            most: how many records of a partition at most.
            age_s: seconds since the oldest of them was written, at most.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        ends = await self.ends(topic)
        if not ends:
            return {}
        since_ms = int((time.time() - age_s) * 1000)
        with translated():
            begins = await self._consumer.beginning_offsets(list(ends))
            later = await self._consumer.offsets_for_times(dict.fromkeys(ends, since_ms))
        ranges = {
            tp: Unread(max(found.offset, begins[tp], ends[tp] - most), ends[tp])
            for tp, found in later.items()
            if found is not None
        }
        return {tp: recent for tp, recent in ranges.items() if recent.begin < recent.end}

    async def older(self, unread: dict[TopicPartition, Unread], age_s: float) -> set[TopicPartition]:
        """The partitions whose oldest unread record is older than `age_s` seconds.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        if not unread:
            return set()
        since_ms = int((time.time() - age_s) * 1000)
        with translated():
            later = await self._consumer.offsets_for_times(dict.fromkeys(unread, since_ms))
        return {
            tp for tp, offsets in unread.items() if later.get(tp) is None or later[tp].offset > offsets.begin
        }

    async def oldest_s(
        self, unread: dict[TopicPartition, Unread], within_s: float
    ) -> dict[TopicPartition, float]:
        """When the oldest unread record was written, in seconds since 1970; 0 if not read in time.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        found = dict.fromkeys(unread, 0.0)
        remaining = set(unread)
        deadline_s = time.monotonic() + within_s
        with translated():
            self._consumer.assign(list(unread))
            for tp, offsets in unread.items():
                self._consumer.seek(tp, offsets.begin)
            while remaining and time.monotonic() < deadline_s:
                for tp, records in (await self._consumer.getmany(*remaining, timeout_ms=500)).items():
                    found[tp] = records[0].timestamp / 1000
                    self._consumer.pause(tp)
                    remaining.discard(tp)
        return found

    async def values(self, unread: dict[TopicPartition, Unread], within_s: float) -> AsyncIterator[bytes]:
        """The values of unread records; see `records`."""
        async for record in self.records(unread, within_s):
            yield record.value or b""

    async def records(
        self, unread: dict[TopicPartition, Unread], within_s: float
    ) -> AsyncIterator[ConsumerRecord[bytes, bytes]]:
        """Unread records, a few at a time.

        Raises:
            TimeoutError: not all records could be read in time.
            KafkaUnavailable: no broker answered.
        """
        if not unread:
            return
        deadline_s = time.monotonic() + within_s
        remaining = set(unread)
        with translated():
            self._consumer.assign(list(unread))
            for tp, offsets in unread.items():
                self._consumer.seek(tp, offsets.begin)
            while remaining:
                for tp, records in (await self._consumer.getmany(*remaining, timeout_ms=500)).items():
                    for record in records:
                        if record.offset < unread[tp].end:
                            yield record
                for tp in list(remaining):
                    if await self._consumer.position(tp) >= unread[tp].end:
                        self._consumer.pause(tp)
                        remaining.discard(tp)
                if remaining and time.monotonic() > deadline_s:
                    raise TimeoutError

    async def assigned(self, group: str) -> set[TopicPartition] | None:
        """The partitions that are assigned to a group's members; None during a rebalance.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        members = await _ask_coordinator(lambda: describe(self._admin, group))
        if members is None:
            return None
        return {
            TopicPartition(topic, number)
            for member in members
            for topic, numbers in member.partitions.items()
            for number in numbers
        }


async def _ask_coordinator(request: Callable[[], Awaitable[Any]]) -> Any:
    """Sends a request to a group's coordinator, and waits until the broker has appointed one.

    Raises:
        KafkaUnavailable: there is none after `COORDINATOR_WITHIN_S` seconds, or no broker answered.
    """

    async def ask() -> Any:
        try:
            with translated():
                return await request()
        except KafkaUnavailable as error:
            if isinstance(error.__cause__, GroupCoordinatorNotAvailableError):
                raise _NoCoordinator(str(error)) from error
            raise

    return await retry_until_available(
        ask,
        waiting_for="group coordinator",
        backoff=STARTUP_BACKOFF,
        retry_on=(_NoCoordinator,),
        within_s=COORDINATOR_WITHIN_S,
    )


class _NoCoordinator(KafkaUnavailable):
    """The broker has not appointed the group's coordinator yet."""
