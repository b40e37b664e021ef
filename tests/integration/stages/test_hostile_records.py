"""Hostile records at every topic of a running deployment, beside tasks that must not notice
them."""

import orjson
import pytest
from aiokafka import AIOKafkaProducer
from tests.support.services import read
from tests.support.waiting import wait_until

from penstock.contracts.context import Context, ObjectRef
from penstock.contracts.submission import Submission
from penstock.postgres import tasks, types

TASK_TYPES = (
    types.TaskType(name="t", partitions=2, max_attempts=3),
    types.TaskType(name="h", partitions=1, max_attempts=1),
)

HEALTHY = 40
REF = ObjectRef.of(b"x" * 5_000).to_wire()


def reference(**changed):
    return {"context_ref": {**REF, **changed}}


# The fields of a hostile entry, or the JSON text of its context, and the words of its task's error.
ENTRIES = [
    ({"context": "x" * 900_000}, "900,002 bytes after encoding"),
    (b"[" + b"1e9," * 200_000 + b"1]", "2,600,003 bytes after encoding"),
    (reference(key="a//b"), "key"),
    (reference(key="../x"), "key"),
    (reference(key="a\0b"), "key"),
    (reference(key="k" * 300), "key"),
    (reference(key="./" + REF["key"]), "key"),
    (reference(key="history/2026-01-01/part-0.ndjson.gz"), "key"),
    (reference(key="contexts/00/" + "0" * 64), "not the key of a context"),
    (reference(size=-1), "minimum"),
    (b'"\\ud800"', "surrogate"),
    (b'"\xff"', "not UTF-8"),
    (b"NaN", "not JSON"),
    (b"1e999", "not JSON"),
    (b"[" * 1_500 + b"]" * 1_500, "depth"),
    (b"[" * 250 + b"]" * 250, "deeper than 200"),
    ({"content_type": "bytes", "context": "%"}, "base64"),
    ({"content_type": "url", "context": "nowhere"}, "URL"),
    ({"outcome": "next"}, "next_stage"),
    ({"outcome": "next", "next_stage": "a\0b"}, "match"),
    ({"outcome": "next", "next_stage": "two", "delay_ms": 10**15}, "31536000000"),
    ({"outcome": "fail", "error": {"kind": "k", "message": "m" * 10_001}}, "longer than 10000"),
    ({"started_ms": 10**18}, "253402300799000"),
    ({"colour": "red"}, "colour"),
    ({"stage": "a\0b"}, "match"),
]
# Entries that name no attempt: nothing ends, and nothing is harmed.
NAMELESS = [
    b'{"id":9.223372036854775807e18,"step":0,"stage":"s","attempt":0,"outcome":"done"}',
    b'{"id":1e999,"step":0,"stage":"s","attempt":0,"outcome":"done"}',
    b'{"id":-1}',
    b"[[[[",
    b"null",
]


class Hostile:
    """Tasks of the type `h`, whose results the test writes itself."""

    def __init__(self, system, producer):
        self.system = system
        self.producer = producer

    async def claimable(self, count):
        """Ids of tasks that a foreign worker may report."""
        submitted = await tasks.submit(
            self.system.pool,
            [Submission(type="h", stage="s", context=Context.encode(n)) for n in range(count)],
        )
        ids = [task.id for task in submitted]

        async def queued():
            return count == await self.system.pool.fetchval(
                "SELECT count(*) FROM task WHERE id = ANY ($1::bigint[]) AND state = 'queued'", ids
            )

        await wait_until(queued, what="tasks of the foreign worker are released")
        return ids

    async def write(self, topic, value, **more):
        await self.producer.send_and_wait(f"{self.system.where['prefix']}{topic}", value, **more)

    async def rows(self, ids):
        rows = await self.system.pool.fetch(
            "SELECT id, state, attempt, error FROM task WHERE id = ANY ($1::bigint[])", ids
        )
        return {row["id"]: row for row in rows}


@pytest.fixture
async def hostile(system):
    async with AIOKafkaProducer(
        bootstrap_servers=system.where["kafka"], max_request_size=10_000_000, compression_type="gzip"
    ) as producer:
        yield Hostile(system, producer)


def entry_of(task_id, changed):
    fields = {"id": task_id, "step": 0, "stage": "s", "attempt": 0, "outcome": "done"}
    if isinstance(changed, bytes):
        return orjson.dumps({**fields, "context": "@@"}).replace(b'"@@"', changed)
    return orjson.dumps({**fields, **changed})


