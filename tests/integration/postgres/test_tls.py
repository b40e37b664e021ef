"""PostgreSQL over TLS, and the sources of its password."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.support.callback_targets import LOOPBACK, SECRET, target_server
from tests.support.gateways import running_gateway
from tests.support.pipeline import System
from tests.support.postgres_servers import PASSWORD, QUOTED, Authority, TlsFront
from tests.support.services import make_topics, running_service
from tests.support.waiting import wait_until

from penstock.callbacks import app as callbacks
from penstock.callbacks.settings import CallbacksSettings
from penstock.errors import SettingsError
from penstock.postgres.connection import connect, open_pool
from penstock.postgres.types import TaskType, register
from penstock.settings import Platform


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "authority")


@pytest.fixture
async def server(database, authority):
    """Runs a TLS proxy in PostgreSQL's protocol, because the embedded server has no TLS."""
    parts = urlsplit(database)
    port = int(parse_qs(parts.query).get("port", [parts.port or 5432])[0])
    async with TlsFront(authority, port) as front:
        yield front


@pytest.fixture
async def url(database, authority, server):
    """Returns the URL of a user with a password, which verifies the server by name."""
    parts = urlsplit(database)
    name = "u_" + parts.path[1:]
    tls = f"sslmode=verify-full&sslrootcert={authority.root}"
    async with open_pool(database, "test", size=1) as pool:
        await pool.execute(f"CREATE ROLE {name} LOGIN SUPERUSER PASSWORD '{PASSWORD}'")
        yield f"postgresql://{name}:{QUOTED}@localhost:{server.port}{parts.path}?{tls}"
        await pool.execute(f"DROP ROLE {name}")


async def test_every_service_and_the_command_line_verify_the_server(
    kafka_servers, prefix, server, url, tmp_path
):
    """S9: with `sslmode=verify-full` tasks succeed, and all connections, listening sessions
    included, use TLS. The command line reads the password from a file."""
    await make_topics(kafka_servers, prefix)
    connection_settings = {"kafka": kafka_servers, "prefix": prefix, "postgres": url, "objects": "memory:///"}
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(url, "test"))
        await register(pool, TaskType(name="t", partitions=2))
        gateway = await stack.enter_async_context(running_gateway(**connection_settings))
        system = System(kafka_servers, prefix, url, stack, pool)
        await system.start("task-sync", "heartbeats", "stages")
        await system.work()
        target = await stack.enter_async_context(target_server())
        callback_settings = CallbacksSettings(
            kafka=kafka_servers,
            prefix=prefix,
            postgres=url,
            callback_secrets=(SECRET,),
            callback_allow=LOOPBACK,
        )
        await stack.enter_async_context(running_service(callbacks.create_app(callback_settings)))
        submissions = [{"type": "t", "context": n, "callbacks": [target.url]} for n in range(3)]
        response = await gateway.post("/tasks", submissions)
        assert response.status in (200, 201), response.body
        await system.become(succeeded=3)
        await wait_until(lambda: len(set(target.ids())) == 3, what="each callback arrives")
        names = await pool.fetch(
            "SELECT application_name AS name FROM pg_stat_activity WHERE usename = current_user"
        )
        expected_names = {
            "gateway",
            "gateway types",
            "task-sync",
            "stages",
            "stages sweeper",
            "heartbeats",
            "callbacks",
        }
        assert {f"penstock {name}" for name in expected_names} <= {row["name"] for row in names}
        assert server.secured >= len(expected_names)
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    environment = {
        **os.environ,
        "PENSTOCK_POSTGRES": url.replace(f":{QUOTED}@", "@"),
        "PENSTOCK_POSTGRES_PASSWORD_FILE": str(file),
    }
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "penstock", "migrate", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["applied"] == []


async def refused(url: str) -> str:
    with pytest.raises(SettingsError) as error:
        await connect(url, "test")
    with pytest.raises(SettingsError):
        async with open_pool(url, "test"):
            pass
    assert "s3cret" not in str(error.value)
    return str(error.value)


async def test_each_failed_verification_has_its_own_error(server, url, authority, tmp_path):
    """S9, O8: an unknown authority, a wrong host and a missing file each raise their own
    SettingsError. The client never falls back to a connection without TLS."""
    unknown_authority = Authority(tmp_path / "stranger")

    def with_root(path: object) -> str:
        return url.replace(str(authority.root), str(path))

    assert "is not accepted" in await refused(with_root(unknown_authority.root))
    assert "127.0.0.1" in await refused(url.replace("@localhost", "@127.0.0.1"))
    assert "nothing.pem" in await refused(with_root(tmp_path / "nothing.pem"))
    (tmp_path / "empty.pem").write_text("")
    assert "sslrootcert" in await refused(with_root(tmp_path / "empty.pem"))
    assert (server.secured, server.refused) == (0, 0)


def test_the_password_file_completes_a_url_without_password(tmp_path):
    """The password file completes a URL without a password, with any characters in it. An empty
    or missing file raises an error."""
    file = tmp_path / "password"
    file.write_text("p&=w@/\n")
    environ = {
        "PENSTOCK_POSTGRES": "postgresql://u@h/d?sslmode=require",
        "PENSTOCK_POSTGRES_SESSION": "postgresql://u:own@h/d",
        "PENSTOCK_POSTGRES_PASSWORD_FILE": str(file),
    }
    settings = Platform.load(environ)
    assert settings.postgres == "postgresql://u@h/d?sslmode=require&password=p%26%3Dw%40%2F"
    assert settings.sessions == "postgresql://u:own@h/d"
    for text, message in (("\n", "is empty"), (None, "cannot be read")):
        file.unlink()
        if text is not None:
            file.write_text(text)
        with pytest.raises(SettingsError, match=message):
            Platform.load(environ)


def test_a_named_database_replaces_the_session_url():
    """A command with --postgres ignores the environment's session URL, so that it takes no lock in
    another database."""
    environ = {
        "PENSTOCK_POSTGRES": "postgresql://u@pool/d",
        "PENSTOCK_POSTGRES_SESSION": "postgresql://u@h/d",
    }
    assert Platform.load(environ).sessions == "postgresql://u@h/d"
    named = Platform.load(environ, postgres="postgresql://u@other/d")
    assert (named.sessions, named.pooled) == ("postgresql://u@other/d", False)
