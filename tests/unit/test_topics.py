"""The declaration of the topics, what differs from it, and the access lists: without any server."""

import dataclasses
import shlex

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.errors import SettingsError
from penstock.kafka import acls
from penstock.kafka.declared import Figures, figures
from penstock.kafka.planning import Found, differences
from penstock.kafka.topics import CALLBACKS, EVENTS, HEARTBEATS, PLATFORM, SUBMITTED, ready
from penstock.settings import Kafka


@pytest.fixture
def declaring(tmp_path):
    """Settings with a declaration of a test's own."""
    written = 0

    def declare(text):
        nonlocal written
        written += 1
        file = tmp_path / f"topics-{written}.toml"
        file.write_text(text)
        return Kafka.load({}, topics_file=str(file))

    return declare


def test_every_topic_is_declared():
    """D5: partitions, cleanup and retention of each topic of the platform, and of ready topics, are in the packaged file."""
    for topic in (*PLATFORM, ready("t", 3)):
        found = figures(Kafka(), topic)
        assert found.partitions > 0
        assert found.configs["cleanup.policy"] == "delete"
        assert int(found.configs["retention.ms"]) >= 24 * 3600 * 1000
    assert figures(Kafka(), ready("t", 3)).partitions == 3


def test_a_file_states_only_what_differs(declaring):
    """D5: defaults and single figures are overridden; what it leaves out is as packaged."""
    settings = declaring(
        "[defaults]\nreplication = 3\nmin_insync_replicas = 2\n"
        "[topics.events]\npartitions = 24\nretention_days = 0.5\nconfig = {'segment.bytes' = 1048576}\n"
        "[topics.ready]\nretention_days = -1\n[topics.revoked]\nreplication = 2\n"
    )
    events = figures(settings, EVENTS)
    assert (events.partitions, events.replication) == (24, 3)
    assert events.configs["retention.ms"] == "43200000"
    assert events.configs["segment.bytes"] == "1048576"
    assert events.configs["min.insync.replicas"] == "2"
    assert figures(settings, ready("t", 1)).configs["retention.ms"] == "-1"
    assert figures(settings, SUBMITTED).partitions == figures(Kafka(), SUBMITTED).partitions


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[topics.evnts]\n", "topics.evnts: there is no such topic"),
        ("[topics.events]\nparitions = 1\n", "topics.events.paritions: no such key"),
        ("[topics.events]\npartitions = 0\n", "topics.events.partitions=0 must be a whole number from 1"),
        ("[topics.events]\npartitions = true\n", "topics.events.partitions=True must be"),
        ("[topics.events]\nretention_days = 0\n", "retention_days=0 must be a number above 0"),
        ("[topics.events]\ncleanup = 'compact'\n", "cleanup='compact' must be 'delete'"),
        ("[topics.events]\nconfig = {'retention.ms' = 1}\n", "retention.ms is settled elsewhere"),
        ("[topics.ready]\npartitions = 3\n", "topics.ready.partitions: each topic, and each task type"),
        (
            "[defaults]\nreplication = 1\nmin_insync_replicas = 2\n",
            "above replication=1, so nothing could be written",
        ),
        ("[topics.callbacks]\npartitions = 9\n", "they must have as many"),
        ("[topics.revoked]\npartitions = 2\n", "topics.revoked.partitions must be 1"),
        ("[topic.events]\n", "topic: no such table"),
        ("[[[", "cannot be read as TOML"),
    ],
)
def test_a_file_that_is_not_understood_is_refused_whole(declaring, text, told):
    """D5: by the name of the table and key, before anything is done."""
    with pytest.raises(SettingsError) as refused:
        figures(declaring(text), EVENTS)
    assert told in str(refused.value)


WANTED = Figures(8, -1, {"retention.ms": "5", "min.insync.replicas": "2"})
RIGHT = Found(8, 1, {"retention.ms": "5", "min.insync.replicas": "2", "segment.bytes": "7"})


def test_what_is_as_declared_is_no_difference():
    """D5: what is not declared (copies by default, other configs) is not looked at."""
    assert differences("p.events", EVENTS, WANTED, RIGHT) == []


@pytest.mark.parametrize(
    ("topic", "found", "what", "refused"),
    [
        (EVENTS, None, "missing", None),
        (SUBMITTED, dataclasses.replace(RIGHT, partitions=4), "partitions", None),
        (SUBMITTED, dataclasses.replace(RIGHT, partitions=9), "partitions", "never takes partitions away"),
        (
            HEARTBEATS,
            dataclasses.replace(RIGHT, partitions=4),
            "partitions",
            "leases are held by whoever reads",
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
def test_each_difference_is_named_and_unsafe_ones_refused(topic, found, what, refused):
    """D5: partitions are added only where no order and no owner goes by them, and the reason is told otherwise."""
    [one] = differences("p.t", topic, WANTED, found)
    assert one.what == what
    assert (one.refused is None) if refused is None else (refused in one.refused)


def test_copies_are_not_changed_but_told():
    """D5: moving copies between brokers is the cluster's business."""
    [one] = differences("p.events", EVENTS, dataclasses.replace(WANTED, replication=3), RIGHT)
    assert (one.what, one.now, one.declared) == ("replication", "1", "3")
    assert "kafka-reassign-partitions" in one.refused


def test_access_lists_are_printed_as_commands_and_as_manifests():
    """D5: one entry a line for kafka-acls, and what a KafkaUser of Strimzi takes; a worker of one type gets that type only."""
    done = CliRunner().invoke(cli, ["topics", "acls", "worker", "--prefix", "p.", "--type", "order"])
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert lines[0][-4:] == ["--topic", "p.ready.order", "--resource-pattern-type", "literal"]
    assert all("User:penstock-worker" in line for line in lines)
    narrowed = acls.acls("p.", ["worker"], types=["order"])
    assert [entry for entry in narrowed if entry.pattern == acls.PREFIXED] == []
    wire = acls.strimzi(acls.acls("p."))
    assert set(wire) == set(acls.SERVICES)
    assert {
        "resource": {"type": "topic", "name": "p.submitted", "patternType": "literal"},
        "operations": ["Write"],
    } in wire["producer"]["authorization"]["acls"]
