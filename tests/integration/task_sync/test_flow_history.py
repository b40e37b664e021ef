"""History of flows on the real PostgreSQL: a family moves once its root may not be recovered any
more, is read back unchanged, and is archived and dropped with its day."""

import gzip
from datetime import timedelta

import orjson
from tests.integration.flow_owner.support import Owner as FlowOwner
from tests.integration.task_sync.test_history import settings
from tests.support.flow_tasks import insert_ready, spawn

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.task import Priority
from penstock.objects import ObjectStore
from penstock.postgres import flow_history, history, tasks
from penstock.postgres.tasks import get
from penstock.postgres.types import TaskType
from penstock.task_sync.history import History

TASK_TYPES = (TaskType(name="t", partitions=1),)

__all__ = ["settings"]  # fixture

INPUTS = b'{"n": 123456789012345678901234567890, "text": "\\u0000"}'


async def insert_flow(pool, *, parent=None, days=10.0, status="succeeded"):
    """Inserts a flow that ended `days` ago, with two nodes, one of an earlier generation, and a
    task that ended half a day before; returns the ids of both."""
    ended = None if status == "running" else timedelta(days=days)
    flow_id = await pool.fetchval(
        "INSERT INTO flow (root_id, parent_id, parent_node, parent_generation, name, version, unfinished, status,"
        " priority, inputs, labels, callbacks, created_at, updated_at, finished_at)"
        " VALUES ($1, $1, $2, $3, 'media.f', 3, 0, $4, 1, $5, $6, $7, now() - interval '70 days', now(), now() - $8::interval)"
        " RETURNING id",
        parent,
        parent and "child",
        parent and 0,
        status,
        INPUTS,
        '{"a": "é"}',
        None if parent else ['{"url": "http://x/", "headers": {"authorization": "secret"}}'],
        ended,
    )
    await pool.executemany(
        "INSERT INTO flow_node (flow_id, name, status, total, opened, list, output, started_at, finished_at)"
        " VALUES ($1, $2, 'succeeded', $3, 0, $4, $5, now() - interval '60 days', now() - interval '59 days')",
        [(flow_id, "a", None, None, b'"out"'), (flow_id, "b", 2, b"[1, 2]", None)],
    )
    await pool.execute(
        "INSERT INTO flow_node_history (flow_id, name, flow_generation, status, generation, succeeded, unsuccessful, reason)"
        " VALUES ($1, 'a', 0, 'failed', 0, 0, 0, 'it broke')",
        flow_id,
    )
    [task] = await tasks.submit(pool, [Submission(type="t", context=Context.encode(1))])
    await pool.execute(
        "UPDATE task SET state = 'succeeded', finished_at = now() - $3::interval, flow_id = $2,"
        " flow_root_id = $4, flow_priority = 1, flow_node = 'b', flow_generation = 0, flow_item = 1 WHERE id = $1",
        task.id,
        flow_id,
        timedelta(days=days + 0.5),
        parent or flow_id,
    )
    await pool.execute("DELETE FROM flow_inbox")
    return flow_id, task.id


async def ids_of(pool, table):
    return {row["id"] for row in await pool.fetch(f"SELECT id FROM {table}")}


async def test_a_family_moves_after_its_root_may_not_be_recovered(pool, settings):
    """O6, F3: ended flows move with their nodes and those of earlier generations, and their tasks
    with them. A family whose root runs, has ended recently, has an open callback or an unread
    command stays with all its tasks."""
    running, task_1 = await insert_flow(pool, status="running")
    ended_child, task_2 = await insert_flow(pool, parent=running, days=20)
    recent, task_3 = await insert_flow(pool, days=6.9)
    called, task_4 = await insert_flow(pool)
    await pool.execute(
        "INSERT INTO callback (id, target, task_id, state, attempt, body, due_at)"
        " VALUES ('msg_flow-1', 'http://x/', $1, 'held', 0, '{}', now())",
        called,
    )
    commanded, task_5 = await insert_flow(pool)
    root, task_6 = await insert_flow(pool)
    child, task_7 = await insert_flow(pool, parent=root, days=12)
    await pool.execute(
        "INSERT INTO flow_inbox (root_id, flow_id, kind) VALUES ($1, $1, 'recover')", commanded
    )
    await pool.execute(
        "INSERT INTO flow_limit (root_id, flow_id, generation, kind, at) VALUES ($1, $1, 0, 'timeout', now())",
        root,
    )
    before = {
        flow_id: dict(await pool.fetchrow("SELECT * FROM flow WHERE id = $1", flow_id))
        for flow_id in (root, child)
    }
    nodes = await pool.fetch("SELECT * FROM flow_node WHERE flow_id = $1 ORDER BY name", root)
    service = History(settings, ObjectStore(settings.objects))
    while await service.round():
        pass
    assert service.moved_flows == 2
    assert await ids_of(pool, "flow") == {running, ended_child, recent, called, commanded}
    assert await ids_of(pool, "task") == {task_1, task_2, task_3, task_4, task_5}
    assert await ids_of(pool, "history") == {task_6, task_7}
    assert await pool.fetchval("SELECT count(*) FROM flow_node WHERE flow_id = ANY ($1)", [root, child]) == 0
    assert await pool.fetchval("SELECT count(*) FROM flow_node_history") == 5
    assert await pool.fetchval("SELECT count(*) FROM flow_limit") == 0

    found = await flow_history.get(pool, root)
    assert {name: found[name] for name in before[root] if name != "labels"} == {
        name: value for name, value in before[root].items() if name != "labels"
    }
    assert orjson.loads(found["labels"]) == {"a": "é"}
    kept = [{name: value for name, value in node.items() if name != "flow_id"} for node in nodes]
    assert found["nodes"] == kept
    assert [(node["name"], node["reason"]) for node in found["past_nodes"]] == [("a", "it broke")]
    names = ("name", "statuses", "labels", "idempotency_key", "created_since", "visible", "schedule")
    family = {**dict.fromkeys(names), "family": root}
    assert [flow["id"] for flow in await flow_history.list_family(pool, family, None, 50)] == [child, root]
    assert [flow["id"] for flow in await flow_history.list_family(pool, family, child, 50)] == [root]
    assert await flow_history.get(pool, running) is None
    task = await get(pool, task_7)
    assert (task["flow_id"], task["flow_node"], task["flow_generation"], task["flow_item"]) == (
        child,
        "b",
        0,
        1,
    )


