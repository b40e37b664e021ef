"""Callbacks as operators see them, and replaying those that have ended: the row is the truth, with headers and all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg

from penstock.core.target import TargetId
from penstock.postgres.connection import translated
from penstock.postgres.queries import query

# Rows that one statement replays: a batch that fails is small, and nobody waits long behind its locks.
AT_A_TIME = 1_000
# Pending callbacks among which those of one target are looked for, and most of one target's that are counted as held:
# what a question may cost.
PENDING_LOOKED_AT = 20_000
HELD_COUNTED = 10_000


class Place(NamedTuple):
    """Where a callback stands in the order in which they are found; the first page begins behind the default.

    Attributes:
        target: the URL of its target; those of one URL stand together, whatever their namespaces.
        seq: in the order of their creation.
    """

    target: str = ""
    seq: int = 0


class Found(NamedTuple):
    """A callback that was found."""

    id: str
    place: Place
    namespace: str

    @property
    def target(self) -> TargetId:
        """To which it is owed."""
        return TargetId(self.namespace, self.place.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """Which callbacks are meant; all that is given must match.

    Attributes:
        ids: these.
        task_id: of this task.
        target: to this URL.
        state: None is any state, which only works with `ids` or `task_id`; delivered likewise.
        since, until: ended (while they have not, created) at or after the one and before the other.
        namespaces: in these, no two of them alike; None is all.
    """

    ids: Sequence[str] | None = None
    task_id: int | None = None
    target: str | None = None
    state: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    namespaces: Sequence[str] | None = None


async def find(executor: Any, which: Which, *, behind: Place, limit: int) -> list[Found]:
    """The first `limit` behind a place, in the order of their targets and then of their creation.

    Raises:
        PostgresUnavailable: no server.
    """
    time = (which.since, which.until)
    namespaces = None if which.namespaces is None else list(which.namespaces)
    if which.ids is not None:
        call: tuple[Any, ...] = ("find_ids", list(which.ids), which.state, *time, limit, namespaces)
    elif which.task_id is not None:
        call = (
            "find_of_task",
            which.task_id,
            behind.seq,
            *time,
            limit,
            which.state,
            which.target,
            namespaces,
        )
    elif which.state == "pending":
        call = ("find_pending", *behind, *time, limit, PENDING_LOOKED_AT, which.target, namespaces)
    else:
        within = () if namespaces is None else (namespaces,)
        name = (
            f"find_{which.state}{'' if which.target is None else '_of_target'}{'_within' if within else ''}"
        )
        place = behind if which.target is None else (which.target, behind.seq)
        call = (name, *place, *time, limit, *within)
    name, *arguments = call
    with translated():
        rows = await executor.fetch(query(f"replay.{name}"), *arguments)
    found = [Found(row["id"], Place(row["target"], row["seq"]), row["namespace"]) for row in rows]
    if which.ids is not None and which.target is not None:
        return [one for one in found if one.place.target == which.target]
    return found


async def read(executor: Any, ids: Sequence[str]) -> list[asyncpg.Record]:
    """The rows of callbacks, in the order in which they are found; without what is secret.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows: list[asyncpg.Record] = await executor.fetch(query("replay.read"), list(ids))
    return rows


async def replay(
    executor: Any, found: Sequence[Found], due_in_s: Sequence[float], *, state: str
) -> list[asyncpg.Record]:
    """Owes callbacks anew that have ended; those that are not in `state` any more are left alone.

    Args:
        executor: a pool or a connection.
        found: at most `AT_A_TIME` of them.
        due_in_s: seconds until each is due.
        state: in which they were found: dead or delivered.

    Returns:
        Id, namespace, target and state of each that was replayed; held is what its target, disabled, waits for.

    Raises:
        PostgresUnavailable: perhaps nothing was written; what was is not in `state` any more.
    """
    with translated():
        rows: list[asyncpg.Record] = await executor.fetch(
            query("replay.replay"),
            [one.id for one in found],
            list(due_in_s),
            state,
            [one.namespace for one in found],
            [one.place.target for one in found],
        )
    return rows
