"""A worker that kills its process at one place of a task with which it goes on.

python -m tests.support.going_on_probe PLACE STAGE
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.result import StageResult
from penstock.core.completion import Outcome
from penstock.core.early_start import EarlyStart
from penstock.worker import Done, Next, Task, Worker, connections
from penstock.worker.kafka_transport import KafkaTransport

# Seconds, long enough that no attempt has a claim at the places before it.
_NO_CLAIM_S = 60.0


def make_worker(worker: Worker, by: str, stage: str, place: str | None = None) -> Counter[str]:
    """Gives a worker three stages, of which each adds itself to the context.

    Args:
        worker: the worker.
        by: its name.
        stage: the second one, `two` or `other`.
        place: in the second stage, where its process is killed.

    Returns:
        how often each stage began; it changes with each call.
    """
    began = Counter[str]()

    def step(task: Task) -> list[str]:
        began[task.stage] += 1
        return [*task.context, f"{task.stage} by {by}"]

    @worker.stage("t.start")
    async def start(task: Task) -> Next:
        return Next(stage, step(task))

    async def second(task: Task) -> Next:
        if place == "in the next handler":
            kill()
        if place == "after the claim":
            await asyncio.Event().wait()
        return Next("three", step(task))

    for name in ("two", "other"):
        worker.stage(f"t.{name}")(second)

    @worker.stage("t.three")
    async def three(task: Task) -> Done:
        return Done(step(task))

    return began


def kill() -> None:
    """Ends this process as the OOM killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


class KillingTransport(KafkaTransport):
    """The Kafka transport of a worker, which kills the process before or after a record."""

    place: str

    async def send_results(self, results: Sequence[StageResult]) -> None:
        """Writes results; the first ones that go on are killed before or after it."""
        goes_on = any(result.follows is not None for result in results)
        if goes_on and self.place == "before the result":
            kill()
        await super().send_results(results)
        if goes_on and self.place == "after the result":
            kill()
        if self.place == "after the last result" and any(each.outcome is Outcome.DONE for each in results):
            kill()

    async def try_heartbeat(self, heartbeat: Heartbeat) -> Any:
        """Writes a heartbeat; the process ends after the first claim of a second stage."""
        answers = await super().try_heartbeat(heartbeat)
        claims_second = heartbeat.kind is Kind.CLAIM and any(each.step == 1 for each in heartbeat.tasks)
        if claims_second and self.place == "after the claim":
            kill()
        return answers


def main(place: str, stage: str) -> None:
    """Runs the worker `first` until it kills itself."""
    KillingTransport.place = place
    connections.KafkaTransport = KillingTransport
    worker = Worker()
    claim_after_s = 0.1 if place == "after the claim" else _NO_CLAIM_S
    # Every record is new: the worker begins before it claims.
    worker._early_start = EarlyStart(claim_after_s=claim_after_s, after_assignment_s=0.0, old_s=60.0)
    make_worker(worker, "first", stage, place)
    worker.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
