"""Stages: the only service that advances tasks.

Reads batches of stage results, decides where each task goes (`core.completion`) and commits a batch
in one fenced statement. It publishes the events and callbacks that are written with it, and sweeps
those that their writer has not published, with the revocations of cancelled tasks.

Guarantees
- A stage takes effect exactly once, even if results are delivered twice, late or out of order: a
  result changes something only while its task is still in the (id, step, stage, attempt) that the
  result names.
- History, event and callbacks are in the transaction of the transition they report.
- A record is acknowledged when its results are committed. An entry that breaks its contract goes to
  `stage-results.rejected`; the other entries of its record are committed.

When in doubt, it redelivers: while PostgreSQL is unavailable it acknowledges nothing and retries
the same batch.
"""
