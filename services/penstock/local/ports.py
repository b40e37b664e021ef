"""Ports on loopback: the usual port when it is free, another one otherwise."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

LOOPBACK = "127.0.0.1"

# Below the ephemeral ports (from 32768 on Linux, from 49152 elsewhere). A client that retries an
# ephemeral port while its server restarts can connect to itself, and would then hold the port.
_CHOICE = range(20_000, 32_000)


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of loopback now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections in TIME_WAIT do not occupy a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


# The locks of this process on ports that it preferred, by port. They end with the process.
_locks: dict[int, int] = {}


def _lock(port: int) -> bool:
    """Whether no other process of this user has chosen `port` as its preferred one."""
    if port not in _locks:
        folder = Path(tempfile.gettempdir()) / f"penstock-ports-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(folder / str(port), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        _locks[port] = lock
    return True


def choose_port(preferred: int = 0) -> int:
    """Returns `preferred` when it is free, otherwise another free port; 0 means no preference.

    A server listens on its port seconds after the choice. Until then a lock keeps other deployments
    from choosing the same preferred port: their services would use each other's servers.
    """
    if preferred and is_free(preferred) and _lock(preferred):
        return preferred
    for port in random.sample(_CHOICE, len(_CHOICE)):
        if is_free(port):
            return port
    raise OSError(f"there is no free port from {_CHOICE.start} to {_CHOICE.stop} on {LOOPBACK}")


def answers(port: int) -> bool:
    """Whether something accepts connections on `port` of loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) == 0
