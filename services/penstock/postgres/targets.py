"""Callback targets in PostgreSQL: their health as it was saved last, and what operators decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
import orjson

from penstock.core.health import HealthSnapshot
from penstock.core.target import TargetId
from penstock.postgres.queries import fetch, fetchrow
from penstock.postgres.replay import HELD_COUNTED, PENDING_SEARCHED
from penstock.postgres.session import Session

# Notified with a target when an operator or an answer has changed it; `parse_notification` reads
# the payload.
CHANNEL = "penstock_targets"

# Sorts after every URL: URLs begin with the letter of a scheme.
_AFTER_ALL = "\x7f"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTarget:
    """The stored state of a target.

    Attributes:
        target: its identity.
        disabled: whether nothing may be sent to it.
        health: its health.
        failures: consecutive quick failures.
        rate: most calls per second; None without a limit.
        attempts: the last few, the latest last, as operators see them.
    """

    target: TargetId
    disabled: bool = False
    health: HealthSnapshot
    failures: int = 0
    rate: float | None = None
    attempts: Sequence[dict[str, Any]] = ()


def target_columns(targets: Iterable[TargetId]) -> tuple[list[str], list[str]]:
    """Namespaces and URLs, as the statements take them."""
    targets = list(targets)
    return [target.namespace for target in targets], [target.url for target in targets]


def target_in(row: asyncpg.Record) -> TargetId:
    """The target of a row with `namespace` and `url`."""
    return TargetId(row["namespace"], row["url"])


def parse_notification(payload: str) -> TargetId:
    """The target of a notification."""
    namespace, _blank, url = payload.partition(" ")
    return TargetId(namespace, url)


async def take_over(
    pool: asyncpg.Pool[asyncpg.Record], targets: Sequence[TargetId], owner: str
) -> list[StoredTarget]:
    """Takes over targets: from now on `save` accepts this owner only.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(pool, "targets.take_over", *target_columns(targets), owner)
    return [
        StoredTarget(
            target=target_in(row),
            disabled=row["state"] == "disabled",
            health=HealthSnapshot(
                row["count"], row["slow_at_s"], row["called_at_s"], abnormal=row["state"] == "abnormal"
            ),
            failures=row["failures"],
            rate=row["rate"],
            attempts=orjson.loads(row["attempts"]),
        )
        for row in rows
    ]


async def save(
    pool: asyncpg.Pool[asyncpg.Record], targets: Sequence[StoredTarget], owner: str
) -> set[TargetId]:
    """Saves targets; returns those that still belonged to this owner and were saved.

    Raises:
        PostgresUnavailable: perhaps nothing was written; safe to repeat.
    """
    namespaces, urls = target_columns(t.target for t in targets)
    rows = await fetch(
        pool,
        "targets.save",
        owner=owner,
        namespace=namespaces,
        url=urls,
        abnormal=[t.health.abnormal for t in targets],
        count=[t.health.count for t in targets],
        slow_at_s=[t.health.slow_at_s for t in targets],
        called_at_s=[t.health.called_at_s for t in targets],
        failures=[t.failures for t in targets],
        attempts=[orjson.dumps(list(t.attempts)).decode() for t in targets],
    )
    return {target_in(row) for row in rows}


@dataclass(frozen=True, slots=True)
class FoundTargets:
    """A page of a search for targets.

    Attributes:
        targets: those that it found.
        last: the last target that it looked at; None when no page follows.
    """

    targets: list[TargetId]
    last: TargetId | None


async def find_abnormal(
    pool: asyncpg.Pool[asyncpg.Record], after: TargetId | None, *, limit: int
) -> FoundTargets:
    """A page of the abnormal targets.

    Args:
        pool: of the database.
        after: the last target of the page before; None for the first page.
        limit: how many targets to look at.

    Raises:
        PostgresUnavailable: no server.
    """
    return await _find_page(pool, "targets.find_abnormal", after, limit)


async def find_held(
    pool: asyncpg.Pool[asyncpg.Record], after: TargetId | None, *, limit: int
) -> FoundTargets:
    """A page of the targets that have held callbacks and are not disabled; as `find_abnormal`."""
    return await _find_page(pool, "targets.find_held", after, limit)


async def _find_page(
    pool: asyncpg.Pool[asyncpg.Record], name: str, after: TargetId | None, limit: int
) -> FoundTargets:
    rows = await fetch(pool, name, *(after or TargetId("", "")), limit)
    return FoundTargets(
        [target_in(row) for row in rows if row["found"]],
        target_in(rows[-1]) if len(rows) == limit else None,
    )


async def get(executor: Any, url: str, namespaces: Sequence[str] | None = None) -> list[asyncpg.Record]:
    """The rows of a URL, one per namespace that has called or changed it.

    Args:
        executor: a pool or a connection.
        url: the URL.
        namespaces: only these; None for all.

    Raises:
        PostgresUnavailable: no server.
    """
    return await fetch(executor, "targets.get", url, namespaces)


