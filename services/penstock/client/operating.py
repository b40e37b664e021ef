"""What operators ask and say of callbacks and their targets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import orjson

from penstock.client.models import Replayed
from penstock.errors import InvalidRecord

LARGEST_TARGET_PAGE = 100
LARGEST_CALLBACK_PAGE = 500

Document = Mapping[str, Any]
# (name, value) of query parameters.
Query = Sequence[tuple[str, str]]


class _Asking(Protocol):
    async def _ask(
        self, method: str, path: str, body: bytes | None = None, *, query: Query = (), safe: bool = True
    ) -> dict[str, Any]: ...


class Operating:
    """The part of `Client` that is about callbacks and targets; documents are those of the API's description."""

    async def targets(
        self: _Asking, *, state: str | None = None, prefix: str | None = None, limit: int | None = None
    ) -> AsyncIterator[Document]:
        """Targets in the order of their URLs, each as of `Target`; at most `limit`, by default all of them.

        Args:
            state: normal, abnormal or disabled.
            prefix: only URLs that begin with this.
            limit: at most so many.
        """
        query = _given(state=state, prefix=prefix)
        async for target in _pages(self, "/targets", "targets", query, limit, LARGEST_TARGET_PAGE):
            yield target

    async def target(self: _Asking, url: str) -> Document | None:
        """One target; None when nothing was ever sent to it or said of it."""
        found = (await self._ask("GET", "/targets", query=[("url", url)]))["targets"]
        return found[0] if found else None

    async def disable_target(self: _Asking, url: str, why: str) -> Document:
        """Sends nothing more to a target until it is enabled: `changed`, and the `target` as it is now.

        Raises:
            Invalid: no URL that could be called.
        """
        return await self._ask("POST", "/targets/disable", orjson.dumps({"url": url, "why": why}))

    async def enable_target(self: _Asking, url: str) -> Document:
        """Sends to a target again, with its health begun anew: `changed`, and the `target` as it is now.

        Raises:
            NotFound: nothing was ever sent to it or said of it.
        """
        return await self._ask("POST", "/targets/enable", orjson.dumps({"url": url}))

    async def limit_target(self: _Asking, url: str, rate: float | None) -> Document:
        """The most calls a second that a target gets; None is the setting of the service.

        Raises:
            Invalid: no URL that could be called, or no rate above 0.
        """
        wire = {"url": url, "rate": _pace(rate)}
        return await self._ask("POST", "/targets/limit", orjson.dumps(wire))

    async def callbacks(
        self: _Asking,
        *,
        target: str | None = None,
        task_id: int | None = None,
        state: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Document]:
        """Callbacks in the order of their targets and their creation, each as of `CallbackRow`; by default all of them.

        Args:
            target: URL.
            task_id: of this task; without it only those that are not delivered are found, and by default the dead.
            state: pending, held, delivered or dead.
            since: ended then or later; created, while it has not ended.
            until: ended, or created, before.
            limit: at most so many.
        """
        query = _given(
            target=target, task_id=task_id, state=state, since=_moment(since), until=_moment(until)
        )
        async for callback in _pages(self, "/callbacks", "callbacks", query, limit, LARGEST_CALLBACK_PAGE):
            yield callback

    async def replay(
        self: _Asking,
        ids: Sequence[str] | None = None,
        *,
        target: str | None = None,
        task_id: int | None = None,
        state: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Replayed:
        """Owes dead callbacks anew, all that match what is given, in as many requests as it takes.

        Args:
            ids: these; at most 10,000.
            target: URL.
            task_id: of this task.
            state: dead, which is the default; or delivered, with `ids` only.
            since: ended then or later.
            until: ended before.
            rate: callbacks a second; None is all at once.
            dry_run: only count, up to 100,000.
            progress: told after each request how many it replayed.

        Raises:
            Invalid: nothing is given, or what is given is wrong, such as a rate that is not above 0.
            GatewayUnavailable: some may have been replayed; the same call replays the rest.
        """
        wire: dict[str, Any] = {
            name: value
            for name, value in {
                "ids": list(ids) if ids is not None else None,
                "target": target,
                "task_id": task_id,
                "state": state,
                "since": _moment(since),
                "until": _moment(until),
                "rate": _pace(rate),
                "dry_run": dry_run or None,
            }.items()
            if value is not None
        }
        told = Replayed(0, 0, [], complete=True, examples=[])
        while True:
            # One that is delivered anew between a request and its repetition would be replayed twice.
            found = await self._ask(
                "POST", "/callbacks/replay", orjson.dumps(wire), safe=state != "delivered"
            )
            told = Replayed(
                told.count + found["replayed"],
                told.held + found["held"],
                list(dict.fromkeys([*told.disabled, *found["disabled"]]))[:5],
                not (dry_run and found["more"]),
                told.examples or found["examples"],
            )
            if progress is not None:
                progress(found["replayed"])
            if dry_run or not found["more"]:
                return told
            if rate:
                wire["start_in_s"] = told.count / rate


def _pace(rate: float | None) -> float | None:
    """What JSON cannot say must not become null, which means something else."""
    if rate is not None and not 0 < rate < float("inf"):
        raise InvalidRecord(f"{rate} is not a number above 0", pointer="/rate")
    return rate


def _given(**filters: object) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in filters.items() if value is not None]


def _moment(moment: datetime | None) -> str | None:
    # A naive one is the local time.
    return moment.astimezone().isoformat() if moment is not None else None


async def _pages(
    client: _Asking, path: str, name: str, query: Query, limit: int | None, largest: int
) -> AsyncIterator[Document]:
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
