"""Handlers, middleware, providers and functions of the start of every callable kind."""

import asyncio
import functools
import inspect
import threading
from contextlib import asynccontextmanager, contextmanager
from unittest.mock import AsyncMock

import pytest
from tests.support.waiting import wait_until

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence, Outcome
from penstock.errors import SettingsError
from penstock.testing import Pipeline
from penstock.worker import Done, Worker
from penstock.worker.execution import Execution


@pytest.fixture
def worker():
    return Worker(worker_gateway="http://gateway.example")


def plain(task, *_further):
    return Done(task.id)


async def coroutine(task, *_further):
    await asyncio.sleep(0)
    return Done(task.id)


class Handlers:
    async def __call__(self, task):
        return await coroutine(task)

    async def method(self, task):
        return await coroutine(task)

    @classmethod
    async def of_class(cls, task):
        return await coroutine(task)

    @staticmethod
    async def static(task):
        return await coroutine(task)

    def forward(self, task):
        return coroutine(task)


class Plain:
    def __call__(self, task):
        return plain(task)


def decorated(function):
    @functools.wraps(function)
    def wrapper(*arguments, **named):
        return function(*arguments, **named)

    return wrapper


class Awaitable:
    def __init__(self, task):
        self.task = task

    def __await__(self):
        return coroutine(self.task).__await__()


HANDLERS = {
    "function": plain,
    "coroutine function": coroutine,
    "object": Plain(),
    "object with an async call": Handlers(),
    "method": Handlers().method,
    "class method": Handlers.of_class,
    "static method": Handlers.static,
    "method that returns a coroutine": Handlers().forward,
    "partial": functools.partial(coroutine),
    "partial of a function": functools.partial(plain),
    "partial of an object": functools.partial(functools.partial(Handlers())),
    "lambda": lambda task: Done(task.id),
    "lambda that returns a coroutine": lambda task: coroutine(task, None),
    "decorated": decorated(coroutine),
    "decorated function": decorated(plain),
    "decorated object": decorated(Handlers().method),
    "partial of a decorated one": functools.partial(decorated(coroutine)),
    "other awaitable": lambda task: Awaitable(task=task),
    "mock": AsyncMock(return_value=Done(7)),
}


@pytest.mark.parametrize("surrounded", [False, True])
@pytest.mark.parametrize("kind", HANDLERS)
async def test_a_handler_may_be_any_callable(worker, kind, surrounded):
    """W1: a call returns an outcome, or a coroutine of one."""
    worker.stage("t.s")(HANDLERS[kind])
    if surrounded:
        worker.middleware(around)
    async with worker._lifecycle.running():
        runs = Execution(worker._stages, None, 1, around=worker._around)
        ready = ReadyTask(Fence(7, 0, "s", 0), "t", Context.encode(None), 60_000)
        result = await runs.run(ready, pytest.fail)
    assert (result.outcome, result.error) == (Outcome.DONE, None)
    assert result.context.decode() == 7


async def around(task, call_next):
    return await call_next(task)


async def test_a_coroutine_of_any_callable_is_timed_out_and_cancelled(worker):
    """W1: the timeout includes the call that returns it, and a coroutine that comes too late is
    closed."""
    cancelled = asyncio.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    worker.stage("t.s", timeout_s=0.05)(lambda _task: hang())
    made, release = [], threading.Event()

    def late(task):
        release.wait(60)
        made.append(coroutine(task))
        return made[0]

    worker.stage("t.late", timeout_s=0.001)(late)
    async with Pipeline(worker, types={"t": {"max_attempts": 1}}) as pipeline:
        run = await pipeline.run("t")
        second = await pipeline.run("t", stage="late")
        release.set()
        await wait_until(lambda: made and inspect.getcoroutinestate(made[0]) == inspect.CORO_CLOSED, every=0)
    assert run.error["message"] == "the handler took longer than 0.05 s"
    assert cancelled.is_set()
    assert second.error["message"] == "the handler took longer than 0.001 s; its thread was abandoned"


def generator(task):
    yield Done()


async def async_generator(task):
    yield Done()


class Yields:
    async def __call__(self, task):
        yield Done()


