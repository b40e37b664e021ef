"""Positions that do not fit their topics: the check finds them, and the repair moves them."""

from __future__ import annotations

import pytest
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata
from tests.support.services import make_topics, write
from tests.support.state_faults import commit_offsets, delete_records, recreate_topic

from penstock.checks.app import check
from penstock.checks.report import Rule
from penstock.core.position import topic_of
from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import (
    FLOWS_SUBMITTED,
    HEARTBEATS,
    SUBMITTED,
    Topic,
    ready,
    service_group,
    workers_group,
)
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.settings import Kafka, Platform

OTHER = "someothertopicid000000/0/7@20"


@pytest.fixture
async def settings(kafka_servers, prefix, database):
    await make_topics(kafka_servers, prefix)
    return Platform(kafka=kafka_servers, prefix=prefix, postgres=database)


@pytest.fixture
async def pool(settings):
    async with open_pool(settings.postgres, "test") as pool:
        yield pool


def name(settings: Kafka, topic: Topic) -> str:
    return settings.prefix + topic.name


async def test_an_ingest_position_of_another_topic_is_found_and_moved(settings, pool):
    """A stored offset of a topic that was created again is an offender; the repair moves it."""
    topic = name(settings, SUBMITTED)
    await write(settings.kafka, topic, b"{}", partition=0)
    await pool.execute("INSERT INTO ingested VALUES ($1, 0, 20, $2)", topic, OTHER)
    report = await check(settings)
    assert report.counts[Rule.MISPLACED] == 1
    [found] = [offender for offender in report.offenders if offender.rule is Rule.MISPLACED]
    assert found.id == f"{topic}/0"
    assert "created again" in found.lacks
    report = await check(settings, repair=True)
    assert report.repaired[Rule.MISPLACED] == 1
    assert report.remaining[Rule.MISPLACED] == 0
    assert await pool.fetchval("SELECT next_offset FROM ingested") == 0
    assert (await check(settings)).moved == {"replaced": 1}


@pytest.mark.parametrize("of_workers", [False, True])
async def test_offsets_of_a_group_beyond_the_end_are_found_and_moved(settings, pool, of_workers):
    """The same for the groups of services and of workers. The new position names its topic's id."""
    group, topic = service_group(settings.prefix, "heartbeats"), HEARTBEATS
    if of_workers:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        group, topic = workers_group(settings.prefix, "t"), ready("t", 2)
        await create_topics(settings, [topic])
    partition = TopicPartition(name(settings, topic), 0)
    await commit_offsets(settings, group, {partition: OffsetAndMetadata(100, "")})
    report = await check(settings, repair=True)
    assert report.counts == {Rule.MISPLACED: 1}
    assert not report.remaining
    async with admin_client(settings) as admin:
        moved = (await admin.list_consumer_group_offsets(group))[partition]
    assert moved.offset == 0
    assert topic_of(moved.metadata)


async def test_deleted_submissions_are_told_until_they_are_noted(settings, pool):
    """Records that were deleted before they were read are an offender until the repair notes
    them."""
    topic = name(settings, SUBMITTED)
    await write(settings.kafka, topic, *[b"{}"] * 5, partition=0)
    await delete_records(settings, SUBMITTED.name, {0: 5})
    await pool.execute("INSERT INTO ingested VALUES ($1, 0, 2)", topic)
    report = await check(settings, repair=True)
    assert report.counts == {Rule.MISPLACED: 1}
    assert report.remaining == {Rule.LOST: 1}
    report = await check(settings, repair=True)
    assert "lost 3 records" in report.offenders[0].lacks
    assert not report.remaining
    assert (await check(settings)).clean


@pytest.mark.parametrize("ingested", [SUBMITTED, FLOWS_SUBMITTED], ids=lambda topic: topic.name)
async def test_a_recreated_topic_without_its_reader_is_found(settings, pool, ingested):
    """A topic that was created again under a reader that is stopped is an offender by its id."""
    topic = name(settings, ingested)
    await write(settings.kafka, topic, *[b"{}"] * 3, partition=0)
    async with admin_client(settings) as admin:
        assert topic in await admin.list_topics()
    await pool.execute("INSERT INTO ingested VALUES ($1, 0, 3, $2)", topic, "//@3")
    assert (await check(settings)).clean
    await check(settings, repair=True)
    await recreate_topic(settings, ingested)
    assert (await check(settings)).counts == {Rule.MISPLACED: 1}
