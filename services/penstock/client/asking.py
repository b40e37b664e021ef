"""Asking the gateway: what the parts of `Client` share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from penstock.errors import InvalidRecord

Document = Mapping[str, Any]
# (name, value) of query parameters.
Query = Sequence[tuple[str, str]]


class Asking(Protocol):
    """What asks the gateway: the other half of `Client`."""

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, *, query: Query = (), safe: bool = True
    ) -> dict[str, Any]: ...


def pace(rate: float | None) -> float | None:
    """What JSON cannot say must not become null, which means something else."""
    if rate is not None and not 0 < rate < float("inf"):
        raise InvalidRecord(f"{rate} is not a number above 0", pointer="/rate")
    return rate


def given(**filters: object) -> list[tuple[str, str]]:
    """Query parameters: those that are not None."""
    return [(name, str(value)) for name, value in filters.items() if value is not None]


def wire_moment(moment: datetime | None) -> str | None:
    """As the gateway reads it; a naive one is the local time."""
    return moment.astimezone().isoformat() if moment is not None else None


async def pages(
    client: Asking, path: str, name: str, query: Query, limit: int | None, largest: int
) -> AsyncIterator[Document]:
    """The documents under `name` of all pages, at most `limit`; at most `largest` are on a page."""
    left = limit
    cursor: list[tuple[str, str]] = []
    while left is None or left > 0:
        size = largest if left is None else min(left, largest)
        page = await client._ask("GET", path, query=[*query, *cursor, ("limit", str(size))])  # noqa: SLF001 (its own half)
        for document in page[name]:
            yield document
        if left is not None:
            left -= len(page[name])
        if page["next"] is None:
            return
        cursor = [("cursor", page["next"])]
