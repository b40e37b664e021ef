"""The way out: a connector that connects to addresses that may be called, and to no others.

An address is judged when the socket for it is made, and the socket is connected to that very address: aiohttp asks
`socket_factory` for each address it is about to try, whether DNS gave it or it stood in the URL, and between the
answer and `connect` nothing is looked up. So a name that changes its address between two lookups, or has a good and a
bad one at once, gains nothing: only the good ones are connected to.

Names are asked of DNS by c-ares, without threads. The operating system's way takes one for each lookup, of few that all share:
two names whose servers do not answer would keep everybody from being connected to, numeric addresses too, since uvloop
passes those through the same threads.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

import aiodns
import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from penstock.core.addresses import Network, refusal

# What the kernel keeps of an answer that nobody reads on, and most of what comes in at once. Left alone it grows to
# megabytes for each connection, and a flood of interim answers holds the loop twice as long (0.35 s against 0.17).
RECEIVE_BYTES = 16 * 1024
# A server of names is given so long, in seconds, then twice as long each time. (Once c-ares knows how quick one is, it begins with
# five times that instead, at least with this.) It takes no answer to an earlier try: so often, then, for a name whose own
# server takes seconds, and whose answer ours has at hand by the next try; 8 s in all, within a call's usual timeout.
LOOKUP_TRY_S = 0.25
LOOKUP_TRIES = 5


class ForbiddenAddress(OSError):  # noqa: N818 (it says what is there, as all of ours do)
    """A socket was asked for an address that must not be connected to.

    An OSError, since aiohttp goes on to a name's other addresses only after one; and all have the same text, since
    only then does one of many come through as it is.

    Attributes:
        kind: the class of the address.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(errno.EACCES, "the address is forbidden")
        self.kind = kind


class BadHostName(ValueError):  # noqa: N818 (as the one above)
    """What stands for a host in a URL can be no name, whatever DNS knows: `a..b`, or a label of seventy letters."""


class _Resolver(aiohttp.AsyncResolver):
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        try:
            return await super().resolve(host, port, family)
        except OSError as error:
            cause = error.__cause__
            if isinstance(cause, aiodns.error.DNSError) and cause.args[0] == aiodns.error.ARES_EBADNAME:
                raise BadHostName(host) from error
            raise


class _Connector(aiohttp.TCPConnector):
    # aiohttp's own set has tcp, ws and the empty scheme, and sends HTTP to them all.
    allowed_protocol_schema_set = frozenset({"http", "https"})


def make_resolver(nameservers: Sequence[str] | None = None) -> AbstractResolver:
    """Looks names up, any number at a time; to be closed.

    Args:
        nameservers: each an address, or an address and a port; left out, those of /etc/resolv.conf.
    """
    return _Resolver(nameservers=nameservers, timeout=LOOKUP_TRY_S, tries=LOOKUP_TRIES)


def make_connector(
    allowed: Sequence[Network], limit: int, resolver: AbstractResolver
) -> aiohttp.TCPConnector:
    """A connector to what is public or allowed.

    Args:
        allowed: networks that may be called though they are not public.
        limit: most connections at once.
        resolver: of names; the caller's to close.
    """

    def make_socket(info: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _name, address = info
        forbidden = refusal(address[0], allowed)
        if forbidden is not None:
            raise ForbiddenAddress(forbidden)
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        return made

    return _Connector(
        resolver=resolver,
        socket_factory=make_socket,
        # The lanes bound what is under way, for each target and in all: here nothing must queue unseen.
        limit=limit,
        limit_per_host=0,
        keepalive_timeout=15,
    )
