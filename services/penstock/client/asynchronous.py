"""The asynchronous client."""

from __future__ import annotations

import asyncio
import io
import os
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import orjson

import penstock
from penstock.client.callbacks import Delivering
from penstock.client.chunks import chunks, moved, parts
from penstock.client.models import Cancelled, Draft, Submitted, Task
from penstock.client.operating import Operating
from penstock.client.waiting import Waiting
from penstock.core.delivery import parse_retry_after
from penstock.core.retry import RetryPolicy
from penstock.core.task import FINAL, Priority
from penstock.discovery import local_environment
from penstock.errors import (
    GatewayUnavailable,
    Invalid,
    NotFound,
    PenstockError,
    SettingsError,
    Throttled,
    Unauthenticated,
)
from penstock.http.problems import error_of, relocated
from penstock.http.tokens import Credentials

DEFAULT_URL = "http://127.0.0.1:8420"

# The gateway's limit.
LARGEST_PAGE = 500

_BETWEEN_TRIES = RetryPolicy(base_s=0.1, factor=2, max_s=2.0, jitter=0.5)


class Client(Operating, Delivering, Waiting):
    """Speaks with a gateway, for the time of an `async with` block.

    Args:
        url: the gateway's address; by default PENSTOCK_GATEWAY, else that of the `penstock up` which runs in
            PENSTOCK_DATA_DIR or `.penstock`, else `http://127.0.0.1:8420`.
        patience_s: for how long a request that is safe to repeat is repeated, in seconds; 0 never repeats.
        timeout_s: seconds one request may take.
        own_keys: give submissions without an idempotency key a random one, so that they are safe to repeat.
        api_key: an API key or bearer token, sent with every request; by default PENSTOCK_API_KEY, or what is in the file
            PENSTOCK_API_KEY_FILE, which is read again when a gateway answers that it does not know the key.

    Raises:
        SettingsError: the key is none, its file cannot be read, the address is no http:// or https:// URL, or nothing runs in PENSTOCK_DATA_DIR.

    Every method raises `Unauthenticated` when the key is not valid, `Forbidden` when it does not allow this, `GatewayUnavailable`
    when no gateway or nothing behind it answers, and `Throttled` when there is too much to do for longer than `patience_s`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        patience_s: float = 10.0,
        timeout_s: float = 60.0,
        own_keys: bool = True,
        api_key: str | None = None,
    ) -> None:
        self.url = _base(
            url
            or os.environ.get("PENSTOCK_GATEWAY")
            or local_environment().get("PENSTOCK_GATEWAY")
            or DEFAULT_URL
        )
        self._patience_s = patience_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._own_keys = own_keys
        self._credentials = Credentials.from_environment() if api_key is None else Credentials(api_key)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        named = {"User-Agent": f"penstock-client/{penstock.__version__}"}
        self._session = aiohttp.ClientSession(timeout=self._timeout, headers=named)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def submit(
        self,
        type: str,  # noqa: A002 (the platform's word for it)
        context: Any = None,
        *,
        stage: str | None = None,
        priority: Priority | str = Priority.MEDIUM,
        key: str | None = None,
        idempotency_key: str | None = None,
        run_at: datetime | None = None,
        callbacks: Sequence[str | Mapping[str, Any]] | None = None,
        events: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Submitted:
        """Submits one task; see `Draft` for what each argument means.

        Raises:
            Invalid: refused; `pointer` tells which field.
        """
        draft = Draft(
            type=type,
            context=context,
            stage=stage,
            priority=priority,
            key=key,
            idempotency_key=idempotency_key,
            run_at=run_at,
            callbacks=callbacks,
            events=events,
            labels=labels or {},
        )
        wire, ours = self._keyed(draft)
        found = await self._ask("POST", "/tasks", orjson.dumps(wire), safe="idempotency_key" in wire)
        # Under a key of ours that no other call has, even an answer to a repetition means that we created it.
        return Submitted(found["id"], created=ours or found["created"])

    async def submit_many(
        self,
        drafts: Iterable[Draft | Mapping[str, Any]],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[Submitted]:
        """Submits any number of tasks, in requests of at most 500; returns them in the order given.

        Each request is inserted whole or not at all. When one is refused, those before it stay submitted.

        Args:
            drafts: `Draft`s, or objects as of `submitted.schema.json`.
            progress: told after each request how many tasks it submitted.

        Raises:
            Invalid: refused; `pointer` begins with the position in `drafts`.
        """
        submitted: list[Submitted] = []
        for chunk in chunks(self._keyed(draft) for draft in drafts):
            body = b"[" + b",".join(data for data, _, _ in chunk) + b"]"
            safe = all(keyed for _, keyed, _ in chunk)
            try:
                found = await self._ask("POST", "/tasks", body, safe=safe)
            except Invalid as error:
                before = len(submitted)
                raise relocated(error, lambda pointer: moved(pointer, before)) from None  # noqa: B023 (used at once)
            submitted += [
                Submitted(task["id"], created=ours or task["created"])
                for task, (_, _, ours) in zip(found["tasks"], chunk, strict=True)
            ]
            if progress is not None:
                progress(len(chunk))
        return submitted

    async def get(self, task_id: int) -> Task:
        """One task, with context, result and attempts.

        Raises:
            NotFound: no task has this id.
        """
        return Task.from_wire(await self._ask("GET", f"/tasks/{task_id}"))

    async def list(
        self,
        *,
        type: str | None = None,  # noqa: A002 (the platform's word for it)
        state: str | Sequence[str] = (),
        stage: str | None = None,
        key: str | None = None,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Task]:
        """Tasks, newest first, that match all filters; at most `limit`, by default all of them."""
        named = (("type", type), ("stage", stage), ("key", key))
        query = [(name, value) for name, value in named if value is not None]
        query += [("state", one) for one in ([state] if isinstance(state, str) else state)]
        query += [("label", f"{name}:{value}") for name, value in (labels or {}).items()]
        if idempotency_key is not None:
            query.append(("idempotency_key", idempotency_key))
        left = limit
        cursor: list[tuple[str, str]] = []
        while left is None or left > 0:
            size = LARGEST_PAGE if left is None else min(left, LARGEST_PAGE)
            page = await self._ask("GET", "/tasks", query=[*query, *cursor, ("limit", str(size))])
            for raw in page["tasks"]:
                yield Task.from_wire(raw)
            if left is not None:
                left -= len(page["tasks"])
            if page["next"] is None:
                return
            cursor = [("cursor", page["next"])]

    async def cancel(self, ids: Iterable[int]) -> Cancelled:
        """Cancels those of the tasks that have not ended; tells what became of each id."""
        told = Cancelled([], [], [])
        for some in parts([*ids]):
            found = await self._ask("POST", "/tasks/cancel", orjson.dumps({"ids": some}))
            told = Cancelled(
                [*told.cancelled, *found["cancelled"]],
                [*told.unchanged, *found["unchanged"]],
                [*told.unknown, *found["unknown"]],
            )
        return told

    async def states(self, ids: Iterable[int]) -> dict[str, int]:
        """How many of the tasks are in which state; unknown ids count nowhere."""
        counts: dict[str, int] = {}
        for some in parts([*ids]):
            found = await self._ask("POST", "/tasks/states", orjson.dumps({"ids": some}))
            for state, count in found["states"].items():
                counts[state] = counts.get(state, 0) + count
        return counts

    async def watch(self, ids: Iterable[int], *, every_s: float = 1.0) -> AsyncIterator[dict[str, int]]:
        """The counts by state, now and whenever they have changed, until all tasks have ended.

        Args:
            ids: which tasks.
            every_s: longest time between two questions, in seconds; the first come faster.

        Raises:
            NotFound: some of the ids are no task's.
        """
        wanted = set(ids)
        pause_s = min(0.05, every_s)
        last: dict[str, int] | None = None
        while wanted:
            counts = await self.states(wanted)
            missing = len(wanted) - sum(counts.values())
            if missing:
                raise NotFound(f"{missing} of the {len(wanted)} ids are no task's")
            if counts != last:
                yield counts
                last = counts
            if set(counts) <= FINAL:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(every_s, pause_s * 1.5)

    async def wait(self, ids: Iterable[int], *, timeout_s: float | None = None) -> dict[str, int]:
        """Waits until all tasks have ended; returns the counts by state.

        Raises:
            NotFound: some of the ids are no task's.
            TimeoutError: they have not within `timeout_s` seconds.
        """
        counts: dict[str, int] = {}
        async with asyncio.timeout(timeout_s):
            async for counts in self.watch(ids):  # noqa: B007 (the last one is the answer)
                pass
        return counts

    async def types(self) -> Sequence[Mapping[str, Any]]:
        """All task types, as of `task-type.schema.json`."""
        found: Sequence[Mapping[str, Any]] = (await self._ask("GET", "/types"))["types"]
        return found

    async def owners(self) -> Mapping[str, str | None]:
        """By type which process of task-sync releases its tasks, as host and process id; None where none does now."""
        found: Sequence[Mapping[str, Any]] = (await self._ask("GET", "/owners"))["owners"]
        return {one["type"]: one["process"] for one in found}

    async def register_type(self, name: str, **settings: Any) -> Mapping[str, Any]:
        """Registers a task type, or changes it; what is left out gets its default. Returns it as it is now.

        Args:
            name: letters, digits, `_` and `-`.
            settings: fields of `task-type.schema.json`.

        Raises:
            Invalid: refused; `pointer` tells which field.
            Conflict: the number of partitions of a type cannot be changed.
        """
        return await self._ask("POST", "/types", orjson.dumps({"name": name, **settings}))

    def _keyed(self, draft: Draft | Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The object to send, and whether its key is ours."""
        wire = draft.to_wire() if isinstance(draft, Draft) else dict(draft)
        if "idempotency_key" in wire or not self._own_keys:
            return wire, False
        wire["idempotency_key"] = f"auto-{uuid.uuid4().hex}"
        return wire, True

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        query: Sequence[tuple[str, str]] = (),
        safe: bool = True,
    ) -> dict[str, Any]:
        """Sends a request until it is answered, if it is safe to repeat.

        Raises:
            PenstockError: what the answer's problem document says.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        tries = 0
        while True:
            sent = self._credentials.headers
            try:
                return await self._ask_once(method, path, body, query, sent)
            except Unauthenticated as error:
                # Nothing of it was done. The file may hold another key by now; a key that is in no file stays as it is.
                try:
                    if not self._credentials.renewed(sent):
                        raise
                except SettingsError as wrong:
                    raise Unauthenticated(f"{error}; {wrong}") from wrong
                continue
            except GatewayUnavailable as error:
                tries += 1
                delay_s = _BETWEEN_TRIES.delay_s(tries, random.random())  # noqa: S311 (jitter)
                never_sent = isinstance(error.__cause__, aiohttp.ClientConnectorError)
                if not (safe or never_sent) or loop.time() + delay_s > deadline:
                    raise
            except Throttled as error:
                # Nothing of it was done.
                delay_s = error.retry_after_s
                if loop.time() + delay_s > deadline:
                    raise
            await asyncio.sleep(delay_s)

    async def _ask_once(
        self,
        method: str,
        path: str,
        body: bytes | None,
        query: Sequence[tuple[str, str]],
        sent: Mapping[str, str],
    ) -> dict[str, Any]:
        assert self._session is not None, "use the client in a `with` block"
        try:
            async with self._session.request(
                method,
                self.url + path,
                params=list(query),
                data=None if body is None else io.BytesIO(body),
                headers={**sent, "Content-Type": "application/json"} if body is not None else sent,
            ) as response:
                data = await response.read()
                status = response.status
                wait_s = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise GatewayUnavailable(f"no gateway answers at {self.url} ({why})") from error
        except aiohttp.ClientError as error:
            raise PenstockError(f"cannot ask {self.url}: {error}") from error
        if status >= 400:
            raise error_of(status, data, wait_s)
        try:
            found: dict[str, Any] = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise PenstockError(f"what answers at {self.url} is no Penstock gateway") from error
        return found


def _base(url: str) -> str:
    """An address without the slash at its end.

    Raises:
        SettingsError: no http:// or https:// URL.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise SettingsError(
            f"gateway={url!r} is not a URL: set PENSTOCK_GATEWAY (or --gateway) to http://HOST:PORT, "
            f"such as {DEFAULT_URL}"
        )
    return url.rstrip("/")
