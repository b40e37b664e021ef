"""Reads the records of workers and validates them by their schemas.

One malformed entry must not cost the other 499 of its record. So a batch of results that breaks its
schema is read entry by entry, and each malformed one is rejected alone. It ends its attempt as a
failure, because its worker has ended the attempt and will not report it again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from penstock.contracts.context import Context
from penstock.contracts.event import Callback
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.result import Failure, StageResult
from penstock.contracts.validation import conform, parse, problems, validator
from penstock.core.access import DEFAULT_NAMESPACE, SEPARATOR
from penstock.core.attempt import AttemptId
from penstock.core.completion import Fence, Outcome
from penstock.core.target import TargetId, target_of
from penstock.errors import Invalid, InvalidRecord

# The beginning of `Event.encode`, up to the task's type. It is matched for every callback in a
# namespace, because parsing the whole event takes several times longer.
_EVENT = re.compile(r'\{"id":"[^"\\]*","event":"[^"\\]*","at":"[^"\\]*","task":\{"id":\d+,"type":"([^"\\]*)"')

_OUTCOMES = {member.value: member for member in Outcome}


def decode_heartbeat(data: bytes) -> Heartbeat:
    """Reads a record of the heartbeats topic.

    Raises:
        InvalidRecord: it breaks `heartbeat.schema.json`.
    """
    raw = parse(data)
    conform(raw, "heartbeat")
    # JSON Schema counts 81.0 among the integers.
    tasks = [AttemptId(int(task), int(step), int(attempt)) for task, step, attempt in raw["tasks"]]
    limit = int(raw["max_attempts"]) if "max_attempts" in raw else None
    return Heartbeat(Kind(raw["kind"]), raw["worker"], int(raw["lease_ms"]), tasks, limit)


def decode_results(data: bytes) -> tuple[str, list[StageResult], list[Invalid]]:
    """Reads a record of the stage-results topic: the worker, its results, and their faults.

    A malformed entry that names its attempt is among the results, as a failure.

    Raises:
        InvalidRecord: the record as a whole cannot be read.
    """
    raw = parse(data)
    if validator("stage-results").is_valid(raw):
        faulty: dict[int, Invalid] = {}
    else:
        faulty = _faulty_entries(raw)
    results = []
    for index, entry in enumerate(raw["results"]):
        if index not in faulty:
            try:
                results.append(read_result(entry, f"/results/{index}"))
            except Invalid as invalid:
                faulty[index] = invalid
        if index in faulty and (failure := _failure_of(entry, faulty[index])):
            results.append(failure)
    return raw["worker"], results, list(faulty.values())


def read_result(raw: Mapping[str, Any], pointer: str = "") -> StageResult:
    """Reads one entry that is valid by its schema.

    Raises:
        InvalidRecord: its context contradicts its content type, or is nested too deep.
    """
    error = raw.get("error")
    context = Context.from_wire(raw, pointer=pointer)
    if context is not None:
        context.require_shallow(f"{pointer}/context")
    return StageResult(
        # JSON Schema counts 81.0 among the integers.
        fence=Fence(int(raw["id"]), int(raw["step"]), raw["stage"], int(raw["attempt"])),
        outcome=_OUTCOMES[raw["outcome"]],
        next_stage=raw.get("next_stage"),
        context=context,
        delay_ms=int(raw.get("delay_ms", 0)),
        permanent=raw.get("permanent", False),
        max_attempts=int(raw["max_attempts"]) if "max_attempts" in raw else None,
        error=Failure(kind=error["kind"], message=error["message"], traceback=error.get("traceback"))
        if error
        else None,
        started_ms=int(raw.get("started_ms", 0)),
        finished_ms=int(raw.get("finished_ms", 0)),
    )


def decode_callbacks(data: bytes) -> tuple[list[Callback], list[tuple[Invalid, bytes]]]:
    """Reads a record of the callbacks topics: its callbacks, and malformed entries with faults.

    Raises:
        InvalidRecord: the record as a whole cannot be read, or breaks `callback.schema.json`.
    """
    raw = parse(data)
    if not isinstance(raw, list):
        conform(raw, "callback")
        return [_read_callback(raw)], []
    if validator("callback").is_valid(raw):
        return [_read_callback(entry) for entry in raw], []
    if not raw:
        conform(raw, "callback")
    callbacks: list[Callback] = []
    faults: list[tuple[Invalid, bytes]] = []
    for index, entry in enumerate(raw):
        if not isinstance(entry, dict):
            faults.append((InvalidRecord("must be an object", pointer=f"/{index}"), orjson.dumps(entry)))
        elif found := problems(entry, "callback"):
            fault = InvalidRecord(found[0].reason, pointer=f"/{index}{found[0].pointer}")
            faults.append((fault, orjson.dumps(entry)))
        else:
            callbacks.append(_read_callback(entry))
    return callbacks, faults


def _read_callback(raw: Mapping[str, Any]) -> Callback:
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
    """The target; its namespace is in the body, in the name of the task's type.

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
    if isinstance(event, dict) and "task" not in event:
        event = event.get("data")
    task = event.get("task") if isinstance(event, dict) else None
    name = task.get("type") if isinstance(task, dict) else None
    return target_of(name, url) if isinstance(name, str) else TargetId(DEFAULT_NAMESPACE, url)


def _faulty_entries(raw: Any) -> dict[int, Invalid]:
    """The faults of a batch, by the index of their entry.

    Raises:
        InvalidRecord: the batch itself cannot be read.
    """
    envelope = {**raw, "results": []} if isinstance(raw, dict) else raw
    conform(envelope, "stage-results")
    listed = raw.get("results")
    if not isinstance(listed, list):
        raise InvalidRecord("must be an array", pointer="/results")
    faulty: dict[int, Invalid] = {}
    for index, entry in enumerate(listed):
        found = problems({"worker": raw["worker"], "results": [entry]}, "stage-results")
        if found:
            pointer = found[0].pointer.replace("/results/0", f"/results/{index}", 1)
            faulty[index] = InvalidRecord(found[0].reason, pointer=pointer)
    return faulty


def _failure_of(entry: Any, fault: Invalid) -> StageResult | None:
    """The failure that a malformed entry becomes; None if it does not name its attempt."""
    bare = {key: entry.get(key) for key in ("id", "step", "attempt")} if isinstance(entry, dict) else {}
    # A malformed stage is left out: the attempt is found by its step.
    stage = entry["stage"] if bare and isinstance(entry.get("stage"), str) else "?"
    reported = {**bare, "stage": stage[:200] or "?", "outcome": "retry"}
    if problems({"worker": "?", "results": [reported]}, "stage-results"):
        return None
    result = read_result(reported)
    result.outcome = Outcome.FAIL
    result.error = Failure(kind="InvalidResult", message=f"{fault.reason} ({fault.pointer})")
    return result
