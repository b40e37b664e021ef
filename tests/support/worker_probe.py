"""A worker for tests in a process of its own: python -m tests.support.worker_probe"""

import asyncio
import ctypes
import os
import sys
import time

from penstock.core.early_start import EarlyStart
from penstock.worker import Done, Task, Worker
from tests.support import forking_probe

worker = Worker(drain_timeout_s=float(os.environ.get("DRAIN_S", "30")))
if "CLAIM_AFTER_S" in os.environ:
    # Every record is new, and its attempt stays unclaimed for so long.
    worker._early_start = EarlyStart(
        claim_after_s=float(os.environ["CLAIM_AFTER_S"]), after_assignment_s=0.0, old_s=60.0
    )


@worker.stage("t.quick")
async def quick(task: Task) -> Done:
    print(f"ran {task.attempt_id}", flush=True)
    return Done()


@worker.stage("t.once", max_attempts=1)
async def once(task: Task) -> Done:
    print(f"began {task.attempt_id}", flush=True)
    await asyncio.Event().wait()
    return Done()


@worker.stage("t.long")
async def long(task: Task) -> Done:
    print(f"began {task.attempt_id}", flush=True)
    await asyncio.Event().wait()
    return Done()


@worker.stage("t.slow")
async def slow(task: Task) -> Done:
    print(f"began {task.attempt_id}", flush=True)
    await asyncio.sleep(float(os.environ["SLOW_S"]))
    return Done()


@worker.stage("t.second")
def second(task: Task) -> Done:
    print(f"began {task.attempt_id}", flush=True)
    time.sleep(1)
    return Done()


def hold_interpreter() -> None:
    """No other thread runs for four seconds: calls by `PyDLL` keep the interpreter's lock, as a
    careless extension does."""
    ctypes.PyDLL(None).sleep(4)


@worker.stage("t.holds")
async def holds(task: Task) -> Done:
    print(f"began {task.attempt_id}", flush=True)
    for _ in range(3):
        hold_interpreter()
        # Threads run again, but the loop of the handlers does not.
        time.sleep(0.5)  # noqa: ASYNC251 (the blocking call under test)
    print(f"ended {task.attempt_id}", flush=True)
    return Done()


@worker.stage("t.forks")
def forks(_task: Task) -> Done:
    child = forking_probe.FORK.Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join()
    print(f"child {child.exitcode} {forking_probe.in_child(forking_probe.sockets)}", flush=True)
    return Done()


if __name__ == "__main__":
    sys.exit(worker.run())
