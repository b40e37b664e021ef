"""The bare loop: the same hops as Penstock's without its features, as a baseline.

    PostgreSQL → sync → ready topic → worker → results topic → stages → PostgreSQL

It has three processes (`python -m benchmarks.bare_loop sync|worker|stages`) with plain aiokafka,
asyncpg and uvloop. It has no ingest, leases, history, outbox, events or recovery. A release takes
2,000 rows and is woken by `NOTIFY`. A poll writes one claim record. Results are collected for 3 ms,
at most 500 per record. Completion is one `UPDATE … FROM unnest` that compares stage and attempt.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import asyncpg
import orjson
import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

STAGES = ("one", "two", "three")
SQL = Path(__file__).with_suffix(".sql")


def queries() -> dict[str, str]:
    """Returns the statements of bare_loop.sql by name."""
    parts = SQL.read_text().split("-- name: ")[1:]
    return {part.split("\n", 1)[0].strip(): part.split("\n", 1)[1] for part in parts}


def producer(kafka: str) -> AIOKafkaProducer:
    return AIOKafkaProducer(
        bootstrap_servers=kafka, acks="all", enable_idempotence=True, max_batch_size=256 * 1024
    )


def consumer(kafka: str, group: str, topic: str) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(
        topic, bootstrap_servers=kafka, group_id=group, enable_auto_commit=False, auto_offset_reset="earliest"
    )


async def sync(kafka: str, dsn: str, prefix: str) -> None:
    """Releases ready tasks after each notification."""
    sql = queries()
    wake = asyncio.Event()
    wake.set()
    async with producer(kafka) as out:
        connection = await asyncpg.connect(dsn, server_settings={"jit": "off"})
        await connection.add_listener("bare_ready", lambda *_: wake.set())
        number = 0
        while True:
            await wake.wait()
            wake.clear()
            rows = await connection.fetch(sql["release"], 2000)
            if not rows:
                continue
            wake.set()
            size = -(-len(rows) // 8)
            sent = []
            for begin in range(0, len(rows), size):
                number += 1
                for row in rows[begin : begin + size]:
                    value = orjson.dumps(
                        {
                            "id": row["id"],
                            "stage": row["stage"],
                            "attempt": row["attempt"],
                            "context": orjson.Fragment(row["context"]),
                        }
                    )
                    sent.append(await out.send(f"{prefix}ready", value, partition=number % 8))
            await asyncio.gather(*sent)


async def worker(kafka: str, _dsn: str, prefix: str, log: str | None) -> None:
    """Claims each poll with one record, runs the no-op stages and reports results in batches."""
    results: list[dict] = []
    has_results = asyncio.Event()
    starts = open(log, "w", buffering=1) if log else None  # noqa: ASYNC230, SIM115 (a benchmark's log, once)

    async def run(task: dict) -> None:
        stage = task["stage"]
        if starts and stage == STAGES[0]:
            starts.write(f"{time.time() - task['context']['at']}\n")
        task["next"] = STAGES[STAGES.index(stage) + 1] if stage != STAGES[-1] else None
        results.append(task)
        has_results.set()

    async def report(out: AIOKafkaProducer) -> None:
        while True:
            await has_results.wait()
            await asyncio.sleep(0.003)
            has_results.clear()
            while results:
                batch, results[:500] = results[:500], []
                await out.send_and_wait(f"{prefix}results", orjson.dumps(batch), key=b"worker")

    async with producer(kafka) as out, consumer(kafka, f"{prefix}workers", f"{prefix}ready") as records:
        reporting = asyncio.create_task(report(out))
        running: set[asyncio.Task[None]] = set()
        while not reporting.done():
            for _, batch in (await records.getmany(timeout_ms=1000, max_records=1000)).items():
                tasks = [orjson.loads(record.value) for record in batch]
                claim = orjson.dumps([(task["id"], task["attempt"]) for task in tasks])
                await out.send_and_wait(f"{prefix}claims", claim, key=b"worker")
                await records.commit()
                for task in tasks:
                    one = asyncio.create_task(run(task))
                    running.add(one)
                    one.add_done_callback(running.discard)


async def stages(kafka: str, dsn: str, prefix: str) -> None:
    """Commits results with a fence of stage and attempt."""
    sql = queries()
    connection = await asyncpg.connect(dsn, server_settings={"jit": "off"})
    async with consumer(kafka, f"{prefix}stages", f"{prefix}results") as records:
        while True:
            for _, batch in (await records.getmany(timeout_ms=1000)).items():
                ended = [task for record in batch for task in orjson.loads(record.value)]
                await connection.fetch(
                    sql["complete"],
                    [task["id"] for task in ended],
                    [task["stage"] for task in ended],
                    [task["attempt"] for task in ended],
                    [task["next"] for task in ended],
                    [orjson.dumps(task["context"]) for task in ended],
                )
            await records.commit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("sync", "worker", "stages"))
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--postgres", required=True)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--log")
    arguments = parser.parse_args()
    role = {"sync": sync, "stages": stages}.get(arguments.role)
    if role is None:
        uvloop.run(worker(arguments.kafka, arguments.postgres, arguments.prefix, arguments.log))
    else:
        uvloop.run(role(arguments.kafka, arguments.postgres, arguments.prefix))


if __name__ == "__main__":
    main()
