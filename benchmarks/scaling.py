"""What replicas cost: the same load through one, two and four of every service and worker, on three brokers.

    python -m benchmarks.scaling [--tasks 12000] [--rounds 3] [--types 1]

Every topic has three copies of which two acknowledge. A type is released by one task-sync at a time, so with one type the
others of it stand by. On one machine replicas share its cores, so throughput cannot show how they scale; what
they take away from each other can be seen all the same: the CPU that a task costs, which would grow if replicas contended,
polled for each other or worked in batches too small. Rounds alternate; each figure is the median of its rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.figures import CpuMeter, report
from benchmarks.loops import Whole, finish, whole
from benchmarks.throughput import submit
from penstock.kafka.connection import admin_client
from penstock.kafka.topics import workers_group
from penstock.local.cluster import three_brokers
from penstock.local.deployment import Deployment, Options
from penstock.local.supervisor import Supervisor
from penstock.settings import Kafka

REPLICAS = (1, 2, 4)
REPLICATED = ("task-sync", "heartbeats", "stages", "callbacks")
WARM = 800
# The figure that is asked for: how much more CPU a task may cost with more replicas than with one.
MOST_GROWTH = 1.10


def roles(loop: Whole, brokers: Supervisor) -> dict[str, list[int]]:
    """Process ids by what they are."""
    found: dict[str, list[int]] = {
        "workers": [worker.pid for worker in loop.workers],
        "kafka": list(brokers.processes().values()),
    }
    for name, pid in loop.deployment.processes.items():
        found.setdefault(name.rstrip("-0123456789"), []).append(pid)
    return found


async def settle(loop: Whole) -> None:
    """Waits until every worker has its share of every type: what moves partitions is no cost of a task."""
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
    """Bytes of PostgreSQL's write-ahead log until now."""
    return int(await loop.connection.fetchval("SELECT pg_current_wal_lsn() - '0/0'"))


async def measure(loop: Whole, brokers: Supervisor, tasks: int) -> dict[str, float]:
    """Submits, waits for the end, and returns tasks per second, CPU milliseconds a task by role and in all, and WAL."""
    await settle(loop)
    await submit(loop, WARM)
    await finish(loop, WARM)
    meters = {role: CpuMeter(pids) for role, pids in roles(loop, brokers).items()}
    wal_before = await written(loop)
    begin = time.perf_counter()
    await submit(loop, tasks)
    await finish(loop, WARM + tasks)
    took = time.perf_counter() - begin
    wal = await written(loop) - wal_before
    used = Counter({role: meter.seconds() * 1000 / tasks for role, meter in meters.items()})
    return {"tasks/s": tasks / took, "CPU ms/task": used.total(), "WAL KiB/task": wal / 1024 / tasks, **used}


async def run(tasks: int, rounds: int, types: Sequence[str]) -> int:
    """Runs all in turn and reports."""
    found: dict[int, list[dict[str, float]]] = {replicas: [] for replicas in REPLICAS}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        supervisor = Supervisor(lambda _name, _line: None, run_dir=folder / "run")
        try:
            async with three_brokers(supervisor, folder / "brokers") as cluster:
                for number in range(rounds):
                    for replicas in REPLICAS:
                        options = Options(
                            data_dir=folder / f"{number}-{replicas}",
                            kafka=cluster.servers,
                            prefix=f"scaling-{number}-{replicas}.",
                            postgres_port=0,
                            gateway_port=0,
                            replicas={"gateway": 1, **dict.fromkeys(REPLICATED, replicas)},
                        )
                        async with (
                            Deployment(options) as deployment,
                            whole(deployment, replicas, types) as loop,
                        ):
                            measured = await measure(loop, supervisor, tasks)
                        found[replicas].append(measured)
                        print(
                            f"round {number + 1}, {replicas} of each: {measured['tasks/s']:,.0f} tasks/s, "
                            f"{measured['CPU ms/task']:.3f} ms of CPU a task",
                            file=sys.stderr,
                        )
        finally:
            supervisor.close()
    figures = {
        f"{replicas} of each": {
            column: round(median(each[column] for each in measured), 0 if column == "tasks/s" else 3)
            for column in measured[0]
        }
        for replicas, measured in found.items()
    }
    # Each round's own ratio, since what else the machine does changes from round to round.
    growth = max(
        median(
            more["CPU ms/task"] / one["CPU ms/task"]
            for more, one in zip(found[replicas], found[REPLICAS[0]], strict=True)
        )
        for replicas in REPLICAS[1:]
    )
    return report(
        "scaling",
        figures,
        {"a task costs at most 10 % more CPU with more replicas": (f"{growth:.2f}", growth <= MOST_GROWTH)},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--types", type=int, default=1)
    given = parser.parse_args()
    sys.exit(asyncio.run(run(given.tasks, given.rounds, [f"noop-{number}" for number in range(given.types)])))
