"""Flows, in memory and on a real deployment: the same test, the same outcome."""

import asyncio
from datetime import datetime, timedelta

import pytest

from penstock.errors import Conflict, Invalid, NotSucceeded, RecoveryRefused
from penstock.flows import INPUTS, ITEM, Flow, FlowOf, TaskOf, cel
from penstock.worker import Done, Fail


def handlers(kit):
    """The types that flows use: `double` doubles, `fail` fails until `mended` is set."""
    double, fail = kit.name("double"), kit.name("fail")
    mended = asyncio.Event()

    @kit.worker.stage(f"{double}.run")
    async def run_double(task):
        return Done(task.context * 2)

    @kit.worker.stage(f"{fail}.run", max_attempts=1)
    async def run_fail(task):
        return Done(task.context) if mended.is_set() or task.context != "bad" else Fail("broken")

    return double, fail, mended


async def test_nodes_pass_their_outputs_on(kit):
    double, _fail, _mended = handlers(kit)
    flow = Flow(kit.name("chain"), version=1)
    flow.declare("n")
    flow.declare("unused", default=7)
    first = flow.task("first", type=double, input=INPUTS["n"])
    second = flow.task("second", type=double, input=first.output, after=[first])
    flow.output({"all": [first.output, second.output], "unused": INPUTS["unused"]})
    async with kit(flows=[flow.definition()]) as pipeline:
        run = await pipeline.run_flow(kit.name("chain"), {"n": 3}, labels={"a": "b"})
        assert run.output == {"all": [6, 12], "unused": 7}
        assert run.nodes == {"first": "succeeded", "second": "succeeded"}
        assert (run.status, run.ended, run.flow.labels) == ("succeeded", True, {"a": "b"})
        assert run.flow.inputs == {"n": 3, "unused": 7}
        assert run.node("first")["task"]["type"] == double
        for inputs, pointer in (({}, "/inputs"), ({"n": 1, "m": 2}, "/inputs/m")):
            with pytest.raises(Invalid) as refused:
                await pipeline.run_flow(kit.name("chain"), inputs)
            assert refused.value.pointer == pointer
        again = await pipeline.run_flow(kit.name("chain"), {"n": 1}, idempotency_key="k")
        same = await pipeline.run_flow(kit.name("chain"), {"n": 2}, idempotency_key="k")
        assert (same.id, same.created, same.output["all"]) == (again.id, False, [2, 4])


@pytest.mark.parametrize(("n", "taken", "skipped"), [(5, "big", "small"), (1, "small", "big")])
async def test_a_switch_takes_one_branch(kit, n, taken, skipped):
    double, _fail, _mended = handlers(kit)
    flow = Flow(kit.name("switch"), version=1)
    flow.declare("n")
    size = flow.switch("size", cases={"big": cel("inputs.n > 3")}, otherwise="small")
    for name in ("big", "small"):
        flow.task(name, type=double, input=INPUTS["n"], after=[size[name]])
    async with kit(flows=[flow.definition()]) as pipeline:
        run = await pipeline.run_flow(kit.name("switch"), {"n": n})
        assert run.nodes == {"size": "succeeded", taken: "succeeded", skipped: "skipped"}
        assert run.node("size")["case"] == taken


async def test_maps_of_tasks_and_of_flows(kit):
    double, fail, _mended = handlers(kit)
    child = Flow(kit.name("child"), version=1)
    child.declare("n")
    only = child.task("only", type=double, input=INPUTS["n"])
    child.output(only.output)
    flow = Flow(kit.name("maps"), version=1)
    flow.declare("items")
    tasks = flow.map("tasks", items=INPUTS["items"], each=TaskOf(fail, input=ITEM), tolerate=1, parallel=2)
    flows = flow.map(
        "flows", items=cel("[1, 2, 3]"), each=FlowOf(kit.name("child"), input={"n": ITEM}), after=[tasks]
    )
    flow.output({"tasks": tasks.output, "flows": flows.output})
    async with kit(flows=[child.definition(), flow.definition()]) as pipeline:
        run = await pipeline.run_flow(kit.name("maps"), {"items": ["a", "bad", "c"]})
        assert run.output == {"tasks": ["a", None, "c"], "flows": [2, 4, 6]}
        items = run.node("tasks")["items"]
        assert (items["total"], items["succeeded"], items["unsuccessful"]) == (3, 2, 1)
        failed = await pipeline.run_flow(kit.name("maps"), {"items": ["bad", "bad"]})
        assert failed.nodes == {"tasks": "failed", "flows": "blocked"}


async def test_a_failure_and_a_recovery_in_a_child_flow(kit):
    double, fail, mended = handlers(kit)
    child = Flow(kit.name("child"), version=1)
    child.declare("n")
    begin = child.task("begin", type=double, input=INPUTS["n"])
    end = child.task("end", type=fail, input="bad", after=[begin])
    child.output({"begin": begin.output, "end": end.output})
    flow = Flow(kit.name("parent"), version=1)
    inner = flow.flow("inner", flow=kit.name("child"), input={"n": 2})
    last = flow.task("last", type=double, input=4, after=[inner])
    flow.output([inner.output, last.output])
    async with kit(flows=[child.definition(), flow.definition()]) as pipeline:
        run = await pipeline.run_flow(kit.name("parent"))
        assert run.nodes == {"inner": "failed", "last": "blocked"}
        assert "broken" in run.error
        with pytest.raises(NotSucceeded, match=r"(?s)broken.*last: blocked"):
            _ = run.output
        mended.set()
        assert await pipeline.recover_flow(run) == ["inner", "last"]
        await pipeline.until(run, lambda run: run.ended)
        assert run.output == [{"begin": 4, "end": "bad"}, 8]
        assert run.flow.generation == 1
        with pytest.raises(RecoveryRefused) as refused:
            await pipeline.recover_flow(run)
        assert refused.value.code == "nothing_to_recover"


