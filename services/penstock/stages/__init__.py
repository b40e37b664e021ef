"""Stages: the only service that advances tasks.

Reads batches of stage results, decides what becomes of each task (`core.completion`) and commits the lot in one
fenced statement; publishes the events and callbacks written with it; sweeps up what a crash left unpublished.

Guarantees
- A stage takes effect exactly once, whatever is delivered twice, late or out of order: a result changes
  something only while its task is still in the very (id, step, stage, attempt) the result speaks of.
- History, event and callbacks are in the transaction of the transition they report.
- A record is acknowledged when its results are committed. An entry that breaks its contract lands on
  `stage-results.rejected`; the others of its record are committed.

In doubt it redelivers: while PostgreSQL is away nothing is acknowledged and the same batch is tried again until
the stall watchdog ends the process.
"""
