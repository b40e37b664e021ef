"""TLS and SASL on a real broker: Kafka accepts each client with the right settings and refuses the
rest."""

import uuid
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from click.testing import CliRunner
from tests.support.pipeline import System
from tests.support.secure_kafka import PASSWORD, issuing
from tests.support.waiting import in_time, wait_until

from penstock.checks.app import check
from penstock.cli.main import cli
from penstock.errors import KafkaRefused, KafkaUnavailable, SettingsError
from penstock.kafka.client.connection import admin_client, make_consumer, make_producer, running, translated
from penstock.kafka.client.health import wait_kafka
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import EVENTS, PLATFORM, SUBMITTED
from penstock.postgres import types
from penstock.postgres.connection import open_pool
from penstock.settings import Kafka, Platform

pytestmark = pytest.mark.declared_topics


@pytest.fixture
async def own_prefix(secure_kafka):
    """A prefix like `prefix`, on the broker that authenticates its clients."""
    name = f"s-{uuid.uuid4().hex[:10]}."
    yield name
    async with admin_client(Kafka(kafka=secure_kafka.plain)) as client:
        topics = [topic for topic in await client.list_topics() if topic.startswith(name)]
        if topics:
            await client.delete_topics(topics)


async def round_trip(settings):
    """Sends one record through a producer, a consumer and an admin client."""
    topic = EVENTS
    await create_topics(settings, [topic])
    name = settings.prefix + topic.name
    async with running(make_producer(settings)) as producer:
        with translated():
            await producer.send_and_wait(name, b"hello", partition=0)
    async with running(make_consumer(settings, f"{settings.prefix}group", name)) as consumer:
        with translated():
            record = await in_time(consumer.getone())
            await consumer.commit()
    return record.value == b"hello"


async def test_a_task_succeeds_over_sasl_ssl(secure_kafka, own_prefix, database):
    """O5: a task passes producer, ingest, release, worker, processors, events and the check by
    SCRAM over TLS."""
    connection_settings = {**secure_kafka.scram(), "prefix": own_prefix}
    settings = Kafka.load({}, **connection_settings)
    await create_topics(settings, PLATFORM)
    async with open_pool(database, "test") as pool, AsyncExitStack() as stack:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        system = System(connection_settings["kafka"], own_prefix, database, stack, pool)
        system.where = connection_settings
        await system.start("task-sync", "heartbeats", "stages")
        await system.work()
        async with running(make_producer(settings)) as producer:
            await producer.send_and_wait(own_prefix + SUBMITTED.name, b'{"type": "t", "context": 1}')
        await system.become(succeeded=1)
        async with running(make_consumer(settings, None, own_prefix + EVENTS.name)) as consumer:
            seen = b""
            while b"succeeded" not in seen:
                seen = (await in_time(consumer.getone())).value
        assert (await check(Platform.load({}, **connection_settings, postgres=database))).clean


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_each_mechanism_is_accepted(secure_kafka, own_prefix, mechanism):
    """O5: Kafka accepts producers, consumers and admin clients by each mechanism, with the password
    from a file."""
    assert await round_trip(Kafka.load({}, **secure_kafka.scram(mechanism), prefix=own_prefix))


async def test_a_client_certificate_is_accepted(secure_kafka, own_prefix):
    """O5: Kafka accepts a client by its own TLS certificate."""
    assert await round_trip(Kafka.load({}, **secure_kafka.tls(), prefix=own_prefix))


async def test_tokens_are_fetched_once_and_renewed_before_they_end(secure_kafka, own_prefix):
    """O5: with OAUTHBEARER the clients of a process share one token. The client gets another token
    when the broker closes the connection."""
    async with issuing() as issuer:
        settings = Kafka.load({}, **secure_kafka.tokens(issuer.url), prefix=own_prefix)
        assert await round_trip(settings)
        assert issuer.issued == 1
    async with issuing() as issuer:
        issuer.life_s = 2
        settings = Kafka.load({}, **secure_kafka.tokens(issuer.url), prefix=own_prefix)
        async with running(make_producer(settings)) as producer:

            async def renewed():
                await producer.send_and_wait(own_prefix + EVENTS.name, b"again", partition=0)
                return issuer.issued >= 3

            await wait_until(renewed, every=0.1, what="records are sent after tokens expire")


@asynccontextmanager
async def open_producer(settings):
    async with running(make_producer(settings)) as producer:
        yield producer


CLIENTS = {
    "producer": open_producer,
    "consumer": lambda settings: running(make_consumer(settings, None)),
    "admin": admin_client,
}


