"""Discovery of the deployment that `penstock up` runs on this machine.

The deployment writes its addresses to `state.json` in its data directory, and holds the lock file
next to it while it runs. Without a held lock the addresses are those of a killed deployment, and
are ignored.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SettingsError

DEFAULT_DATA_DIR = Path(".penstock")
DATA_DIR_VARIABLE = "PENSTOCK_DATA_DIR"

# Settings of a cluster without authentication; they override credentials for another cluster in the
# environment.
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
    """The addresses of a running deployment.

    Attributes:
        pid: process id of its owner.
        gateway: base URL of the gateway.
        kafka: bootstrap servers.
        postgres: connection URL.
        prefix: prefix of topic and consumer group names.
        objects: URL of the object store.
        embedded_kafka: whether the broker is the embedded one, which has no authentication.
        deployment: id of the database, by which a gateway knows its own requests; None while the
            deployment starts.
    """

    pid: int
    gateway: str
    kafka: str
    postgres: str
    prefix: str
    objects: str
    embedded_kafka: bool = False
    deployment: str | None = None

    def environment(self) -> dict[str, str]:
        """The settings that lead a service, worker or client to this deployment."""
        return {
            **(WITHOUT_CREDENTIALS if self.embedded_kafka else {}),
            "PENSTOCK_KAFKA": self.kafka,
            "PENSTOCK_POSTGRES": self.postgres,
            "PENSTOCK_PREFIX": self.prefix,
            "PENSTOCK_OBJECTS": self.objects,
            "PENSTOCK_GATEWAY": self.gateway,
        }


def running(data_dir: Path = DEFAULT_DATA_DIR) -> Addresses | None:
    """Returns the deployment of this user that runs in `data_dir` now, or None.

    Raises:
        SettingsError: a deployment runs there, and its addresses cannot be read.
    """
    file = data_dir / "state.json"
    try:
        state = file.read_bytes()
    except OSError:
        return None
    owner = owner_of(data_dir)
    if owner is None:
        return None
    try:
        addresses = Addresses(**json.loads(state))
    except (ValueError, TypeError) as error:
        raise SettingsError(
            f"{file} has no addresses of a deployment ({error}): `penstock down` and `penstock up` write it again"
        ) from error
    # A new owner holds the lock for a moment before it replaces the addresses of a killed owner.
    return addresses if owner == addresses.pid else None


def owner_of(data_dir: Path) -> int | None:
    """The process that runs, starts or stops a deployment in `data_dir` now; None without one."""
    try:
        owner = int((data_dir / "lock").read_text())
        held = _is_held(data_dir / "lock")
    except (OSError, ValueError):
        return None
    return owner if held and _process_exists(owner) else None


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # The process of another user.
        return True
    return True


def _is_held(path: Path) -> bool:
    try:
        import fcntl  # noqa: PLC0415 (Windows has no fcntl, and no local deployment)
    except ImportError:
        return False
    try:
        with path.open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def absolute(path: Path) -> Path:
    """The absolute path; in a deleted working directory the path itself, which leads nowhere."""
    try:
        return path.absolute()
    except FileNotFoundError:
        return path


def data_dir_here() -> Path:
    """The default data directory: PENSTOCK_DATA_DIR, else `.penstock`."""
    return absolute(Path(os.environ.get(DATA_DIR_VARIABLE) or DEFAULT_DATA_DIR))


def local_environment(data_dir: Path | None = None, *, required: bool = True) -> dict[str, str]:
    """Returns the settings of the deployment in a data directory; empty if there is none.

    Args:
        data_dir: the data directory; None is `data_dir_here()`.
        required: refuse a stopped deployment, because the caller would use the default addresses,
            where another deployment may listen.

    Raises:
        SettingsError: `data_dir` or PENSTOCK_DATA_DIR names a directory in which no deployment
            runs, or the deployment in `.penstock` is stopped, starting or stopping.
    """
    named = data_dir is not None or bool(os.environ.get(DATA_DIR_VARIABLE))
    directory = data_dir_here() if data_dir is None else absolute(data_dir)
    addresses = running(directory)
    if addresses is None and (named or required) and owner_of(directory) is not None:
        raise SettingsError(
            f"the deployment in {directory} is starting or stopping: try again once `penstock status` shows its services"
        )
    if addresses is None and named:
        raise SettingsError(
            f"no `penstock up` of this user runs in {directory}: start one with --data-dir {directory}, "
            f"or correct {DATA_DIR_VARIABLE if data_dir is None else '--data-dir'}"
        )
    if addresses is None and required and (directory / "lock").exists():
        raise SettingsError(
            f"the deployment in {directory} is stopped: start it with `penstock up`, or name another one by its gateway "
            "(--gateway or PENSTOCK_GATEWAY) or its servers (PENSTOCK_KAFKA, PENSTOCK_POSTGRES)"
        )
    return addresses.environment() if addresses else {}


# Header of a request: the deployment that it is for. Header of an answer: that of the gateway.
DEPLOYMENT_HEADER = "Penstock-Deployment"


def deployment_header(gateway: str, data_dir: Path | None = None) -> dict[str, str]:
    """The header by which a gateway refuses requests that are for another deployment.

    Args:
        gateway: base URL of the gateway.
        data_dir: the data directory; None is `data_dir_here()`.

    Returns:
        The header; empty unless the gateway is that of the directory's deployment.
    """
    found = running(data_dir_here() if data_dir is None else absolute(data_dir))
    ours = found is not None and found.gateway.rstrip("/") == gateway.rstrip("/")
    return {DEPLOYMENT_HEADER: found.deployment} if found and ours and found.deployment else {}
