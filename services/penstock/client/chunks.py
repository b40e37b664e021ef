"""What is asked about many things at once, in requests of a bearable size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

# The gateway takes more; smaller requests show progress and share its statements.
CHUNK_TASKS = 500
CHUNK_BYTES = 4 * 1024 * 1024

# The gateway's limit.
IDS_AT_ONCE = 10_000


# A task encoded, whether it has a key, and whether the key is ours.
Entry = tuple[bytes, bool, bool]


def chunks(drafts: Iterable[tuple[dict[str, Any], bool]]) -> Iterable[Sequence[Entry]]:
    """The entry of each task, in chunks that fit a request."""
    chunk: list[Entry] = []
    size = 0
    for wire, ours in drafts:
        data = orjson.dumps(wire)
        if chunk and (len(chunk) == CHUNK_TASKS or size + len(data) > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append((data, "idempotency_key" in wire, ours))
        size += len(data)
    if chunk:
        yield chunk


def parts(ids: Sequence[int]) -> Iterable[Sequence[int]]:
    """The ids, as many together as the gateway takes."""
    return (ids[start : start + IDS_AT_ONCE] for start in range(0, len(ids), IDS_AT_ONCE))


def moved(pointer: str, by: int) -> str:
    """A pointer into a chunk as one that begins with the position in all drafts."""
    head, _, tail = pointer.removeprefix("/").partition("/")
    if not head.isdigit():
        return pointer
    return f"/{int(head) + by}" + (f"/{tail}" if tail else "")
