"""Members of consumer groups: who reads what, how many there are, and the removal of lost ones."""

from __future__ import annotations

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from aiokafka.protocol.group import LeaveGroupRequest

from penstock.kafka.client.connection import admin_client, translated
from penstock.settings import Kafka


async def remove(settings: Kafka, group: str, client: str) -> int:
    """Removes all members with a client id from a group; returns how many there were.

    A member that is alive learns of it by its next heartbeat to Kafka, and joins again.

    Raises:
        KafkaUnavailable: some may not be removed.
    """
    async with admin_client(settings) as admin:
        with translated():
            coordinator = await admin.find_coordinator(group)
            [answer] = await admin.describe_consumer_groups([group], group_coordinator_id=coordinator)
            found = [
                member_id
                for _error, _group, _state, _kind, _protocol, members, *_ in answer.groups
                for member_id, client_id, *_ in members
                if client_id == client
            ]
            for member_id in found:
                # The client library has the request and no method for it.
                await admin._send_request(LeaveGroupRequest(group, member_id), coordinator)  # noqa: SLF001 (see above)
    return len(found)


async def count(settings: Kafka, group: str) -> int:
    """How many members a group has.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    async with admin_client(settings) as admin:
        with translated():
            [answer] = await admin.describe_consumer_groups([group])
    return sum(len(members) for _error, _group, _state, _kind, _protocol, members, *_ in answer.groups)


async def readers(admin: AIOKafkaAdminClient, group: str, topic: str) -> dict[int, str]:
    """The member that reads each partition of a topic; empty while the group is in a rebalance.

    Args:
        admin: asks the coordinator.
        group: the group.
        topic: its full name.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    with translated():
        [answer] = await admin.describe_consumer_groups([group])
    [(error, _group, state, _kind, _protocol, members, *_)] = answer.groups
    if error or state != "Stable":
        return {}
    return {
        number: member_id
        for member_id, _client, _host, _metadata, assignment in (member[:5] for member in members)
        if assignment
        for tp_topic, numbers in ConsumerProtocolMemberAssignment.decode(assignment).assignment
        if tp_topic == topic
        for number in numbers
    }
