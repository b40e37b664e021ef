"""Bounds of the connections of a listener, in all and by address, and of the bytes of their bodies.

At a bound the connection that has waited longest for its client gives way: for a request, or for an
answer to be taken. So slow clients cannot keep others out. Only when each of them waits for the
handler, a new one is refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

from penstock.errors import Throttled
from penstock.http.problems import Problem
from penstock.http.server import RETRY_AFTER_S, status_problem

if TYPE_CHECKING:
    from penstock.http.connections import Connection


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits of one listener.

    Attributes:
        connections: most connections at once.
        by_address: most of them from one address.
        body_bytes: most bytes of bodies in memory.
        head_s: seconds for the head of a request, from the connection or its first byte on.
        body_s: seconds for a body, and one more for each `rate` bytes that have come.
        rate: bytes a second of bodies and answers.
        idle_s: seconds between two requests. Longer than the 60 s after which balancers and
            proxies give up a connection, because theirs would otherwise meet a closed one.
        write_s: seconds in which a client must take a part of an answer. An answer waits for its
            client that long in all, and one second more for each `rate` bytes that were taken.
    """

    connections: int
    by_address: int
    body_bytes: int
    head_s: float = 10.0
    body_s: float = 20.0
    rate: float = 16 * 1024
    idle_s: float = 65.0
    write_s: float = 30.0


# For the few clients of probes and metrics. One of them leaves room for the probe of a supervisor.
FEW = ConnectionLimits(connections=100, by_address=50, body_bytes=1_000_000)


# Why a connection is refused, and why the server ends one, as metrics have them.
BOUNDS = ("address", "all")
END_REASONS = ("head", "body", "idle", "write", "bound", "bodies")


@dataclass
class ConnectionCounts:
    """The connections of a process's listeners, for its metrics.

    Attributes:
        open: that are open now.
        refused: by bound, one of `BOUNDS`.
        ended: by the server, by reason, one of `END_REASONS`: the client was too slow, or its
            connection gave way at a bound.
    """

    open: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)


class ConnectionGuard:
    """The connections of one listener.

    Args:
        limits: the limits.
        counts: counts them; None counts nothing.
    """

    def __init__(self, limits: ConnectionLimits, counts: ConnectionCounts | None = None) -> None:
        self.limits = limits
        self.counts = counts or ConnectionCounts()
        self._open: set[Connection] = set()
        self._by_address: Counter[str] = Counter()
        # The connections that wait for their clients, by the time since when; and the same by
        # address. Those with a body may have read it meanwhile.
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._waiting_by_address: dict[str, OrderedDict[Connection, None]] = {}
        self._buffered_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to end overdue connections."""
        limits = self.limits
        every_s = min(1.0, min(limits.head_s, limits.body_s, limits.idle_s, limits.write_s) / 4)
        self._timer = asyncio.get_running_loop().call_later(every_s, self.start)
        now_s = asyncio.get_running_loop().time()
        for connection in list(self._open):
            connection.end_if_overdue(now_s, every_s)

    def stop(self) -> None:
        """Ends no further connections."""
        if self._timer is not None:
            self._timer.cancel()

    def admit(self, connection: Connection) -> Problem | None:
        """Counts a new connection, or returns why it is refused."""
        limits, address = self.limits, connection.address
        if self._by_address[address] >= limits.by_address:
            victim = self._longest_waiting(self._waiting_by_address.get(address))
            if victim is None:
                self.counts.refused["address"] += 1
                detail = f"This address has {limits.by_address:,} requests under way"
                return status_problem(HTTPStatus.TOO_MANY_REQUESTS, detail, "")
            victim.end("bound", None)
        if len(self._open) >= limits.connections:
            victim = self._longest_waiting(self._waiting)
            if victim is None:
                self.counts.refused["all"] += 1
                detail = f"The server has {limits.connections:,} requests under way"
                return status_problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, "")
            victim.end("bound", None)
        self._open.add(connection)
        self.counts.open += 1
        self._by_address[address] += 1
        self.wait(connection)
        return None

    def wait(self, connection: Connection) -> None:
        """Notes that a connection waits for its client."""
        self.serve(connection)
        if connection in self._open:
            self._waiting[connection] = None
            self._waiting_by_address.setdefault(connection.address, OrderedDict())[connection] = None

    def serve(self, connection: Connection) -> None:
        """Notes that a connection waits for the handler."""
        self._waiting.pop(connection, None)
        of_address = self._waiting_by_address.get(connection.address)
        if of_address is not None:
            of_address.pop(connection, None)
            if not of_address:
                del self._waiting_by_address[connection.address]

    def remove(self, connection: Connection) -> None:
        """Forgets a connection that ends."""
        if connection in self._open:
            self._open.remove(connection)
            self.counts.open -= 1
            self.serve(connection)
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]
        # Also of one that was removed before: its handler may have read a part that was there.
        self.release(connection)

    def buffer(self, connection: Connection, size_bytes: int) -> None:
        """Counts bytes of a body. Beyond the limit, the largest body that is being read gives way.

        Raises:
            Throttled: the largest is this one.
        """
        connection.buffered_bytes += size_bytes
        self._buffered_bytes += size_bytes
        while self._buffered_bytes > self.limits.body_bytes:
            largest = max(
                (other for other in self._open if other is connection or other.reads_body),
                key=lambda other: other.buffered_bytes,
                default=connection,
            )
            self.release(largest)
            reason = f"requests with {self.limits.body_bytes:,} bytes of bodies are under way"
            if largest is connection:
                raise Throttled(reason, retry_after_s=RETRY_AFTER_S)
            largest.end("bodies", status_problem(HTTPStatus.TOO_MANY_REQUESTS, reason, ""))

    def release(self, connection: Connection) -> None:
        """Forgets the bytes of a body."""
        self._buffered_bytes -= connection.buffered_bytes
        connection.buffered_bytes = 0

    def _longest_waiting(self, waiting: OrderedDict[Connection, None] | None) -> Connection | None:
        while waiting:
            connection = next(iter(waiting))
            if not connection.serves:
                return connection
            self.serve(connection)
        return None
