"""What operators ask and say of types and keys, and of many tasks at once."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import quote

import orjson

from penstock.client.asking import Asking, Document, given, pages
from penstock.client.models import Operated, TaskFilter, priority_name
from penstock.core.operations import Verb
from penstock.core.task import Priority

LARGEST_OPERATION_PAGE = 500
LARGEST_KEY_PAGE = 500

# Between two questions how far an operation has come, in seconds; the first come faster.
ASK_EVERY_S = 1.0


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


def myself() -> str:
    """Who asks, for the audit, unless they say so themselves: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have a number and no name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
