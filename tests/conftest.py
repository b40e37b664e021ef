"""The servers all tests share, started when the first test asks for one.

One real Kafka and one real PostgreSQL serve the whole session; each test has topics of its own prefix and a
database of its own, cloned from a template that was migrated once. PENSTOCK_TEST_KAFKA and PENSTOCK_TEST_POSTGRES
name servers to use instead.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from penstock.kafka.connection import admin_client
from penstock.local.broker import EmbeddedKafka
from penstock.local.database import EmbeddedPostgres
from penstock.local.supervisor import Supervisor
from penstock.postgres.migrations import migrate
from penstock.settings import Kafka
from tests.secured import SecureKafka, start_secure_kafka
from tests.telling import Telling

# No test has a time limit: machines are noisy.
hypothesis.settings.register_profile("penstock", deadline=None)
hypothesis.settings.load_profile("penstock")

# Folders whose tests run in one process each, by that process's name.
_HEAVY = {"chaos": "faults", "load": "faults", "containers": "containers"}

_ROOT = pytest.StashKey[Path]()
_WELL = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Gives this run a folder of its own for `tmp_path`.

    Runs of one user share a folder otherwise, and each closes it to all others when it begins: an embedded PostgreSQL of
    another run, which belongs to the user `postgres`, then finds its data no more when it restarts.
    """
    config.pluginmanager.register(Telling())
    if config.option.basetemp is None and "PYTEST_DEBUG_TEMPROOT" not in os.environ:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="penstock-tests-")
        config.stash[_ROOT] = Path(os.environ["PYTEST_DEBUG_TEMPROOT"])


class _ByFolder(LoadScopeScheduling):
    """Hands each test to whichever process is free, but for the folders in `_HEAVY`.

    xdist's own groups do not hold with pytest 9.2, which no longer lets it rename tests.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _HEAVY.get(nodeid.split("/")[1], nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Where several processes run the tests, one of them runs all that put the machine under load, one after the other."""
    return _ByFolder(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes it, unless something failed and somebody will want to look."""
    root = config.stash.get(_ROOT, None)
    if root is not None and config.stash.get(_WELL, False):
        shutil.rmtree(root, ignore_errors=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Notes whether all went well."""
    session.config.stash[_WELL] = exitstatus == 0


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine for a session fixture: in a thread, so that no test's event loop is touched."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def _unique() -> str:
    return uuid.uuid4().hex[:10]


def database_dsn(server: str, name: str) -> str:
    """The URL of database `name` on the server of another URL."""
    return urlsplit(server)._replace(path=f"/{name}").geturl()


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def _servers() -> Iterator[tuple[Supervisor, Path]]:
    """A supervisor for the session's servers; whatever becomes of the session, its reaper stops them."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-tests-"))
    supervisor = Supervisor(lambda name, line: sys.stderr.write(f"{name} {line}\n"), run_dir=folder / "run")
    try:
        yield supervisor, folder
    finally:
        supervisor.close()
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def kafka_servers(request: pytest.FixtureRequest) -> str:
    """Bootstrap servers of the session's broker."""
    if given := os.environ.get("PENSTOCK_TEST_KAFKA"):
        return given
    supervisor, folder = request.getfixturevalue("_servers")
    broker = EmbeddedKafka(supervisor, folder / "kafka")
    _run(broker.start())
    return broker.servers


@pytest.fixture(scope="session")
def secure_kafka(_servers: tuple[Supervisor, Path]) -> SecureKafka:
    """A broker of its own that wants to know who its clients are."""
    supervisor, folder = _servers
    found: SecureKafka = _run(start_secure_kafka(supervisor, folder / "secure-kafka"))
    return found


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> str:
    """URL of the session's PostgreSQL server (its database `postgres`)."""
    if given := os.environ.get("PENSTOCK_TEST_POSTGRES"):
        return given
    supervisor, folder = request.getfixturevalue("_servers")
    server = EmbeddedPostgres(supervisor, folder / "postgres")
    _run(server.start())
    return server.dsn()


@pytest.fixture(scope="session")
def _template(postgres_server: str) -> Iterator[str]:
    """The name of a database with all migrations applied, of which each test gets a copy."""
    name = f"template_{_unique()}"
    _run(_execute(postgres_server, f"CREATE DATABASE {name}"))
    _run(migrate(database_dsn(postgres_server, name)))
    yield name
    _run(_execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture
async def database(postgres_server: str, _template: str) -> AsyncIterator[str]:
    """URL of a migrated, empty database that is this test's own."""
    name = f"t_{_unique()}"
    await _execute(postgres_server, f"CREATE DATABASE {name} TEMPLATE {_template}")
    yield database_dsn(postgres_server, name)
    # By force: what a failed test left connected must not fail the next one.
    await _execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def empty_database(postgres_server: str) -> AsyncIterator[str]:
    """URL of a database without any table that is this test's own, for the migrations themselves."""
    name = f"t_{_unique()}"
    await _execute(postgres_server, f"CREATE DATABASE {name}")
    yield database_dsn(postgres_server, name)
    await _execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def prefix(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A prefix for topics and groups that is this test's own; its topics are deleted afterwards."""
    name = f"t-{_unique()}."
    yield name
    if "kafka_servers" in request.fixturenames:
        # Thousands of abandoned partitions would slow the broker down for everyone.
        async with admin_client(Kafka(kafka=request.getfixturevalue("kafka_servers"))) as client:
            topics = [topic for topic in await client.list_topics() if topic.startswith(name)]
            if topics:
                await client.delete_topics(topics)
