"""One call to one target: the place where aiohttp's client is set up and its errors become facts.

Whatever a target does, a call ends within its timeout, holds no more than a few kilobytes, follows no redirect, asks
no proxy and keeps no cookie. It never raises for what a target did.

Only addresses that are public or allowed are connected to (`egress`). A refusal is a failed attempt like any other and
retried by the schedule, whether the address stood in the URL or came from DNS: names change their addresses, and
operators what they allow. A host that is a number in an odd spelling (127.1, 2130706433) is no URL to aiohttp, and
dead at once.

What a call met is shown to people and kept: it has no part of the URL but host and port, none of the headers that were
sent, and no address that was refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver

from penstock import __version__, tracing
from penstock.callbacks import egress
from penstock.callbacks.egress import ForbiddenAddress
from penstock.callbacks.patience import Deadlines
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.signing import Signer
from penstock.contracts.event import Callback, origin_of
from penstock.core.delivery import parse_retry_after

EXCERPT_BYTES = 1024
# The status has decided by then; what is left of the answer is only for people to read.
EXCERPT_PATIENCE_S = 1.0
# Before the deadline: at the deadline, what has its status would count as what was never answered.
_EXCERPT_MARGIN_S = 0.1
# Anything shorter is found in any answer, and protects nothing.
_SHORTEST_SECRET = 6
# Beyond this an exception's own words are cut.
_MESSAGE_CHARACTERS = 300

# Keeps what can be shown: neither PostgreSQL nor a terminal wants the others.
_UNPRINTABLE = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 127], "\N{REPLACEMENT CHARACTER}")


# Not frozen: at the rate of calls the guard costs more than it guards.
@dataclass(slots=True)
class Met:
    """What a call met.

    Attributes:
        took_s: from beginning to end, in seconds.
        kind: `HTTP` when the target answered; else `Timeout`, `Forbidden`, `Connection`, `Protocol`, `Target` or
            an exception's name.
        message: one sentence.
        status: what it answered.
        retry_after_s: seconds for which it asked to be left alone.
        excerpt: how its answer began.
        callable_target: False when no call can ever be made to it.
    """

    took_s: float
    kind: str
    message: str
    status: int | None = None
    retry_after_s: float | None = None
    excerpt: str | None = None
    callable_target: bool = True

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
        signer: of the bodies.
        timeout_s: of a whole call, the answer included.
    """

    def __init__(self, session: aiohttp.ClientSession, signer: Signer, timeout_s: float) -> None:
        self._session = session
        self._signer = signer
        self._timeout_s = timeout_s
        self._deadlines = Deadlines(timeout_s)
        self._clock: Callable[[], float] = asyncio.get_running_loop().time

    def call(self, callback: Callback) -> Awaitable[Met]:
        """Makes one attempt, when it is awaited; returns what it met, within the timeout."""
        given = callback.headers or {}
        parent = given.get(tracing.TRACEPARENT)
        if parent is None:
            return self._call(callback, given)
        return self._call_traced(callback, given, parent)

    async def _call_traced(self, callback: Callback, given: Mapping[str, str], parent: str) -> Met:
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
                # Not traced here: the target is told what it would have hung under.
                return await self._call(callback, given)
            met = await self._call(callback, {**given, tracing.TRACEPARENT: span.traceparent})
            span.note(status=met.status or 0)
            if met.status is None or met.status >= HTTPStatus.BAD_REQUEST:
                span.fail(met.kind if met.status is None else f"HTTP {met.status}")
            return met

    async def _call(self, callback: Callback, given: Mapping[str, str]) -> Met:
        begun_s = self._clock()
        signed = self._signer.headers(callback.id, callback.body, datetime.now(UTC))
        response: aiohttp.ClientResponse | None = None
        try:
            with self._deadlines.begin():
                # Not in a `with` block of its own: what has been read to its end has left its connection already.
                response = await self._session.post(
                    callback.target.url,
                    data=aiohttp.BytesPayload(callback.body),
                    headers={**given, **signed} if given else signed,
                    allow_redirects=False,
                )
                try:
                    if response.content.is_eof() and response.content.exception() is None:
                        # Nearly always it is all there, and nothing to wait for.
                        begins = response.content.read_nowait(EXCERPT_BYTES)
                    else:
                        patience_ends_s = min(
                            self._clock() + EXCERPT_PATIENCE_S, begun_s + self._timeout_s - _EXCERPT_MARGIN_S
                        )
                        begins = await _beginning(response, patience_ends_s)
                finally:
                    if not response.content.at_eof():
                        # Its connection is closed rather than read to the end.
                        response.close()
                return self._answered(callback, response, begins, begun_s)
        except TimeoutError:
            if response is not None:
                # This process stood still while the rest of the answer was waited for: its status came in time.
                return self._answered(callback, response, b"", begun_s)
            kind, message = "Timeout", f"the target did not answer within {self._timeout_s:g} s"
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            kind, message = "Target", "the target is not an http or https URL"
        except aiohttp.ClientResponseError as error:
            kind, message = "Protocol", f"the target does not speak HTTP: {error.message}"
        # A bad certificate is also a ValueError, and may be a good one tomorrow: before the next clause.
        except (aiohttp.ClientError, OSError) as error:
            kind, message = _unconnected(error)
        except ValueError as error:
            # What passes for a URL until its host is looked up, for instance http://a..b/
            kind, message = "Target", f"the target cannot be called: {type(error).__name__}"
        except Exception as error:  # noqa: BLE001 (written down as what the attempt met, and retried: one target must not end the process)
            # Not in its own words: nobody knows what stands in them.
            kind, message = type(error).__name__, f"the call failed: {type(error).__name__}"
        return Met(
            took_s=self._clock() - begun_s,
            kind=kind,
            message=_shown(message)[:_MESSAGE_CHARACTERS],
            callable_target=kind != "Target",
        )

    def _answered(
        self, callback: Callback, response: aiohttp.ClientResponse, begins: bytes, begun_s: float
    ) -> Met:
        asked = response.headers.get("Retry-After")
        return Met(
            excerpt=_masked(_shown(begins.decode("utf-8", errors="replace")), callback.headers),
            took_s=self._clock() - begun_s,
            kind="HTTP",
            message=f"the target answered {response.status}",
            status=response.status,
            retry_after_s=parse_retry_after(asked, datetime.now(UTC)) if asked else None,
        )


