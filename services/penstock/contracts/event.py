"""What consumers and callback targets are told (`event.schema.json`), and callbacks on their way (`callback.schema.json`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import orjson

from penstock.contracts.revocation import Revocation
from penstock.core.target import TargetId
from penstock.core.task import FINAL

# Stands for the value of a header wherever it is shown.
MASK = "***"

# Names of the events that end a task, and of all there are.
FINAL_EVENTS = frozenset(f"task.{state}" for state in FINAL)
EVENTS = FINAL_EVENTS | {"task.advanced", "task.retried", "task.expired"}


# A record of callbacks has no more of them than this, and beyond one no more bytes: they are acknowledged together.
CALLBACKS_PER_RECORD = 100
CALLBACK_RECORD_BYTES = 128 * 1024


def origin_of(url: str) -> str:
    """Scheme, host and port of a URL, which is all that a log may have of it: the rest may be a secret."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "(no URL)"
    if not (parts.scheme and host):
        return "(no URL)"
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{f':{port}' if port else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A transition of a task.

    Attributes:
        id: the same whenever this event is sent again: `<task>-<step>-<attempt>-<word>`.
        name: one of `EVENTS`.
        at: when it was committed.
        task: id, type, stage, step, attempt, state, labels and idempotency key after the transition.
        detail: `result` fields of a task that succeeded, `error` of one that failed.
    """

    id: str
    name: str
    at: datetime
    task: Mapping[str, Any]
    detail: Mapping[str, Any]

    def encode(self) -> bytes:
        """The record's value and, to the byte, the body of a callback that asks for no other format."""
        return orjson.dumps(
            {
                "id": self.id,
                "event": self.name,
                "at": self.at.astimezone(UTC),
                "task": self.task,
                **self.detail,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """One event on its way to one target.

    Attributes:
        id: stays the same for all attempts; sent as `webhook-id`.
        target: which; its namespace is not on the wire, since the type stands in the body.
        task_id: the task it tells of.
        attempt: how many attempts were made before this record was written.
        body: what is sent, to the byte.
        headers: sent beside the standard ones or, as a content type, instead; the values are secrets.
        ordered: not to be sent before those of the same task that are owed to this target since earlier.
    """

    # What may be a secret is never in a repr: callbacks end up in logs and tracebacks.
    id: str
    target: TargetId = field(repr=False)
    task_id: int
    attempt: int
    body: bytes
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    ordered: bool = False

    def shown_options(self) -> dict[str, Any]:
        """Headers and order as `callback-dead.schema.json` has them: without what the submitter keeps secret."""
        options: dict[str, Any] = {}
        if self.headers:
            options["headers"] = {
                name: value if name in ("content-type", "traceparent") else MASK
                for name, value in self.headers.items()
            }
        if self.ordered:
            options["ordered"] = True
        return options

    def encode(self) -> bytes:
        """An entry of a record, and the value of one that has no other; the body is carried as text."""
        record: dict[str, Any] = {
            "id": self.id,
            "target": self.target.url,
            "task_id": self.task_id,
            "attempt": self.attempt,
            "body": self.body.decode(),
        }
        # Left out where they say nothing: most records, and the only ones that services from before know.
        if self.headers:
            record["headers"] = self.headers
        if self.ordered:
            record["ordered"] = True
        return orjson.dumps(record)


def encode_callbacks(callbacks: Iterable[Callback]) -> Iterator[tuple[bytes | None, bytes]]:
    """Keys and values of the records that carry these, in their order: as few as may be, one partition's only.

    A callback alone in its record stands there by itself, with its target's URL as the key; several are an array, without a key.
    """
    entries: list[bytes] = []
    alone: bytes | None = None
    size = 0
    for callback in callbacks:
        entry = callback.encode()
        if entries and (len(entries) == CALLBACKS_PER_RECORD or size + len(entry) > CALLBACK_RECORD_BYTES):
            yield _record(entries, alone)
            entries, size = [], 0
        entries.append(entry)
        size += len(entry)
        alone = callback.target.url.encode()
    if entries:
        yield _record(entries, alone)


def _record(entries: Sequence[bytes], alone: bytes | None) -> tuple[bytes | None, bytes]:
    return (alone, entries[0]) if len(entries) == 1 else (None, b"[" + b",".join(entries) + b"]")


@dataclass(slots=True)
class Owed:
    """What a transaction owes to Kafka.

    Attributes:
        outbox_id: the row to remove once the events are on Kafka; None when there are none.
        keys: of the event records.
        events: their values.
        callbacks: their records.
        revocation: leases to take back; not kept for after a crash, since the fence sees to what is not heard.
    """

    outbox_id: int | None = None
    keys: list[bytes] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    callbacks: list[Callback] = field(default_factory=list)
    revocation: Revocation | None = None
