"""The declaration of the topics, differences from it, and the access lists, without a server."""

import dataclasses
import shlex

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.core.worker_list import KEEP_S
from penstock.errors import SettingsError
from penstock.kafka.topology import acls
from penstock.kafka.topology.rights import PREFIXED
from penstock.kafka.topology.topic_config import TopicConfig, config_of
from penstock.kafka.topology.topic_plan import ActualTopic, differences
from penstock.kafka.topology.topics import (
    CALLBACKS,
    DEPLOYMENT,
    EVENTS,
    HEARTBEATS,
    PLATFORM,
    SUBMITTED,
    WORKERS,
    ready,
)
from penstock.settings import Kafka


@pytest.fixture
def declaring(tmp_path):
    """Settings with a declaration that the test writes."""
    written = 0

    def declare(text):
        nonlocal written
        written += 1
        file = tmp_path / f"topics-{written}.toml"
        file.write_text(text)
        return Kafka.load({}, topics_file=str(file))

    return declare


def test_every_topic_is_declared():
    """O5: the packaged file has partitions, cleanup and retention of each topic, and of ready
    topics."""
    for topic in (*PLATFORM, ready("t", 3)):
        found = config_of(Kafka(), topic)
        assert found.partitions > 0
        assert found.configs["cleanup.policy"] == "delete"
        kept_ms = int(found.configs["retention.ms"])
        # Lost workers stay listed for an hour.
        shortest_ms = KEEP_S * 1000 if topic is WORKERS else 24 * 3600 * 1000
        assert kept_ms == -1 if topic is DEPLOYMENT else kept_ms >= shortest_ms
    assert config_of(Kafka(), ready("t", 3)).partitions == 3


def test_a_file_states_only_what_differs(declaring):
    """O5: it overrides defaults and single values; the rest is as packaged."""
    settings = declaring(
        "[defaults]\nreplication = 3\nmin_insync_replicas = 2\n"
        "[topics.events]\npartitions = 24\nretention_days = 0.5\nconfig = {'segment.bytes' = 1048576}\n"
        "[topics.ready]\nretention_days = -1\n[topics.revoked]\nreplication = 2\n"
    )
    events = config_of(settings, EVENTS)
    assert (events.partitions, events.replication) == (24, 3)
    assert events.configs["retention.ms"] == "43200000"
    assert events.configs["segment.bytes"] == "1048576"
    assert events.configs["min.insync.replicas"] == "2"
    assert config_of(settings, ready("t", 1)).configs["retention.ms"] == "-1"
    assert config_of(settings, SUBMITTED).partitions == config_of(Kafka(), SUBMITTED).partitions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[topics.evnts]\n", "topics.evnts: no such topic"),
        ("[topics.events]\nparitions = 1\n", "topics.events.paritions: no such key"),
        ("[topics.events]\npartitions = 0\n", "topics.events.partitions=0 must be a whole number from 1"),
        ("[topics.events]\npartitions = true\n", "topics.events.partitions=True must be"),
        ("[topics.events]\nretention_days = 0\n", "retention_days=0 must be a number above 0"),
        ("[topics.events]\ncleanup = 'compact'\n", "cleanup='compact' must be 'delete'"),
        (
            "[topics.events]\nconfig = {'retention.ms' = 1}\n",
            "retention.ms has a key of its own, or is fixed",
        ),
        ("[topics.ready]\npartitions = 3\n", "topics.ready.partitions: each topic, and each task type"),
        (
            "[defaults]\nreplication = 1\nmin_insync_replicas = 2\n",
            "above replication=1, so nothing could be written",
        ),
        ("[topics.callbacks]\npartitions = 9\n", "the numbers must be equal"),
        ("[topics.revoked]\npartitions = 2\n", "topics.revoked.partitions must be 1"),
        ("[topic.events]\n", "topic: no such table"),
        ("[[[", "cannot be read as TOML"),
    ],
)
def test_an_invalid_file_is_refused_as_a_whole(declaring, text, expected):
    """O5: at the start; the error names the table and the key."""
    with pytest.raises(SettingsError) as refused:
        config_of(declaring(text), EVENTS)
    assert expected in str(refused.value)


WANTED = TopicConfig(8, -1, {"retention.ms": "5", "min.insync.replicas": "2"})
RIGHT = ActualTopic(8, 1, {"retention.ms": "5", "min.insync.replicas": "2", "segment.bytes": "7"})


def test_a_topic_as_declared_has_no_difference():
    """O5: values that are not declared (default copies, other configs) are not compared."""
    assert differences("p.events", EVENTS, WANTED, RIGHT) == []


@pytest.mark.parametrize(
    ("topic", "found", "what", "refused"),
    [
        (EVENTS, None, "missing", None),
        (SUBMITTED, dataclasses.replace(RIGHT, partitions=4), "partitions", None),
        (SUBMITTED, dataclasses.replace(RIGHT, partitions=9), "partitions", "cannot remove partitions"),
        (
            HEARTBEATS,
            dataclasses.replace(RIGHT, partitions=4),
            "partitions",
            "the reader of a partition tracks its leases",
        ),
        (CALLBACKS, dataclasses.replace(RIGHT, partitions=4), "partitions", "keyed by target"),
        (EVENTS, dataclasses.replace(RIGHT, partitions=4), "partitions", "keyed by task"),
        (
            EVENTS,
            dataclasses.replace(RIGHT, configs={**RIGHT.configs, "retention.ms": "6"}),
            "retention.ms",
            None,
        ),
    ],
)
def test_each_difference_is_named_and_unsafe_ones_are_refused(topic, found, what, refused):
    """O5: partitions are added only where no order and no owner depends on them; else the reason is
    reported."""
    [one] = differences("p.t", topic, WANTED, found)
    assert one.what == what
    assert (one.refused is None) if refused is None else (refused in one.refused)


def test_copies_are_reported_and_not_changed():
    """O5: the cluster's own tools move copies between brokers."""
    [one] = differences("p.events", EVENTS, dataclasses.replace(WANTED, replication=3), RIGHT)
    assert (one.what, one.now, one.declared) == ("replication", "1", "3")
    assert "kafka-reassign-partitions" in one.refused


def test_access_lists_are_printed_as_commands_and_as_manifests():
    """O5: as kafka-acls commands and as a KafkaUser of Strimzi; a worker may be limited to its
    types."""
    done = CliRunner().invoke(cli, ["topics", "acls", "worker", "--prefix", "p.", "--type", "order"])
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert lines[0][-4:] == ["--topic", "p.ready.order", "--resource-pattern-type", "literal"]
    assert all("User:penstock-worker" in line for line in lines)
    narrowed = acls.acls("p.", ["worker"], types=["order"])
    assert [entry for entry in narrowed if entry.pattern == PREFIXED] == []
    wire = acls.strimzi(acls.acls("p."))
    assert set(wire) == set(acls.SERVICES)
    assert {
        "resource": {"type": "topic", "name": "p.submitted", "patternType": "literal"},
        "operations": ["Write"],
    } in wire["producer"]["authorization"]["acls"]
