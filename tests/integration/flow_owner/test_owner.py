"""The service `flows` with Kafka, PostgreSQL, task-sync, stages and a worker."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import asyncpg
import orjson
import pytest
from tests.integration.flow_owner.support import Owner, definition, running_with, task
from tests.support.services import read, running_service
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.completion import Outcome, conclude
from penstock.flow_owner import contents, owner
from penstock.flow_owner.app import create_app
from penstock.flow_owner.settings import FlowsSettings
from penstock.objects import ObjectStore
from penstock.postgres import advance, release, tasks, types
from penstock.postgres.ending import Ending
from penstock.postgres.flow_starts import match_events
from penstock.postgres.flows import SHARDS
from penstock.postgres.session import open_session
from penstock.worker import Child, Done, Fail, Spawn, Wait, Worker, WorkerSettings


@pytest.fixture
def settings(where):
    return FlowsSettings(**where, flow_own_retry_s=0.2, flow_sweep_s=1.0)


@pytest.fixture
async def store(pool, settings):
    """Definitions and starts; the service advances."""
    return Owner(pool)


async def ended(store, flow_id):
    """The row of a flow, once it has ended."""

    async def find():
        row = await store.flow(flow_id)
        return row if row["finished_at"] else None

    return await wait_until(find, what=f"flow {flow_id} has ended")


async def test_flows_run_from_their_start_to_their_event(store, settings):
    """F1, F2, F6: real workers, a fan-out over child flows, large contexts, a timer."""
    child = definition(
        "child",
        inputs={"text": {}},
        nodes={"shout": task(input="inputs.text")},
        output="nodes.shout.output",
    )
    parent = definition(
        "parent",
        inputs={"texts": {}},
        nodes={
            "pause": {"kind": "timer", "delay_s": 0.01},
            "each": {
                "kind": "map",
                "after": ["pause"],
                "items": "inputs.texts",
                "each": {"kind": "flow", "flow": "child", "input": '{"text": item}'},
            },
            "join": task("each", type="b", input="nodes.each.output"),
        },
        output='{"parts": size(nodes.join.output), "same": nodes.join.output == nodes.each.output}',
    )
    await store.define(child, parent)
    worker = Worker(WorkerSettings(kafka=settings.kafka, prefix=settings.prefix, objects=settings.objects))

    @worker.stage("a.start")
    async def shout(given):
        return Done(given.context.upper())

    @worker.stage("b.start")
    async def join(given):
        return Done(given.context)

    async with running_with(settings, worker):
        # Each text is above the inline limit, and the list of their results is an object, too.
        texts = [f"{number}" + "x" * 5_000 for number in range(3)]
        flow_id = await store.start(parent, {"texts": [text[:1] for text in texts]}, {"child": 1})
        row = await ended(store, flow_id)
        assert (row["status"], row["error"]) == ("succeeded", None)
        assert orjson.loads(row["output"]) == {"parts": 3, "same": True}

        async def find_event():
            events = await read(settings.kafka, f"{settings.prefix}events")
            return [event for event in events if event.get("flow", {}).get("id") == flow_id]

        [event] = await wait_until(find_event)
        assert (event["event"], event["output"]) == ("flow.succeeded", {"parts": 3, "same": True})


async def test_the_service_keeps_each_limit_in_time(store, settings):
    """F3: a node that no worker claims or finishes in time fails, a flow that runs too long, too;
    `warn_after_s` publishes an event, and nothing ends."""
    nodes = definition(
        "nodes",
        on_failure="continue",
        nodes={
            "unclaimed": task(start_within_s=0.05),
            "slow": task(finish_within_s=0.05),
            "watched": task(warn_after_s=0.05),
        },
    )
    whole = definition("whole", timeout_s=0.05, warn_after_s=0.01, nodes={"t": task()})
    await store.define(nodes, whole)
    async with running_service(create_app(settings)):
        flow_id = await store.start(nodes, events="all")
        over = await ended(store, await store.start(whole, events="all"))
        assert (over["status"], over["error"]) == ("failed", "timeout_s is over")

        async def late():
            events = await read(settings.kafka, f"{settings.prefix}events")
            return {
                (each["flow"]["name"], each.get("node")) for each in events if each["event"] == "flow.late"
            }

        await wait_until(lambda: _equals(late(), {("nodes", "watched"), ("whole", None)}))
        rows = await store.pool.fetch(
            "SELECT name, status, reason FROM flow_node WHERE flow_id = $1", flow_id
        )
        assert {tuple(row) for row in rows} == {
            ("unclaimed", "failed", "start_within_s is over"),
            ("slow", "failed", "finish_within_s is over"),
            ("watched", "running", None),
        }
        [watched] = await store.tasks(flow_id)
        await store.end(watched)
        assert (await ended(store, flow_id))["status"] == "failed"


async def _equals(found, expected):
    return await found == expected


async def test_large_contents_pass_by_reference(store, settings, pool):
    """Above 4,096 bytes an input is an object: it is stored before the task can be claimed."""
    large = definition(
        inputs={"n": {}},
        nodes={
            "t": task(input='{"text": inputs.n, "again": inputs.n}'),
            "u": task("t", input="nodes.t.output"),
        },
    )
    await store.define(large)
    async with running_service(create_app(settings)):
        flow_id = await store.start(large, {"n": "x" * 3_000})
        [given] = await wait_until(store.tasks)
        ref = orjson.loads(given["context_ref"])
        path = f"{settings.objects.removeprefix('file://')}/{ref['key']}"
        assert len(orjson.loads(await asyncio.to_thread(Path(path).read_bytes))["again"]) == 3_000
        await pool.execute(
            "UPDATE task SET state = 'succeeded', result_type = 'json', result_ref = context_ref, finished_at = now() WHERE id = $1",
            given["id"],
        )
        [passed] = await wait_until(store.tasks)
        assert passed["context_ref"] == given["context_ref"]
        await store.end(passed)
        assert (await ended(store, flow_id))["status"] == "succeeded"


@pytest.mark.parametrize(("pinned", "status"), [(40_000, "succeeded"), (12_000, "failed")])
async def test_a_decision_may_read_more_than_the_process_keeps(store, settings, monkeypatch, pinned, status):
    """F1: three objects that are larger together than the cache do not evict each other without
    end. Beyond the bound the node fails with the reason, and other families go on."""
    monkeypatch.setattr(contents, "KEPT_BYTES", 6_000)
    monkeypatch.setattr(contents, "PINNED_BYTES", pinned)
    reading = definition(
        inputs={"n": {}},
        nodes={
            **{name: task(input=f"inputs.n + '{name}'") for name in "xyz"},
            "sum": task("x", "y", "z", input="size(nodes.x.output + nodes.y.output + nodes.z.output)"),
        },
    )
    await store.define(reading)
    async with running_service(create_app(settings)):
        flow_id = await store.start(reading, {"n": "v" * 5_000})
        given = await wait_until(lambda: three(store))
        for each in given:
            await store.pool.execute(
                "UPDATE task SET state = 'succeeded', result_type = 'json', result_ref = context_ref,"
                " finished_at = now() WHERE id = $1",
                each["id"],
            )
        if status == "succeeded":
            [last] = await wait_until(store.tasks)
            assert orjson.loads(last["context"]) == 15_003
            await store.end(last)
        row = await ended(store, flow_id)
        assert row["status"] == status
        if status == "failed":
            assert "read at once have more than 12,000 bytes" in row["error"]


async def three(store):
    found = await store.tasks()
    return found if len(found) == 3 else None


async def test_only_flows_that_need_an_object_wait_for_the_store(store, settings):
    """S11: the message stays in the inbox while the store is away, and is applied afterwards."""
    large = definition("large", inputs={"n": {}}, nodes={"t": task(input="[inputs.n, inputs.n]")})
    small = definition("small", nodes={"t": task(type="b")})
    await store.define(large, small)
    folder = Path(settings.objects.removeprefix("file://"))
    async with running_service(create_app(settings)):
        away = folder.rename(folder.with_name("away"))
        waiting = await store.start(large, {"n": "x" * 3_000})
        going = await store.start(small)
        [given] = await wait_until(store.tasks)
        assert given["flow_id"] == going
        await store.end(given)
        assert (await ended(store, going))["status"] == "succeeded"
        assert await store.tasks(waiting) == []
        assert await store.pool.fetchval("SELECT flow_id FROM flow_inbox") == waiting
        away.rename(folder)
        [given] = await wait_until(store.tasks)
        assert given["flow_id"] == waiting
        await store.end(given)
        assert (await ended(store, waiting))["status"] == "succeeded"


async def test_replicas_divide_the_shards_and_one_goes_on_alone(store, settings):
    """S7, O1: a replica that ends, or loses its session, leaves its shards to the other."""
    waiting = definition(nodes={"w": {"kind": "wait", "event": "go"}, "t": task("w")})
    await store.define(waiting)
    ids = [await store.start(waiting) for _ in range(20)]

    async def owners():
        rows = await store.pool.fetch(
            """SELECT l.pid, count(*) AS shards FROM pg_locks l JOIN pg_stat_activity a USING (pid)
               WHERE l.locktype = 'advisory' AND a.application_name LIKE '%flows owner%' AND a.datname = current_database()
               GROUP BY l.pid"""
        )
        return sorted(row["shards"] for row in rows)

    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(running_service(create_app(settings)))
        async with running_service(create_app(settings)):
            # Each holds its shards and the lock of a member.
            await wait_until(lambda: _equal(owners(), [33, 33]), what="two replicas own 32 shards each")
        await wait_until(lambda: _equal(owners(), [65]), what="the other one owns all 64 shards")
        await wait_until(lambda: store.pool.fetchval("SELECT count(*) = 20 FROM flow_wait"))
        await store.pool.execute(
            "INSERT INTO flow_event (namespace, id, event) VALUES ('default', 'e', 'go')"
        )
        await match_events(store.pool, ["e"])
        given = await wait_until(lambda: _length(store.tasks(), 20))
        for each in given:
            await store.end(each)
        assert {(await ended(store, flow_id))["status"] for flow_id in ids} == {"succeeded"}


async def test_a_command_behind_a_recovery_waits_for_no_sweep(store, settings):
    """F3: the transaction that applies a recovery leaves the commands behind it in the inbox, and
    the next one takes them at once."""
    single = definition(nodes={"only": task()})
    await store.define(single)
    flow_id = await store.start(single)
    await store.run(lambda _task: ("failed", None))
    await store.command(flow_id, "recover", generation=1)
    await store.command(flow_id, "cancel")
    async with running_service(create_app(replace(settings, flow_sweep_s=3_600.0))):

        async def cancelled():
            row = await store.flow(flow_id)
            return (row["status"], row["generation"]) == ("cancelled", 1)

        await wait_until(cancelled)


async def test_a_family_that_cannot_be_advanced_holds_up_no_other(store, settings):
    """Fails closed: its rows stay in the inbox, the metric counts it, and all others go on."""
    good, bad = definition("good", nodes={"t": task()}), definition("bad", nodes={"t": task()})
    await store.define(good, bad)
    held = [await store.start(bad) for _ in range(2)]
    await store.pool.execute("DELETE FROM flow_definition WHERE name = 'bad'")
    ids = [await store.start(good) for _ in range(3)]
    async with running_service(create_app(settings)):
        for given in await wait_until(lambda: _length(store.tasks(), 3)):
            await store.end(given)
        assert {(await ended(store, flow_id))["status"] for flow_id in ids} == {"succeeded"}
        assert {row["flow_id"] for row in await store.pool.fetch("SELECT flow_id FROM flow_inbox")} == set(
            held
        )


async def test_a_transaction_takes_the_rows_of_all_shards(store, settings):
    """F6: many flows with a message each share the fixed costs of a transaction."""
    single = definition("single", nodes={"t": task()})
    await store.define(single)
    for _ in range(2 * SHARDS):
        await store.start(single)
    async with open_session(settings.postgres, "test", locks=False, generic_plans=True) as session:
        owning = owner.Owner(settings, session, contents.Contents(ObjectStore(settings.objects)), Mock())
        owning._work.owned.update(range(SHARDS))
        await owning._sweep()
        await owning._advance()
    assert owning.metrics.messages == 2 * SHARDS


@pytest.mark.parametrize("row", ["flow", "task"])
async def test_locked_rows_of_a_family_hold_up_no_other(store, settings, row):
    """O1: a transaction that locks a flow, or a task that its owner must cancel, delays only that
    family, which goes on when the transaction ends."""
    first = definition("first", nodes={"t": task(), "u": task("t")})
    await store.define(first)
    locked, *others = [await store.start(first) for _ in range(6)]
    async with running_service(create_app(settings)):
        tasks_of = {each["flow_id"]: each for each in await wait_until(lambda: _length(store.tasks(), 6))}
        async with store.pool.acquire() as connection, connection.transaction():
            if row == "flow":
                await connection.execute("SELECT FROM flow WHERE id = $1 FOR UPDATE", locked)
                await store.end(tasks_of[locked])
            else:
                await connection.execute("SELECT FROM task WHERE flow_id = $1 FOR UPDATE", locked)
                await store.command(locked, "cancel")
            for flow_id in others:
                await store.end(tasks_of[flow_id])
            await wait_until(lambda: _started(store, "u", others))
            assert (await store.flow(locked))["finished_at"] is None
        if row == "flow":
            await wait_until(lambda: _started(store, "u", [locked, *others]))
        else:
            assert (await ended(store, locked))["status"] == "cancelled"


async def _started(store, node, flow_ids):
    return {each["flow_id"] for each in await store.tasks() if each["flow_node"] == node} == set(flow_ids)


async def _equal(found, expected):
    return await found == expected


async def _length(found, length):
    rows = await found
    return rows if len(rows) == length else None


async def test_a_stage_spawns_children_and_waits_for_an_event(store, settings):
    """F6: a waiting task holds nothing; the end of its children, or an event, wakes it once."""
    worker = Worker(
        WorkerSettings(kafka=settings.kafka, prefix=settings.prefix, objects=settings.objects, pool=1)
    )
    seen = []

    @worker.stage("a.start")
    async def start(given):
        children = [Child("b", {"n": n, "text": "x" * 300}) for n in range(20)]
        return Spawn([*children, Child("unknown")], then="joined", context="kept")

    @worker.stage("a.joined")
    async def joined(given):
        seen.append(given.context)
        return Wait("approved", then="approved", key="k", context=len(seen))

    @worker.stage("a.approved")
    async def approved(given):
        seen.append(given.context)
        return Wait("never", then="late", timeout_s=0.05)

    @worker.stage("a.late")
    async def late(given):
        seen.append(given.context)
        return Wait("acme--approved", then="foreign")

    @worker.stage("a.foreign")
    async def foreign(given):
        seen.append(given.context)
        return Done("end")

    @worker.stage("b.start")
    async def child(given):
        return Fail("odd", permanent=True) if given.context["n"] == 3 else Done(given.context["n"])

    async with running_with(settings, worker):
        [task_id] = await submit_tasks(store.pool, "a")

        async def waits():
            return await store.pool.fetchval(
                "SELECT true FROM task t JOIN flow_wait ON true WHERE t.id = $1 AND t.state = 'waiting' AND t.stage = 'joined'",
                task_id,
            )

        await wait_until(waits, what="the task waits for its event")
        await store.pool.execute(
            "INSERT INTO flow_event (namespace, id, event, key, data) VALUES ('default', 'e', 'approved', 'k', '7')"
        )
        await match_events(store.pool, ["e"])
        row = await wait_until(
            lambda: store.pool.fetchrow("SELECT * FROM task WHERE id = $1 AND state = 'succeeded'", task_id)
        )
        assert orjson.loads(row["result"]) == "end"
        assert (row["step"], row["stage"]) == (4, "foreign")
    results = [n if n != 3 else None for n in range(20)] + [None]
    assert seen == [
        {
            "context": "kept",
            "children": {
                "total": 21,
                "succeeded": 19,
                "unsuccessful": 2,
                "results": results,
                "error": "child 20: there is no task type 'unknown'",
            },
        },
        {"context": 1, "event": 7, "timed_out": False},
        {"context": None, "event": None, "timed_out": True},
        {
            "context": None,
            "event": None,
            "timed_out": False,
            "error": "the event 'acme--approved' is in the namespace acme, and only those of default can come: correct the name",
        },
    ]


async def test_the_children_of_a_cancelled_task_are_cancelled(store, settings):
    """F5: also those that are not open yet; nothing wakes the task."""
    [task_id] = await submit_tasks(store.pool, "a")
    async with open_session(settings.postgres, "test") as session:
        batch = (await release.release(session, types.TaskType(name="a"), 1, [])).batch
    [released] = batch.tasks
    fence = released.fence
    children = Context.encode({"children": [{"type": "b"}] * 5})
    await advance.advance(
        store.pool,
        [
            Ending(
                fence=fence,
                outcome=Outcome.SPAWN,
                conclusion=conclude(fence, Outcome.SPAWN),
                worker="w",
                context=children,
                next_stage="joined",
                terms={"parallel": 2},
            )
        ],
    )
    async with running_service(create_app(settings)):
        await wait_until(lambda: _length(store.tasks(), 2))
        await advance.cancel(store.pool, [task_id])
        await wait_until(lambda: store.pool.fetchval("SELECT status = 'cancelled' FROM flow"))
    states = await store.pool.fetch("SELECT state FROM task")
    assert [row["state"] for row in states] == ["cancelled"] * 3


async def test_a_child_of_another_namespace_is_refused(store, settings):
    """O5, F6: a stage cannot start a task of another namespace: that child fails, and the others
    run."""
    await types.register(store.pool, types.TaskType(name="beta--b"))
    await submit_tasks(store.pool, "a")
    async with open_session(settings.postgres, "test") as session:
        batch = (await release.release(session, types.TaskType(name="a"), 1, [])).batch
    [released] = batch.tasks
    fence = released.fence
    ending = Ending(
        fence=fence,
        outcome=Outcome.SPAWN,
        conclusion=conclude(fence, Outcome.SPAWN),
        worker="w",
        context=Context.encode({"children": [{"type": "beta--b"}, {"type": "b"}]}),
        next_stage="joined",
        terms={"parallel": 2},
    )
    await advance.advance(store.pool, [ending])
    async with running_service(create_app(settings)):
        # Children are started in their order.
        await wait_until(lambda: store.pool.fetchval("SELECT true FROM task WHERE type = 'b'"))
    assert not await store.pool.fetchval("SELECT count(*) FROM task WHERE type = 'beta--b'")


async def test_a_child_with_a_wrong_field_is_refused(store, settings):
    """F6: a worker in another language may name any fields. Such a child fails alone. The owner
    could not advance its family, and the task would have waited without end."""
    await submit_tasks(store.pool, "a")
    async with open_session(settings.postgres, "test") as session:
        batch = (await release.release(session, types.TaskType(name="a"), 1, [])).batch
    [released] = batch.tasks
    fence = released.fence
    wrong = [
        {"priority": "URGENT"},
        {"priority": []},
        {"key": 5},
        {"key": ""},
        {"stage": {}},
        {"stage": "a\0"},
    ]
    children = [*({"type": "b", **fields} for fields in wrong), {"type": "b", "key": None, "priority": "LOW"}]
    ending = Ending(
        fence=fence,
        outcome=Outcome.SPAWN,
        conclusion=conclude(fence, Outcome.SPAWN),
        worker="w",
        context=Context.encode({"children": children}),
        next_stage="joined",
        terms={},
    )
    await advance.advance(store.pool, [ending])
    await store.advance()
    assert [(each["type"], each["flow_item"]) for each in await store.tasks()] == [("b", len(wrong))]
    counted = await store.pool.fetchrow("SELECT opened, unsuccessful FROM flow_node")
    assert tuple(counted) == (len(children), len(wrong))


async def test_a_statement_that_fails_for_all_families_ends_the_service(store, settings):
    """O10: no family can be held for it. The owner repeated such a statement without a pause, and
    logged nothing."""
    waiting = definition("waiting", nodes={"a": task()})
    await store.define(waiting)
    await store.start(waiting)
    await store.pool.execute("ALTER TABLE flow_inbox RENAME COLUMN task_id TO renamed")
    async with open_session(settings.postgres, "test") as session, asyncio.timeout(10):
        advancing = owner.Owner(settings, session, contents.Contents(ObjectStore(settings.objects)), None)
        with pytest.raises(asyncpg.UndefinedColumnError):
            await advancing.run(asyncio.Event())


async def submit_tasks(pool, *names):
    submitted = await tasks.submit(
        pool, [Submission(type=name, context=Context.encode(None)) for name in names]
    )
    return [each.id for each in submitted]
