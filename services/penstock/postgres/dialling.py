"""Connecting to one of several servers of a URL, each with a time limit of its own.

The driver has one limit for all of them together: a first server that is cut off, and so says nothing at all, would use it up,
and the next would never be asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg

# Of one server, after which the next is asked; all else is as wrong at any.
_NEXT = (OSError, TimeoutError, asyncpg.CannotConnectNowError, asyncpg.TargetServerAttributeNotMatched)
# `target_session_attrs` that make each server right or wrong by itself, and for good when it is right.
_OF_PRIMARIES = ("read-write", "primary")


def servers_of(dsn: str) -> Sequence[str]:
    """The connection URL once for each server that it names before its path; itself alone where the driver is to choose."""
    try:
        parts = urlsplit(dsn)
    except ValueError:
        # The driver says better what is wrong with it.
        return (dsn,)
    user, at, named = parts.netloc.rpartition("@")
    hosts = [one for one in named.split(",") if one]
    if len(hosts) < 2 or _wanted(dsn) == "prefer-standby":
        return (dsn,)
    return [parts._replace(netloc=f"{user}{at}{host}").geturl() for host in hosts]


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