REFUSED = {
    "generator": (generator, "has a `yield`"),
    "async generator": (async_generator, "has a `yield`"),
    "partial of a generator": (functools.partial(generator), "has a `yield`"),
    "object that yields": (Yields(), "has a `yield`"),
    "class": (Handlers, "is a class: give an object of it"),
    "number": (5, "5 is no function"),
    "no parameter": (lambda: Done("x"), "must take the task"),
    "no positional parameter": (lambda *, task: Done(task), "must take the task"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_handler_that_can_return_no_outcome_is_refused(worker, kind):
    """O8: at its registration, with the reason, before any task fails of it."""
    handler, words = REFUSED[kind]
    with pytest.raises(SettingsError, match=words):
        worker.stage("t.s")(handler)


class Around:
    async def __call__(self, prefix, task, call_next):
        return await call_next(task)

    async def method(self, task, call_next):
        return await call_next(task)


@pytest.mark.parametrize("middleware", [functools.partial(Around(), "prefix"), Around().method])
async def test_middleware_may_be_any_async_callable(worker, middleware):
    """W1: other callables are refused (`test_middleware.py`)."""
    worker.stage("t.s")(plain)
    worker.middleware(middleware)
    async with Pipeline(worker) as pipeline:
        assert (await pipeline.run("t")).state == "succeeded"


async def opened(task):
    yield f"of {task.id}"


class Opened:
    async def __call__(self, task):
        yield f"of {task.id}"


PROVIDERS = {
    "function": opened,
    "partial": functools.partial(opened),
    "object": Opened(),
    "partial of an object": functools.partial(Opened()),
    "method": Opened().__call__,
    "decorated": decorated(opened),
    "context manager": asynccontextmanager(opened),
    "partial of a context manager": functools.partial(asynccontextmanager(opened)),
}


@pytest.mark.parametrize("kind", PROVIDERS)
async def test_a_provider_of_attempts_may_be_any_async_generator(worker, kind):
    """W1: handlers receive what it yields, never the generator."""
    worker.provide("value")(PROVIDERS[kind])
    worker.stage("t.s")(lambda task, value: Done(value))
    async with Pipeline(worker) as pipeline:
        run = await pipeline.run("t")
        assert run.result == f"of {run.id}"


async def value():
    return "value"


class Value:
    async def __call__(self):
        return "value"


@pytest.mark.parametrize(
    "provider",
    [value, Value(), functools.partial(value), decorated(value), lambda: Value().__call__(), lambda: "value"],
)
async def test_a_provider_of_the_worker_may_be_any_callable(worker, provider):
    """W1: handlers receive the value, never a coroutine; so does a function of the start."""
    started = []
    worker.provide("given")(provider)
    worker.on_start(provider)
    worker.on_start(lambda: asyncio.sleep(0, started.append(1)))
    worker.stage("t.s")(lambda task, given: Done(given))
    async with Pipeline(worker) as pipeline:
        assert (await pipeline.run("t")).result == "value"
    assert started == [1]


@pytest.mark.parametrize(
    "provider", [lambda: opened(None), contextmanager(lambda: iter("x")), lambda: generator(1)]
)
async def test_a_provider_whose_value_nothing_opens_is_refused(worker, provider):
    """O8: the worker does not start; a handler would have received a generator."""
    worker.provide("value")(provider)
    worker.stage("t.s")(lambda task, value: Done())
    with pytest.raises(SettingsError, match="which nothing opens: give an async generator"):
        async with Pipeline(worker) as pipeline:
            await pipeline.run("t")


def hook():
    yield


async def async_hook():
    yield


@pytest.mark.parametrize("register", ["on_start", "on_stop"])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (hook, "has a `yield`"),
        (async_hook, "has a `yield`"),
        (functools.partial(async_hook), "has a `yield`"),
        (lambda worker: None, "must take no arguments"),
        (5, "no function"),
    ],
)
def test_a_function_of_the_start_that_cannot_run_is_refused(worker, register, function, words):
    """O8: a generator would run nothing, and a stop that fails is only logged."""
    with pytest.raises(SettingsError, match=words):
        getattr(worker, register)(function)
