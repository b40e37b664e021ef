"""Users of Kafka for the workers of one namespace, as `penstock topics grant` makes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.waiting import in_time, wait_until

from penstock.cli.main import cli
from penstock.contracts.files import schemas_folder
from penstock.core.access import SEPARATOR
from penstock.errors import KafkaRefused, PenstockError
from penstock.kafka.client.connection import make_consumer, make_producer, running, translated
from penstock.kafka.topology import acls, topics, users
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import Topic
from penstock.settings import Kafka

PASSWORD = "correct horse battery staple"
OWN = f"acme{SEPARATOR}a"
# Of a namespace with a longer name, of another one, and of the default one.
FOREIGN = (f"acme2{SEPARATOR}a", f"beta{SEPARATOR}acme", "plain")
UNREADABLE = [topic for topic in topics.PLATFORM if topic is not topics.REVOKED]
REPORTS = (topics.HEARTBEATS, topics.STAGE_RESULTS, topics.TASK_LOGS, topics.WORKERS)
UNWRITABLE = [topic for topic in topics.PLATFORM if topic not in REPORTS]

Grant = Callable[..., Any]


@pytest.fixture
def grant(secure_kafka, acl_prefix, monkeypatch) -> Grant:
    """Runs the verb as the superuser, and returns its JSON."""

    async def run(*arguments: str, password: str | None = PASSWORD) -> Any:
        if password is None:
            monkeypatch.delenv("PENSTOCK_PASSWORD_WORKER", raising=False)
        else:
            monkeypatch.setenv("PENSTOCK_PASSWORD_WORKER", password)
        servers = ("--kafka", secure_kafka.plain, "--prefix", acl_prefix, "--json")
        verb = ["topics", "grant", "worker", "--principal", f"User:{acl_prefix}acme", *arguments, *servers]
        done = await asyncio.to_thread(CliRunner().invoke, cli, verb)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return run


@pytest.fixture
def as_worker(secure_kafka, acl_prefix, tmp_path) -> Callable[..., Kafka]:
    """The settings of that user, with a password for SCRAM."""

    def settings(password: str = PASSWORD) -> Kafka:
        file = tmp_path / "password"
        file.write_text(password)
        scram = {
            **secure_kafka.scram(),
            "kafka_user": f"{acl_prefix}acme",
            "kafka_password_file": str(file),
        }
        return Kafka.load({}, **scram, prefix=acl_prefix)

    return settings


@pytest.fixture
async def ready_topics(secure_kafka, acl_prefix) -> None:
    """Ready topics of the namespace and of others, each with a record."""
    platform = Kafka(kafka=secure_kafka.plain, prefix=acl_prefix)
    found = [topics.ready(name, 1) for name in (OWN, *FOREIGN)]
    await create_topics(platform, found)
    for topic in found:
        await write(platform, topic)


async def write(settings: Kafka, topic: Topic) -> None:
    async with running(make_producer(settings)) as producer:
        with translated():
            await producer.send_and_wait(settings.prefix + topic.name, b"{}", partition=0)


async def read(settings: Kafka, topic: Topic, group: str) -> bytes:
    name = settings.prefix + topic.name
    async with running(make_consumer(settings, settings.prefix + group, name)) as consumer:
        with translated():
            record = await in_time(consumer.getone())
            await consumer.commit()
            value: bytes = record.value
            return value


async def is_accepted(settings: Kafka) -> bool:
    """Whether the broker accepts the user's password, which it learns a moment later."""
    try:
        await write(settings, topics.HEARTBEATS)
    except PenstockError:
        return False
    return True


async def test_a_worker_of_a_namespace_reads_only_its_records(grant, as_worker, ready_topics) -> None:
    """O5: the user that `penstock topics grant worker --namespace acme` makes reads ready records
    of its namespace in its groups, and reports. Kafka denies ready records and groups of other
    namespaces, and every other topic: events, callbacks, submissions, and what workers report."""
    await grant("--namespace", "acme")
    settings = as_worker()
    await wait_until(lambda: is_accepted(settings), what="the new user is accepted")
    assert await read(settings, topics.ready(OWN, 1), f"workers.{OWN}") == b"{}"
    await write(settings, topics.STAGE_RESULTS)
    for name in FOREIGN:
        with pytest.raises(KafkaRefused):
            await read(settings, topics.ready(name, 1), f"workers.{OWN}")
        with pytest.raises(KafkaRefused):
            await read(settings, topics.ready(OWN, 1), f"workers.{name}")
    for topic in UNREADABLE:
        with pytest.raises(KafkaRefused):
            await read(settings, topic, f"workers.{OWN}")
    for topic in (*UNWRITABLE, topics.ready(OWN, 1), topics.ready(FOREIGN[0], 1)):
        with pytest.raises(KafkaRefused):
            await write(settings, topic)


