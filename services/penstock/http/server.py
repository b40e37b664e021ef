"""Server side: errors become problems, bodies and queries become values or precise errors."""

from __future__ import annotations

import logging
import math
import uuid
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from yarl import URL

from penstock.errors import Malformed, PenstockError, Throttled, TooLarge, Unauthenticated
from penstock.http.problems import CONTENT_TYPE, BadParameter, Problem, problem_of

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1

# PostgreSQL's bigint: no id is larger.
LARGEST_ID = 2**63 - 1


class Refused(Exception):  # noqa: N818 (names what happened, as all of ours do)
    """The request is refused before it is looked at.

    Attributes:
        status: HTTP status, which says all there is to say.
    """

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers every error with a problem document, and none with its internals."""
    try:
        return await handler(request)
    except web.HTTPException as answer:
        if answer.status < 400:
            raise
        return respond_problem(_problem_of_status(request, answer), _allowed(answer))
    except ConnectionResetError:
        # The client has gone; there is nobody to tell.
        raise
    except Exception as error:  # noqa: BLE001 (told to the client, or logged with its traceback)
        problem = _problem_of(request, error)
        headers = None
        if problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
            log.warning("%s %s: %s", request.method, request.path, error)
            headers = {"Retry-After": str(RETRY_AFTER_S)}
        elif isinstance(error, Throttled):
            log.info("%s %s: %s", request.method, request.path, error)
            headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
        elif isinstance(error, Unauthenticated):
            headers = {"WWW-Authenticate": 'Bearer realm="penstock"'}
        return respond_problem(problem, headers)


@web.middleware
async def same_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses what a page of another site makes a visitor's browser send to a server on the visitor's machine.

    Browsers name the page's origin with every request that changes something; programs name none.
    """
    origin = request.headers.get("Origin")
    if origin is not None and request.method not in ("GET", "HEAD") and URL(origin).authority != request.host:
        raise Refused(HTTPStatus.FORBIDDEN, f"pages of {origin} may not change anything here")
    return await handler(request)


# Answers are documents for programs: no browser is to run, frame, keep or share them. Which origins may ask is said nowhere
# (CORS), so pages of others cannot read them either.
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


async def harden(_request: web.Request, response: web.StreamResponse) -> None:
    """Gives every answer the headers that keep browsers from misusing it; for `Application.on_response_prepare`."""
    hardened(response)


def hardened(response: web.StreamResponse) -> web.StreamResponse:
    """The answer with those headers, and without the versions of what made it."""
    for name, value in _SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers["Server"] = "penstock"
    return response


def _problem_of(request: web.Request, error: Exception) -> Problem:
    if isinstance(error, Refused):
        return plain(error.status, str(error), request.path)
    found = problem_of(error, request.path) if isinstance(error, PenstockError) else None
    if found is not None:
        return found
    incident = f"urn:uuid:{uuid.uuid4()}"
    log.error(
        "%s %s failed (%s)",
        request.method,
        request.path,
        incident,
        exc_info=error,
        extra={"incident": incident},
    )
    told = "The gateway failed; its log tells why, under the id given as instance."
    return plain(HTTPStatus.INTERNAL_SERVER_ERROR, told, incident)


def plain(status: HTTPStatus, detail: str, instance: str) -> Problem:
    """A problem of which the status says all there is to say."""
    return Problem(type="about:blank", title=status.phrase, status=status, detail=detail, instance=instance)


def _problem_of_status(request: web.Request, answer: web.HTTPException) -> Problem:
    status = HTTPStatus(answer.status)
    if isinstance(answer, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(answer.allowed_methods))
        detail = f"{request.path} does not take {request.method}, only {allowed}"
    elif status is HTTPStatus.NOT_FOUND:
        detail = f"There is nothing at {request.path}; /docs lists what there is"
    else:
        detail = answer.text or status.phrase
    return plain(status, detail, request.path)


def _allowed(answer: web.HTTPException) -> dict[str, str]:
    return {"Allow": answer.headers["Allow"]} if "Allow" in answer.headers else {}


def respond_problem(problem: Problem, headers: dict[str, str] | None = None) -> web.Response:
    """An answer that is a problem document."""
    return web.Response(
        body=problem.encode(), status=problem.status, content_type=CONTENT_TYPE, headers=headers
    )


def respond(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON answer; moments become RFC 3339 in UTC."""
    body = orjson.dumps(document, option=orjson.OPT_UTC_Z)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


async def body_of(request: web.Request, limit_bytes: int) -> bytes:
    """The bytes of a JSON body.

    Only bodies declared as JSON are taken: a page in somebody's browser can send any other kind to a
    server on the same machine without asking, but not this one.

    Raises:
        Refused: the body is not declared as JSON.
        Malformed: declared in an encoding other than UTF-8, or its compression is broken.
        TooLarge: longer than the limit.
    """
    media = request.content_type
    if media != "application/json" and not media.endswith("+json"):
        raise Refused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"send JSON with Content-Type: application/json (this is {media})",
        )
    charset = request.charset
    if charset is not None and charset.lower().replace("-", "") not in ("utf8", "usascii"):
        raise Malformed(f"JSON travels as UTF-8, but the body is declared as {charset}")
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise TooLarge(f"the body is longer than {limit_bytes:,} bytes") from error
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise Malformed(f"the body is not {request.headers.get('Content-Encoding', 'plain')}") from error


def number_in_query(request: web.Request, name: str, default: int, *, low: int, high: int) -> int:
    """A query parameter that is a whole number.

    Raises:
        BadParameter: it is not one, or out of bounds.
    """
    text = request.query.get(name)
    if text is None:
        return default
    # Not int() alone, which also takes "1_000", " 7 " and digits of any script.
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise BadParameter(f"must be a whole number from {low:,} to {high:,}", parameter=name)
    return int(text)


def text_in_query(request: web.Request, name: str, *, longest: int = 200) -> str | None:
    """A query parameter that is any text; None when it is not there.

    Raises:
        BadParameter: empty, too long, or with a character that no text of ours can hold.
    """
    text = request.query.get(name)
    if text is not None and (not 0 < len(text) <= longest or "\0" in text):
        raise BadParameter(f"must be 1 to {longest} characters, none of them NUL", parameter=name)
    return text


def choice_in_query(request: web.Request, name: str, default: str, choices: tuple[str, ...]) -> str:
    """A query parameter that is one of a few words.

    Raises:
        BadParameter: it is none of them.
    """
    text = request.query.get(name, default)
    if text not in choices:
        raise BadParameter(f"must be one of: {', '.join(choices)}", parameter=name)
    return text


def refuse_unknown_parameters(request: web.Request, *known: str) -> None:
    """A misspelt filter must not silently match everything.

    Raises:
        BadParameter: there is one that is not among `known`.
    """
    for name in request.query:
        if name not in known:
            raise BadParameter(f"no such parameter; there are: {', '.join(known) or 'none'}", parameter=name)
