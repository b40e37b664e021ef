"""Finds the entry of a batch that PostgreSQL cannot store, so that it costs no other entry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from penstock.errors import ValueRefused

T = TypeVar("T")
R = TypeVar("R")


async def in_halves(
    entries: Sequence[T], store: Callable[[Sequence[T]], Awaitable[R]]
) -> list[tuple[Sequence[T], R | ValueRefused]]:
    """Stores a batch, or its halves, until an entry that PostgreSQL refuses is alone.

    Args:
        entries: at least one.
        store: one transaction, which has no effect when it is refused.

    Returns:
        The parts of the batch in their order, each with the answer of `store` or, for a single
        entry, its refusal.
    """
    try:
        return [(entries, await store(entries))]
    except ValueRefused as refused:
        if len(entries) == 1:
            return [(entries, refused)]
        middle = len(entries) // 2
        return [
            *await in_halves(entries[:middle], store),
            *await in_halves(entries[middle:], store),
        ]
