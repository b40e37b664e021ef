"""A worker whose handlers hang until they are told otherwise; it says when each began.

python -m tests.acceptance.detection_worker LEDGER hang|finish
"""

import asyncio
import os
import sys
import time

from penstock.worker import Done, Task, Worker

worker = Worker(pool=500, backlog=0)
ledger = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
hangs = sys.argv[2] == "hang"


@worker.stage("watched.start")
async def start(task: Task) -> Done:
    os.write(ledger, f"{task.id} {task.attempt} {time.time()}\n".encode())
    if hangs:
        await asyncio.Event().wait()
    return Done()


if __name__ == "__main__":
    worker.run()
