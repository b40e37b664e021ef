"""Reads the records of task logs and validates them by their schema."""

from __future__ import annotations

from typing import Any

from penstock.contracts.parsing import parse
from penstock.contracts.report_tokens import HEADER, decode_tokens, unproven_report
from penstock.contracts.task_log import chunk_from_wire
from penstock.contracts.validation import conform
from penstock.core.log_chunk import Chunk
from penstock.core.report_tokens import ReportTokens
from penstock.errors import InvalidRecord

# Name of the schema in schemas/messages.
SCHEMA = "task-logs"


def logs_of(record: Any, tokens: ReportTokens) -> list[Chunk]:
    """The chunks of a record with headers; those without the token of their attempt are left out.

    Raises:
        InvalidRecord: the record breaks its schema, or has no chunk with its token.
        TooLarge: it is larger than any record of task logs.
    """
    chunks = decode_logs(record.value or b"")
    given = decode_tokens(dict(record.headers or ()).get(HEADER))
    unproven = tokens.unproven({chunk.run.attempt_id for chunk in chunks}, given)
    proven = [chunk for chunk in chunks if chunk.run.attempt_id not in unproven]
    if chunks and not proven:
        raise unproven_report()
    return proven


def decode_logs(data: bytes) -> list[Chunk]:
    """The chunks of a record.

    Raises:
        InvalidRecord: the record breaks `task-logs.schema.json`.
        TooLarge: it is larger than any record of task logs.
    """
    return read_logs(parse(data))


def read_logs(raw: Any) -> list[Chunk]:
    """The chunks of a document.

    Raises:
        InvalidRecord: the document breaks `task-logs.schema.json`.
    """
    try:
        conform(raw, SCHEMA)
        return [chunk_from_wire(chunk, raw["worker"]) for chunk in raw["chunks"]]
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        # Validation did not foresee this content. Without the translation it would stop the
        # partition in tasklogs, and each gateway that reads it.
        raise InvalidRecord(f"cannot be read: {error!r}") from error
