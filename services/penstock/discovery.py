"""Finding the deployment that `penstock up` runs on this machine.

It leaves its addresses in `state.json` of its data directory and holds a lock beside it for as long as it lives; without
a held lock the file is only what a killed owner left.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SettingsError

DEFAULT_DATA_DIR = Path(".penstock")
DATA_DIR_VARIABLE = "PENSTOCK_DATA_DIR"

# The settings of a cluster that asks for none, whatever the environment has for another.
WITHOUT_CREDENTIALS = {
    "PENSTOCK_KAFKA_PROTOCOL": "PLAINTEXT",
    **dict.fromkeys(
        (
            "PENSTOCK_KAFKA_CA_FILE",
            "PENSTOCK_KAFKA_CERT_FILE",
            "PENSTOCK_KAFKA_KEY_FILE",
            "PENSTOCK_KAFKA_MECHANISM",
            "PENSTOCK_KAFKA_USER",
            "PENSTOCK_KAFKA_PASSWORD",
            "PENSTOCK_KAFKA_PASSWORD_FILE",
            "PENSTOCK_KAFKA_TOKEN_URL",
            "PENSTOCK_KAFKA_CLIENT_ID",
            "PENSTOCK_KAFKA_CLIENT_SECRET_FILE",
            "PENSTOCK_KAFKA_SCOPE",
        ),
        "",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where a running deployment's parts are.

    Attributes:
        pid: the process that owns it.
        gateway: base URL.
        kafka: bootstrap servers.
        postgres: connection URL.
        prefix: of topics and groups.
        objects: URL of the object store.
        embedded_kafka: whether the broker is the deployment's own, which asks nobody who they are.
    """

    pid: int
    gateway: str
    kafka: str
    postgres: str
    prefix: str
    objects: str
    embedded_kafka: bool = False

    def environment(self) -> dict[str, str]:
        """The settings under which a service, worker or client finds this deployment."""
        return {
            **(WITHOUT_CREDENTIALS if self.embedded_kafka else {}),
            "PENSTOCK_KAFKA": self.kafka,
            "PENSTOCK_POSTGRES": self.postgres,
            "PENSTOCK_PREFIX": self.prefix,
            "PENSTOCK_OBJECTS": self.objects,
            "PENSTOCK_GATEWAY": self.gateway,
        }


def running(data_dir: Path = DEFAULT_DATA_DIR) -> Addresses | None:
    """The deployment that runs in `data_dir` now, or None; also None when it is another user's."""
    try:
        addresses = Addresses(**json.loads((data_dir / "state.json").read_text()))
        owner = (data_dir / "lock").read_text()
        held = _is_held(data_dir / "lock")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    # Whoever took the lock a moment ago has not yet written over what the killed owner left.
    return addresses if owner == str(addresses.pid) and held and _lives(addresses.pid) else None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _is_held(path: Path) -> bool:
    try:
        import fcntl  # noqa: PLC0415 (Windows has it not; neither has it a local deployment)
    except ImportError:
        return False
    try:
        with path.open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def data_dir_here() -> Path:
    """Where a deployment is looked for unless told otherwise: PENSTOCK_DATA_DIR, else `.penstock`."""
    return Path(os.environ.get(DATA_DIR_VARIABLE) or DEFAULT_DATA_DIR).absolute()


def local_environment(data_dir: Path | None = None) -> dict[str, str]:
    """The settings of the deployment that runs in a data directory; empty when none runs in the default one.

    Args:
        data_dir: None is `data_dir_here()`.

    Raises:
        SettingsError: a directory was named, here or by PENSTOCK_DATA_DIR, and no deployment runs in it.
    """
    named = data_dir is not None or bool(os.environ.get(DATA_DIR_VARIABLE))
    place = data_dir_here() if data_dir is None else data_dir.absolute()
    found = running(place)
    if found is None and named:
        raise SettingsError(
            f"no `penstock up` of this user runs in {place}: start one with --data-dir {place}, "
            f"or correct {DATA_DIR_VARIABLE if data_dir is None else '--data-dir'}"
        )
    return found.environment() if found else {}
