"""Running one attempt: whatever a handler does, one result comes of it."""

import asyncio
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from penstock.contracts.context import INLINE_LIMIT_BYTES, ContentType, Context, ObjectRef
from penstock.contracts.inbound import decode_results
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import StageResult, encode_results
from penstock.core.completion import Fence, Outcome
from penstock.errors import CorruptObject, SettingsError
from penstock.objects import ObjectStore
from penstock.worker import Done, Fail, Next, RetryAfter, Worker, WorkerSettings, execution
from penstock.worker.execution import Execution, Stage
from penstock.worker.hand import Hand
from penstock.worker.heart import Heart
from penstock.worker.link import Reports
from penstock.worker.pull import Puller

READY = ReadyTask(Fence(7, 2, "s", 1), "t", Context.encode({"a": 1}), lease_ms=60_000, tries=1)


def nobody_is_abandoned(result):
    raise AssertionError(result)


async def run(
    handler, *, ready=READY, timeout_s=5.0, objects=None, max_attempts=None, abandon=nobody_is_abandoned
):
    stages = {("t", "s"): Stage(handler, timeout_s, max_attempts)}
    return await Execution(stages, objects or ObjectStore("memory:///"), 4).run(ready, abandon)


async def test_a_handler_is_given_its_task():
    """W1: decoded context, identity, and a token that is this attempt's alone."""
    seen = []

    async def handler(task):
        seen.append(task)
        return Done()

    await run(handler)
    [task] = seen
    assert (task.id, task.type, task.stage, task.step, task.attempt, task.tries) == (7, "t", "s", 2, 1, 1)
    assert (task.context, task.token) == ({"a": 1}, "7-2-1")


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
    """T3: next stage and context, done, fail, retry after; async and sync handlers alike."""

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
async def test_nonsense_is_a_failure_that_says_what_was_expected(returned, words):
    """W1: a handler that returns nonsense fails its try, precisely."""

    async def handler(_task):
        return returned

    found = await run(handler, max_attempts=4)
    assert found.outcome is Outcome.FAIL
    assert words in found.error.message
    assert found.max_attempts == 4
    assert not found.permanent


@pytest.mark.parametrize("sync", [False, True])
async def test_a_raising_handler_leaves_its_traceback(sync):
    """W1: kind, message and traceback, so that it can be read through the API."""

    def broken(_task):
        raise LookupError("no such thing")

    async def coroutine(task):
        broken(task)

    found = await run(broken if sync else coroutine)
    assert (found.outcome, found.error.kind, found.error.message) == (
        Outcome.FAIL,
        "LookupError",
        "no such thing",
    )
    assert "in broken" in found.error.traceback


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class OfItsOwn(BaseException):
    pass


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (SystemExit(3), "SystemExit", "3"),
        (KeyboardInterrupt(), "KeyboardInterrupt", "KeyboardInterrupt"),
        (OfItsOwn("boo"), "OfItsOwn", "boo"),
        (UnprintableError(), "UnprintableError", "cannot be printed: RuntimeError"),
        (OSError("no such file: \udcff.mp4"), "OSError", "no such file: \\udcff.mp4"),
        (ValueError("a\0b"), "ValueError", "a\\x00b"),
    ],
)
async def test_nothing_a_handler_raises_is_more_than_its_own_failure(error, kind, words, sync):
    """W1: what would end an interpreter, cannot be printed or cannot be written fails the attempt, and can be read."""

    def broken(_task):
        raise error

    async def coroutine(task):
        broken(task)

    found = await run(broken if sync else coroutine)
    assert (found.outcome, found.error.kind) == (Outcome.FAIL, kind)
    assert words in found.error.message
    assert "in broken" in found.error.traceback
    encode_results("w", [found]).decode()


async def test_an_iterator_that_is_exhausted_is_a_failure_and_not_a_timeout():
    """W1: `StopIteration` cannot leave a coroutine; the attempt must not wait for its time to run out."""
    found = await run(lambda _task: Done(next(iter([]))))
    assert found.error.kind == "StopIteration"


