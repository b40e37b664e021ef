"""Requests with one entry, or with a batch whose entries are judged alone.

A faulty entry does not stop the others, nor does one that the object store cannot take now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol, TypeAlias, TypeVar

from aiohttp import web

from penstock.contracts.parsing import Unreadable
from penstock.contracts.validation import problems
from penstock.errors import Invalid, InvalidRecord, ObjectsUnavailable, TooLarge
from penstock.gateway.bodies import read_entries
from penstock.gateway.submission_limiter import SubmissionLimiter
from penstock.http.problems import Faults, detail_of, relocated
from penstock.http.server import RETRY_AFTER_S, body_bytes, refuse_unknown_parameters, respond

log = logging.getLogger(__name__)

# Objects of one request that are stored at once.
_CONCURRENT_OBJECTS = 16

T = TypeVar("T")


class Taken(Protocol):
    """The outcome of an entry."""

    @property
    def id(self) -> int | str:
        """Its id."""
        ...

    @property
    def created(self) -> bool:
        """False when an earlier entry created it."""
        ...


# The outcome of an entry: what it became, its fault, or the server that it waits for.
Outcome: TypeAlias = Taken | Invalid | ObjectsUnavailable


@dataclass(frozen=True, slots=True)
class EntryKind:
    """The words of a route.

    Attributes:
        noun: of an entry, such as `task`.
        member: of the answer to a batch, such as `tasks`.
        stored_field: the field that may be in the object store.
        path: of what an entry became, with its id behind; None if it cannot be read.
    """

    noun: str
    member: str
    stored_field: str
    path: str | None


@asynccontextmanager
async def admitted(request: web.Request, limiter: SubmissionLimiter) -> AsyncIterator[tuple[Any, int]]:
    """Yields an entry or an array of them, and their number; the limiter counts them meanwhile.

    Raises:
        BadParameter: the request has a parameter.
        Malformed, TooLarge: as `read_entries`.
        Throttled: a limit of the limiter is reached.
    """
    refuse_unknown_parameters(request)
    limiter.require_room()
    raw = await read_entries(request, "")
    rows = len(raw) if isinstance(raw, list) else 1
    with limiter.reserve(rows, body_bytes(request)):
        yield raw, rows


def read_entry(base: str, raw: Any, from_wire: Callable[[Any], T], schema: str) -> T | Invalid:
    """The value of an entry, or all its faults, whose pointers begin with `base`."""
    if isinstance(raw, Unreadable):
        return InvalidRecord(raw.fault.reason, pointer=base)
    try:
        return from_wire(raw)
    except Invalid as error:
        # `from_wire` stops at the first fault; the answer has all.
        found: Sequence[Invalid] = problems(raw, schema) or [error]
        return one_or_all([with_base(base, fault) for fault in found])


async def answer(
    raw: Any,
    kind: EntryKind,
    limit: int,
    settle: Callable[[list[tuple[str, Any]]], Awaitable[Sequence[Outcome]]],
) -> web.Response:
    """The response to a request with entries.

    Args:
        raw: an entry, or an array of them.
        kind: of the route.
        limit: most entries.
        settle: takes the pointer and the value of each entry, and returns their outcomes.

    Raises:
        Invalid, ObjectsUnavailable: no entry was taken.
    """
    if not isinstance(raw, list):
        [taken] = await settle([("", raw)])
        if isinstance(taken, Invalid | ObjectsUnavailable):
            raise taken
        headers = None if kind.path is None else {"Location": f"{kind.path}{taken.id}"}
        return respond({"id": taken.id, "created": taken.created}, 201 if taken.created else 200, headers)
    if not raw:
        raise InvalidRecord(f"a batch needs at least one {kind.noun}")
    if len(raw) > limit:
        raise TooLarge(
            f"{len(raw):,} {kind.member} in one batch, and {limit:,} are allowed: send several batches"
        )
    entries = [(f"/{index}", entry) for index, entry in enumerate(raw)]
    return _answer_batch(entries, await settle(entries), kind)


def _answer_batch(
    entries: Sequence[tuple[str, Any]], outcomes: Sequence[Outcome], kind: EntryKind
) -> web.Response:
    unavailable = [outcome for outcome in outcomes if isinstance(outcome, ObjectsUnavailable)]
    taken = [each for each in outcomes if not isinstance(each, Invalid | ObjectsUnavailable)]
    if not taken:
        faults = faults_of(outcomes)
        # The same batch may be sent again: the gateway has done nothing.
        raise unavailable[0] if unavailable else one_or_all(faults)
    status, headers = 200, None
    if unavailable:
        log.warning(
            "Submissions of a batch wait for the object store; the others are submitted",
            extra={
                "event": "submissions_unserved",
                "submissions": len(unavailable),
                "error": unavailable[0],
            },
        )
        headers = {"Retry-After": str(RETRY_AFTER_S)}
    if len(taken) < len(outcomes):
        status = HTTPStatus.MULTI_STATUS
    elif any(outcome.created for outcome in taken):
        status = 201
    documents = [_document(base, outcome, kind) for (base, _), outcome in zip(entries, outcomes, strict=True)]
    return respond({kind.member: documents}, status, headers)


async def settle(
    entries: Sequence[tuple[str, Any]],
    read: Sequence[T | Invalid],
    store: Callable[[T], Awaitable[T]],
    insert: Callable[[list[T]], Awaitable[Sequence[Taken | Invalid]]],
) -> list[Outcome]:
    """Stores and inserts the entries that could be read; returns the outcome of each entry.

    Args:
        entries: pointer and value of each.
        read: what was read of each, or its faults.
        store: puts a large field into the object store.
        insert: returns what each became, or why it is refused.
    """
    outcomes: list[Any] = [*read]
    storing = asyncio.Semaphore(_CONCURRENT_OBJECTS)

    async def stored(index: int) -> None:
        try:
            async with storing:
                outcomes[index] = await store(outcomes[index])
        except ObjectsUnavailable as error:
            outcomes[index] = error

    # Large fields together: each waits while the object store is away.
    readable = [index for index, each in enumerate(read) if not isinstance(each, Invalid)]
    await asyncio.gather(*map(stored, readable))
    stored_at = [index for index in readable if not isinstance(outcomes[index], ObjectsUnavailable)]
    if stored_at:
        inserted = await insert([outcomes[index] for index in stored_at])
        for index, found in zip(stored_at, inserted, strict=True):
            base = entries[index][0]
            outcomes[index] = with_base(base, found) if isinstance(found, Invalid) else found
    return outcomes


def faults_of(outcomes: Iterable[object]) -> list[Invalid]:
    """The faults among outcomes, one by one."""
    found = [outcome for outcome in outcomes if isinstance(outcome, Invalid)]
    return [fault for each in found for fault in (each.faults if isinstance(each, Faults) else [each])]


def one_or_all(faults: Sequence[Invalid]) -> Invalid:
    """One error for at least one fault."""
    return faults[0] if len(faults) == 1 else Faults(faults)


def with_base(base: str, fault: Invalid) -> Invalid:
    """A fault whose pointers begin with the place of its entry."""
    return relocated(fault, lambda pointer: base + pointer)


def _document(base: str, outcome: Outcome, kind: EntryKind) -> dict[str, Any]:
    if isinstance(outcome, ObjectsUnavailable):
        pointer = f"{base}/{kind.stored_field}"
        return {"errors": [{"pointer": pointer, "detail": detail_of(outcome)}], "retry": True}
    if isinstance(outcome, Invalid):
        errors = [{"pointer": fault.pointer, "detail": fault.reason} for fault in faults_of([outcome])]
        return {"errors": errors}
    return {"id": outcome.id, "created": outcome.created}
