"""Chunks of task logs: consecutive lines of one run. Pure.

A run is one execution of an attempt by one worker. Two workers may legitimately run one attempt, so
the lines are numbered per run, from 0. A repeated chunk is recognised by the numbers of its lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.core.attempt import AttemptId

# The source of lines that the platform adds, such as marks of dropped lines.
PLATFORM_SOURCE = "penstock"

# A line as records and segments have it: milliseconds since 1970, level as in `logging`, source
# (`stdout`, `stderr`, or the name of a logger) and text; then, if there are any, its fields.
RawLine = Sequence[Any]


class RunId(NamedTuple):
    """One execution of an attempt.

    Attributes:
        task_id: of the task.
        step: position in the task's sequence of stages.
        attempt: of this step, counted from 0.
        run: the worker's own id of the execution.
    """

    task_id: int
    step: int
    attempt: int
    run: str

    @property
    def attempt_id(self) -> AttemptId:
        """The attempt that it executes."""
        return AttemptId(self.task_id, self.step, self.attempt)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive lines of one run.

    Attributes:
        run: the run.
        worker: id of the worker process.
        first: number of the first line.
        lines: the lines.
        end: with the last chunk of the run, how it ended; None otherwise.
        token: of the attempt, in the worker that sends the chunk; None without tokens.
    """

    run: RunId
    worker: str
    first: int
    lines: Sequence[RawLine]
    end: str | None = None
    token: str | None = None

    @property
    def following(self) -> int:
        """The number of the line after the last one."""
        return self.first + len(self.lines)


@dataclass(frozen=True, slots=True)
class Gap:
    """Lines of a run that no chunk has.

    Attributes:
        run: the run.
        first: number of the first missing line.
        following: number of the first line after them.
    """

    run: RunId
    first: int
    following: int


class RunCursors:
    """Follows the lines of runs: trims lines that were there before, and notices gaps.

    Args:
        following: the next line of runs that were read before.
    """

    def __init__(self, following: Mapping[RunId, int] | None = None) -> None:
        self._following = dict(following or {})
        self._ended: set[RunId] = set()

    @property
    def following(self) -> Mapping[RunId, int]:
        """The next line of each run."""
        return self._following

    def begin_at(self, run: RunId, line: int) -> None:
        """Expects a run that was not read yet to begin at a line."""
        self._following.setdefault(run, line)

    def ended(self, run: RunId) -> bool:
        """Whether the last chunk of a run was read."""
        return run in self._ended

    def take(self, chunk: Chunk) -> Iterator[Chunk | Gap]:
        """What a chunk adds: nothing if all of it was there; a gap stands before its lines."""
        expected = self._following.get(chunk.run, 0)
        begin, end = chunk.first, chunk.end if chunk.run not in self._ended else None
        if begin > expected:
            yield Gap(chunk.run, expected, begin)
        skipped = max(0, min(expected - begin, len(chunk.lines)))
        lines = chunk.lines[skipped:] if skipped else chunk.lines
        self._following[chunk.run] = max(expected, chunk.following)
        if end is not None:
            self._ended.add(chunk.run)
        if lines or end is not None:
            first = begin + skipped if lines else self._following[chunk.run]
            yield dataclasses.replace(chunk, first=first, lines=lines, end=end)


def merged(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks in their order, with consecutive ones of a run joined."""
    joined: list[Chunk] = []
    for chunk in chunks:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.run == chunk.run
            and last.worker == chunk.worker
            and last.following == chunk.first
            and last.end is None
        ):
            joined[-1] = dataclasses.replace(last, lines=[*last.lines, *chunk.lines], end=chunk.end)
        else:
            joined.append(chunk)
    return joined


def without_repetitions(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks without lines that were in an earlier one of them.

    The first chunk of a run may begin at any line: those before it are in an earlier segment.
    """
    cursors = RunCursors({chunk.run: chunk.first for chunk in reversed(chunks)})
    found = (each for chunk in chunks for each in cursors.take(chunk))
    return [each for each in found if isinstance(each, Chunk)]
