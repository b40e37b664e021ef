"""Callback targets as PostgreSQL knows them: their health as it was kept last, and what operators have said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from penstock.core.health import Vitals
from penstock.postgres.connection import translated
from penstock.postgres.queries import query
from penstock.postgres.replay import HELD_COUNTED, PENDING_LOOKED_AT
from penstock.postgres.session import Session

# Notified with a target's URL when an operator, or an answer, has changed it.
CHANNEL = "penstock_targets"

# Behind every URL: those begin with the letter of a scheme.
_BEHIND_ALL = "\x7f"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A target as it was kept.

    Attributes:
        url: which.
        disabled: nothing is to be sent to it.
        vitals: its health.
        failures: quick failures on end.
        rate: most calls a second; None is the service's setting.
        attempts: the last few, the latest last, as they are shown.
    """

    url: str
    disabled: bool = False
    vitals: Vitals
    failures: int = 0
    rate: float | None = None
    attempts: Sequence[dict[str, Any]] = ()


async def own(pool: asyncpg.Pool[asyncpg.Record], urls: Sequence[str], owner: str) -> list[Kept]:
    """Takes targets over; from now on only this owner's snapshots are kept.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows = await pool.fetch(query("targets.own"), list(urls), owner)
    return [
        Kept(
            url=row["url"],
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


async def keep(pool: asyncpg.Pool[asyncpg.Record], targets: Sequence[Kept], owner: str) -> set[str]:
    """Writes snapshots; returns the targets that were still this owner's.

    Raises:
        PostgresUnavailable: perhaps nothing was written; write it again.
    """
    with translated():
        rows = await pool.fetch(
            query("targets.keep"),
            owner,
            [t.url for t in targets],
            [t.vitals.abnormal for t in targets],
            [t.vitals.count for t in targets],
            [t.vitals.slow_at_s for t in targets],
            [t.vitals.called_at_s for t in targets],
            [t.failures for t in targets],
            [orjson.dumps(list(t.attempts)).decode() for t in targets],
        )
    return {row["url"] for row in rows}


async def troubled(pool: asyncpg.Pool[asyncpg.Record]) -> list[str]:
    """Targets that are not normal, or for which something is held.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        return [row["url"] for row in await pool.fetch(query("targets.troubled"))]


async def get(executor: Any, url: str) -> asyncpg.Record | None:
    """The row of a target; None when nobody has called it or said anything of it yet.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        row: asyncpg.Record | None = await executor.fetchrow(query("targets.get"), url)
    return row


async def find(
    executor: Any, *, state: str | None, prefix: str | None, after: str | None, limit: int
) -> list[asyncpg.Record]:
    """Rows of targets in the order of their URLs; give the last URL of a page as `after` to get the next one.

    Args:
        executor: a pool or a connection.
        state: normal, abnormal or disabled; None is any.
        prefix: with which their URLs begin.
        after: the last one of the page before.
        limit: of the page.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows: list[asyncpg.Record] = await executor.fetch(
            query(f"targets.find_{state}" if state else "targets.find"),
            after or "",
            prefix or "",
            _behind_all(prefix) if prefix else _BEHIND_ALL,
            limit,
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


async def forget(session: Session, behind: str, *, most: int, quiet_s: float) -> tuple[int, str | None]:
    """Removes, among the next `most`, targets that are normal, charged with nothing, not limited, and quiet.

    Args:
        session: that of the one process which does this.
        behind: the last one looked at before; "" to begin.
        most: at how many to look.
        quiet_s: seconds for which nobody has called or changed them.

    Returns:
        How many were removed, and the last one looked at; None at the end.

    Raises:
        SessionLost: the right to do this may be another's.
        PostgresUnavailable: the server refused for now.
    """
    [row] = await session.fetch("targets.forget", behind, most, quiet_s)
    return row["forgotten"], row["behind"]


async def backlog(executor: Any, urls: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How many callbacks are owed to targets: normal and diverted (pending), held, and whether these are all.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        rows = await executor.fetch(query("targets.backlog"), list(urls), PENDING_LOOKED_AT, HELD_COUNTED)
    return {
        row["url"]: {name: row[name] for name in ("normal", "diverted", "held", "complete")} for row in rows
    }


async def disabled(executor: Any, urls: Sequence[str]) -> set[str]:
    """Which of these are disabled.

    Raises:
        PostgresUnavailable: no server.
    """
    with translated():
        return {row["url"] for row in await executor.fetch(query("targets.disabled"), list(urls))}


async def disable(executor: Any, url: str, why: str) -> bool:
    """Nothing more is sent to it until it is enabled; False when it was disabled already.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    with translated():
        return bool(await executor.fetch(query("targets.disable"), url, why))


async def enable(executor: Any, url: str) -> bool:
    """What was held is sent, and its health begins anew; False when it was normal already, or is unknown.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    with translated():
        return bool(await executor.fetch(query("targets.enable"), url))


async def limit(executor: Any, url: str, rate: float | None) -> None:
    """The most calls a second that it gets; None is the service's setting.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    with translated():
        await executor.fetch(query("targets.limit"), url, rate)
