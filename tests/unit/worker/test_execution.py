"""Execution of one attempt: any behaviour of a handler leads to one result."""

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.contracts.context import INLINE_LIMIT_BYTES, ContentType, Context
from penstock.contracts.inbound import decode_results
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult, encode_results
from penstock.core.completion import Fence, Outcome
from penstock.errors import CorruptObject, SettingsError
from penstock.objects import ObjectStore
from penstock.worker import Done, Fail, Next, RetryAfter, Worker, WorkerSettings
from penstock.worker.contexts import ResultContexts
from penstock.worker.execution import Execution, Stage
from penstock.worker.heartbeat_sender import HeartbeatSender
from penstock.worker.in_flight import InFlight
from penstock.worker.pull import Member
from penstock.worker.result_sender import ResultSender
from penstock.worker.unclaimed import UnclaimedAttempts

READY = ReadyTask(Fence(7, 2, "s", 1), "t", Context.encode({"a": 1}), lease_ms=60_000, tries=1)


def nobody_is_abandoned(result):
    raise AssertionError(result)


async def run(
    handler,
    *,
    ready=READY,
    timeout_s=5.0,
    objects=None,
    max_attempts=None,
    abandon=nobody_is_abandoned,
    **times,
):
    stages = {("t", "s"): Stage(handler, timeout_s, max_attempts)}
    return await Execution(stages, objects or ObjectStore("memory:///"), 4, **times).run(ready, abandon)


async def test_a_handler_receives_its_task():
    """W1: a handler receives the decoded context, the ids, a token that is the same for all
    attempts of its step, and the id of the attempt."""
    seen = []

    async def handler(task):
        seen.append(task)
        return Done()

    await run(handler)
    [task] = seen
    assert (task.id, task.type, task.stage, task.step, task.attempt, task.tries) == (7, "t", "s", 2, 1, 1)
    assert (task.context, task.token, task.attempt_id) == ({"a": 1}, "7-2", "7-2-1")
    assert replace(task, attempt=2).token == task.token
    assert replace(task, step=3, attempt=0).token != task.token


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    ("returned", "outcome", "fields"),
    [
        (Next("n", {"b": 2}), Outcome.NEXT, {"next_stage": "n", "context": Context.encode({"b": 2})}),
        (Next("n"), Outcome.NEXT, {"next_stage": "n", "context": None}),
        (Next("n", None, delay_s=1.5), Outcome.NEXT, {"context": Context.encode(None), "delay_ms": 1500}),
        (Done(b"\x00"), Outcome.DONE, {"context": Context(ContentType.BYTES, b"\x00")}),
        (Fail("no", permanent=True), Outcome.FAIL, {"permanent": True}),
        (RetryAfter(0.25), Outcome.RETRY, {"delay_ms": 250, "error": None}),
    ],
)
async def test_outcomes_become_results(returned, outcome, fields, sync):
    """T3: each outcome of async and sync handlers becomes a result: next, done, fail or retry."""

    def plain(_task):
        return returned

    async def coroutine(_task):
        return returned

    found = await run(plain if sync else coroutine)
    assert (found.fence, found.outcome) == (READY.fence, outcome)
    for name, value in fields.items():
        assert getattr(found, name) == value, name
    assert 0 < found.started_ms <= found.finished_ms


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned NoneType"),
        ("done", "returned str ('done')"),
        (Next(""), "Next needs the name of a stage"),
        (Next("x" * 201), "Next needs the name of a stage"),
        (Next("a\0b"), "no NUL"),
        (Next("\udcff"), "no lone surrogate"),
        (Next("n", {1, 2}), "not JSON"),
        (Next("n", "\udcff"), "not JSON"),
        (Done({"mean": float("nan")}), "nan is not JSON"),
        (Done([None, [{"a": float("-inf")}]]), "-inf is not JSON"),
        (Done(2**70), "not JSON"),
        (Done(object()), "not JSON"),
        (RetryAfter(-1), "a delay must be"),
        (RetryAfter(float("nan")), "a delay must be"),
    ],
)
async def test_an_invalid_outcome_is_a_failure_with_the_expected_types(returned, words):
    """W1: an invalid return value fails the attempt, and the error names the expected types."""

    async def handler(_task):
        return returned

    found = await run(handler, max_attempts=4)
    assert found.outcome is Outcome.FAIL
    assert words in found.error.message
    assert found.max_attempts == 4
    assert found.permanent


async def test_stop_iteration_is_a_failure_and_no_timeout():
    """W1: `StopIteration` cannot leave a coroutine; the attempt must not wait for its timeout."""
    found = await run(lambda _task: Done(next(iter([]))))
    assert found.error.kind == "StopIteration"


