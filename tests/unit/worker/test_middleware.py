"""Middleware around each attempt."""

import asyncio
import contextvars
import threading
from functools import partial

import pytest

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence, Outcome
from penstock.errors import SettingsError
from penstock.worker import Done, Fail, Next, Worker, current_task
from penstock.worker.execution import Execution

READY = ReadyTask(Fence(7, 0, "s", 0), "t", Context.encode(None), 60_000)
variable = contextvars.ContextVar("variable", default=None)


@pytest.fixture
def worker():
    return Worker(worker_gateway="http://gateway.example")


async def attempt(worker, threads=4, abandon=pytest.fail, **times):
    await worker._around.start()
    execution = Execution(worker._stages, None, threads, around=worker._around, **times)
    return await execution.run(READY, abandon)


def handlers(function):
    """The function as an async and as a synchronous handler."""

    async def handler(task):
        return function(task)

    return [pytest.param(handler, id="async"), pytest.param(function, id="sync")]


def reads_variable(task):
    return Done([variable.get(), current_task().id])


@pytest.mark.parametrize("handler", handlers(reads_variable))
async def test_middleware_runs_around_the_handler_in_order(worker, handler):
    """W1: the first is the outermost. What they set, the handler sees, also on its thread."""
    order = []
    worker.stage("t.s")(handler)

    async def around(name, task, call_next):
        order.append(f"{name} begins")
        variable.set([*(variable.get() or []), name])
        assert current_task() is task
        returned = await call_next(task)
        order.append(f"{name} ends")
        return returned

    for name in ("a", "b"):
        worker.middleware(partial(around, name))
    result = await attempt(worker)
    assert result.context.decode() == [["a", "b"], 7]
    assert order == ["a begins", "b begins", "b ends", "a ends"]


def raises(task):
    raise LookupError("of the handler")


@pytest.mark.parametrize("handler", handlers(raises))
async def test_middleware_sees_the_error_of_the_handler(worker, handler):
    """W1: and the attempt has it, unless the middleware returns an outcome instead."""
    seen = []
    worker.stage("t.s", permanent=LookupError)(handler)

    @worker.middleware
    async def counts(task, call_next):
        try:
            return await call_next(task)
        except LookupError as error:
            seen.append(str(error))
            raise

    result = await attempt(worker)
    assert (result.outcome, result.error.kind, result.permanent) == (Outcome.FAIL, "LookupError", True)
    assert "in raises" in result.error.traceback
    assert seen == ["of the handler"]

    @worker.middleware
    async def rescues(task, call_next):
        try:
            return await call_next(task)
        except LookupError:
            return Next("rescued")

    assert (await attempt(worker)).next_stage == "rescued"


def raises_with_a_cause(task):
    try:
        int("the cause")
    except ValueError as error:
        raise LookupError("of the handler") from error


@pytest.mark.parametrize("handler", handlers(raises_with_a_cause))
async def test_an_error_keeps_its_cause(worker, handler):
    """W1: the traceback shows why, as without middleware."""
    worker.stage("t.s")(handler)

    @worker.middleware
    async def nothing(task, call_next):
        return await call_next(task)

    result = await attempt(worker)
    assert "ValueError: invalid literal" in result.error.traceback
    assert "_Raised" not in result.error.traceback


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("sync", [False, True])
async def test_any_exception_of_a_handler_leads_to_one_failure(worker, error, sync):
    """W1: as without middleware; only the worker ends its process."""

    def handler(task):
        raise error("x")

    async def handles(task):
        raise error("x")

    worker.stage("t.s")(handler if sync else handles)

    @worker.middleware
    async def nothing(task, call_next):
        return await call_next(task)

    assert (await attempt(worker)).outcome is Outcome.FAIL


@pytest.mark.parametrize("handler", handlers(lambda task: Done()))
@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_error_of_middleware_fails_the_attempt(worker, handler, when):
    """W1: like one of the handler, also after the handler has returned."""
    worker.stage("t.s")(handler)

    @worker.middleware
    async def broken(task, call_next):
        if when == "after":
            await call_next(task)
        raise ConnectionError("of the middleware")

    result = await attempt(worker)
    assert (result.outcome, result.error.kind) == (Outcome.FAIL, "ConnectionError")


@pytest.mark.parametrize("handler", handlers(lambda task: Fail("x")))
async def test_middleware_may_return_another_outcome(worker, handler):
    """W1: in place of the handler's, or without calling it."""
    worker.stage("t.s")(handler)

    @worker.middleware
    async def replace_result(task, call_next):
        assert await call_next(task) == Fail("x")
        return Done(1)

    assert (await attempt(worker)).context.decode() == 1

    @worker.middleware
    async def drop_result(task, call_next):
        await call_next(task)

    result = await attempt(worker)
    assert (
        "the middleware drop_result returned None: return what call_next has returned" in result.error.message
    )


async def test_the_timeout_of_a_stage_includes_its_middleware(worker):
    """W1: a middleware that hangs costs no slot for long, and one that swallows its cancellation is
    abandoned."""
    began = []

    @worker.stage("t.s", timeout_s=0.02)
    def handler(task):
        began.append(threading.get_ident())
        return Done()

    hangs = asyncio.Event()

    @worker.middleware
    async def waits(task, call_next):
        await hangs.wait()
        return await call_next(task)

    result = await attempt(worker)
    assert (result.error.kind, began) == ("Timeout", [])

    @worker.middleware
    async def swallows(task, call_next):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await hangs.wait()
        return Done()

    worker._around.middleware.reverse()
    abandoned = []

    def abandon(result):
        abandoned.append(result.error.kind)
        hangs.set()

    assert await attempt(worker, abandon=abandon, abandon_s=0.02) is None
    assert abandoned == ["Timeout"]


@pytest.mark.parametrize("sync", [False, True])
async def test_a_cancelled_attempt_cancels_middleware_and_handler(worker, sync):
    """W1: the middleware closes what it opened."""
    began, closed, seen = threading.Event(), [], threading.Event()

    def blocks(task):
        began.set()
        while not task.cancelled:
            seen.wait(0.01)
        seen.set()

    async def waits(task):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            seen.set()

    worker.stage("t.s")(blocks if sync else waits)

    @worker.middleware
    async def closes(task, call_next):
        try:
            return await call_next(task)
        finally:
            closed.append(task.id)

    running = asyncio.ensure_future(attempt(worker))
    while not began.is_set():  # noqa: ASYNC110 (of a thread)
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    assert closed == [7]
    assert await asyncio.to_thread(seen.wait)


def _no_coroutine(task, call_next):
    return None


async def _one_argument(task):
    return None


@pytest.mark.parametrize("wrong", [_no_coroutine, _one_argument, None, "x"])
def test_what_is_no_middleware_is_refused_at_registration(worker, wrong):
    """O8: it would fail each attempt otherwise."""
    with pytest.raises(SettingsError, match=r"middleware\(.*\): (give an async function|it must take)"):
        worker.middleware(wrong)


def test_an_object_with_an_async_call_is_middleware(worker):
    """A class may have the settings of its middleware."""

    class Traced:
        async def __call__(self, task, call_next):
            return await call_next(task)

    traced = Traced()
    assert worker.middleware(traced) is traced
