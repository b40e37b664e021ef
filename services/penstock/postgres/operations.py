"""Operations on many tasks: a row of `audit` each, gone on with in batches by whoever is there.

What this module guarantees: a batch of tasks, the place its operation has come to and the number it has changed are one
transaction, and the walk is in the order of ids. So whatever dies, every task that matches when its turn comes is changed
once and counted once; two processes at one operation take turns. No transaction is over more than a batch, and none waits
for a row that another service holds while it holds rows itself, so no operation can be in a deadlock with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg
import orjson

from penstock.contracts.event import Owed
from penstock.contracts.revocation import Revocation
from penstock.core.operations import Verb, batch, reachable
from penstock.core.task import State
from penstock.postgres.advance import cancel_within
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.settings import Platform

# Rows one statement walks over: what a batch may cost when hardly any task matches.
LOOKED_AT = 20_000
# Operations gone on with at a time; the others follow.
AT_ONCE = 100

Row = asyncpg.Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """Which tasks are meant; all that is given must match.

    Attributes:
        ids: these.
        type, stage: of this name.
        key: with this one.
        states: in one of these.
        labels: with all of these.
        priorities: with one of these.
        created_since, created_until: created at or after the one and before the other.
        finished_since, finished_until: likewise, of those that have ended.
        error: a part of the kind or message of its error, in any case of letters.
    """

    ids: Sequence[int] | None = None
    type: str | None = None
    stage: str | None = None
    key: str | None = None
    states: Sequence[State] | None = None
    labels: Mapping[str, str] | None = None
    priorities: Sequence[int] | None = None
    created_since: datetime | None = None
    created_until: datetime | None = None
    finished_since: datetime | None = None
    finished_until: datetime | None = None
    error: str | None = None

    def states_for(self, verb: Verb) -> list[State]:
        """Those in which a verb can change what is meant."""
        return [state for state in State if state in reachable(verb) and state in (self.states or State)]


class Found(NamedTuple):
    """What a look has found.

    Attributes:
        states: of those that match, by id, in the order of ids.
        reached: up to here all that there is was looked at; None when there was nothing.
        ended: there is nothing behind that.
        looked: rows looked at.
    """

    states: dict[int, str]
    reached: int | None
    ended: bool
    looked: int


class Step(NamedTuple):
    """What going on has come to.

    Attributes:
        changed: tasks changed.
        owed: what is to be published.
        wait_s: seconds until it can go on; None when it has ended.
    """

    changed: int
    owed: Owed
    wait_s: float | None


# When another process is at it.
_TAKEN_S = 0.2


async def look(
    executor: Any,
    verb: Verb,
    which: Which,
    *,
    behind: int,
    upto: int,
    limit: int,
    priority: int | None = None,
    ids: Sequence[int] | None = None,
) -> Found:
    """The first `limit` tasks behind an id that match and that a verb would change, among the next `LOOKED_AT`.

    Args:
        executor: a pool or a connection.
        verb: what is to be done.
        which: to which tasks.
        behind: after this id.
        upto: up to this one.
        limit: most to find.
        priority: with reprioritise: the new one.
        ids: only these, besides.

    Raises:
        PostgresUnavailable: no server.
    """
    states = which.states_for(verb)
    among = which.ids if ids is None else ids
    if among is not None:
        walk = "ids"
    elif which.type is not None and set(states) <= {State.FAILED, State.QUARANTINED}:
        walk = "failed"
    else:
        walk = "all"
    with translated():
        [summary, *rows] = await executor.fetch(
            query("operations.look"),
            behind,
            upto,
            LOOKED_AT,
            limit,
            walk,
            list(among) if among is not None else None,
            [state.value for state in states],
            verb.value,
            which.type,
            which.stage,
            orjson.dumps(which.labels).decode() if which.labels else None,
            list(which.priorities) if which.priorities else None,
            which.created_since,
            which.created_until,
            which.finished_since,
            which.finished_until,
            which.error,
            priority,
            which.key,
        )
    found = {row["id"]: row["state"] for row in rows}
    full = len(found) == limit
    return Found(
        found,
        rows[-1]["id"] if full else summary["reached"],
        not full and summary["looked"] < LOOKED_AT,
        summary["looked"],
    )


async def begin(
    executor: Any,
    operation_id: str,
    verb: Verb,
    asked_by: str,
    filter_json: str,
    priority: int | None,
    rate: float | None,
    actor: str | None = None,
    namespaces: Collection[str] | None = None,
) -> Row | None:
    """Writes an operation down; None when there is one of this id. `namespaces` are those the actor is confined to.

    Raises:
        PostgresUnavailable: perhaps nothing was written; the same again is safe.
    """
    with translated():
        row: Row | None = await executor.fetchrow(
            query("operations.begin"),
            operation_id,
            verb.value,
            asked_by,
            filter_json,
            priority,
            rate,
            actor,
            None if namespaces is None else sorted(namespaces),
        )
    return row


async def get(executor: Any, operation_id: str) -> Row | None:
    """One operation; None when there is none of this id.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        row: Row | None = await executor.fetchrow(query("operations.get"), operation_id)
    return row


