"""Flows in memory: their clock, ticks, events and callbacks, and how they fail."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from penstock.errors import Conflict, Faults, InvalidRecord, NotFound, PenstockError, UnknownFlow
from penstock.flows import INPUTS, ITEM, Flow, TaskOf, cel
from penstock.testing import NoEnd, Pipeline
from penstock.worker import Child, Done, Fail, Next, RetryAfter, Spawn, Wait, Worker, WorkerSettings

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def worker():
    worker = Worker(WorkerSettings())

    @worker.stage("echo.run")
    async def echo(task):
        return Done(task.context)

    return worker


async def test_timers_and_limits_of_days_take_no_time(worker):
    flow = Flow("slow", version=1, warn_after_s=3600)
    timer = flow.timer("timer", delay_s=5 * 86_400)
    flow.timer("until", until=cel("'2026-02-01T00:00:00Z'"), after=[timer])
    async with Pipeline(worker, flows=[flow.definition()], now=NOW) as pipeline:
        run = await pipeline.run_flow("slow", events="all")
        assert run.status == "succeeded"
        assert pipeline.now == datetime(2026, 2, 1, tzinfo=UTC)
        assert [(event["event"], event["at"]) for event in pipeline.events] == [
            ("flow.started", "2026-01-01T00:00:00+00:00"),
            ("flow.late", "2026-01-01T01:00:00+00:00"),
            ("flow.succeeded", "2026-02-01T00:00:00+00:00"),
        ]


async def test_a_step_stops_at_each_moment_of_a_flow(worker):
    flow = Flow("steps", version=1)
    first = flow.timer("first", delay_s=3600)
    flow.timer("second", delay_s=3600, after=[first])
    async with Pipeline(worker, flows=[flow.definition()], now=NOW) as pipeline:
        run = await pipeline.submit_flow("steps")
        await pipeline.step(minutes=59)
        assert run.nodes == {"first": "running", "second": "pending"}
        await pipeline.step(hours=1)
        assert run.nodes == {"first": "succeeded", "second": "running"}
        await pipeline.step(minutes=1)
        assert run.ended


async def test_a_limit_of_a_flow_stops_it_and_its_tasks(worker):
    @worker.stage("poll.look")
    async def look(task):
        return RetryAfter(600)

    flow = Flow("limited", version=1, timeout_s=3600)
    flow.task("poll", type="poll")
    async with Pipeline(worker, flows=[flow.definition()], now=NOW) as pipeline:
        run = await pipeline.run_flow("limited")
        assert (run.status, run.error) == ("failed", "timeout_s is over")
        assert pipeline.now == NOW + timedelta(hours=1)
        [task] = pipeline.tasks_of(run)
        assert (task.state, set(task.outcomes)) == ("cancelled", {"retry"})


async def test_a_tick_starts_a_flow_as_a_schedule_does(worker):
    daily = Flow("daily", version=1)
    day = daily.task("day", type="echo", input=cel("flow.tick"))
    daily.output(day.output)
    report = Flow("report", version=1)
    run_of_daily = report.wait_for_run("daily", flow="daily")
    report.output(run_of_daily.output)
    async with Pipeline(worker, flows=[daily.definition(), report.definition()]) as pipeline:
        waiting = await pipeline.submit_flow("report", tick=NOW)
        other = await pipeline.run_flow("daily", tick=NOW + timedelta(days=1), schedule="nightly")
        assert not waiting.ended
        assert other.flow.raw["schedule"] == "nightly"
        await pipeline.run_flow("daily", tick=NOW)
        assert waiting.output == "2026-01-01T00:00:00Z"
        after = await pipeline.run_flow("report", tick=NOW + timedelta(days=1), schedule="late")
        assert after.output == "2026-01-02T00:00:00Z"
        without = await pipeline.run_flow("report")
        assert "no tick" in without.node("daily")["reason"]


async def test_an_event_is_kept_for_a_day(worker):
    flow = Flow("gate", version=1)
    gate = flow.wait("gate", event="opened")
    flow.output(gate.output)
    async with Pipeline(worker, flows=[flow.definition()], now=NOW) as pipeline:
        await pipeline.send_event("opened", "by ana")
        await pipeline.step(hours=23)
        assert (await pipeline.run_flow("gate")).output == "by ana"
        await pipeline.step(hours=2)
        run = await pipeline.run_flow("gate")
        assert not run.ended
        with pytest.raises(NoEnd, match="nothing more happens"):
            await pipeline.until(run, lambda run: run.ended)
        with pytest.raises(InvalidRecord):
            await pipeline.send_event("no event!")


async def test_a_node_without_a_handler_raises_and_names_it(worker):
    @worker.stage("other.begin")
    async def begin(task):
        return Next("nowhere")

    flow = Flow("broken", version=1)
    flow.map("all", items=cel("[1, 2]"), each=TaskOf("other", input=ITEM))
    async with Pipeline(worker, flows=[flow.definition()]) as pipeline:
        with pytest.raises(NoEnd, match="no handler for stage 'nowhere' of other; it has: begin"):
            await pipeline.run_flow("broken")


async def test_wrong_definitions_and_starts_are_refused(worker):
    flow = Flow("wrong", version=1)
    flow.task("one", type="unknown", input=cel("inputs.nothing"))
    with pytest.raises(Faults) as faults:
        async with Pipeline(worker, flows=[flow.definition()]):
            pass
    assert [fault.pointer for fault in faults.value.faults] == ["/nodes/one/input", "/nodes/one/type"]
    right = Flow("right", version=1)
    right.declare("n")
    right.task("one", type="echo", input=INPUTS["n"])
    changed = {**right.definition(), "description": "another"}
    with pytest.raises(Conflict):
        async with Pipeline(worker, flows=[right.definition(), changed]):
            pass
    async with Pipeline(worker, flows=[right.definition()]) as pipeline:
        with pytest.raises(UnknownFlow) as unknown:
            await pipeline.run_flow("nothing")
        assert unknown.value.pointer == "/flow"
        with pytest.raises(TypeError):
            await pipeline.run_flow("right", {"n": 1}, labelss={})
        with pytest.raises(NotFound):
            await pipeline.get_flow(7)


async def test_a_recovery_can_choose_nodes_and_is_refused_while_they_run(worker):
    flow = Flow("again", version=1)
    first = flow.task("first", type="echo", input=1)
    flow.wait("second", event="go", after=[first])
    async with Pipeline(worker, flows=[flow.definition()]) as pipeline:
        run = await pipeline.submit_flow("again")
        with pytest.raises(Conflict, match="node_running"):
            await pipeline.recover_flow(run, ["first"])
        await pipeline.send_event("go")
        assert await pipeline.recover_flow(run, ["first"]) == ["first", "second"]
        assert run.status == "succeeded"
        assert [len(pipeline.tasks_of(run)), run.flow.generation] == [2, 1]
        assert [past["name"] for past in run.flow.raw["history"]] == ["first", "second"]


async def test_events_and_callbacks_are_recorded_as_they_would_be_published(worker):
    @worker.stage("order.charge")
    async def charge(task):
        return Done({"charged": 5}) if task.attempt else Fail("no")

    target = {"url": "https://shop.example/hook", "events": "all", "headers": {"x-key": "secret"}}
    async with Pipeline(worker, now=NOW) as pipeline:
        run = await pipeline.run("order", callbacks=[target, "https://other.example/"], labels={"a": "b"})
        assert [event["event"] for event in pipeline.events] == ["task.succeeded"]
        assert pipeline.events[0]["task"]["labels"] == {"a": "b"}
        assert pipeline.events[0]["result"] == {"charged": 5}
        assert [(call.url, call.event["event"]) for call in pipeline.callbacks] == [
            ("https://shop.example/hook", "task.retried"),
            ("https://shop.example/hook", "task.succeeded"),
            ("https://other.example/", "task.succeeded"),
        ]
        assert pipeline.callbacks[0].event["error"]["message"] == "no"
        assert pipeline.callbacks[0].headers == {"x-key": "secret"}
        assert "secret" not in repr(pipeline.callbacks)
        assert run.ended


async def test_children_in_children_and_a_parallel_limit(worker):
    begun = []

    @worker.stage("tree.grow")
    async def grow(task):
        begun.append(task.context)
        if task.context == 0:
            return Done(1)
        children = [Child("tree", task.context - 1) for _ in range(2)]
        return Spawn(children, then="sum", parallel=1)

    @worker.stage("tree.sum")
    async def add(task):
        return Done(1 + sum(task.context["children"]["results"]))

    async with Pipeline(worker) as pipeline:
        run = await pipeline.run("tree", 2)
        assert run.result == 7
        # With one child at a time, the tree grows depth first.
        assert begun == [2, 1, 0, 0, 1, 0, 0]
        assert [event["event"] for event in pipeline.events] == ["task.succeeded"] * 7


async def test_a_spawned_child_without_a_handler_raises(worker):
    @worker.stage("parent.begin")
    async def begin(task):
        return Spawn([Child("echo", stage="nowhere")], then="end")

    async with Pipeline(worker) as pipeline:
        with pytest.raises(NoEnd, match="'nowhere' of echo"):
            await pipeline.run("parent")


async def test_a_wait_of_days_takes_no_time(worker):
    @worker.stage("order.ask")
    async def ask(task):
        return Wait("approved", then="ship", timeout_s=86_400)

    @worker.stage("order.ship")
    async def ship(task):
        return Done(task.context["timed_out"])

    async with Pipeline(worker, now=NOW) as pipeline:
        run = await pipeline.run("order")
        assert run.result is True
        assert pipeline.now == NOW + timedelta(days=1)


def test_flows_need_an_open_pipeline(worker):
    with pytest.raises(PenstockError, match="nothing was submitted"):
        _ = Pipeline(worker).events
