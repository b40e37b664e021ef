"""What operators ask and say of callbacks and their targets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from typing import Any

import orjson

from penstock.client.asking import Asking, Document, given, pace, pages, wire_moment
from penstock.client.models import Replayed
from penstock.core.access import DEFAULT_NAMESPACE

LARGEST_TARGET_PAGE = 100
LARGEST_CALLBACK_PAGE = 500


class Delivering:
    """The part of `Client` that is for callbacks; documents are those of the API's description."""

    async def targets(
        self: Asking,
        *,
        state: str | None = None,
        prefix: str | None = None,
        url: str | None = None,
        namespace: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Document]:
        """Targets in the order of their URLs and namespaces, each as of `Target`; at most `limit`, by default all of them.

        Args:
            state: normal, abnormal or disabled.
            prefix: only URLs that begin with this.
            url: only this one.
            namespace: only of this one; None is all that may be seen.
            limit: at most so many.
        """
        query = given(state=state, prefix=prefix, url=url, namespace=namespace)
        async for target in pages(self, "/targets", "targets", query, limit, LARGEST_TARGET_PAGE):
            yield target

    async def target(self: Asking, url: str, namespace: str | None = None) -> Document | None:
        """One target; None when nothing was ever sent to it or said of it.

        Args:
            url: its address.
            namespace: in which it is called; None is the only one that has it, or, of several, `default`.
        """
        query = given(url=url, namespace=namespace)
        found = (await self._ask("GET", "/targets", query=query))["targets"]
        if len(found) == 1:
            return dict(found[0])
        return next((one for one in found if one["namespace"] == DEFAULT_NAMESPACE), None)

    async def disable_target(self: Asking, url: str, why: str, namespace: str | None = None) -> Document:
        """Sends nothing more to a target until it is enabled: `changed`, and the `target` as it is now.

        Args:
            url: its address.
            why: shown with it.
            namespace: in which it is called; None is the only one that the key is confined to, else `default`.

        Raises:
            Invalid: no URL that could be called.
            NotFound: no such namespace.
        """
        wire = _body(url=url, namespace=namespace)
        return await self._ask("POST", "/targets/disable", orjson.dumps({**wire, "why": why}))

    async def enable_target(self: Asking, url: str, namespace: str | None = None) -> Document:
        """Sends to a target again, with its health begun anew: `changed`, and the `target` as it is now.

        Raises:
            NotFound: nothing was ever sent to it or said of it.
        """
        wire = _body(url=url, namespace=namespace)
        return await self._ask("POST", "/targets/enable", orjson.dumps(wire))

    async def limit_target(
        self: Asking, url: str, rate: float | None, namespace: str | None = None
    ) -> Document:
        """The most calls a second that a target gets; None is the setting of the service. Else as `disable_target`.

        Raises:
            Invalid: no URL that could be called, or no rate above 0.
            NotFound: no such namespace.
        """
        wire = {**_body(url=url, namespace=namespace), "rate": pace(rate)}
        return await self._ask("POST", "/targets/limit", orjson.dumps(wire))

    async def callbacks(
        self: Asking,
        *,
        target: str | None = None,
        namespace: str | None = None,
        task_id: int | None = None,
        state: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Document]:
        """Callbacks in the order of their targets and their creation, each as of `CallbackRow`; by default all of them.

        Args:
            target: URL.
            namespace: of targets; None is all that may be seen.
            task_id: of this task; without it only those that are not delivered are found, and by default the dead.
            state: pending, held, delivered or dead.
            since: ended then or later; created, while it has not ended.
            until: ended, or created, before.
            limit: at most so many.
        """
        query = given(
            target=target,
            namespace=namespace,
            task_id=task_id,
            state=state,
            since=wire_moment(since),
            until=wire_moment(until),
        )
        async for callback in pages(self, "/callbacks", "callbacks", query, limit, LARGEST_CALLBACK_PAGE):
            yield callback

    async def replay(
        self: Asking,
        ids: Sequence[str] | None = None,
        *,
        target: str | None = None,
        namespace: str | None = None,
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
            namespace: of the target. None is, with `target`, the only one that the key is confined to or `default`, and
                without it all that may be seen.
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
                "namespace": namespace,
                "task_id": task_id,
                "state": state,
                "since": wire_moment(since),
                "until": wire_moment(until),
                "rate": pace(rate),
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


def _body(**fields: str | None) -> dict[str, str]:
    """What is said, without what is not."""
    return {name: value for name, value in fields.items() if value is not None}
