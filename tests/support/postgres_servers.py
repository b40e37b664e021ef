"""PostgreSQL servers of a single test, with certificates, standbys and kills; and a pooler
before a server."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import asyncpg
import pytest

from penstock.local.database import _SETTINGS, _allow_search, _server_user, server_binaries
from penstock.local.ports import choose_port
from penstock.local.supervisor import identity
from tests.support.gateways import pump
from tests.support.waiting import wait_until

PASSWORD = "s3cret:/@"
QUOTED = "s3cret%3A%2F%40"


class PostgresServer:
    """A server on loopback, with the superuser `postgres`; it is not started again when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.port = choose_port(0)
        self._user = _server_user()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)
        if self._user:
            _allow_search(folder)
            shutil.chown(folder, self._user)

    def url(self, *, user: str = "postgres", database: str = "postgres", host: str = "127.0.0.1") -> str:
        return f"postgresql://{user}:{QUOTED}@{host}:{self.port}/{database}"

    def run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [server_binaries() / program, *arguments],
            **identity(self._user),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def make(self) -> None:
        """Makes an empty cluster."""
        self.put("password", PASSWORD)
        self.run(
            "initdb",
            *("-D", str(self.data), "-U", "postgres", "--encoding=UTF8", "--locale=C", "--no-sync"),
            *("--auth=scram-sha-256", f"--pwfile={self.folder / 'password'}"),
        )
        with (self.data / "pg_hba.conf").open("a") as file:
            file.write("host replication all 127.0.0.1/32 scram-sha-256\n")

    def follow(self, primary: PostgresServer) -> None:
        """Makes a standby from a base backup."""
        dsn = primary.url().replace("/postgres?", "/?").removesuffix("/postgres")
        self.run("pg_basebackup", "-D", str(self.data), "-R", "-c", "fast", "--no-sync", "-d", dsn)

    def put(self, name: str, text: str) -> Path:
        """Writes a file that only the server can read."""
        file = self.folder / name
        file.touch(mode=0o600)
        file.write_text(text)
        if self._user:
            shutil.chown(file, self._user)
        return file

    @property
    def pid(self) -> int:
        """The process id of the server, which must run."""
        assert self._process is not None
        return self._process.pid

    async def start(self, **settings: str) -> None:
        options = {**_SETTINGS, "port": str(self.port), "unix_socket_directories": "", **settings}
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(  # noqa: ASYNC220 (it forks, and that is all)
            [
                server_binaries() / "postgres",
                *("-D", str(self.data)),
                *(word for name, value in options.items() for word in ("-c", f"{name}={value}")),
            ],
            **identity(self._user),
            cwd=self.folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()
        await wait_until(self.serves, what=f"PostgreSQL serves; see {self.folder / 'log'}")

    async def serves(self) -> bool:
        try:
            await self.ask("SELECT 1")
        except (OSError, asyncpg.PostgresError):
            return False
        return True

    async def ask(self, statement: str, *arguments: object) -> object:
        connection = await asyncpg.connect(self.url())
        try:
            return await connection.fetchval(statement, *arguments)
        finally:
            await connection.close()

    def kill(self) -> None:
        """Kills all processes of the server at once, as a power cut does."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
            self._process = None


class Authority:
    """An authority that signs one certificate for `localhost`."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("certificates are made by openssl, which is not installed")
        folder.mkdir(parents=True)
        self._folder = folder
        self.root = folder / "root.pem"
        own = ("-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2")
        self._openssl(
            *("req", "-x509", *own, "-subj", "/CN=Test authority", "-keyout", "root.key", "-out", "root.pem"),
            *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"),
        )
        self._openssl(
            *("req", "-x509", *own, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.pem"),
            *("-CA", "root.pem", "-CAkey", "root.key", "-addext", "subjectAltName=DNS:localhost"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
        )

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=self._folder, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()

    def file(self, name: str) -> Path:
        return self._folder / name


class TlsFront:
    """Adds PostgreSQL's TLS negotiation to a server that is built without TLS; refuses clients
    that do not ask for TLS."""

    def __init__(self, authority: Authority, server_port: int) -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(authority.file("server.pem"), authority.file("server.key"))
        self._server_port = server_port
        # Below TLS: a TLS transport that was closed twice ignores `abort`.
        self._open: set[asyncio.WriteTransport] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.refused = 0
        self.secured = 0
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for transport in self._open:
            transport.abort()
        # Otherwise the event loop could end before its connections.
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._open.add(writer.transport)
        try:
            # SSLRequest. asyncpg sends cancel requests without it; they are refused too.
            if await reader.readexactly(8) != b"\x00\x00\x00\x08\x04\xd2\x16\x2f":
                self.refused += 1
                return
            writer.write(b"S")
            await writer.drain()
            await writer.start_tls(self._context)
            self.secured += 1
            there, back = await asyncio.open_connection("127.0.0.1", self._server_port)
            self._open.add(back.transport)
            await asyncio.gather(pump(reader, back), pump(there, writer))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def pooler(folder: Path, server_port: int, user: str, database: str, password: str):
    """A PgBouncer in transaction mode before a server; yields its port."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("PgBouncer is not installed (Debian: apt install pgbouncer)")
    folder.mkdir()
    port = choose_port(0)
    (folder / "users").write_text(f'"{user}" "{password}"\n')
    (folder / "ini").write_text(
        f"[databases]\n{database} = host=127.0.0.1 port={server_port}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = scram-sha-256\n"
        f"auth_file = {folder / 'users'}\npool_mode = transaction\ndefault_pool_size = 3\n"
    )
    server_user = _server_user()
    if server_user:
        _allow_search(folder)
        for path in (folder, folder / "users", folder / "ini"):
            shutil.chown(path, server_user)
    log = (folder / "log").open("wb")
    process = subprocess.Popen(  # noqa: ASYNC220 (it forks, and that is all)
        [program, "-q", str(folder / "ini")],
        **identity(server_user),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    log.close()

    async def serves() -> bool:
        try:
            _reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    try:
        await wait_until(serves, what="PgBouncer listens")
        yield port
    finally:
        process.kill()
        process.wait()
