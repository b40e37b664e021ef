"""Kill -9 of workers, tasklogs and gateways, again and again, while handlers log.

The workers write each line to a file before they log it. At the end, the file is compared with what
readers of the platform see. Per run, no line is there twice or out of order. Only those of the last
250 ms before a kill of their worker are missing, and a mark tells of them.

A worker ships its lines when 200 ms have passed. On a busy machine a record takes longer. So a
probe measures how long one takes at the moment of each kill, and the bound grows by that.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from penstock.client import Client
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import Topic
from penstock.settings import Kafka
from tests.chaos import ledger
from tests.chaos.log_ledger import DISORDERED, UNMARKED, LogCounts, compare, pid_of, place_of, read_lines
from tests.chaos.run_report import RUN
from tests.chaos.scenario import ENVIRONMENT, LONG, SEED, Scenario, run_scenario

KILLS = 100 if LONG else 7
LINES = 100
# Tasks that run or wait while processes are killed.
AHEAD = 20
PROBE_S = 0.05
# Records of the probe within these seconds tell how long one took.
PROBED_S = 2.0
SETTINGS = {**ENVIRONMENT, "PENSTOCK_LOGS_SEGMENT_S": "1", "PENSTOCK_TASK_LOGS": "only"}
VICTIMS = ("worker", "tasklogs", "gateway", "worker over HTTP")


class LogScenario(Scenario):
    """A scenario whose tasks log."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.killed_s: dict[int, float] = {}
        self.delays_s: dict[int, float] = {}
        self._seen: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
        self._probed: deque[tuple[float, float]] = deque(maxlen=1_000)

    def _draft(self, wave: int) -> dict[str, Any]:
        draft = super()._draft(wave)
        return {**draft, "context": {**draft["context"], "lines": LINES}}

    @asynccontextmanager
    async def probing(self) -> AsyncIterator[None]:
        """Measures all the time how long a record takes."""
        settings = Kafka(kafka=self.deployment.kafka, prefix="probe.")
        await create_topics(settings, [Topic("delays", 1, -1, "")])
        async with running(make_producer(settings)) as producer:

            async def probe() -> None:
                while True:
                    begin_s = time.monotonic()
                    await asyncio.sleep(PROBE_S)
                    await producer.send_and_wait("probe.delays", b"")
                    self._probed.append((time.monotonic(), time.monotonic() - begin_s - PROBE_S))

            probing = asyncio.create_task(probe())
            try:
                yield
                assert not probing.done(), probing.exception()
            finally:
                probing.cancel()

    async def kill_worker(self, *, over_http: bool) -> None:
        """Kills a worker, and starts another one."""
        known = [
            worker
            for worker in self.workers.running
            if ("PENSTOCK_WORKER_GATEWAY" in self.workers.environment_of(worker)) == over_http
        ]
        victim = self.rng.choice(known)
        if over_http:
            # It keeps its lines while no gateway answers.
            await self.deployment.wait_ready(["gateway"])
            await self.wait_until_true(partial(self._ships, victim.pid, time.time()), "the worker ships")
        self.killed_s[victim.pid] = time.time()
        self.workers.kill(victim)
        self.workers.start_again(victim)
        since_s = time.monotonic() - PROBED_S
        # The record that was under way took at least until now.
        await asyncio.sleep(2 * PROBE_S)
        self.delays_s[victim.pid] = max(took_s for at_s, took_s in self._probed if at_s > since_s)

    async def _ships(self, pid: int, since_s: float) -> bool:
        """Whether readers see a line of an execution that a worker began after a moment."""
        await self._keep_busy()
        async with Client(self.deployment.gateway_url) as client:
            for one in ledger.read(self._file):
                if pid_of(one) == pid and one.began_s > since_s:
                    lines = [line["text"] async for line in client.log_lines(*place_of(one))]
                    if any(text.startswith(one.name) for text in lines):
                        return True
        return False

    async def _keep_busy(self) -> None:
        ended = await self.fetch_value("SELECT count(*) FROM penstock.task WHERE finished_at IS NOT NULL")
        missing = AHEAD - (self.acknowledged - ended)
        if missing > 0:
            await self._submit(0, missing)

    async def kill_again_and_again(self) -> None:
        """Kills one process after another, and submits tasks so that all workers log."""
        victims = [VICTIMS[number % len(VICTIMS)] for number in range(KILLS)]
        self.rng.shuffle(victims)
        for victim in victims:
            await self._keep_busy()
            await asyncio.sleep(self.rng.uniform(0.2, 0.8))
            if victim.startswith("worker"):
                await self.kill_worker(over_http=victim != "worker")
            else:
                await self.deployment.wait_ready([victim])
                self.kill(victim)

    async def verify(self) -> None:
        """Verifies the tasks, and then their logs. No worker runs any more."""
        await super().verify()
        counts = LogCounts()

        async def hold() -> bool:
            nonlocal counts
            counts = await self._compare()
            # A mark comes some seconds after the end of an attempt. Nothing else changes.
            return not counts.found[UNMARKED]

        await self.wait_until_true(hold, "each incomplete log has its mark")
        RUN.note(counts.found)
        RUN.figures["logs: lines"] = {
            "kills": KILLS,
            "kills of workers": len(self.killed_s),
            "lines": counts.lines,
            "runs": counts.runs,
            "missing": counts.missing,
            "logged at most so long before a kill (ms)": round(counts.oldest_s * 1000),
            "runs with lines twice or out of order": len(counts.found[DISORDERED]),
        }
        broken = {claim: runs[:5] for claim, runs in counts.found.items() if runs}
        assert not broken, f"seed {SEED}: {broken}; {self.deployment.log_file}"
        assert counts.lines >= KILLS * LINES
        RUN.add_sentence(
            f"logs: {counts.lines:,} lines of {counts.runs:,} runs, {KILLS} kills, {len(self.killed_s)} of workers; "
            f"{counts.missing:,} lines missing, the oldest logged {counts.oldest_s * 1000:.0f} ms before a kill"
        )

    async def _compare(self) -> LogCounts:
        logged = read_lines(self._file.with_name(f"{self._file.name}.lines"))
        executions = [one for one in ledger.read(self._file) if one.name in logged]
        async with Client(self.deployment.gateway_url) as client:
            for place in {place_of(one) for one in executions} - self._seen.keys():
                self._seen[place] = [line async for line in client.log_lines(*place)]
        counts = compare(executions, logged, self._seen, self.killed_s, self.delays_s)
        names = {text.partition(":")[0] for found in counts.found.values() for text in found}
        for execution in executions:
            if execution.name in names:
                self._seen.pop(place_of(execution), None)
        return counts


@pytest.mark.long
async def test_killed_processes_lose_no_line_but_the_last_ones(tmp_path):
    """L2, W8: after kill -9 of workers, tasklogs and gateways, each line is there once and in
    order. Missing are only lines of the last 250 ms before a kill, and a mark tells of them."""
    async with run_scenario(
        tmp_path, "logs", environment=SETTINGS, kind=LogScenario, max_losses=100
    ) as scenario:
        gateway = {"PENSTOCK_WORKER_GATEWAY": scenario.deployment.gateway_url}
        scenario.workers.start(environment=gateway)
        async with scenario.probing():
            await scenario.wave(
                f"{KILLS} times kill -9 of workers, tasklogs and gateway",
                scenario.kill_again_and_again,
                tasks=AHEAD,
            )
