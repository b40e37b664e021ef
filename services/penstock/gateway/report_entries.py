"""The entries of `POST /set_task`: heartbeats and results, each read alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.contracts.inbound import read_result
from penstock.contracts.parsing import Unreadable
from penstock.contracts.result import StageResult
from penstock.contracts.validation import problems
from penstock.core.attempt import AttemptId
from penstock.errors import Invalid, InvalidRecord
from penstock.gateway.openapi import find_faults

DEFAULT_LEASE_MS = 300_000


@dataclass(frozen=True, slots=True)
class BeatEntry:
    """A heartbeat in a request: its index, attempt, terms of the claim, whether it has begun."""

    index: int
    attempt_id: AttemptId
    lease_ms: int
    max_attempts: int | None
    begun: bool


def parse_entries(
    entries: Sequence[Any],
) -> tuple[list[BeatEntry], dict[int, StageResult], list[dict[str, Any]]]:
    """Heartbeats, results by their index, and the faults of invalid entries (`rejected`)."""
    beats: list[BeatEntry] = []
    results: dict[int, StageResult] = {}
    rejected: list[dict[str, Any]] = []
    for index, raw in enumerate(entries):
        try:
            if isinstance(raw, Unreadable):
                faults = [raw.fault]
            elif isinstance(raw, dict) and raw.get("outcome") == "progress":
                faults = find_faults(raw, "Progress")
                if not faults:
                    attempt_id = AttemptId(int(raw["id"]), int(raw["step"]), int(raw["attempt"]))
                    max_attempts = int(raw["max_attempts"]) if "max_attempts" in raw else None
                    lease_ms = int(raw.get("lease_ms", DEFAULT_LEASE_MS))
                    beats.append(BeatEntry(index, attempt_id, lease_ms, max_attempts, raw.get("begun", True)))
            else:
                faults = _result_faults(raw)
                if not faults:
                    results[index] = read_result(raw)
        except Invalid as error:
            faults = [InvalidRecord(error.reason, pointer=error.pointer)]
        if faults:
            rejected.append(rejection(index, faults))
    return beats, results, rejected


def rejection(index: int, faults: Iterable[Invalid]) -> dict[str, Any]:
    """The entry of `rejected` for an invalid entry of a request."""
    return {
        "index": index,
        "errors": [
            {"pointer": f"/results/{index}{fault.pointer}", "detail": fault.reason} for fault in faults
        ],
    }


def _result_faults(raw: Any) -> list[InvalidRecord]:
    faults = problems({"worker": "worker", "results": [raw]}, "stage-results")
    return [InvalidRecord(fault.reason, pointer=fault.pointer.removeprefix("/results/0")) for fault in faults]
