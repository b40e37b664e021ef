"""A worker for tests in a process of its own: python -m tests.integration.worker_probe"""

import asyncio
import os
import sys
import time

from penstock.worker import Done, Task, Worker

worker = Worker(drain_timeout_s=float(os.environ.get("DRAIN_S", "30")))


@worker.stage("t.quick")
async def quick(task: Task) -> Done:
    print(f"ran {task.token}", flush=True)
    return Done()


@worker.stage("t.long")
async def long(task: Task) -> Done:
    print(f"began {task.token}", flush=True)
    await asyncio.Event().wait()
    return Done()


@worker.stage("t.second")
def second(task: Task) -> Done:
    print(f"began {task.token}", flush=True)
    time.sleep(1)
    return Done()


if __name__ == "__main__":
    sys.exit(worker.run())
