"""The egress policy: a connector that connects only to allowed addresses.

The connector checks an address when aiohttp creates the socket for it, and the socket connects to
that very address. aiohttp calls `socket_factory` for each address, whether it came from DNS or from
the URL, and resolves nothing afterwards. This prevents DNS rebinding: a name that changes its
address, or has an allowed and a forbidden one, reaches only allowed ones.

c-ares resolves names without threads. The operating system's resolver needs a thread per lookup
from a small shared pool. Two names whose servers do not answer would block all connections, even to
numeric addresses, which uvloop passes through the same threads.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from typing import Any

import aiodns
import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from penstock.callbacks.connections import Connector
from penstock.core.addresses import Network, refusal

# Size of the receive buffer. The kernel's default grows to megabytes per connection, and with it a
# flood of interim answers blocks the loop twice as long (0.35 s instead of 0.17 s).
RECEIVE_BYTES = 16 * 1024
# Timeout of the first DNS query in seconds; it doubles with each try. (Once c-ares has measured a
# server, it starts with five times that duration, and at least with this one.) c-ares ignores
# answers to earlier tries. A slow authoritative server therefore needs several tries, until the
# resolver has its answer cached. All tries take 8 s, within the default timeout.
LOOKUP_TRY_S = 0.25
LOOKUP_TRIES = 5


# Receives a name and its addresses.
Resolved = Callable[[str, Sequence[str]], None]


class ForbiddenAddress(OSError):  # noqa: N818 (named by the condition, as all errors here)
    """The egress policy forbids an address.

    It is an OSError, because aiohttp tries the other addresses of a name only after one. All have
    the same text, because aiohttp passes on one of several errors only if they are equal.

    Attributes:
        kind: the class of the address.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(errno.EACCES, "the address is forbidden")
        self.kind = kind


class BadHostName(ValueError):  # noqa: N818 (as above)
    """The host in a URL is not a valid name, for instance `a..b` or a label of seventy letters."""


class _Resolver(aiohttp.AsyncResolver):
    def __init__(self, resolved: Resolved, **options: Any) -> None:
        super().__init__(**options)
        self._resolved = resolved

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        try:
            found = await super().resolve(host, port, family)
        except OSError as error:
            cause = error.__cause__
            if isinstance(cause, aiodns.error.DNSError) and cause.args[0] == aiodns.error.ARES_EBADNAME:
                raise BadHostName(host) from error
            raise
        self._resolved(host, [result["host"] for result in found])
        return found


def make_resolver(
    nameservers: Sequence[str] | None = None, resolved: Resolved = lambda _name, _addresses: None
) -> AbstractResolver:
    """Makes a DNS resolver without a limit of concurrent lookups; the caller closes it.

    Args:
        nameservers: each an address, or an address and a port; None for those of /etc/resolv.conf.
        resolved: receives each name with its addresses.
    """
    return _Resolver(resolved, nameservers=nameservers, timeout=LOOKUP_TRY_S, tries=LOOKUP_TRIES)


def make_connector(
    allowed: Sequence[Network], limit: int, resolver: AbstractResolver
) -> aiohttp.TCPConnector:
    """Makes a connector to public and allowed addresses.

    Args:
        allowed: networks that may be called although they are not public.
        limit: most connections at once.
        resolver: the caller closes it.
    """

    def make_socket(info: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _name, address = info
        forbidden = refusal(address[0], allowed)
        if forbidden is not None:
            raise ForbiddenAddress(forbidden)
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        return made

    return Connector(
        resolver=resolver,
        socket_factory=make_socket,
        # The lanes bound the calls, per target and in total; a limit per host would add a hidden
        # queue.
        limit=limit,
        limit_per_host=0,
        keepalive_timeout=15,
    )
