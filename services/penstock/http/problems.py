"""Problems (RFC 9457): our errors as `application/problem+json`, and back.

Beside the standard's type, title, status, detail and instance a problem may carry `errors`, one entry for
each thing at fault: `detail` with a JSON Pointer into the body (`pointer`) or the name of a query parameter
(`parameter`). Both ends use this module, so that a client raises what the gateway raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson

from penstock.errors import (
    Conflict,
    CorruptObject,
    Forbidden,
    GatewayUnavailable,
    Invalid,
    InvalidRecord,
    Malformed,
    NotFound,
    PenstockError,
    Throttled,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnknownType,
)

CONTENT_TYPE = "application/problem+json"

# A batch may be wrong in every entry; nobody reads more than this.
ERRORS_SHOWN = 100


class BadParameter(Invalid):
    """A query parameter is wrong.

    Attributes:
        parameter: its name.
    """

    def __init__(self, reason: str, *, parameter: str) -> None:
        super().__init__(f"{parameter}: {reason}")
        self.parameter = parameter


class Faults(Invalid):
    """Several things are wrong with one body.

    Attributes:
        faults: each of them, in the order of the body.
    """

    def __init__(self, faults: Sequence[Invalid]) -> None:
        first = faults[0]
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(first.reason + more, pointer=first.pointer)
        self.faults = list(faults)


def relocated(error: Invalid, move: Callable[[str], str]) -> Invalid:
    """The same error with its pointers, and those of all its faults, changed by `move`."""
    if isinstance(error, Faults):
        return Faults([relocated(fault, move) for fault in error.faults])
    return type(error)(error.reason, pointer=move(error.pointer))


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of problem: a row of the table in the documentation."""

    name: str
    status: int
    title: str
    error: type[PenstockError]

    @property
    def uri(self) -> str:
        """The problem's `type`."""
        return f"urn:penstock:problem:{self.name}"


# The first row whose class fits decides, so subclasses stand before their bases.
KINDS = (
    Kind("malformed", 400, "The body cannot be read", Malformed),
    Kind("unknown-type", 422, "No such task type", UnknownType),
    Kind("too-large", 413, "Larger than the limit", TooLarge),
    Kind("corrupt-object", 500, "A stored object is not what it was", CorruptObject),
    Kind("invalid", 422, "The request breaks its contract", Invalid),
    Kind("unauthenticated", 401, "Not known here", Unauthenticated),
    Kind("forbidden", 403, "Not allowed", Forbidden),
    Kind("not-found", 404, "Nothing there", NotFound),
    Kind("conflict", 409, "Not possible in this state", Conflict),
    Kind("throttled", 429, "Too much at once", Throttled),
    Kind("unavailable", 503, "Try again in a moment", Unavailable),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What went wrong, as it travels.

    Attributes:
        type: URI of the kind of problem; "about:blank" when the status says it all.
        title: the same for every problem of this type.
        status: HTTP status.
        detail: one sentence about this very occurrence.
        instance: what it is about: the request's path, or an id to be found in the log.
        errors: each thing at fault.
    """

    type: str
    title: str
    status: int
    detail: str
    instance: str = ""
    errors: tuple[Mapping[str, str], ...] = ()

    def encode(self) -> bytes:
        """The body."""
        document: dict[str, Any] = {
            "type": self.type,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if self.instance:
            document["instance"] = self.instance
        if self.errors:
            document["errors"] = list(self.errors)
        return orjson.dumps(document)


def problem_of(error: PenstockError, instance: str) -> Problem | None:
    """The problem that tells of an error; None when it is nothing a client should hear of."""
    for kind in KINDS:
        if isinstance(error, kind.error):
            detail = error.reason if isinstance(error, Invalid) else str(error)
            return Problem(
                type=kind.uri,
                title=kind.title,
                status=kind.status,
                detail=detail,
                instance=instance,
                errors=tuple(_entries(error)),
            )
    return None


def _entries(error: PenstockError) -> list[dict[str, str]]:
    if isinstance(error, Faults):
        return [entry for fault in error.faults[:ERRORS_SHOWN] for entry in _entries(fault)]
    if isinstance(error, BadParameter):
        return [{"parameter": error.parameter, "detail": error.reason}]
    if isinstance(error, Malformed) or not isinstance(error, Invalid):
        return []
    return [{"pointer": error.pointer, "detail": error.reason}]


def error_of(status: int, body: bytes, retry_after_s: float | None = None) -> PenstockError:
    """The error that an answer tells of; whatever the body is, there is one.

    Args:
        status: of the answer.
        body: of the answer.
        retry_after_s: seconds that its Retry-After asks for; None when it does not ask.
    """
    error = _error_of(status, body)
    if status != HTTPStatus.TOO_MANY_REQUESTS:
        return error
    return (
        Throttled(str(error)) if retry_after_s is None else Throttled(str(error), retry_after_s=retry_after_s)
    )


def _error_of(status: int, body: bytes) -> PenstockError:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict):
        # A proxy in between, or no gateway at all.
        excerpt = body[:200].decode(errors="replace")
        kind = GatewayUnavailable if status >= 500 else PenstockError
        return kind(f"status {status} without a problem document: {excerpt!r}")
    detail = str(document.get("detail") or document.get("title") or f"status {status}")
    entries = [entry for entry in document.get("errors") or () if isinstance(entry, dict)]
    found = next((kind.error for kind in KINDS if kind.uri == document.get("type")), None)
    if found is None:
        found = GatewayUnavailable if status in (502, 503, 504) else PenstockError
    if found is Unavailable:
        found = GatewayUnavailable
    if found is Invalid:
        found = InvalidRecord
    if not issubclass(found, Invalid):
        return found(detail)
    if len(entries) > 1:
        return Faults([found(str(e.get("detail", "")), pointer=str(e.get("pointer", ""))) for e in entries])
    return found(detail, pointer=str(entries[0].get("pointer", "")) if entries else "")
