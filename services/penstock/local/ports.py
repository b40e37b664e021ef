"""Ports on loopback: the usual port when it is free, another one otherwise."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
import threading
from functools import cache
from pathlib import Path

LOOPBACK = "127.0.0.1"
MAX_PORT = 65_535

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


# Ports that this process has chosen. Their locks end with the process.
_chosen: set[int] = set()
# The locks are those of the process: threads need one between them.
_choosing = threading.Lock()


@cache
def _lock_file() -> int:
    """One file for all processes of this user; each port is the byte of its number."""
    path = Path(tempfile.gettempdir()) / f"penstock-ports-{os.getuid()}.lock"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _lock(port: int) -> bool:
    """Whether no other process of this user has chosen `port`."""
    file = _lock_file()
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except (BlockingIOError, PermissionError):
        return False
    _chosen.add(port)
    return True


def choose_port(preferred: int = 0) -> int:
    """Returns `preferred` when it is free, otherwise another free port; 0 means no preference.

    A server listens on its port seconds after the choice. Until then a lock keeps other processes
    from choosing the same port: their services would use each other's servers. A process that
    prefers a port again, for a server that restarts, receives it again.
    """
    with _choosing:
        if preferred and is_free(preferred) and _lock(preferred):
            return preferred
        for port in random.sample(_CHOICE, len(_CHOICE)):
            if port not in _chosen and is_free(port) and _lock(port):
                return port
    raise OSError(f"there is no free port from {_CHOICE.start} to {_CHOICE.stop} on {LOOPBACK}")


def answers(port: int) -> bool:
    """Whether something accepts connections on `port` of loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) == 0
