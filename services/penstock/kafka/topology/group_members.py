"""Members of consumer groups: which partitions they read, and the removal of lost ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from aiokafka.protocol.group import LeaveGroupRequest

from penstock.errors import KafkaUnavailable
from penstock.kafka.client.connection import admin_client, translated
from penstock.kafka.client.member_data import MemberData
from penstock.kafka.topology.topics import workers_group
from penstock.settings import Kafka

# An HTTP client waits for the answer.
ANSWER_S = 5.0
RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a group.

    Attributes:
        id: by the broker.
        client: its client id: of a worker its id.
        host: its address.
        partitions: of the topics that it reads.
        data: what it says of itself.
    """

    id: str
    client: str
    host: str
    partitions: Mapping[str, frozenset[int]]
    data: MemberData


async def describe(admin: AIOKafkaAdminClient, group: str) -> list[Member] | None:
    """The members of a group that has a stable assignment; None during a rebalance.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    described = await _describe(admin, group)
    if described["state"] not in ("Stable", "Empty", "Dead"):
        return None
    return [_member(raw) for raw in described["members"] if raw["member_assignment"]]


async def _describe(admin: AIOKafkaAdminClient, group: str, coordinator: int | None = None) -> dict[str, Any]:
    with translated():
        [response] = await admin.describe_consumer_groups([group], group_coordinator_id=coordinator)
    found: dict[str, Any] = response.to_object()["groups"][0]
    return found


async def readers(admin: AIOKafkaAdminClient, group: str, topic: str) -> dict[int, str]:
    """The id of the member that reads each partition of a topic; empty during a rebalance.

    Args:
        admin: asks the coordinator.
        group: the group.
        topic: its full name.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    return {
        number: member.id
        for member in await describe(admin, group) or ()
        for number in member.partitions.get(topic, ())
    }


async def count(settings: Kafka, group: str) -> int:
    """How many members a group has, also during a rebalance.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    async with admin_client(settings) as admin:
        return len((await _describe(admin, group))["members"])


async def remove(settings: Kafka, group: str, client: str) -> int:
    """Removes all members with a client id from a group; returns how many there were.

    A member that is alive learns of it by its next heartbeat to Kafka, and joins again.

    Raises:
        KafkaUnavailable: some may not be removed.
    """
    async with admin_client(settings) as admin:
        with translated():
            coordinator = await admin.find_coordinator(group)
            described = await _describe(admin, group, coordinator)
            found = [raw["member_id"] for raw in described["members"] if raw["client_id"] == client]
            for member_id in found:
                # The client library has the request and no method for it.
                await admin._send_request(LeaveGroupRequest(group, member_id), coordinator)  # noqa: SLF001 (see above)
    return len(found)


async def members(settings: Kafka, types: Sequence[str]) -> dict[str, list[Member] | None]:
    """The members of the groups of these types; None for a type during a rebalance.

    Raises:
        KafkaUnavailable: no broker answered in time.
    """
    why: KafkaUnavailable | None = None
    try:
        async with asyncio.timeout(ANSWER_S):
            while True:
                try:
                    async with admin_client(settings) as admin:
                        return {
                            name: await describe(admin, workers_group(settings.prefix, name))
                            for name in types
                        }
                except KafkaUnavailable as error:
                    # The coordinators of a new cluster answer a moment after the first question.
                    why = error
                    await asyncio.sleep(RETRY_S)
    except TimeoutError as error:
        raise why or KafkaUnavailable(
            f"no broker at {settings.kafka} answers within {ANSWER_S:g} s"
        ) from error


def _member(raw: Mapping[str, Any]) -> Member:
    partitions: dict[str, set[int]] = {}
    for tp in ConsumerProtocolMemberAssignment.decode(raw["member_assignment"]).partitions():
        partitions.setdefault(tp.topic, set()).add(tp.partition)
    data = MemberData()
    # Other clients may have other metadata.
    with suppress(ValueError, IndexError):
        data = MemberData.decode(ConsumerProtocolMemberMetadata.decode(raw["member_metadata"]).user_data)
    return Member(
        raw["member_id"],
        raw["client_id"],
        raw["client_host"].removeprefix("/"),
        {topic: frozenset(numbers) for topic, numbers in partitions.items()},
        data,
    )
