"""Entries of a broker's access lists, which the client library has no method for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import IntEnum

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import for_code
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest

from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology import rights
from penstock.kafka.topology.acls import AccessRule
from penstock.settings import Kafka

# Numbers in Kafka's protocol.
KINDS = {rights.TOPIC: 2, rights.GROUP: 3}
PATTERNS = {rights.LITERAL: 3, rights.PREFIXED: 4}
OPERATIONS = {
    "Read": 3,
    "Write": 4,
    "Create": 5,
    "Delete": 6,
    "Alter": 7,
    "Describe": 8,
    "DescribeConfigs": 10,
    "AlterConfigs": 11,
}


class Permission(IntEnum):
    """The effect of an entry, by its number in Kafka's protocol."""

    DENY = 2
    ALLOW = 3


async def change(
    admin: AIOKafkaAdminClient, permission: Permission, entry: AccessRule, *, remove: bool = False
) -> None:
    """Adds or removes an entry of the user that is named like its service."""
    for operation in entry.operations:
        make = DeleteAclsRequest if remove else CreateAclsRequest
        request = make(
            KINDS[entry.kind],
            entry.name,
            PATTERNS[entry.pattern],
            f"User:{entry.service}",
            "*",
            OPERATIONS[operation],
            permission,
        )
        answer = await admin._send_to_controller(request)
        for code, message, *_ in answer.filter_responses if remove else answer.creation_responses:
            assert not code, (for_code(code), message)


@asynccontextmanager
async def denied(kafka: str, entry: AccessRule) -> AsyncIterator[None]:
    """Denies an operation for the time of a block; a denial overrides every permission."""
    async with admin_client(Kafka(kafka=kafka)) as admin:
        await change(admin, Permission.DENY, entry)
        try:
            yield
        finally:
            await change(admin, Permission.DENY, entry, remove=True)
