"""Events of tasks and flows (`event.schema.json`) and their callbacks (`callback.schema.json`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import orjson

from penstock.contracts.revocation import Revocation
from penstock.core.attempt import AttemptId
from penstock.core.target import TargetId
from penstock.core.task import FINAL

# Answers and logs show this text in place of a header's value.
MASK = "***"

# The names of the events that end a task or a flow, and the names of all events.
FINAL_TASK_EVENTS = frozenset(f"task.{state}" for state in FINAL)
FINAL_EVENTS = FINAL_TASK_EVENTS | {"flow.succeeded", "flow.failed", "flow.cancelled"}
TASK_EVENTS = FINAL_TASK_EVENTS | {
    "task.advanced",
    "task.retried",
    "task.expired",
    "task.suspended",
    "task.woken",
}
FLOW_EVENTS = frozenset({"flow.started", "flow.late", "flow.recovered", "flow.paused", "flow.resumed"})
EVENTS = TASK_EVENTS | FINAL_EVENTS | FLOW_EVENTS

# The limits of a record of callbacks, whose callbacks are acknowledged together. One callback alone
# may have more bytes.
CALLBACKS_PER_RECORD = 100
CALLBACK_RECORD_BYTES = 128 * 1024


def origin_of(url: str) -> str:
    """Scheme, host and port of a URL, for logs, because the rest of the URL may be a secret."""
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
    """A transition of a task or of a flow.

    Attributes:
        id: `<task>-<step>-<attempt>-<word>`, or `flow-<flow>-<generation>-<word>`; the same in each
            repetition of the event.
        name: one of `EVENTS`.
        at: when the transition was committed.
        task: id, type, stage, step, attempt, state, labels and idempotency key after the
            transition; None in an event of a flow.
        flow: id, name, version, generation, status and other fields of a flow; None in an event of
            a task.
        detail: the fields of `result` or `output` after a success, or `error` after a failure.
    """

    id: str
    name: str
    at: datetime
    task: Mapping[str, Any] | None = None
    flow: Mapping[str, Any] | None = None
    detail: Mapping[str, Any]

    @property
    def subject_id(self) -> int:
        """The id of the task, or of the flow."""
        return int(self._subject["id"])

    @property
    def subject_name(self) -> str:
        """The type of the task, or the name of the flow: either names the namespace."""
        return str(self._subject["name" if self.task is None else "type"])

    @property
    def _subject(self) -> Mapping[str, Any]:
        subject = self.flow if self.task is None else self.task
        assert subject is not None
        return subject

    def encode(self) -> bytes:
        """The value of the record, and the exact body of a callback in the format `event`."""
        return orjson.dumps(
            {
                "id": self.id,
                "event": self.name,
                "at": self.at.astimezone(UTC),
                **({"flow": self.flow} if self.task is None else {"task": self.task}),
                **self.detail,
            }
        )


def cancelled_attempts(events: Iterable[bytes]) -> list[AttemptId]:
    """The attempts that ended because their tasks were cancelled, with their counts.

    Args:
        events: values of events, as `Event.encode` makes them.
    """
    return [
        AttemptId(event["task"]["id"], event["task"]["step"], event["task"]["attempt"])
        # Other events may have large results, which are not parsed.
        for event in (orjson.loads(value) for value in events if b'"task.cancelled"' in value)
        if event["event"] == "task.cancelled"
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """One event that is sent to one target.

    Attributes:
        id: sent as `webhook-id`; the same in all attempts.
        target: namespace and URL. The namespace is not on the wire, because the body has the type.
        task_id: task of the event, or its flow.
        attempt: number of attempts before this record was written.
        body: the exact body.
        headers: headers in addition to the standard ones, or instead of them; the values are
            secrets.
        ordered: sent after every earlier callback of the same task to this target.
    """

    # Possible secrets are not in the repr, because callbacks may appear in logs and tracebacks.
    id: str
    target: TargetId = field(repr=False)
    task_id: int
    attempt: int
    body: bytes
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    ordered: bool = False

    def masked_options(self) -> dict[str, Any]:
        """The fields `headers` and `ordered` of `callback-dead.schema.json`, without secrets."""
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
        """An entry of a record, or a record with one callback; the body becomes text."""
        record: dict[str, Any] = {
            "id": self.id,
            "target": self.target.url,
            "task_id": self.task_id,
            "attempt": self.attempt,
            "body": self.body.decode(),
        }
        # Most callbacks have neither field.
        if self.headers:
            record["headers"] = self.headers
        if self.ordered:
            record["ordered"] = True
        return orjson.dumps(record)


def encode_callbacks(callbacks: Iterable[Callback]) -> Iterator[tuple[bytes | None, bytes]]:
    """Record keys and values of the fewest records for the callbacks of a partition, in order.

    A single callback is the record's value, with the target's URL as record key. Several are an
    array, without a record key.
    """
    entries: list[bytes] = []
    single_key: bytes | None = None
    size_bytes = 0
    for callback in callbacks:
        entry = callback.encode()
        if entries and (
            len(entries) == CALLBACKS_PER_RECORD or size_bytes + len(entry) > CALLBACK_RECORD_BYTES
        ):
            yield _record(entries, single_key)
            entries, size_bytes = [], 0
        entries.append(entry)
        size_bytes += len(entry)
        single_key = callback.target.url.encode()
    if entries:
        yield _record(entries, single_key)


def _record(entries: Sequence[bytes], single_key: bytes | None) -> tuple[bytes | None, bytes]:
    return (single_key, entries[0]) if len(entries) == 1 else (None, b"[" + b",".join(entries) + b"]")


@dataclass(slots=True)
class OutboxEntry:
    """The records that follow a transaction: the outbox has them until they are published.

    Attributes:
        outbox_id: the row to delete after the events are published; None without events.
        record_keys: record keys of the events.
        events: values of the events.
        callbacks: callbacks to publish.
        revocation: leases to revoke. The outbox does not store it: after a crash the sweeper reads
            the cancelled attempts from their events, and the fence rejects the results of others.
    """

    outbox_id: int | None = None
    record_keys: list[bytes] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    callbacks: list[Callback] = field(default_factory=list)
    revocation: Revocation | None = None
