"""Bounds of a deployment: log, commits and rows of PostgreSQL, its lock of notifications, CPU.

    python -m benchmarks.ceilings [--tasks 6000] [--seconds 4] [--delay-ms 2] [--slow-ms 20]

Three parts:

- One deployment runs tasks of three no-op stages with 200-byte contexts. PostgreSQL's own log says
  what a task writes there; CPU, topics and connections are measured beside it.
- `pgbench` commits small rows, with and without a notification, from 16 sessions: on one database,
  on two databases of a server, and on two servers.
- One and two deployments share a broker. With two, the databases are on one server, or on a server
  each.

A flush of the log takes longer by `commit_delay`, as on a disk of that latency. Without a
notification other commits join a delayed flush, as they do on a slow disk.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import asyncpg

from benchmarks.loops import Whole, everything, finish, servers_only, whole
from benchmarks.measurements import CpuMeter, report
from benchmarks.part_load import topic_bytes
from benchmarks.throughput import submit
from penstock.local.database import EmbeddedPostgres, server_binaries
from penstock.local.deployment import Deployment, Options
from penstock.local.supervisor import Supervisor

WARM = 500
SESSIONS = 16
SETTLE_S = 3.0
# The rows that `pgbench` commits.
TABLE = "CREATE TABLE committed (at timestamptz DEFAULT now())"
SCRIPTS = {
    "without": "INSERT INTO committed DEFAULT VALUES;",
    "with": "WITH row AS (INSERT INTO committed DEFAULT VALUES RETURNING at) SELECT pg_notify('ceilings', '') FROM row;",
}
CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"


async def slow_down(connection: asyncpg.Connection, delay_ms: float) -> None:
    """Makes each flush of the server's log longer."""
    await connection.execute(f"ALTER SYSTEM SET commit_delay = {int(delay_ms * 1000)}")
    await connection.execute("ALTER SYSTEM SET commit_siblings = 0")
    await connection.execute("SELECT pg_reload_conf()")


async def position(connection: asyncpg.Connection) -> str:
    """The end of PostgreSQL's log."""
    return str(await connection.fetchval("SELECT pg_current_wal_flush_lsn()::text"))