def _unconnected(error: Exception) -> tuple[str, str]:
    """Kind and message of a call that found nobody, or lost them."""
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ForbiddenAddress):
        return (
            "Forbidden",
            f"the target's address is {error.os_error.kind}, and PENSTOCK_CALLBACK_ALLOW does not allow it",
        )
    return "Connection", f"{type(error).__name__}: {error}"


async def _beginning(response: aiohttp.ClientResponse, until_s: float) -> bytes:
    """How the answer begins, as far as it has come by then."""
    chunks: list[bytes] = []
    room = EXCERPT_BYTES
    try:
        async with asyncio.timeout_at(until_s):
            while room and (chunk := await response.content.read(room)):
                chunks.append(chunk)
                room -= len(chunk)
    except (TimeoutError, aiohttp.ClientError):
        pass  # The status stands, however the rest ends.
    return b"".join(chunks)


def _masked(excerpt: str, headers: Mapping[str, str] | None) -> str:
    """The excerpt without the values of the callback's own headers, which are secrets: targets echo what they get."""
    for value in (headers or {}).values():
        # A value as a whole, and what stands behind its scheme ("Bearer …").
        for secret in (value, *value.split()):
            if len(secret) >= _SHORTEST_SECRET:
                excerpt = excerpt.replace(secret, "***")
    return excerpt


def _shown(text: str) -> str:
    return text.translate(_UNPRINTABLE)


@asynccontextmanager
async def open_caller(settings: CallbacksSettings) -> AsyncIterator[Caller]:
    """A caller for the time of a `with` block."""
    async with (
        _closed_after(egress.make_resolver()) as resolver,
        aiohttp.ClientSession(
            connector=egress.make_connector(
                settings.networks,
                settings.callback_slots + settings.callback_slow_slots + settings.callback_diverted_slots,
                resolver,
            ),
            # A proxy would look the target up itself, and netrc would send along what is not ours to send.
            trust_env=False,
            # Each call has its own deadline; aiohttp's are rounded to whole seconds.
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            # A small compressed answer may be a huge one: it is left as it came.
            auto_decompress=False,
            headers={
                "user-agent": f"penstock/{__version__}",
                "content-type": "application/json",
                "accept-encoding": "identity",
            },
        ) as session,
    ):
        yield Caller(session, Signer(settings.callback_secrets), settings.callback_timeout_s)


@asynccontextmanager
async def _closed_after(resolver: AbstractResolver) -> AsyncIterator[AbstractResolver]:
    try:
        yield resolver
    finally:
        await resolver.close()
