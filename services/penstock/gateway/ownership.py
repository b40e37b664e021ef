"""What is somebody else's is answered exactly as what does not exist."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg
from aiohttp import web

from penstock.core.access import DEFAULT_NAMESPACE, namespace_of
from penstock.core.target import TargetId
from penstock.errors import InvalidRecord, NotFound
from penstock.gateway.access import among, grant_of
from penstock.postgres import targets, tasks
from penstock.postgres.types import KnownTypes

# As long as a type's name.
LONGEST_NAMESPACE = 100


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


def namespaces_seen(request: web.Request, asked: str | None = None) -> Sequence[str] | None:
    """In which namespaces whoever asks is answered: the one asked for, if it is theirs to see, or all of theirs; None is all there are."""
    seen = grant_of(request).namespaces
    if asked is not None:
        return [asked] if seen is None or asked in seen else []
    return None if seen is None else sorted(seen)


def namespace_meant(request: web.Request, asked: str | None) -> str:
    """That of a target of which only the URL is said: the only one of whoever asks, else `default`."""
    if asked is not None:
        return asked
    seen = grant_of(request).namespaces
    return next(iter(seen)) if seen is not None and len(seen) == 1 else DEFAULT_NAMESPACE


async def own_target(
    request: web.Request, pool: asyncpg.Pool[asyncpg.Record], known: KnownTypes, url: str, asked: str | None
) -> TargetId:
    """The target of which somebody says something, which need not be known yet.

    Raises:
        InvalidRecord: it is not said in which of several namespaces, and others call this address.
        NotFound: no type is of its namespace, or it is not theirs.
        PostgresUnavailable: it is not known which types there are.
    """
    namespace = namespace_meant(request, asked)
    seen = grant_of(request).namespaces
    if asked is None and (seen is None or len(seen) > 1):
        # Else a target that nobody calls would be disabled, and those that are meant go on being called.
        rows = await targets.get(pool, url, namespaces_seen(request))
        callers = [row["namespace"] for row in rows]
        if callers and namespace not in callers:
            raise InvalidRecord(
                f"is called in namespace {', '.join(callers)}: say in which one it is meant",
                pointer="/namespace",
            )
        if seen is not None and namespace not in seen:
            raise NotFound(f"this key is of several namespaces: say in which one {url} is meant")
    if seen is None:
        # Without a query while no type has changed.
        await known.require(())
        seen = frozenset({DEFAULT_NAMESPACE, *(namespace_of(one.name) for one in known)})
    if namespace not in seen:
        raise NotFound(f"there is no namespace {namespace}: no type is of it")
    return TargetId(namespace, url)
