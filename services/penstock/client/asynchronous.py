"""The asynchronous client: its connection, its requests, and the methods of tasks.

One module, because those methods and the requests are most of what a reader looks for; all other
methods have modules of their own.
"""

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
from penstock.client.arguments import encode_moment
from penstock.client.backlog import BacklogMethods
from penstock.client.batches import submit_all
from penstock.client.callback_secrets import CallbackSecretMethods
from penstock.client.callbacks import CallbackMethods
from penstock.client.checked import checked
from penstock.client.chunks import id_chunks
from penstock.client.flow_operations import FlowOperationMethods
from penstock.client.flow_submission import FlowDraft, FlowSubmissionMethods
from penstock.client.logs import LogMethods
from penstock.client.models import Cancelled, Draft, Submitted, Task
from penstock.client.operations import OperationMethods
from penstock.client.results import ResultMethods
from penstock.client.schedules import ScheduleMethods
from penstock.client.transport import DEFAULT_URL, Query, base_url, pages, query_of
from penstock.client.types import TypeMethods
from penstock.client.waits import WaitMethods
from penstock.core.delivery import parse_retry_after
from penstock.core.retry import RetryPolicy
from penstock.core.task import Priority
from penstock.discovery import deployment_header, local_environment
from penstock.errors import (
    GatewayUnavailable,
    PenstockError,
    SettingsError,
    Throttled,
    Unauthenticated,
    reason_of,
)
from penstock.http.credentials import Credentials
from penstock.http.problems import error_of
from penstock.outgoing_http import LARGE_HEADS, as_given
from penstock.sockets import make_socket

# The gateway's limit.
TASK_PAGE_SIZE = 500

# Requests that the gateway may hold at a time, so that connections for other requests are left.
MAX_HELD = 50

_REPETITION = RetryPolicy(base_s=0.1, factor=2, max_s=2.0, jitter=0.5)


