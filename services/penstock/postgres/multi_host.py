"""Connects to one of several servers of a URL, each with a time limit of its own.

The driver has one limit for all of them together. A first server that does not answer would use it
up, and the next would never be tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qs, parse_qsl, urlencode

import asyncpg

from penstock.core.connection_url import split_url

# Errors of one server, after which the next is tried. Any other error would be the same at every
# server.
_NEXT = (OSError, TimeoutError, asyncpg.CannotConnectNowError, asyncpg.TargetServerAttributeNotMatched)
# Values of `target_session_attrs` by which a server that was accepted is accepted again.
_OF_PRIMARIES = ("read-write", "primary")


def servers_of(dsn: str) -> Sequence[str]:
    """A connection URL for each server of the URL, in the order in which they are tried.

    With `prefer-standby` each is there twice: all as standbys, then all in any role.
    """
    try:
        parts = split_url(dsn)
        user, at, named = parts.netloc.rpartition("@")
        hosts = [host for host in named.split(",") if host]
        # As the driver does: hosts before the path override those of the query.
        each = [parts._replace(netloc=f"{user}{at}{host}") for host in hosts] if hosts else _of_query(parts)
        if len(each) > 1 and _wanted(dsn) == "prefer-standby":
            each = [
                _with(server, target_session_attrs=kind) for kind in ("standby", "any") for server in each
            ]
    except ValueError:
        # The driver describes the fault better.
        return (dsn,)
    if len(each) < 2:
        return (dsn,)
    return [server.geturl() for server in each]


def _of_query(parts: SplitResult) -> list[SplitResult]:
    """A URL for each host of `?host=`, with its port; none if hosts and ports don't match.

    Raises:
        ValueError: it is no query.
    """
    query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    hosts = query.get("host", "").split(",")
    if "port" not in query:
        return [_with(parts, host=host) for host in hosts if host]
    ports = query["port"].split(",")
    if len(ports) == 1:
        ports *= len(hosts)
    if len(ports) != len(hosts):
        return []
    return [_with(parts, host=host, port=port) for host, port in zip(hosts, ports, strict=True) if host]


def _with(parts: SplitResult, **changed: str) -> SplitResult:
    return parts._replace(query=urlencode({**dict(parse_qsl(parts.query, strict_parsing=True)), **changed}))


def _wanted(dsn: str) -> str:
    return parse_qs(split_url(dsn).query).get("target_session_attrs", ["any"])[-1]


class MultiHostConnector:
    """Connects to the servers of a URL in turn.

    Args:
        dsn: connection URL.
    """

    def __init__(self, dsn: str) -> None:
        self._servers = servers_of(dsn)
        # A server that was a primary is tried first: an unreachable one before it would cost each
        # connection its limit. A server that may be a standby is not preferred.
        self._sticks = len(self._servers) > 1 and _wanted(dsn) in _OF_PRIMARIES
        self._last = 0

    async def connect(self, dsn: str | None = None, **options: Any) -> asyncpg.Connection[asyncpg.Record]:
        """A connection to the first server that accepts it.

        Args:
            dsn: passed by a pool, and the same as that of this object.
            options: of the driver; `timeout` is for each server.

        Raises:
            OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError: the error of the
            last server, or the first one
                that would be the same at every server.
        """
        del dsn
        count = len(self._servers)
        for number in range(count):
            index = (self._last + number) % count
            try:
                connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(
                    self._servers[index], **options
                )
            except _NEXT:
                if number == count - 1:
                    raise
                continue
            if self._sticks:
                self._last = index
            return connection
        raise AssertionError("a URL names a server")
