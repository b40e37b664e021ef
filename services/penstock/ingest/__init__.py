"""Reads a topic of submissions into PostgreSQL, exactly once: `Ingest` for any kind of record.

A `RecordHandler` knows the topic, reads a record, and inserts a batch together with its offset in
one statement. `SubmissionHandler` is the one of tasks in task-sync, and of flows and of events in
the service `flows`. That of `tasklogs` gathers larger batches, which become objects.

Guarantees
- A record is inserted once. Its offset is in PostgreSQL, written by the statement that inserts it.
- A stored position carries the identity of its log, and is checked against the topic at the start
  and while reading.
- A record that breaks its contract goes to the rejected topic with its reason, and holds up
  nothing.

When PostgreSQL is behind, the partitions with many records in flight are paused. When the object
store is away, a partition is held at its next record with a large value. Where another transaction
locks what a record needs, its partition is held at that record.
"""

from penstock.ingest.handler import Gathering, RecordHandler, RecordReader
from penstock.ingest.progress import IngestProgress
from penstock.ingest.reader import Ingest
from penstock.ingest.samples import ingest_samples
from penstock.ingest.settings import IngestSettings
from penstock.ingest.submissions import SubmissionHandler

__all__ = [
    "Gathering",
    "Ingest",
    "IngestProgress",
    "IngestSettings",
    "RecordHandler",
    "RecordReader",
    "SubmissionHandler",
    "ingest_samples",
]