async def test_a_handler_that_swallows_its_cancellation_is_abandoned():
    """W1: the attempt fails without waiting for the handler, whose later result is dropped."""
    abandoned = asyncio.get_running_loop().create_future()
    settled = asyncio.Event()

    async def stubborn(_task):
        while not settled.is_set():
            with suppress(asyncio.CancelledError):
                await settled.wait()
        return Done("at last")

    running = asyncio.ensure_future(
        run(stubborn, timeout_s=0.01, abandon=abandoned.set_result, abandon_s=0.01)
    )
    found = await abandoned
    assert (found.outcome, found.error.kind) == (Outcome.FAIL, "Timeout")
    assert "abandoned" in found.error.message
    settled.set()
    assert await running is None


async def test_the_timeout_cancels_a_handler_that_never_returns():
    """W1: an async handler is cancelled at its timeout and receives the cancellation."""
    cancelled = asyncio.Event()

    async def handler(_task):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    found = await run(handler, timeout_s=0.05)
    assert (found.outcome, found.error.kind) == (Outcome.FAIL, "Timeout")
    assert "longer than 0.05 s" in found.error.message
    assert cancelled.is_set()


async def test_a_handler_may_return_a_result_at_its_timeout():
    """The result of a handler that catches its cancellation counts, and its cancellation affects no
    later step."""

    async def handler(_task):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return Done({"partial": "x" * 5000})

    found = await run(handler, timeout_s=0.05)
    assert (found.outcome, len(found.context.data)) == (Outcome.DONE, 5014)
    # A cancellation that is left over would end this step.
    await asyncio.sleep(0)


async def test_a_thread_that_never_returns_is_abandoned_and_its_permit_freed():
    """W1: a thread cannot be stopped, but it must not block other attempts."""
    release = threading.Event()

    def hang(_task):
        release.wait(30)
        return Done()

    def quick(_task):
        return Done("quick")

    stages = {("t", "s"): Stage(hang, 0.05, None), ("t", "q"): Stage(quick, 5, None)}
    runs = Execution(stages, ObjectStore("memory:///"), 1)
    found = await runs.run(READY, nobody_is_abandoned)
    assert (found.outcome, found.error.kind) == (Outcome.FAIL, "Timeout")
    other = ReadyTask(Fence(8, 0, "q", 0), "t", Context.encode(None), 1000)
    assert (await runs.run(other, nobody_is_abandoned)).outcome is Outcome.DONE
    release.set()


async def test_a_stage_without_handler_is_handed_back(caplog):
    """O6: an unknown stage is handed back, after a delay that grows and is bounded.
    The error lists the stages of the worker, and the log has each stage once."""
    runs = Execution({("t", "s"): Stage(print, 5, None)}, None, 1)

    async def delay_s(attempt, tries=0):
        unknown = ReadyTask(Fence(1, 0, "other", attempt), "t", Context.encode(None), 1000, tries)
        found = await runs.run(unknown, nobody_is_abandoned)
        assert (found.outcome, found.no_handler) == (Outcome.HANDED_BACK, True)
        assert "'other' of t; it has: s" in found.error.message
        return found.delay_ms / 1000

    for attempt in range(20):
        longest_s = min(20, 0.5 * 1.5**attempt)
        assert longest_s / 2 <= await delay_s(attempt) + 0.001 <= longest_s + 0.002
    assert await delay_s(5, tries=5) <= 0.5
    assert [record.event for record in caplog.records] == ["handler_missing"]


async def test_a_large_context_is_transparent_to_the_handler():
    """T4: contexts above 4,096 bytes are stored as objects without a difference for the handler."""
    objects = ObjectStore("memory:///")
    value = {"text": "ü" * INLINE_LIMIT_BYTES}
    ready = ReadyTask(READY.fence, "t", await objects.check_in(Context.encode(value), "default"), 1000)
    assert ready.context.ref is not None

    async def handler(task):
        return Next("n", task.context)

    ended = await run(handler, ready=ready, objects=objects)
    found = await ResultContexts(objects, lambda _attempt_id: "t").stored(ended)
    assert found.context.ref == ready.context.ref
    assert (await objects.check_out(found.context, "default")).decode() == value


async def test_changed_objects_are_refused(tmp_path):
    """T4: the digest of an object is verified, and the error distinguishes missing from changed
    objects."""
    objects = ObjectStore(f"file://{tmp_path}/objects")
    checked = await objects.check_in(Context.encode("x" * 5000), "default")
    stored = tmp_path / "objects" / checked.ref.key
    stored.write_bytes(b"y" * checked.ref.size)
    with pytest.raises(CorruptObject, match="differs from its reference"):
        await objects.check_out(checked, "default")
    stored.unlink()
    with pytest.raises(CorruptObject, match="is not in the store"):
        await objects.check_out(checked, "default")


