"""Ends of tasks and flows, announced to the gateways whose requests wait for them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from penstock.postgres.queries import fetch

# Its payloads are ids of tasks and flows, separated by spaces.
CHANNEL = "penstock_ended"


async def unfinished(executor: Any, ids: Collection[int]) -> set[int]:
    """Those of the ids whose tasks and flows have not ended; unknown ids are left out.

    Raises:
        PostgresUnavailable: the server does not answer.
    """
    rows = await fetch(executor, "ends.unfinished", list(ids))
    return {row["id"] for row in rows}
