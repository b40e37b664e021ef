"""Members of consumer groups: counting them, and taking lost ones out, so that nothing need wait for the session's end."""

from __future__ import annotations

from aiokafka.protocol.group import LeaveGroupRequest

from penstock.kafka.connection import admin_client, translated
from penstock.settings import Kafka


async def remove(settings: Kafka, group: str, client: str) -> int:
    """Takes every member that calls itself `client` out of a group; returns how many there were.

    One that lives after all notices at its next sign of life and joins anew.

    Raises:
        KafkaUnavailable: not all of them may be out.
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
        KafkaUnavailable: nobody can tell.
    """
    async with admin_client(settings) as admin:
        with translated():
            [answer] = await admin.describe_consumer_groups([group])
    return sum(len(members) for _error, _group, _state, _kind, _protocol, members, *_ in answer.groups)
