"""Batches that PostgreSQL refuses: the value at fault costs its own entry and no other.

The contracts leave no value that PostgreSQL is known to refuse. So a trigger refuses one, with the
error of a text that the database cannot store.
"""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiokafka import AIOKafkaProducer
from tests.support.gateways import running_gateway
from tests.support.pipeline import System
from tests.support.services import make_topics, read, write
from tests.support.waiting import wait_until

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.core.attempt import AttemptId
from penstock.postgres import types
from penstock.postgres.connection import open_pool

# PostgreSQL refuses each row with this text.
UNSTORABLE = "unstorable"
REFUSING = f"""
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF '{UNSTORABLE}' IN (NEW.stage, NEW.worker, NEW.key)
       -- The failure of an attempt may be stored.
       AND NEW.state <> 'failed' THEN
        RAISE EXCEPTION 'no such text' USING ERRCODE = '22021';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON task FOR EACH ROW EXECUTE FUNCTION refuse();
"""
BATCH = 21
BAD = 13


@pytest.fixture
async def system(kafka_servers, prefix, database):
    await make_topics(kafka_servers, prefix)
    async with open_pool(database, "test") as pool, AsyncExitStack() as stack:
        await types.register(pool, types.TaskType(name="t", partitions=2, first_stage="start"))
        await pool.execute(REFUSING)
        yield System(kafka_servers, prefix, database, stack, pool)


def drafts() -> list[dict[str, Any]]:
    return [{"type": "t", "key": UNSTORABLE if n == BAD else f"k-{n}"} for n in range(BATCH)]


async def keys(system):
    return {row["key"] for row in await system.pool.fetch("SELECT key FROM task")}


HEALTHY = {f"k-{n}" for n in range(BATCH) if n != BAD}


async def test_the_gateway_refuses_the_submission_alone(system, tmp_path: Path):
    """T5: all other tasks of the batch are committed, and the answer names the one at fault."""
    where = {**system.where, "postgres": system.database, "objects": f"file://{tmp_path}"}
    async with running_gateway(**where) as gateway:
        answer = await gateway.post("/tasks", drafts())
        assert answer.status == 207
        refused = [place for place, task in enumerate(answer.body["tasks"]) if "errors" in task]
        assert refused == [BAD]
        [error] = answer.body["tasks"][BAD]["errors"]
        assert error["pointer"] == f"/{BAD}"
        assert "cannot store" in error["detail"]
        assert await keys(system) == HEALTHY
        single = await gateway.post("/tasks", {"type": "t", "key": UNSTORABLE})
        assert single.status == 422


async def test_ingest_rejects_the_record_alone(system):
    """T5: all other records of the batch become tasks, and the one at fault is rejected with the
    reason."""
    await write(system.where["kafka"], f"{system.where['prefix']}submitted", *drafts(), partition=0)
    await system.start("task-sync")

    async def ingested():
        return await keys(system) == HEALTHY

    await wait_until(ingested, what="all other records are tasks")

    async def rejected():
        return await read(system.where["kafka"], f"{system.where['prefix']}submitted.rejected")

    [rejection] = await wait_until(rejected, what="the record is rejected")
    assert "cannot store" in rejection["reason"]


async def claimable(system, count):
    ids = await system.submit(count)
    await system.become(queued=count)
    return ids


async def test_the_stage_processor_fails_the_result_alone(system):
    """T4: all other results of the batch take effect on their first attempt, and the attempt of the
    one at fault fails permanently."""
    await system.start("task-sync", "heartbeats", "stages")
    ids = await claimable(system, BATCH)
    results = [
        {"id": id_, "step": 0, "stage": "start", "attempt": 0, "outcome": "next"}
        | {"next_stage": UNSTORABLE if n == BAD else "second"}
        for n, id_ in enumerate(ids)
    ]
    async with AIOKafkaProducer(bootstrap_servers=system.where["kafka"]) as producer:
        record = orjson.dumps({"worker": "w", "results": results})
        await producer.send_and_wait(f"{system.where['prefix']}stage-results", record)

    async def judged():
        rows = await system.pool.fetch("SELECT id, stage, state, attempt, error FROM task")
        return rows if all(row["stage"] == "second" or row["state"] == "failed" for row in rows) else None

    rows = {row["id"]: row for row in await wait_until(judged, what="all results are judged")}
    failed = [n for n, id_ in enumerate(ids) if rows[id_]["state"] == "failed"]
    assert failed == [BAD]
    assert "cannot store" in rows[ids[BAD]]["error"]
    assert {row["attempt"] for row in rows.values()} == {0}


async def test_the_heartbeat_processor_drops_the_claim_alone(system):
    """H2: all other claims of the batch become leases, and the service runs on."""
    await system.start("task-sync", "heartbeats", "stages")
    ids = await claimable(system, BATCH)
    async with AIOKafkaProducer(bootstrap_servers=system.where["kafka"]) as producer:
        for n, id_ in enumerate(ids):
            worker = UNSTORABLE if n == BAD else "w"
            claim = Heartbeat(Kind.CLAIM, worker, 60_000, [AttemptId(id_, 0, 0)])
            # One partition, so that one statement has all claims.
            await producer.send_and_wait(
                f"{system.where['prefix']}heartbeats", claim.encode(), key=b"w", partition=0
            )
        await system.become(running=BATCH - 1, queued=1)
        [left] = await system.pool.fetch("SELECT id FROM task WHERE state = 'queued'")
        assert left["id"] == ids[BAD]
        # Its result still counts.
        result = {"id": ids[BAD], "step": 0, "stage": "start", "attempt": 0, "outcome": "done"}
        record = orjson.dumps({"worker": "w", "results": [result]})
        await producer.send_and_wait(f"{system.where['prefix']}stage-results", record)
    await system.become(running=BATCH - 1, succeeded=1)
