"""The worker SDK: pulls a task, runs one stage, reports the outcome, and claims what lasts.

    worker = Worker()

    @worker.stage("media.probe")
    async def probe(task: Task) -> Next:
        return Next("transcode", {"file": task.context["file"]})

    worker.run()

Guarantees
- An offset is committed only when the claim or the result of each attempt before it is on Kafka
  (W3). A crash at any point leaves either an unread record or a lease that expires.
- A task that kills its worker is claimed, and the claim is committed, before it runs again (W8).
- Every result carries the attempt's fence, so a stage takes effect once, even if it runs several
  times (W4).
- Attempts wait for a handler, or for a thread, in order of priority, and in order of arrival
  within one (S3). The most urgent one waits until one handler ends, and not for the backlog.
- Tasks are pulled only while they can soon run. Attempts that wait behind long handlers are handed
  back. Long handlers cost no partitions (W2).

When in doubt, the worker reports nothing: an attempt without a result runs again when its lease has
expired.
"""

from penstock.core.retry import Backoff
from penstock.worker.app import Worker
from penstock.worker.current import current_task, in_current_task
from penstock.worker.middleware import CallNext
from penstock.worker.outcomes import Child, Done, Fail, Next, Outcome, RetryAfter, Spawn, Task, Wait
from penstock.worker.settings import WorkerSettings
from penstock.worker.types import Type

__all__ = [
    "Backoff",
    "CallNext",
    "Child",
    "Done",
    "Fail",
    "Next",
    "Outcome",
    "RetryAfter",
    "Spawn",
    "Task",
    "Type",
    "Wait",
    "Worker",
    "WorkerSettings",
    "current_task",
    "in_current_task",
]
