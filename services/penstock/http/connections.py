"""Connections of HTTP clients, with deadlines and bounds that aiohttp's server does not have.

aiohttp waits an hour for the head of a request, without limit for its body, and accepts every
connection.

What this module guarantees: a client that sends or receives too slowly loses its connection within
`ConnectionLimits`. A client whose request is read may wait for its answer as long as the handler
takes. Connections are bounded, in all and by address, and so are the bytes of bodies. At a bound
the connection that has waited longest for its client gives way, so slow clients cannot keep others
out. Only when each of them waits for the handler, a new one is refused.

In doubt the connection ends: the client repeats its request, and an idempotency key makes that
safe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, cast

from aiohttp import StreamReader, web

from penstock.http.connection_guard import ConnectionGuard, ConnectionLimits
from penstock.http.problems import Problem
from penstock.http.server import (
    RETRY_AFTER_S,
    respond_problem,
    status_problem,
    with_security_headers,
)
from penstock.sockets import end_when_peer_vanishes

log = logging.getLogger(__name__)

# Seconds that a connection with an answer has to send it before it is cut.
_CLOSE_S = 2.0
# Seconds in which the rest of a body is read and dropped when the answer needed none of it.
# Otherwise the client's system could drop the answer.
_LINGER_S = 2.0
# An owner of IPv6 addresses has all of such a network.
_IPV6_PREFIX = 64


class _Unsent:
    """How long an answer waits for its client.

    Attributes:
        since_s: when the client stopped to take it; None while it takes.
        before_s: seconds of earlier stops, in this answer.
        stalled: whether the timer has found the client in this stop before.
    """

    __slots__ = ("_limits", "before_s", "since_s", "stalled")

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self.since_s: float | None = None
        self.before_s = 0.0
        self.stalled = False

    def end(self, now_s: float) -> None:
        """The client takes a part."""
        self.before_s += self._lasts_s(now_s)
        self.since_s, self.stalled = None, False

    def is_overdue(self, now_s: float, taken_bytes: int) -> bool:
        """Whether the client is too slow; its system may have taken megabytes before it stopped."""
        lasts_s, limits = self._lasts_s(now_s), self._limits
        allowed_s = limits.write_s + taken_bytes / limits.rate
        return lasts_s > limits.write_s or self.before_s + lasts_s > allowed_s

    def begins_to_stall(self, now_s: float, elapsed_s: float) -> bool:
        """Whether the client is `stalled` from now on: it stopped before the timer's last turn."""
        begins = not self.stalled and self._lasts_s(now_s) > elapsed_s
        self.stalled |= begins
        return begins

    def _lasts_s(self, now_s: float) -> float:
        return 0.0 if self.since_s is None else now_s - self.since_s


