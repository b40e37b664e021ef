"""The worker SDK: pulls a task, claims it, commits, runs one stage, and reports the outcome.

    worker = Worker()

    @worker.stage("media.probe")
    async def probe(task: Task) -> Next:
        return Next("transcode", {"file": task.context["file"]})

    worker.run()

Guarantees
- A claim is on Kafka before the offset is committed, and the offset is committed before the handler
  runs (W3). A crash at any point leaves either an unclaimed record or a lease that expires.
- Every result carries the attempt's fence, so a stage takes effect once, even if it runs several
  times (W4).
- Claimed attempts wait for a handler, or for a thread, in order of priority, and in order of
  arrival within one (S3). The most urgent one waits until one handler ends, and not for the
  backlog.
- Tasks are pulled only while there is room. Long handlers cost no partitions (W2).

When in doubt, the worker reports nothing: an attempt without a result runs again when its lease has
expired.
"""

from penstock.worker.app import Worker
from penstock.worker.outcomes import Done, Fail, Next, Outcome, RetryAfter, Task
from penstock.worker.settings import WorkerSettings

__all__ = ["Done", "Fail", "Next", "Outcome", "RetryAfter", "Task", "Worker", "WorkerSettings"]
