"""Views of task logs: documents of lines and marks, filters and totals. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from penstock.core.log_chunk import PLATFORM_SOURCE, Chunk, Gap, RunId
from penstock.core.log_limits import LATEST_MS, dropped_by

LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
LOST = "worker lost; the last 250 ms may be missing"
UNFINISHED = "the last lines of this attempt did not arrive"

# Characters or bytes of the last lines of a log, which wait until all of them are found.
LAST_LINES_SIZE = 4 * 1024 * 1024

T = TypeVar("T")

_NAMES = {level: name for name, level in LEVELS.items()}


@dataclass(frozen=True, slots=True)
class LineFilter:
    """The lines that a reader wants.

    Attributes:
        first: number of the first line, in each run.
        level: the lowest one.
        text: part of the line's text, in any case; None is any text.
        run: the only run; None is all.
        since_ms: lines of this moment or later, in milliseconds since 1970.
    """

    first: int = 0
    level: int = 0
    text: str | None = None
    run: str | None = None
    since_ms: int = 0

    def wants_run(self, run: str) -> bool:
        """Whether the reader wants lines of a run."""
        return self.run is None or self.run == run


class LastLines(Generic[T]):
    """The last items of a log, bounded also by their size: each may be long.

    Args:
        most: items.
        size_of: the size of an item, in characters or bytes.
    """

    def __init__(self, most: int, size_of: Callable[[T], int]) -> None:
        self._most = most
        self._size_of = size_of
        self._items: deque[T] = deque()
        self._size = 0

    def extend(self, items: Iterable[T]) -> None:
        """Adds items; the first ones go where the bound is passed."""
        for item in items:
            self._items.append(item)
            self._size += self._size_of(item)
            while len(self._items) > self._most or self._size > LAST_LINES_SIZE:
                self._size -= self._size_of(self._items.popleft())

    def taken(self) -> deque[T]:
        """Removes and returns all items."""
        items, self._items, self._size = self._items, deque(), 0
        return items


def level_name(level: int) -> str:
    """The name of a level, or of the standard one below it."""
    return _NAMES.get(level) or _NAMES[max(LEVELS["DEBUG"], min(50, level // 10 * 10))]


def line_documents(chunk: Chunk, wanted: LineFilter) -> Iterator[dict[str, Any]]:
    """The documents of those lines of a chunk that a reader wants."""
    needle = wanted.text.casefold() if wanted.text else None
    for number, line in enumerate(chunk.lines, chunk.first):
        if number < wanted.first or line[1] < wanted.level or line[0] < wanted.since_ms:
            continue
        if needle is not None and needle not in line[3].casefold():
            continue
        document = {
            "run": chunk.run.run,
            "line": number,
            "at": moment(line[0]),
            "level": level_name(line[1]),
            "source": line[2],
            "text": line[3],
        }
        if len(line) > 4:
            document["fields"] = line[4]
        yield document


def gap_document(gap: Gap) -> dict[str, Any]:
    """The document of lines that are missing."""
    lines = gap.following - gap.first
    text = f"{lines:,} lines are missing: from {gap.first:,} to {gap.following - 1:,}"
    return {**mark_document(gap.run.run, text), "line": gap.first, "missing": lines}


def mark_document(run: str | None, text: str) -> dict[str, Any]:
    """The document of a remark of the platform, which is no line of the run.

    Args:
        run: None when the attempt has no run that shipped anything.
        text: the remark.
    """
    return {
        "run": run,
        "line": None,
        "at": None,
        "level": "WARNING",
        "source": PLATFORM_SOURCE,
        "text": text,
    }


def text_of(document: dict[str, Any]) -> str:
    """A document as one line of text."""
    fields = "".join(f" {name}={value!r}" for name, value in document.get("fields", {}).items())
    return f"{document['at'] or '-'} {document['level']:<8} {document['source']} {document['text']}{fields}"


def moment(milliseconds: int) -> str:
    """A moment as RFC 3339 in UTC, with milliseconds."""
    at = datetime.fromtimestamp(min(milliseconds, LATEST_MS) / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(slots=True)
class RunSummary:
    """The totals of a run.

    Attributes:
        run: the run.
        worker: id of its worker.
        first: number of the first line that was counted.
        lines: numbered lines so far, the missing ones included.
        size_bytes: of the texts.
        dropped_lines: that the marks of the worker count.
        first_ms, last_ms: moments of its first and last line, in milliseconds since 1970.
        end: how it ended; None while its end is not known.
    """

    run: RunId
    worker: str
    first: int = 0
    lines: int = 0
    size_bytes: int = 0
    dropped_lines: int = 0
    first_ms: int = 0
    last_ms: int = 0
    end: str | None = None

    def document(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "step": self.run.step,
            "attempt": self.run.attempt,
            "run": self.run.run,
            "worker": self.worker,
            "lines": self.lines,
            "bytes": self.size_bytes,
            "dropped_lines": self.dropped_lines,
            "first_at": moment(self.first_ms) if self.lines else None,
            "last_at": moment(self.last_ms) if self.lines else None,
        }


def summarize(found: dict[RunId, RunSummary], chunk: Chunk) -> None:
    """Adds a chunk to the totals of its run; repeated lines count once."""
    summary = found.setdefault(chunk.run, RunSummary(chunk.run, chunk.worker, chunk.first))
    new = chunk.lines[max(0, summary.lines - chunk.first) :]
    if new and not summary.lines:
        summary.first_ms = new[0][0]
    for line in new:
        summary.size_bytes += len(line[3])
        if (dropped := dropped_by(line)) is not None:
            summary.dropped_lines += dropped.lines
        summary.last_ms = line[0]
    summary.lines = max(summary.lines, chunk.following)
    summary.end = chunk.end or summary.end


def add_summaries(found: dict[RunId, RunSummary], parts: Sequence[RunSummary]) -> bool:
    """Adds the totals of later lines; returns whether that was possible.

    Nothing is added if a part repeats lines that were counted: its chunks must be read.
    """
    if any(part.run in found and part.first < found[part.run].lines for part in parts):
        return False
    for part in parts:
        known = found.get(part.run)
        if known is None:
            found[part.run] = replace(part)
            continue
        if not known.lines:
            known.first_ms = part.first_ms
        known.size_bytes += part.size_bytes
        known.dropped_lines += part.dropped_lines
        known.lines = max(known.lines, part.lines)
        known.last_ms = part.last_ms or known.last_ms
        known.end = part.end or known.end
    return True
