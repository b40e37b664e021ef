"""The cost of replicas: the same load on one, two and four replicas, with three brokers.

    python -m benchmarks.scaling [--tasks 12000] [--rounds 3] [--types 1]

Every topic has three replicas, of which two acknowledge. One task-sync at a time releases a type,
so with one type the other task-sync processes are idle. All replicas share the cores of one
machine, so throughput cannot show scaling. The CPU time per task shows the contention between
replicas. It is compared in two ways:

- The same total load on more replicas: each gets less load and smaller batches, which cost more per
  task.
- The same load per replica: N replicas at full load, and one replica at the N-th part of that
  rate. Growth here is the
  overhead of replication: contention and coordination.

Rounds alternate after a warm-up round, and each value is the median of its rounds. Topics are
deleted after each run, because a broker's followers iterate over all partitions for each record.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.loops import Whole, finish, whole
from benchmarks.measurements import CpuMeter, report
from benchmarks.throughput import submit
from penstock.kafka.client.connection import admin_client
from penstock.kafka.topology.topics import workers_group
from penstock.local.cluster import three_brokers
from penstock.local.deployment import Deployment, Options
from penstock.local.supervisor import Supervisor
from penstock.settings import Kafka

REPLICAS = (1, 2, 4)
REPLICATED = ("task-sync", "heartbeats", "stages", "callbacks")
WARM = 800
# Seconds between submissions at a fixed rate.
STEP_S = 0.05
# Seconds of the measurement without load.
REST_S = 5.0
# Maximum growth of CPU time per task, compared with one replica.
MOST_GROWTH = 1.10
# The replicated roles; brokers and database are not replicated.
OWN = ("workers", *REPLICATED)


def roles(loop: Whole, brokers: Supervisor) -> dict[str, list[int]]:
    """Returns process ids by role."""
    found: dict[str, list[int]] = {
        "workers": [worker.pid for worker in loop.workers],
        "kafka": list(brokers.processes().values()),
    }
    for name, pid in loop.deployment.processes.items():
        found.setdefault(name.rstrip("-0123456789"), []).append(pid)
    return found


async def settle(loop: Whole) -> None:
    """Waits until every worker has partitions of every type: rebalances are not measured."""
    settings = Kafka(kafka=loop.deployment.kafka, prefix=loop.deployment.environment["PENSTOCK_PREFIX"])
    groups = [workers_group(settings.prefix, name) for name in loop.types]
    async with admin_client(settings) as admin:
        while True:
            answers = [await admin.describe_consumer_groups([group]) for group in groups]
            found = [(state, len(members)) for [a] in answers for _, _, state, _, _, members, *_ in a.groups]
            if found == [("Stable", len(loop.workers))] * len(groups):
                return
            await asyncio.sleep(0.5)


async def written(loop: Whole) -> int:
    """Returns the position of PostgreSQL's write-ahead log in bytes."""
    return int(await loop.connection.fetchval("SELECT pg_current_wal_lsn() - '0/0'"))


async def submit_at(loop: Whole, tasks: int, per_s: float) -> None:
    """Submits tasks at a fixed rate."""
    begin = time.perf_counter()
    sent = 0
    while sent < tasks:
        due = min(tasks, int((time.perf_counter() - begin) * per_s))
        await submit(loop, due - sent)
        sent = due
        await asyncio.sleep(STEP_S)


async def measure(loop: Whole, brokers: Supervisor, tasks: int, per_s: float | None) -> dict[str, float]:
    """Runs tasks to their end; returns tasks per second, CPU milliseconds per task, and WAL.

    Args:
        loop: the system to measure.
        brokers: the supervisor of its brokers.
        tasks: number of tasks.
        per_s: tasks submitted per second; None submits all at once.
    """
    await settle(loop)
    await submit(loop, WARM)
    await finish(loop, WARM)
    of_all = [pid for pids in roles(loop, brokers).values() for pid in pids]
    rest = CpuMeter(of_all)
    await asyncio.sleep(REST_S)
    at_rest = rest.seconds() * 1000 / REST_S
    meters = {role: CpuMeter(pids) for role, pids in roles(loop, brokers).items()}
    wal_before = await written(loop)
    begin = time.perf_counter()
    await (submit(loop, tasks) if per_s is None else submit_at(loop, tasks, per_s))
    await finish(loop, WARM + tasks)
    took = time.perf_counter() - begin
    wal = await written(loop) - wal_before
    used = Counter({role: meter.seconds() * 1000 / tasks for role, meter in meters.items()})
    return {
        "tasks/s": tasks / took,
        "CPU ms/task": used.total(),
        "own": sum(used[role] for role in OWN),
        "at rest, ms/s": at_rest,
        "WAL KiB/task": wal / 1024 / tasks,
        **used,
    }