async def find(
    executor: Any,
    *,
    state: str | None,
    prefix: str | None,
    after: TargetId | None,
    limit: int,
    namespaces: Sequence[str] | None = None,
) -> list[asyncpg.Record]:
    """A page of rows, in the order of URL and namespace.

    Args:
        executor: a pool or a connection.
        state: normal, abnormal or disabled; None for any.
        prefix: of their URLs; None for any.
        after: the last target of the page before; None for the first page.
        limit: most rows.
        namespaces: only these, without duplicates; None for all.

    Raises:
        PostgresUnavailable: no server.
    """
    indexed = state not in (None, "normal")
    previous = after or TargetId("", "")
    page = {
        "after_namespace": previous.namespace,
        "after_url": previous.url,
        "from_url": prefix or "",
        "until_url": _after_prefix(prefix) if prefix else _AFTER_ALL,
        "limit": limit,
        "state": state,
    }
    if namespaces is None:
        return await fetch(executor, "targets.find_in_state" if indexed else "targets.find", **page)
    name = "targets.find_in_state_within" if indexed else "targets.find_within"
    return await fetch(executor, name, **page, namespaces=list(namespaces))


def _after_prefix(prefix: str) -> str:
    """The first text, by code point, after all texts that begin with a prefix."""
    # No character follows the last code point.
    shorter = prefix.rstrip("\U0010ffff")
    if not shorter:
        return _AFTER_ALL
    last = ord(shorter[-1]) + 1
    # Texts contain no surrogates.
    return shorter[:-1] + chr(0xE000 if 0xD800 <= last <= 0xDFFF else last)


async def delete_unused(
    session: Session, after: TargetId | None, *, limit: int, unused_s: float
) -> tuple[int, TargetId | None]:
    """Deletes unused targets among the next `limit`: normal with count 0, or gone; without a rate.

    Args:
        session: holds the requeuer's lock.
        after: the last target of the pass before; None for the first pass.
        limit: how many targets to look at.
        unused_s: seconds without a call or a change after which a target is unused.

    Returns:
        How many were deleted, and the last target of this pass; None after all targets.

    Raises:
        SessionLost: the lock may be another process's.
        PostgresUnavailable: the server refused for now.
    """
    previous = after or TargetId("", "")
    [row] = await session.fetch(
        "targets.delete_unused",
        after_namespace=previous.namespace,
        after_url=previous.url,
        limit=limit,
        unused_s=unused_s,
    )
    return row["deleted"], None if row["url"] is None else target_in(row)


async def backlog(executor: Any, targets: Sequence[TargetId]) -> dict[TargetId, dict[str, Any]]:
    """Callbacks per target: pending on both paths, held, and whether the counts are complete.

    Raises:
        PostgresUnavailable: no server.
    """
    namespaces, urls = target_columns(targets)
    rows = await fetch(
        executor,
        "targets.backlog",
        namespace=namespaces,
        url=urls,
        most_pending=PENDING_SEARCHED,
        most_held=HELD_COUNTED,
    )
    return {
        target_in(row): {name: row[name] for name in ("normal", "diverted", "held", "complete")}
        for row in rows
    }


async def disabled(executor: Any, targets: Sequence[TargetId]) -> set[TargetId]:
    """The disabled ones among these targets.

    Raises:
        PostgresUnavailable: no server.
    """
    return {target_in(row) for row in await fetch(executor, "targets.disabled", *target_columns(targets))}


async def settings(connection: Any, target: TargetId) -> dict[str, Any] | None:
    """State, reason and rate of a target, locked until the end of the transaction; None if unknown.

    Raises:
        PostgresUnavailable: no server.
    """
    row = await fetchrow(connection, "targets.lock", *target)
    return None if row is None else dict(row)


async def disable(executor: Any, target: TargetId, why: str) -> bool:
    """Disables a target until it is enabled; False when it was disabled already.

    Args:
        executor: a pool or a connection.
        target: its identity.
        why: shown to operators.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    return bool(await fetch(executor, "targets.disable", *target, why))


async def disable_gone(executor: Any, gone: Mapping[TargetId, str], owner: str) -> None:
    """Disables targets that answered that they are gone, until they are enabled.

    Args:
        executor: a pool or a connection.
        gone: the targets, each with the reason that operators read.
        owner: the process that got the answers; it knows of them already.

    Raises:
        PostgresUnavailable: perhaps nothing was written; safe to repeat.
    """
    namespaces, urls = target_columns(gone)
    await fetch(
        executor, "targets.disable_gone", namespace=namespaces, url=urls, why=list(gone.values()), owner=owner
    )


async def enable(executor: Any, target: TargetId) -> bool:
    """Enables a target and resets its health; False when it was normal or is unknown.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    return bool(await fetch(executor, "targets.enable", *target))


async def limit(executor: Any, target: TargetId, rate: float | None) -> None:
    """Sets the most calls per second of a target; None for the service's setting.

    Raises:
        PostgresUnavailable: perhaps nothing was written.
    """
    await fetch(executor, "targets.limit", *target, rate)
