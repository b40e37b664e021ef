"""Records of task logs (`task-logs.schema.json`): chunks of lines, of one partition.

The partition of a task is its id modulo the number of partitions, so that all of its lines are in
one order. This module only encodes, so that the SDK stays light; `contracts.inbound_logs` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from penstock.core.attempt import count_of
from penstock.core.log_chunk import Chunk, RunId

# Bytes of lines in one record, well below the broker's limit.
RECORD_BYTES = 400_000
# Chunks of one record, and lines of one chunk.
MAX_CHUNKS = 2_000
MAX_LINES = 10_000
# Levels of a field's value; what is deeper becomes text.
MAX_DEPTH = 20

_OPTIONS = orjson.OPT_NON_STR_KEYS


def partition_of(task_id: int, partitions: int) -> int:
    """The partition of a task's lines."""
    return task_id % partitions


def chunk_to_wire(chunk: Chunk, *, worker: bool = False) -> dict[str, Any]:
    """A chunk as records have it; segments also have its worker."""
    wire: dict[str, Any] = {
        "id": chunk.run.task_id,
        "step": chunk.run.step,
        "attempt": chunk.run.attempt,
        "run": chunk.run.run,
        "first": chunk.first,
        "lines": chunk.lines,
    }
    if worker:
        wire["worker"] = chunk.worker
    if chunk.end is not None:
        wire["end"] = chunk.end
    return wire


def encode_record(worker: str, chunks: Iterable[Chunk]) -> bytes:
    """The value of a record: chunks of one worker."""
    return encode_json({"worker": worker, "chunks": [chunk_to_wire(chunk) for chunk in chunks]})


def encode_chunk(chunk: Chunk) -> bytes:
    """A chunk as a line of a segment."""
    return encode_json(chunk_to_wire(chunk, worker=True))


def encode_json(document: Any) -> bytes:
    """The document as JSON; a value that JSON lacks becomes its text.

    A handler's fields may have any value, and a text may have lone surrogates.
    """
    try:
        return orjson.dumps(document, default=_text, option=_OPTIONS)
    except (TypeError, ValueError):
        return orjson.dumps(_plain(document, 0), option=_OPTIONS)


def _text(value: object) -> str:
    try:
        return str(value)
    except BaseException as error:  # noqa: BLE001 (fails open: the class of the value has a broken `__str__`, and the line is kept)
        return f"a value that cannot be printed: {type(error).__name__}"


def _plain(value: Any, depth: int) -> Any:
    """The value with only what JSON has; integers beyond 64 bits and deep values become text."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return value
    if depth <= MAX_DEPTH and isinstance(value, Mapping):
        return {_writable(_text(name)): _plain(item, depth + 1) for name, item in value.items()}
    if depth <= MAX_DEPTH and isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return _writable(_text(value))


def _writable(text: str) -> str:
    return str.__str__(text).encode("utf-8", "backslashreplace").decode()


def chunk_from_wire(raw: Mapping[str, Any], worker: str | None = None) -> Chunk:
    """A chunk that is valid by the schema, or of a segment."""
    # JSON Schema counts 81.0 among the integers.
    run = RunId(int(raw["id"]), int(raw["step"]), count_of(int(raw["attempt"])), raw["run"])
    return Chunk(run, worker or raw["worker"], int(raw["first"]), raw["lines"], raw.get("end"))
