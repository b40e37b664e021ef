"""Workers over HTTP, health and readiness, against a real Kafka and PostgreSQL."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import orjson
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import CommitFailedError
from tests.support.gateways import Caller, running_gateway
from tests.support.services import read_records, write
from tests.support.waiting import in_time, wait_until

from penstock.concurrency.retry import retry_until_available
from penstock.contracts.context import ContentType, Context, ObjectRef
from penstock.contracts.inbound import decode_heartbeat, decode_results
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence, Outcome
from penstock.core.suspects import Isolation
from penstock.errors import KafkaUnavailable, SessionLost
from penstock.gateway import background_producer
from penstock.gateway.app import create_app
from penstock.gateway.settings import GatewaySettings
from penstock.kafka.client.connection import admin_client, make_consumer, make_producer, running
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import HEARTBEATS, PLATFORM, STAGE_RESULTS, ready, workers_group
from penstock.objects import ObjectStore
from penstock.settings import Kafka


@pytest.fixture
async def kafka(kafka_servers: str, prefix: str) -> Kafka:
    settings = Kafka(kafka=kafka_servers, prefix=prefix)
    await create_topics(settings, [*PLATFORM, ready("media", 2)])
    return settings


@pytest.fixture
async def gateway(kafka: Kafka, database: str, tmp_path: Path) -> AsyncIterator[Caller]:
    async with ready_gateway(kafka, database, tmp_path) as caller:
        yield caller


@asynccontextmanager
async def ready_gateway(kafka: Kafka, database: str, objects: Path, **more: Any) -> AsyncIterator[Caller]:
    async with running_gateway(
        kafka=kafka.kafka, prefix=kafka.prefix, postgres=database, objects=f"file://{objects}", **more
    ) as caller:
        await caller.post("/types", {"name": "media", "partitions": 2})
        await wait_until(caller.is_ready)
        yield caller


def ready_task(number: int, context: Context | None = None) -> ReadyTask:
    return ReadyTask(Fence(number, 0, "probe", 0), "media", context or Context.encode({"n": number}), 60_000)


async def release(kafka: Kafka, *tasks: ReadyTask) -> None:
    """Writes tasks to the ready topic, as task-sync does."""
    async with running(make_producer(kafka)) as producer:
        for task in tasks:
            await producer.send_and_wait(
                f"{kafka.prefix}ready.media", task.encode(), partition=task.fence.id % 2
            )


async def records(kafka: Kafka, topic: str, count: int) -> list[Any]:
    found: list[Any] = []
    async with running(make_consumer(kafka, None, kafka.prefix + topic)) as consumer, asyncio.timeout(120):
        while len(found) < count:
            found.append(await consumer.getone())
    return found


async def committed(kafka: Kafka) -> int:
    async with admin_client(kafka) as admin:
        offsets = await admin.list_consumer_group_offsets(workers_group(kafka.prefix, "media"))
    return sum(meta.offset for meta in offsets.values() if meta.offset > 0)


async def members(kafka: Kafka) -> int:
    try:
        async with admin_client(kafka) as admin:
            [response] = await admin.describe_consumer_groups([workers_group(kafka.prefix, "media")])
    except KafkaUnavailable:
        # A new broker has no coordinator until the first member joins a group.
        return 0
    [group] = response.groups
    return len(group[5])


HOLD = {"worker": "w-1", "type": "media", "max": 10, "wait_s": 30}


async def test_a_long_poll_is_answered_when_a_task_comes(gateway: Caller, kafka: Kafka) -> None:
    """T6, W3: a long poll waits for a task. Before the answer, the claim is on Kafka and the offset
    is committed."""
    waiting = asyncio.ensure_future(gateway.post("/hold_task", HOLD))
    await wait_until(lambda: members(kafka))
    assert not waiting.done()
    await release(kafka, ready_task(1))
    answer = await in_time(waiting)
    assert answer.status == 200
    assert answer.body["tasks"] == [ready_task(1).to_wire() | {"context": {"n": 1}}]
    assert await committed(kafka) == 1
    [claim] = await records(kafka, HEARTBEATS.name, 1)
    assert claim.key == b"w-1"
    heartbeat, _faults = decode_heartbeat(claim.value)
    assert (heartbeat.kind, heartbeat.lease_ms, heartbeat.tasks) == ("claim", 60_000, [(1, 0, 0)])


async def test_each_task_is_delivered_to_one_worker(gateway: Caller, kafka: Kafka) -> None:
    """T6: concurrent workers get each task once, and at most `max` tasks an answer."""
    await release(kafka, *(ready_task(n) for n in range(1, 101)))
    seen: list[int] = []

    async def work(name: str) -> None:
        while True:
            body = {"worker": name, "type": "media", "max": 7, "wait_s": 0.5}
            held = (await gateway.post("/hold_task", body)).body["tasks"]
            assert len(held) <= 7
            seen.extend(task["id"] for task in held)
            if len(seen) == 100:
                return

    async with asyncio.timeout(120):
        await asyncio.gather(*(work(f"w-{n}") for n in range(5)))
    assert sorted(seen) == list(range(1, 101))
    assert await committed(kafka) == 100


async def test_an_answer_has_at_most_one_suspect(kafka: Kafka, database: str, tmp_path: Path) -> None:
    """W8: a worker that does not isolate suspects gets one at a time, with all other tasks before
    the next. Its heartbeats may say that it waits."""
    suspects = {2, 6}
    isolated = {n: Isolation.ONE if n in suspects else None for n in range(2, 12, 2)}
    # All on one partition, in this order.
    await release(kafka, *(dataclasses.replace(ready_task(n), isolation=i) for n, i in isolated.items()))
    async with ready_gateway(kafka, database, tmp_path) as gateway:
        answers: list[list[int]] = []
        while sum(map(len, answers)) < len(isolated):
            tasks = (await gateway.post("/hold_task", HOLD)).body["tasks"]
            assert {task["id"]: task.get("isolation") for task in tasks} == {
                task["id"]: isolated[task["id"]] for task in tasks
            }
            answers.append([task["id"] for task in tasks])
        waits = {"id": 6, "step": 0, "stage": "-", "attempt": 0, "outcome": "progress"}
        answer = await gateway.post("/set_task", {"worker": "w-1", "results": [{**waits, "begun": False}]})
        assert answer.body["rejected"] == []
    assert all(len(suspects.intersection(answer)) <= 1 for answer in answers)


async def test_a_disconnected_worker_loses_no_task(gateway: Caller, kafka: Kafka) -> None:
    """T6: the next worker gets the task when a waiting worker has disconnected."""
    disconnected = asyncio.ensure_future(gateway.post("/hold_task", HOLD))
    await wait_until(lambda: members(kafka))
    disconnected.cancel()
    with pytest.raises(asyncio.CancelledError):
        await disconnected
    await release(kafka, ready_task(1))
    answer = await gateway.post("/hold_task", {**HOLD, "worker": "w-2"})
    assert [task["id"] for task in answer.body["tasks"]] == [1]
    [claim] = await records(kafka, HEARTBEATS.name, 1)
    assert claim.key == b"w-2"


async def test_a_repeated_request_gets_the_tasks_of_its_lost_answer(gateway: Caller, kafka: Kafka) -> None:
    """T6, S11: under the same key the same attempts are answered, as many as there is room for; the
    others are handed back. A request with another key gets new tasks."""

    async def hold(key: str, **more: Any) -> Any:
        answer = await gateway.post("/hold_task", {**HOLD, **more}, headers={"Idempotency-Key": key})
        return answer.body

    # All in one partition, so that one fetch has them.
    await release(kafka, *map(ready_task, (2, 4, 6)))
    first = await hold("a")
    again = await hold("a")
    assert again["tasks"] == first["tasks"]
    assert again["claimed_ms_ago"] >= first["claimed_ms_ago"]
    assert [task["id"] for task in (await hold("a", max=1))["tasks"]] == [2]
    [returned] = await records(kafka, STAGE_RESULTS.name, 1)
    results = decode_results(returned.value)[1]
    assert {(result.fence.id, result.outcome) for result in results} == {
        (4, Outcome.HANDED_BACK),
        (6, Outcome.HANDED_BACK),
    }
    assert await hold("b", wait_s=0) == {"tasks": []}
    await release(kafka, ready_task(8))
    assert [task["id"] for task in (await hold("c"))["tasks"]] == [8]


async def test_a_gateway_that_begins_again_repeats_its_answers(
    kafka: Kafka, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T6, O2: an outage loses an answer and ends the producer. The gateway begins again in its
    process, and answers the repetition with the same attempts."""
    producers: list[Any] = []
    ports: list[int] = []

    def make(settings: Kafka) -> Any:
        producers.append(make_producer(settings))
        return producers[-1]

    monkeypatch.setattr(background_producer, "make_producer", make)
    settings = GatewaySettings.load(
        {},
        gateway_port=0,
        kafka=kafka.kafka,
        prefix=kafka.prefix,
        postgres=database,
        objects=f"file://{tmp_path}",
    )
    service = create_app(settings, listening=ports.append)

    stopping = asyncio.Event()

    def broken(**_options: Any) -> None:
        raise RuntimeError("a defect")

    async def hold(gateway: Caller) -> Any:
        answer = await gateway.post("/hold_task", HOLD, headers={"Idempotency-Key": "a"})
        return answer.body["tasks"]

    async with aiohttp.ClientSession() as session:

        async def begun(times: int) -> Caller:
            await wait_until(lambda: len(ports) == times)
            gateway = Caller(f"http://127.0.0.1:{ports[-1]}", session)
            await wait_until(gateway.is_ready)
            return gateway

        async def begun_again() -> bool:
            with suppress(aiohttp.ClientError):
                await gateway.post(*REPORT)
            return len(ports) == 2

        # As `process.run`: a lost session lets it begin again.
        running = asyncio.ensure_future(
            retry_until_available(
                lambda: service(stopping, lambda: None), waiting_for="the gateway", retry_on=(SessionLost,)
            )
        )
        try:
            gateway = await begun(1)
            await gateway.post("/types", {"name": "media", "partitions": 2})
            await release(kafka, ready_task(1))
            held = await hold(gateway)
            assert [task["id"] for task in held] == [1]
            monkeypatch.setattr(producers[0]._message_accumulator, "drain_by_nodes", broken)
            await wait_until(begun_again)
            assert await hold(await begun(2)) == held
        finally:
            stopping.set()
            await in_time(running)


