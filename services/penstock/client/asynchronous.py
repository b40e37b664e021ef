"""The asynchronous client."""

from __future__ import annotations

import asyncio
import io
import os
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import aiohttp
import orjson

import penstock
from penstock.client.backlog import BacklogMethods
from penstock.client.callbacks import CallbackMethods
from penstock.client.chunks import chunks, id_chunks, ids_text, shift_pointer
from penstock.client.models import Cancelled, Draft, SubmissionsRefused, Submitted, Task, submitted_of
from penstock.client.operations import OperationMethods
from penstock.client.transport import DEFAULT_URL, Query, base_url, pages, query_of
from penstock.client.types import TypeMethods
from penstock.core.delivery import parse_retry_after
from penstock.core.retry import RetryPolicy
from penstock.core.task import FINAL, Priority
from penstock.discovery import deployment_header, local_environment
from penstock.errors import (
    GatewayUnavailable,
    Invalid,
    InvalidRecord,
    NotFound,
    PenstockError,
    SettingsError,
    Throttled,
    Unauthenticated,
    reason_of,
)
from penstock.http.credentials import Credentials
from penstock.http.problems import error_of, relocated
from penstock.sockets import make_socket

# The gateway's limit.
TASK_PAGE_SIZE = 500

_REPETITION = RetryPolicy(base_s=0.1, factor=2, max_s=2.0, jitter=0.5)


