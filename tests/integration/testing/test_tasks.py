"""Tasks, in memory and on a real deployment: the same test, the same outcome."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from penstock.errors import Conflict, Invalid, NotFound, NotSucceeded
from penstock.flows import Flow
from penstock.testing import NoEnd
from penstock.worker import Child, Done, Fail, Next, RetryAfter, Spawn, Task, Wait


def stage(kit, name, *outcomes, **options):
    """A handler whose outcomes are given; the last one repeats, and an exception is raised."""
    type_name, _, stage_name = name.partition(".")
    left = list(outcomes)

    @kit.worker.stage(f"{kit.name(type_name)}.{stage_name}", **options)
    async def handle(task):
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return kit.name(type_name)


QUICK = {"retry_base_ms": 10, "retry_jitter": 0}
TASK_FIELDS = {
    *("id", "type", "state", "stage", "step", "attempt", "priority", "key", "idempotency_key", "events"),
    *("labels", "worker", "pausing", "callbacks", "callbacks_owed", "due_at", "created_at", "updated_at"),
    *("finished_at", "error", "content_type", "context", "result_type", "result", "flow", "attempts"),
    *("timeline", "rerun_of"),
}
ATTEMPT_FIELDS = {
    "log",
    "step",
    "attempt",
    "stage",
    "outcome",
    "worker",
    "error",
    "started_at",
    "finished_at",
}
STEP_FIELDS = {"step", "stage", "input_type", "input_size", "input", "attempts"}
STEP_ATTEMPT_FIELDS = {"attempt", "outcome", "worker", "queued_at", "started_at", "finished_at", "error"}
FLOW_FIELDS = {
    *("id", "root_id", "name", "version", "versions", "status", "paused", "stop", "generation", "unfinished"),
    *("live", "unsuccessful", "priority", "idempotency_key", "events", "callbacks", "labels", "schedule"),
    *("tick", "rerun_of", "parent", "task", "inputs", "error", "created_at", "updated_at", "finished_at"),
    *("in_history", "nodes", "history"),
}
NODE_FIELDS = {
    *("name", "kind", "after", "status", "generation", "case", "timed_out", "reason", "items", "task"),
    *("flow", "started_at", "finished_at"),
}


async def test_a_task_passes_its_stages(kit):
    order = kit.name("order")

    @kit.worker.stage(f"{order}.reserve")
    async def reserve(task):
        return Next("charge", {"reserved": task.context["amount"]})

    @kit.worker.stage(f"{order}.charge")
    def charge(task):
        return Done({"charged": task.context["reserved"], "step": task.step, "tries": task.tries})

    async with kit() as pipeline:
        run = await pipeline.run(order, {"amount": 5}, labels={"shop": "x"}, priority="HIGH")
        assert run.result == {"charged": 5, "step": 1, "tries": 0}
        assert (run.stages, run.outcomes) == (["reserve", "charge"], ["next", "done"])
        assert (run.state, run.stage, run.priority.name) == ("succeeded", "charge", "HIGH")
        assert run.task.labels == {"shop": "x"}
        assert run.context == {"reserved": 5}
        assert (await pipeline.get(run.id)).result == run.result
        with pytest.raises(NotFound):
            await pipeline.get(10**12)


async def test_documents_have_the_same_fields(kit):
    order = stage(kit, "order.charge", Next("ship"))
    stage(kit, "order.ship", Done(1))
    flow = Flow(kit.name("fields"), version=1)
    flow.task("only", type=order)
    async with kit(flows=[flow.definition()]) as pipeline:
        run = await pipeline.run_flow(kit.name("fields"))
        task = await pipeline.get(run.node("only")["task"]["id"])
        assert set(task.task.raw) == TASK_FIELDS
        assert set(task.task.raw["attempts"][0]) == ATTEMPT_FIELDS
        assert set(task.task.raw["timeline"][0]) == STEP_FIELDS
        assert set(task.task.raw["timeline"][0]["attempts"][0]) == STEP_ATTEMPT_FIELDS
        assert set(task.task.raw["flow"]) == {"id", "node", "generation"}
        assert set(run.flow.raw) == FLOW_FIELDS
        assert set(run.node("only")) == NODE_FIELDS


async def test_the_timeline_has_the_input_of_each_stage(kit):
    order = stage(kit, "order.check", ValueError("no"), Next("charge"))
    stage(kit, "order.charge", Next("ship", {"paid": 5}))
    stage(kit, "order.ship", Done(1))
    async with kit(types={order: QUICK}) as pipeline:
        run = await pipeline.run(order, {"amount": 5})
        assert [
            (step["step"], step["stage"], step["input"], [each["outcome"] for each in step["attempts"]])
            for step in run.task.raw["timeline"]
        ] == [
            (0, "check", {"amount": 5}, ["fail", "next"]),
            # The first stage has handed its input on.
            (1, "charge", {"amount": 5}, ["next"]),
            (2, "ship", {"paid": 5}, ["done"]),
        ]


async def test_retries_and_their_end(kit):
    order = stage(kit, "order.charge", ValueError("no"), ValueError("again"), Done(1))
    never = stage(kit, "never.charge", ValueError("no such card"))
    types = {order: QUICK, never: {**QUICK, "max_attempts": 2}}
    async with kit(types=types) as pipeline:
        run = await pipeline.run(order)
        assert (run.result, run.outcomes) == (1, ["fail", "fail", "done"])
        assert [each.error and each.error["message"] for each in run.attempts] == ["no", "again", None]
        assert [(each.step, each.attempt) for each in run.attempts] == [(0, 0), (0, 1), (0, 2)]
        failed = await pipeline.run(never)
        assert (failed.state, failed.outcomes) == ("failed", ["fail", "fail"])
        assert (failed.error["kind"], failed.error["message"]) == ("ValueError", "no such card")
        with pytest.raises(NotSucceeded, match=r"(?s)ValueError: no such card\nTraceback.*raise outcome"):
            _ = failed.result


@pytest.mark.parametrize(
    ("outcome", "options"),
    [
        (Fail("no", permanent=True), {}),
        (ValueError("no"), {"permanent": ValueError}),
        (ValueError("no"), {"max_attempts": 1}),
        (Next(""), {"max_attempts": 1}),
        (object(), {"max_attempts": 1}),
    ],
)
async def test_one_attempt_can_be_the_last(kit, outcome, options):
    order = stage(kit, "order.charge", outcome, **options)
    async with kit(types={order: QUICK}) as pipeline:
        run = await pipeline.run(order)
        assert (run.state, run.outcomes) == ("failed", ["fail"])


async def test_typed_contexts(kit):
    @dataclass
    class Order:
        amount: int

    order = kit.name("order")

    @kit.worker.stage(f"{order}.charge")
    async def charge(task: Task[Order]):
        return Done([type(task.context).__name__, task.context])

    async with kit(types={order: QUICK}) as pipeline:
        assert (await pipeline.run(order, {"amount": 5})).result == ["Order", {"amount": 5}]
        wrong = await pipeline.run(order, {"amount": "five"})
        assert (wrong.error["kind"], wrong.outcomes) == ("InvalidContext", ["fail"])
        assert "amount" in wrong.error["message"]


async def test_retry_after_counts_no_failure_and_next_can_wait(kit):
    order = stage(
        kit, "order.reserve", RetryAfter(0.01, "not yet"), RetryAfter(0.01), Next("charge", delay_s=0.05)
    )
    stage(kit, "order.charge", Done(1))
    async with kit(types={order: {**QUICK, "max_attempts": 1}}) as pipeline:
        run = await pipeline.run(order, {"kept": True})
        assert run.outcomes == ["retry", "retry", "next", "done"]
        assert run.context == {"kept": True}
        assert run.attempts[0].error["message"] == "not yet"
        pause = run.attempts[3].finished_at - run.attempts[2].finished_at
        assert pause >= timedelta(seconds=0.05)


@pytest.mark.parametrize("delay_s", [-3600, 0.3])
async def test_run_at(kit, delay_s):
    order = stage(kit, "order.charge", Done(1))
    async with kit() as pipeline:
        now = datetime.now(UTC) if kit.is_real else pipeline.now
        at = now + timedelta(seconds=delay_s)
        run = await pipeline.run(order, run_at=at)
        assert run.result == 1
        assert run.attempts[0].finished_at >= at


async def test_idempotency_keys(kit):
    order = stage(kit, "order.charge", Done(1))
    async with kit() as pipeline:
        first = await pipeline.run(order, 1, idempotency_key="k")
        second = await pipeline.run(order, 2, idempotency_key="k")
        assert (first.created, second.created, second.id) == (True, False, first.id)
        assert second.context == 1


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"type": "nothing-has-this-name"}, "/type"),
        ({"labels": {"n": 5}}, "/labels/n"),
        ({"callbacks": ["no url"]}, "/callbacks/0"),
        ({"priority": "SOON"}, "/priority"),
        ({"stage": ""}, "/stage"),
        ({"idempotency_key": ""}, "/idempotency_key"),
    ],
)
async def test_submissions_are_refused_alike(kit, fields, pointer):
    order = stage(kit, "order.charge", Done(1))
    async with kit() as pipeline:
        with pytest.raises(Invalid) as refused:
            await pipeline.submit(**{"type": order, **fields})
        assert refused.value.pointer == pointer


@pytest.mark.parametrize("context", [None, "text", b"\x00\xff", [1, {"a": None}], "x" * 5_000])
async def test_contexts_of_every_kind(kit, context):
    order = kit.name("order")

    @kit.worker.stage(f"{order}.reserve")
    async def reserve(task):
        return Next("charge")

    @kit.worker.stage(f"{order}.charge")
    async def charge(task):
        return Done(task.context)

    async with kit() as pipeline:
        run = await pipeline.run(order, context)
        assert run.result == context
        assert run.context == context


async def test_cancel(kit):
    order, cancelled = kit.name("order"), asyncio.Event()

    @kit.worker.stage(f"{order}.charge")
    async def charge(task):
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    done = stage(kit, "done.only", Done(1))
    async with kit() as pipeline:
        run = await pipeline.submit(order)
        await pipeline.until(run, lambda run: run.state == "running")
        assert await pipeline.cancel(run)
        assert run.state == "cancelled"
        await cancelled.wait()
        assert not await pipeline.cancel(run)
        assert run.outcomes == []
        ended = await pipeline.run(done)
        with pytest.raises(Conflict, match="succeeded"):
            await pipeline.cancel(ended)
        with pytest.raises(NoEnd, match="the condition does not hold"):
            await pipeline.until(ended, lambda run: run.state == "failed")


async def test_pause_resume_and_recover(kit):
    order = stage(kit, "order.charge", Fail("no"), Done("second time"), max_attempts=1)
    async with kit() as pipeline:
        now = datetime.now(UTC) if kit.is_real else pipeline.now
        run = await pipeline.submit(order, run_at=now + timedelta(hours=1))
        assert await pipeline.pause(run)
        assert run.state == "paused"
        assert not await pipeline.pause(run)
        assert await pipeline.resume(run)
        assert run.state == "scheduled"
        assert await pipeline.cancel(run)
        run = await pipeline.run(order)
        assert run.state == "failed"
        assert await pipeline.recover(run)
        await pipeline.until(run, lambda run: run.ended)
        assert run.result == "second time"
        assert [(each.attempt, each.outcome) for each in run.attempts] == [(0, "fail"), (1, "done")]


@pytest.mark.parametrize("sync", [False, True])
async def test_a_timeout_of_a_handler(kit, sync):
    order = kit.name("order")

    async def asynchronous(task):
        await asyncio.sleep(1e6)

    def synchronous(task):
        while not task.cancelled:
            pass

    kit.worker.stage(f"{order}.charge", timeout_s=0.2)(synchronous if sync else asynchronous)
    async with kit(types={order: {"max_attempts": 1}}) as pipeline:
        run = await pipeline.run(order)
        assert (run.error["kind"], run.outcomes) == ("Timeout", ["fail"])


@pytest.mark.parametrize("k", [None, 2])
async def test_children_of_a_stage(kit, k):
    book, page = kit.name("book"), kit.name("page")

    @kit.worker.stage(f"{book}.split")
    async def split(task):
        children = [Child(page, number) for number in range(4)]
        return Spawn(children, then="bind", context={"title": "x"}, k=k)

    @kit.worker.stage(f"{book}.bind")
    async def bind(task):
        return Done(task.context)

    @kit.worker.stage(f"{page}.print", max_attempts=1)
    async def print_page(task):
        return Fail("torn") if task.context == 3 else Done(task.context * 10)

    async with kit() as pipeline:
        run = await pipeline.run(book)
        assert (run.stages, run.outcomes) == (["split", "bind"], ["spawn", "done"])
        result = run.result
        assert result["context"] == {"title": "x"}
        children = result["children"]
        assert children["total"] == 4
        if k is None:
            assert (children["succeeded"], children["unsuccessful"]) == (3, 1)
            assert children["results"] == [0, 10, 20, None]
        else:
            assert children["succeeded"] >= k


@pytest.mark.parametrize("early", [False, True])
async def test_a_task_waits_for_an_event(kit, early):
    order = stage(kit, "order.ask", Wait(kit.name("approved"), then="ship", context={"n": 1}, key="k"))

    @kit.worker.stage(f"{order}.ship")
    async def ship(task):
        return Done(task.context)

    async with kit() as pipeline:
        await pipeline.send_event(kit.name("approved"), {"by": "nobody"}, key="other")
        if early:
            assert await pipeline.send_event(kit.name("approved"), {"by": "ana"}, key="k", id=kit.name("e1"))
        run = await pipeline.submit(order, {"to": "ask"})
        if not early:
            await pipeline.until(run, lambda run: run.state == "waiting")
            assert await pipeline.send_event(kit.name("approved"), {"by": "ana"}, key="k", id=kit.name("e1"))
        assert not await pipeline.send_event(kit.name("approved"), {"by": "eve"}, key="k", id=kit.name("e1"))
        await pipeline.until(run, lambda run: run.ended)
        assert run.result == {"context": {"n": 1}, "event": {"by": "ana"}, "timed_out": False}
        assert run.outcomes == ["wait", "done"]
        assert [step["input"] for step in run.task.raw["timeline"]] == [{"to": "ask"}, run.context]


async def test_a_wait_ends_at_its_timeout_and_with_its_task(kit):
    order = stage(kit, "order.ask", Wait(kit.name("never"), then="ship", timeout_s=0.1))

    @kit.worker.stage(f"{order}.ship")
    async def ship(task):
        return Done(task.context)

    endless = stage(kit, "endless.ask", Wait(kit.name("never"), then="ship"))
    async with kit() as pipeline:
        run = await pipeline.run(order)
        assert run.result == {"context": None, "event": None, "timed_out": True}
        waiting = await pipeline.submit(endless)
        await pipeline.until(waiting, lambda run: run.state == "waiting")
        assert await pipeline.cancel(waiting)
        assert waiting.outcomes == ["wait"]


async def test_types_of_the_code(kit):
    """The code's settings count, and those of the test go before them."""
    kit.declare(first_stage="charge", max_attempts=2, retry_base_s=0.01, retry_jitter=0)
    stage(kit, "order.refund", Done("refunded"))
    order = stage(kit, "order.charge", Fail("no"))
    async with kit() as pipeline:
        assert (await pipeline.run(order)).outcomes == ["fail", "fail"]
    async with kit(types={order: {"max_attempts": 1}}) as pipeline:
        assert (await pipeline.run(order)).outcomes == ["fail"]


async def test_a_strict_type_refuses_a_key_with_another_context(kit):
    kit.declare(first_stage="charge", idempotency="strict")
    order = stage(kit, "order.charge", Done(1))
    async with kit() as pipeline:
        first = await pipeline.run(order, {"a": 1, "b": "x" * 5_000}, idempotency_key="k")
        same = await pipeline.run(order, {"b": "x" * 5_000, "a": 1}, idempotency_key="k")
        assert (same.id, same.created) == (first.id, False)
        with pytest.raises(Invalid) as refused:
            await pipeline.submit(order, {"a": 2}, idempotency_key="k")
        assert refused.value.pointer == "/idempotency_key"
        assert str(first.id) in refused.value.reason


async def test_a_type_with_ageing_and_concurrency_keys(kit):
    """A type may have both; ageing and keys change no result."""
    order = kit.name("order")

    @kit.worker.stage(f"{order}.start")
    async def start(task):
        return Done(task.context)

    settings = {"ageing_s": 60, "fair": True, "max_per_key": 1}
    async with kit(types={order: settings}) as pipeline:
        for number, key in enumerate(("a", "a", "b")):
            run = await pipeline.run(order, number, key=key, priority="LOWEST")
            assert (run.state, run.result) == ("succeeded", number)
