"""The servers that all tests share, and how tests are distributed over processes.

One real Kafka and one real PostgreSQL serve a run and all of its processes; each test has topics
of its own prefix and a database of its own, cloned from a template that was migrated once.
PENSTOCK_TEST_KAFKA and PENSTOCK_TEST_POSTGRES name servers to use instead.
"""

from __future__ import annotations

import os
import random
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from penstock.kafka.client.connection import admin_client
from penstock.settings import Kafka
from tests.support.compiled_tests import compile_tests
from tests.support.memory_folder import make_folder, remove_old
from tests.support.open_connections import OpenConnections
from tests.support.run_summary import RunSummary, add_summary
from tests.support.scheduling import Scheduling
from tests.support.secure_kafka import SecureKafka, start_secure_kafka
from tests.support.shared_servers import (
    KAFKA,
    POSTGRES,
    TEMPLATE,
    SharedServers,
    database_dsn,
    execute,
    make_template,
    run,
)
from tests.support.stuck_tests import StuckTests

# Examples have no time limit: machines are noisy. CI runs twice as many examples as a developer.
hypothesis.settings.register_profile(
    "penstock", deadline=None, max_examples=100 if os.environ.get("CI") else 50
)
hypothesis.settings.load_profile("penstock")

_TEMP_ROOT = pytest.StashKey[Path]()
_PASSED = pytest.StashKey[bool]()
_SERVERS = pytest.StashKey[SharedServers]()


def pytest_configure(config: pytest.Config) -> None:
    """Gives this run a folder of its own for `tmp_path`.

    Runs of one user share a folder otherwise, and each closes it to all others when it begins:
    an embedded PostgreSQL of another run, which belongs to the user `postgres`, then cannot read
    its data when it restarts.
    """
    config.pluginmanager.register(RunSummary())
    config.pluginmanager.register(OpenConnections())
    config.pluginmanager.register(StuckTests())
    if config.option.basetemp is None and "PYTEST_DEBUG_TEMPROOT" not in os.environ:
        remove_old()
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(make_folder("penstock-tests-"))
        config.stash[_TEMP_ROOT] = Path(os.environ["PYTEST_DEBUG_TEMPROOT"])


def pytest_sessionstart(session: pytest.Session) -> None:
    """Starts the servers, and compiles the tests, where several processes are to share them; they
    inherit the environment."""
    config = session.config
    is_controller = not hasattr(config, "workerinput") and getattr(config.option, "dist", "no") != "no"
    if is_controller and not config.option.collectonly and not {KAFKA, POSTGRES} & set(os.environ):
        servers = config.stash[_SERVERS] = SharedServers()
        with ThreadPoolExecutor(1) as thread:
            compiling = thread.submit(compile_tests, config)
            os.environ.update(servers.start_all())
            compiling.result()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffles the tests when PENSTOCK_TEST_SEED is set: no test may depend on the one before
    it."""
    if seed := os.environ.get("PENSTOCK_TEST_SEED"):
        random.Random(seed).shuffle(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Tests that load the whole machine run after all others, one at a time."""
    return Scheduling(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the servers, and removes the run's folder unless a test failed."""
    if (servers := config.stash.get(_SERVERS, None)) is not None:
        servers.close()
    root = config.stash.get(_TEMP_ROOT, None)
    if root is not None and config.stash.get(_PASSED, False):
        shutil.rmtree(root, ignore_errors=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Notes whether all tests passed; otherwise the output gets the last lines of the servers'
    log."""
    session.config.stash[_PASSED] = exitstatus == 0
    servers = session.config.stash.get(_SERVERS, None)
    if exitstatus != 0 and servers is not None:
        add_summary("the last lines of the servers", servers.log_lines)


def _unique() -> str:
    return uuid.uuid4().hex[:10]


@pytest.fixture(scope="session")
def _servers() -> Iterator[SharedServers]:
    """The servers that this process runs itself."""
    servers = SharedServers()
    try:
        yield servers
    finally:
        servers.close()


@pytest.fixture(scope="session")
def kafka_servers(request: pytest.FixtureRequest) -> str:
    """Bootstrap servers of the run's broker."""
    return os.environ.get(KAFKA) or request.getfixturevalue("_servers").start_kafka()


@pytest.fixture(scope="session")
def secure_kafka(_servers: SharedServers) -> SecureKafka:
    """A broker of its own that authenticates its clients."""
    return run(start_secure_kafka(_servers.supervisor, _servers.folder / "secure-kafka"))


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> str:
    """URL of the run's PostgreSQL server (its database `postgres`)."""
    return os.environ.get(POSTGRES) or request.getfixturevalue("_servers").start_postgres()


@pytest.fixture(scope="session")
def _template(postgres_server: str) -> Iterator[str]:
    """The name of a database with all migrations applied, of which each test gets a copy."""
    if name := os.environ.get(TEMPLATE):
        yield name
        return
    name = run(make_template(postgres_server))
    yield name
    run(execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture
async def database(postgres_server: str, _template: str) -> AsyncIterator[str]:
    """URL of a migrated, empty database that is this test's own."""
    name = f"t_{_unique()}"
    await execute(postgres_server, f"CREATE DATABASE {name} TEMPLATE {_template} STRATEGY FILE_COPY")
    yield database_dsn(postgres_server, name)
    # FORCE closes the connections that a failed test left open.
    await execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(autouse=True)
def _patient_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the loop of a test stall for longer than a service's: several services share it, on a
    machine that is loaded by other tests."""
    monkeypatch.setattr("penstock.postgres.session.VANISHED_S", 60)


@pytest.fixture
async def empty_database(postgres_server: str) -> AsyncIterator[str]:
    """URL of a database without any table that is this test's own, for the migrations
    themselves."""
    name = f"t_{_unique()}"
    await execute(postgres_server, f"CREATE DATABASE {name}")
    yield database_dsn(postgres_server, name)
    await execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def prefix(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A prefix for topics and groups that is this test's own; its topics are deleted afterwards."""
    name = f"t-{_unique()}."
    yield name
    if "kafka_servers" in request.fixturenames:
        # Thousands of abandoned partitions would slow the broker down for all tests.
        async with admin_client(Kafka(kafka=request.getfixturevalue("kafka_servers"))) as client:
            topics = [topic for topic in await client.list_topics() if topic.startswith(name)]
            if topics:
                await client.delete_topics(topics)
