"""A prefix on a broker that denies every operation not listed."""

from __future__ import annotations

import uuid

import pytest
from tests.support.access_lists import Permission, change

from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology import acls, topics
from penstock.kafka.topology.creation import create_topics
from penstock.settings import Kafka


@pytest.fixture
async def acl_prefix(secure_kafka):
    """Creates a prefix with the platform's topics and the access list of each service."""
    prefix = f"a-{uuid.uuid4().hex[:10]}."
    settings = Kafka(kafka=secure_kafka.plain, prefix=prefix)
    await create_topics(settings, [*topics.PLATFORM, topics.ready("t", 2)])
    async with admin_client(settings) as admin:
        for entry in acls.acls(prefix):
            await change(admin, Permission.ALLOW, entry)
        yield prefix
        names = [topic for topic in await admin.list_topics() if topic.startswith(prefix)]
        await admin.delete_topics(names)
