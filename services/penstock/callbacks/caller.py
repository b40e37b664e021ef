"""Signs a callback, calls its target over HTTP, and turns aiohttp's errors into results.

Guarantees, however a target behaves: a call ends within its timeout, holds a few kilobytes at most,
follows no redirect, uses no proxy and keeps no cookie. It raises no error that a target caused. The
URL is sent as it was given (`outgoing_http`). `connections` says which answers count, and when a
request is sent a second time.

It connects only to public and allowed addresses (`egress`). A forbidden address is a failed attempt
and retried by the schedule, because names change their addresses, and operators change what they
allow. aiohttp rejects a URL whose host is a number in an odd spelling (127.1, 2130706433); such a
callback is dead at once.

The result of a call is stored and shown to operators. It contains only host and port of the URL,
none of the headers that were sent, and no forbidden address.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver

from penstock import __version__, tracing
from penstock.callbacks import egress
from penstock.callbacks.connections import Request, UnreadableAnswer, send_on_live_connection
from penstock.callbacks.egress import ForbiddenAddress
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.signing import SigningKey, UnusableSecrets, signed_headers
from penstock.concurrency.timeout_queue import Deadlines
from penstock.contracts.event import Callback, origin_of
from penstock.core.delivery import parse_retry_after
from penstock.core.target import TargetId
from penstock.outgoing_http import as_given, host_header

EXCERPT_BYTES = 1024
# Longest wait for the body: the status decides the outcome, and the excerpt is only for operators.
EXCERPT_TIMEOUT_S = 1.0
# The wait ends this long before the deadline; at the deadline an answered call would count as
# unanswered.
_EXCERPT_MARGIN_S = 0.1
# Masking shorter values would mask ordinary words of any answer.
_SHORTEST_SECRET = 6
# Longer messages of exceptions are cut.
_MESSAGE_CHARACTERS = 300

# PostgreSQL and terminals do not accept these control characters.
_UNPRINTABLE = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 127], "\N{REPLACEMENT CHARACTER}")


# Finds the keys that sign for a target; it raises `UnusableSecrets`.
KeysOf = Callable[[TargetId], Awaitable[Sequence[SigningKey]]]


# Not frozen: there is one per call, and freezing costs time.
@dataclass(slots=True)
class CallResult:
    """The result of a call.

    Attributes:
        took_s: duration in seconds.
        kind: `HTTP` when the target answered; else `Timeout`, `Forbidden`, `Connection`,
            `Protocol`, `Target`, `Secret` (no secret to sign with) or the name of an exception.
        message: one sentence.
        status: HTTP status of the answer; None without one.
        retry_after_s: the target's Retry-After in seconds; None without one.
        excerpt: beginning of the answer's body.
        callable_target: False when the URL can never be called.
        called: False when there was no secret to sign with, so that no request was made.
    """

    took_s: float
    kind: str
    message: str
    status: int | None = None
    retry_after_s: float | None = None
    excerpt: str | None = None
    callable_target: bool = True
    called: bool = True

    def to_wire(self) -> dict[str, Any]:
        """The `error` of `callback-dead.schema.json`."""
        return {
            "kind": self.kind,
            "message": self.message,
            "status": self.status,
            "excerpt": self.excerpt,
        }


class Caller:
    """Calls targets over one shared session; made by `open_caller`.

    Args:
        session: see `open_caller`.
        keys_of: finds the keys that sign.
        timeout_s: of a whole call, including the answer.
    """

    def __init__(self, session: aiohttp.ClientSession, keys_of: KeysOf, timeout_s: float) -> None:
        self._session = session
        self._keys_of = keys_of
        self._timeout_s = timeout_s
        self._deadlines = Deadlines(timeout_s)
        self._clock: Callable[[], float] = asyncio.get_running_loop().time

    def call(self, callback: Callback) -> Awaitable[CallResult]:
        """Makes one attempt when awaited, within the timeout."""
        headers = callback.headers or {}
        parent = headers.get(tracing.TRACEPARENT)
        if parent is None:
            return self._call(callback, headers)
        return self._call_traced(callback, headers, parent)

    async def _call_traced(self, callback: Callback, headers: Mapping[str, str], parent: str) -> CallResult:
        with tracing.span(
            "callback",
            parent,
            kind="client",
            task_id=callback.task_id,
            callback=callback.id,
            target=origin_of(callback.target.url),
            attempt=callback.attempt + 1,
        ) as span:
            if span is None:
                # Tracing is off: the target receives the parent span.
                return await self._call(callback, headers)
            result = await self._call(callback, {**headers, tracing.TRACEPARENT: span.traceparent})
            span.set_attributes(status=result.status or 0)
            if result.status is None or result.status >= HTTPStatus.BAD_REQUEST:
                span.fail(result.kind if result.status is None else f"HTTP {result.status}")
            return result

    async def _call(self, callback: Callback, headers: Mapping[str, str]) -> CallResult:
        try:
            keys = await self._keys_of(callback.target)
        except UnusableSecrets as error:
            # Never with a wider secret, which receivers of other targets have too.
            return CallResult(took_s=0.0, kind="Secret", message=_printable(str(error)), called=False)
        url = callback.target.url
        signed = signed_headers(keys, callback.id, url, callback.body, datetime.now(UTC))
        return await self._send(callback, {**headers, **signed, **host_header(url)})

    async def _send(self, callback: Callback, headers: Mapping[str, str]) -> CallResult:
        started_s = self._clock()
        response: aiohttp.ClientResponse | None = None
        try:
            with self._deadlines.start():
                # Without a `with` block of its own: a response that was read to its end has freed
                # its connection.
                response = await self._session.post(
                    as_given(callback.target.url),
                    data=aiohttp.BytesPayload(callback.body),
                    headers=headers,
                    allow_redirects=False,
                )
                excerpt = await self._excerpt_of(response, started_s)
                return self._answered(response.status, started_s, response, excerpt, callback.headers)
        except TimeoutError:
            if response is not None:
                # The loop was busy while the body was read; the status had come in time.
                return self._answered(response.status, started_s, response)
            kind, message = "Timeout", f"the target did not answer within {self._timeout_s:g} s"
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            kind, message = "Target", "the target is not an http or https URL"
        except UnreadableAnswer as error:
            return self._answered(error.status, started_s)
        except aiohttp.ClientResponseError as error:
            kind, message = "Protocol", f"the target does not speak HTTP: {error.message}"
        # Before ValueError: a bad certificate is also one, but it can be renewed, so the call is
        # retried.
        except (aiohttp.ClientError, OSError) as error:
            kind, message = _connection_failure(error)
        except ValueError as error:
            # A URL that fails only when its host is resolved, for instance http://a..b/
            kind, message = "Target", f"the target cannot be called: {type(error).__name__}"
        except Exception as error:  # noqa: BLE001 (recorded as the result and retried: one target must not end the process)
            # Without the exception's text, which may contain secrets.
            kind, message = type(error).__name__, f"the call failed: {type(error).__name__}"
        return CallResult(
            took_s=self._clock() - started_s,
            kind=kind,
            message=_printable(message)[:_MESSAGE_CHARACTERS],
            callable_target=kind != "Target",
        )

    async def _excerpt_of(self, response: aiohttp.ClientResponse, started_s: float) -> bytes:
        try:
            if response.content.is_eof() and response.content.exception() is None:
                # The usual case: the whole body is there.
                return response.content.read_nowait(EXCERPT_BYTES)
            until_s = min(self._clock() + EXCERPT_TIMEOUT_S, started_s + self._timeout_s - _EXCERPT_MARGIN_S)
            return await _read_excerpt(response, until_s)
        finally:
            if not response.content.at_eof():
                # Closes the connection instead of reading the rest.
                response.close()

    def _answered(
        self,
        status: int,
        started_s: float,
        response: aiohttp.ClientResponse | None = None,
        excerpt: bytes = b"",
        secret_headers: Mapping[str, str] | None = None,
    ) -> CallResult:
        retry_after = response and response.headers.get("Retry-After")
        return CallResult(
            excerpt=_masked(
                _printable(excerpt.decode("utf-8", errors="replace")),
                secret_headers,
                cut=len(excerpt) >= EXCERPT_BYTES,
            ),
            took_s=self._clock() - started_s,
            kind="HTTP",
            message=f"the target answered {status}",
            status=status,
            retry_after_s=parse_retry_after(retry_after, datetime.now(UTC)) if retry_after else None,
        )


def _connection_failure(error: Exception) -> tuple[str, str]:
    """Kind and message of a call that could not connect, or lost its connection."""
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ForbiddenAddress):
        return (
            "Forbidden",
            f"the target's address is {error.os_error.kind}, and PENSTOCK_CALLBACK_ALLOW does not allow it",
        )
    return "Connection", f"{type(error).__name__}: {error}"


async def _read_excerpt(response: aiohttp.ClientResponse, until_s: float) -> bytes:
    """The beginning of the body, as far as it arrives until then."""
    chunks: list[bytes] = []
    room = EXCERPT_BYTES
    try:
        async with asyncio.timeout_at(until_s):
            while room and (chunk := await response.content.read(room)):
                chunks.append(chunk)
                room -= len(chunk)
    except (TimeoutError, aiohttp.ClientError):
        pass  # The status decides, also without the rest of the body.
    return b"".join(chunks)


def _masked(excerpt: str, headers: Mapping[str, str] | None, *, cut: bool) -> str:
    """Masks the values of the callback's own headers, which are secrets that targets may echo.

    Args:
        excerpt: beginning of the answer's body.
        headers: of the callback.
        cut: whether the body may continue, so that the excerpt may end within a secret.
    """
    for value in (headers or {}).values():
        # The whole value, and the part after a scheme such as "Bearer".
        for secret in (value, *value.split()):
            if len(secret) >= _SHORTEST_SECRET:
                excerpt = excerpt.replace(secret, "***")
                if cut:
                    length = next((n for n in range(len(secret), 0, -1) if excerpt.endswith(secret[:n])), 0)
                    excerpt = excerpt[: len(excerpt) - length] + "*" * length
    return excerpt


def _printable(text: str) -> str:
    return text.translate(_UNPRINTABLE)


@asynccontextmanager
async def open_caller(
    settings: CallbacksSettings,
    keys_of: KeysOf,
    resolved: egress.Resolved = lambda _name, _addresses: None,
) -> AsyncIterator[Caller]:
    """Opens a caller for a `with` block.

    Args:
        settings: of the service.
        keys_of: finds the keys that sign for a target.
        resolved: receives each name that is resolved, with its addresses.
    """
    async with (
        _closed_after(egress.make_resolver(resolved=resolved)) as resolver,
        aiohttp.ClientSession(
            connector=egress.make_connector(
                settings.networks,
                settings.callback_slots + settings.slow_slots + settings.callback_diverted_slots,
                resolver,
            ),
            # A proxy would bypass the egress policy, and netrc would send this machine's
            # credentials.
            trust_env=False,
            # `Deadlines` bounds each call; aiohttp rounds its timeouts to whole seconds.
            timeout=aiohttp.ClientTimeout(total=None),
            request_class=Request,
            middlewares=(send_on_live_connection,),
            cookie_jar=aiohttp.DummyCookieJar(),
            # A small compressed answer can expand to a huge one.
            auto_decompress=False,
            headers={
                "user-agent": f"penstock/{__version__}",
                "content-type": "application/json",
                "accept-encoding": "identity",
            },
        ) as session,
    ):
        yield Caller(session, keys_of, settings.callback_timeout_s)


@asynccontextmanager
async def _closed_after(resolver: AbstractResolver) -> AsyncIterator[AbstractResolver]:
    try:
        yield resolver
    finally:
        await resolver.close()
