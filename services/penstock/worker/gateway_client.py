"""The client of a gateway: translates answers to errors, and limits retries when refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Self

import aiohttp
import orjson

from penstock.concurrency.cancellation import own_cancellation
from penstock.core.delivery import parse_retry_after
from penstock.discovery import deployment_header
from penstock.errors import (
    GatewayUnavailable,
    PenstockError,
    SettingsError,
    Unavailable,
    UnknownType,
    reason_of,
)
from penstock.http.credentials import Credentials
from penstock.http.problems import error_of
from penstock.outgoing_http import LARGE_HEADS, as_given
from penstock.sockets import make_socket
from penstock.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

# Seconds of a long poll; the gateway allows 30.
WAIT_S = 20.0
# Seconds that an answer may take beyond the long poll.
ANSWER_S = 30.0
# Refusals that are further apart than this are not consecutive: one request and its answer take
# less.
REFUSAL_GAP_S = WAIT_S + ANSWER_S + 10.0
# Consecutive failures of requests after which all connections are opened anew (H6): a pooled one
# may lead to an address where no gateway is any more.
RECONNECT_AFTER = 3
# Upper bound of the `Retry-After` of a gateway, or of a proxy before it.
MAX_RETRY_AFTER_S = 30.0

HOLD_ROUTE = "/hold_task"
LOGS_ROUTE = "/logs"
# A route, and the type in the request.
Operation = tuple[str, str]

_NOT_ALLOWED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_NO_ROUTE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


def _is_hold_answer(answer: Mapping[str, Any], _entries: int) -> bool:
    # Only an answer with tasks has `claimed_ms_ago`.
    ago_ms = answer.get("claimed_ms_ago", 0)
    return isinstance(answer.get("tasks"), list) and isinstance(ago_ms, int | float) and ago_ms >= 0


def _is_set_answer(answer: Mapping[str, Any], entries: int) -> bool:
    lists = (answer.get("rejected"), answer.get("gone", []))
    return all(
        isinstance(indexed, list)
        and all(isinstance(entry, dict) and entry.get("index") in range(entries) for entry in indexed)
        for indexed in lists
    )


# By route, whether an answer has the members that a worker reads. The second argument is the number
# of entries sent.
_IS_ANSWER: Mapping[str, Callable[[Mapping[str, Any], int], bool]] = {
    HOLD_ROUTE: _is_hold_answer,
    "/set_task": _is_set_answer,
    LOGS_ROUTE: lambda _answer, _entries: True,
}


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Consecutive refusals of one operation.

    Attributes:
        first_s: when the first one came.
        last_s: when the last one came.
        forbidden: the refused header, when its key is valid but lacks the right; None when the key
            is not valid, which refuses all operations.
    """

    first_s: float
    last_s: float
    forbidden: Mapping[str, str] | None