@pytest.mark.parametrize(
    ("kind", "mechanism"), [("producer", "PLAIN"), ("consumer", "SCRAM-SHA-256"), ("admin", "SCRAM-SHA-256")]
)
async def test_a_wrong_password_is_reported_at_once(secure_kafka, kind, mechanism):
    """O5, O8: a wrong password raises KafkaRefused without a retry. The error names the user, the
    broker and the setting, and never the password."""
    options = {**secure_kafka.scram(mechanism), "kafka_password_file": None, "kafka_password": "guess-work"}
    settings = Kafka.load({}, **options)
    with pytest.raises(KafkaRefused, match=r"'platform' by .*PENSTOCK_KAFKA_PASSWORD_FILE") as refused:
        async with CLIENTS[kind](settings):
            pass
    assert "guess-work" not in str(refused.value) + repr(settings)


async def test_waiting_for_kafka_ends_with_a_refusal(secure_kafka):
    """O5: waiting for a broker ends at once when the broker refuses the user."""
    options = {**secure_kafka.scram(), "kafka_user": "nobody"}
    with pytest.raises(KafkaRefused, match="nobody"):
        await wait_kafka(Kafka.load({}, **options), timeout_s=600)


async def test_a_service_with_a_wrong_password_ends(secure_kafka, own_prefix, database):
    """O5, O2a: a service that Kafka refuses ends with the reason, for its supervisor's log."""
    options = {**secure_kafka.scram(), "kafka_user": "nobody", "prefix": own_prefix}
    async with open_pool(database, "test") as pool, AsyncExitStack() as stack:
        for name in ("task-sync", "heartbeats", "stages"):
            system = System(options["kafka"], own_prefix, database, stack, pool)
            system.where = options
            with pytest.raises(KafkaRefused, match="does not accept user 'nobody'"):
                await system.start(name)


@pytest.mark.parametrize(
    ("change", "expected_message"),
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
async def test_an_untrusted_certificate_is_reported(secure_kafka, change, expected_message):
    """O5: the error for an unknown authority, on either side, names the setting of the file."""
    files = {name: file and secure_kafka.file(file) for name, file in change.items()}
    with pytest.raises(KafkaRefused, match=expected_message):
        async with admin_client(Kafka.load({}, **{**secure_kafka.tls(), **files})):
            pass


async def test_a_wrong_server_name_is_reported(secure_kafka):
    """O5: the client checks the server's name besides the signature of its certificate."""
    options = secure_kafka.scram()
    # The certificate does not name this address of the machine.
    options["kafka"] = options["kafka"].replace("127.0.0.1", "[::ffff:127.0.0.1]")
    with pytest.raises(KafkaRefused, match="its names must hold the one in PENSTOCK_KAFKA"):
        async with admin_client(Kafka.load({}, **options)):
            pass


async def test_a_wrong_listener_is_reported(secure_kafka):
    """O5: the error names a listener without SASL, a mechanism that is not offered, or a listener
    without TLS."""
    cases = [
        ({**secure_kafka.service("worker"), "kafka": secure_kafka.plain}, "does not use SASL"),
        (
            {**secure_kafka.service("worker"), "kafka_mechanism": "SCRAM-SHA-256"},
            "does not offer SCRAM-SHA-256",
        ),
    ]
    for options, expected_message in cases:
        with pytest.raises(KafkaRefused, match=expected_message):
            async with admin_client(Kafka.load({}, **options)):
                pass
    with pytest.raises(KafkaUnavailable, match="its listener does not use TLS"):
        async with admin_client(Kafka.load({}, **{**secure_kafka.scram(), "kafka": secure_kafka.plain})):
            pass


async def test_a_refused_token_is_reported(secure_kafka):
    """O5: a refusal by the issuer or by the broker raises KafkaRefused. An unreachable issuer
    raises KafkaUnavailable, which allows a retry."""
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
        unreachable = issuer.url + "/nowhere"
    with pytest.raises(KafkaUnavailable):
        async with admin_client(Kafka.load({}, **secure_kafka.tokens(unreachable))):
            pass


def test_the_command_line_connects_with_the_environment(secure_kafka, own_prefix, monkeypatch):
    """O5: the command line reads the same variables as services. It reports a refusal in one
    sentence with status 6."""
    options = {**secure_kafka.scram(), "prefix": own_prefix}
    for name, value in options.items():
        monkeypatch.setenv(f"PENSTOCK_{name.upper()}", value)
    result = CliRunner().invoke(cli, ["topics", "--json"])
    assert result.exit_code == 0, result.output
    monkeypatch.setenv("PENSTOCK_KAFKA_USER", "nobody")
    result = CliRunner().invoke(cli, ["topics"])
    assert result.exit_code == 6
    assert "does not accept user 'nobody'" in result.stderr


async def test_an_unreadable_file_is_reported_with_its_setting(secure_kafka, tmp_path):
    """O5: an unreadable certificate or key, or an empty password file, raises an error that names
    the setting."""
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
    for options, expected_message in cases:
        with pytest.raises(SettingsError, match=expected_message):
            make_producer(Kafka.load({}, **options))
    assert PASSWORD not in repr(Kafka.load({}, **secure_kafka.service("worker")))
