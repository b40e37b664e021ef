"""Ports on loopback: the usual one when it is free, another when it is not."""

from __future__ import annotations

import random
import socket

LOOPBACK = "127.0.0.1"

# Below the range from which systems draw the ports of outgoing connections (32768 on Linux, 49152 elsewhere): while a
# server restarts, a client that keeps dialling its old port from that range would sooner or later connect to itself
# and hold the port for good.
_CHOICE = range(20_000, 32_000)


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of loopback now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose connections are merely in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def choose_port(preferred: int = 0) -> int:
    """`preferred` when it is free, otherwise a free port of our own range; 0 prefers none."""
    if preferred and is_free(preferred):
        return preferred
    for port in random.sample(_CHOICE, len(_CHOICE)):
        if is_free(port):
            return port
    raise OSError(f"no free port from {_CHOICE.start} to {_CHOICE.stop} on {LOOPBACK}")


def answers(port: int) -> bool:
    """Whether something accepts connections on `port` of loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) == 0
