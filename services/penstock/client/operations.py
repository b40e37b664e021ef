"""Methods of `Client` for operators: operations on many tasks, task types and concurrency keys."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol
from urllib.parse import quote

import orjson

from penstock.client.arguments import priority_name
from penstock.client.models import Operated, Submitted, TaskFilter
from penstock.client.transport import Document, Transport, pages, query_of, without_none
from penstock.core.operations import Verb
from penstock.core.task import Priority

OPERATION_PAGE_SIZE = 500
KEY_PAGE_SIZE = 500

# The longest time between two polls of an operation, in seconds. The first polls come faster.
MAX_POLL_S = 1.0


class _Rerunner(Transport, Protocol):
    """The parts of `Client` that a rerun uses."""

    _read_result: Callable[..., Any]


class OperationMethods:
    """The methods of `Client` for operators; the API's description defines the documents."""

    async def rerun(
        self: _Rerunner,
        task_id: int,
        *,
        from_stage: str | None = None,
        idempotency_key: str | None = None,
    ) -> Submitted:
        """Submits a new task that begins in a stage of an ended task, with that stage's input.

        Args:
            task_id: the task that is run again.
            from_stage: a stage that it has entered; None is its first one.
            idempotency_key: a second call with the same key returns the first task; None is a
                random one.

        Raises:
            NotFound: no task has this id.
            RerunRefused: it has not ended, has not entered the stage, belongs to a flow, or the
                input was not kept.
        """
        key = idempotency_key or f"auto-{uuid.uuid4().hex}"
        body = orjson.dumps(without_none(**{"from": from_stage}, idempotency_key=key))
        answer = await self._request("POST", f"/tasks/{task_id}/rerun", body)
        created = idempotency_key is None or answer["created"]
        return Submitted(answer["id"], created=created, read_result=self._read_result)

    async def operate(
        self: Transport,
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
        """Cancels, pauses, resumes, re-prioritises or recovers tasks, and waits for the end.

        The gateways carry the operation on even when this client stops. `stop_operation` stops it.

        Args:
            verb: cancel, pause, resume, reprioritise or recover.
            which: filter of the tasks.
            priority: the new priority, for reprioritise.
            rate: most tasks a second; None is no limit.
            by: name of the operator for the audit; None is user@host.
            id: id of the operation; None is a random one. A second call with the same id follows
                the first operation.
            dry_run: count only, and change nothing.
            wait: False returns as soon as the operation is stored.
            progress: called with the number of tasks changed since the last call.
            begun: called with the id of the operation.

        Raises:
            Invalid: the filter is empty, or a part of it is wrong.
            Conflict: another operation has this id.
            GatewayUnavailable: the operation may have begun; the same call with the same `id`
                follows it.
        """
        wire = without_none(
            id=None if dry_run else id or uuid.uuid4().hex,
            verb=str(verb),
            filter=which.to_wire(),
            by=by or local_user(),
            priority=None if priority is None else priority_name(priority),
            rate=rate,
            dry_run=dry_run or None,
        )
        operation = await self._request("POST", "/operations", orjson.dumps(wire))
        return await follow_operation(self, operation, wait=wait, progress=progress, begun=begun)

    async def operations(
        self: Transport, *, verb: Verb | str | None = None, state: str | None = None, limit: int | None = None
    ) -> AsyncIterator[Document]:
        """The audit: operations, latest first, one `Operation` document each.

        Args:
            verb: only operations with this verb.
            state: running, done, stopped or failed.
            limit: most operations; None is all.
        """
        query = query_of(verb=verb, state=state)
        async for operation in pages(self, "/operations", "operations", query, limit, OPERATION_PAGE_SIZE):
            yield operation

    async def operation(self: Transport, id: str) -> Document:  # noqa: A002 (the platform's word for it)
        """One operation.

        Raises:
            NotFound: no operation has this id.
        """
        return await self._request("GET", f"/operations/{quote(id, safe='')}")

    async def stop_operation(self: Transport, id: str, by: str | None = None) -> Document:  # noqa: A002 (as above)
        """Stops an operation, and returns it as it is now. Tasks that it has changed stay changed.

        Raises:
            NotFound: no operation has this id.
        """
        body = orjson.dumps({"by": by or local_user()})
        return await self._request("POST", f"/operations/{quote(id, safe='')}/stop", body)

    async def change_type(self: Transport, /, name: str, **settings: Any) -> Document:
        """Changes settings of a task type, and returns the type as it is now.

        Args:
            name: name of the type.
            settings: fields of `task-type.schema.json` but `name` and `partitions`; None removes a
                limit.

        Raises:
            NotFound: there is no such type.
            Invalid: a setting is refused; `pointer` is the field at fault.
        """
        return await self._request("PATCH", f"/types/{quote(name, safe='')}", orjson.dumps(settings))

    async def keys(
        self: Transport,
        type: str,  # noqa: A002 (the platform's word for it)
        *,
        key: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Document]:
        """Concurrency keys of a type that have settings of their own: one `Key` document each.

        Args:
            type: name of the task type.
            key: only this concurrency key.
            limit: most concurrency keys; None is all.

        Raises:
            NotFound: there is no such type.
        """
        path = f"/types/{quote(type, safe='')}/keys"
        async for document in pages(self, path, "keys", query_of(key=key), limit, KEY_PAGE_SIZE):
            yield document

    async def change_key(self: Transport, /, type: str, key: str, **settings: Any) -> Document:  # noqa: A002 (the platform's word)
        """Pauses, weighs or limits a concurrency key, and returns its `Key` document.

        Args:
            type: name of the task type.
            key: the concurrency key, as in submissions.
            settings: `paused`, `weight` (1 to 1,000), `max_in_flight` (None is the type's limit).
                Other settings stay.

        Raises:
            NotFound: there is no such type.
            Invalid: a setting is refused; `pointer` is the field at fault.
        """
        body = orjson.dumps({"key": key, **settings})
        return await self._request("POST", f"/types/{quote(type, safe='')}/keys", body)

    async def reset_key(self: Transport, type: str, key: str) -> bool:  # noqa: A002 (the platform's word for it)
        """Removes the settings of a concurrency key; False when it had none.

        Raises:
            NotFound: there is no such type.
        """
        body = orjson.dumps({"key": key})
        answer = await self._request("POST", f"/types/{quote(type, safe='')}/keys/reset", body)
        return bool(answer["changed"])


async def follow_operation(
    transport: Transport,
    operation: Document,
    *,
    wait: bool,
    progress: Callable[[int], None] | None,
    begun: Callable[[str], None] | None,
) -> Operated:
    """The result of an operation once it has ended, or that of its dry run.

    Args:
        transport: sends the requests.
        operation: the answer to the request that began it.
        wait: see `OperationMethods.operate`, also below.
        progress: see there.
        begun: see there.
    """
    if operation.get("dry_run"):
        return Operated(
            None,
            None,
            operation["count"],
            operation["found_in"],
            complete=not operation["more"],
            examples=operation["examples"],
        )
    if begun is not None:
        begun(operation["id"])
    reported, pause_s = 0, 0.02
    while True:
        if progress is not None:
            progress(operation["changed"] - reported)
            reported = operation["changed"]
        if operation["state"] != "running" or not wait:
            return Operated(
                operation["id"],
                operation["state"],
                operation["changed"],
                operation["found_in"],
                complete=True,
                examples=[],
                error=operation["error"],
            )
        await asyncio.sleep(pause_s)
        pause_s = min(MAX_POLL_S, pause_s * 1.5)
        operation = await transport._request("GET", f"/operations/{operation['id']}")  # noqa: SLF001 (the protocol's own method)


def local_user() -> str:
    """The operator's name for the audit: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container the user may have a number but no name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