async def test_an_idle_gateway_leaves_the_group(kafka: Kafka, database: str, tmp_path: Path) -> None:
    """T6: a gateway without requests for `gateway_linger_s` leaves the group, which frees its
    partitions. The next request makes it join again."""
    async with ready_gateway(kafka, database, tmp_path, gateway_linger_s=0.5) as gateway:
        await gateway.post("/hold_task", {**HOLD, "wait_s": 0})
        await wait_until(lambda: members(kafka))

        async def left() -> bool:
            return await members(kafka) == 0

        await wait_until(left)
        await release(kafka, ready_task(1))
        answer = await gateway.post("/hold_task", HOLD)
        assert [task["id"] for task in answer.body["tasks"]] == [1]


async def test_fetched_records_go_to_the_next_owner_of_the_partition(
    kafka: Kafka, database: str, tmp_path: Path
) -> None:
    """W3: records that the gateway has only fetched are not committed, so another member of the
    group gets them."""
    await release(kafka, *(ready_task(n) for n in range(1, 21)))
    async with ready_gateway(kafka, database, tmp_path, gateway_linger_s=1.0) as gateway:
        held = (await gateway.post("/hold_task", {**HOLD, "max": 1})).body["tasks"]
        group = workers_group(kafka.prefix, "media")
        seen: set[int] = {held[0]["id"]}
        async with (
            running(make_consumer(kafka, group, f"{kafka.prefix}ready.media")) as consumer,
            asyncio.timeout(120),
        ):
            while len(seen) < 20:
                record = await consumer.getone()
                task = ReadyTask.decode(record.value).fence.id
                assert task != held[0]["id"]
                seen.add(task)


