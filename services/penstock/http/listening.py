"""Listening for HTTP: what is refused before it is a request is answered as everything else is, and quoted nowhere.

aiohttp answers what its parser refuses by itself, as text, and logs the first bytes of it: they may be those of a key.
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
from penstock.http.server import hardened, plain, respond_problem

log = logging.getLogger(__name__)

# Bytes of the address, and of each header; aiohttp's defaults, said here because the API's description tells them.
LONGEST_LINE = 8_190
MOST_HEADERS = 128


class _Connection(web.RequestHandler):
    """One connection."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers what no handler has answered; the connection is closed then.

        Raises:
            ConnectionError: half an answer is sent already.
        """
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            problem = _failed(exc)
        elif isinstance(exc, http_exceptions.LineTooLong) or "Too many" in str(message):
            log.info("refused a request of %s: its head is too large", request.remote)
            problem = plain(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"The address and each header may have {LONGEST_LINE:,} bytes, and there may be {MOST_HEADERS} headers",
                "",
            )
        else:
            log.info("refused a request of %s: it is not HTTP", request.remote)
            problem = plain(HTTPStatus(status), "This is not HTTP/1.1 as RFC 9112 has it", "")
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way already")
        answer = hardened(respond_problem(problem))
        answer.force_close()
        return answer


def _failed(exc: BaseException | None) -> Problem:
    incident = f"urn:uuid:{uuid.uuid4()}"
    log.error("a request failed (%s)", incident, exc_info=exc, extra={"incident": incident})
    told = "The server failed; its log tells why, under the id given as instance."
    return plain(HTTPStatus.INTERNAL_SERVER_ERROR, told, incident)


@asynccontextmanager
async def accepting(runner: web.AppRunner, host: str, port: int) -> AsyncIterator[int]:
    """Takes connections for an application that is set up, until the end of the block; those that are open stay.

    Args:
        runner: of the application.
        host: address to listen on.
        port: 0 is any that is free.

    Returns:
        The port.

    Raises:
        OSError: nothing can listen there.
    """
    loop = asyncio.get_running_loop()
    manager = runner.server
    assert manager is not None, "the runner is not set up"

    given: dict[str, Any] = {
        "access_log": None,
        "max_line_size": LONGEST_LINE,
        "max_field_size": LONGEST_LINE,
        "max_headers": MOST_HEADERS,
    }

    def connect() -> _Connection:
        return _Connection(manager, loop=loop, **given)

    listener = await loop.create_server(connect, host, port, backlog=128)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
