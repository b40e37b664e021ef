"""A worker whose tasks end as their contexts say: python -m tests.chaos.flow_worker."""

from __future__ import annotations

import sys

from penstock.worker import Done, Fail, Worker


def make_worker():
    """The worker of the type `a`."""
    worker = Worker()

    @worker.stage("a.start")
    async def start(task):
        return Done(task.context) if task.context == "succeeded" else Fail("as it should", permanent=True)

    return worker


if __name__ == "__main__":
    sys.exit(make_worker().run())
