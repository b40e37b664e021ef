"""TLS and SASL to a real broker: every client gets in with what the settings say, and nobody without."""

import asyncio
import uuid
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from click.testing import CliRunner
from tests.secured import PASSWORD, issuing
from tests.system import System
from tests.waiting import wait_until

from penstock.checks.app import check
from penstock.cli.main import cli
from penstock.errors import KafkaRefused, KafkaUnavailable, SettingsError
from penstock.kafka.connection import (
    admin_client,
    create_topics,
    make_consumer,
    make_producer,
    running,
    translated,
    wait_kafka,
)
from penstock.kafka.topics import EVENTS, PLATFORM, SUBMITTED
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.settings import Kafka, Platform


@pytest.fixture
async def own_prefix(secure_kafka):
    """As `prefix`, on the broker that asks who one is."""
    name = f"s-{uuid.uuid4().hex[:10]}."
    yield name
    async with admin_client(Kafka(kafka=secure_kafka.plain)) as client:
        topics = [topic for topic in await client.list_topics() if topic.startswith(name)]
        if topics:
            await client.delete_topics(topics)


async def passes(settings):
    """One record through a producer and a consumer, and a look by an admin client."""
    topic = EVENTS
    await create_topics(settings, [topic])
    name = settings.prefix + topic.name
    async with running(make_producer(settings)) as producer:
        with translated():
            await producer.send_and_wait(name, b"hello", partition=0)
    async with running(make_consumer(settings, f"{settings.prefix}group", name)) as consumer:
        with translated():
            record = await asyncio.wait_for(consumer.getone(), 60)
            await consumer.commit()
    return record.value == b"hello"


async def test_a_task_goes_all_the_way_over_sasl_ssl(secure_kafka, own_prefix, database):
    """D5: producer, ingest, release, worker, both processors (Faust's consumers), events and the check, by SCRAM over TLS."""
    where = {**secure_kafka.scram(), "prefix": own_prefix}
    settings = Kafka.load({}, **where)
    await create_topics(settings, PLATFORM)
    async with open_pool(database, "test") as pool, AsyncExitStack() as stack:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        system = System(where["kafka"], own_prefix, database, stack, pool)
        system.where = where
        await system.start("task-sync", "heartbeats", "stages")
        await system.work()
        async with running(make_producer(settings)) as producer:
            await producer.send_and_wait(own_prefix + SUBMITTED.name, b'{"type": "t", "context": 1}')
        await system.become(succeeded=1)
        async with running(make_consumer(settings, None, own_prefix + EVENTS.name)) as consumer:
            seen = b""
            while b"succeeded" not in seen:
                seen = (await asyncio.wait_for(consumer.getone(), 60)).value
        assert (await check(Platform.load({}, **where, postgres=database))).clean


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_each_mechanism_gets_in(secure_kafka, own_prefix, mechanism):
    """D5: producers, consumers and admin clients, with the password from a file."""
    assert await passes(Kafka.load({}, **secure_kafka.scram(mechanism), prefix=own_prefix))


async def test_a_certificate_gets_in(secure_kafka, own_prefix):
    """D5: SSL with a certificate of the client's own."""
    assert await passes(Kafka.load({}, **secure_kafka.tls(), prefix=own_prefix))


async def test_tokens_are_fetched_once_and_renewed_before_they_end(secure_kafka, own_prefix):
    """D5: OAUTHBEARER by client credentials: one token for all clients of a process, another when the broker hangs up."""
    async with issuing() as issuer:
        settings = Kafka.load({}, **secure_kafka.tokens(issuer.url), prefix=own_prefix)
        assert await passes(settings)
        assert issuer.issued == 1
    async with issuing() as issuer:
        issuer.life_s = 2
        settings = Kafka.load({}, **secure_kafka.tokens(issuer.url), prefix=own_prefix)
        async with running(make_producer(settings)) as producer:

            async def renewed():
                await producer.send_and_wait(own_prefix + EVENTS.name, b"again", partition=0)
                return issuer.issued >= 3

            await wait_until(renewed, timeout=60, every=0.1, what="records go on as tokens end")


@asynccontextmanager
async def producing(settings):
    async with running(make_producer(settings)) as producer:
        yield producer


CLIENTS = {
    "producer": producing,
    "consumer": lambda settings: running(make_consumer(settings, None)),
    "admin": admin_client,
}


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
async def test_a_wrong_password_is_told_at_once(secure_kafka, kind, mechanism):
    """D5, O8: no silent retry: who is refused, by what, and which setting to look at; never the password."""
    given = {**secure_kafka.scram(mechanism), "kafka_password_file": None, "kafka_password": "guess-work"}
    settings = Kafka.load({}, **given)
    with pytest.raises(KafkaRefused, match=r"'platform' by .*PENSTOCK_KAFKA_PASSWORD_FILE") as refused:
        async with CLIENTS[kind](settings):
            pass
    assert "guess-work" not in str(refused.value) + repr(settings)


async def test_waiting_for_kafka_ends_with_a_refusal(secure_kafka):
    """D5: whoever waits for a broker to come does not wait for one that refuses."""
    given = {**secure_kafka.scram(), "kafka_user": "nobody"}
    with pytest.raises(KafkaRefused, match="nobody"):
        await wait_kafka(Kafka.load({}, **given), timeout_s=600)


