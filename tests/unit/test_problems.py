"""Problem documents: what an error becomes on the wire, and back."""

from __future__ import annotations

import orjson
import pytest

from penstock.errors import (
    Conflict,
    CorruptObject,
    GatewayUnavailable,
    InvalidRecord,
    KafkaUnavailable,
    Malformed,
    NotFound,
    PenstockError,
    PostgresUnavailable,
    SessionLost,
    Throttled,
    TooLarge,
    UnknownType,
)
from penstock.http.problems import (
    ERRORS_SHOWN,
    BadParameter,
    Faults,
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
def test_an_error_survives_the_way(error: PenstockError, status: int, raised: type[PenstockError]) -> None:
    """T5: the client raises what the gateway raised, with its message and pointer."""
    problem = problem_of(error, "/tasks")
    assert problem is not None
    assert problem.status == status
    back = error_of(problem.status, problem.encode())
    assert type(back) is raised
    assert str(back) == str(error)
    assert getattr(back, "pointer", None) == getattr(error, "pointer", None)


def test_all_faults_travel_up_to_a_limit() -> None:
    """T5: a batch that is wrong in every entry is told of the first hundred."""
    faults = Faults([InvalidRecord("bad", pointer=f"/{n}/type") for n in range(500)])
    problem = problem_of(faults, "/tasks")
    assert problem is not None
    assert problem.detail == "bad (and 499 more)"
    back = error_of(422, problem.encode())
    assert isinstance(back, Faults)
    assert [fault.pointer for fault in back.faults] == [f"/{n}/type" for n in range(ERRORS_SHOWN)]


def test_a_parameter_is_named() -> None:
    """A query has no pointers."""
    problem = problem_of(BadParameter("must be a number", parameter="limit"), "/tasks")
    assert problem is not None
    assert orjson.loads(problem.encode())["errors"] == [
        {"parameter": "limit", "detail": "limit: must be a number"}
    ]


def test_how_long_to_wait_is_told_or_a_second() -> None:
    """H3: a proxy's 429 without a document, too, is one to be waited for."""
    told = error_of(429, b"slow down", 7.0)
    untold = error_of(429, b"")
    assert isinstance(told, Throttled)
    assert isinstance(untold, Throttled)
    assert (told.retry_after_s, untold.retry_after_s) == (7.0, 1.0)


def test_what_ends_the_process_is_no_problem_of_clients() -> None:
    """Internals stay inside: such an error becomes a plain 500."""
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
def test_whatever_comes_back_becomes_an_error(status: int, body: bytes, raised: type[PenstockError]) -> None:
    """A proxy in between may answer anything."""
    assert type(error_of(status, body)) is raised


def test_pointers_can_be_moved() -> None:
    """A chunk's errors become errors of the whole."""
    moved = relocated(
        Faults([TooLarge("a", pointer="/0"), InvalidRecord("b", pointer="/1")]), lambda p: "/x" + p
    )
    assert isinstance(moved, Faults)
    assert [(type(f), f.pointer) for f in moved.faults] == [(TooLarge, "/x/0"), (InvalidRecord, "/x/1")]
