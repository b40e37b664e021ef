"""Versions of topics of the live stream: texts that differ after a change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from penstock.postgres.queries import fetch, fetchval

# Topics with a version of their own in PostgreSQL.
TOPICS = ("tasks", "flows", "types", "operations", "targets", "schedules", "keys")


async def versions(executor: Any, topics: Collection[str]) -> dict[str, str]:
    """The versions of some of `TOPICS`.

    Raises:
        PostgresUnavailable: no server.
    """
    return {topic: str(await fetchval(executor, f"live.{topic}")) for topic in topics}


async def flow_names(executor: Any, ids: Sequence[int]) -> dict[int, str]:
    """The definitions' names of flows by id; without those that do not exist.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(executor, "live.flow_names", list(ids)) if ids else []
    return {row["id"]: row["name"] for row in rows}


async def versions_by_id(executor: Any, kind: str, ids: Sequence[int]) -> dict[str, str]:
    """The versions of tasks or flows as topics; without those that do not exist.

    Raises:
        PostgresUnavailable: no server.
    """
    rows = await fetch(executor, f"live.{kind}s_by_id", list(ids)) if ids else []
    return {f"{kind}:{row['id']}": str(row["version"]) for row in rows}
