"""Converts rows of PostgreSQL to documents of the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from penstock.contracts.context import Context
from penstock.core.access import namespace_of
from penstock.errors import CorruptObject, TooLarge
from penstock.objects import ObjectStore
from penstock.postgres import documents
from penstock.postgres.documents import summary
from penstock.postgres.tasks import context_of

__all__ = ["detail", "pick", "resolved", "summary"]


# The largest context that an answer has. While it is checked, its values take several times its
# bytes.
MAX_CONTEXT_BYTES = 16 * 1024 * 1024
# The inputs of stages that an answer has, together: a task may enter thousands of stages.
MAX_INPUT_BYTES = 16 * 1024


def pick(row: Mapping[str, Any] | asyncpg.Record, columns: Sequence[str]) -> dict[str, Any]:
    """The columns of a row that a document has under the same names."""
    return {name: row[name] for name in columns}


async def detail(row: Mapping[str, Any], objects: ObjectStore | None) -> dict[str, Any]:
    """A task with its context, result, attempts, timeline and callbacks.

    Args:
        row: a row of `penstock.postgres.tasks.get`.
        objects: resolves large contexts; None leaves the references.

    Raises:
        ObjectsUnavailable: the object store is unavailable.
    """
    document = documents.detail(row, MAX_INPUT_BYTES)
    if objects is not None:
        for name in ("context", "result"):
            context = context_of(row, name)
            if context is not None and context.ref is not None:
                document |= await resolved(context, name, namespace_of(row["type"]), objects)
                if name in document:
                    del document[f"{name}_ref"]
    return document


async def resolved(context: Context, name: str, namespace: str, objects: ObjectStore) -> dict[str, Any]:
    """The field of a large context with its value, or the field with the reason that there is none.

    Raises:
        ObjectsUnavailable: the object store is unavailable.
    """
    try:
        found = await objects.check_out(context, namespace, limit_bytes=MAX_CONTEXT_BYTES)
    except (CorruptObject, TooLarge) as error:
        # The rest of the task is still shown.
        return {f"{name}_error": str(error)}
    return {name: found.to_wire(name)[name]}