async def find(
    executor: Any,
    *,
    verb: str | None,
    state: str | None,
    before: int | None,
    limit: int,
    namespaces: Collection[str] | None = None,
) -> list[Row]:
    """Operations, latest first; give the last `seq` of a page as `before` to get the next one.

    Only those confined to some of `namespaces` are found, unless it is None.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows: list[Row] = await executor.fetch(
            query("operations.list"),
            verb,
            state,
            before,
            limit,
            None if namespaces is None else sorted(namespaces),
        )
    return rows


async def running(executor: Any, known: Sequence[str]) -> list[str]:
    """The ids of operations that are to be gone on with, but for some: the first `AT_ONCE`.

    Args:
        executor: what runs the statement.
        known: ids to be left out.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        return [row["id"] for row in await executor.fetch(query("operations.running"), AT_ONCE, known)]


async def stop(executor: Any, operation_id: str, stopped_by: str) -> None:
    """Ends an operation before its time; one that has ended, or is not there, is left alone.

    Raises:
        PostgresUnavailable: perhaps it goes on; the same again is safe.
    """
    with translated():
        await executor.execute(query("operations.stop"), operation_id, stopped_by)


async def go_on(
    pool: asyncpg.Pool[Row], operation_id: str, which: Which, *, source: str = Platform.event_source
) -> Step:
    """Changes the next batch of an operation's tasks, if it is due.

    Args:
        pool: of the database.
        operation_id: of one that was written down.
        which: its filter, read.
        source: of CloudEvents (see `Platform`).

    Raises:
        PostgresUnavailable: perhaps nothing was changed; the same again is safe.
    """
    step = await _batch(pool, operation_id, which, source, alone=False)
    if step is None:
        # The first of them is held by another. To wait for it is safe while no other is held.
        step = await _batch(pool, operation_id, which, source, alone=True)
    assert step is not None
    return step


async def _batch(
    pool: asyncpg.Pool[Row], operation_id: str, which: Which, source: str, *, alone: bool
) -> Step | None:
    """One transaction; None, and nothing done, when the first task is held by another."""
    with translated():
        async with pool.acquire() as connection, connection.transaction():
            row = await connection.fetchrow(query("operations.take"), operation_id)
            if row is None:
                there = await connection.fetchrow(query("operations.get"), operation_id)
                return Step(
                    0, Owed(), _TAKEN_S if there is not None and there["state"] == "running" else None
                )
            if row["wait_s"] > 0:
                return Step(0, Owed(), row["wait_s"])
            verb, upto = Verb(row["verb"]), row["upto"]
            found = await look(
                connection,
                verb,
                which,
                behind=row["behind"],
                upto=upto,
                limit=1 if alone else batch(row["rate"]),
                priority=row["priority"],
            )
            reached, ended = found.reached, found.ended
            free = [*found.states]
            if alone and free:
                await connection.execute(query("operations.lock_one"), *free)
            elif free:
                locked = {one["id"] for one in await connection.fetch(query("operations.lock"), free)}
                held = next((number for number, one in enumerate(free) if one not in locked), None)
                if held == 0:
                    return None
                if held is not None:
                    # It and what is behind it are for the next batch.
                    free, reached, ended = free[:held], free[held - 1], False
            changed: Counter[str] = Counter()
            owed = Owed()
            if free:
                # They may have moved on before they were locked.
                found = await look(
                    connection,
                    verb,
                    which,
                    behind=row["behind"],
                    upto=upto,
                    limit=len(free),
                    priority=row["priority"],
                    ids=free,
                )
                done, owed = await _change(connection, verb, found.states, row["priority"], source)
                changed = Counter(found.states[one] for one in done)
            total = Counter(orjson.loads(row["found_in"])) + changed
            wait_s = await connection.fetchval(
                query("operations.go_on"),
                operation_id,
                reached if reached is not None else upto,
                changed.total(),
                orjson.dumps(total).decode(),
                ended,
            )
    return Step(changed.total(), owed, None if ended else max(0.0, wait_s))


async def _change(
    connection: Any, verb: Verb, states: Mapping[int, str], priority: int | None, source: str
) -> tuple[list[int], Owed]:
    """Does it to tasks that were found in these states; returns those that were changed, and what that owes."""
    ids = [*states]
    if not ids:
        return [], Owed()
    if verb is Verb.CANCEL:
        return await cancel_within(connection, ids, source=source)
    more = [priority] if verb is Verb.REPRIORITISE else []
    rows = await connection.fetch(query(f"operations.{verb.value}"), ids, *more)
    owed = Owed()
    if verb is Verb.PAUSE:
        # Somebody may have begun what is queued: the attempt before this one.
        begun = [
            (row["id"], row["step"], row["attempt"] - 1) for row in rows if states[row["id"]] == State.QUEUED
        ]
        owed.revocation = Revocation("over", begun) if begun else None
    return [row["id"] for row in rows], owed


async def fail(executor: Any, operation_id: str, error: str) -> None:
    """Ends an operation whose next batch can never succeed.

    Raises:
        PostgresUnavailable: perhaps it is still running.
    """
    with translated():
        await executor.execute(query("operations.fail"), operation_id, error)