async def test_small_contexts_stay_inline():
    """T4: contexts of up to 4,096 bytes stay in the record."""
    objects = ObjectStore("memory:///")
    small, large = Context(ContentType.BYTES, b"x" * 4096), Context(ContentType.BYTES, b"x" * 4097)
    assert await objects.check_in(small, "default") is small
    assert (await objects.check_in(large, "default")).ref.size == 4097


def test_invalid_registrations_are_refused():
    """The error names the stage and its problem."""
    worker = Worker(WorkerSettings(objects="memory:///"))
    worker.stage("a.b.c")(lambda _task: Done())  # the stage is b.c
    for name, words in (("plain", "type and stage"), (".x", "type and stage"), ("a.b.c", "already")):
        with pytest.raises(SettingsError, match=words):
            worker.stage(name)


async def test_a_worker_without_stages_is_refused():
    """A worker without stages would wait without end."""
    with pytest.raises(SettingsError, match="has no stage"):
        await Worker(WorkerSettings(objects="memory:///")).serve(asyncio.Event())


async def test_tasks_claimed_during_a_stop_reach_the_pool():
    """W1: after a stop between claim and commit the pool returns the tasks, which would otherwise
    wait for the expiry of their leases."""
    committing = asyncio.Event()

    class Consumer:
        async def wait_fetched(self, _timeout_s):
            return True

        def fetched_since(self, _age_s, _now_s):
            return []

        async def getmany(self, **_limits):
            return {"partition": [SimpleNamespace(value=READY.encode(), offset=0, timestamp=0)]}

        async def commit(self, _offsets):
            committing.set()
            await asyncio.Event().wait()

    class FakeTransport:
        async def try_heartbeat(self, _heartbeat):
            pass

    started = []
    clock, transport = asyncio.get_running_loop().time, FakeTransport()
    heartbeats = HeartbeatSender(transport, "w", clock, lambda _keys: None)
    unclaimed = UnclaimedAttempts(transport, heartbeats, "w", {"t": {}}, clock)
    pulling = asyncio.ensure_future(Member(Consumer(), "t", InFlight(1), unclaimed, started.extend)._pull())
    await committing.wait()
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert [ready.fence for ready in started] == [READY.fence]


async def test_a_result_that_cannot_be_written_fails_alone():
    """A result that cannot be encoded becomes a permanent failure; the other results are sent.

    The check of outcomes accepts a lone surrogate in the terms of a wait.
    """
    sent = []
    broken = [
        Context(ContentType.TEXT, b"\xff"),
        Context(ContentType.JSON),
        Context("json", b"1"),
        Context(ContentType.TEXT, 5),
        {"not": "a context"},
    ]

    class FakeTransport:
        async def send_results(self, results):
            sent.append(encode_results("w", results))

        async def send_heartbeat(self, _heartbeat):
            pass

    reports = ResultSender(FakeTransport(), "w", lambda _results: [], lambda keys: keys)
    sending = asyncio.ensure_future(reports.run())
    for number, context in enumerate([Context.encode(1), *broken, Context.encode(2)], 1):
        reports.add(StageResult(fence=Fence(number, 0, "s", 0), outcome=Outcome.DONE, context=context))
    await reports.wait_sent()
    sending.cancel()
    read = [decode_results(record) for record in sent]
    assert not any(faults for _worker, _results, faults in read)
    results = sorted(
        (result for _worker, results, _faults in read for result in results), key=lambda r: r.fence
    )
    assert [r.fence.id for r in results if r.outcome is Outcome.DONE] == [1, len(broken) + 2]
    failures = [r for r in results if r.outcome is Outcome.FAIL]
    assert [r.fence.id for r in failures] == list(range(2, len(broken) + 2))
    assert {(r.error.kind, r.permanent) for r in failures} == {("Unwritable", True)}


async def test_a_result_of_a_lost_attempt_is_not_sent():
    """W6: before each record, results of lost attempts are dropped, and their leases are not
    ended."""
    sent, released = [], []
    held = {(2, 0, 0)}

    class FakeTransport:
        async def send_results(self, results):
            sent.append([result.fence.id for result in results])
            held.add((3, 0, 0))

        async def send_heartbeat(self, heartbeat):
            released.extend(heartbeat.tasks)

    settled = []

    def on_sent(results):
        settled.extend(attempt_ids := [result.fence.attempt_id for result in results])
        return attempt_ids

    reports = ResultSender(FakeTransport(), "w", on_sent, lambda _keys: held)
    sending = asyncio.ensure_future(reports.run())
    for batch in ([1, 2], [1], [3]):
        for number in batch:
            fence = Fence(number, 0, "s", 0)
            reports.add(StageResult(fence=fence, outcome=Outcome.DONE, context=Context.encode(None)))
        await reports.wait_sent()
    sending.cancel()
    assert sent == [[2], [3]]
    assert settled == released == [(2, 0, 0), (3, 0, 0)]
