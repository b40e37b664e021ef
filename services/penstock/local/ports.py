"""Ports on loopback: the usual port when it is free, another one otherwise."""

from __future__ import annotations

import random
import socket

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


def choose_port(preferred: int = 0) -> int:
    """Returns `preferred` when it is free, otherwise another free port; 0 means no preference."""
    if preferred and is_free(preferred):
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
