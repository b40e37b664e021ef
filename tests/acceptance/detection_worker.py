"""A worker whose handlers hang until SIGUSR1; it writes the start time and process of each
execution.

python -m tests.acceptance.detection_worker LEDGER hang|finish
"""

import asyncio
import functools
import os
import signal
import sys
import time

from penstock.worker import Done, Task, Worker

worker = Worker(pool=500, backlog=0)
ledger = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
hangs = sys.argv[2] == "hang"


@functools.cache
def finish_requested() -> asyncio.Event:
    """Returns the event that SIGUSR1 sets."""
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, event.set)
    return event


@worker.stage("watched.start")
async def start(task: Task) -> Done:
    os.write(ledger, f"{task.id} {task.attempt} {time.time()} {os.getpid()}\n".encode())
    if hangs:
        await finish_requested().wait()
    return Done()


if __name__ == "__main__":
    worker.run()
