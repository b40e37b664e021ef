"""What operators ask and say of types, keys, callbacks and their targets, and of many tasks at once.

Longer than other modules, because most of it tells what the verbs of one class take and give.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol
from urllib.parse import quote

import orjson

from penstock.client.models import Operated, Replayed, TaskFilter, priority_name
from penstock.core.access import DEFAULT_NAMESPACE
from penstock.core.operations import Verb
from penstock.core.task import Priority
from penstock.errors import InvalidRecord

LARGEST_TARGET_PAGE = 100
LARGEST_CALLBACK_PAGE = 500
LARGEST_OPERATION_PAGE = 500
LARGEST_KEY_PAGE = 500

# Between two questions how far an operation has come, in seconds; the first come faster.
ASK_EVERY_S = 1.0

Document = Mapping[str, Any]
# (name, value) of query parameters.
Query = Sequence[tuple[str, str]]


class Asking(Protocol):
    """What asks the gateway: the other half of `Client`."""

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, *, query: Query = (), safe: bool = True
    ) -> dict[str, Any]: ...


class Operating:
    """The part of `Client` that is for operators; documents are those of the API's description."""

    async def operate(
        self: Asking,
        verb: Verb | str,
        which: TaskFilter,
        *,
        priority: Priority | str | None = None,
        rate: float | None = None,
        by: str | None = None,
        id: str | None = None,  # noqa: A002 (the platform's word for it)
        dry_run: bool = False,
        wait: bool = True,
        progress: Callable[[int], None] | None = None,
        begun: Callable[[str], None] | None = None,
    ) -> Operated:
        """Cancels, pauses, resumes, re-prioritises or recovers tasks, and follows it until that has ended.

        Once begun it goes on by itself, whatever becomes of this client; `stop_operation` stops it.

        Args:
            verb: cancel, pause, resume, reprioritise or recover.
            which: the tasks.
            priority: with reprioritise: the new one.
            rate: most tasks a second; None is as fast as it goes.
            by: who asks, for the audit; None is user@host.
            id: name of the operation; asking again under it follows the first. None is a random one.
            dry_run: only count, and change nothing.
            wait: until it has ended; otherwise it returns once it is written down.
            progress: told how many more tasks were changed.
            begun: told the operation's id.

        Raises:
            Invalid: the filter is empty, or something is wrong with it.
            Conflict: another operation has this id.
            GatewayUnavailable: it may have been begun; the same call under the same `id` follows it.
        """
        wire = {
            name: value
            for name, value in {
                "id": None if dry_run else id or uuid.uuid4().hex,
                "verb": str(verb),
                "filter": which.to_wire(),
                "by": by or myself(),
                "priority": None if priority is None else priority_name(priority),
                "rate": rate,
                "dry_run": dry_run or None,
            }.items()
            if value is not None
        }
        found = await self._ask("POST", "/operations", orjson.dumps(wire))
        if dry_run:
            return Operated(
                None, None, found["count"], found["found_in"], not found["more"], found["examples"]
            )
        if begun is not None:
            begun(found["id"])
        told, pause_s = 0, 0.02
        while True:
            if progress is not None:
                progress(found["changed"] - told)
                told = found["changed"]
            if found["state"] != "running" or not wait:
                return Operated(
                    found["id"],
                    found["state"],
                    found["changed"],
                    found["found_in"],
                    complete=True,
                    examples=[],
                    error=found["error"],
                )
            await asyncio.sleep(pause_s)
            pause_s = min(ASK_EVERY_S, pause_s * 1.5)
            found = await self._ask("GET", f"/operations/{found['id']}")

    async def operations(
        self: Asking, *, verb: Verb | str | None = None, state: str | None = None, limit: int | None = None
    ) -> AsyncIterator[Document]:
        """The audit: operations, latest first, each as of `Operation`; at most `limit`, by default all of them.

        Args:
            verb: only of this one.
            state: running, done, stopped or failed.
            limit: at most so many.
        """
        query = given(verb=verb, state=state)
        async for one in pages(self, "/operations", "operations", query, limit, LARGEST_OPERATION_PAGE):
            yield one

    async def operation(self: Asking, id: str) -> Document:  # noqa: A002 (the platform's word for it)
        """One operation.

        Raises:
            NotFound: none has this id.
        """
        return await self._ask("GET", f"/operations/{quote(id, safe='')}")

    async def stop_operation(self: Asking, id: str, by: str | None = None) -> Document:  # noqa: A002 (as above)
        """Stops an operation; what it has done stays done. Returns it as it is now.

        Raises:
            NotFound: none has this id.
        """
        body = orjson.dumps({"by": by or myself()})
        return await self._ask("POST", f"/operations/{quote(id, safe='')}/stop", body)

    async def change_type(self: Asking, name: str, **settings: Any) -> Document:
        """Changes a task type; what is left out stays as it is. Returns it as it is now.

        Args:
            name: of the type.
            settings: fields of `task-type.schema.json` but `name` and `partitions`; None takes a limit away.

        Raises:
            NotFound: there is no such type.
            Invalid: refused; `pointer` tells which field.
        """
        return await self._ask("PATCH", f"/types/{quote(name, safe='')}", orjson.dumps(settings))

    async def keys(
        self: Asking,
        type: str,  # noqa: A002 (the platform's word for it)
        *,
        key: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Document]:
        """Keys of a type of which something was said, by key, each as of `Key`; at most `limit`, by default all of them.

        Raises:
            NotFound: there is no such type.
        """
        path = f"/types/{quote(type, safe='')}/keys"
        async for found in pages(self, path, "keys", given(key=key), limit, LARGEST_KEY_PAGE):
            yield found

    async def change_key(self: Asking, type: str, key: str, **settings: Any) -> Document:  # noqa: A002 (the platform's word)
        """Pauses, weighs or limits a key; what is left out stays as it is. Returns the `Key` as it is now.

        Args:
            type: name of the task type.
            key: as tasks are submitted with.
            settings: `paused`, `weight` (1 to 1,000), `max_in_flight` (None: what its type says).

        Raises:
            NotFound: there is no such type.
            Invalid: refused; `pointer` tells which field.
        """
        body = orjson.dumps({"key": key, **settings})
        return await self._ask("POST", f"/types/{quote(type, safe='')}/keys", body)

    async def reset_key(self: Asking, type: str, key: str) -> bool:  # noqa: A002 (the platform's word for it)
        """Forgets what was said of a key; False when nothing was.

        Raises:
            NotFound: there is no such type.
        """
        body = orjson.dumps({"key": key})
        found = await self._ask("POST", f"/types/{quote(type, safe='')}/keys/reset", body)
        return bool(found["changed"])

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
        wire = {**_body(url=url, namespace=namespace), "rate": _pace(rate)}
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
            since=_moment(since),
            until=_moment(until),
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


def _body(**fields: str | None) -> dict[str, str]:
    """What is said, without what is not."""
    return {name: value for name, value in fields.items() if value is not None}


def _pace(rate: float | None) -> float | None:
    """What JSON cannot say must not become null, which means something else."""
    if rate is not None and not 0 < rate < float("inf"):
        raise InvalidRecord(f"{rate} is not a number above 0", pointer="/rate")
    return rate


def myself() -> str:
    """Who asks, for the audit, unless they say so themselves: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have a number and no name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def given(**filters: object) -> list[tuple[str, str]]:
    """Query parameters: those that are not None."""
    return [(name, str(value)) for name, value in filters.items() if value is not None]


def _moment(moment: datetime | None) -> str | None:
    # A naive one is the local time.
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
