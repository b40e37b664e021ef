"""Ingest: rows a second of the statement that takes submissions in, against a bare COPY of the same rows in the same run.

    python -m benchmarks.ingest [--rows 20000] [--batch 1000] [--rounds 5]

Three ways into the same table with all its indexes, one session, a commit for each batch, taking turns:

- copy: `COPY` of the finished rows. No idempotency key is looked up, no default of the type filled in, nobody woken, no id
  returned; a key that is there already would fail the whole batch.
- statement: what gateway and task-sync run (`tasks.submit`).
- staging: `COPY` into a temporary table, and the same statement from there in the same transaction.

Rows have a context of about a hundred bytes; half the runs with an idempotency key each. Compared is the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from benchmarks.figures import CpuMeter, report
from penstock.contracts import subscription
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.local.database import EmbeddedPostgres
from penstock.local.supervisor import Supervisor
from penstock.postgres import tasks, types
from penstock.postgres.connection import connect, open_pool
from penstock.postgres.migrations import migrate
from penstock.postgres.tasks import encode_ref

TYPE = types.TaskType(name="t")
COLUMNS = (
    "type",
    "stage",
    "priority",
    "content_type",
    "context",
    "context_ref",
    "idempotency_key",
    "due_at",
    "callbacks",
    "events",
    "labels",
    "key",
)

Way = Callable[[Any, Sequence[Submission]], Awaitable[None]]


def queries() -> dict[str, str]:
    """The statements of ingest.sql by name."""
    parts = re.split(r"^-- name: (\w+)$", Path(__file__).with_suffix(".sql").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


SQL = queries()


def row_of(one: Submission) -> tuple[Any, ...]:
    """The columns of a submission as they travel."""
    callbacks = None if one.callbacks is None else orjson.dumps(subscription.to_wire(one.callbacks)).decode()
    return (
        one.type,
        one.stage,
        int(one.priority),
        one.context.content_type.value,
        one.context.data,
        encode_ref(one.context.ref),
        one.idempotency_key,
        one.run_at,
        callbacks,
        one.events,
        orjson.dumps(one.labels).decode() if one.labels else None,
        one.key,
    )


async def copy(connection: Any, batch: Sequence[Submission]) -> None:
    """The rows as they will be: what no client could know but one that made the types itself."""
    rows = [
        (
            one.type,
            "ready",
            "start",
            int(one.priority),
            "json",
            one.context.data,
            one.idempotency_key,
            "final",
        )
        for one in batch
    ]
    names = ("type", "state", "stage", "priority", "content_type", "context", "idempotency_key", "events")
    await connection.copy_records_to_table("task", records=rows, columns=names, schema_name="penstock")


async def statement(connection: Any, batch: Sequence[Submission]) -> None:
    await tasks.submit(connection, batch)


async def staging(connection: Any, batch: Sequence[Submission]) -> None:
    async with connection.transaction():
        records = [(number, *row_of(one)) for number, one in enumerate(batch)]
        await connection.copy_records_to_table("staged", records=records, columns=("ordinal", *COLUMNS))
        inserted = await connection.fetch(SQL["insert"])
    assert len(inserted) == len(batch)


WAYS: dict[str, Way] = {"copy": copy, "statement": statement, "staging": staging}


def batches(rows: int, batch: int, *, keyed: bool) -> Iterator[list[Submission]]:
    for begin in range(0, rows, batch):
        yield [
            Submission(
                type="t",
                context=Context.encode(
                    {"number": number, "file": f"/holiday/{number:09}.mp4", "pad": "x" * 48}
                ),
                idempotency_key=f"upload-{number:012}" if keyed else None,
            )
            for number in range(begin, min(begin + batch, rows))
        ]


async def measure(
    dsn: str, server: int, rows: int, batch: int, rounds: int, *, keyed: bool
) -> dict[str, dict[str, float]]:
    """Rows a second, and CPU a thousand rows, of each way."""
    connection = await connect(dsn, "benchmark")
    await connection.execute(SQL["stage"])
    made = list(batches(rows, batch, keyed=keyed))
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, insert in WAYS.items():
            await connection.execute("TRUNCATE task RESTART IDENTITY CASCADE")
            await connection.execute("CHECKPOINT")
            meter, begin, own = CpuMeter([server]), time.perf_counter(), time.process_time()
            for each in made:
                await insert(connection, each)
            took_s, own = time.perf_counter() - begin, time.process_time() - own
            assert await connection.fetchval("SELECT count(*) FROM task") == rows
            if number:  # the first round warms up
                rates[way].append(rows / took_s)
                cpu[way].append((meter.seconds() / rows * 1e6, own / rows * 1e6))
    await connection.close()
    return {
        way: {
            "rows/s": round(median(rates[way])),
            "of COPY": round(median(rates[way]) / median(rates["copy"]), 2),
            "CPU of the server (ms/1,000 rows)": round(median(server for server, _ in cpu[way]), 1),
            "CPU of the client (ms/1,000 rows)": round(median(client for _, client in cpu[way]), 1),
        }
        for way in WAYS
    }


async def run(rows: int, batch: int, rounds: int) -> int:
    """Measures and reports."""
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        supervisor = Supervisor(lambda _name, _line: None, run_dir=Path(folder) / "run")
        try:
            server = EmbeddedPostgres(supervisor, Path(folder) / "postgres")
            await server.start()
            await migrate(server.dsn())
            async with open_pool(server.dsn(), "benchmark", size=1) as pool:
                await types.register(pool, TYPE)
            [pid] = supervisor.processes().values()
            for keyed, name in ((False, "no keys"), (True, "idempotency keys")):
                found = await measure(server.dsn(), pid, rows, batch, rounds, keyed=keyed)
                figures |= {f"{way}, {name}": values for way, values in found.items()}
        finally:
            supervisor.close()
    claims = {}
    for name in ("no keys", "idempotency keys"):
        share = figures[f"statement, {name}"]["of COPY"]
        claims[f"the statement is at least half as fast as a bare COPY, {name}"] = (f"{share}", share >= 0.5)
        staged = figures[f"staging, {name}"]["of COPY"]
        claims[f"and no slower than by way of a staging table, {name}"] = (
            f"{share} against {staged}",
            share >= staged * 0.95,
        )
    return report("ingest", figures, claims)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    sys.exit(asyncio.run(run(given.rows, given.batch, given.rounds)))
