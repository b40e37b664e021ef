"""A header of records of results, which names those with which the worker goes on.

It is a header because services of earlier versions refuse a value with an unknown member. They make
such a task ready, and the fence accepts one of two results.
"""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from penstock.contracts.result import StageResult
from penstock.core.attempt import CHOSEN
from penstock.core.going_on import NUMBERS

HEADER = "penstock-goes-on"

# A record has at most 10,000 results, so more is not read.
_MAX_BYTES = 500_000


def headers_of_going_on(results: Iterable[StageResult]) -> list[tuple[str, bytes]]:
    """The headers of a record with these results; none when no worker goes on."""
    found = [
        [result.fence.id, result.fence.step, result.goes_on]
        for result in results
        if result.goes_on is not None
    ]
    return [(HEADER, orjson.dumps(found))] if found else []


def decode_going_on(value: bytes | None) -> dict[tuple[int, int], int]:
    """By task and step, the numbers of the attempts with which workers go on.

    None of a header that is missing, too large or malformed, and none that no worker chooses.
    """
    if value is None or len(value) > _MAX_BYTES:
        return {}
    try:
        found = {(task, step): number for task, step, number in orjson.loads(value)}
    except (ValueError, TypeError):
        return {}
    return {
        place: number
        for place, number in found.items()
        if type(number) is int and CHOSEN <= number < CHOSEN + NUMBERS
    }