class Connection(web.RequestHandler):
    """One connection.

    Args:
        guard: has the limits.
        fail: answers a request that reached no handler.
    """

    __slots__ = (
        "_body",
        "_fail",
        "_guard",
        "_head_since_s",
        "_link",
        "_request",
        "_since_s",
        "_unsent",
        "address",
        "buffered_bytes",
    )

    def __init__(
        self,
        manager: Any,
        guard: ConnectionGuard,
        fail: Callable[..., web.StreamResponse],
        **options: Any,
    ) -> None:
        super().__init__(manager, lingering_time=_LINGER_S, **options)
        self._guard = guard
        self._fail = fail
        self._link: asyncio.Transport | None = None
        self._request: web.BaseRequest | None = None
        self._body: StreamReader | None = None
        # When the connection, its last request or its last answer began.
        self._since_s = 0.0
        self._head_since_s: float | None = None
        self._unsent = _Unsent(guard.limits)
        self.address = ""
        self.buffered_bytes = 0

    @property
    def reads_body(self) -> bool:
        """Whether a part of a request's body has not come."""
        return self._request is not None and not self._request.content.is_eof()

    @property
    def serves(self) -> bool:
        """Whether a request is read and not answered, and its client takes what is sent."""
        return self._request is not None and self._request.content.is_eof() and not self._unsent.stalled

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuses the connection at a bound, and ends it when its client vanishes."""
        # That of uvloop is no instance.
        link = cast("asyncio.Transport", transport)
        self._since_s = self._loop.time()
        self.address = _client_of(link)
        problem = self._guard.admit(self)
        if problem is not None:
            log.info(
                "Refused a connection",
                extra={"event": "connection_refused", "remote": self.address, "reason": problem.detail},
            )
            link.write(_closing_answer(problem))
            link.close()
            return
        self._link = link
        super().connection_made(transport)
        # A long poll would claim tasks for a client that has vanished.
        end_when_peer_vanishes(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forgets the connection."""
        self._guard.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Notes when the head of a request begins."""
        after_body = self._body is None or self._body.is_eof()
        if self._request is None and self._head_since_s is None and data and after_body:
            self._head_since_s = self._loop.time()
        super().data_received(data)

    def pause_writing(self) -> None:
        """Notes when the client stops to take an answer."""
        self._unsent.since_s = self._loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has taken a part of the answer."""
        self._unsent.end(self._loop.time())
        if self.serves:
            self._guard.serve(self)
        super().resume_writing()

    def begin(self, request: web.BaseRequest) -> None:
        """Notes that the head of a request is read."""
        self._request, self._body = request, request.content
        self._since_s = self._loop.time()
        self._unsent.before_s = 0.0
        if self.serves:
            self._guard.serve(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends the answer, and then waits for the next request."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._request = self._head_since_s = None
            self._since_s = self._loop.time()
            self._guard.release(self)
            self._guard.wait(self)

    def buffer(self, size_bytes: int) -> None:
        """Counts bytes of the body in memory.

        Raises:
            Throttled: too many bytes of bodies are in memory.
        """
        self._guard.buffer(self, size_bytes)

    def end_if_overdue(self, now_s: float, elapsed_s: float) -> None:
        """Ends the connection if its client is too slow.

        Args:
            now_s: time of the loop.
            elapsed_s: seconds since the last call.
        """
        limits = self._guard.limits
        if self._unsent.since_s is not None:
            self._end_if_unsent(now_s, elapsed_s)
        elif self.reads_body:
            if self._reading_paused:
                # The handler does not read, so the client cannot send.
                self._since_s += elapsed_s
            elif self._body and now_s - self._since_s > limits.body_s + self._body.total_bytes / limits.rate:
                self.end("body", _late("body", limits.body_s))
        elif self._request is not None:
            return
        elif self._head_since_s is not None:
            if now_s - self._head_since_s > limits.head_s:
                self.end("head", _late("head", limits.head_s))
        elif now_s - self._since_s > (limits.idle_s if self._request_count else limits.head_s):
            self.end("idle" if self._request_count else "head", None)

    def _end_if_unsent(self, now_s: float, elapsed_s: float) -> None:
        if self._unsent.is_overdue(now_s, _taken_bytes(self._request, self._link)):
            self.end("write", None)
        elif self._unsent.begins_to_stall(now_s, elapsed_s):
            self._guard.wait(self)

    def end(self, reason: str, problem: Problem | None) -> None:
        """Ends the connection.

        Args:
            reason: counts it (`ConnectionCounts.ended`).
            problem: the answer, unless another has begun.
        """
        self._guard.remove(self)
        link = self._link
        if link is None or link.is_closing():
            return
        self._guard.counts.ended[reason] += 1
        detail = problem.detail if problem else ""
        log.info(
            "Ended the connection of a slow client",
            extra={"event": "connection_ended", "remote": self.address, "reason": detail},
        )
        if problem is not None and (self._request is None or self._request.writer.output_size == 0):
            link.write(_closing_answer(problem))
            # The answer may still be sent, but not for long.
            self._loop.call_later(_CLOSE_S, link.abort)
            self.force_close()
        else:
            self.force_close()
            link.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers a request that reached no handler, and closes the connection.

        Raises:
            ConnectionError: the client has gone, or a part of an answer is already sent.
        """
        if isinstance(exc, ConnectionError):
            raise exc
        if request.writer.output_size > 0:
            raise ConnectionError("a part of an answer is already sent")
        response = self._fail(request, status, exc, message)
        response.force_close()
        return response


def _client_of(transport: asyncio.Transport) -> str:
    """What connections are counted by: an IPv4 address, or a network of IPv6."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return ""
    address = ip_address(str(peer[0]).partition("%")[0])
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((address, _IPV6_PREFIX), strict=False))


def _taken_bytes(request: web.BaseRequest | None, link: asyncio.Transport | None) -> int:
    """The bytes of an answer that the client's system has taken."""
    if request is None or link is None:
        return 0
    return request.writer.output_size - link.get_write_buffer_size()


def _late(part: str, limit_s: float) -> Problem:
    detail = f"The {part} of a request must come within {limit_s:g} s"
    return status_problem(HTTPStatus.REQUEST_TIMEOUT, detail, "")


def _closing_answer(problem: Problem) -> bytes:
    """An answer outside of aiohttp, for a connection that ends."""
    headers = {"Connection": "close", "Content-Length": str(len(problem.encode()))}
    if problem.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    response = with_security_headers(respond_problem(problem, headers))
    lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + problem.encode()