class Client(OperationMethods, CallbackMethods, BacklogMethods, TypeMethods):
    """A connection to a gateway for the time of an `async with` block.

    Args:
        url: address of the gateway. None is PENSTOCK_GATEWAY, or else the deployment that `penstock
            up` runs in PENSTOCK_DATA_DIR or `.penstock`, or else `http://127.0.0.1:8420`.
        patience_s: how long the client repeats a request that is safe to repeat, in seconds; 0
            never repeats.
        timeout_s: longest time of one request, in seconds.
        own_keys: give each submission without an idempotency key a random one, so that it is safe
            to repeat.
        api_key: API key or bearer token of every request. None is PENSTOCK_API_KEY, or else the
            content of the file PENSTOCK_API_KEY_FILE. The client reads the file again when a
            gateway rejects the API key.
        data_dir: of the deployment that runs at `url`; None is PENSTOCK_DATA_DIR or `.penstock`.

    Raises:
        SettingsError: the API key is empty, its file cannot be read, the address is no http:// or
            https:// URL, no deployment runs in PENSTOCK_DATA_DIR, or the deployment in `.penstock`
            is stopped.

    Every method can raise these errors:
        Unauthenticated: the API key is not valid.
        OtherDeployment: another gateway answers at the address of the deployment in `data_dir`.
        Forbidden: the API key does not allow the request.
        GatewayUnavailable: the gateway, or a server that it needs, did not answer.
        Throttled: the gateway refused the request for longer than `patience_s`, because it is
            overloaded.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        patience_s: float = 10.0,
        timeout_s: float = 60.0,
        own_keys: bool = True,
        api_key: str | None = None,
        data_dir: Path | None = None,
    ) -> None:
        self.url = base_url(
            url
            or os.environ.get("PENSTOCK_GATEWAY")
            or local_environment().get("PENSTOCK_GATEWAY")
            or DEFAULT_URL
        )
        self._deployment = deployment_header(self.url, data_dir)
        self._patience_s = patience_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._generates_keys = own_keys
        self._credentials = Credentials.from_environment() if api_key is None else Credentials(api_key)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {"User-Agent": f"penstock-client/{penstock.__version__}", **self._deployment}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=make_socket),
            timeout=self._timeout,
            headers=headers,
        )
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
        """Submits one task; `Draft` documents the arguments.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
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
        wire, generated = self._with_idempotency_key(draft)
        answer = await self._request("POST", "/tasks", orjson.dumps(wire), safe="idempotency_key" in wire)
        return Submitted(answer["id"], created=generated or answer["created"])

    async def submit_many(
        self,
        drafts: Iterable[Draft | Mapping[str, Any]],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[Submitted]:
        """Submits any number of tasks, in requests of at most 500.

        The gateway judges each task alone: a faulty one does not stop the others.

        Args:
            drafts: `Draft`s, or JSON objects of `submitted.schema.json`.
            progress: called after each request with the number of its drafts.

        Returns:
            The tasks in the order of `drafts`.

        Raises:
            Invalid: none is submitted.
            SubmissionsRefused: some are refused, and all others are submitted. The pointer of each
                fault begins with the position in `drafts`.
        """
        submitted: list[Submitted | None] = []
        faults: list[Invalid] = []
        for chunk in chunks(self._with_idempotency_key(draft) for draft in drafts):
            body = b"[" + b",".join(entry.data for entry in chunk) + b"]"
            safe = all(entry.repeatable for entry in chunk)
            before = len(submitted)
            try:
                answer = await self._request("POST", "/tasks", body, safe=safe)
            except Invalid as error:
                # No task of this request is submitted.
                faults.append(relocated(error, lambda pointer: shift_pointer(pointer, before)))  # noqa: B023 (used at once)
                submitted += [None] * len(chunk)
            else:
                for task, entry in zip(answer["tasks"], chunk, strict=True):
                    submitted.append(submitted_of(task, generated=entry.generated))
                    faults += [
                        InvalidRecord(each["detail"], pointer=shift_pointer(each["pointer"], before))
                        for each in task.get("errors", ())
                    ]
            if progress is not None:
                progress(len(chunk))
        if faults:
            raise SubmissionsRefused.of(faults, submitted)
        return [task for task in submitted if task is not None]

    async def get(self, task_id: int) -> Task:
        """One task with its context, result and attempts.

        Raises:
            NotFound: no task has this id.
        """
        return Task.from_wire(await self._request("GET", f"/tasks/{task_id}"))

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
        """Tasks that match all filters, newest first.

        Args:
            type: task type.
            state: one state or several.
            stage: current stage, or the last one.
            key: concurrency key.
            labels: labels that the task has, with these values.
            idempotency_key: idempotency key.
            limit: most tasks; None is all.
        """
        query = query_of(type=type, stage=stage, key=key, idempotency_key=idempotency_key)
        query += [("state", name) for name in ([state] if isinstance(state, str) else state)]
        query += [("label", f"{name}:{value}") for name, value in (labels or {}).items()]
        async for document in pages(self, "/tasks", "tasks", query, limit, TASK_PAGE_SIZE):
            yield Task.from_wire(document)

    async def cancel(self, ids: Iterable[int]) -> Cancelled:
        """Cancels the tasks that have not ended."""
        total = Cancelled([], [], [])
        for chunk in id_chunks([*ids]):
            answer = await self._request("POST", "/tasks/cancel", orjson.dumps({"ids": chunk}))
            total = Cancelled(
                [*total.cancelled, *answer["cancelled"]],
                [*total.unchanged, *answer["unchanged"]],
                [*total.unknown, *answer["unknown"]],
            )
        return total

    async def states(self, ids: Iterable[int]) -> dict[str, int]:
        """The number of tasks by state; unknown ids are not counted."""
        return (await self._states(ids))[0]

    async def _states(self, ids: Iterable[int]) -> tuple[dict[str, int], Sequence[int]]:
        """The number of tasks by state, and the unknown ids."""
        counts: dict[str, int] = {}
        unknown: list[int] = []
        for chunk in id_chunks([*ids]):
            answer = await self._request("POST", "/tasks/states", orjson.dumps({"ids": chunk}))
            # A gateway of an earlier release does not name them.
            unknown += answer.get("unknown", ())
            for state, count in answer["states"].items():
                counts[state] = counts.get(state, 0) + count
        return counts, unknown

    async def watch(self, ids: Iterable[int], *, every_s: float = 1.0) -> AsyncIterator[dict[str, int]]:
        """Yields the counts by state at once and after each change, until all tasks have ended.

        Args:
            ids: ids of the tasks.
            every_s: longest time between two polls, in seconds. The first polls come faster.

        Raises:
            NotFound: one of the ids is unknown.
        """
        unique = set(ids)
        pause_s = min(0.05, every_s)
        last: dict[str, int] | None = None
        while unique:
            counts, unknown = await self._states(unique)
            if missing := len(unique) - sum(counts.values()):
                raise NotFound(f"there is no task {ids_text(unknown) or f'for {missing} of the ids'}")
            if counts != last:
                yield counts
                last = counts
            if set(counts) <= FINAL:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(every_s, pause_s * 1.5)

    async def wait(self, ids: Iterable[int], *, timeout_s: float | None = None) -> dict[str, int]:
        """Waits until all tasks have ended, and returns the counts by state.

        Raises:
            NotFound: one of the ids is unknown.
            TimeoutError: a task has not ended within `timeout_s` seconds.
        """
        counts: dict[str, int] = {}
        async with asyncio.timeout(timeout_s):
            async for counts in self.watch(ids):  # noqa: B007 (the last one is the answer)
                pass
        return counts

    def _with_idempotency_key(self, draft: Draft | Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """The JSON object of the submission, and whether its idempotency key was generated here."""
        wire = draft.to_wire() if isinstance(draft, Draft) else dict(draft)
        if "idempotency_key" in wire or not self._generates_keys:
            return wire, False
        wire["idempotency_key"] = f"auto-{uuid.uuid4().hex}"
        return wire, True

    async def _request(
        self, method: str, path: str, body: bytes | None = None, *, query: Query = (), safe: bool = True
    ) -> dict[str, Any]:
        """Sends a request, and repeats it while the gateway does not answer.

        Args:
            method: HTTP method.
            path: path with its leading slash.
            body: JSON.
            query: query parameters.
            safe: a repetition has no effect beyond the first request.

        Raises:
            PenstockError: the error of the answer's problem document.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        failures = 0
        while True:
            credentials = self._credentials.headers
            try:
                return await self._send(method, path, body, query, credentials)
            except Unauthenticated as error:
                # The gateway did nothing. Repeat the request only if the file has another API key
                # by now.
                try:
                    if not self._credentials.refreshed(credentials):
                        raise
                except SettingsError as unreadable:
                    raise Unauthenticated(f"{error}; {unreadable}") from unreadable
                continue
            except GatewayUnavailable as error:
                failures += 1
                delay_s = _REPETITION.delay_s(failures, random.random())  # noqa: S311 (jitter)
                never_sent = isinstance(error.__cause__, aiohttp.ClientConnectorError)
                if not (safe or never_sent) or loop.time() + delay_s > deadline:
                    raise
            except Throttled as error:
                # The gateway did nothing, so every request is safe to repeat.
                delay_s = error.retry_after_s
                if loop.time() + delay_s > deadline:
                    raise
            await asyncio.sleep(delay_s)

    async def _send(
        self, method: str, path: str, body: bytes | None, query: Query, credentials: Mapping[str, str]
    ) -> dict[str, Any]:
        assert self._session is not None, "use the client in an `async with` block"
        headers = {**credentials, "Content-Type": "application/json"} if body is not None else credentials
        try:
            async with self._session.request(
                method,
                self.url + path,
                params=list(query),
                data=None if body is None else io.BytesIO(body),
                headers=headers,
            ) as response:
                data = await response.read()
                status = response.status
                retry_after_s = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise GatewayUnavailable(f"no gateway answers at {self.url} ({reason_of(error)})") from error
        except aiohttp.ClientError as error:
            raise PenstockError(
                f"the request to {self.url} failed: {error}; check the gateway's address"
            ) from error
        if status >= 400:
            raise error_of(status, data, retry_after_s)
        try:
            answer: dict[str, Any] = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise PenstockError(
                f"the server at {self.url} is no Penstock gateway: it did not answer with JSON; check the address"
            ) from error
        return answer
