"""Reads the bodies of requests; the entries of a body are read alone."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from penstock.contracts.parsing import Unreadable, parse, parse_batch
from penstock.errors import InvalidRecord, Malformed
from penstock.gateway.openapi import conform, find_faults
from penstock.http.server import read_body, refuse_unknown_parameters


async def read_document(request: web.Request, schema: str) -> dict[str, Any]:
    """The body of a request without parameters, which conforms to a schema of the description.

    Raises:
        BadParameter: the request has a parameter.
        Malformed, TooLarge: as `read_json`.
        InvalidRecord, Faults: the body does not conform.
    """
    refuse_unknown_parameters(request)
    raw: dict[str, Any] = await read_json(request)
    conform(raw, schema)
    return raw


async def read_json(request: web.Request, limit_bytes: int | None = None, *, unique: bool = True) -> Any:
    """The JSON value of a request's body.

    Args:
        request: has the body.
        limit_bytes: of the body; None is the limit of the gateway.
        unique: refuse a name that stands twice in an object. Routes of workers, which have much
            traffic from programs, take the last one.

    Raises:
        Malformed: the body is not JSON in UTF-8.
        InvalidRecord: a name stands twice.
        TooLarge: the body is longer than the limit.
    """
    data = await read_body(request, request.client_max_size if limit_bytes is None else limit_bytes)
    try:
        return parse(data, exact=True, unique=unique)
    except InvalidRecord as error:
        raise _as_problem(error) from error


async def read_entries(request: web.Request, member: str, *, unique: bool = False) -> Any:
    """As `read_json`, for a body with entries: one that cannot be read alone is `Unreadable`.

    Args:
        request: has the body.
        member: name of the array in the body's object; "" when the body is the array.
        unique: see `read_json`.

    Raises:
        Malformed: the body as a whole is not JSON in UTF-8.
        InvalidRecord: the body is no array, and a name stands twice.
        TooLarge: the body is longer than the limit, or has too many entries.
    """
    data = await read_body(request, request.client_max_size)
    try:
        return parse_batch(data, member, exact=True, unique=unique)
    except InvalidRecord as error:
        raise _as_problem(error) from error


def _as_problem(error: InvalidRecord) -> InvalidRecord:
    """The fault of a body that can be read, if it has a place, or of one that cannot be read."""
    return error if error.pointer else Malformed(error.reason)


async def read_ids(request: web.Request) -> tuple[list[int], dict[str, Any]]:
    """The ids of a body, and the field `rejected` of its answer if an entry is no id.

    Raises:
        InvalidRecord, Faults: no entry is an id, or the body has another fault.
    """
    raw = await read_entries(request, "ids")
    rejected: list[dict[str, Any]] = []
    if find_faults(_shown(raw), "Ids"):
        entries = raw.get("ids") if isinstance(raw, dict) else None
        found = {
            index: InvalidRecord(entry.fault.reason)
            if isinstance(entry, Unreadable)
            else next(iter(find_faults({"ids": [entry]}, "Ids")), None)
            for index, entry in enumerate(entries if isinstance(entries, list) else [])
        }
        faulty = {index: fault for index, fault in found.items() if fault is not None}
        kept = [entry for index, entry in enumerate(entries or []) if index not in faulty]
        # Without a good entry the answer is a problem with all faults.
        conform({**raw, "ids": kept} if kept else _shown(raw), "Ids")
        rejected = [
            {"index": index, "errors": [{"pointer": f"/ids/{index}", "detail": fault.reason}]}
            for index, fault in faulty.items()
        ]
        raw["ids"] = kept
    # To JSON Schema 81.0 is an integer.
    return [int(task_id) for task_id in raw["ids"]], {"rejected": rejected} if rejected else {}


def _shown(raw: Any) -> Any:
    """A body of ids, with null in place of each that cannot be read."""
    if not isinstance(raw, dict) or not isinstance(raw.get("ids"), list):
        return raw
    return {**raw, "ids": [None if isinstance(entry, Unreadable) else entry for entry in raw["ids"]]}
