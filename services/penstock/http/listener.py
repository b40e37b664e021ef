"""Listens for HTTP: the one way in which processes of the platform open an HTTP port.

What this module guarantees: a request that names another host is refused before its route is
looked up (`core.hosts`), and one that aiohttp's parser rejects is answered with a problem document.
By default aiohttp answers such requests as text and logs their first bytes, which may be those of
an API key. Connections are bounded and have deadlines (`http.connections`).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from aiohttp import http_exceptions, web

from penstock.core.hosts import HostPolicy
from penstock.forking import keep_from_children
from penstock.http.connection_guard import FEW, ConnectionCounts, ConnectionGuard, ConnectionLimits
from penstock.http.connections import Connection
from penstock.http.problems import Problem
from penstock.http.server import respond_problem, status_problem, with_security_headers

log = logging.getLogger(__name__)

# Most bytes of the request line and of each header. aiohttp's defaults, written here because the
# description of the API has them.
MAX_LINE_BYTES = 8_190
MAX_HEADERS = 128
# Characters of a refused host in the answer.
_SHOWN = 100
# Connections that the system accepts before the process does, and that the process accepts at once.
_BACKLOG = 128
# Files beside those of clients: connections to Kafka and PostgreSQL, and the process's own.
_OTHER_FILES = 256

_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def _answer_failure(
    request: web.BaseRequest, status: int, exc: BaseException | None, message: str | None
) -> web.StreamResponse:
    """The answer to a request that reached no handler."""
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
    return with_security_headers(respond_problem(problem))


def _internal_error(exc: BaseException | None) -> Problem:
    incident = f"urn:uuid:{uuid.uuid4()}"
    log.error(
        "A request failed before its handler",
        exc_info=exc,
        extra={"event": "connection_failed", "incident": incident},
    )
    detail = "The server failed; its log has the cause under the id in `instance`."
    return status_problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail, incident)


def _host_problem(request: web.BaseRequest, policy: HostPolicy) -> Problem | None:
    """Why a request is for another host; None when it is for this server."""
    hosts = request.headers.getall("Host", [])
    if len(hosts) != 1 or not hosts[0]:
        detail = "A request needs the header Host once, with the name or address of this server"
        return status_problem(HTTPStatus.BAD_REQUEST, detail, "")
    named = [hosts[0]]
    if request.host != hosts[0]:
        # The host of an absolute request target, which stands in front of the header's. It has
        # neither a port nor the brackets of IPv6.
        named.append(f"[{request.host}]" if ":" in request.host else request.host)
    for host in named:
        if not policy.allows(host):
            detail = (
                f"This server is not {host[:_SHOWN]!r}. Call it by its address, "
                "or add the name to PENSTOCK_ALLOWED_HOSTS"
            )
            return status_problem(HTTPStatus.MISDIRECTED_REQUEST, detail, "")
    return None


def _admitting(handler: _Handler, policy: HostPolicy) -> _Handler:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if isinstance(request.protocol, Connection):
            request.protocol.begin(request)
        problem = _host_problem(request, policy)
        if problem is None:
            return await handler(request)
        log.info(
            "Refused a request for another host",
            extra={"event": "foreign_host_refused", "remote": request.remote, "reason": problem.detail},
        )
        return with_security_headers(respond_problem(problem))

    return handle


@asynccontextmanager
async def listen(
    runner: web.AppRunner,
    host: str,
    port: int,
    allowed_hosts: Sequence[str] = (),
    limits: ConnectionLimits = FEW,
    counts: ConnectionCounts | None = None,
) -> AsyncIterator[int]:
    """Accepts connections until the end of the block; open connections outlive it.

    Args:
        runner: runs the application; it is set up.
        host: address to listen on.
        port: 0 is any free port.
        allowed_hosts: further values of `Host` that name this server (`core.hosts`).
        limits: of the connections; fewer where the process may not open as many files.
        counts: counts the connections.

    Returns:
        The port.

    Raises:
        OSError: the address or port cannot be used.
    """
    loop = asyncio.get_running_loop()
    manager = runner.server
    assert manager is not None, "the runner is not set up"
    # Around the application: it looks up routes and answers `Expect` before its middlewares.
    manager.request_handler = _admitting(manager.request_handler, HostPolicy.of(host, allowed_hosts))
    guard = ConnectionGuard(_within_files(limits), counts)

    options: dict[str, Any] = {
        "access_log": None,
        "max_line_size": MAX_LINE_BYTES,
        "max_field_size": MAX_LINE_BYTES,
        "max_headers": MAX_HEADERS,
    }

    def connect() -> Connection:
        return Connection(manager, guard, _answer_failure, loop=loop, **options)

    server = await loop.create_server(connect, host, port, backlog=_BACKLOG)
    for listening in server.sockets:
        # Otherwise a child that outlives this process would keep the port.
        keep_from_children(listening.fileno())
    guard.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        guard.stop()
        server.close()


def _within_files(limits: ConnectionLimits) -> ConnectionLimits:
    """The limits for as many connections as the process may have; one address leaves its share."""
    connections = _open_files(limits.connections)
    by_address = max(1, limits.by_address * connections // limits.connections)
    return replace(limits, connections=connections, by_address=by_address)


def _open_files(connections: int) -> int:
    """How many of these connections the process may have, after raising its limit of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        log.warning(
            "The limit of open files is below the limit of connections",
            extra={"event": "connections_limited", "limit": connections, "files": soft},
        )
        return max(1, soft - _OTHER_FILES)
    return connections
