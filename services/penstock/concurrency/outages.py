"""The attempts of this process that failed because a server is unavailable, and what waits for one.

While the attempts grow in number, a server is away and the process tries again. What waits for the
server has not stalled then, and the end of the process would not help. The metrics page of each
process says for how long it has waited for which server.
"""

from __future__ import annotations

import itertools
import math
import time
from types import TracebackType
from typing import Self

from penstock.errors import (
    GatewayUnavailable,
    KafkaUnavailable,
    ObjectsUnavailable,
    PenstockError,
    PostgresUnavailable,
    SessionLost,
)

_SERVERS: tuple[tuple[type[PenstockError], str], ...] = (
    (PostgresUnavailable, "postgres"),
    (KafkaUnavailable, "kafka"),
    (ObjectsUnavailable, "objects"),
    (GatewayUnavailable, "gateway"),
    (SessionLost, "session"),
)
SERVERS = tuple(name for _kind, name in _SERVERS)

_counter = itertools.count(1)
_failed = 0
# The waits of this process.
_waits: set[Wait] = set()


def server_of(error: PenstockError) -> str | None:
    """The server, of `SERVERS`, that an error is about; None for other errors."""
    return next((name for kind, name in _SERVERS if isinstance(error, kind)), None)


class Wait:
    """Work that may wait for a server: from `begin` until `end`, or until its block ends."""

    def __init__(self) -> None:
        self.server = ""
        self.since_s = 0.0
        self.ends_s = math.inf

    def begin(self, error: PenstockError) -> None:
        """The work failed and is tried again; a wait for the same server goes on."""
        server = server_of(error)
        now_s = time.monotonic()
        if server != self.server or now_s >= self.ends_s:
            _waits.discard(self)
            self.server, self.since_s = server or "", now_s
        self.ends_s = math.inf
        if self.server:
            _waits.add(self)

    def end_after(self, lasting_s: float) -> None:
        """The next attempt, which begins now, is no wait if it lasts for so many seconds."""
        self.ends_s = time.monotonic() + lasting_s

    def end(self) -> None:
        """The work has succeeded or is given up."""
        self.server = ""
        _waits.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()


def waiting_s() -> dict[str, float]:
    """For each of `SERVERS`, how many seconds work has waited for it; 0 while none does."""
    now_s = time.monotonic()
    found = dict.fromkeys(SERVERS, 0.0)
    # A copy: workers wait in two threads.
    for wait in tuple(_waits):
        # Once: another thread may end the wait between two reads.
        server = wait.server
        if server and now_s < wait.ends_s:
            found[server] = max(found[server], now_s - wait.since_s)
    return found


def count_failed_attempt() -> None:
    """Counts an attempt that failed and is repeated; any thread may call this."""
    global _failed  # noqa: PLW0603 (of the process)
    _failed = next(_counter)


def failed_attempts() -> int:
    """The attempts that failed so far."""
    return _failed
