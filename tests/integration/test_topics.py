"""`penstock topics plan` and `apply` on a real broker."""

import json

import pytest
from click.testing import CliRunner
from tests.waiting import wait_until

from penstock.cli.main import cli
from penstock.kafka import declared, planning
from penstock.kafka.connection import create_topics
from penstock.kafka.topics import PLATFORM, ready
from penstock.settings import Kafka

SAFE = "[topics.submitted]\npartitions = 6\n[topics.events]\nretention_days = 3\n[topics.ready]\nretention_days = 2\n"


@pytest.fixture
def verb(kafka_servers, prefix, tmp_path, monkeypatch):
    """Runs a verb under a declaration: its status and JSON."""

    def run(name, declaration):
        (tmp_path / "topics.toml").write_text(declaration)
        monkeypatch.setenv("PENSTOCK_TOPICS_FILE", str(tmp_path / "topics.toml"))
        declared._read.cache_clear()
        done = CliRunner().invoke(
            cli, ["topics", name, "--kafka", kafka_servers, "--prefix", prefix, "--json"]
        )
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output
        return done.exit_code, json.loads(done.stdout or "{}"), done.stderr

    return run


def what(differences):
    return {(one["topic"].partition(".")[2], one["what"]) for one in differences}


def test_apply_makes_what_plan_shows_and_then_nothing_differs(verb):
    """D5: missing topics are created, partitions added, configs altered (others kept); plan says 8 before and 0 after."""
    status, found, _ = verb("plan", "")
    assert status == 8
    assert {one["topic"].partition(".")[2] for one in found["differences"]} == {
        topic.name for topic in PLATFORM
    }
    assert verb("apply", "")[0] == 0
    assert verb("plan", "")[:2] == (0, {"differences": [], "applied": []})
    other = "[topics.events]\nconfig = {'segment.bytes' = 1048576}\n"
    assert verb("apply", other)[0] == 0
    status, found, _ = verb("plan", SAFE)
    assert (status, what(found["differences"])) == (
        8,
        {("submitted", "partitions"), ("events", "retention.ms")},
    )
    assert verb("apply", SAFE)[0] == 0
    assert verb("plan", SAFE)[0] == 0
    # Altering one config has left the other as it was.
    assert verb("plan", other + "retention_days = 3\n[topics.submitted]\npartitions = 6\n")[0] == 0


def test_apply_leaves_what_is_not_safe_and_does_the_rest(verb):
    """D5: heartbeats are not repartitioned, and copies not moved; the reasons are told with status 8."""
    assert verb("apply", "")[0] == 0
    unsafe = SAFE + "[topics.heartbeats]\npartitions = 16\n[topics.revoked]\nreplication = 2\n"
    status, found, _ = verb("apply", unsafe)
    assert status == 8
    assert what(found["differences"]) == {("heartbeats", "partitions"), ("revoked", "replication")}
    assert all(one["refused"] for one in found["differences"])
    assert what(found["applied"]) == {("submitted", "partitions"), ("events", "retention.ms")}
    assert verb("plan", SAFE)[0] == 0


async def test_ready_topics_are_altered_and_never_repartitioned(kafka_servers, prefix, tmp_path):
    """D5: how many partitions they have is said by their types."""
    await create_topics(Kafka(kafka=kafka_servers, prefix=prefix), [*PLATFORM, ready("t", 3)])
    (tmp_path / "topics.toml").write_text(SAFE)
    settings = Kafka(kafka=kafka_servers, prefix=prefix, topics_file=str(tmp_path / "topics.toml"))

    async def seen():
        unlike = await planning.plan(settings)
        return (f"{prefix}ready.t", "retention.ms") in {(one.topic, one.what) for one in unlike} and unlike

    unlike = await wait_until(seen, what="the ready topic differs")
    assert await planning.apply(settings, unlike) == []
    assert await planning.plan(settings) == []


def test_more_copies_than_brokers_is_told(verb):
    """D5: what the cluster cannot do is said in its own words."""
    status, _, told = verb("apply", "[defaults]\nreplication = 3\n")
    assert status == 5
    assert "would not create topic" in told
