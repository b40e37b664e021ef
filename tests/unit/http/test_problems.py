"""Problem documents: errors are encoded and decoded."""

from __future__ import annotations

import orjson
import pytest

from penstock.errors import (
    Conflict,
    CorruptObject,
    Faults,
    GatewayUnavailable,
    InvalidRecord,
    KafkaUnavailable,
    Malformed,
    NotFound,
    ObjectsUnavailable,
    PenstockError,
    PostgresUnavailable,
    SessionLost,
    Throttled,
    TooLarge,
    UnknownType,
)
from penstock.http.problems import (
    MAX_ERRORS_SHOWN,
    BadParameter,
    error_of,
    problem_of,
    relocated,
)


@pytest.mark.parametrize(
    ("error", "status", "raised"),
    [
        (Malformed("no JSON"), 400, Malformed),
        (InvalidRecord("bad", pointer="/a"), 422, InvalidRecord),
        (UnknownType("none", pointer="/type"), 422, UnknownType),
        (TooLarge("big", pointer="/context"), 413, TooLarge),
        (CorruptObject("torn"), 500, CorruptObject),
        (NotFound("gone"), 404, NotFound),
        (Conflict("late"), 409, Conflict),
        (Throttled("full"), 429, Throttled),
        (KafkaUnavailable("away"), 503, GatewayUnavailable),
        (PostgresUnavailable("away"), 503, GatewayUnavailable),
    ],
)
def test_an_error_survives_the_round_trip(
    error: PenstockError, status: int, raised: type[PenstockError]
) -> None:
    """T5: the client raises what the gateway raised, with its message and pointer."""
    problem = problem_of(error, "/tasks")
    assert problem is not None
    assert problem.status == status
    decoded = error_of(problem.status, problem.encode())
    assert type(decoded) is raised
    assert str(decoded) == str(error)
    assert getattr(decoded, "pointer", None) == getattr(error, "pointer", None)


def test_a_problem_has_a_limited_number_of_faults() -> None:
    """T5: the problem of a batch with a fault in every entry has the first hundred."""
    faults = Faults([InvalidRecord("bad", pointer=f"/{n}/type") for n in range(500)])
    problem = problem_of(faults, "/tasks")
    assert problem is not None
    assert problem.detail == "bad (and 499 more)"
    decoded = error_of(422, problem.encode())
    assert isinstance(decoded, Faults)
    assert [fault.pointer for fault in decoded.faults] == [f"/{n}/type" for n in range(MAX_ERRORS_SHOWN)]


def test_a_fault_of_a_parameter_has_its_name() -> None:
    """A query parameter has no JSON Pointer."""
    problem = problem_of(BadParameter("must be a number", parameter="limit"), "/tasks")
    assert problem is not None
    assert orjson.loads(problem.encode())["errors"] == [
        {"parameter": "limit", "detail": "limit: must be a number"}
    ]


def test_retry_after_defaults_to_one_second() -> None:
    """H3: a 429 of a proxy, without a problem document, becomes an error with a delay."""
    with_header = error_of(429, b"slow down", 7.0)
    without_header = error_of(429, b"")
    assert isinstance(with_header, Throttled)
    assert isinstance(without_header, Throttled)
    assert (with_header.retry_after_s, without_header.retry_after_s) == (7.0, 1.0)


def test_an_internal_error_has_no_problem() -> None:
    """An error that ends the process becomes a 500 without details."""
    assert problem_of(SessionLost("generation over"), "/tasks") is None


@pytest.mark.parametrize(
    ("status", "body", "raised"),
    [
        (502, b"<html>bad gateway</html>", GatewayUnavailable),
        (503, b"", GatewayUnavailable),
        (503, b'{"detail": "later"}', GatewayUnavailable),
        (404, b"nothing", PenstockError),
        (418, b'{"title": "teapot", "errors": "none"}', PenstockError),
        (400, b"[1]", PenstockError),
        (422, b'{"type": "urn:penstock:problem:invalid"}', InvalidRecord),
    ],
)
def test_any_response_becomes_an_error(status: int, body: bytes, raised: type[PenstockError]) -> None:
    """A proxy between client and gateway may answer anything."""
    assert type(error_of(status, body)) is raised


def test_pointers_can_be_relocated() -> None:
    """The pointers of a chunk's errors become pointers into the whole batch."""
    moved = relocated(
        Faults([TooLarge("a", pointer="/0"), InvalidRecord("b", pointer="/1")]), lambda p: "/x" + p
    )
    assert isinstance(moved, Faults)
    assert [(type(f), f.pointer) for f in moved.faults] == [(TooLarge, "/x/0"), (InvalidRecord, "/x/1")]


def test_a_problem_does_not_name_the_object_store() -> None:
    """O5: a tenant does not learn where contexts are stored."""
    problem = problem_of(
        ObjectsUnavailable("the object store s3://bucket/prefix cannot be written"), "/tasks"
    )
    assert problem is not None
    assert (problem.status, problem.detail) == (503, "the object store is unavailable")
