"""Visibility: resources of other namespaces are answered like resources that do not exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import asyncpg
from aiohttp import web

from penstock.core.access import DEFAULT_NAMESPACE, Grant, namespace_of
from penstock.core.target import TargetId
from penstock.errors import Forbidden, InvalidRecord, NotFound
from penstock.gateway.access import grant_of, visible_types
from penstock.postgres import targets, tasks
from penstock.postgres.types import TypeCache

# As long as the name of a type.
MAX_NAMESPACE_LENGTH = 100


async def visible_ids(
    request: web.Request, pool: asyncpg.Pool[asyncpg.Record], ids: Sequence[int]
) -> Sequence[int]:
    """The ids of the tasks that a request may see, in their order.

    Needs no query when the request may see all namespaces.

    Raises:
        PostgresUnavailable: the database is unavailable.
    """
    types = visible_types(request)
    if types is None or not ids:
        return ids
    visible = await tasks.ids_of_types(pool, ids, types)
    return [task_id for task_id in ids if task_id in visible]


async def require_visible(request: web.Request, pool: asyncpg.Pool[asyncpg.Record], task_id: int) -> None:
    """Returns when a request may see a task. A request that may see all needs no query.

    Raises:
        NotFound: the request may not see the task, or there is no such task.
        PostgresUnavailable: the database is unavailable.
    """
    if not await visible_ids(request, pool, [task_id]):
        raise task_not_found(task_id)


def task_not_found(task_id: int) -> NotFound:
    """The error that `penstock.postgres.tasks.get` raises as well."""
    return NotFound(f"there is no task {task_id}")


def visible_name(request: web.Request, not_found: Callable[[str], NotFound]) -> str:
    """The name in the path of a request.

    Args:
        request: its grant limits the namespaces.
        not_found: the error of a name, which may be cut.

    Raises:
        NotFound: the request may not see it, or nothing can have this name.
    """
    name = request.match_info["name"]
    if "\0" in name or len(name) > 100 or not grant_of(request).covers(name):
        raise not_found(name[:100])
    return name


def require_own_name(grant: Grant, name: str, may: str) -> None:
    """Returns when a request may write something with a name.

    Args:
        grant: of the request; it limits the namespaces.
        name: its beginning is a namespace.
        may: what the request may do in its own namespaces.

    Raises:
        Forbidden: the name is in another namespace.
    """
    if not grant.covers(name):
        assert grant.namespaces is not None
        allowed = ", ".join(sorted(grant.namespaces)) or "no namespace"
        raise Forbidden(
            f"{name[:100]} would be in the namespace {namespace_of(name)[:100]}, and you may {may} in {allowed}: "
            "the namespace is the part of the name before the first --"
        )


def visible_namespaces(request: web.Request, namespace: str | None = None) -> Sequence[str] | None:
    """The namespaces that a query of a request covers; None is all.

    Args:
        request: its grant limits the namespaces.
        namespace: the only namespace that the client asked for; None is every visible one.
    """
    visible = grant_of(request).namespaces
    if namespace is not None:
        return [namespace] if visible is None or namespace in visible else []
    return None if visible is None else sorted(visible)


def target_namespace(request: web.Request, namespace: str | None) -> str:
    """The namespace of a target: as given, or the grant's only one, or `default`."""
    if namespace is not None:
        return namespace
    visible = grant_of(request).namespaces
    return next(iter(visible)) if visible is not None and len(visible) == 1 else DEFAULT_NAMESPACE


async def resolve_target(
    request: web.Request,
    pool: asyncpg.Pool[asyncpg.Record],
    types: TypeCache,
    url: str,
    requested_namespace: str | None,
) -> TargetId:
    """The target that a request changes; it need not exist yet.

    Args:
        request: its grant limits the namespaces.
        pool: the database.
        types: the registered types.
        url: address of the target.
        requested_namespace: namespace in the request; None without one.

    Raises:
        InvalidRecord: the request has no namespace, and only other namespaces have this target.
        NotFound: no type is in the namespace, or the request may not see it.
        PostgresUnavailable: the database is unavailable.
    """
    namespace = target_namespace(request, requested_namespace)
    visible = grant_of(request).namespaces
    if requested_namespace is None and (visible is None or len(visible) > 1):
        # Otherwise the request would create a target without callbacks, and leave the intended one
        # as it is.
        rows = await targets.get(pool, url, visible_namespaces(request))
        namespaces = [row["namespace"] for row in rows]
        if namespaces and namespace not in namespaces:
            raise InvalidRecord(
                f"the target is in namespace {', '.join(namespaces)}: give the one that you mean",
                pointer="/namespace",
            )
        if visible is not None and namespace not in visible:
            raise NotFound(f"this key has several namespaces: give the one of {url}")
    await require_namespace(request, types, namespace)
    return TargetId(namespace, url)


async def require_namespace(request: web.Request, types: TypeCache, namespace: str) -> None:
    """Returns when a type is in a namespace, or may be, and the request may see it.

    Raises:
        NotFound: no type is in the namespace, or the request may not see it.
        PostgresUnavailable: the database is unavailable.
    """
    visible = grant_of(request).namespaces
    if visible is None:
        # Needs no query unless a type has changed.
        await types.require(())
        visible = frozenset({DEFAULT_NAMESPACE, *(namespace_of(task_type.name) for task_type in types)})
    if namespace not in visible:
        raise NotFound(f"there is no namespace {namespace}: no type is in it")
