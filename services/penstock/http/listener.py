"""Listens for HTTP, and answers requests that aiohttp's parser rejects with problem documents.

By default aiohttp answers such requests as text and logs their first bytes, which may be those of
an API key.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from aiohttp import http_exceptions, web

from penstock.http.problems import Problem
from penstock.http.server import respond_problem, status_problem, with_security_headers
from penstock.sockets import end_when_peer_vanishes

log = logging.getLogger(__name__)

# Most bytes of the request line and of each header. aiohttp's defaults, written here because the
# description of the API has them.
MAX_LINE_BYTES = 8_190
MAX_HEADERS = 128


class _Connection(web.RequestHandler):
    """One connection."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ends the connection when its client vanishes: a long poll would claim tasks for it."""
        super().connection_made(transport)
        end_when_peer_vanishes(transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers a request that reached no handler, and closes the connection.

        Raises:
            ConnectionError: a part of an answer is already sent.
        """
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            problem = _internal_error(exc)
        elif isinstance(exc, http_exceptions.LineTooLong) or "Too many" in str(message):
            log.info(
                "Refused a request with too large headers",
                extra={"event": "request_head_refused", "remote": request.remote},
            )
            problem = status_problem(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"The address and each header may have {MAX_LINE_BYTES:,} bytes, "
                f"and a request may have {MAX_HEADERS} headers",
                "",
            )
        else:
            log.info(
                "Refused a request that is not HTTP/1.1",
                extra={"event": "malformed_request_refused", "remote": request.remote},
            )
            problem = status_problem(HTTPStatus(status), "The request is not HTTP/1.1 (RFC 9112)", "")
        if request.writer.output_size > 0:
            raise ConnectionError("a part of an answer is already sent")
        response = with_security_headers(respond_problem(problem))
        response.force_close()
        return response


def _internal_error(exc: BaseException | None) -> Problem:
    incident = f"urn:uuid:{uuid.uuid4()}"
    log.error(
        "A request failed before its handler",
        exc_info=exc,
        extra={"event": "connection_failed", "incident": incident},
    )
    detail = "The server failed; its log has the cause under the id in `instance`."
    return status_problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail, incident)


@asynccontextmanager
async def listen(runner: web.AppRunner, host: str, port: int) -> AsyncIterator[int]:
    """Accepts connections until the end of the block; open connections outlive it.

    Args:
        runner: runs the application; it is set up.
        host: address to listen on.
        port: 0 is any free port.

    Returns:
        The port.

    Raises:
        OSError: the address or port cannot be used.
    """
    loop = asyncio.get_running_loop()
    manager = runner.server
    assert manager is not None, "the runner is not set up"

    options: dict[str, Any] = {
        "access_log": None,
        "max_line_size": MAX_LINE_BYTES,
        "max_field_size": MAX_LINE_BYTES,
        "max_headers": MAX_HEADERS,
    }

    def connect() -> _Connection:
        return _Connection(manager, loop=loop, **options)

    server = await loop.create_server(connect, host, port, backlog=128)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
