"""A process that has lost Kafka says so, also when it is idle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.support.processor_probe import PROBE
from tests.support.waiting import wait_until

from penstock.kafka.client import reachability
from penstock.kafka.client.connection import make_consumer, running
from penstock.kafka.topology.creation import create_topics
from penstock.settings import Kafka


@pytest.fixture
def entries(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[logging.LogRecord]]:
    """The entries of the module, which reports soon."""
    found: list[logging.LogRecord] = []
    monkeypatch.setattr(reachability, "UNREACHABLE_S", 0.2)
    monkeypatch.setattr(reachability.log, "handle", found.append)
    caplog.set_level("INFO", reachability.log.name)
    yield found
    assert reachability._unreachable == set()


def events(entries: list[logging.LogRecord]) -> list[tuple[str, str]]:
    return [(entry.levelname, vars(entry)["event"]) for entry in entries]


def cut(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the client reach no broker, as if all were gone."""

    async def get_conn(*_arguments: Any, **_options: Any) -> None:
        return None

    monkeypatch.setattr(client, "_get_conn", get_conn)
    client.force_metadata_update()


async def test_an_idle_consumer_reports_once_that_kafka_is_gone_and_once_that_it_is_back(
    kafka_servers: str,
    prefix: str,
    entries: list[logging.LogRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """O8: `getmany` never fails, so without this entry an idle worker would be silent for as long
    as Kafka is away. The consumers of a process report together."""
    settings = Kafka(kafka=kafka_servers, prefix=prefix)
    await create_topics(settings, [PROBE])
    async with AsyncExitStack() as stack:
        running_consumers = [
            await stack.enter_async_context(running(make_consumer(settings, None, prefix + PROBE.name)))
            for _ in range(3)
        ]
        clients = [consumer._client for consumer in running_consumers]
        with monkeypatch.context() as patch:
            for client in clients:
                cut(client, patch)
            await wait_until(lambda: events(entries))
            # All of them have requested metadata without an answer.
            await asyncio.gather(*(client.force_metadata_update() for client in clients))
        await asyncio.gather(*(client.force_metadata_update() for client in clients))
    assert events(entries) == [("WARNING", "kafka_unreachable"), ("INFO", "kafka_reachable")]
    assert vars(entries[0])["servers"] == kafka_servers
    assert "PENSTOCK_KAFKA" in entries[0].getMessage()


async def test_a_consumer_that_closes_reports_nothing(
    kafka_servers: str, prefix: str, entries: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """O8: a service that stops while Kafka is away does not report later that it is lost."""
    settings = Kafka(kafka=kafka_servers, prefix=prefix)
    await create_topics(settings, [PROBE])
    loop = asyncio.get_running_loop()
    fired = loop.create_future()
    async with running(make_consumer(settings, None, prefix + PROBE.name)) as consumer:
        cut(consumer._client, monkeypatch)
        await consumer._client.force_metadata_update()
    # Behind the timer of the consumer, which was set before.
    loop.call_later(reachability.UNREACHABLE_S, fired.set_result, None)
    await fired
    assert events(entries) == []