def logged(directory: Path, begin: str, end: str) -> dict[str, tuple[int, int, int]]:
    """Reads a part of PostgreSQL's log: records, their bytes and those of page images, by kind."""
    done = subprocess.run(
        [
            str(server_binaries() / "pg_waldump"),
            "--stats=record",
            f"--path={directory / 'data' / 'pg_wal'}",
            f"--start={begin}",
            f"--end={end}",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    line = re.compile(r"^(\S+)\s+(\d+) \(.*?\)\s+(\d+) \(.*?\)\s+(\d+) \(.*?\)", re.MULTILINE)
    return {
        kind: (int(count), int(size), int(image)) for kind, count, size, image in line.findall(done.stdout)
    }


async def measure_log(tasks: int) -> dict[str, dict[str, float]]:
    """Costs of a task of three stages in one deployment at full speed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        async with Deployment(everything(folder)) as deployment, whole(deployment) as loop:
            connection = loop.connection
            await submit(loop, WARM)
            await finish(loop, WARM)
            await asyncio.sleep(SETTLE_S)
            pids = {**deployment.processes, "workers": loop.workers[0].pid}
            meters = {each: CpuMeter([pid]) for each, pid in pids.items()}
            bytes_before, begin = topic_bytes(folder), await position(connection)
            await submit(loop, tasks)
            await finish(loop, WARM + tasks)
            used = {each: meter.seconds() * 1000 / tasks for each, meter in meters.items()}
            end = await position(connection)
            topics = topic_bytes(folder) - bytes_before
            connections = await connection.fetchval(CONNECTIONS) - 1
            found = logged(folder / "postgres", begin, end)
    size = sum(each[1] for each in found.values())
    images = sum(each[2] for each in found.values())

    def records(*prefixes: str) -> int:
        return sum(each[0] for kind, each in found.items() if kind.startswith(prefixes))

    writes = {
        "log KiB": size / 1024,
        "log KiB of page images": images / 1024,
        "rows": records("Heap/INSERT", "Heap/UPDATE", "Heap/HOT_UPDATE", "Heap/DELETE"),
        "rows updated in place (HOT)": records("Heap/HOT_UPDATE"),
        "index entries": records("Btree/INSERT_LEAF", "Btree/SPLIT"),
        "commits": records("Transaction/COMMIT"),
        "topics KiB": topics / 1024,
    }
    return {
        "a task of three stages": {each: round(value / tasks, 3) for each, value in writes.items()},
        "CPU ms a task": {each: round(value, 3) for each, value in used.items()},
        "one of each service": {"connections to PostgreSQL": connections},
    }


@asynccontextmanager
async def servers(count: int, delay_ms: float) -> AsyncIterator[list[EmbeddedPostgres]]:
    """PostgreSQL servers of their own, with slow flushes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        supervisors = [
            Supervisor(lambda _name, _line: None, run_dir=Path(name) / f"run{number}")
            for number in range(count)
        ]
        try:
            started = [
                EmbeddedPostgres(supervisor, Path(name) / f"server{number}")
                for number, supervisor in enumerate(supervisors)
            ]
            for server in started:
                await server.start()
                connection = await asyncpg.connect(server.dsn())
                await slow_down(connection, delay_ms)
                await connection.close()
            yield started
        finally:
            for supervisor in supervisors:
                supervisor.close()


async def commits(urls: Sequence[str], script: str, seconds: float) -> float:
    """Commits a second of all databases together, by one `pgbench` with 16 sessions for each."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "script.sql"
        file.write_text(script + "\n")
        running = [
            await asyncio.create_subprocess_exec(
                str(server_binaries() / "pgbench"),
                *("--no-vacuum", f"--client={SESSIONS}", f"--time={seconds:.0f}", f"--file={file}", url),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for url in urls
        ]
        outputs = [(await process.communicate())[0].decode() for process in running]
    return sum(float(re.findall(r"^tps = ([\d.]+)", output, re.MULTILINE)[0]) for output in outputs)


async def measure_commits(seconds: float, delay_ms: float) -> dict[str, dict[str, float]]:
    """Commits a second with and without a notification."""
    async with servers(2, delay_ms) as started:
        for server in started:
            connection = await asyncpg.connect(server.dsn())
            for database in ("one", "two"):
                await connection.execute(f"CREATE DATABASE {database}")
                other = await asyncpg.connect(server.dsn(database))
                await other.execute(TABLE)
                await other.close()
            await connection.close()
        first, second = started
        places = {
            "one database": [first.dsn("one")],
            "two databases of one server": [first.dsn("one"), first.dsn("two")],
            "two servers": [first.dsn("one"), second.dsn("one")],
        }
        return {
            f"{place}, commits/s": {
                f"{kind} notification": round(await commits(urls, script, seconds))
                for kind, script in SCRIPTS.items()
            }
            for place, urls in places.items()
        }


async def run_side_by_side(loops: Sequence[Whole], tasks: int) -> float:
    """Tasks a second of all deployments together, each with its own tasks."""
    await asyncio.gather(*(submit(loop, WARM) for loop in loops))
    await asyncio.gather(*(finish(loop, WARM) for loop in loops))
    begin = time.perf_counter()
    await asyncio.gather(*(submit(loop, tasks // len(loops)) for loop in loops))
    await asyncio.gather(*(finish(loop, WARM + tasks // len(loops)) for loop in loops))
    took = time.perf_counter() - begin
    for loop in loops:
        # Each deployment ran its own tasks, and those only.
        assert await loop.finished() == WARM + tasks // len(loops)
    return tasks / took


async def measure_deployments(tasks: int, delay_ms: float) -> dict[str, float]:
    """Tasks a second of one deployment, and of two on the same broker."""
    found: dict[str, float] = {}
    for name, count, server_count, each_ms in (
        ("one deployment, no delay", 1, 1, 0.0),
        ("one deployment", 1, 1, delay_ms),
        ("two, databases of one server", 2, 1, delay_ms),
        ("two, a server each", 2, 2, delay_ms),
    ):
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            shared = await stack.enter_async_context(Deployment(servers_only(folder / "shared")))
            started = await stack.enter_async_context(servers(server_count, each_ms))
            loops = []
            for number in range(count):
                server = started[number % server_count]
                connection = await asyncpg.connect(server.dsn())
                await connection.execute(f"CREATE DATABASE penstock{number}")
                await connection.close()
                options = Options(
                    data_dir=folder / str(number),
                    kafka=shared.kafka,
                    postgres=server.tcp_dsn(f"penstock{number}"),
                    prefix=f"types{number}.",
                    gateway_port=0,
                )
                deployment = await stack.enter_async_context(Deployment(options))
                loops.append(await stack.enter_async_context(whole(deployment)))
            found[name] = round(await run_side_by_side(loops, tasks))
            print(f"{name}: {found[name]:,.0f} tasks/s", file=sys.stderr)
    return found


async def run(tasks: int, seconds: float, delay_ms: float, slow_ms: float) -> int:
    """Measures all parts and reports."""
    figures = await measure_log(tasks)
    committed = await measure_commits(seconds, delay_ms)
    side_by_side = await measure_deployments(tasks, slow_ms)
    one, two_databases, two_servers = committed.values()
    loud = "with notification"
    shared, apart = two_databases[loud] / one[loud], two_servers[loud] / one[loud]
    return report(
        "ceilings",
        {
            **figures,
            **{f"a flush takes {delay_ms:g} ms more: {name}": row for name, row in committed.items()},
            f"a flush takes {slow_ms:g} ms more: tasks/s": side_by_side,
        },
        {
            "commits with a notification do not share a flush": (
                f"{one[loud]:,.0f} commits/s, {one['without notification']:,.0f} without",
                one[loud] * delay_ms / 1000 <= 1 and one["without notification"] > 2 * one[loud],
            ),
            "a second database of the server adds none": (f"{shared:.2f}", shared <= 1.2),
            "a second server doubles them": (f"{apart:.2f}", apart >= 1.6),
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=6_000)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--delay-ms", type=float, default=2)
    parser.add_argument("--slow-ms", type=float, default=20)
    given = parser.parse_args()
    sys.exit(asyncio.run(run(given.tasks, given.seconds, given.delay_ms, given.slow_ms)))
