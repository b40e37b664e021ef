"""Ingest: rows per second of the submission statement, compared with a bare COPY of the same rows.

    python -m benchmarks.ingest [--rows 20000] [--batch 1000] [--rounds 5]

Three methods write to the same table with all its indexes, in one session, with a commit per batch,
in turn:

- copy: `COPY` of complete rows. It looks up no idempotency key, applies no defaults of the type,
  sends no notification and
  returns no id. A duplicate idempotency key would fail the whole batch.
- statement: the statement of gateway and task-sync (`tasks.submit`).
- staging: `COPY` into a temporary table, and the same statement from there in the same transaction.

Rows have a context of about a hundred bytes, and in half of the runs an idempotency key. Medians of
the rounds are compared.
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

from benchmarks.measurements import CpuMeter, report
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

Method = Callable[[Any, Sequence[Submission]], Awaitable[None]]


def queries() -> dict[str, str]:
    """Returns the statements of ingest.sql by name."""
    parts = re.split(r"^-- name: (\w+)$", Path(__file__).with_suffix(".sql").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


SQL = queries()


def row_of(one: Submission) -> tuple[Any, ...]:
    """Returns the columns of a submission."""
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
    """Copies complete rows, with the type's defaults, which a client would not know."""
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


METHODS: dict[str, Method] = {"copy": copy, "statement": statement, "staging": staging}


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
    """Measures rows per second and CPU per 1,000 rows of each method."""
    connection = await connect(dsn, "benchmark")
    await connection.execute(SQL["stage"])
    made = list(batches(rows, batch, keyed=keyed))
    rates: dict[str, list[float]] = {method: [] for method in METHODS}
    cpu: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    for number in range(rounds + 1):
        for method, insert in METHODS.items():
            await connection.execute("TRUNCATE task RESTART IDENTITY CASCADE")
            await connection.execute("CHECKPOINT")
            meter, begin, own = CpuMeter([server]), time.perf_counter(), time.process_time()
            for each in made:
                await insert(connection, each)
            took_s, own = time.perf_counter() - begin, time.process_time() - own
            assert await connection.fetchval("SELECT count(*) FROM task") == rows
            if number:  # the first round warms up
                rates[method].append(rows / took_s)
                cpu[method].append((meter.seconds() / rows * 1e6, own / rows * 1e6))
    await connection.close()
    return {
        method: {
            "rows/s": round(median(rates[method])),
            "of COPY": round(median(rates[method]) / median(rates["copy"]), 2),
            "CPU of the server (ms/1,000 rows)": round(median(server for server, _ in cpu[method]), 1),
            "CPU of the client (ms/1,000 rows)": round(median(client for _, client in cpu[method]), 1),
        }
        for method in METHODS
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
                figures |= {f"{method}, {name}": values for method, values in found.items()}
        finally:
            supervisor.close()
    claims = {}
    for name in ("no keys", "idempotency keys"):
        share = figures[f"statement, {name}"]["of COPY"]
        claims[f"the statement is at least half as fast as a bare COPY, {name}"] = (f"{share}", share >= 0.5)
        staged = figures[f"staging, {name}"]["of COPY"]
        claims[f"the statement is not slower than a staging table, {name}"] = (
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
    arguments = parser.parse_args()
    sys.exit(asyncio.run(run(arguments.rows, arguments.batch, arguments.rounds)))