async def test_a_handler_that_swallows_its_cancellation_is_left_behind(monkeypatch):
    """W1: the attempt fails without it; what it returns one day is dropped."""
    monkeypatch.setattr(execution, "STUBBORN_S", 0.01)
    abandoned = asyncio.get_running_loop().create_future()
    let_go = asyncio.Event()

    async def stubborn(_task):
        while not let_go.is_set():
            with suppress(asyncio.CancelledError):
                await let_go.wait()
        return Done("at last")

    running = asyncio.ensure_future(run(stubborn, timeout_s=0.01, abandon=abandoned.set_result))
    found = await abandoned
    assert (found.outcome, found.error.kind) == (Outcome.FAIL, "Timeout")
    assert "left behind" in found.error.message
    let_go.set()
    assert await running is None


async def test_a_handler_that_cancels_itself_is_a_failure():
    """Only the worker's own stop is a cancellation."""

    async def handler(_task):
        raise asyncio.CancelledError

    assert (await run(handler)).error.kind == "CancelledError"


async def test_a_hanging_handler_is_ended_by_its_timeout():
    """W1: the async handler is cancelled, and told so."""
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


async def test_a_handler_may_end_in_its_own_way_when_its_time_is_up():
    """A handler that catches its cancellation and returns has returned; nothing of it is left to hit what follows."""

    async def handler(_task):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return Done({"partial": "x" * 5000})  # large, so that storing it awaits

    found = await run(handler, timeout_s=0.05)
    assert (found.outcome, found.context.ref.size) == (Outcome.DONE, 5014)


async def test_a_hanging_thread_is_left_behind_and_its_place_given_away():
    """W1: nothing can end a thread, but it must not keep others from running."""
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


async def test_a_stage_without_handler_is_told_what_there_is():
    """A worker that does not know a stage fails the try and says what it knows."""
    unknown = ReadyTask(Fence(1, 0, "other", 0), "t", Context.encode(None), 1000)
    found = await run(lambda _task: Done(), ready=unknown)
    assert (found.error.kind, found.permanent) == ("NoHandler", False)
    assert "'other' of t; it has: s" in found.error.message


async def test_a_large_context_is_the_same_to_the_handler_both_ways():
    """T4: above 4,096 bytes contexts travel by reference, invisible to the handler."""
    objects = ObjectStore("memory:///")
    value = {"text": "ü" * INLINE_LIMIT_BYTES}
    ready = ReadyTask(READY.fence, "t", await objects.check_in(Context.encode(value)), 1000)
    assert ready.context.ref is not None

    async def handler(task):
        return Next("n", task.context)

    found = await run(handler, ready=ready, objects=objects)
    assert found.context.ref == ready.context.ref
    assert (await objects.check_out(found.context)).decode() == value


async def test_objects_that_are_not_what_was_checked_in_are_refused(tmp_path):
    """T4: the digest is checked; a missing object is told apart from a changed one."""
    objects = ObjectStore(f"file://{tmp_path}/objects")
    checked = await objects.check_in(Context.encode("x" * 5000))
    (tmp_path / "objects" / checked.ref.key).write_bytes(b"changed")
    with pytest.raises(CorruptObject, match="not those checked in"):
        await objects.check_out(checked)
    with pytest.raises(CorruptObject, match="is not in the store"):
        await objects.check_out(Context(ContentType.JSON, ref=ObjectRef("contexts/no/no", "0" * 64, 1)))


async def test_small_contexts_stay_inline():
    """T4: up to 4,096 bytes."""
    objects = ObjectStore("memory:///")
    small, large = Context(ContentType.BYTES, b"x" * 4096), Context(ContentType.BYTES, b"x" * 4097)
    assert await objects.check_in(small) is small
    assert (await objects.check_in(large)).ref.size == 4097


