"""A worker whose tasks end as their contexts say, and that notes each execution.

python -m tests.chaos.flow_worker FILE
"""

from __future__ import annotations

import os
import sys

from penstock.worker import Done, Fail, Worker


def make_worker(file):
    """The worker; one line with the task's id is appended to the file for each execution."""
    worker = Worker()
    log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    @worker.stage("a.start")
    async def start(task):
        os.write(log, f"{task.id}\n".encode())
        return Done(task.context) if task.context == "succeeded" else Fail("as it should", permanent=True)

    return worker


if __name__ == "__main__":
    sys.exit(make_worker(sys.argv[1]).run())
