"""The lock and the published addresses of a data directory; `penstock.discovery` reads them.

The kernel releases the lock when its owner's process ends, by SIGKILL too.
"""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from penstock.discovery import DEFAULT_DATA_DIR, Addresses
from penstock.errors import CannotStart
from penstock.forking import keep_from_children

CALLBACK_SECRETS = "PENSTOCK_CALLBACK_SECRETS"
ENCRYPTION_KEYS = "PENSTOCK_ENCRYPTION_KEYS"
CALLBACK_ALLOW = "PENSTOCK_CALLBACK_ALLOW"
CALLBACK_SECRET_FILE = "callback-secret"  # noqa: S105 (the name of a file)
_THIS_MACHINE = "127.0.0.0/8,::1/128"


class DataDir:
    """A data directory that this process owns.

    Raises:
        CannotStart: the directory has other files, it cannot be written, or another deployment runs
            in it.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.path = path.absolute()
        except FileNotFoundError as error:
            raise CannotStart("the working directory was deleted: change to another directory") from error
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if _has_other_files(self.path):
                raise CannotStart(
                    f"{self.path} has files and is no data directory of Penstock: name an empty or a new one with --data-dir"
                )
            # Keeps the directory out of a surrounding git repository.
            (self.path / ".gitignore").write_text("*\n")
            self._lock = (self.path / "lock").open("a+")
            # A forked child would keep the lock.
            keep_from_children(self._lock.fileno())
        except OSError as error:
            raise CannotStart(
                f"{self.path} cannot be written ({error.strerror}): choose another --data-dir"
            ) from error
        if not self._acquire():
            self._lock.seek(0)
            owner = self._lock.read().strip()
            self._lock.close()
            raise CannotStart(
                f"another `penstock up` (process {owner or 'unknown'}) runs in {self.path}: "
                "stop it, or choose another --data-dir"
            )
        # Addresses of a killed owner are no longer valid.
        (self.path / "state.json").unlink(missing_ok=True)
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def _acquire(self) -> bool:
        # Several tries, because `discovery.running` holds the lock for a moment.
        for _ in range(10):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                return True
        return False

    def publish(self, addresses: Addresses) -> None:
        """Publishes the addresses. Only this user can read the file, which has a password."""
        unfinished = self.path / "state.json.unfinished"
        unfinished.unlink(missing_ok=True)
        unfinished.touch(mode=0o600)
        unfinished.write_text(json.dumps(dataclasses.asdict(addresses), indent=2) + "\n")
        unfinished.replace(self.path / "state.json")

    def last_ports(self) -> dict[str, int]:
        """The ports of the last run by server; empty without one."""
        try:
            found = json.loads((self.path / "ports.json").read_text())
            return {str(name): int(port) for name, port in found.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def keep_ports(self, ports: Mapping[str, int]) -> None:
        """Keeps the ports for the next run, so that addresses stay the same."""
        (self.path / "ports.json").write_text(json.dumps(dict(ports)) + "\n")

    def close(self) -> None:
        """Removes the addresses and unlocks the directory."""
        (self.path / "state.json").unlink(missing_ok=True)
        self._lock.close()


def _has_other_files(path: Path) -> bool:
    """Whether a directory has files, and Penstock has never used it.

    The default directory belongs to Penstock by its name: the demo keeps its files there.
    """
    return (
        path.name != DEFAULT_DATA_DIR.name
        and not (path / "lock").exists()
        and next(path.iterdir(), None) is not None
    )


def make_secrets(data_dir: Path) -> dict[str, str]:
    """The variables with secrets: of the environment, or of files that the first run creates."""
    return {
        CALLBACK_SECRETS: os.environ.get(CALLBACK_SECRETS)
        or _make_secret(data_dir / CALLBACK_SECRET_FILE, "whsec_"),
        ENCRYPTION_KEYS: os.environ.get(ENCRYPTION_KEYS) or _make_secret(data_dir / "encryption-key", ""),
    }


def _make_secret(file: Path, prefix: str) -> str:
    """Reads a secret from a file that only its owner can read; the first run creates it."""
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(prefix + base64.b64encode(secrets.token_bytes(32)).decode())
    return file.read_text()


def callback_allow(*, development: bool) -> str:
    """The value of PENSTOCK_CALLBACK_ALLOW: non-public networks that callbacks may go to.

    Args:
        development: whether to allow this machine. A value in the environment wins, even an empty
            one.
    """
    return os.environ.get(CALLBACK_ALLOW, _THIS_MACHINE if development else "")