async def test_hostile_results_fail_alone(system, hostile):
    """T4, T5, W4: each hostile result fails its own attempt with a precise reason. The results
    beside it in its record, and the tasks of another worker, succeed on their first attempt; no
    service ends."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.work()
    healthy = await system.submit(HEALTHY)
    neighbours, victims = [], []
    claimable = await hostile.claimable(3 * len(ENTRIES) + 2 * len(NAMELESS))
    for changed, words in ENTRIES:
        before, victim, after = (claimable.pop() for _ in range(3))
        neighbours += [before, after]
        victims.append((victim, words))
        entries = b",".join([entry_of(before, {}), entry_of(victim, changed), entry_of(after, {})])
        await hostile.write("stage-results", b'{"worker":"foreign","results":[%b]}' % entries)
    for nameless in NAMELESS[:3] + NAMELESS[4:]:
        before, after = claimable.pop(), claimable.pop()
        neighbours += [before, after]
        entries = b",".join([entry_of(before, {}), nameless, entry_of(after, {})])
        await hostile.write("stage-results", b'{"worker":"foreign","results":[%b]}' % entries)
    for record in (
        None,
        b"",
        b"\xff",
        NAMELESS[3],
        b" " * 5_000_000,
        b'{"worker":"w","results":[%b]}' % b",".join([b"0"] * 20_000),
    ):
        await hostile.write("stage-results", record, key=b"k" * 10_000, headers=[("traceparent", b"\xff")])
    healthy += await system.submit(HEALTHY)

    async def ended():
        found = await hostile.rows([*healthy, *neighbours, *(victim for victim, _words in victims)])
        return found if all(row["state"] in ("succeeded", "failed") for row in found.values()) else None

    found = await wait_until(ended, what="all tasks have ended")
    assert {(found[task]["state"], found[task]["attempt"]) for task in [*healthy, *neighbours]} == {
        ("succeeded", 0)
    }
    for victim, words in victims:
        assert found[victim]["state"] == "failed"
        error = orjson.loads(found[victim]["error"])
        assert error["kind"] == "InvalidResult"
        assert words in error["message"]

    async def rejected():
        reasons = [
            each["reason"]
            for each in await read(system.where["kafka"], f"{system.where['prefix']}stage-results.rejected")
        ]
        return reasons if len(reasons) >= len(ENTRIES) + len(NAMELESS) - 1 + 6 else None

    reasons = await wait_until(rejected, what="every fault is on the rejected topic")
    assert any("5,000,000 bytes of JSON" in reason for reason in reasons)


async def test_what_cannot_be_published_fails_alone(system, hostile):
    """T4: contexts and references that are in the table and cannot be published end no service:
    their tasks fail with the reason, and tasks beside them succeed on their first
    attempt."""
    await system.start("heartbeats", "stages")
    healthy = await system.submit(HEALTHY)
    large, escaping, forging, missing = await system.submit(4)
    await system.pool.execute(
        "UPDATE task SET context = $2 WHERE id = $1", large, b'"%b"' % (b"x" * 3_400_000)
    )
    await system.pool.execute(
        "UPDATE task SET content_type = 'text', context = $2 WHERE id = $1", escaping, b"\xff"
    )
    for task, key in ((forging, "../x"), (missing, REF["key"])):
        await system.pool.execute(
            "UPDATE task SET context = NULL, context_ref = $2 WHERE id = $1",
            task,
            orjson.dumps({**REF, "key": key}).decode(),
        )
    await system.start("task-sync")
    await system.work()
    healthy += await system.submit(HEALTHY)
    await system.become(succeeded=2 * HEALTHY, failed=4)
    found = await hostile.rows([*healthy, large, escaping, forging, missing])
    assert {found[task]["attempt"] for task in healthy} == {0}
    errors = {task: orjson.loads(found[task]["error"]) for task in (large, escaping, forging, missing)}
    assert [error["kind"] for error in errors.values()] == ["RecordRefused"] * 2 + ["CorruptObject"] * 2
    assert "Kafka refuses its ready record" in errors[large]["message"]
    assert "it cannot be encoded" in errors[escaping]["message"]


async def test_hostile_records_of_other_topics_change_nothing(system, hostile):
    """T5, W3: hostile submissions, heartbeats, ready records and revocations are rejected or
    skipped with what is at fault; healthy tasks succeed on their first attempt; no service and no
    worker ends."""
    await system.start("task-sync", "heartbeats", "stages")
    await system.work()
    await system.submit(1)
    await system.become(succeeded=1)
    junk = [
        None,
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        b"NaN",
        b'"\\ud800"',
        b"[" * 5_000 + b"]" * 5_000,
        b"[" * 900_000,
        b'["' + b'\\"' * 400_000,
        b" " * 5_000_000,
        b"1" * 5_000,
        b'{"type":"t","type":"h"',
    ]
    submissions = [
        {"context": "x" * 900_001},
        {"context": [[[]]] * 200_000},
        {"run_at": "0001-01-01T00:00:00+14:00"},
        {"run_at": "9999-12-31T23:59:60-12:00"},
        {"callbacks": ["http://x.example/" + "\u6f22" * 1_900]},
        {"callbacks": [{"url": "http://x.example", "headers": {"h" * 900_000: "v"}}]},
        {"labels": {"a": "\0"}},
        {"labels": {str(n): "v" for n in range(21)}},
        {"idempotency_key": "k" * 201},
        {"stage": "a\0b"},
        {"type": "unknown"},
        {"context_ref": REF},
        {"priority": 10**30 // 10**12},
    ]
    claim = {"kind": "claim", "worker": "w", "lease_ms": 1000, "tasks": [[1, 0, 0]]}
    heartbeats = [
        {**claim, "tasks": [[1, 0, 0], [0, 0, 0], ["a", [], {}], [2**63, 0, 0], 5, None, [1, 2]]},
        {**claim, "worker": "\0"},
        {**claim, "worker": "w" * 201},
        {**claim, "lease_ms": 10**18},
        {**claim, "max_attempts": 0},
        {**claim, "tasks": [[1, 0, 0]] * 20_000},
    ]
    ready = {
        "id": 1,
        "type": "t",
        "step": 0,
        "stage": "start",
        "attempt": 0,
        "lease_ms": 1000,
        "content_type": "json",
        "context": 1,
    }
    ready_records = [
        {**ready, "id": [1]},
        {**ready, "id": "1"},
        {**ready, "id": 2**64 - 1},
        {**ready, "lease_ms": "long"},
        {**ready, "type": "h"},
        {**ready, "stage": {}},
        {**ready, "content_type": []},
        {**ready, "context_ref": "a//b"},
        {**ready, "tries": 1.5},
        {**ready, "traceparent": 5},
        {**ready, "priority": [1]},
    ]
    revocations = [
        {"why": "over", "tasks": [[[], {}, None]]},
        {"why": [], "tasks": [[1, 0, 0]]},
        {"why": "over", "tasks": {"abc": 1}},
        {"why": "over", "tasks": 5},
    ]
    healthy = await system.submit(HEALTHY)
    by_topic = {
        "submitted": [orjson.dumps({"type": "t", "context": 0, **each}) for each in submissions],
        "heartbeats": [orjson.dumps(each) for each in heartbeats],
        "ready.t": [orjson.dumps(each) for each in ready_records],
        "revoked": [orjson.dumps(each) for each in revocations],
    }
    for topic, records in by_topic.items():
        for record in junk + records:
            await hostile.write(topic, record, key=b"k", headers=[("traceparent", b"\xff\0"), ("h", None)])
    by_record = [orjson.dumps({"type": "t", "stage": "start", "context": n}) for n in range(HEALTHY)]
    for record in by_record:
        await hostile.write("submitted", record)
    healthy += await system.submit(HEALTHY)

    async def done():
        rows = await system.pool.fetch("SELECT state, attempt FROM task")
        return (
            rows if len(rows) == 1 + 3 * HEALTHY and {row["state"] for row in rows} == {"succeeded"} else None
        )

    rows = await wait_until(done, what="every healthy task has succeeded, and no other exists")
    assert {row["attempt"] for row in rows} == {0}
    # The executions that a duplicate or a foreign record would add.
    assert set(system.executed.values()) == {1}
    for topic, at_least in (
        ("submitted", len(junk) + len(submissions)),
        ("heartbeats", len(junk) + len(heartbeats) + 5),
    ):
        name = f"{system.where['prefix']}{topic}.rejected"
        found = await read(system.where["kafka"], name)
        assert len(found) >= at_least, topic
        assert all(each["reason"] for each in found)