@checked
class Client(
    OperationMethods,
    FlowOperationMethods,
    FlowSubmissionMethods,
    ScheduleMethods,
    CallbackMethods,
    CallbackSecretMethods,
    BacklogMethods,
    TypeMethods,
    WaitMethods,
    ResultMethods,
    LogMethods,
):
    """A connection to a gateway for the time of an `async with` block.

    A forked child opens its own client: the methods of one that its parent has opened raise
    RuntimeError there.

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
        self._longest_hold_s = int(timeout_s / 2)
        self._generates_keys = own_keys
        self._credentials = Credentials.from_environment() if api_key is None else Credentials(api_key)
        self._session: aiohttp.ClientSession | None = None
        self._process = 0
        # `SyncClient` replaces them by its own.
        self._read_result: Callable[..., Any] = self.result
        self._read_output: Callable[..., Any] = self.flow_output
        self._held = 0

    async def __aenter__(self) -> Self:
        # In a forked child, requests of the parent's threads do not count.
        self._process, self._held = os.getpid(), 0
        headers = {"User-Agent": f"penstock-client/{penstock.__version__}", **self._deployment}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=make_socket),
            timeout=self._timeout,
            headers=headers,
            **LARGE_HEADS,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None and self._process == os.getpid():
            await self._session.close()
            self._session = None

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use the client in an `async with` block"
        if self._process != os.getpid():
            raise RuntimeError(
                "the client was opened in another process: open one in this process, after the fork"
            )
        return self._session

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
        return Submitted(answer["id"], created=generated or answer["created"], read_result=self._read_result)

    async def submit_and_wait(
        self,
        /,
        type: str,  # noqa: A002 (the platform's word for it)
        context: Any = None,
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Task:
        """Submits one task, waits until it has ended, and returns it with its result.

        Args:
            type: task type.
            context: input of the first stage.
            timeout_s: longest wait for the end, in seconds.
            fields: the other arguments of `submit`.

        Raises:
            Invalid: the submission is refused; `pointer` is the field at fault.
            TimeoutError: it has not ended within `timeout_s` seconds; it goes on.
        """
        submitted = await self.submit(type, context, **fields)
        [task] = await self.results([submitted.id], timeout_s=timeout_s)
        return task

    async def submit_many(
        self,
        drafts: Iterable[Draft | Mapping[str, Any]],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[Submitted]:
        """Submits any number of tasks, in requests of at most 500.

        The gateway judges each task alone: a faulty one does not stop the others. The client
        repeats those that wait for the object store and have an idempotency key, for `patience_s`
        seconds. Then they count as refused.

        Args:
            drafts: `Draft`s, or JSON objects of `submitted.schema.json`.
            progress: called after each request with the number of its drafts.

        Returns:
            The tasks in the order of `drafts`.

        Raises:
            Invalid: none is submitted.
            SubmissionsRefused: some are refused, or wait for the object store, and all others are
                submitted. The pointer of each fault begins with the position in `drafts`.
        """
        return await submit_all(
            self, "tasks", drafts, self._with_idempotency_key, self._patience_s, progress, self._read_result
        )

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
        flow: int | None = None,
        since: datetime | None = None,
        error: str | None = None,
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
            flow: id of the flow that they belong to.
            since: created at this moment or later; a naive moment is local time.
            error: text in their error "kind: message", in upper or lower case; "" is any error.
            limit: most tasks; None is all.
        """
        query = query_of(
            type=type,
            stage=stage,
            key=key,
            idempotency_key=idempotency_key,
            flow=flow,
            since=encode_moment(since, "since"),
            error=error,
        )
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

    def _with_idempotency_key(
        self, draft: Draft | FlowDraft | Mapping[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """The JSON object of the submission, and whether its idempotency key was generated here."""
        wire = draft.to_wire() if isinstance(draft, Draft | FlowDraft) else dict(draft)
        if "idempotency_key" in wire or not self._generates_keys:
            return wire, False
        wire["idempotency_key"] = f"auto-{uuid.uuid4().hex}"
        return wire, True

    async def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        query: Query = (),
        safe: bool = True,
        wait_s: int = 0,
    ) -> dict[str, Any]:
        """Sends a request, and repeats it while the gateway does not answer.

        Args:
            method: HTTP method.
            path: path with its leading slash.
            body: JSON.
            query: query parameters.
            safe: a repetition has no effect beyond the first request.
            wait_s: how long the gateway may hold the request until what it asks for has ended.

        Raises:
            PenstockError: the error of the answer's problem document.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        failures = 0
        while True:
            credentials = self._credentials.headers
            try:
                if not wait_s or self._held >= MAX_HELD:
                    return await self._send(method, path, body, query, credentials)
                self._held += 1
                try:
                    headers = {**credentials, "Prefer": f"wait={min(wait_s, self._longest_hold_s)}"}
                    return await self._send(method, path, body, query, headers)
                finally:
                    self._held -= 1
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

    async def _lines(
        self, path: str, query: Query = (), headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[bytes]:
        """The lines of an answer as they arrive, without their line feeds.

        Raises:
            GatewayUnavailable: no gateway answers, or the answer has broken off.
            PenstockError: the error of the answer's problem document.
        """
        session = self._open_session
        try:
            async with session.get(
                as_given(self.url + path),
                params=list(query),
                headers={**self._credentials.headers, **(headers or {})},
                # The gateway sends something every 15 seconds.
                timeout=aiohttp.ClientTimeout(total=None, sock_read=60.0),
            ) as response:
                if response.status >= 400:
                    raise error_of(response.status, await response.read(), None)
                rest = b""
                async for data in response.content.iter_any():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        if line:
                            yield line
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise GatewayUnavailable(f"no gateway answers at {self.url} ({reason_of(error)})") from error

    async def _send(
        self, method: str, path: str, body: bytes | None, query: Query, credentials: Mapping[str, str]
    ) -> dict[str, Any]:
        session = self._open_session
        headers = {**credentials, "Content-Type": "application/json"} if body is not None else credentials
        try:
            async with session.request(
                method,
                as_given(self.url + path),
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
