"""Heartbeat records (`heartbeat.schema.json`), keyed by worker so that each worker's order holds.

A worker sends `claim` before it commits offsets, `beat` while attempts run, and `release`, the end
of leases, once their results are on Kafka. This module only encodes, so that the SDK stays light;
`penstock.contracts.inbound` reads and validates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

import orjson

from penstock.contracts.progress import Progress, headers_of
from penstock.contracts.ready import ReadyTask
from penstock.core.attempt import AttemptId


class Kind(StrEnum):
    """The kinds of heartbeat records."""

    CLAIM = "claim"
    BEAT = "beat"
    RELEASE = "release"


class LeaseTerms(NamedTuple):
    """The terms that all attempts of a record share.

    Attributes:
        lease_ms: how long the leases last without a heartbeat, in milliseconds.
        max_attempts: most attempts, the first included, of their stages; None is their type's
            limit.
    """

    lease_ms: int
    max_attempts: int | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One record, about attempts on the same terms.

    Attributes:
        kind: claim, beat or release.
        worker: id of the worker process.
        lease_ms: how long the leases last without a heartbeat, in milliseconds (0 with release).
        tasks: the attempts.
        max_attempts: most attempts, the first included, of their stages; None is their type's
            limit.
        begun: with claim and beat, whether the handlers have begun or begin at once; False for
            suspects that wait for their turn.
        progress: with beat, the reports of those attempts whose handlers have made one.
    """

    kind: Kind
    worker: str
    lease_ms: int
    tasks: Sequence[AttemptId]
    max_attempts: int | None = None
    begun: bool = True
    progress: Mapping[AttemptId, Progress] = field(default_factory=dict)

    @property
    def terms(self) -> LeaseTerms:
        """The terms of its attempts."""
        return LeaseTerms(self.lease_ms, self.max_attempts)

    def without(self, attempt_ids: Collection[AttemptId]) -> Heartbeat:
        """The same record without some of its attempts and their progress."""
        return replace(
            self,
            tasks=[attempt_id for attempt_id in self.tasks if attempt_id not in attempt_ids],
            progress={each: made for each, made in self.progress.items() if each not in attempt_ids},
        )

    def encode(self) -> bytes:
        """The record's value."""
        wire: dict[str, Any] = {
            "kind": self.kind,
            "worker": self.worker,
            "lease_ms": self.lease_ms,
            "tasks": [tuple(attempt_id) for attempt_id in self.tasks],
        }
        if self.max_attempts is not None:
            wire["max_attempts"] = self.max_attempts
        if not self.begun:
            wire["begun"] = False
        return orjson.dumps(wire)

    def headers(self) -> list[tuple[str, bytes]]:
        """The record's headers: the reports of progress."""
        return headers_of(self.progress)


def group_by_terms(
    kind: Kind, worker: str, attempts: Iterable[tuple[AttemptId, LeaseTerms]], *, begun: bool = True
) -> list[Heartbeat]:
    """The records about attempts: one for each of their terms, which is a single one as a rule."""
    groups: defaultdict[LeaseTerms, list[AttemptId]] = defaultdict(list)
    for attempt_id, terms in attempts:
        groups[terms].append(attempt_id)
    return [
        Heartbeat(kind, worker, terms.lease_ms, attempt_ids, terms.max_attempts, begun)
        for terms, attempt_ids in groups.items()
    ]


def claims_of(
    worker: str, claimed: Iterable[ReadyTask], limits: Mapping[str, int], *, isolates: bool = True
) -> list[Heartbeat]:
    """The claims of tasks.

    Args:
        worker: id of the worker that claims.
        claimed: tasks of one type.
        limits: most attempts by stage, for stages with a limit of their own.
        isolates: whether the worker runs suspects apart, and says when each of them begins.
    """
    groups: dict[bool, list[tuple[AttemptId, LeaseTerms]]] = {True: [], False: []}
    for ready in claimed:
        terms = LeaseTerms(ready.lease_ms, limits.get(ready.fence.stage))
        begun = ready.isolation is None or not isolates
        groups[begun].append((ready.attempt_id, terms))
    return [
        claim
        for begun, attempts in groups.items()
        for claim in group_by_terms(Kind.CLAIM, worker, attempts, begun=begun)
    ]
