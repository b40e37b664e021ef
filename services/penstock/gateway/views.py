"""Rows of PostgreSQL as the documents of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.contracts.context import Context
from penstock.errors import CorruptObject
from penstock.objects import ObjectStore
from penstock.postgres import documents
from penstock.postgres.documents import summary
from penstock.postgres.tasks import context_of

__all__ = ["detail", "summary"]


async def detail(row: Mapping[str, Any], objects: ObjectStore | None) -> dict[str, Any]:
    """A task with its context, result, attempts and callbacks.

    Args:
        row: as `penstock.postgres.tasks.get` returns it.
        objects: resolves large contexts; None leaves the references.

    Raises:
        ObjectsUnavailable: the object store does not answer.
    """
    document = documents.detail(row)
    if objects is not None:
        for name in ("context", "result"):
            context = context_of(row, name)
            if context is not None and context.ref is not None:
                document |= await _resolved(context, name, objects)
                if name in document:
                    del document[f"{name}_ref"]
    return document


async def _resolved(context: Context, name: str, objects: ObjectStore) -> dict[str, Any]:
    try:
        shown = (await objects.check_out(context)).to_wire(name)
    except CorruptObject as error:
        # The task itself can still be looked at.
        return {f"{name}_error": str(error)}
    return {name: shown[name]}