async def test_waits_timers_and_limits(kit):
    handlers(kit)
    flow = Flow(kit.name("waits"), version=1)
    flow.declare("key")
    approval = flow.wait("approval", event=kit.name("approved"), key=INPUTS["key"])
    timer = flow.timer("timer", delay_s=0.1, after=[approval])
    late = flow.wait("late", event=kit.name("never"), finish_within_s=0.1, after=[timer])
    flow.output(approval.output)
    assert late.name == "late"
    async with kit(flows=[flow.definition()]) as pipeline:
        run = await pipeline.submit_flow(kit.name("waits"), {"key": "k"})
        await pipeline.until(run, lambda run: run.nodes["approval"] == "running")
        await pipeline.send_event(kit.name("approved"), {"by": "ana"}, key="k")
        await pipeline.until(run, lambda run: run.ended)
        assert run.nodes == {"approval": "succeeded", "timer": "succeeded", "late": "failed"}
        assert run.node("late")["timed_out"] == "finish_within"
        begun, ended = (
            datetime.fromisoformat(run.node("timer")[name]) for name in ("started_at", "finished_at")
        )
        assert ended - begun >= timedelta(seconds=0.1)


async def test_a_flow_is_paused_resumed_and_cancelled(kit):
    double, _fail, _mended = handlers(kit)
    flow = Flow(kit.name("held"), version=1)
    gate = flow.wait("gate", event=kit.name("open"))
    flow.task("then", type=double, input=1, after=[gate])
    async with kit(flows=[flow.definition()]) as pipeline:
        run = await pipeline.submit_flow(kit.name("held"))
        await pipeline.until(run, lambda run: run.nodes["gate"] == "running")
        await pipeline.pause_flow(run)
        await pipeline.until(run, lambda run: run.flow.paused)
        await pipeline.send_event(kit.name("open"))
        await pipeline.until(run, lambda run: run.nodes == {"gate": "succeeded", "then": "ready"})
        await pipeline.resume_flow(run)
        await pipeline.until(run, lambda run: run.ended)
        assert run.status == "succeeded"
        with pytest.raises(Conflict):
            await pipeline.cancel_flow(run)
        # An event is there for later flows as well.
        second = await pipeline.run_flow(kit.name("held"))
        assert second.status == "succeeded"


async def test_a_cancellation_reaches_tasks_and_children(kit):
    hang, cancelled = kit.name("hang"), asyncio.Event()

    @kit.worker.stage(f"{hang}.run")
    async def run_hang(task):
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    child = Flow(kit.name("child"), version=1)
    child.task("hangs", type=hang)
    flow = Flow(kit.name("parent"), version=1)
    flow.flow("inner", flow=kit.name("child"))
    flow.wait("never", event=kit.name("never"))
    async with kit(flows=[child.definition(), flow.definition()]) as pipeline:
        run = await pipeline.submit_flow(kit.name("parent"))
        await pipeline.until(run, lambda run: run.nodes == {"inner": "running", "never": "running"})
        inner = await pipeline.get_flow(run.node("inner")["flow"]["id"])
        await pipeline.until(inner, lambda run: (run.node("hangs")["task"] or {}).get("state") == "running")
        await pipeline.cancel_flow(run)
        await cancelled.wait()
        await pipeline.until(run, lambda run: run.ended)
        assert run.status == "cancelled"
        assert run.nodes == {"inner": "cancelled", "never": "cancelled"}


async def test_an_expression_that_fails_fails_its_node(kit):
    double, _fail, _mended = handlers(kit)
    flow = Flow(kit.name("wrong"), version=1)
    flow.declare("n")
    flow.task("wrong", type=double, input=cel("inputs.n.missing"))
    async with kit(flows=[flow.definition()]) as pipeline:
        run = await pipeline.run_flow(kit.name("wrong"), {"n": {}})
        assert run.nodes == {"wrong": "failed"}
        assert "missing" in run.node("wrong")["reason"]


async def test_large_values_pass_through_a_flow(kit):
    double, _fail, _mended = handlers(kit)
    flow = Flow(kit.name("large"), version=1)
    flow.declare("text")
    first = flow.task("first", type=double, input=INPUTS["text"])
    items = flow.map(
        "items", items=cel("[nodes.first.output, 'y']"), each=TaskOf(double, input=ITEM), after=[first]
    )
    flow.output({"items": items.output, "first": first.output})
    async with kit(flows=[flow.definition()]) as pipeline:
        run = await pipeline.run_flow(kit.name("large"), {"text": "x" * 5_000})
        assert run.output == {"items": ["x" * 20_000, "yy"], "first": "x" * 10_000}


async def test_definitions_are_refused_alike(kit):
    handlers(kit)
    flow = Flow(kit.name("refused"), version=1)
    flow.task("one", type=kit.name("unknown"))
    with pytest.raises(Invalid) as refused:
        async with kit(flows=[flow.definition()]):
            pass
    assert refused.value.pointer == "/nodes/one/type"
