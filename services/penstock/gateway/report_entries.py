"""The entries of `POST /set_task`: heartbeats and results, each read alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.contracts.heartbeat import Heartbeat, Kind, LeaseTerms
from penstock.contracts.inbound import read_result
from penstock.contracts.parsing import Unreadable
from penstock.contracts.progress import MAX_MESSAGE, Progress, in_parts
from penstock.contracts.result import StageResult
from penstock.contracts.validation import problems
from penstock.core.attempt import AttemptId
from penstock.core.completion import Outcome
from penstock.core.redaction import BY_FORM
from penstock.errors import Invalid, InvalidRecord
from penstock.gateway.openapi import find_faults

DEFAULT_LEASE_MS = 300_000

_OUTCOMES = ("progress", *(outcome for outcome in Outcome if outcome is not Outcome.EXPIRED))


@dataclass(frozen=True, slots=True)
class BeatEntry:
    """A heartbeat in a request.

    Attributes:
        index: in the request.
        attempt_id: of the attempt.
        lease_ms: of the claim.
        max_attempts: of the claim.
        begun: whether the handler has begun.
        progress: the handler's report; None without one.
    """

    index: int
    attempt_id: AttemptId
    lease_ms: int
    max_attempts: int | None
    begun: bool
    progress: Progress | None = None


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
                    progress = _progress_of(raw["progress"]) if "progress" in raw else None
                    begun = raw.get("begun", True)
                    beats.append(BeatEntry(index, attempt_id, lease_ms, max_attempts, begun, progress))
            else:
                faults = _result_faults(raw)
                if not faults:
                    results[index] = read_result(raw)
        except Invalid as error:
            faults = [InvalidRecord(error.reason, pointer=error.pointer)]
        if faults:
            rejected.append(rejection(index, faults))
    return beats, results, rejected


def _progress_of(raw: dict[str, Any]) -> Progress:
    progress = Progress.from_wire(raw)
    # Only the SDK redacts before it reports.
    return replace(progress, message=BY_FORM.text(progress.message)[:MAX_MESSAGE])


def heartbeats_of(worker: str, beats: Iterable[BeatEntry]) -> Iterator[Heartbeat]:
    """The records of heartbeats: one for each of their terms, as a rule."""
    groups: defaultdict[tuple[LeaseTerms, bool], list[BeatEntry]] = defaultdict(list)
    for beat in beats:
        groups[LeaseTerms(beat.lease_ms, beat.max_attempts), beat.begun].append(beat)
    for (terms, begun), of_terms in groups.items():
        silent = [beat.attempt_id for beat in of_terms if beat.progress is None]
        if silent:
            yield Heartbeat(Kind.BEAT, worker, terms.lease_ms, silent, terms.max_attempts, begun)
        reports = ((beat.attempt_id, beat.progress) for beat in of_terms if beat.progress is not None)
        for part in in_parts(reports):
            yield Heartbeat(
                Kind.BEAT, worker, terms.lease_ms, list(part), terms.max_attempts, begun, progress=part
            )


def rejection(index: int, faults: Iterable[Invalid]) -> dict[str, Any]:
    """The entry of `rejected` for an invalid entry of a request."""
    return {
        "index": index,
        "errors": [
            {"pointer": f"/results/{index}{fault.pointer}", "detail": fault.reason} for fault in faults
        ],
    }


def _result_faults(raw: Any) -> list[InvalidRecord]:
    if isinstance(raw, dict) and raw.get("outcome") not in _OUTCOMES:
        # The topic's schema knows no progress, and asks for the fields of every outcome at once.
        found = f"{raw['outcome']!r:.100} is not" if "outcome" in raw else "it is missing, and must be"
        return [InvalidRecord(f"{found} one of {', '.join(_OUTCOMES)}", pointer="/outcome")]
    faults = problems({"worker": "worker", "results": [raw]}, "stage-results")
    return [InvalidRecord(fault.reason, pointer=fault.pointer.removeprefix("/results/0")) for fault in faults]
