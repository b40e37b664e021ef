"""Connections to targets: what counts as an answer, and which request is sent a second time.

- The status of a final answer counts as soon as its status line has arrived, although the rest of
  its head is too large or not HTTP: only the status decides whether a callback is delivered.
- A reused connection that ends before a byte of the answer has come was most likely closed by the
  target while it was idle. The request is sent once more, at once, on a new connection. A new
  connection that ends in the same way is a failure of the target.

aiohttp itself repeats only idempotent methods, and also after a part of an answer. A callback may
be repeated, because its target must expect it more than once.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

# An answer of 1xx is not final.
_FINAL_STATUS = re.compile(rb"\s*HTTP/\d(?:\.\d)? ([2-9]\d\d)[ \r\n]")
# Bytes of an answer that are kept: enough for its version and status.
_KEPT_BYTES = 32


class UnreadableAnswer(aiohttp.ClientError):
    """The answer has a status, and the rest of it is too large or not HTTP.

    Attributes:
        status: the status.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"an answer {status} that cannot be read")
        self.status = status


class _Protocol(ResponseHandler):
    """A connection that counts its requests and keeps the first bytes of the current answer."""

    requests = 0
    first_bytes = b""

    def set_response_params(self, **options: Any) -> None:
        """Begins a request and its answer."""
        self.requests += 1
        self.first_bytes = b""
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        """Keeps the first bytes."""
        if len(self.first_bytes) < _KEPT_BYTES:
            self.first_bytes += data[:_KEPT_BYTES]
        super().data_received(data)

    @property
    def is_stale(self) -> bool:
        """Whether it is reused, and nothing of the current answer has come."""
        return self.requests > 1 and not self.first_bytes


class Request(aiohttp.ClientRequest):
    """A request that remembers its connection."""

    protocol: _Protocol | None = None


class Connector(aiohttp.TCPConnector):
    """A connector of `Request`s: one that is sent again gets a new connection."""

    # aiohttp's default also allows tcp, ws and the empty scheme, and sends HTTP to them.
    allowed_protocol_schema_set = frozenset({"http", "https"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        make_protocol: type[ResponseHandler] = _Protocol
        self._factory = partial(make_protocol, loop=self._loop)

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 (aiohttp's signature)
    ) -> Connection:
        """A connection, which the request remembers."""
        assert isinstance(req, Request), "give the session `request_class=Request`"
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            assert isinstance(protocol, _Protocol), "aiohttp makes connections in another way"
            if req.protocol is None or not protocol.requests:
                req.protocol = protocol
                return connection
            # As old as the one that has ended.
            connection.close()


async def send_on_live_connection(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """A middleware of the session.

    Raises:
        UnreadableAnswer: an answer has a status, and the rest of it cannot be read.
    """
    assert isinstance(request, Request), "give the session `request_class=Request`"
    try:
        try:
            return await handler(request)
        except (aiohttp.ClientConnectionError, ConnectionError):
            if request.protocol is None or not request.protocol.is_stale:
                raise
        return await handler(request)
    except aiohttp.ClientResponseError as error:
        assert request.protocol is not None, "an answer has come over it"
        if (found := _FINAL_STATUS.match(request.protocol.first_bytes)) is None:
            raise
        raise UnreadableAnswer(int(found.group(1))) from error
