"""Methods of `Client` about task types and their owners."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import orjson

from penstock.client.transport import Transport, pages, query_of


class TypeMethods:
    """The methods of `Client` about task types."""

    async def types(self: Transport) -> Sequence[Mapping[str, Any]]:
        """All task types, as documents of `task-type.schema.json`."""
        types: Sequence[Mapping[str, Any]] = (await self._request("GET", "/types"))["types"]
        return types

    async def type_durations(self: Transport, name: str) -> Mapping[str, Any]:
        """The seconds that tasks of a type took, from up to 500 that succeeded last.

        Returns:
            `tasks` by `first_stage`, the most frequent first, and `stages`, each with `count`,
            `p50_s` and `p95_s`. Both are empty if no such task has ended since `since`.

        Raises:
            NotFound: there is no such type.
        """
        return await self._request("GET", f"/types/{quote(name, safe='')}/durations")

    async def owners(self: Transport) -> Mapping[str, str | None]:
        """The process of task-sync that releases the tasks of each type, as host and process id.

        The value is None for a type that no process releases now.
        """
        owners: Sequence[Mapping[str, Any]] = (await self._request("GET", "/owners"))["owners"]
        return {owner["type"]: owner["process"] for owner in owners}

    async def workers(
        self: Transport,
        type: str | None = None,  # noqa: A002 (the platform's word for it)
        *,
        state: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Mapping[str, Any]]:
        """The workers of each type: documents with `type`, `rebalancing`, `as_of` and `workers`.

        Each worker has `id`, `kind` (worker, gateway or http), `state` (running or lost), `host`,
        `version`, `stages`, `slots`, `room`, `in_flight`, `partitions`, `seen_at` and `tasks`: what
        became of those of a lost one. `WorkerRow` of the API's description explains them.

        Args:
            type: only this type.
            state: only workers that are "running" or "lost"; None is both.
            limit: most types; None is all.

        Raises:
            NotFound: there is no such type.
        """
        async for document in pages(self, "/workers", "types", query_of(type=type, state=state), limit, 100):
            yield document

    async def register_type(self: Transport, /, name: str, **settings: Any) -> Mapping[str, Any]:
        """Registers a task type or replaces its settings, and returns the type as it is now.

        Args:
            name: letters, digits, `_` and `-`.
            settings: fields of `task-type.schema.json`; every other field gets its default.

        Raises:
            Invalid: a setting is refused; `pointer` is the field at fault.
            Conflict: the type exists with another number of partitions, which cannot be changed.
        """
        return await self._request("POST", "/types", orjson.dumps({"name": name, **settings}))
