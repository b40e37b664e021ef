"""Callback targets as PostgreSQL knows them: their health as it was kept last, and what operators have said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from penstock.core.health import Vitals
from penstock.core.target import TargetId
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.postgres.replay import HELD_COUNTED, PENDING_LOOKED_AT
from penstock.postgres.session import Session

# Notified with a target, as `notified` reads it, when an operator, or an answer, has changed it.
CHANNEL = "penstock_targets"

# Behind every URL: those begin with the letter of a scheme.
_BEHIND_ALL = "\x7f"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A target as it was kept.

    Attributes:
        target: which.
        disabled: nothing is to be sent to it.
        vitals: its health.
        failures: quick failures on end.
        rate: most calls a second; None is the service's setting.
        attempts: the last few, the latest last, as they are shown.
    """

    target: TargetId
    disabled: bool = False
    vitals: Vitals
    failures: int = 0
    rate: float | None = None
    attempts: Sequence[dict[str, Any]] = ()


def columns(targets: Iterable[TargetId]) -> tuple[list[str], list[str]]:
    """Namespaces and URLs, as statements take several targets."""
    targets = list(targets)
    return [target.namespace for target in targets], [target.url for target in targets]


def target_in(row: asyncpg.Record) -> TargetId:
    """The one of a row with `namespace` and `url`."""
    return TargetId(row["namespace"], row["url"])


def notified(payload: str) -> TargetId | None:
    """The target that a notification names; None when it comes from code that knew no namespaces, which tells of each besides."""
    namespace, blank, url = payload.partition(" ")
    return TargetId(namespace, url) if blank else None


async def own(pool: asyncpg.Pool[asyncpg.Record], targets: Sequence[TargetId], owner: str) -> list[Kept]:
    """Takes targets over; from now on only this owner's snapshots are kept.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows = await pool.fetch(query("targets.own"), *columns(targets), owner)
    return [
        Kept(
            target=target_in(row),
            disabled=row["state"] == "disabled",
            vitals=Vitals(
                row["count"], row["slow_at_s"], row["called_at_s"], abnormal=row["state"] == "abnormal"
            ),
            failures=row["failures"],
            rate=row["rate"],
            attempts=orjson.loads(row["attempts"]),
        )
        for row in rows
    ]


async def keep(pool: asyncpg.Pool[asyncpg.Record], targets: Sequence[Kept], owner: str) -> set[TargetId]:
    """Writes snapshots; returns the targets that were still this owner's.

    Raises:
        PostgresUnavailable: perhaps nothing was written; write it again.
    """
    with translated():
        rows = await pool.fetch(
            query("targets.keep"),
            owner,
            *columns(t.target for t in targets),
            [t.vitals.abnormal for t in targets],
            [t.vitals.count for t in targets],
            [t.vitals.slow_at_s for t in targets],
            [t.vitals.called_at_s for t in targets],
            [t.failures for t in targets],
            [orjson.dumps(list(t.attempts)).decode() for t in targets],
        )
    return {target_in(row) for row in rows}


async def troubled(pool: asyncpg.Pool[asyncpg.Record]) -> list[TargetId]:
    """Targets that are not normal, or for which something is held.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        return [target_in(row) for row in await pool.fetch(query("targets.troubled"))]


async def get(executor: Any, url: str, namespaces: Sequence[str] | None = None) -> list[asyncpg.Record]:
    """The rows of an address, one of each namespace that has called it or said anything of it, of some or (None) of all.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows: list[asyncpg.Record] = await executor.fetch(query("targets.get"), url, namespaces)
    return rows


async def find(
    executor: Any,
    *,
    state: str | None,
    prefix: str | None,
    after: TargetId | None,
    limit: int,
    namespaces: Sequence[str] | None = None,
) -> list[asyncpg.Record]:
    """Rows of targets in the order of their URLs and then their namespaces; give the last one of a page as `after` to get the next.

    Args:
        executor: a pool or a connection.
        state: normal, abnormal or disabled; None is any.
        prefix: with which their URLs begin.
        after: the last one of the page before.
        limit: of the page.
        namespaces: theirs, no two of them alike; None is all.

    Raises:
        PostgresUnavailable: no server.
    """
    well = state in (None, "normal")
    if namespaces is None:
        name, within = "targets.find" if well else "targets.find_troubled", []
    else:
        name, within = "targets.find_within" if well else "targets.find_troubled_within", [list(namespaces)]
    behind = after or TargetId("", "")
    bounds = (prefix or "", _behind_all(prefix) if prefix else _BEHIND_ALL)
    with translated():
        rows: list[asyncpg.Record] = await executor.fetch(
            query(name), *behind, *bounds, limit, state, *within
        )
    return rows


def _behind_all(prefix: str) -> str:
    """What comes behind all that begins with a prefix, and before all else, by code point."""
    # Behind the last of all characters there is none.
    shorter = prefix.rstrip("\U0010ffff")
    if not shorter:
        return _BEHIND_ALL
    last = ord(shorter[-1]) + 1
    # No text has the surrogates between.
    return shorter[:-1] + chr(0xE000 if 0xD800 <= last <= 0xDFFF else last)


async def forget(
    session: Session, behind: TargetId | None, *, most: int, quiet_s: float
) -> tuple[int, TargetId | None]:
    """Removes, among the next `most`, targets that are normal, charged with nothing, not limited, and quiet.

    Args:
        session: that of the one process which does this.
        behind: the last one looked at before; None to begin.
        most: at how many to look.
        quiet_s: seconds for which nobody has called or changed them.

    Returns:
        How many were removed, and the last one looked at; None at the end.

    Raises:
        SessionLost: the right to do this may be another's.
        PostgresUnavailable: the server refused for now.
    """
    [row] = await session.fetch("targets.forget", *(behind or TargetId("", "")), most, quiet_s)
    return row["forgotten"], None if row["url"] is None else target_in(row)


async def backlog(executor: Any, targets: Sequence[TargetId]) -> dict[TargetId, dict[str, Any]]:
    """How many callbacks are owed to targets: normal and diverted (pending), held, and whether these are all.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows = await executor.fetch(
            query("targets.backlog"), *columns(targets), PENDING_LOOKED_AT, HELD_COUNTED
        )
    return {
        target_in(row): {name: row[name] for name in ("normal", "diverted", "held", "complete")}
        for row in rows
    }


async def disabled(executor: Any, targets: Sequence[TargetId]) -> set[TargetId]:
    """Which of these are disabled.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        return {target_in(row) for row in await executor.fetch(query("targets.disabled"), *columns(targets))}


async def disable(executor: Any, target: TargetId, why: str, *, answered: bool = False) -> bool:
    """Nothing more is sent to it until it is enabled; False when it was disabled already.

    Args:
        executor: a pool or a connection.
        target: which.
        why: to be shown.
        answered: it has asked for that itself, answering a call.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    with translated():
        return bool(await executor.fetch(query("targets.disable"), *target, why, answered))


async def enable(executor: Any, target: TargetId) -> bool:
    """What was held is sent, and its health begins anew; False when it was normal already, or is unknown.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    with translated():
        return bool(await executor.fetch(query("targets.enable"), *target))


async def limit(executor: Any, target: TargetId, rate: float | None) -> None:
    """The most calls a second that it gets; None is the service's setting.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    with translated():
        await executor.fetch(query("targets.limit"), *target, rate)
