"""Problem documents (RFC 9457): converts errors to `application/problem+json` and back.

A problem has the standard members type, title, status, detail and instance. It may also have
`errors`, with one entry for each fault: `detail`, and either a JSON Pointer into the body
(`pointer`) or the name of a query parameter (`parameter`). A refused recovery has `code` and
`nodes`. Gateway and client both use this module, so that the client raises the error that the
gateway raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson

from penstock.errors import (
    Conflict,
    CorruptObject,
    Faults,
    Forbidden,
    GatewayUnavailable,
    IdempotencyConflict,
    Invalid,
    InvalidRecord,
    Malformed,
    NotFound,
    ObjectsUnavailable,
    OtherDeployment,
    PenstockError,
    RecoveryRefused,
    RerunRefused,
    Throttled,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnknownFlow,
    UnknownType,
)

CONTENT_TYPE = "application/problem+json"

# Bounds the document of a batch in which every entry is invalid.
MAX_ERRORS_SHOWN = 100


class BadParameter(Invalid):
    """A query parameter is invalid.

    Attributes:
        parameter: its name.
    """

    def __init__(self, reason: str, *, parameter: str) -> None:
        super().__init__(f"{parameter}: {reason}")
        self.parameter = parameter


def relocated(error: Invalid, move: Callable[[str], str]) -> Invalid:
    """A copy of an error in which `move` has changed its pointer and those of its faults."""
    if isinstance(error, Faults):
        return Faults([relocated(fault, move) for fault in error.faults])
    return type(error)(error.reason, pointer=move(error.pointer))


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """One kind of problem, with its URI, status and title."""

    name: str
    status: int
    title: str
    error: type[PenstockError]

    @property
    def uri(self) -> str:
        """The problem's `type`."""
        return f"urn:penstock:problem:{self.name}"


# The first entry whose class matches applies, so subclasses come before their bases.
KINDS = (
    ProblemKind("malformed", 400, "The body cannot be read", Malformed),
    ProblemKind("unknown-type", 422, "No such task type", UnknownType),
    ProblemKind("unknown-flow", 422, "No such flow definition", UnknownFlow),
    ProblemKind(
        "idempotency-conflict", 409, "The idempotency key was used with another context", IdempotencyConflict
    ),
    ProblemKind("too-large", 413, "Larger than the limit", TooLarge),
    ProblemKind("corrupt-object", 500, "A stored object is corrupt", CorruptObject),
    ProblemKind("invalid", 422, "The request breaks its contract", Invalid),
    ProblemKind("unauthenticated", 401, "Not authenticated", Unauthenticated),
    ProblemKind("forbidden", 403, "Not allowed", Forbidden),
    ProblemKind("not-found", 404, "Not found", NotFound),
    ProblemKind("recovery-refused", 409, "The flow cannot be recovered now", RecoveryRefused),
    ProblemKind("rerun-refused", 409, "The task cannot be run again from this stage", RerunRefused),
    ProblemKind("conflict", 409, "Not possible in this state", Conflict),
    ProblemKind("other-deployment", 421, "Another deployment", OtherDeployment),
    ProblemKind("throttled", 429, "Too many requests", Throttled),
    ProblemKind("unavailable", 503, "Try again in a moment", Unavailable),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem document.

    Attributes:
        type: URI of the kind; "about:blank" for a problem that only its status describes.
        title: one sentence that all problems of a kind share.
        status: HTTP status.
        detail: one sentence about this occurrence.
        instance: the path of the request, or the id of an entry in the log.
        errors: one entry for each fault.
        code: why a recovery or a rerun is refused.
        nodes: the nodes in the way of a recovery; None if it is none.
    """

    type: str
    title: str
    status: int
    detail: str
    instance: str = ""
    errors: tuple[Mapping[str, str], ...] = ()
    code: str = ""
    nodes: tuple[str, ...] | None = None

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
        if self.code:
            document["code"] = self.code
        if self.nodes is not None:
            document["nodes"] = list(self.nodes)
        return orjson.dumps(document)


def problem_of(error: PenstockError, instance: str) -> Problem | None:
    """The problem of an error; None when clients must not see the error."""
    for kind in KINDS:
        if isinstance(error, kind.error):
            return Problem(
                type=kind.uri,
                title=kind.title,
                status=kind.status,
                detail=detail_of(error),
                instance=instance,
                errors=tuple(_entries(error)),
                code=error.code if isinstance(error, RecoveryRefused | RerunRefused) else "",
                nodes=error.nodes if isinstance(error, RecoveryRefused) else None,
            )
    return None


def detail_of(error: PenstockError) -> str:
    """The sentence about an error that clients may see."""
    if isinstance(error, ObjectsUnavailable):
        # Its text names the store, which is no concern of a tenant. The log has it.
        return "the object store is unavailable"
    return error.reason if isinstance(error, Invalid) else str(error)


def _entries(error: PenstockError) -> list[dict[str, str]]:
    if isinstance(error, Faults):
        return [entry for fault in error.faults[:MAX_ERRORS_SHOWN] for entry in _entries(fault)]
    if isinstance(error, BadParameter):
        return [{"parameter": error.parameter, "detail": error.reason}]
    if isinstance(error, Malformed) or not isinstance(error, Invalid):
        return []
    return [{"pointer": error.pointer, "detail": error.reason}]


def error_of(status: int, body: bytes, retry_after_s: float | None = None) -> PenstockError:
    """The error of a response; any body gives one.

    Args:
        status: status of the response.
        body: body of the response.
        retry_after_s: seconds in its Retry-After header; None without one.
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
        # The response of a proxy, or of another server than a gateway.
        excerpt = body[:200].decode(errors="replace")
        kind = GatewayUnavailable if status >= 500 else PenstockError
        return kind(f"status {status} without a problem document: {excerpt!r}")
    detail = str(document.get("detail") or document.get("title") or f"status {status}")
    entries = [entry for entry in document.get("errors") or () if isinstance(entry, dict)]
    error = next((kind.error for kind in KINDS if kind.uri == document.get("type")), None)
    if error is None:
        error = GatewayUnavailable if status in (502, 503, 504) else PenstockError
    if error is Unavailable:
        error = GatewayUnavailable
    if error is Invalid:
        error = InvalidRecord
    if error is RecoveryRefused:
        nodes = [str(node) for node in document.get("nodes") or ()]
        return RecoveryRefused(detail, code=str(document.get("code", "")), nodes=nodes)
    if error is RerunRefused:
        return RerunRefused(detail, code=str(document.get("code", "")))
    if not issubclass(error, Invalid):
        return error(detail)
    if len(entries) > 1:
        return Faults([error(str(e.get("detail", "")), pointer=str(e.get("pointer", ""))) for e in entries])
    return error(detail, pointer=str(entries[0].get("pointer", "")) if entries else "")