async def test_a_service_with_a_wrong_password_ends(secure_kafka, own_prefix, database):
    """D5, O2a: a service that Kafka refuses ends with the reason, for its supervisor's log."""
    given = {**secure_kafka.scram(), "kafka_user": "nobody", "prefix": own_prefix}
    async with open_pool(database, "test") as pool, AsyncExitStack() as stack:
        for name in ("task-sync", "heartbeats", "stages"):
            system = System(given["kafka"], own_prefix, database, stack, pool)
            system.where = given
            with pytest.raises(KafkaRefused, match="does not accept user 'nobody'"):
                await system.start(name)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kafka_ca_file": "other-ca.pem"}, "certificate does not verify .*PENSTOCK_KAFKA_CA_FILE"),
        (
            {"kafka_cert_file": "stranger.pem", "kafka_key_file": "stranger.key"},
            "does not accept the certificate of this process .*PENSTOCK_KAFKA_CERT_FILE",
        ),
        (
            {"kafka_cert_file": None, "kafka_key_file": None},
            "does not accept the certificate of this process",
        ),
    ],
)
async def test_a_certificate_nobody_trusts_is_told(secure_kafka, change, told):
    """D5: an unknown authority, on either side, is told with the file to look at."""
    files = {name: file and secure_kafka.file(file) for name, file in change.items()}
    with pytest.raises(KafkaRefused, match=told):
        async with admin_client(Kafka.load({}, **{**secure_kafka.tls(), **files})):
            pass


async def test_a_name_that_is_not_the_certificates_is_told(secure_kafka):
    """D5: names are checked, not only signatures."""
    given = secure_kafka.scram()
    # Another address of this machine, which the certificate does not name.
    given["kafka"] = given["kafka"].replace("127.0.0.1", "[::ffff:127.0.0.1]")
    with pytest.raises(KafkaRefused, match="its names must hold the one in PENSTOCK_KAFKA"):
        async with admin_client(Kafka.load({}, **given)):
            pass


async def test_the_wrong_listener_is_told(secure_kafka):
    """D5: TLS to a port of plain text, SASL to one without it, a mechanism that is not offered."""
    cases = [
        ({**secure_kafka.service("worker"), "kafka": secure_kafka.plain}, "does not speak SASL"),
        (
            {**secure_kafka.service("worker"), "kafka_mechanism": "SCRAM-SHA-256"},
            "does not offer SCRAM-SHA-256",
        ),
    ]
    for given, told in cases:
        with pytest.raises(KafkaRefused, match=told):
            async with admin_client(Kafka.load({}, **given)):
                pass
    with pytest.raises(KafkaUnavailable, match="its listener does not speak TLS"):
        async with admin_client(Kafka.load({}, **{**secure_kafka.scram(), "kafka": secure_kafka.plain})):
            pass


async def test_a_token_that_is_refused_is_told(secure_kafka):
    """D5: by the issuer, by the broker; an issuer that is away is worth trying again."""
    async with issuing() as issuer:
        settings = Kafka.load({}, **secure_kafka.tokens(issuer.url))
        issuer.key = "changed"
        with pytest.raises(
            KafkaRefused, match=r"refuses client 'platform' with status 401 \(invalid_client\)"
        ):
            async with admin_client(settings):
                pass
    async with issuing() as issuer:
        issuer.claims = {"exp": 1}
        with pytest.raises(KafkaRefused, match="does not accept the token"):
            async with admin_client(Kafka.load({}, **secure_kafka.tokens(issuer.url))):
                pass
        gone = issuer.url + "/nowhere"
    with pytest.raises(KafkaUnavailable):
        async with admin_client(Kafka.load({}, **secure_kafka.tokens(gone))):
            pass


def test_the_command_line_gets_in_by_the_environment(secure_kafka, own_prefix, monkeypatch):
    """D5: verbs take the same variables as services, and say a refusal in one sentence with status 6."""
    given = {**secure_kafka.scram(), "prefix": own_prefix}
    for name, value in given.items():
        monkeypatch.setenv(f"PENSTOCK_{name.upper()}", value)
    done = CliRunner().invoke(cli, ["topics", "--json"])
    assert done.exit_code == 0, done.output
    monkeypatch.setenv("PENSTOCK_KAFKA_USER", "nobody")
    done = CliRunner().invoke(cli, ["topics"])
    assert done.exit_code == 6
    assert "does not accept user 'nobody'" in done.stderr


async def test_what_cannot_be_read_is_told_by_its_setting(secure_kafka, tmp_path):
    """D5: a key with a passphrase, a file that is no certificate, an empty password."""
    broken = tmp_path / "broken"
    broken.write_text("")
    cases = [
        ({**secure_kafka.tls(), "kafka_ca_file": str(broken)}, "PENSTOCK_KAFKA_CA_FILE"),
        ({**secure_kafka.tls(), "kafka_key_file": str(broken)}, "PENSTOCK_KAFKA_KEY_FILE"),
        (
            {**secure_kafka.tls(), "kafka_key_file": secure_kafka.file("stranger.key")},
            "PENSTOCK_KAFKA_KEY_FILE",
        ),
        (
            {**secure_kafka.scram(), "kafka_password_file": str(broken)},
            "PENSTOCK_KAFKA_PASSWORD_FILE.* is empty",
        ),
    ]
    for given, told in cases:
        with pytest.raises(SettingsError, match=told):
            make_producer(Kafka.load({}, **given))
    assert PASSWORD not in repr(Kafka.load({}, **secure_kafka.service("worker")))