async def test_flows_are_archived_and_dropped_with_their_day(pool, settings, tmp_path):
    """O6: the flows of a day have an archive of their own, without secrets, which is verified
    before both partitions of the day are dropped."""
    root, _ = await insert_flow(pool, days=40)
    store = ObjectStore(settings.objects)
    service = History(settings, store)
    while await service.round():
        pass
    await service.round()
    assert await flow_history.get(pool, root) is None
    parts = {row["tasks"]: row for row in await history.parts(pool, dropped=True)}
    assert {(row["tasks"], row["flows"]) for row in parts.values()} <= {(0, 1), (1, 0), (1, 1)}
    [part] = [row for row in await history.parts(pool, dropped=True) if row["flows"]]
    assert part["dropped_at"] is not None
    [file] = (tmp_path / "objects" / "flow-history").rglob("*.ndjson.gz")
    assert str(file).endswith(history.part_of(part).flows_key)
    assert file.stat().st_size == part["flow_bytes"]
    [line] = [orjson.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    assert (line["id"], line["name"], line["inputs"], line["labels"]) == (
        root,
        "media.f",
        INPUTS.decode(),
        {"a": "é"},
    )
    assert line["callbacks"][0]["headers"] == {"authorization": "***"}
    assert [node["name"] for node in line["nodes"]] == ["a", "b"]
    assert line["nodes"][1]["list"] == "[1, 2]"
    assert await pool.fetchval("SELECT count(*) FROM pg_class WHERE relname ~ '^(flow_)?history_2'") == 0


async def test_events_are_deleted_after_a_day_once_they_are_read(pool, settings):
    """F1: events are kept for a day, and longer while a flow has one of them to read."""
    await pool.executemany(
        "INSERT INTO flow_event (namespace, id, event, created_at) VALUES ('default', $1, 'e', now() - $2::interval)",
        [("old", timedelta(hours=25)), ("new", timedelta(hours=23))],
    )
    await pool.execute(
        "INSERT INTO flow_inbox (root_id, flow_id, kind, created_at) VALUES (1, 1, 'event', now() - interval '2 hours')"
    )
    service = History(settings, ObjectStore(settings.objects))
    await service.round()
    assert await ids_of(pool, "flow_event") == {"old", "new"}
    await pool.execute("DELETE FROM flow_inbox")
    await service.round()
    assert await ids_of(pool, "flow_event") == {"new"}


async def test_children_of_a_waiting_task_stay_until_their_flow_has_moved(pool, settings):
    """O6, F6: the stage that is woken reads their results, however long ago they ended."""
    flows = FlowOwner(pool)
    [task_id] = await insert_ready(pool, 1, Priority.MEDIUM)
    [first, _second] = await spawn(pool, flows, task_id, 2)
    await flows.end(first, result="kept")
    await pool.execute("UPDATE task SET finished_at = now() - interval '9 days' WHERE id = $1", first["id"])
    history = History(settings, ObjectStore(settings.objects))
    while await history.round():
        pass
    await flows.advance()
    await flows.run()
    woken = await pool.fetchrow("SELECT * FROM task WHERE id = $1", task_id)
    assert orjson.loads(woken["context"])["children"]["results"] == ["kept", None]
    await pool.execute("UPDATE flow SET finished_at = now() - interval '9 days'")
    while await history.round():
        pass
    assert await pool.fetchval("SELECT count(*) FROM task WHERE id = $1", first["id"]) == 0
