"""Kill -9 of task-sync and of a worker while records behind a busy worker are withdrawn."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import asyncpg
import pytest

from tests.chaos import ledger
from tests.chaos.scenario import LEASE_MS, LONG, TASKS, Scenario, run_scenario
from tests.support.waiting import wait_until

KILLS = 3 if LONG else 2
# One task in so many lasts for so long. The others take milliseconds.
LONG_EVERY = 25
LASTS_S = 4.0
# Four workers with one slot each, and no backlog.
WORKERS = 4
ONE_SLOT = {"LEDGER_POOL": "1", "LEDGER_BACKLOG": "0"}
# Beside the lease and the restart of task-sync, the time in which an idle worker must get a task
# that waits.
WAIT_S = 5.0


class WithdrawalScenario(Scenario):
    """A scenario with long tasks among quick ones."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._drafts = 0
        self._long: set[str] = set()
        self._restart_s = 0.0

    def _draft(self, wave: int) -> dict[str, Any]:
        draft = super()._draft(wave)
        self._drafts += 1
        if self._drafts % LONG_EVERY == 1:
            draft["context"]["lasts_s"] = LASTS_S
            self._long.add(draft["idempotency_key"])
        return draft

    def start_worker(self) -> None:
        """Starts a worker with one slot."""
        self.workers.start(environment=ONE_SLOT)

    def _logged(self, event: str) -> int:
        return self.deployment.log_file.read_text(encoding="utf-8").count(f"event={event}")

    async def kill_while_withdrawing(self, wave: int) -> None:
        """Kills task-sync and a worker right after a withdrawal; returns when both are back."""
        before = self._logged("tasks_withdrawn")
        until_s = time.monotonic() + 240
        while self._logged("tasks_withdrawn") == before:
            assert time.monotonic() < until_s, "no task was withdrawn"
            await self._submit(wave, LONG_EVERY)
            due = self.acknowledged

            async def withdrawn_or_over(due: int = due) -> bool:
                return self._logged("tasks_withdrawn") > before or await self._ended(due)

            await self.wait_until_true(withdrawn_or_over, "a task is withdrawn, or all have ended")
        acquired = self._logged("type_acquired")
        killed_s = time.monotonic()
        self.kill("task-sync")
        self.workers.kill(self.rng.choice(self.workers.running))
        self.start_worker()
        await wait_until(lambda: self._logged("type_acquired") > acquired, timeout=240)
        self._restart_s = max(self._restart_s, time.monotonic() - killed_s)

    async def verify(self) -> None:
        """As the other scenarios; and no worker was idle for long while a quick task waited."""
        await super().verify()
        connection = await asyncpg.connect(self.deployment.postgres)
        try:
            rows = await connection.fetch(
                "SELECT id, idempotency_key AS key, extract(epoch FROM created_at)::float8 AS at_s FROM penstock.task"
            )
        finally:
            await connection.close()
        quick = {row["id"]: row["at_s"] for row in rows if row["key"] not in self._long}
        longest_s = longest_idle_s(ledger.read(self._file), quick)
        limit_s = WAIT_S + LEASE_MS / 1000 + self._restart_s
        print(
            f"\n{self._logged('tasks_withdrawn')} withdrawals; a worker was idle for {longest_s:.2f} s at most while a "
            f"quick task waited; task-sync was back after {self._restart_s:.2f} s"
        )
        assert longest_s <= limit_s


def longest_idle_s(executions: list[ledger.Execution], quick: dict[int, float]) -> float:
    """The longest time in which some worker ran nothing while one and the same quick task waited.

    Args:
        executions: all.
        quick: when each quick task was submitted, by its id.
    """
    of_worker = defaultdict(list)
    of_step = defaultdict(list)
    for each in executions:
        of_worker[each.worker].append(each)
        of_step[each.task_id, each.step].append(each)
    gaps = [
        (before.ended_s, after.began_s)
        for own in of_worker.values()
        for before, after in pairwise(sorted(own, key=lambda each: each.began_s))
        if before.ended_s is not None
    ]
    waits = []
    for (task, step), own in of_step.items():
        if task not in quick:
            continue
        earlier = [each.ended_s for each in of_step.get((task, step - 1), ()) if each.ended == "well"]
        since_s = quick[task] if step == 0 else min(earlier, default=None)
        if since_s is not None:
            waits.append((since_s, min(each.began_s for each in own)))
    return max(
        (
            min(gap[1], wait[1]) - max(gap[0], wait[0])
            for gap in gaps
            if gap[1] - gap[0] > 1
            for wait in waits
        ),
        default=0.0,
    )


@pytest.mark.long
@pytest.mark.alone
async def test_kills_while_tasks_are_withdrawn(tmp_path):
    """S13, W4, design's guarantees 2, 3 and 6: task-sync and a worker are killed while tasks behind
    busy workers are withdrawn. No task is lost, no stage takes effect twice, and the check is
    clean. While a quick task waits, no worker is idle for more than five seconds and a lease."""
    async with run_scenario(tmp_path, "withdrawal", workers=0, kind=WithdrawalScenario) as scenario:
        for _ in range(WORKERS):
            scenario.start_worker()
        for wave in range(KILLS):
            await scenario.wave(
                "kill -9 task-sync and a worker, in a withdrawal",
                lambda wave=wave: scenario.kill_while_withdrawing(wave),
                tasks=TASKS // KILLS if LONG else 75,
            )
