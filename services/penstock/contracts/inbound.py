"""Records of workers as the platform reads them: validated by schema, entry by entry where one is bad.

One malformed entry must not cost its record's other 499, so a result batch that breaks its schema is read
entry by entry and each bad one reported alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.contracts.context import Context
from penstock.contracts.event import Callback
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.result import Failure, StageResult
from penstock.contracts.validation import conform, parse, problems, validator
from penstock.core.completion import Fence, Outcome
from penstock.errors import Invalid, InvalidRecord

_OUTCOMES = {member.value: member for member in Outcome}


def decode_heartbeat(data: bytes) -> Heartbeat:
    """Reads a record of the heartbeats topic.

    Raises:
        InvalidRecord: it breaks `heartbeat.schema.json`.
    """
    raw = parse(data)
    conform(raw, "heartbeat")
    # JSON Schema counts 81.0 among the integers.
    tasks = [(int(task), int(step), int(attempt)) for task, step, attempt in raw["tasks"]]
    return Heartbeat(Kind(raw["kind"]), raw["worker"], int(raw["lease_ms"]), tasks)


def decode_results(data: bytes) -> tuple[str, list[StageResult], list[Invalid]]:
    """Reads a record of the stage-results topic: the worker, its good entries, and what is wrong with the others.

    Raises:
        InvalidRecord: the record as a whole cannot be read.
    """
    raw = parse(data)
    if validator("stage-results").is_valid(raw):
        entries: list[tuple[int, Any]] = list(enumerate(raw["results"]))
        faults: list[Invalid] = []
    else:
        entries, faults = _sound_entries(raw)
    results = []
    for index, entry in entries:
        try:
            results.append(read_result(entry, f"/results/{index}"))
        except Invalid as invalid:
            faults.append(invalid)
    return raw["worker"], results, faults


def read_result(raw: Mapping[str, Any], pointer: str = "") -> StageResult:
    """Reads one entry that its schema has let through.

    Raises:
        InvalidRecord: its context contradicts its content type.
    """
    error = raw.get("error")
    return StageResult(
        # JSON Schema counts 81.0 among the integers.
        fence=Fence(int(raw["id"]), int(raw["step"]), raw["stage"], int(raw["attempt"])),
        outcome=_OUTCOMES[raw["outcome"]],
        next_stage=raw.get("next_stage"),
        context=Context.from_wire(raw, pointer=pointer),
        delay_ms=int(raw.get("delay_ms", 0)),
        permanent=raw.get("permanent", False),
        max_attempts=int(raw["max_attempts"]) if "max_attempts" in raw else None,
        error=Failure(kind=error["kind"], message=error["message"], traceback=error.get("traceback"))
        if error
        else None,
        started_ms=int(raw.get("started_ms", 0)),
        finished_ms=int(raw.get("finished_ms", 0)),
    )


def decode_callback(data: bytes) -> Callback:
    """Reads a record of the callbacks topic.

    Raises:
        InvalidRecord: it breaks `callback.schema.json`.
    """
    raw = parse(data)
    conform(raw, "callback")
    return Callback(
        id=raw["id"],
        target=raw["target"],
        # JSON Schema counts 81.0 among the integers.
        task_id=int(raw["task_id"]),
        attempt=int(raw["attempt"]),
        body=raw["body"].encode(),
    )


def _sound_entries(raw: Any) -> tuple[list[tuple[int, Any]], list[Invalid]]:
    envelope = {**raw, "results": []} if isinstance(raw, dict) else raw
    conform(envelope, "stage-results")
    listed = raw.get("results")
    if not isinstance(listed, list):
        raise InvalidRecord("must be an array", pointer="/results")
    sound: list[tuple[int, Any]] = []
    faults: list[Invalid] = []
    for index, entry in enumerate(listed):
        found = problems({"worker": raw["worker"], "results": [entry]}, "stage-results")
        if found:
            worst = found[0]
            faults.append(
                InvalidRecord(
                    worst.reason, pointer=worst.pointer.replace("/results/0", f"/results/{index}", 1)
                )
            )
        else:
            sound.append((index, entry))
    return sound, faults