@pytest.mark.parametrize("url", ["nowhere", "gopher://x/y"])
def test_a_store_of_no_known_kind_is_refused_at_once(url):
    """Settings refuse nonsense at start-up."""
    with pytest.raises(SettingsError, match="is not an object store"):
        ObjectStore(url)


def test_registration_refuses_what_cannot_work():
    """The error names the stage and what is wrong with it."""
    worker = Worker(WorkerSettings(objects="memory:///"))
    worker.stage("a.b.c")(lambda _task: Done())  # the stage is b.c
    for name, words in (("plain", "type and stage"), (".x", "type and stage"), ("a.b.c", "already")):
        with pytest.raises(SettingsError, match=words):
            worker.stage(name)
    with pytest.raises(SettingsError, match="max_attempts=0"):
        worker.stage("a.d", max_attempts=0)
    with pytest.raises(SettingsError, match="timeout_s=0"):
        worker.stage("a.d", timeout_s=0)


async def test_a_worker_without_stages_says_so():
    """Better than waiting for nothing."""
    with pytest.raises(SettingsError, match="has no stage"):
        await Worker(WorkerSettings(objects="memory:///")).serve(asyncio.Event())


async def test_what_is_claimed_when_the_worker_stops_is_started_all_the_same():
    """W1: a stop between claim and commit must not leave tasks to their leases: the pool hands them back."""
    committing = asyncio.Event()

    class Consumer:
        async def getmany(self, **_limits):
            return {"partition": [SimpleNamespace(value=READY.encode())]}

        async def commit(self):
            committing.set()
            await asyncio.Event().wait()

    class Link:
        async def send_heartbeat(self, _heartbeat):
            pass

    started = []
    hand, link = Hand(1), Link()
    heart = Heart(link, "w", asyncio.get_running_loop().time, lambda _keys: None)
    settings = WorkerSettings(objects="memory:///")
    puller = Puller(settings, "t", link, hand, heart, "w", started.extend, {})
    pulling = asyncio.ensure_future(puller._pull(Consumer()))
    await committing.wait()
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    assert [ready.fence for ready in started] == [READY.fence]


async def test_a_result_that_cannot_be_written_fails_alone():
    """A context made by hand may not hold what it says; the others of its record are sent."""
    sent = []

    class Link:
        async def send_results(self, results):
            sent.append(encode_results("w", results))

        async def send_heartbeat(self, _heartbeat):
            pass

    async def handler(_task):
        return Done(Context(ContentType.TEXT, b"\xff"))

    async def fine(_task):
        return Done(1)

    reports = Reports(Link(), "w", lambda _keys: None, lambda keys: keys)
    sending = asyncio.ensure_future(reports.run())
    reports.add(await run(handler))
    reports.add(await run(fine))
    await reports.wait_sent()
    sending.cancel()
    _worker, [bad, good], faults = decode_results(sent[0])
    assert (bad.outcome, bad.error.kind, good.outcome, faults) == (
        Outcome.FAIL,
        "Unwritable",
        Outcome.DONE,
        [],
    )


async def test_a_result_whose_attempt_was_lost_before_it_was_sent_is_not_sent():
    """W6: asked for each record; what another may have begun meanwhile is nobody's to report, nor to release."""
    sent, released = [], []
    held = {(2, 0, 0)}

    class Link:
        async def send_results(self, results):
            sent.append([result.fence.id for result in results])
            held.add((3, 0, 0))

        async def send_heartbeat(self, heartbeat):
            released.extend(heartbeat.tasks)

    let_go = []
    reports = Reports(Link(), "w", let_go.extend, lambda _keys: held)
    sending = asyncio.ensure_future(reports.run())
    for batch in ([1, 2], [1], [3]):
        for number in batch:
            fence = Fence(number, 0, "s", 0)
            reports.add(StageResult(fence=fence, outcome=Outcome.DONE, context=Context.encode(None)))
        await reports.wait_sent()
    sending.cancel()
    assert sent == [[2], [3]]
    assert let_go == released == [(2, 0, 0), (3, 0, 0)]
