"""Submissions of tasks, flows and events, on their way from an entry to a row.

The gateway, ingest and the testing kit use the same kinds. A caller adds what only HTTP or only
Kafka has: the gateway its limits and its answer, ingest the offset and the rejected topic.

Guarantees
- An entry is read with all the faults that its schema finds. None of them harms another entry.
- What an entry names exists when its row is written: its task type, or its definition.
- A large value is in the object store before the row that refers to it.
"""

from penstock.submission.flows import EventKind, FlowKind
from penstock.submission.kind import SubmissionKind
from penstock.submission.tasks import TaskKind, TypeSource

__all__ = ["EventKind", "FlowKind", "SubmissionKind", "TaskKind", "TypeSource"]
