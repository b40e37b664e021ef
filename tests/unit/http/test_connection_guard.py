"""What the guard counts; the test plays the connections."""

from __future__ import annotations

import pytest

from penstock.errors import Throttled
from penstock.http.connection_guard import ConnectionGuard, ConnectionLimits
from penstock.http.problems import Problem

LIMITS = ConnectionLimits(connections=10, by_address=10, body_bytes=1_000)


class Connection:
    """A connection whose body is being read."""

    serves = False
    reads_body = True

    def __init__(self, guard: ConnectionGuard) -> None:
        self.address = "192.0.2.1"
        self.buffered_bytes = 0
        self.ended: list[str] = []
        self._guard = guard
        assert guard.admit(self) is None

    def end(self, reason: str, _problem: Problem | None) -> None:
        self.ended.append(reason)
        self._guard.remove(self)

    def end_if_overdue(self, _now_s: float, _elapsed_s: float) -> None:
        """Its client is quick."""


def test_a_body_that_gave_way_leaves_no_bytes() -> None:
    """O1: the handler of a body that gave way may still read a part that was there. Its bytes are
    forgotten when its connection is lost, or bodies would be refused for ever."""
    guard = ConnectionGuard(LIMITS)
    for _ in range(10):
        large, small = Connection(guard), Connection(guard)
        guard.buffer(large, 800)
        guard.buffer(small, 300)
        assert large.ended == ["bodies"]
        guard.buffer(large, 200)
        guard.remove(large)
        guard.remove(small)
    last = Connection(guard)
    guard.buffer(last, 1_000)
    assert last.buffered_bytes == 1_000
    with pytest.raises(Throttled):
        guard.buffer(last, 1)
