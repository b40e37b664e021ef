"""Requests with one entry, or with a batch whose entries are judged alone.

A faulty entry does not stop the others, nor does one that the object store cannot take now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol, TypeAlias, TypeVar

from aiohttp import web

from penstock.contracts.parsing import Unreadable
from penstock.errors import Invalid, InvalidRecord, ObjectsUnavailable, TooLarge, one_or_all
from penstock.gateway.bodies import read_entries
from penstock.gateway.submission_limiter import SubmissionLimiter
from penstock.http.problems import detail_of, relocated
from penstock.http.server import RETRY_AFTER_S, body_bytes, refuse_unknown_parameters, respond
from penstock.submission import SubmissionKind

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
async def admitted(
    request: web.Request, limiter: SubmissionLimiter, *, unique: bool = False
) -> AsyncIterator[tuple[Any, int]]:
    """Yields an entry or an array of them, and their number; the limiter counts them meanwhile.

    Raises:
        BadParameter: the request has a parameter.
        Malformed, InvalidRecord, TooLarge: as `read_entries`, also for `unique`.
        Throttled: a limit of the limiter is reached.
    """
    refuse_unknown_parameters(request)
    limiter.require_room()
    raw = await read_entries(request, "", unique=unique)
    rows = len(raw) if isinstance(raw, list) else 1
    with limiter.reserve(rows, body_bytes(request)):
        yield raw, rows


async def answer(
    raw: Any,
    kind: EntryKind,
    limit: int,
    settle: Callable[[list[Any]], Awaitable[Sequence[Outcome]]],
) -> web.Response:
    """The response to a request with entries.

    Args:
        raw: an entry, or an array of them.
        kind: of the route.
        limit: most entries.
        settle: takes the entries, as for `SubmissionKind.decode`; returns the outcome of each.

    Raises:
        Invalid, ObjectsUnavailable: no entry was taken.
    """
    if not isinstance(raw, list):
        [taken] = await settle([raw])
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
    entries = [entry.fault if isinstance(entry, Unreadable) else entry for entry in raw]
    return _answer_batch([*map(_placed, range(len(raw)), await settle(entries))], kind)


def _placed(index: int, outcome: Outcome) -> Outcome:
    """The outcome of an entry of a batch, with its place in the pointers of its faults."""
    if not isinstance(outcome, Invalid):
        return outcome
    return relocated(outcome, lambda pointer: f"/{index}{pointer}")


def _answer_batch(outcomes: Sequence[Outcome], kind: EntryKind) -> web.Response:
    unavailable = [outcome for outcome in outcomes if isinstance(outcome, ObjectsUnavailable)]
    taken = [each for each in outcomes if not isinstance(each, Invalid | ObjectsUnavailable)]
    if not taken:
        faults = [fault for outcome in outcomes if isinstance(outcome, Invalid) for fault in outcome.faults]
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
    documents = [_document(index, outcome, kind) for index, outcome in enumerate(outcomes)]
    return respond({kind.member: documents}, status, headers)


async def settle(
    kind: SubmissionKind[Any, T, Taken | Invalid],
    admitted: Sequence[T | Invalid],
    insert: Callable[[list[T]], Awaitable[Sequence[Taken | Invalid]]],
) -> list[Outcome]:
    """Stores and inserts the admitted entries; returns the outcome of each entry.

    Args:
        kind: of the entries.
        admitted: the item of each, or its faults.
        insert: returns what each became, or why it is refused.
    """
    outcomes: list[Any] = [*admitted]
    storing = asyncio.Semaphore(_CONCURRENT_OBJECTS)

    async def stored(index: int) -> None:
        try:
            async with storing:
                outcomes[index] = await kind.store(outcomes[index])
        except ObjectsUnavailable as error:
            outcomes[index] = error

    # Large fields together: each waits while the object store is away.
    readable = [index for index, each in enumerate(admitted) if not isinstance(each, Invalid)]
    await asyncio.gather(*map(stored, readable))
    stored_at = [index for index in readable if not isinstance(outcomes[index], ObjectsUnavailable)]
    if stored_at:
        inserted = await insert([outcomes[index] for index in stored_at])
        for index, found in zip(stored_at, inserted, strict=True):
            outcomes[index] = found
    return outcomes


def _document(index: int, outcome: Outcome, kind: EntryKind) -> dict[str, Any]:
    if isinstance(outcome, ObjectsUnavailable):
        pointer = f"/{index}/{kind.stored_field}"
        return {"errors": [{"pointer": pointer, "detail": detail_of(outcome)}], "retry": True}
    if isinstance(outcome, Invalid):
        errors = [{"pointer": fault.pointer, "detail": fault.reason} for fault in outcome.faults]
        return {"errors": errors}
    return {"id": outcome.id, "created": outcome.created}
