"""Connecting to one of several servers of a URL, each with a time limit of its own.

The driver has one limit for all of them together: a first server that is cut off, and so says nothing at all, would use it up,
and the next would never be asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qs, parse_qsl, urlencode, urlsplit

import asyncpg

# Of one server, after which the next is asked; all else is as wrong at any.
_NEXT = (OSError, TimeoutError, asyncpg.CannotConnectNowError, asyncpg.TargetServerAttributeNotMatched)
# `target_session_attrs` that make each server right or wrong by itself, and for good when it is right.
_OF_PRIMARIES = ("read-write", "primary")


def servers_of(dsn: str) -> Sequence[str]:
    """The connection URL once for each server that it names, in the order in which they are to be asked.

    With `prefer-standby` each is there twice: all as standbys, then all whatever they are.
    """
    try:
        parts = urlsplit(dsn)
        user, at, named = parts.netloc.rpartition("@")
        hosts = [one for one in named.split(",") if one]
        # As the driver does: hosts before the path leave those of the query without a meaning.
        each = [parts._replace(netloc=f"{user}{at}{host}") for host in hosts] if hosts else _of_query(parts)
        if len(each) > 1 and _wanted(dsn) == "prefer-standby":
            each = [_with(one, target_session_attrs=kind) for kind in ("standby", "any") for one in each]
    except ValueError:
        # The driver says better what is wrong with it.
        return (dsn,)
    if len(each) < 2:
        return (dsn,)
    return [one.geturl() for one in each]


def _of_query(parts: SplitResult) -> list[SplitResult]:
    """A URL for each host of `?host=`, with its port; none if there is no host, or not one port for all or for each.

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
    return parse_qs(urlsplit(dsn).query).get("target_session_attrs", ["any"])[-1]


class Dialler:
    """Connects to the servers of a URL in turn.

    Args:
        dsn: connection URL.
    """

    def __init__(self, dsn: str) -> None:
        self._servers = servers_of(dsn)
        # Whoever has to be a primary and was is asked first: a silent one would cost each new connection its limit. One that
        # only answers may be a standby, and is not to be stuck to.
        self._sticks = len(self._servers) > 1 and _wanted(dsn) in _OF_PRIMARIES
        self._last = 0

    async def connect(self, dsn: str | None = None, **options: Any) -> asyncpg.Connection[asyncpg.Record]:
        """A connection to the first server that takes us.

        Args:
            dsn: as a pool gives it; it is that of this object.
            options: of the driver; `timeout` is for each server.

        Raises:
            OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError: what the last server said, or the one at which
                something was wrong that is so at any.
        """
        del dsn
        count = len(self._servers)
        for number in range(count):
            index = (self._last + number) % count
            try:
                found: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(
                    self._servers[index], **options
                )
            except _NEXT:
                if number == count - 1:
                    raise
                continue
            if self._sticks:
                self._last = index
            return found
        raise AssertionError("a URL names a server")
