"""Methods of `Client` about callbacks and their targets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime

import orjson

from penstock.client.arguments import encode_moment
from penstock.client.models import Replayed
from penstock.client.transport import (
    Document,
    Transport,
    pages,
    query_of,
    require_positive,
    without_none,
)
from penstock.core.access import DEFAULT_NAMESPACE

TARGET_PAGE_SIZE = 100
CALLBACK_PAGE_SIZE = 500


class CallbackMethods:
    """The methods of `Client` about callbacks; the API's description defines the documents."""

    async def targets(
        self: Transport,
        *,
        state: str | None = None,
        prefix: str | None = None,
        url: str | None = None,
        namespace: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Document]:
        """Targets in the order of their URLs and namespaces: one `Target` document each.

        Args:
            state: normal, abnormal or disabled.
            prefix: only URLs that begin with this text.
            url: only this URL.
            namespace: only this namespace; None is every namespace that the API key may see.
            limit: most targets; None is all.
        """
        query = query_of(state=state, prefix=prefix, url=url, namespace=namespace)
        async for target in pages(self, "/targets", "targets", query, limit, TARGET_PAGE_SIZE):
            yield target

    async def target(self: Transport, url: str, namespace: str | None = None) -> Document | None:
        """One target; None when there is none.

        Args:
            url: address of the target.
            namespace: namespace of the target. None is the only namespace that has the URL, or
                `default` if several have it.
        """
        found = (await self._request("GET", "/targets", query=query_of(url=url, namespace=namespace)))[
            "targets"
        ]
        if len(found) == 1:
            return dict(found[0])
        return next((target for target in found if target["namespace"] == DEFAULT_NAMESPACE), None)

    async def disable_target(self: Transport, url: str, why: str, namespace: str | None = None) -> Document:
        """Stops calls to a target until it is enabled.

        Args:
            url: address of the target.
            why: the reason, which lists of targets show.
            namespace: namespace of the target. None is the only namespace of the API key, or else
                `default`.

        Returns:
            `changed`, and the `target` after the change.

        Raises:
            Invalid: the URL cannot be called.
            NotFound: there is no such namespace.
        """
        wire = without_none(url=url, namespace=namespace, why=why)
        return await self._request("POST", "/targets/disable", orjson.dumps(wire))

    async def enable_target(self: Transport, url: str, namespace: str | None = None) -> Document:
        """Resumes calls to a target, and resets its health.

        Returns:
            `changed`, and the `target` after the change.

        Raises:
            NotFound: there is no such target.
        """
        wire = without_none(url=url, namespace=namespace)
        return await self._request("POST", "/targets/enable", orjson.dumps(wire))

    async def limit_target(
        self: Transport, url: str, rate: float | None, namespace: str | None = None
    ) -> Document:
        """Limits the calls to a target.

        Args:
            url: address of the target.
            rate: most calls a second; None is the setting of the service.
            namespace: namespace of the target, as for `disable_target`.

        Returns:
            `changed`, and the `target` after the change.

        Raises:
            Invalid: the URL cannot be called, or the rate is not above 0.
            NotFound: there is no such namespace.
        """
        wire = {**without_none(url=url, namespace=namespace), "rate": require_positive(rate)}
        return await self._request("POST", "/targets/limit", orjson.dumps(wire))

    async def callbacks(
        self: Transport,
        *,
        target: str | None = None,
        namespace: str | None = None,
        task_id: int | None = None,
        state: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Document]:
        """Callbacks by target and creation: one `CallbackRow` document each.

        Args:
            target: URL of the target.
            namespace: namespace of the target; None is every namespace that the API key may see.
            task_id: only callbacks of this task.
            state: pending, held, delivered or dead. Delivered callbacks are found only with
                `task_id`. None is dead, or with `task_id` any state.
            since: ended at this moment or later. The moment of a callback that has not ended is its
                creation.
            until: ended before this moment.
            limit: most callbacks; None is all.
        """
        query = query_of(
            target=target,
            namespace=namespace,
            task_id=task_id,
            state=state,
            since=encode_moment(since, "since"),
            until=encode_moment(until, "until"),
        )
        async for callback in pages(self, "/callbacks", "callbacks", query, limit, CALLBACK_PAGE_SIZE):
            yield callback

    async def replay(
        self: Transport,
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
        """Requeues dead callbacks that match all filters, in as many requests as necessary.

        Args:
            ids: only these callbacks; at most 10,000.
            target: URL of the target.
            namespace: namespace of the target. With `target`, None is the only namespace of the API
                key, or else `default`. Without `target`, None is every namespace that the API key
                may see.
            task_id: only callbacks of this task.
            state: dead, which is the default; or delivered, only with `ids`.
            since: ended at this moment or later.
            until: ended before this moment.
            rate: callbacks a second; None is no limit.
            dry_run: count only, up to 100,000.
            progress: called after each request with the number of callbacks that it replayed.

        Raises:
            Invalid: there is no filter, or a filter or the rate is wrong.
            GatewayUnavailable: some callbacks may have been replayed; the same call replays the
                others.
        """
        wire = without_none(
            ids=list(ids) if ids is not None else None,
            target=target,
            namespace=namespace,
            task_id=task_id,
            state=state,
            since=encode_moment(since, "since"),
            until=encode_moment(until, "until"),
            rate=require_positive(rate),
            dry_run=dry_run or None,
        )
        total = Replayed(0, 0, [], complete=True, examples=[])
        while True:
            # A repeated request could replay a callback twice that was delivered between the two.
            answer = await self._request(
                "POST", "/callbacks/replay", orjson.dumps(wire), safe=state != "delivered"
            )
            total = Replayed(
                total.count + answer["replayed"],
                total.held + answer["held"],
                list(dict.fromkeys([*total.disabled, *answer["disabled"]]))[:5],
                not (dry_run and answer["more"]),
                total.examples or answer["examples"],
            )
            if progress is not None:
                progress(answer["replayed"])
            if dry_run or not answer["more"]:
                return total
            if rate:
                wire["start_in_s"] = total.count / rate
