"""The contexts of reported results: large ones go to the object store."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import asyncpg

from penstock.contracts.context import INLINE_LIMIT_BYTES
from penstock.contracts.result import StageResult
from penstock.errors import InvalidRecord, ObjectsUnavailable, PostgresUnavailable, Unavailable
from penstock.gateway.report_entries import rejection
from penstock.objects import ObjectStore
from penstock.postgres import tasks


async def store_contexts(
    pool: asyncpg.Pool[asyncpg.Record],
    objects: ObjectStore,
    results: Mapping[int, StageResult],
    rejected: list[dict[str, Any]],
) -> tuple[list[StageResult], Unavailable | None]:
    """The results, whose large contexts are stored now; why others must be sent again.

    A result with a large context needs PostgreSQL, for the namespace of its task, and the
    object store. While one of them is away, the results beside it do not wait.

    Args:
        pool: knows the namespaces of tasks.
        objects: the object store.
        results: by their index in the request.
        rejected: gets the results that refer to objects of other namespaces.
    """
    large = {
        index: result.context
        for index, result in results.items()
        if result.context is not None
        and (result.context.ref is not None or result.context.size > INLINE_LIMIT_BYTES)
    }
    if not large:
        return list(results.values()), None
    waiting: Unavailable | None = None
    namespaces: Mapping[int, str] = {}
    try:
        namespaces = await tasks.namespaces(pool, (results[index].fence.id for index in large))
    except PostgresUnavailable as error:
        waiting = error
    kept: list[StageResult] = []
    for index, result in results.items():
        context = large.get(index)
        if context is None:
            kept.append(result)
            continue
        if waiting is not None:
            # The next one would wait for the same server.
            continue
        namespace = namespaces.get(result.fence.id)
        if namespace is None:
            # The result of a task in history, or of none, has no effect.
            continue
        try:
            if context.ref is not None:
                context.ref.require_namespace(namespace, "/context_ref")
        except InvalidRecord as fault:
            rejected.append(rejection(index, [fault]))
            continue
        try:
            stored = await objects.check_in(context, namespace)
        except ObjectsUnavailable as error:
            waiting = error
            continue
        kept.append(dataclasses.replace(result, context=stored))
    return kept, waiting
