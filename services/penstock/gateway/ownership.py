"""What is somebody else's is answered exactly as what does not exist."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg
from aiohttp import web

from penstock.errors import NotFound
from penstock.gateway.access import among
from penstock.postgres import tasks


async def own(request: web.Request, pool: asyncpg.Pool[asyncpg.Record], ids: Sequence[int]) -> Sequence[int]:
    """Those of some ids that whoever asks may see, in their order; without a query for who may see all.

    Raises:
        PostgresUnavailable: it is not known which.
    """
    types = among(request)
    if types is None or not ids:
        return ids
    found = await tasks.own(pool, ids, types)
    return [one for one in ids if one in found]


async def require_own(request: web.Request, pool: asyncpg.Pool[asyncpg.Record], task_id: int) -> None:
    """Does nothing when whoever asks may see a task, or may see all.

    Raises:
        NotFound: not this one, whether it is there or not.
        PostgresUnavailable: it is not known.
    """
    if not await own(request, pool, [task_id]):
        raise no_task(task_id)


def no_task(task_id: int) -> NotFound:
    """As `penstock.postgres.tasks.get` says it."""
    return NotFound(f"there is no task {task_id}")
