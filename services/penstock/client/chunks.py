"""Splits many tasks or ids into requests that the gateway accepts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import orjson

# The gateway accepts larger requests. Smaller ones show progress, and the gateway inserts several
# together.
CHUNK_TASKS = 500
CHUNK_BYTES = 4 * 1024 * 1024

# The gateway's limit.
MAX_IDS = 10_000

# The most unknown ids that an error names.
MAX_IDS_SHOWN = 20


class Entry(NamedTuple):
    """A task of a request.

    Attributes:
        data: the encoded submission.
        repeatable: the submission has an idempotency key.
        generated: the client generated that idempotency key.
    """

    data: bytes
    repeatable: bool
    generated: bool


def chunks(submissions: Iterable[tuple[dict[str, Any], bool]]) -> Iterable[Sequence[Entry]]:
    """The entries of submissions, in chunks that fit a request.

    Args:
        submissions: JSON objects, each with whether the client generated its idempotency key.
    """
    chunk: list[Entry] = []
    size_bytes = 0
    for wire, generated in submissions:
        data = orjson.dumps(wire)
        if chunk and (len(chunk) == CHUNK_TASKS or size_bytes + len(data) > CHUNK_BYTES):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(Entry(data, "idempotency_key" in wire, generated))
        size_bytes += len(data)
    if chunk:
        yield chunk


def id_chunks(ids: Sequence[int]) -> Iterable[Sequence[int]]:
    """The ids, in chunks of at most `MAX_IDS`."""
    return (ids[start : start + MAX_IDS] for start in range(0, len(ids), MAX_IDS))


def ids_text(ids: Sequence[int]) -> str:
    """The ids as text; of many, the first `MAX_IDS_SHOWN`."""
    text = ", ".join(map(str, ids[:MAX_IDS_SHOWN]))
    return text if len(ids) <= MAX_IDS_SHOWN else f"{text} and {len(ids) - MAX_IDS_SHOWN:,} more"


def shift_pointer(pointer: str, by: int) -> str:
    """The JSON Pointer with `by` added to its first part, when that is a position."""
    head, _, tail = pointer.removeprefix("/").partition("/")
    if not head.isdigit():
        return pointer
    return f"/{int(head) + by}" + (f"/{tail}" if tail else "")
