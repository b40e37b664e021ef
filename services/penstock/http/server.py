"""Server side of HTTP: middlewares, responses, request bodies and query parameters."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Protocol, runtime_checkable

import orjson
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from yarl import URL

from penstock.errors import Malformed, PenstockError, Throttled, TooLarge, Unauthenticated
from penstock.http.problems import CONTENT_TYPE, BadParameter, Problem, problem_of

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1

_AWAITS_CONTINUE = web.RequestKey("awaits_continue", bool)
_BODY_BYTES = web.RequestKey("body_bytes", int)

# The largest value of PostgreSQL's bigint.
MAX_ID = 2**63 - 1


class RequestRefused(Exception):  # noqa: N818 (named after the event, like all errors here)
    """A request is refused before it is read.

    Attributes:
        status: HTTP status of the answer.
    """

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@web.middleware
async def problem_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers every error with a problem document, and reveals no internals."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return respond_problem(_problem_of_status(request, error), _allow_header(error))
    except ConnectionResetError:
        # The client has gone, so no answer can be sent.
        raise
    except Exception as error:  # noqa: BLE001 (the answer or the log has it)
        problem = _problem_of(request, error)
        headers = None
        if problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
            log.warning(
                "Answered a request with 503",
                extra={
                    "event": "request_unserved",
                    "method": request.method,
                    "path": request.path,
                    "error": error,
                },
            )
            headers = {"Retry-After": str(RETRY_AFTER_S)}
        elif isinstance(error, Throttled):
            log.info(
                "Answered a request with 429",
                extra={
                    "event": "request_throttled",
                    "method": request.method,
                    "path": request.path,
                    "error": error,
                },
            )
            headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
        elif isinstance(error, Unauthenticated):
            headers = {"WWW-Authenticate": 'Bearer realm="penstock"'}
        return respond_problem(problem, headers)


@web.middleware
async def same_origin_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses changes that pages of other sites make a browser send (cross-site request forgery).

    Browsers send the page's origin with every request that may change something; programs send
    none.
    """
    origin = request.headers.get("Origin")
    if origin is not None and request.method not in ("GET", "HEAD") and _authority(origin) != request.host:
        raise RequestRefused(HTTPStatus.FORBIDDEN, f"pages of {origin} may not change anything here")
    return await handler(request)


def _authority(origin: str) -> str:
    """Host and port of an origin; empty when it has none, as `null` or malformed."""
    try:
        return URL(origin).authority
    except ValueError:
        return ""


# No browser may run, frame, store or share an answer. Without CORS headers, pages of other sites
# cannot read it.
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


async def add_security_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Adds the security headers to every response; for `Application.on_response_prepare`."""
    with_security_headers(response)


def with_security_headers(response: web.StreamResponse) -> web.StreamResponse:
    """Adds the security headers to a response, and hides the versions of the server's libraries."""
    for name, value in _SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers["Server"] = "penstock"
    return response


def _problem_of(request: web.Request, error: Exception) -> Problem:
    if isinstance(error, RequestRefused):
        return status_problem(error.status, str(error), request.path)
    problem = problem_of(error, request.path) if isinstance(error, PenstockError) else None
    if problem is not None:
        return problem
    incident = f"urn:uuid:{uuid.uuid4()}"
    log.error(
        "A request failed",
        exc_info=error,
        extra={
            "event": "request_failed",
            "method": request.method,
            "path": request.path,
            "incident": incident,
        },
    )
    detail = "The gateway failed; its log has the cause under the id in `instance`."
    return status_problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail, incident)


def status_problem(status: HTTPStatus, detail: str, instance: str) -> Problem:
    """A problem that only its status describes."""
    return Problem(type="about:blank", title=status.phrase, status=status, detail=detail, instance=instance)


def _problem_of_status(request: web.Request, error: web.HTTPException) -> Problem:
    status = HTTPStatus(error.status)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        detail = f"{request.path} does not support {request.method}, only {allowed}"
    elif status is HTTPStatus.NOT_FOUND:
        detail = f"There is no route {request.path}; /docs lists all routes"
    else:
        detail = error.text or status.phrase
    return status_problem(status, detail, request.path)


def _allow_header(error: web.HTTPException) -> dict[str, str]:
    return {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}


def respond_problem(problem: Problem, headers: dict[str, str] | None = None) -> web.Response:
    """A response with a problem document."""
    return web.Response(
        body=problem.encode(), status=problem.status, content_type=CONTENT_TYPE, headers=headers
    )


