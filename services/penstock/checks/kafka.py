"""What a check asks Kafka: how far readers are, what they have not read, and which partitions somebody reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.errors import GroupCoordinatorNotAvailableError

from penstock.errors import KafkaUnavailable
from penstock.kafka.connection import translated
from penstock.settings import Kafka

COORDINATOR_S = 10.0


@dataclass(frozen=True, slots=True)
class Unread:
    """A stretch of a partition that its readers have not committed: from `begin` up to (not with) `end`."""

    begin: int
    end: int


class Topics:
    """Looks at topics, and joins no group.

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
        """What a group has committed.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        answer = await _insist(lambda: self._admin.list_consumer_group_offsets(group))
        return {tp: meta.offset for tp, meta in answer.items() if meta.offset >= 0}

    async def ends(self, topic: str) -> dict[TopicPartition, int]:
        """Where the partitions of a topic (bare name) end; empty when there is no such topic.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        with translated():
            # Asked about a topic that does not exist, the consumer would wait for it to be made.
            if self._prefix + topic not in await self._admin.list_topics():
                return {}
            [described] = await self._admin.describe_topics([self._prefix + topic])
            partitions = [
                TopicPartition(self._prefix + topic, p["partition"]) for p in described["partitions"]
            ]
            ends: dict[TopicPartition, int] = await self._consumer.end_offsets(partitions)
        return ends

    async def unread(self, topic: str, committed: dict[TopicPartition, int]) -> dict[TopicPartition, Unread]:
        """The partitions of a topic (bare name) with records behind what is committed.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        ends = await self.ends(topic)
        if not ends:
            return {}
        with translated():
            begins = await self._consumer.beginning_offsets(list(ends))
        stretches = {tp: Unread(max(begins[tp], committed.get(tp, 0)), end) for tp, end in ends.items()}
        return {tp: stretch for tp, stretch in stretches.items() if stretch.begin < stretch.end}

    async def stale(self, unread: dict[TopicPartition, Unread], age_s: float) -> set[TopicPartition]:
        """Those partitions whose oldest unread record is older than `age_s` seconds.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        if not unread:
            return set()
        since_ms = int((time.time() - age_s) * 1000)
        with translated():
            later = await self._consumer.offsets_for_times(dict.fromkeys(unread, since_ms))
        return {
            tp for tp, stretch in unread.items() if later.get(tp) is None or later[tp].offset > stretch.begin
        }

    async def oldest_s(
        self, unread: dict[TopicPartition, Unread], within_s: float
    ) -> dict[TopicPartition, float]:
        """When the oldest unread record of each partition was written, in seconds since the epoch.

        Of a partition that does not answer in time it is the beginning of time.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        found = dict.fromkeys(unread, 0.0)
        remaining = set(unread)
        deadline_s = time.monotonic() + within_s
        with translated():
            self._consumer.assign(list(unread))
            for tp, stretch in unread.items():
                self._consumer.seek(tp, stretch.begin)
            while remaining and time.monotonic() < deadline_s:
                for tp, records in (await self._consumer.getmany(*remaining, timeout_ms=500)).items():
                    found[tp] = records[0].timestamp / 1000
                    self._consumer.pause(tp)
                    remaining.discard(tp)
        return found

    async def values(self, unread: dict[TopicPartition, Unread], within_s: float) -> AsyncIterator[bytes]:
        """The values of unread records, a few at a time.

        Raises:
            TimeoutError: there were more than could be read in time.
            KafkaUnavailable: no broker answered.
        """
        if not unread:
            return
        deadline_s = time.monotonic() + within_s
        remaining = set(unread)
        with translated():
            self._consumer.assign(list(unread))
            for tp, stretch in unread.items():
                self._consumer.seek(tp, stretch.begin)
            while remaining:
                for tp, records in (await self._consumer.getmany(*remaining, timeout_ms=500)).items():
                    for record in records:
                        if record.offset < unread[tp].end:
                            yield record.value or b""
                for tp in list(remaining):
                    if await self._consumer.position(tp) >= unread[tp].end:
                        self._consumer.pause(tp)
                        remaining.discard(tp)
                if remaining and time.monotonic() > deadline_s:
                    raise TimeoutError

    async def read_by_somebody(self, group: str) -> set[TopicPartition] | None:
        """The partitions that a group's members have; None while they are being given out.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        [response] = await _insist(lambda: self._admin.describe_consumer_groups([group]))
        described = response.to_object()["groups"][0]
        if described["state"] not in ("Stable", "Empty", "Dead"):
            return None
        return {
            tp
            for member in described["members"]
            if member["member_assignment"]
            for tp in ConsumerProtocolMemberAssignment.decode(member["member_assignment"]).partitions()
        }


async def _insist(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Asks a group's coordinator, which a broker that has only just started has yet to appoint.

    Raises:
        KafkaUnavailable: there is none after `COORDINATOR_S` seconds.
    """
    deadline_s = time.monotonic() + COORDINATOR_S
    while True:
        try:
            with translated():
                return await ask()
        except KafkaUnavailable as error:
            passing = isinstance(error.__cause__, GroupCoordinatorNotAvailableError)
            if not passing or time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.2)