@dataclass
class Bench:
    """Three brokers, with a new deployment for each run.

    Args:
        supervisor: the supervisor of the brokers.
        servers: their bootstrap servers.
        folder: folder for the deployments' data.
        types: task types, in turn.
        tasks: number of tasks of a run at full load.
    """

    supervisor: Supervisor
    servers: str
    folder: Path
    types: Sequence[str]
    tasks: int
    runs: int = 0

    async def measure(self, replicas: int, tasks: int, per_s: float | None = None) -> dict[str, float]:
        """Runs once with this number of replicas; see `measure`."""
        self.runs += 1
        prefix = f"scaling-{self.runs}."
        options = Options(
            data_dir=self.folder / str(self.runs),
            kafka=self.servers,
            prefix=prefix,
            postgres_port=0,
            gateway_port=0,
            replicas={"gateway": 1, **dict.fromkeys(REPLICATED, replicas)},
        )
        async with Deployment(options) as deployment, whole(deployment, replicas, self.types) as loop:
            measured = await measure(loop, self.supervisor, tasks, per_s)
        async with admin_client(Kafka(kafka=self.servers, prefix=prefix)) as admin:
            await admin.delete_topics([name for name in await admin.list_topics() if name.startswith(prefix)])
        return measured

    async def round(self, name: str) -> dict[str, dict[str, float]]:
        """Runs 1, 2 and 4 replicas at full load, and one at the load per replica of 2 and 4."""
        found: dict[str, dict[str, float]] = {}

        def keep(row: str, measured: dict[str, float]) -> None:
            found[row] = measured
            print(
                f"{name}, {row}: {measured['tasks/s']:,.0f} tasks/s, {measured['CPU ms/task']:.3f} ms of CPU a task",
                file=sys.stderr,
            )

        for replicas in REPLICAS:
            keep(row_of(replicas), await self.measure(replicas, self.tasks))
        for replicas in REPLICAS[1:]:
            per_s = found[row_of(replicas)]["tasks/s"] / replicas
            keep(share_of(replicas), await self.measure(1, self.tasks // replicas, per_s))
        return found


def row_of(replicas: int) -> str:
    """The name of a run at full load."""
    return f"{replicas} of each"


def share_of(replicas: int) -> str:
    """The name of the run of one replica at the load per replica of `replicas`."""
    return f"1 of each, 1/{replicas} of the load"


async def run(tasks: int, rounds: int, types: Sequence[str]) -> int:
    """Runs all rounds and reports."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        supervisor = Supervisor(lambda _name, _line: None, run_dir=folder / "run")
        try:
            async with three_brokers(supervisor, folder / "brokers") as cluster:
                bench = Bench(supervisor, cluster.servers, folder, types, tasks)
                await bench.measure(1, tasks)
                found = [await bench.round(f"round {number + 1}") for number in range(rounds)]
        finally:
            supervisor.close()
    rows = found[0]
    figures = {
        row: {
            column: round(median(each[row][column] for each in found), 0 if "/s" in column else 3)
            for column in rows[row]
        }
        for row in rows
    }

    def grown(column: str, more: str, one: str) -> tuple[str, bool]:
        """The median of the rounds' ratios, since other load changes between rounds."""
        ratio = median(each[more][column] / each[one][column] for each in found)
        return f"{ratio:.2f}", ratio <= MOST_GROWTH

    claims = {}
    for replicas in REPLICAS[1:]:
        row = row_of(replicas)
        claims[f"the same load on {row}: at most 10 % more CPU a task"] = grown("CPU ms/task", row, row_of(1))
        claims[f"the same load for each of {replicas}: at most 10 % more CPU of their own a task"] = grown(
            "own", row, share_of(replicas)
        )
    return report("scaling", figures, claims)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--types", type=int, default=1)
    arguments = parser.parse_args()
    sys.exit(
        asyncio.run(
            run(arguments.tasks, arguments.rounds, [f"noop-{number}" for number in range(arguments.types)])
        )
    )