class Refusals:
    """The operations that a gateway refuses now, and since when.

    The refusal of an operation ends with an answer to it, or when it was not requested for
    `REFUSAL_GAP_S` (nothing to report, no room, the gateway unavailable). An answer to another
    operation ends it, too, unless it was forbidden for the same header: the answer proves that the
    key is valid. An answer to a request from before the refusal ends nothing.

    Args:
        patience_s: seconds for which any operation may be refused.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._refusals: dict[Operation, _Refusal] = {}

    def add(self, operation: Operation, now_s: float, forbidden: Mapping[str, str] | None = None) -> float:
        """Records a refusal; returns the seconds until an operation exceeds `patience_s`.

        Args:
            operation: the operation.
            now_s: on a monotonic clock.
            forbidden: the header, when its key is valid but lacks the right; None when the key is
                not valid.
        """
        self._drop_old(now_s)
        refusal = self._refusals.get(operation)
        self._refusals[operation] = _Refusal(refusal.first_s if refusal else now_s, now_s, forbidden)
        return min(refusal.first_s for refusal in self._refusals.values()) + self._patience_s - now_s

    def on_accepted(self, operation: Operation, sent_s: float, header: Mapping[str, str]) -> bool:
        """Records an answer; returns whether no operation is refused now.

        Args:
            operation: the operation.
            sent_s: when its request was sent, on a monotonic clock.
            header: the header of the request.
        """
        self._drop_old(sent_s)
        self._refusals = {
            refused: refusal
            for refused, refusal in self._refusals.items()
            if refusal.last_s > sent_s or (refused != operation and refusal.forbidden == header)
        }
        return not self._refusals

    def _drop_old(self, now_s: float) -> None:
        self._refusals = {
            operation: refusal
            for operation, refusal in self._refusals.items()
            if now_s - refusal.last_s <= REFUSAL_GAP_S
        }


class GatewayClient:
    """Sends requests to a gateway, for the time of an `async with` block.

    Args:
        url: its address.
        credentials: of the worker; None is no credentials.
        patience_s: seconds for which the gateway may refuse them before the worker ends.
        on_accepted: called when the gateway starts to answer, and refuses no operation.
        on_refused: called when it starts to refuse an operation after that.
    """

    def __init__(
        self,
        url: str,
        credentials: Credentials | None = None,
        *,
        patience_s: float = 0.0,
        on_accepted: Callable[[], object] = lambda: None,
        on_refused: Callable[[], object] = lambda: None,
    ) -> None:
        self._url = url.rstrip("/")
        self._credentials = credentials or Credentials()
        self._session: aiohttp.ClientSession
        self._failures = 0
        # The address has answered as a gateway at least once.
        self._is_gateway = False
        self._refusals = Refusals(patience_s)
        self._accepted = False
        self._on_accepted = on_accepted
        self._on_refused = on_refused
        self._deployment = deployment_header(url)

    @classmethod
    def of(
        cls,
        settings: WorkerSettings,
        *,
        on_accepted: Callable[[], object] = lambda: None,
        on_refused: Callable[[], object] = lambda: None,
    ) -> GatewayClient:
        """The client of a worker's gateway, with its credentials."""
        return cls(
            settings.worker_gateway,
            Credentials(settings.api_key, settings.api_key_file),
            patience_s=settings.refused_timeout_s,
            on_accepted=on_accepted,
            on_refused=on_refused,
        )

    async def __aenter__(self) -> Self:
        self._session = _make_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> tuple[dict[str, Any], float]:
        """The JSON object of the answer, and when it began to arrive, on the loop's clock.

        Raises:
            Throttled: too many requests, or too much at once; nothing was done.
            GatewayUnavailable: no gateway answers, or the services behind it are unavailable.
            Unavailable: the gateway refuses this worker's credentials; that may change.
            SettingsError: the address never had such a route, or the gateway has refused this
                worker for `patience_s`.
            OtherDeployment: the gateway is not that of the directory's deployment.
            PenstockError: the gateway refuses the request.
        """
        operation = (path, str(body.get("type", "")))
        while True:
            header, sent_s = self._credentials.headers, asyncio.get_running_loop().time()
            sent = {**(headers or {}), **header}
            status, data, retry_after_s, arrived_s = await self._post(path, body, sent)
            if status not in _NOT_ALLOWED:
                break
            unusable_file = ""
            try:
                if self._credentials.refreshed(header):
                    continue
            except SettingsError as error:
                unusable_file = f"; {error}"
            forbidden = header if status == HTTPStatus.FORBIDDEN else None
            left_s = self._refusals.add(operation, arrived_s, forbidden)
            raise self._refusal_error(f"{error_of(status, data)}{unusable_file}", left_s)
        if status in (HTTPStatus.OK, HTTPStatus.ACCEPTED):
            answer = self._decode(path, data, len(body.get("results", ())))
            self._is_gateway = True
            self._record_accepted(operation, sent_s, header)
            return answer, arrived_s
        if status in _NO_ROUTE:
            # A gateway has both routes, so a proxy before it has lost its route for a moment.
            reason = f"no gateway answers at {self._url}: {path} is answered {status}"
            raise (
                GatewayUnavailable(reason)
                if self._is_gateway
                else SettingsError(f"PENSTOCK_WORKER_GATEWAY={self._url!r}: {reason}")
            )
        capped_s = None if retry_after_s is None else min(retry_after_s, MAX_RETRY_AFTER_S)
        gateway_error = error_of(status, data, capped_s)
        if isinstance(gateway_error, UnknownType):
            # The gateway looks a type up only after it has accepted the credentials.
            self._record_accepted(operation, sent_s, header)
        raise gateway_error

    async def _post(
        self, path: str, body: Mapping[str, Any], header: Mapping[str, str]
    ) -> tuple[int, bytes, float | None, float]:
        """Status and body of the answer, its `Retry-After` in seconds, and when it began."""
        headers = {**header, **self._deployment, "Content-Type": "application/json"}
        session = self._session
        try:
            url = as_given(self._url + path)
            # The failure of another request may close the session while this one resolves a name.
            with own_cancellation(_closed_by_another):
                async with session.post(url, data=orjson.dumps(body), headers=headers) as response:
                    arrived_s = asyncio.get_running_loop().time()
                    data = await response.read()
                    retry_after_s = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self._on_failure(session)
            raise GatewayUnavailable(
                f"no gateway answers at {self._url} (PENSTOCK_WORKER_GATEWAY): {reason_of(error)}"
            ) from error
        self._failures = 0
        return response.status, data, retry_after_s, arrived_s

    async def _on_failure(self, session: aiohttp.ClientSession) -> None:
        """Counts a failure of a session; replaces the session after `RECONNECT_AFTER` in a row."""
        if session is not self._session:
            return  # it is replaced already, which ended its requests
        self._failures += 1
        if self._failures < RECONNECT_AFTER:
            return
        log.warning(
            "Requests to the gateway failed repeatedly; opening new connections",
            extra={"event": "gateway_reconnected", "failures": self._failures, "url": self._url},
        )
        self._failures = 0
        self._session = _make_session()
        await session.close()

    def _record_accepted(self, operation: Operation, sent_s: float, header: Mapping[str, str]) -> None:
        # On any route: a worker without room pulls nothing, and only sends heartbeats.
        if self._refusals.on_accepted(operation, sent_s, header) and not self._accepted:
            self._accepted = True
            self._on_accepted()

    def _refusal_error(self, why: str, left_s: float) -> PenstockError:
        if self._accepted:
            self._accepted = False
            self._on_refused()
        key = "a key with the role worker that is valid for its types"
        source = self._credentials.source
        reason = f"the gateway at {self._url} refuses this worker ({why}): "
        if left_s <= 0:
            # A wrong setting: without a valid key the worker can pull and report nothing.
            return SettingsError(f"{reason}put {key} into {source}, then start the worker again")
        if self._credentials.needs_restart:
            action = f"start it again with {key} in {source}; otherwise the worker ends"
        else:
            action = f"put {key} into {source}, which is read before each request; otherwise the worker ends"
        return Unavailable(f"{reason}{action} in {left_s:.0f} s")

    def _decode(self, path: str, data: bytes, entries: int) -> dict[str, Any]:
        """Decodes an answer with status 200, which can also come from a proxy or a login page."""
        try:
            answer = orjson.loads(data)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict) or not _IS_ANSWER[path](answer, entries):
            excerpt = data[:200].decode(errors="replace")
            reason = f"no gateway answers at {self._url}: {path} is answered 200 with {excerpt!r}"
            raise GatewayUnavailable(reason)
        return answer


def _closed_by_another() -> aiohttp.ClientConnectionError:
    return aiohttp.ClientConnectionError("another request closed the connections")


def _make_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        # A gateway that has vanished would hold a long poll for the whole timeout.
        connector=aiohttp.TCPConnector(socket_factory=make_socket),
        timeout=aiohttp.ClientTimeout(total=WAIT_S + ANSWER_S),
        **LARGE_HEADS,
    )