def respond(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON response; timestamps become RFC 3339 in UTC."""
    body = orjson.dumps(document, option=orjson.OPT_UTC_Z)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


async def read_body(request: web.Request, limit_bytes: int) -> bytes:
    """The bytes of a JSON body.

    The body must be declared as JSON: browsers send other media types to any server without a
    preflight request, but not JSON.

    Raises:
        RequestRefused: the body is not declared as JSON.
        Malformed: the body is declared in an encoding other than UTF-8, or its compression is
            broken.
        TooLarge: the body is longer than the limit.
        Throttled: too many bytes of bodies are in memory.
    """
    media = request.content_type
    if media != "application/json" and not media.endswith("+json"):
        raise RequestRefused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"send JSON with Content-Type: application/json (the body is declared as {media})",
        )
    charset = request.charset
    if charset is not None and charset.lower().replace("-", "") not in ("utf8", "usascii"):
        raise Malformed(f"the body is declared as {charset}: send JSON as UTF-8")
    declared = request.content_length
    if declared is not None and declared > limit_bytes:
        raise _too_large(limit_bytes)
    if request.get(_AWAITS_CONTINUE):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The answer itself has not begun.
        request.writer.output_size = 0
    body = bytearray()
    try:
        while chunk := await request.content.readany():
            if isinstance(request.protocol, BodyBuffer):
                request.protocol.buffer(len(chunk))
            body += chunk
            if len(body) > limit_bytes:
                raise _too_large(limit_bytes)
    except (web.RequestPayloadError, HttpProcessingError) as error:
        encoding = request.headers.get("Content-Encoding", "plain")
        raise Malformed(f"the body is not valid {encoding}, which its Content-Encoding declares") from error
    request[_BODY_BYTES] = len(body)
    return bytes(body)


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"the body is longer than {limit_bytes:,} bytes")


def body_bytes(request: web.Request) -> int:
    """The length of the body that `read_body` has read."""
    return request[_BODY_BYTES]


@runtime_checkable
class BodyBuffer(Protocol):
    """Counts the bytes of bodies in memory (`http.connections`)."""

    def buffer(self, size_bytes: int) -> None:
        """Counts a part of the body of the request under way.

        Raises:
            Throttled: too many bytes are in memory.
        """
        ...


def admitted_first(routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
    """Routes that answer `Expect: 100-continue` when their handler reads the body.

    By default aiohttp answers it before the request is authenticated.
    """
    return [
        web.RouteDef(route.method, route.path, route.handler, {**route.kwargs, "expect_handler": _expect})
        for route in routes
    ]


async def _expect(request: web.Request) -> web.StreamResponse | None:
    expected = request.headers["Expect"]
    if expected.lower() != "100-continue":
        detail = f"The server knows no expectation but 100-continue, not {expected[:100]!r}"
        problem = status_problem(HTTPStatus.EXPECTATION_FAILED, detail, request.path)
        return respond_problem(problem)
    request[_AWAITS_CONTINUE] = request.version >= HttpVersion11
    return None


def integer_parameter(request: web.Request, name: str, default: int, *, low: int, high: int) -> int:
    """A query parameter that is an integer.

    Raises:
        BadParameter: it is not an integer from `low` to `high`.
    """
    text = request.query.get(name)
    if text is None:
        return default
    # int() alone would also accept "1_000", " 7 " and the digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise BadParameter(f"must be a whole number from {low:,} to {high:,}", parameter=name)
    return int(text)


def text_parameter(request: web.Request, name: str, *, shortest: int = 1, longest: int = 200) -> str | None:
    """A query parameter that is any text; None without one.

    Raises:
        BadParameter: it is shorter than `shortest`, longer than `longest`, or has a NUL, which
            PostgreSQL cannot store.
    """
    text = request.query.get(name)
    if text is not None and (not shortest <= len(text) <= longest or "\0" in text):
        raise BadParameter(f"must be {shortest} to {longest} characters, none of them NUL", parameter=name)
    return text


def moment_parameter(request: web.Request, name: str) -> datetime | None:
    """A query parameter that is a moment in ISO 8601, in UTC without an offset; None without one.

    Raises:
        BadParameter: it is no moment.
    """
    text = request.query.get(name)
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        # The conversion to UTC may exceed the years that datetime has.
        return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        raise BadParameter("must be a moment such as 2026-11-23T06:00:00Z", parameter=name) from None


def choice_parameter(request: web.Request, name: str, default: str, choices: tuple[str, ...]) -> str:
    """A query parameter that is one of `choices`.

    Raises:
        BadParameter: it is another word.
    """
    text = request.query.get(name, default)
    if text not in choices:
        raise BadParameter(f"must be one of: {', '.join(choices)}", parameter=name)
    return text


def refuse_unknown_parameters(request: web.Request, *known: str) -> None:
    """Refuses unknown query parameters, since a misspelt filter would match everything.

    Raises:
        BadParameter: a parameter is not in `known`.
    """
    for name in request.query:
        if name not in known:
            raise BadParameter(
                f"no such parameter; this route has: {', '.join(known) or 'none'}", parameter=name
            )
