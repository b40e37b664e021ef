"""Options of connections to servers: an end that has vanished is noticed within seconds.

By default, a connection to a host without power or network lasts for 15 minutes with data under
way, and for two hours without. Forked children do not have these connections.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

from penstock.forking import keep_from_children

# Seconds after which an end that answers nothing has vanished.
VANISHED_S = 7
# Seconds without data after which an end is probed, seconds between two probes, and their number.
PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 3, 1, 4

_OPTIONS = (
    ("TCP_KEEPIDLE", PROBE_AFTER_S),
    ("TCP_KEEPINTVL", PROBE_EVERY_S),
    ("TCP_KEEPCNT", PROBES),
    # Milliseconds; while data is under way, keepalive sends no probes.
    ("TCP_USER_TIMEOUT", VANISHED_S * 1000),
)


def end_when_peer_vanishes(transport: asyncio.BaseTransport) -> None:
    """Ends a connection `VANISHED_S` seconds after its peer's last answer; Unix sockets stay."""
    _set_options(transport.get_extra_info("socket"))


def make_socket(info: tuple[Any, ...]) -> socket.socket:
    """A socket whose connection ends like that of `end_when_peer_vanishes`.

    Args:
        info: an entry of `getaddrinfo`; for the `socket_factory` of aiohttp's connectors.
    """
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    _set_options(made)
    return made


def _set_options(found: Any) -> None:
    if found is None:
        return
    keep_from_children(found.fileno())
    if found.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # A connection that has just ended takes no options. Its owner meets the connection's error.
    with suppress(OSError):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS:
            # Not every system has every option.
            if (option := getattr(socket, name, None)) is not None:
                found.setsockopt(socket.IPPROTO_TCP, option, value)
