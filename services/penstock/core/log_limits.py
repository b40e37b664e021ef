"""The bounds of one run's log; a mark counts what each of them dropped. Pure; time is an argument.

A run keeps its first 8 MiB and its last 2 MiB. The last ones wait in memory until the attempt ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from penstock.core.log_chunk import PLATFORM_SOURCE, RawLine
from penstock.core.token_bucket import TokenBucket

# Bytes of a line in UTF-8.
LINE_BYTES = 16 * 1024
# Characters of a text without a line feed that wait for its end; the rest is dropped.
PARTIAL_CHARS = 64 * 1024
HEAD_BYTES = 8 * 1024 * 1024
TAIL_BYTES = 2 * 1024 * 1024
# Lines a second; a burst may have those of ten seconds.
LINES_PER_S = 1_000
BURST_S = 10.0
# Lines that are taken from the rate at once: asking for each line takes as long as keeping it.
ALLOWED_AT_ONCE = 50
# What a line takes in memory and in a record besides its text.
LINE_OVERHEAD = 40
# The latest moment that Python and the API can show: the end of the year 9999.
LATEST_MS = 253_402_300_799_000

_WARNING = 30
_CUT = "… [at least {:,} more bytes are not kept: a line has at most 16 KiB]"

_REASONS = {
    "rate": f"a run keeps at most {LINES_PER_S:,} lines a second",
    "size": "a run keeps its first 8 MiB and its last 2 MiB",
    "buffer": "the worker's buffer was full",
}
DROP_REASONS = tuple(_REASONS)


@dataclass(slots=True)
class Dropped:
    """Lines that were dropped at one place.

    Attributes:
        lines: how many.
        size_bytes: of their texts.
    """

    lines: int = 0
    size_bytes: int = 0


def cut(text: str) -> str:
    """A line within its bound; the end of a longer one is replaced by a mark."""
    # A character has at most four bytes, and six where a lone surrogate is escaped later. So most
    # lines need no encoding.
    if len(text) * 6 <= LINE_BYTES:
        return text
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= LINE_BYTES:
        return text
    kept = data[: LINE_BYTES - 80].decode("utf-8", "ignore")
    return kept + _CUT.format(len(data) - len(kept.encode()))


def split_lines(text: str) -> tuple[list[str], str]:
    """The lines of a stream's text, and the text behind its last line feed.

    A carriage return begins a line again, as on a terminal. Of a long rest only the beginning is
    kept: a line keeps less, and a part of its own could begin within a secret.
    """
    *lines, rest = text.split("\n")
    if "\r" in rest:
        # A progress bar is the text behind the last one but a trailing one.
        rest = rest[max(rest.rfind("\r", 0, len(rest) - 1), 0) :]
    if len(rest) > PARTIAL_CHARS:
        rest = rest[:PARTIAL_CHARS] + ("\r" if rest[-1] == "\r" else "")
    return [shown(line) for line in lines], rest


def shown(line: str) -> str:
    """A line with carriage returns as a terminal shows it."""
    return line.rstrip("\r").rpartition("\r")[2]


def mark(at_ms: int, reason: str, dropped: Dropped) -> RawLine:
    """The line that stands for dropped lines.

    Args:
        at_ms: milliseconds since 1970.
        reason: `rate`, `size` or `buffer`.
        dropped: how many lines and bytes.
    """
    text = f"{dropped.lines:,} lines ({dropped.size_bytes:,} bytes) are not kept: {_REASONS[reason]}"
    fields: dict[str, Any] = {
        "dropped_lines": dropped.lines,
        "dropped_bytes": dropped.size_bytes,
        "reason": reason,
    }
    return (at_ms, _WARNING, PLATFORM_SOURCE, text, fields)


def dropped_by(line: RawLine) -> Dropped | None:
    """What a mark stands for; None for all other lines, also for those that look like a mark.

    A handler may log with any fields, by a logger of any name.
    """
    if line[2] != PLATFORM_SOURCE or len(line) < 5 or line[4].get("reason") not in DROP_REASONS:
        return None
    found = line[4].get("dropped_lines"), line[4].get("dropped_bytes")
    lines, size_bytes = (each if isinstance(each, int) else -1 for each in found)
    return Dropped(lines, size_bytes) if lines >= 0 and size_bytes >= 0 else None


class RunBuffer:
    """The lines of a run that are not in a chunk yet.

    Args:
        now_s: seconds on any clock that does not step.

    Attributes:
        size_bytes: of all lines that wait, with those kept for the end.
        ready_bytes: of the lines that can be taken now.
    """

    __slots__ = (
        "_allowed",
        "_bucket",
        "_dropped",
        "_head_left",
        "_next",
        "_pending",
        "_tail",
        "_tail_dropped",
        "ready_bytes",
        "size_bytes",
        "tail_limit",
    )

    def __init__(self, now_s: float) -> None:
        self._allowed = 0
        self._bucket = TokenBucket(LINES_PER_S, now_s, capacity_s=BURST_S, full=True)
        self._pending: deque[tuple[int, RawLine]] = deque()
        # Lines beyond the rate since the last one that was kept.
        self._dropped = Dropped()
        self._head_left = HEAD_BYTES
        self._next = 0
        self._tail: deque[tuple[int, RawLine]] | None = None
        self._tail_dropped = Dropped()
        self.tail_limit = TAIL_BYTES
        self.ready_bytes = 0
        self.size_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._pending or self._dropped.lines)

    def add(self, now_s: float, line: RawLine) -> None:
        """Adds a line, or counts it as dropped.

        Args:
            now_s: seconds on the clock of the constructor.
            line: with a text that was `cut`.
        """
        size = len(line[3]) + LINE_OVERHEAD
        if not self._allowed:
            self._allowed = min(self._bucket.available(now_s), ALLOWED_AT_ONCE)
            self._bucket.take(self._allowed)
            if not self._allowed:
                _count(self._dropped if self._tail is None else self._tail_dropped, line)
                return
        self._allowed -= 1
        if self._tail is None and size > self._head_left:
            self._begin_tail(line[0])
        if self._tail is not None:
            self._add_to_tail(line, size)
            return
        if self._dropped.lines:
            self._mark(line[0])
        self._head_left -= size
        self._put(line, size)

    def take(self, max_bytes: int, now_ms: int) -> tuple[int, list[RawLine]]:
        """Removes lines from the front: the number of the first one, and the lines.

        Args:
            max_bytes: of the lines; at least one is taken.
            now_ms: milliseconds since 1970, for a mark at the end.
        """
        if self._dropped.lines and not self._pending:
            self._mark(now_ms)
        lines: list[RawLine] = []
        taken = 0
        while self._pending and (not lines or taken + self._pending[0][0] <= max_bytes):
            size, line = self._pending.popleft()
            taken += size
            lines.append(line)
        self.ready_bytes -= taken
        self.size_bytes -= taken
        first, self._next = self._next, self._next + len(lines)
        return first, lines

    def end(self, now_ms: int) -> None:
        """Makes the lines that were kept for the end ready."""
        if self._tail is None:
            return
        if self._tail_dropped.lines:
            self._put_mark(now_ms, "size", self._tail_dropped)
        for size, line in self._tail:
            self._pending.append((size, line))
            self.ready_bytes += size
        self._tail = None
        self._tail_dropped = Dropped()
        # Nothing follows the end.
        self._head_left = 0

    def drop_oldest(self, size_bytes: int, now_ms: int) -> int:
        """Drops at least so many bytes, or all, because the worker's buffer is full.

        Returns:
            The bytes that became free.
        """
        before = self.size_bytes
        dropped = Dropped()
        if self._tail is not None:
            self.tail_limit = max(0, min(self.tail_limit, self._tail_bytes() - size_bytes))
            self._shrink_tail()
        while self._pending and before - self.size_bytes < size_bytes:
            size, line = self._pending.popleft()
            self.size_bytes -= size
            self.ready_bytes -= size
            _count(dropped, line)
        if dropped.lines:
            line = mark(now_ms, "buffer", dropped)
            size = len(line[3]) + LINE_OVERHEAD
            self._pending.appendleft((size, line))
            self.size_bytes += size
            self.ready_bytes += size
        return before - self.size_bytes

    def _begin_tail(self, at_ms: int) -> None:
        text = "the log exceeds 8 MiB: of the lines that follow, the last 2 MiB appear when the attempt ends"
        self._put((at_ms, _WARNING, PLATFORM_SOURCE, text), len(text) + LINE_OVERHEAD)
        self._tail = deque()

    def _add_to_tail(self, line: RawLine, size: int) -> None:
        assert self._tail is not None
        self._tail.append((size, line))
        self.size_bytes += size
        self._shrink_tail()

    def _tail_bytes(self) -> int:
        return self.size_bytes - self.ready_bytes

    def _shrink_tail(self) -> None:
        assert self._tail is not None
        while self._tail and self._tail_bytes() > self.tail_limit:
            size, line = self._tail.popleft()
            self.size_bytes -= size
            _count(self._tail_dropped, line)

    def _mark(self, at_ms: int) -> None:
        self._put_mark(at_ms, "rate", self._dropped)
        self._dropped = Dropped()

    def _put_mark(self, at_ms: int, reason: str, dropped: Dropped) -> None:
        line = mark(at_ms, reason, dropped)
        self._put(line, len(line[3]) + LINE_OVERHEAD)

    def _put(self, line: RawLine, size: int) -> None:
        self._pending.append((size, line))
        self.ready_bytes += size
        self.size_bytes += size


def _count(dropped: Dropped, line: RawLine) -> None:
    """Counts a dropped line; a mark counts for what it stands for."""
    if (before := dropped_by(line)) is not None:
        dropped.lines += before.lines
        dropped.size_bytes += before.size_bytes
    else:
        dropped.lines += 1
        dropped.size_bytes += len(line[3])
