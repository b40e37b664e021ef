"""F6 over HTTP: workers in any language spawn children and wait for events by `POST /set_task`."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from tests.support.gateways import running_gateway
from tests.support.services import running_service
from tests.support.waiting import wait_until

from penstock.flow_owner.app import create_app
from penstock.flow_owner.settings import FlowsSettings
from penstock.stages.app import create_app as create_stages
from penstock.stages.settings import StagesSettings
from penstock.task_sync.app import create_app as create_task_sync
from penstock.task_sync.settings import TaskSyncSettings


@pytest.fixture
async def gateway(where):
    """A gateway, and the services that move tasks and flows on."""
    servers = {name: where[name] for name in ("kafka", "prefix", "postgres")}
    async with AsyncExitStack() as stack:
        caller = await stack.enter_async_context(running_gateway(**where))
        for service in (
            create_app(FlowsSettings(**where)),
            create_task_sync(TaskSyncSettings(**servers, objects=where["objects"])),
            create_stages(StagesSettings(**servers)),
        ):
            await stack.enter_async_context(running_service(service))
        yield caller


async def hold(gateway, type_name, count=1):
    """So many tasks of a type, as a worker holds them."""
    held = []

    async def has_all():
        request = {"worker": "w", "type": type_name, "wait_s": 5, "max": count - len(held)}
        held.extend((await gateway.post("/hold_task", request)).body["tasks"])
        return len(held) == count

    await wait_until(has_all, what=f"the worker holds {count} tasks of {type_name}")
    return sorted(held, key=lambda each: each["id"])


def entry(task, **result):
    return {**{name: task[name] for name in ("id", "step", "stage", "attempt")}, **result}


async def report(gateway, *results):
    answer = await gateway.post("/set_task", {"worker": "w", "results": list(results)})
    assert (answer.status, answer.body["rejected"]) == (200, [])


async def test_each_fault_of_a_wait_is_named_and_may_be_corrected(gateway, pool):
    """F6: a rejected result has the place and the words of its fault, and the same attempt may be
    reported again. What can only be known later, the stage that follows gets in its context."""
    await gateway.post("/tasks", [{"type": "a"}] * 3)
    first, second, third = await hold(gateway, "a", 3)
    spawn = {"outcome": "spawn", "next_stage": "joined"}
    wait = {"outcome": "wait", "next_stage": "woken"}

    def children(*each):
        return {**spawn, "context": {"children": list(each)}}

    faults = (
        ({**spawn, "context": {}}, "/context", '"children" is a required'),
        (spawn, "", '"context" is a required'),
        ({**spawn, "context": {"children": {}}}, "/context/children", "array"),
        ({"outcome": "spawn", "context": {"children": []}}, "", '"next_stage" is a required'),
        (children({"type": "b"}, {"context": 1}), "/context/children/1", '"type" is a required'),
        (children({"type": "b c"}), "/context/children/0/type", "b c"),
        (children({"type": "b", "prority": "LOW"}), "/context/children/0", "prority"),
        (children({"type": "b", "priority": "URGENT"}), "/context/children/0/priority", "HIGHEST"),
        ({**children({"type": "b"}), "spawn": {"k": 0}}, "/spawn/k", "minimum of 1"),
        ({**children({"type": "b"}), "content_type": "text"}, "/content_type", "json"),
        (wait, "", '"wait" is a required'),
        ({**wait, "wait": {}}, "/wait", '"event" is a required'),
        ({**wait, "wait": {"event": "a b"}}, "/wait/event", "a b"),
        ({**wait, "wait": {"event": "paid", "timeout_s": 0}}, "/wait/timeout_s", "0 is less"),
        ({**wait, "wait": {"event": "paid", "key": 7}}, "/wait/key", "string"),
        ({**wait, "wait": {"event": "paid"}, "context": [1]}, "/context", "object"),
    )
    wrong = [entry(first, **each) for each, _, _ in faults]
    # A wrong child is the only one that is named, however many there are.
    wrong.append(entry(first, **children(*[{"type": ""}] * 20_000)))
    answer = await gateway.post("/set_task", {"worker": "w", "results": wrong})
    assert (answer.status, answer.body["accepted"], len(answer.body["rejected"])) == (200, 0, len(wrong))
    for index, (_, pointer, words) in enumerate(faults):
        named = [(each["pointer"], each["detail"]) for each in answer.body["rejected"][index]["errors"]]
        assert any(found == f"/results/{index}{pointer}" and words in detail for found, detail in named), (
            named
        )
    assert len(answer.body["rejected"][-1]["errors"]) == 1

    unknown = ({"type": "absent"}, {"type": "acme--b"}, {"type": "b"})
    await report(
        gateway,
        entry(first, **{**children(), "context": {"children": [], "context": "none"}}),
        entry(second, **children({"type": "b"}), spawn={"k": 2}),
        entry(third, **children(*unknown)),
    )
    [child] = await hold(gateway, "b")
    await report(gateway, entry(child, outcome="done", context=5))
    woken = {task["id"]: task["context"] for task in await hold(gateway, "a", 3)}
    assert woken[first["id"]] == {
        "context": "none",
        "children": {"total": 0, "succeeded": 0, "unsuccessful": 0, "results": []},
    }
    assert woken[second["id"]]["children"]["error"] == "k is 2, and the list has 1"
    assert woken[third["id"]]["children"] == {
        "total": 3,
        "succeeded": 1,
        "unsuccessful": 2,
        "results": [None, None, 5],
        "error": "child 0: there is no task type 'absent'",
    }


async def test_a_waiting_task_holds_no_lease_and_is_woken_once(gateway, pool):
    """F6: its attempt is over, so that no silence can expire it; the other tasks of its worker go
    on, and its children, k of them or the event wake it once."""
    await gateway.post("/tasks", [{"type": "a"}] * 4)
    [some, event, late, other] = await hold(gateway, "a", 4)
    wait = {"outcome": "wait", "next_stage": "woken", "context": {"context": "kept"}}
    await report(
        gateway,
        entry(
            some,
            outcome="spawn",
            next_stage="joined",
            context={"children": [{"type": "b", "context": n} for n in range(3)]},
            spawn={"k": 1, "parallel": 2},
        ),
        entry(event, **wait, wait={"event": "paid", "key": "4711", "timeout_s": 600}),
        entry(late, **wait, wait={"event": "paid", "timeout_s": 0.05}),
    )

    async def are_waiting():
        return await pool.fetch(
            "SELECT * FROM task WHERE id = ANY ($1) AND state = 'waiting' ORDER BY id",
            [some["id"], event["id"]],
        )

    rows = await wait_until(are_waiting)
    held = ("worker", "lease_partition", "lease_ms", "max_attempts", "queued_at", "started_at")
    assert {row[name] for row in rows for name in held} == {None}
    [one, another] = await hold(gateway, "b", 2)
    [woken] = await hold(gateway, "a")
    assert (woken["id"], woken["stage"]) == (late["id"], "woken")
    assert woken["context"] == {"context": "kept", "event": None, "timed_out": True}
    # The same event twice.
    for _ in range(2):
        sent = {"id": "e1", "key": "4711", "data": {"sum": 3}}
        assert (await gateway.post("/events/paid", sent)).status in (200, 201, 202)
    await report(gateway, entry(one, outcome="fail", permanent=True, error={"kind": "E", "message": "odd"}))
    await report(gateway, entry(another, outcome="done", context="first"))
    found = {task["id"]: task for task in await hold(gateway, "a", 2)}
    assert found[event["id"]]["context"] == {"context": "kept", "event": {"sum": 3}, "timed_out": False}
    children = found[some["id"]]["context"]["children"]
    assert (children["total"], children["succeeded"]) == (3, 1)
    assert "first" in children["results"]
    ends = [entry(task, outcome="done") for task in (woken, other, *found.values())]
    await report(gateway, *ends)

    async def are_done():
        return await pool.fetchval("SELECT count(*) = 4 FROM task WHERE type = 'a' AND state = 'succeeded'")

    await wait_until(are_done)
    attempts = await pool.fetch(
        "SELECT task_id, count(*) AS attempts FROM attempt JOIN task t ON t.id = task_id WHERE t.type = 'a' GROUP BY 1"
    )
    assert sorted(row["attempts"] for row in attempts) == [1, 2, 2, 2]
    assert (
        await pool.fetchval(
            "SELECT count(*) FROM task WHERE state NOT IN ('succeeded', 'failed', 'cancelled')"
        )
        == 0
    )
    assert await pool.fetchval("SELECT count(*) FROM flow WHERE status = 'running'") == 0