async def test_a_poll_skips_unreadable_records(gateway: Caller, kafka: Kafka) -> None:
    """T6: the gateway skips and commits an unreadable record. The poll waits until a task comes or
    its time is over."""
    waiting = asyncio.ensure_future(gateway.post("/hold_task", HOLD))
    await wait_until(lambda: members(kafka))
    await write(kafka.kafka, f"{kafka.prefix}ready.media", b"nonsense", partition=0)
    await wait_until(lambda: committed(kafka))
    assert not waiting.done()
    await release(kafka, ready_task(2))
    answer = await in_time(waiting)
    assert [task["id"] for task in answer.body["tasks"]] == [2]
    await write(kafka.kafka, f"{kafka.prefix}ready.media", b"nonsense", partition=0)
    answer = await in_time(gateway.post("/hold_task", {**HOLD, "wait_s": 1}))
    assert answer.body == {"tasks": []}


async def test_the_answer_has_the_age_of_its_claim(
    gateway: Caller, kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W6: the answer has the age of its claim, because the platform counts the lease from the
    claim."""
    commit, may_commit = AIOKafkaConsumer.commit, asyncio.Event()

    async def slow_commit(self: AIOKafkaConsumer, offsets: Any) -> None:
        await may_commit.wait()
        await commit(self, offsets)

    monkeypatch.setattr(AIOKafkaConsumer, "commit", slow_commit)
    await release(kafka, ready_task(1))
    waiting = asyncio.ensure_future(gateway.post("/hold_task", HOLD))
    [claim] = await records(kafka, HEARTBEATS.name, 1)
    await wait_until(lambda: time.time() * 1000 - claim.timestamp > 500)
    may_commit.set()
    answer = await waiting
    assert 500 <= answer.body["claimed_ms_ago"] <= time.time() * 1000 - claim.timestamp + 500


async def test_a_claimed_task_reaches_its_worker_when_the_commit_fails(
    gateway: Caller, kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T6, W3: a broker that was frozen commits an offset and refuses its member. No other worker
    reads the record again, so the worker that it was claimed for gets the task."""
    commit = AIOKafkaConsumer.commit

    async def commit_and_refuse(consumer: AIOKafkaConsumer, offsets: Any) -> None:
        await commit(consumer, offsets)
        raise CommitFailedError

    await release(kafka, ready_task(1))
    monkeypatch.setattr(AIOKafkaConsumer, "commit", commit_and_refuse)
    answer = await gateway.post("/hold_task", HOLD)
    assert answer.status == 200
    assert [task["id"] for task in answer.body["tasks"]] == [1]
    monkeypatch.undo()
    # The next request joins the group again.
    await release(kafka, ready_task(2))
    answer = await gateway.post("/hold_task", HOLD)
    assert [task["id"] for task in answer.body["tasks"]] == [2]


async def test_a_claim_that_is_not_confirmed_is_given_back(
    gateway: Caller, kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W3, S11: a broker that was frozen takes a claim after the gateway was told that it does not
    answer. The task would run without a worker until its lease ends, and be charged a loss, so the
    gateway gives it back. Its record is only committed, and the next request gets another task."""
    send = background_producer.BackgroundProducer.send_heartbeats

    async def send_and_fail(producer: Any, heartbeats: Any) -> None:
        await send(producer, heartbeats)
        raise KafkaUnavailable("it does not answer in time")

    await release(kafka, ready_task(2), ready_task(4))
    with monkeypatch.context() as failing:
        failing.setattr(background_producer.BackgroundProducer, "send_heartbeats", send_and_fail)
        answer = await gateway.post("/hold_task", {**HOLD, "max": 1})
        assert answer.status == 503
        [claim] = await records(kafka, HEARTBEATS.name, 1)
        assert [attempt_id.task_id for attempt_id in decode_heartbeat(claim.value)[0].tasks] == [2]
        # The end of its lease follows it, and is refused here: both are repeated.
        [returned, *_] = await records(kafka, STAGE_RESULTS.name, 1)
    [result] = decode_results(returned.value)[1]
    assert (result.fence.id, result.outcome) == (2, Outcome.HANDED_BACK)
    answer = await gateway.post("/hold_task", HOLD)
    assert [task["id"] for task in answer.body["tasks"]] == [4]

    async def all_committed() -> bool:
        return await committed(kafka) == 2

    await wait_until(all_committed)


async def test_large_contexts_are_sent_inline(gateway: Caller, kafka: Kafka, tmp_path: Path) -> None:
    """T4: HTTP workers get a large context inline, because they cannot reach the object store. A
    missing object fails its task with the reason."""
    store = ObjectStore(f"file://{tmp_path}")
    large = await store.check_in(Context(ContentType.TEXT, b"y" * 50_000), "default")
    lost = await store.check_in(Context(ContentType.TEXT, b"z" * 50_000), "default")
    assert lost.ref is not None
    (tmp_path / lost.ref.key).unlink()
    await release(kafka, ready_task(2, lost), ready_task(4, large))
    held = (await gateway.post("/hold_task", {**HOLD, "max": 2})).body["tasks"]
    assert [(task["id"], task["context"]) for task in held] == [(4, "y" * 50_000)]
    [record] = await records(kafka, STAGE_RESULTS.name, 1)
    _, [result], _ = decode_results(record.value)
    assert (result.fence.id, result.outcome, result.permanent) == (2, Outcome.FAIL, True)
    assert result.error is not None
    assert result.error.kind == "CorruptObject"


async def test_only_tasks_with_large_contexts_wait_for_the_object_store(
    kafka: Kafka, database: str, tmp_path: Path
) -> None:
    """T4, T6: while the object store is away, a poll answers with the tasks that need no object. An
    attempt that needs one is handed back, which is not charged."""
    folder = tmp_path / "objects"
    large = await ObjectStore(f"file://{folder}").check_in(
        Context(ContentType.TEXT, b"y" * 50_000), "default"
    )
    async with ready_gateway(kafka, database, folder) as gateway:
        folder.rename(tmp_path / "away")
        await release(kafka, ready_task(2, large), ready_task(4))
        held: list[int] = []

        async def held_small() -> bool:
            answer = await gateway.post("/hold_task", {**HOLD, "max": 2})
            assert answer.status == 200
            held.extend(task["id"] for task in answer.body["tasks"])
            return bool(held)

        await wait_until(held_small)
        assert held == [4]
        [record] = await records(kafka, STAGE_RESULTS.name, 1)
        _, [result], _ = decode_results(record.value)
        assert (result.fence.id, result.outcome) == (2, Outcome.HANDED_BACK)
        assert result.delay_ms


async def test_only_results_with_large_contexts_wait_for_the_object_store(
    kafka: Kafka, database: str, tmp_path: Path
) -> None:
    """T4, T6: while the object store is away, the results of a batch that need no object are
    written. The gateway answers 503, and accepts the same batch when the store is back."""
    folder = tmp_path / "objects"
    async with ready_gateway(kafka, database, folder) as gateway:
        submitted = await gateway.post("/tasks", [{"type": "media"}] * 2)
        ids = [task["id"] for task in submitted.body["tasks"]]
        fields = {"step": 0, "stage": "s", "attempt": 0, "outcome": "done", "content_type": "text"}
        batch = {
            "worker": "w-1",
            "results": [
                {"id": ids[0], **fields, "context": "y" * 50_000},
                {"id": ids[1], **fields, "context": "small"},
            ],
        }
        folder.rename(tmp_path / "away")
        refused = await gateway.post("/set_task", batch)
        assert (refused.status, "Retry-After" in refused.headers) == (503, True)
        assert "the object store" in refused.body["detail"]
        [record] = await records(kafka, STAGE_RESULTS.name, 1)
        assert [result.fence.id for result in decode_results(record.value)[1]] == [ids[1]]
        (tmp_path / "away").rename(folder)
        answer = await gateway.post("/set_task", batch)
        assert (answer.status, answer.body["accepted"]) == (200, 2)


HOSTILE_KEYS = ["a//b", "../x", "a\0b", "k" * 300, "./contexts/x", "history/2026-01-01/part-0", ""]


async def test_a_context_that_cannot_be_read_holds_up_no_other_task(
    kafka: Kafka, database: str, tmp_path: Path
) -> None:
    """T4, T6: each hostile reference and each unreadable object fails its own task. The poll
    answers with all other tasks at once."""
    store = ObjectStore(f"file://{tmp_path}")
    large = await store.check_in(Context(ContentType.TEXT, b"y" * 50_000), "default")
    folder = await store.check_in(Context(ContentType.TEXT, b"z" * 50_000), "default")
    forging = b'1},{"id":99,"context":"forged'.ljust(5_000)
    assert large.ref is not None
    assert folder.ref is not None
    # The store answers for other objects, but not for this one.
    (tmp_path / folder.ref.key).unlink()
    (tmp_path / folder.ref.key).mkdir()
    contexts = [
        *(Context(ContentType.TEXT, ref=dataclasses.replace(large.ref, key=key)) for key in HOSTILE_KEYS),
        Context(ContentType.TEXT, ref=dataclasses.replace(large.ref, size=10**12)),
        Context(
            ContentType.JSON, ref=(await store.check_in(Context(ContentType.BYTES, forging), "default")).ref
        ),
        folder,
    ]
    tasks = [ready_task(number, context) for number, context in enumerate(contexts, 1)]
    healthy = [ready_task(100), ready_task(101, large)]
    async with ready_gateway(kafka, database, tmp_path) as gateway:
        await release(kafka, healthy[0], *tasks, healthy[1])
        held: list[Any] = []
        async with asyncio.timeout(120):
            while len(held) < len(healthy):
                answer = await gateway.post("/hold_task", {**HOLD, "max": 3})
                assert answer.status == 200
                held += answer.body["tasks"]
        assert {task["id"] for task in held} == {100, 101}

        async def all_failed() -> dict[int, Any] | None:
            # Not 0: a poll that does not wait takes only what is fetched already.
            await gateway.post("/hold_task", {**HOLD, "wait_s": 1})
            found: dict[int, Any] = {}
            for record in await read_records(kafka.kafka, kafka.prefix + STAGE_RESULTS.name):
                found |= {result.fence.id: result.error for result in decode_results(record.value)[1]}
            return found if len(found) == len(tasks) else None

        errors = await wait_until(all_failed, what="every hostile task has its failure")
    kinds = [errors[number].kind for number in range(1, len(tasks) + 1)]
    assert kinds[:-1] == ["CorruptObject"] * len(HOSTILE_KEYS) + ["TooLarge", "CorruptObject"]
    assert kinds[-1] in ("CorruptObject", "ObjectsUnavailable")


async def test_a_worker_reads_objects_of_its_own_namespace_only(
    gateway: Caller, kafka: Kafka, database: str, tmp_path: Path
) -> None:
    """T4, O5: the gateway rejects a result that names an object of another namespace, and stores a
    large context where the task's namespace names it. It serves no object of another
    namespace."""
    store = ObjectStore(f"file://{tmp_path}")
    large = Context(ContentType.TEXT, b"y" * 50_000)
    default, beta = [await store.check_in(large, name) for name in ("default", "beta")]
    assert default.ref is not None
    assert beta.ref is not None
    for name in ("acme--t", "beta--t"):
        await gateway.post("/types", {"name": name})
    submitted = await gateway.post("/tasks", [{"type": "acme--t", "context": "s" * 5_000}] * 4)
    ids = [task["id"] for task in submitted.body["tasks"]]
    fields = {"step": 0, "stage": "s", "attempt": 0, "outcome": "done"}
    text = {"content_type": "text"}
    entries = [
        {"id": ids[0], **fields, **text, "context_ref": default.ref.to_wire()},
        {"id": ids[1], **fields, **text, "context_ref": beta.ref.to_wire()},
        {"id": ids[2], **fields, **text, "context": "y" * 50_000},
    ]
    answer = await gateway.post("/set_task", {"worker": "w-1", "results": entries})
    assert (answer.status, answer.body["accepted"]) == (200, 1)
    assert [each["errors"][0]["pointer"] for each in answer.body["rejected"]] == [
        "/results/0/context_ref/key",
        "/results/1/context_ref/key",
    ]
    [record] = await records(kafka, STAGE_RESULTS.name, 1)
    _, [result], _ = decode_results(record.value)
    assert result.context is not None
    assert result.context.ref == ObjectRef.of(b"y" * 50_000, "acme")
    assert (await gateway.get(f"/tasks/{ids[0]}")).body["context"] == "s" * 5_000
    connection = await asyncpg.connect(database)
    shown = []
    for ref in (default.ref, beta.ref):
        await connection.execute(
            "UPDATE penstock.task SET content_type = 'text', context_ref = $2 WHERE id = $1",
            ids[3],
            orjson.dumps(ref.to_wire()).decode(),
        )
        shown.append((await gateway.get(f"/tasks/{ids[3]}")).body)
    await connection.close()
    assert all("another namespace" in task["context_error"] for task in shown)


async def test_results_are_accepted_entry_by_entry(gateway: Caller, kafka: Kafka, database: str) -> None:
    """T6: valid results are on Kafka, followed by the end of their leases. Invalid entries are
    rejected one by one, and progress sends heartbeats."""

    ids: list[int] = []

    def entry(number: int, **more: Any) -> dict[str, Any]:
        return {"id": ids[number - 1], "step": 0, "stage": "probe", "attempt": 0, **more}

    # The gateway accepts progress only for existing attempts.
    submitted = await gateway.post("/tasks", [{"type": "media", "stage": "probe"}] * 9)
    ids += [task["id"] for task in submitted.body["tasks"]]
    unknown = ids[-1] + 1
    await gateway.post(f"/tasks/{ids[6]}/cancel")
    connection = await asyncpg.connect(database)
    await connection.execute(
        "UPDATE penstock.task SET state = 'running', worker = CASE id WHEN $2 THEN 'w-2' ELSE 'w-1' END "
        "WHERE id IN ($1, $2)",
        ids[3],
        ids[7],
    )
    await connection.close()
    answer = await gateway.post(
        "/set_task",
        {
            "worker": "w-1",
            "results": [
                entry(1, outcome="next", next_stage="cut", context={"a": 1}),
                entry(2, outcome="next"),
                entry(3, outcome="done", content_type="text", context="x" * 5000),
                entry(4, outcome="progress", lease_ms=1234),
                entry(5, outcome="progress", colour="red"),
                entry(6, outcome="done", content_type="bytes", context="%"),
                "nonsense",
                entry(7, outcome="progress"),
                entry(8, outcome="progress"),
                {**entry(1), "id": unknown, "outcome": "progress"},
                entry(9, outcome="handed_back", no_handler=True, error={"kind": "any", "message": "m"}),
                entry(9, outcome="handed_back"),
            ],
        },
    )
    assert answer.status == 200
    assert answer.body["received"] == answer.body["accepted"] == 4
    reasons = {7: "cancelled", 8: "taken over", 9: "over"}
    assert answer.body["gone"] == [{"index": index, "why": why} for index, why in reasons.items()]
    found = {r["index"]: r["errors"][0]["pointer"] for r in answer.body["rejected"]}
    assert found == {
        1: "/results/1",
        4: "/results/4",
        5: "/results/5/context",
        6: "/results/6",
        11: "/results/11",
    }
    [record] = await records(kafka, STAGE_RESULTS.name, 1)
    worker, results, faults = decode_results(record.value)
    assert (worker, faults) == ("w-1", [])
    assert [(r.fence.id, r.outcome, r.no_handler) for r in results] == [
        (ids[0], "next", False),
        (ids[2], "done", False),
        (ids[8], "handed_back", True),
    ]
    assert results[1].context is not None
    assert results[1].context.ref is not None
    heartbeats = [decode_heartbeat(r.value)[0] for r in await records(kafka, HEARTBEATS.name, 2)]
    assert [(s.kind, s.lease_ms, s.tasks) for s in heartbeats] == [
        ("beat", 1234, [(ids[3], 0, 0)]),
        ("release", 0, [(ids[number], 0, 0) for number in (0, 2, 8)]),
    ]


BAD_REQUESTS: list[tuple[str, Any, int, str]] = [
    ("/hold_task", {"type": "media"}, 422, ""),
    ("/hold_task", {"worker": "w", "type": "nope"}, 422, "/type"),
    ("/hold_task", {"worker": "w", "type": "media", "max": 501}, 422, "/max"),
    ("/hold_task", {"worker": "w", "type": "media", "wait_s": 31}, 422, "/wait_s"),
    ("/hold_task", {"worker": "a\0", "type": "media"}, 422, "/worker"),
    ("/set_task", {"worker": "w"}, 422, ""),
    ("/set_task", {"worker": "", "results": []}, 422, "/worker"),
    ("/set_task", {"worker": "w", "results": {}}, 422, "/results"),
    ("/set_task", {"worker": "w", "results": [1] * 1001}, 413, "/results"),
    ("/set_task", [], 422, ""),
]


async def test_bad_requests_of_workers_get_status_and_pointer(gateway: Caller) -> None:
    """T6: a bad request gets the status and the pointer of its error."""
    for path, body, status, pointer in BAD_REQUESTS:
        answer = await gateway.post(path, body)
        assert (answer.status, answer.pointers) == (status, [pointer]), (path, str(body)[:80])


async def test_results_too_long_for_one_record_are_split(gateway: Caller, kafka: Kafka) -> None:
    """Results with long tracebacks are split over records, because the broker limits the size of
    one."""
    error = {"kind": "E", "message": "m", "traceback": "t" * 90_000}
    entries = [
        {"id": n, "step": 0, "stage": "s", "attempt": 0, "outcome": "fail", "error": error}
        for n in range(1, 21)
    ]
    data = orjson.dumps({"worker": "w", "results": entries[:10]})
    answer = await gateway.post("/set_task", data=data, headers={"Content-Type": "application/json"})
    assert answer.body == {"received": 10, "accepted": 10, "rejected": [], "gone": []}
    found = [decode_results(r.value)[1] for r in await records(kafka, STAGE_RESULTS.name, 2)]
    assert [r.fence.id for batch in found for r in batch] == list(range(1, 11))


async def test_a_stop_answers_a_long_poll(kafka: Kafka, database: str, tmp_path: Path) -> None:
    """A stopping gateway answers a long poll at once with an empty list, so that a rolling restart
    does not wait."""
    async with ready_gateway(kafka, database, tmp_path) as gateway:
        waiting = asyncio.ensure_future(gateway.post("/hold_task", HOLD))
        await wait_until(lambda: members(kafka))
        # The end of the block stops the gateway; the answer must come before it closes connections.
        stopped = asyncio.get_running_loop().time()

    assert asyncio.get_running_loop().time() - stopped < 10
    answer = await in_time(waiting)
    assert answer.body == {"tasks": []}


RESULT = {"id": 1, "step": 0, "stage": "s", "attempt": 0, "outcome": "done"}
REPORT = ("/set_task", {"worker": "w-1", "results": [RESULT]})


@pytest.mark.parametrize(
    ("path", "body"), [REPORT, ("/hold_task", {"worker": "w-1", "type": "media", "max": 1})]
)
async def test_a_producer_whose_sequence_is_lost_goes_on(
    kafka: Kafka, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    """O1: the gateway answers as before after the broker has refused the sequence of its
    producer."""
    producers: list[Any] = []

    def make(settings: Kafka) -> Any:
        producers.append(make_producer(settings))
        return producers[-1]

    monkeypatch.setattr(background_producer, "make_producer", make)
    async with ready_gateway(kafka, database, tmp_path) as gateway:
        # The broker counts sequence numbers of the worker's partitions from the first records.
        assert (await gateway.post(*REPORT)).status == 200
        for topic in (HEARTBEATS, STAGE_RESULTS):
            for number in range(partitions_of(kafka, topic)):
                # The next record has a sequence number that the broker does not expect.
                partition = TopicPartition(kafka.prefix + topic.name, number)
                producers[0]._txn_manager.increment_sequence_number(partition, 1_000)
        # One for each request, so that each is claimed and none waits.
        await release(kafka, ready_task(1), ready_task(2))
        for _ in range(2):
            assert (await gateway.post(path, body)).status == 200


async def test_submission_works_without_kafka(database: str, tmp_path: Path) -> None:
    """O1: submission needs PostgreSQL alone. A request that needs Kafka gets 503, and readiness
    names Kafka."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        unused_address = f"127.0.0.1:{unused.getsockname()[1]}"
    async with running_gateway(
        kafka=unused_address, prefix="p.", postgres=database, objects=f"file://{tmp_path}"
    ) as gateway:
        await gateway.post("/types", {"name": "media"})
        submitted = await gateway.post("/tasks", {"type": "media"})
        assert submitted.status == 201
        cancelled = await gateway.post(f"/tasks/{submitted.body['id']}/cancel")
        assert cancelled.status == 200
        assert (await gateway.post("/hold_task", HOLD)).status == 503
        answer = await gateway.get("/readyz")
        assert answer.status == 503
        assert answer.body["checks"]["postgres"] == "ok"
        assert unused_address in answer.body["checks"]["kafka"]
