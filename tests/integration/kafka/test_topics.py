"""`penstock topics plan` and `apply` on a real broker."""

import json
import time

import pytest
from click.testing import CliRunner
from tests.support.waiting import wait_until

from penstock.cli.main import cli
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.topology import topic_config, topic_plan
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import PLATFORM, ready
from penstock.settings import Kafka

pytestmark = pytest.mark.declared_topics

SAFE = "[topics.submitted]\npartitions = 6\n[topics.events]\nretention_days = 3\n[topics.ready]\nretention_days = 2\n"


@pytest.fixture
def verb(kafka_servers, prefix, tmp_path, monkeypatch):
    """Runs a verb under a declaration and returns its status, JSON and stderr."""

    def run(name, declaration):
        (tmp_path / "topics.toml").write_text(declaration)
        monkeypatch.setenv("PENSTOCK_TOPICS_FILE", str(tmp_path / "topics.toml"))
        topic_config._read.cache_clear()
        result = CliRunner().invoke(
            cli, ["topics", name, "--kafka", kafka_servers, "--prefix", prefix, "--json"]
        )
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result.exit_code, json.loads(result.stdout or "{}"), result.stderr

    return run


def topic_and_property(differences):
    return {(difference["topic"].partition(".")[2], difference["what"]) for difference in differences}


def test_apply_removes_every_difference_of_the_plan(verb):
    """O5: `apply` creates missing topics, adds partitions and alters configs, and keeps other
    configs. `plan` returns status 8 before and 0 after."""
    status, found, _ = verb("plan", "")
    assert status == 8
    assert {difference["topic"].partition(".")[2] for difference in found["differences"]} == {
        topic.name for topic in PLATFORM
    }
    assert verb("apply", "")[0] == 0
    assert verb("plan", "")[:2] == (0, {"differences": [], "applied": []})
    other = "[topics.events]\nconfig = {'segment.bytes' = 1048576}\n"
    assert verb("apply", other)[0] == 0
    status, found, _ = verb("plan", SAFE)
    assert (status, topic_and_property(found["differences"])) == (
        8,
        {("submitted", "partitions"), ("events", "retention.ms")},
    )
    assert verb("apply", SAFE)[0] == 0
    assert verb("plan", SAFE)[0] == 0
    # Altering one config keeps the other.
    assert verb("plan", other + "retention_days = 3\n[topics.submitted]\npartitions = 6\n")[0] == 0


def test_apply_skips_unsafe_changes_and_makes_the_others(verb):
    """O5: `apply` repartitions no heartbeats and moves no replicas. It reports both with status 8
    and applies the other changes."""
    assert verb("apply", "")[0] == 0
    unsafe = SAFE + "[topics.heartbeats]\npartitions = 16\n[topics.revoked]\nreplication = 2\n"
    status, found, _ = verb("apply", unsafe)
    assert status == 8
    assert topic_and_property(found["differences"]) == {
        ("heartbeats", "partitions"),
        ("revoked", "replication"),
    }
    assert all(difference["refused"] for difference in found["differences"])
    assert topic_and_property(found["applied"]) == {("submitted", "partitions"), ("events", "retention.ms")}
    assert verb("plan", SAFE)[0] == 0


async def test_ready_topics_are_altered_and_never_repartitioned(kafka_servers, prefix, tmp_path):
    """O5: `apply` alters ready topics and keeps their partitions, which the task type sets."""
    await create_topics(Kafka(kafka=kafka_servers, prefix=prefix), [*PLATFORM, ready("t", 3)])
    (tmp_path / "topics.toml").write_text(SAFE)
    settings = Kafka(kafka=kafka_servers, prefix=prefix, topics_file=str(tmp_path / "topics.toml"))

    async def ready_topic_differs():
        differences = await topic_plan.plan(settings)
        return (f"{prefix}ready.t", "retention.ms") in {
            (difference.topic, difference.what) for difference in differences
        } and differences

    differences = await wait_until(ready_topic_differs, what="the ready topic differs")
    assert await topic_plan.apply(settings, differences) == []
    assert await topic_plan.plan(settings) == []


def test_more_replicas_than_brokers_are_reported(verb):
    """O5: `apply` reports the cluster's own message when replication exceeds the number of
    brokers."""
    status, _, stderr = verb("apply", "[defaults]\nreplication = 3\n")
    assert status == 5
    assert "would not create topic" in stderr


async def test_the_broker_stamps_records_of_every_topic(kafka_servers, prefix):
    """O5, O1: the broker stamps the records of every topic of ours. A record of a writer whose
    clock is two hours ahead is accepted, and has the broker's time."""
    settings = Kafka(kafka=kafka_servers, prefix=prefix)
    topics = [*PLATFORM, ready("t", 1)]
    await create_topics(settings, topics)
    ahead_ms = int((time.time() + 7200) * 1000)
    async with running(make_producer(settings)) as producer:
        for topic in topics:
            written = await producer.send_and_wait(
                prefix + topic.name, b"{}", partition=0, timestamp_ms=ahead_ms
            )
            assert written.timestamp < ahead_ms - 3_600_000, topic.name
