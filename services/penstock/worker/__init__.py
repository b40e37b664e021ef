"""The worker SDK: pull, claim, commit, run one stage, hand the task back.

    worker = Worker()

    @worker.stage("media.probe")
    async def probe(task: Task) -> Next:
        return Next("transcode", {"file": task.context["file"]})

    worker.run()

Guarantees
- A claim is on Kafka before the offset is committed, and the offset is committed before the handler runs (W3):
  a crash anywhere leaves either an unclaimed record or a lease that runs out.
- Every report carries the attempt's fence, so a stage takes effect once however often it is run (W4).
- What waits here for a handler, or for a thread, goes by priority, and in order of arrival within one (S3): the most
  urgent waits for one that ends, not for a backlog.
- Tasks are pulled only while there is room, and partitions are kept however long handlers run (W2).

In doubt it reports nothing: an attempt without a result is run again when its lease runs out.
"""

from penstock.worker.app import Worker
from penstock.worker.outcomes import Done, Fail, Next, Outcome, RetryAfter, Task
from penstock.worker.settings import WorkerSettings

__all__ = ["Done", "Fail", "Next", "Outcome", "RetryAfter", "Task", "Worker", "WorkerSettings"]
