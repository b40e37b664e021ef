"""Splits many tasks or ids into requests that the gateway accepts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from penstock.errors import InvalidRecord

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
        position: in the caller's list.
        data: the encoded submission.
        repeatable: the submission has an idempotency key.
        generated: the client generated that idempotency key.
    """

    position: int
    data: bytes
    repeatable: bool
    generated: bool

    @classmethod
    def encode(cls, position: int, wire: Mapping[str, Any], *, generated: bool) -> Entry:
        """Encodes a submission.

        Raises:
            InvalidRecord: it is not JSON.
        """
        try:
            data = orjson.dumps(wire)
        except TypeError as error:
            raise InvalidRecord(f"not JSON: {error}") from error
        return cls(position, data, "idempotency_key" in wire, generated)


def chunks(entries: Iterable[Entry]) -> Iterable[Sequence[Entry]]:
    """The entries, in chunks that fit a request."""
    chunk: list[Entry] = []
    size_bytes = 0
    for entry in entries:
        if chunk and (len(chunk) == CHUNK_TASKS or size_bytes + len(entry.data) > CHUNK_BYTES):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(entry)
        size_bytes += len(entry.data)
    if chunk:
        yield chunk


def id_chunks(ids: Sequence[int]) -> Iterable[Sequence[int]]:
    """The ids, in chunks of at most `MAX_IDS`."""
    return (ids[start : start + MAX_IDS] for start in range(0, len(ids), MAX_IDS))


def ids_text(ids: Sequence[int]) -> str:
    """The ids as text; of many, the first `MAX_IDS_SHOWN`."""
    text = ", ".join(map(str, ids[:MAX_IDS_SHOWN]))
    return text if len(ids) <= MAX_IDS_SHOWN else f"{text} and {len(ids) - MAX_IDS_SHOWN:,} more"


def pointer_of(pointer: str, chunk: Sequence[Entry]) -> str:
    """A JSON Pointer into a request, as one into the caller's list."""
    head, _, tail = pointer.removeprefix("/").partition("/")
    if not head.isdigit():
        return pointer
    return f"/{chunk[int(head)].position}" + (f"/{tail}" if tail else "")