async def test_a_grant_adds_what_is_missing_and_revokes_on_request(grant, as_worker, ready_topics) -> None:
    """O5: a second grant adds nothing. A grant of another namespace names the entries beyond it,
    and removes them with --revoke. A new password replaces the old one."""
    first = await grant("--namespace", "acme")
    assert first["added"]
    assert await grant("--namespace", "acme", password=None) == {
        "added": [],
        "beyond": [],
        "revoked": False,
        "passwords": [],
    }
    names = {entry["name"].rpartition(".")[2] for entry in first["added"]}
    assert f"acme{SEPARATOR}" in names
    moved = await grant("--namespace", "beta")
    kept = {entry["name"].rpartition(".")[2] for entry in moved["beyond"]}
    assert kept == {f"acme{SEPARATOR}"}
    await grant("--namespace", "beta", "--revoke", password="another password")
    assert (await grant("--namespace", "beta"))["beyond"] == []
    await grant("--namespace", "beta", password="the last password")
    settings = as_worker("the last password")
    await wait_until(lambda: is_accepted(settings), what="the new password is accepted")
    assert await read(settings, topics.ready(FOREIGN[1], 1), f"workers.{FOREIGN[1]}") == b"{}"

    async def is_denied() -> bool:
        try:
            await read(settings, topics.ready(OWN, 1), f"workers.{FOREIGN[1]}")
        except KafkaRefused:
            return True
        return False

    await wait_until(is_denied, what="the old namespace is denied")
    with pytest.raises(KafkaRefused):
        await write(as_worker(PASSWORD), topics.HEARTBEATS)


async def test_a_grant_needs_a_superuser_and_access_lists(secure_kafka, kafka_servers, acl_prefix) -> None:
    """O5: a user that may not alter the cluster, and a cluster without access lists, are refused
    with the cause."""
    rules = acls.acls(acl_prefix, ["worker"])
    user = Kafka.load({}, **secure_kafka.service("worker"), prefix=acl_prefix)
    with pytest.raises(KafkaRefused, match="may alter the cluster"):
        await users.grant(user, rules, "User:x")
    with pytest.raises(KafkaRefused, match="may alter the cluster"):
        await users.set_passwords(user, {"x": PASSWORD}, bytes)
    open_cluster = Kafka(kafka=kafka_servers, prefix=acl_prefix)
    with pytest.raises(KafkaRefused, match="no access lists"):
        await users.grant(open_cluster, rules, "User:x")


def test_what_is_shared_has_no_content() -> None:
    """O5: a record of `revoked`, which all workers read, has numbers of attempts, and one of a few
    reasons."""
    schema = json.loads((schemas_folder() / "messages" / "revoked.schema.json").read_text())
    assert not schema["additionalProperties"]
    assert schema["properties"].keys() == {"why", "tasks"}
    assert schema["properties"]["why"]["enum"]
    numbers = schema["properties"]["tasks"]["items"]
    assert (numbers["minItems"], numbers["maxItems"]) == (3, 3)
    assert {part["type"] for part in numbers["prefixItems"]} == {"integer"}


def test_options_of_a_grant_are_checked(monkeypatch) -> None:
    """O8: contradicting options end with a usage error before Kafka is asked."""
    monkeypatch.setenv("PENSTOCK_PASSWORD_WORKER", PASSWORD)
    monkeypatch.setenv("PENSTOCK_PASSWORD_STAGES", "one more password")
    for arguments, reason in (
        (("worker", "--namespace", "default"), "--type"),
        (("worker", "--namespace", "*"), "excludes"),
        (("worker", "--namespace", "a--b"), "no namespace"),
        (("worker", "--namespace", "a", "--type", "t"), "excludes"),
        (("worker", "--principal", "CN=worker"), "User:"),
        (("worker", "stages", "--principal", "User:one"), "{service}"),
    ):
        done = CliRunner().invoke(cli, ["topics", "grant", "--kafka", "127.0.0.1:1", *arguments])
        assert (done.exit_code, reason in done.output) == (2, True), done.output
    monkeypatch.setenv("PENSTOCK_PASSWORD_WORKER", "pässword")
    done = CliRunner().invoke(cli, ["topics", "grant", "worker", "--kafka", "127.0.0.1:1"])
    assert "PENSTOCK_PASSWORD_WORKER cannot be used" in done.output
