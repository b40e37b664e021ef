"""Members of consumer groups: counts them, and removes lost ones before their session expires."""

from __future__ import annotations

from aiokafka.protocol.group import LeaveGroupRequest

from penstock.kafka.connection import admin_client, translated
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
