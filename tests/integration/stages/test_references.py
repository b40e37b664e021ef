"""References to objects in results: only to objects of the task's own namespace."""

import orjson
import pytest
from aiokafka import AIOKafkaProducer
from tests.support.waiting import wait_until

from penstock.contracts.context import Context, ObjectRef
from penstock.contracts.submission import Submission
from penstock.postgres import tasks, types

DATA = b"x" * 5_000
TYPES = {"acme": "acme--t", "beta": "beta--t", "default": "plain"}
TASK_TYPES = tuple(types.TaskType(name=name, partitions=1, max_attempts=5) for name in TYPES.values())


@pytest.fixture
async def system(system):
    await system.start("task-sync", "heartbeats", "stages")
    return system


async def queued(system, namespace, count):
    """Ids of tasks whose results the test writes itself."""
    submission = Submission(type=TYPES[namespace], stage="s", context=Context.encode(1))
    ids = [task.id for task in await tasks.submit(system.pool, [submission] * count)]

    async def released():
        states = await tasks.states_of(system.pool, ids)
        return states == {"queued": count}

    await wait_until(released, what="tasks of the foreign worker are released")
    return ids


async def report(system, *results):
    """Writes one record of results: (task, reference)."""
    entries = [
        {"id": task, "step": 0, "stage": "s", "attempt": 0, "outcome": "done", "context_ref": ref.to_wire()}
        for task, ref in results
    ]
    async with AIOKafkaProducer(bootstrap_servers=system.where["kafka"]) as producer:
        record = orjson.dumps({"worker": "foreign", "results": entries})
        await producer.send_and_wait(f"{system.where['prefix']}stage-results", record)


async def judged(system, ids):
    async def so():
        rows = await system.pool.fetch(
            "SELECT id, state, attempt, error, result_ref FROM task WHERE id = ANY ($1::bigint[])", ids
        )
        found = {row["id"]: row for row in rows}
        return found if all(row["state"] != "queued" for row in rows) else None

    return await wait_until(so, what="all results are judged")


async def test_a_result_refers_to_objects_of_its_own_namespace_only(system):
    """T4, O5: a result that names an object of another namespace fails its attempt permanently. The
    results beside it in the record succeed."""
    own = {name: ObjectRef.of(DATA, name) for name in TYPES}
    acme = await queued(system, "acme", 4)
    [plain] = await queued(system, "default", 1)
    [other] = await queued(system, "default", 1)
    await report(
        system,
        (acme[0], own["acme"]),
        (acme[1], own["beta"]),
        (plain, own["default"]),
        (other, own["acme"]),
        (acme[2], own["acme"]),
        (acme[3], own["default"]),
    )
    found = await judged(system, [*acme, plain, other])
    for task in (acme[0], acme[2], plain):
        assert (found[task]["state"], found[task]["attempt"]) == ("succeeded", 0)
        assert found[task]["result_ref"]
    for task in (acme[1], acme[3], other):
        assert (found[task]["state"], found[task]["result_ref"]) == ("failed", None)
        error = orjson.loads(found[task]["error"])
        assert error["kind"] == "InvalidResult"
        assert "another namespace" in error["message"]
