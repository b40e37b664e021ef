"""Topics that take no records for now, on a cluster with too few replicas in sync.

The topics of a test need all three replicas for a write, and one of three brokers is stopped. All
other topics take records, and all of them can be read.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from tests.support.callback_targets import make_callback
from tests.support.memory_folder import make_folder
from tests.support.services import read
from tests.support.topics import require_replicas

from penstock.concurrency.outages import waiting_s
from penstock.errors import KafkaUnavailable
from penstock.kafka.client import pending_writes
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.client.pending_writes import probe_writes
from penstock.kafka.processing.outbox import publish, send_all
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import CALLBACKS, EVENTS, PLATFORM, ready
from penstock.local.cluster import Cluster, three_brokers
from penstock.local.supervisor import Supervisor
from penstock.metrics.server import readiness
from penstock.settings import Kafka

# The broker that is stopped.
STOPPED = 3


# In a loop of its own, because each test has its own one.
@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    folder = make_folder()
    log = (folder / "log").open("w", encoding="utf-8", buffering=1)
    supervisor = Supervisor(lambda name, line: print(name, line, file=log), run_dir=folder / "run")
    try:
        async with three_brokers(supervisor, folder) as cluster:
            yield cluster
    finally:
        await asyncio.to_thread(supervisor.close)
        log.close()
        shutil.rmtree(folder)


@pytest.fixture
async def kafka(cluster: Cluster, prefix: str) -> Kafka:
    settings = Kafka(kafka=cluster.servers, prefix=prefix, session_timeout_s=6.0)
    await create_topics(settings, [*PLATFORM, ready("held", 2), ready("free", 2)])
    return settings


async def require_all_replicas(settings: Kafka, *topics: str) -> None:
    await require_replicas(settings, [settings.prefix + topic for topic in topics], 3)


@asynccontextmanager
async def too_few_replicas(cluster: Cluster) -> AsyncIterator[None]:
    await cluster.brokers[STOPPED].stop()
    try:
        yield
    finally:
        await cluster.brokers[STOPPED].start()


async def test_a_topic_that_takes_no_records_delays_no_other(
    cluster: Cluster, kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S11, O2: records for a topic without enough replicas wait for a limited time. The error and
    the probe name the topic and the reason, further records are refused at once, and all other
    topics take theirs. The records that waited are written when the replicas are back."""
    await require_all_replicas(kafka, EVENTS.name)
    topic, other = kafka.prefix + EVENTS.name, kafka.prefix + CALLBACKS.name
    async with running(make_producer(kafka)) as producer:
        await send_all(producer, topic, [(b"1", b"{}")])
        async with too_few_replicas(cluster):
            monkeypatch.setattr(pending_writes, "WRITE_S", 2.0)
            with pytest.raises(KafkaUnavailable, match=r"events: too few replicas are in sync"):
                await send_all(producer, topic, [(b"1", b"{}")])
            with pytest.raises(KafkaUnavailable, match=r"events: too few replicas are in sync"):
                await send_all(producer, topic, [(b"1", b"{}")] * 1_000)
            document, status = await readiness({"writes": probe_writes})
            assert (document["status"], status) == ("ready in part", 200)
            assert topic in document["checks"]["writes"]
            assert waiting_s()["kafka"] > 0
            # From here on, only a write that never ends is too late: the machine may be busy.
            monkeypatch.setattr(pending_writes, "WRITE_S", 600.0)
            await send_all(producer, other, [(b"1", b"{}")])
        await send_all(producer, topic, [(b"1", b"{}")])
        await probe_writes()
        assert waiting_s()["kafka"] == 0
    # The first one, the one that waited, and the last one: no other was kept.
    assert len(await read(cluster.servers, topic)) == 3


async def test_events_that_wait_hold_up_no_callbacks(
    cluster: Cluster, kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S11: the topic of events takes no records, and callbacks of the same transactions leave."""
    monkeypatch.setattr(pending_writes, "WRITE_S", 1.0)
    await require_all_replicas(kafka, EVENTS.name)
    async with running(make_producer(kafka)) as producer, too_few_replicas(cluster):
        for number in range(2):
            callbacks = [make_callback("http://127.0.0.1/", number)]
            with pytest.raises(KafkaUnavailable):
                await publish(producer, kafka, [b"1"], [b"{}"], callbacks)
        assert len(await read(cluster.servers, kafka.prefix + CALLBACKS.name)) == 2
