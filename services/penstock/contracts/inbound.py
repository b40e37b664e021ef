"""Reads the records of workers and validates them by their schemas.

One malformed entry must not cost the other 499 of its record. So a batch of results that breaks its
schema is read entry by entry, and each malformed one is rejected alone. It ends its attempt as a
failure, because its worker has ended the attempt and will not report it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from penstock.contracts.context import Context
from penstock.contracts.event import Callback
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.parsing import MAX_ENTRIES, Unreadable, parse, parse_batch
from penstock.contracts.progress import HEADER, Progress
from penstock.contracts.result import HANDED_BACK, NO_HANDLER, Failure, StageResult
from penstock.contracts.subscription import MAX_URL_BYTES
from penstock.contracts.validation import conform, is_valid, problems
from penstock.core.access import DEFAULT_NAMESPACE, SEPARATOR
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence, Outcome
from penstock.core.redaction import BY_FORM
from penstock.core.target import TargetId, target_of
from penstock.errors import Invalid, InvalidRecord, TooLarge

# The beginning of `Event.encode`, up to the task's type or the flow's name. It is matched for every
# callback in a namespace, because parsing the whole event takes several times longer.
_EVENT = re.compile(
    r'\{"id":"[^"\\]*","event":"[^"\\]*","at":"[^"\\]*",'
    r'"(?:task":\{"id":\d+,"type|flow":\{"id":\d+,"root_id":\d+,"name)":"([^"\\]*)"'
)

_OUTCOMES = {member.value: member for member in Outcome}


# The largest id of a task. JSON Schema compares floats as floats, so it accepts 2^63.
_MAX_ID = 2**63 - 1

# The bounds of an error in the schema; a text without its secrets may be longer than before.
_MESSAGE_CHARS = 10_000
_TRACEBACK_CHARS = 100_000

# An entry that breaks its contract: its fault and its bytes.
Fault = tuple[Invalid, bytes]


def decode_heartbeat(data: bytes, reports: bytes | None = None) -> tuple[Heartbeat, list[Fault]]:
    """Reads a record of the heartbeats topic: the heartbeat, and its malformed attempts.

    A malformed report of progress is among the faults; its attempt is not.

    Args:
        data: the record's value.
        reports: the record's header `penstock-progress`.

    Raises:
        InvalidRecord: the record as a whole cannot be read, or breaks `heartbeat.schema.json`.
        TooLarge: it has too many entries.
    """
    raw = parse_batch(data, "tasks")
    faults: list[Fault] = []
    if _has_unreadable(raw, "tasks") or not is_valid(raw, "heartbeat"):
        raw, faults = _without_faulty(raw, "heartbeat", "tasks")
    tasks: list[AttemptId] = []
    for index, (task, step, attempt) in enumerate(raw["tasks"]):
        # JSON Schema counts 81.0 among the integers.
        if int(task) > _MAX_ID:
            faults.append((InvalidRecord("larger than any id", pointer=f"/tasks/{index}/0"), _bytes_of(task)))
        else:
            tasks.append(AttemptId(int(task), int(step), int(attempt)))
    limit = int(raw["max_attempts"]) if "max_attempts" in raw else None
    begun = bool(raw.get("begun", True))
    progress: dict[AttemptId, Progress] = {}
    if reports is not None:
        progress, wrong = decode_progress(reports)
        faults += wrong
    heartbeat = Heartbeat(
        Kind(raw["kind"]), raw["worker"], int(raw["lease_ms"]), tasks, limit, begun, progress
    )
    return heartbeat, faults


def decode_progress(data: bytes) -> tuple[dict[AttemptId, Progress], list[Fault]]:
    """Reads the reports of progress of a heartbeat record; each malformed one is judged alone."""
    pointer = f"/headers/{HEADER}"
    try:
        raw = parse_batch(data, "")
        if not isinstance(raw, list):
            raise InvalidRecord("must be an array")
        if len(raw) > MAX_ENTRIES:
            raise _too_many("")
    except Invalid as fault:
        return {}, [(type(fault)(fault.reason, pointer=pointer + fault.pointer), data)]
    faulty = _faults_of_array(raw, "heartbeat-progress", pointer)
    progress: dict[AttemptId, Progress] = {}
    for index, entry in enumerate(raw):
        if index not in faulty:
            task, step, attempt = entry["task"]
            # JSON Schema compares floats as floats, so it accepts 2^63.
            if int(task) <= _MAX_ID:
                progress[AttemptId(int(task), int(step), int(attempt))] = Progress.from_wire(entry)
            else:
                faulty[index] = InvalidRecord("larger than any id", pointer=f"{pointer}/{index}/task/0")
    return progress, [(fault, _bytes_of(raw[index])) for index, fault in faulty.items()]


def decode_results(data: bytes) -> tuple[str, list[StageResult], list[Fault]]:
    """Reads a record of the stage-results topic: the worker, its results, and faulty entries.

    A malformed entry that names its attempt is among the results, as a failure.

    Raises:
        InvalidRecord: the record as a whole cannot be read.
        TooLarge: it has too many entries.
    """
    raw = parse_batch(data, "results")
    faulty: dict[int, Invalid] = {}
    if _has_unreadable(raw, "results") or not is_valid(raw, "stage-results"):
        faulty = _faulty_entries(raw, "stage-results", "results")
    results = []
    faults: list[Fault] = []
    for index, entry in enumerate(raw["results"]):
        if index not in faulty:
            try:
                result = read_result(entry, f"/results/{index}")
                if result.context is not None:
                    result.context.require_inline(f"/results/{index}/context")
                results.append(result)
            except Invalid as invalid:
                faulty[index] = invalid
        if index in faulty:
            faults.append((faulty[index], _bytes_of(entry)))
            if failure := _failure_of(entry, faulty[index]):
                results.append(failure)
    return raw["worker"], results, faults


def _too_many(pointer: str) -> TooLarge:
    return TooLarge(f"more than {MAX_ENTRIES:,} entries: send several records", pointer=pointer)


def _bytes_of(entry: Any) -> bytes:
    if isinstance(entry, Unreadable):
        return entry.data
    try:
        return orjson.dumps(entry)
    except TypeError:  # nested deeper than can be written
        return str(entry).encode()


def read_result(raw: Mapping[str, Any], pointer: str = "") -> StageResult:
    """Reads one entry that is valid by its schema.

    Raises:
        InvalidRecord: its context contradicts its content type, is nested too deep or has a wrong
            child, or its reference names another object than a context.
    """
    error = raw.get("error")
    context = Context.from_wire(raw, pointer=pointer)
    if context is not None:
        if context.ref is not None:
            context.ref.require_own_key(f"{pointer}/context_ref")
        context.require_shallow(f"{pointer}/context")
    if int(raw["id"]) > _MAX_ID:
        raise InvalidRecord("larger than any id", pointer=f"{pointer}/id")
    outcome, no_handler = _OUTCOMES[raw["outcome"]], False
    if outcome is Outcome.SPAWN and "context" in raw:
        _require_children(raw["context"]["children"], f"{pointer}/context/children")
    kind = error["kind"] if error else ""
    if outcome is Outcome.RETRY and kind in (HANDED_BACK, NO_HANDLER):
        # The form of 0.1.0, which `StageResult.to_wire` and workers over HTTP send.
        outcome, no_handler = Outcome.HANDED_BACK, kind == NO_HANDLER
    elif outcome is Outcome.HANDED_BACK:
        no_handler = raw.get("no_handler", False)
        kind = NO_HANDLER if no_handler else HANDED_BACK
    return StageResult(
        # JSON Schema counts 81.0 among the integers.
        fence=Fence(int(raw["id"]), int(raw["step"]), raw["stage"], int(raw["attempt"])),
        outcome=outcome,
        no_handler=no_handler,
        next_stage=raw.get("next_stage"),
        context=context,
        terms=raw.get(raw["outcome"]),
        delay_ms=int(raw["delay_ms"]) if "delay_ms" in raw else None,
        permanent=raw.get("permanent", False),
        max_attempts=int(raw["max_attempts"]) if "max_attempts" in raw else None,
        error=_failure(kind, error["message"], error.get("traceback")) if error else None,
        started_ms=int(raw.get("started_ms", 0)),
        finished_ms=int(raw.get("finished_ms", 0)),
    )


def _require_children(children: Sequence[Any], pointer: str) -> None:
    """Checks children one by one: a schema of the list would make a fault for each of 100,000."""
    for index, child in enumerate(children):
        if not is_valid(child, "child"):
            fault = problems(child, "child")[0]
            raise InvalidRecord(fault.reason, pointer=f"{pointer}/{index}{fault.pointer}")


def _failure(kind: str, message: str, traceback: str | None) -> Failure:
    """A failure without what has the form of a secret: only the SDK redacts before it reports."""
    message = BY_FORM.text(message)[:_MESSAGE_CHARS]
    if traceback is not None:
        traceback = BY_FORM.text(traceback)[-_TRACEBACK_CHARS:]
    return Failure(kind=kind, message=message, traceback=traceback)


def decode_callbacks(data: bytes) -> tuple[list[Callback], list[Fault]]:
    """Reads a record of the callbacks topics: its callbacks, and malformed entries with faults.

    Raises:
        InvalidRecord: the record as a whole cannot be read, or breaks `callback.schema.json`.
        TooLarge: it has too many entries.
    """
    raw = parse_batch(data, "")
    if not isinstance(raw, list):
        conform(raw, "callback")
        return [_read_callback(raw, "")], []
    if not raw:
        conform(raw, "callback")
    if len(raw) > MAX_ENTRIES:
        raise _too_many("")
    faulty = _faults_of_array(raw, "callback", "")
    callbacks: list[Callback] = []
    for index, entry in enumerate(raw):
        if index not in faulty:
            try:
                callbacks.append(_read_callback(entry, f"/{index}"))
            except InvalidRecord as fault:
                faulty[index] = fault
    return callbacks, [(fault, _bytes_of(raw[index])) for index, fault in faulty.items()]


def _read_callback(raw: Mapping[str, Any], pointer: str) -> Callback:
    # A target that cannot be called is dead at the first attempt, with its reason.
    if len(raw["target"].encode()) > MAX_URL_BYTES:
        raise InvalidRecord(f"longer than {MAX_URL_BYTES:,} bytes", pointer=f"{pointer}/target")
    if int(raw["task_id"]) > _MAX_ID:
        raise InvalidRecord("larger than any id", pointer=f"{pointer}/task_id")
    return Callback(
        id=raw["id"],
        target=_target_of(raw["target"], raw["body"]),
        # JSON Schema counts 81.0 among the integers.
        task_id=int(raw["task_id"]),
        attempt=int(raw["attempt"]),
        body=raw["body"].encode(),
        headers=raw.get("headers"),
        ordered=raw.get("ordered", False),
    )


def _target_of(url: str, body: str) -> TargetId:
    """The target; its namespace is in the body, in the name of the task's type or of the flow.

    Only a body with a separator can name one, and is parsed. A body that is no event is of the
    default namespace.
    """
    if SEPARATOR not in body:
        return TargetId(DEFAULT_NAMESPACE, url)
    if (begins := _EVENT.match(body)) is not None:
        return target_of(begins[1], url)
    try:
        event = parse(body.encode())
    except Invalid:
        event = None
    # In the envelope of CloudEvents the event is the data.
    if isinstance(event, dict) and "task" not in event and "flow" not in event:
        event = event.get("data")
    task, flow = (event.get(key) if isinstance(event, dict) else None for key in ("task", "flow"))
    name = task.get("type") if isinstance(task, dict) else None
    name = flow.get("name") if name is None and isinstance(flow, dict) else name
    return target_of(name, url) if isinstance(name, str) else TargetId(DEFAULT_NAMESPACE, url)


def _has_unreadable(raw: Any, member: str) -> bool:
    listed = raw.get(member) if isinstance(raw, dict) else None
    return isinstance(listed, list) and any(isinstance(entry, Unreadable) for entry in listed)


def _without_faulty(raw: Any, schema: str, member: str) -> tuple[Any, list[Fault]]:
    """A batch without its faulty entries, and those entries with their faults.

    Raises:
        InvalidRecord: the batch itself cannot be read.
    """
    faulty = _faulty_entries(raw, schema, member)
    entries = raw[member]
    return (
        {**raw, member: [entry for index, entry in enumerate(entries) if index not in faulty]},
        [(fault, _bytes_of(entries[index])) for index, fault in faulty.items()],
    )


def _faulty_entries(raw: Any, schema: str, member: str) -> dict[int, Invalid]:
    """The faults of a batch, by the index of their entry.

    Raises:
        InvalidRecord: the batch itself cannot be read.
        TooLarge: it has too many entries.
    """
    envelope = {**raw, member: []} if isinstance(raw, dict) else raw
    conform(envelope, schema)
    listed = raw.get(member)
    if not isinstance(listed, list):
        raise InvalidRecord("must be an array", pointer=f"/{member}")
    if len(listed) > MAX_ENTRIES:
        raise _too_many(f"/{member}")
    return _faults_of(
        listed, schema, lambda entry: {**envelope, member: [entry]}, f"/{member}/0", f"/{member}"
    )


def _faults_of_array(raw: list[Any], schema: str, pointer: str) -> dict[int, Invalid]:
    """The faults of a record that is an array of entries."""
    if not any(isinstance(entry, Unreadable) for entry in raw) and is_valid(raw, schema):
        return {}
    return _faults_of(raw, schema, lambda entry: [entry], "/0", pointer)


def _faults_of(
    entries: Sequence[Any], schema: str, wrap: Callable[[Any], Any], place: str, pointer: str
) -> dict[int, Invalid]:
    """The faults of entries that are each judged alone, by the index of their entry.

    Args:
        entries: of a record.
        schema: of the record.
        wrap: a record with one entry.
        place: pointer to the entry in that record.
        pointer: to the array of entries.
    """
    faulty: dict[int, Invalid] = {}
    for index, entry in enumerate(entries):
        if isinstance(entry, Unreadable):
            faulty[index] = InvalidRecord(entry.fault.reason, pointer=f"{pointer}/{index}")
        elif found := problems(wrap(entry), schema):
            inside = found[0].pointer.removeprefix(place)
            faulty[index] = InvalidRecord(found[0].reason, pointer=f"{pointer}/{index}{inside}")
    return faulty


def _failure_of(entry: Any, fault: Invalid) -> StageResult | None:
    """The failure that a malformed entry becomes; None if it does not name its attempt."""
    if isinstance(entry, Unreadable):
        entry = entry.readable
    bare = {key: entry.get(key) for key in ("id", "step", "attempt")} if isinstance(entry, dict) else {}
    # A malformed stage is left out: the attempt is found by its step.
    stage = entry["stage"] if bare and isinstance(entry.get("stage"), str) else "?"
    reported = {**bare, "stage": stage[:200].replace("\0", "?") or "?", "outcome": "retry"}
    if problems({"worker": "?", "results": [reported]}, "stage-results"):
        return None
    try:
        result = read_result(reported)
    except Invalid:
        return None
    result.outcome = Outcome.FAIL
    # Another attempt would send as much, or name the same object.
    result.permanent = isinstance(fault, TooLarge) or "/context_ref" in fault.pointer
    result.error = _failure("InvalidResult", f"{fault.reason} ({fault.pointer})", None)
    return result
