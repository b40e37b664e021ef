"""What a task's row tells about its attempts, for readers of their logs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.core.completion import Outcome
from penstock.core.log_view import LOST, UNFINISHED
from penstock.core.task import FINAL
from penstock.errors import NotFound

# Seconds that the last lines of an ended attempt get to arrive.
LAST_LINES_S = 5.0
# Lines of workers whose clock differs, or which came late, are within this time of their attempt.
SKEW = timedelta(hours=1)


def ended_attempt(row: Mapping[str, Any], step: int, attempt: int) -> Mapping[str, Any] | None:
    """The entry of an attempt that has ended; None for others."""
    return next(
        (each for each in row["attempts"] if (each["step"], each["attempt"]) == (step, attempt)), None
    )


def require_attempt(row: Mapping[str, Any], step: int, attempt: int) -> None:
    """Checks that a task has begun an attempt, or begins it next.

    Raises:
        NotFound: it has not.
    """
    if (step, attempt) > (row["step"], row["attempt"]) and ended_attempt(row, step, attempt) is None:
        raise NotFound(f"task {row['id']} has no attempt {attempt} of step {step}")


def state_of(row: Mapping[str, Any], step: int, attempt: int, *, ended: str | None) -> dict[str, Any]:
    """The state of an attempt: waiting, running, ended or lost; with its outcome and stage.

    Args:
        row: of `penstock.postgres.tasks.get`.
        step: of the attempt.
        attempt: its number.
        ended: how its log ended; None when its end was not read.
    """
    found = ended_attempt(row, step, attempt)
    if found is not None:
        lost = found["outcome"] == Outcome.EXPIRED and ended is None
        state = "lost" if lost else "ended"
        return {"state": state, "outcome": found["outcome"], "stage": found["stage"]}
    current = (row["step"], row["attempt"]) == (step, attempt)
    if not current or row["state"] in FINAL or ended is not None:
        return {"state": "ended", "outcome": ended, "stage": row["stage"] if current else None}
    state = "running" if row["state"] in ("queued", "running") else "waiting"
    return {"state": state, "outcome": None, "stage": row["stage"]}


def missing_end(row: Mapping[str, Any], step: int, attempt: int) -> str | None:
    """The mark for a run whose last chunk was not read; None while the chunk may still come.

    Args:
        row: of `penstock.postgres.tasks.get`.
        step: of the attempt.
        attempt: its number.
    """
    state = state_of(row, step, attempt, ended=None)["state"]
    if state == "lost":
        return LOST
    found = ended_attempt(row, step, attempt)
    ended_at = found["finished_at"] if found is not None else row["finished_at"]
    if state != "ended" or ended_at is None:
        return None
    # The worker ships the end of a log beside its result, so it may come a little later.
    late = datetime.now(UTC) - _moment(ended_at) > timedelta(seconds=LAST_LINES_S)
    return UNFINISHED if late else None


def window(
    row: Mapping[str, Any], attempt: tuple[int, int] | None, since_ms: int = 0
) -> tuple[datetime, datetime]:
    """The moments of the lines of a task or an attempt, since a moment in milliseconds."""
    begin, end = _whole_window(row, attempt)
    if since_ms:
        begin = max(begin, datetime.fromtimestamp(since_ms / 1000, UTC) - SKEW)
    return begin, end


def _whole_window(row: Mapping[str, Any], attempt: tuple[int, int] | None) -> tuple[datetime, datetime]:
    now = datetime.now(UTC)
    found = ended_attempt(row, *attempt) if attempt is not None else None
    if found is not None and found["started_at"] is not None and found["finished_at"] is not None:
        return _moment(found["started_at"]) - SKEW, _moment(found["finished_at"]) + SKEW
    ended = row["finished_at"]
    return _moment(row["created_at"]) - SKEW, (_moment(ended) if ended else now) + SKEW


def _moment(value: datetime | str) -> datetime:
    # Attempts in history are JSON.
    return datetime.fromisoformat(value) if isinstance(value, str) else value
