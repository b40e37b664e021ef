"""Finds callbacks for operators, and replays those that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg

from penstock.core.target import TargetId
from penstock.postgres.queries import fetch

# Rows that one statement replays, so that a failed batch is small and its locks are short.
BATCH_SIZE = 1_000
# Bounds of the cost of a request: pending callbacks that are searched for those of one target, and
# held callbacks that are counted per target.
PENDING_SEARCHED = 20_000
HELD_COUNTED = 10_000


class Cursor(NamedTuple):
    """Position of a callback in the order of `find`; the default is before the first page.

    Attributes:
        target: URL of its target, in any namespace.
        seq: number in the order of creation.
    """

    target: str = ""
    seq: int = 0


class FoundCallback(NamedTuple):
    """A callback with its position."""

    id: str
    position: Cursor
    namespace: str

    @property
    def target(self) -> TargetId:
        """Its target."""
        return TargetId(self.namespace, self.position.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackFilter:
    """Selects callbacks; all given conditions must match.

    Attributes:
        ids: only these.
        task_id: only of this task.
        target: only to this URL.
        state: only in this state; None (any) and delivered need `ids` or `task_id`.
        since, until: only those that ended (or, unfinished, were created) from `since` on and
            before `until`.
        namespaces: only these, without duplicates; None for all.
    """

    ids: Sequence[str] | None = None
    task_id: int | None = None
    target: str | None = None
    state: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    namespaces: Sequence[str] | None = None


async def find(executor: Any, wanted: CallbackFilter, *, after: Cursor, limit: int) -> list[FoundCallback]:
    """The first `limit` callbacks after a position, in the order of target URL and creation.

    Raises:
        PostgresUnavailable: no server.
    """
    page: dict[str, Any] = {"since": wanted.since, "until": wanted.until, "limit": limit}
    namespaces = None if wanted.namespaces is None else list(wanted.namespaces)
    if wanted.ids is not None:
        name = "find_ids"
        page |= {"ids": list(wanted.ids), "state": wanted.state, "namespaces": namespaces}
    elif wanted.task_id is not None:
        name = "find_of_task"
        page |= {"task_id": wanted.task_id, "after_seq": after.seq, "namespaces": namespaces}
        page |= {"state": wanted.state, "target": wanted.target}
    elif wanted.state == "pending":
        name = "find_pending"
        page |= {"after_target": after.target, "after_seq": after.seq, "namespaces": namespaces}
        page |= {"target": wanted.target, "examined": PENDING_SEARCHED}
    else:
        name = f"find_{wanted.state}"
        page["after_seq"] = after.seq
        if wanted.target is None:
            page["after_target"] = after.target
        else:
            name, page["target"] = f"{name}_of_target", wanted.target
        if namespaces is not None:
            name, page["namespaces"] = f"{name}_within", namespaces
    rows = await fetch(executor, f"replay.{name}", **page)
    found = [FoundCallback(row["id"], Cursor(row["target"], row["seq"]), row["namespace"]) for row in rows]
    if wanted.ids is not None and wanted.target is not None:
        return [callback for callback in found if callback.position.target == wanted.target]
    return found


async def read(executor: Any, ids: Sequence[str]) -> list[asyncpg.Record]:
    """The rows of callbacks in the order of `find`, without body and headers (secrets).

    Raises:
        PostgresUnavailable: no server.
    """
    return await fetch(executor, "replay.read", list(ids))


async def replay(
    executor: Any, found: Sequence[FoundCallback], due_in_s: Sequence[float], *, state: str
) -> list[asyncpg.Record]:
    """Replays finished callbacks; those that are not in `state` any more stay as they are.

    Args:
        executor: a pool or a connection.
        found: at most `BATCH_SIZE` callbacks.
        due_in_s: seconds until each is due.
        state: in which they were found: dead or delivered.

    Returns:
        Id, namespace, target and new state of each replayed callback: pending, or held if its
        target is disabled.

    Raises:
        PostgresUnavailable: perhaps nothing was written; replayed callbacks are not in `state` any
            more.
    """
    return await fetch(
        executor,
        "replay.replay",
        id=[callback.id for callback in found],
        due_in=list(due_in_s),
        state=state,
        namespace=[callback.namespace for callback in found],
        target=[callback.position.target for callback in found],
    )
