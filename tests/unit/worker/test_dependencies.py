"""Further parameters of handlers, which providers give by name."""

import asyncio
from functools import partial

import pytest

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence, Outcome
from penstock.errors import SettingsError
from penstock.worker import Done, Worker
from penstock.worker.execution import Execution


@pytest.fixture
def worker():
    return Worker(worker_gateway="http://gateway.example")


def ready(stage="s", id_=7):
    return ReadyTask(Fence(id_, 0, stage, 0), "t", Context.encode(None), 60_000)


async def attempts(worker, *stages):
    """The results of one attempt of each stage, after a start of the worker."""
    async with worker._lifecycle.running():
        execution = Execution(worker._stages, None, 4, around=worker._around)
        return [await execution.run(ready(stage), pytest.fail) for stage in stages or ("s",)]


@pytest.mark.parametrize("sync", [False, True])
async def test_parameters_are_given_by_name(worker, sync):
    """W1: values, results of functions and of the start, and what is opened for an attempt."""
    calls = []
    worker.provide("limit", 3)

    @worker.provide
    async def db():
        calls.append("db")
        return "pool"

    @worker.provide("mailer")
    def make_mailer(limit):
        calls.append("mailer")
        return f"mailer of {limit}"

    @worker.provide
    @worker.on_start
    async def cache():
        calls.append("cache")
        return "cache"

    @worker.provide
    async def session(db, task):
        calls.append(f"open {task.id}")
        yield f"session of {db}"
        calls.append(f"close {task.id}")

    def handler(task, session, mailer, *, cache, limit, other="default"):
        calls.append("handler")
        return Done([session, mailer, cache, limit, other])

    async def async_handler(task, session, mailer, *, cache, limit, other="default"):
        return handler(task, session, mailer, cache=cache, limit=limit, other=other)

    worker.stage("t.s")(handler if sync else async_handler)
    results = await attempts(worker, "s", "s")
    for result in results:
        assert result.context.decode() == ["session of pool", "mailer of 3", "cache", 3, "default"]
    assert calls == ["cache", "db", "mailer", *["open 7", "handler", "close 7"] * 2]


async def test_only_what_a_handler_needs_is_opened(worker):
    """W1: in the order of needs, and closed in reverse; a handler without parameters has none."""
    order = []

    @worker.provide
    async def outer():
        order.append("outer")
        yield "outer"
        order.append("close outer")

    @worker.provide
    async def inner(outer):
        order.append("inner")
        yield f"inner of {outer}"
        order.append("close inner")

    @worker.provide
    async def unused():
        order.append("unused")
        yield None

    @worker.stage("t.s")
    async def needs(task, inner):
        return Done(inner)

    @worker.stage("t.plain")
    async def plain(task):
        return Done()

    @worker.stage("t.shared")
    async def shared(task, inner, outer):
        return Done([inner, outer])

    first, _second, third = await attempts(worker, "s", "plain", "shared")
    assert first.context.decode() == "inner of outer"
    assert third.context.decode() == ["inner of outer", "outer"]
    assert order == ["outer", "inner", "close inner", "close outer"] * 2


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("swallows", [False, True])
async def test_a_provider_sees_the_error_of_the_attempt(worker, sync, swallows):
    """W1: a transaction is rolled back; a provider that swallows the error does not change it."""
    seen = []

    @worker.provide
    async def transaction():
        try:
            yield
        except LookupError as error:
            seen.append(str(error))
            if not swallows:
                raise

    def handler(task, transaction):
        raise LookupError("x")

    async def async_handler(task, transaction):
        raise LookupError("x")

    worker.stage("t.s")(handler if sync else async_handler)
    [result] = await attempts(worker)
    assert (result.outcome, result.error.kind, seen) == (Outcome.FAIL, "LookupError", ["x"])


@pytest.mark.parametrize("when", ["open", "close"])
async def test_an_error_of_a_provider_fails_the_attempt(worker, when):
    """W1: also when the handler has returned: its transaction was not committed."""

    @worker.provide
    async def transaction():
        if when == "open":
            raise ConnectionError("no server")
        yield
        raise ConnectionError("no commit")

    @worker.stage("t.s")
    async def handler(task, transaction):
        return Done()

    [result] = await attempts(worker)
    assert (result.outcome, result.error.kind) == (Outcome.FAIL, "ConnectionError")


async def test_what_was_opened_is_closed_when_the_attempt_is_cancelled(worker):
    """W1: at a timeout or a cancellation of the task."""
    closed, began = [], asyncio.Event()

    @worker.provide
    async def session():
        try:
            yield
        finally:
            closed.append(True)

    @worker.stage("t.s")
    async def handler(task, session):
        began.set()
        await asyncio.Event().wait()

    running = asyncio.ensure_future(attempts(worker))
    await began.wait()
    running.cancel()
    await asyncio.wait({running})
    assert closed == [True]


async def test_dependencies_are_inside_the_middleware(worker):
    """W1: a trace of the attempt includes the opening of its session."""
    order = []

    @worker.middleware
    async def traced(task, call_next):
        order.append("begin")
        returned = await call_next(task)
        order.append("end")
        return returned

    @worker.provide
    async def session():
        order.append("open")
        yield
        order.append("close")

    @worker.stage("t.s")
    async def handler(task, session):
        return Done()

    await attempts(worker)
    assert order == ["begin", "open", "close", "end"]


async def test_a_missing_provider_ends_the_worker_at_its_start(worker):
    """O8: the error has all names, who needs them, and what there is."""
    stopped = []
    worker.on_stop(lambda: stopped.append(True))
    worker.provide("db", 1)

    @worker.provide
    async def session(db, tracer):
        yield

    @worker.stage("t.s")
    async def handler(task, session, mailer, optional=None):
        return Done()

    @worker.stage("t.other")
    def other(task, db):
        return Done()

    words = (
        r"no provider for 'tracer' \(provider 'session'\), 'mailer' \(stage 't.s'\); "
        r"the worker has: db, session\. Register one with @worker\.provide"
    )
    with pytest.raises(SettingsError, match=words):
        await attempts(worker)
    assert stopped == [True]


async def test_values_of_the_start_are_there_and_each_start_gives_its_own(worker):
    """W1: `provide` in a function of `on_start`; a worker in a test starts several times."""
    numbers = iter(range(9))

    @worker.on_start
    async def connect():
        worker.provide("db", next(numbers))

    @worker.stage("t.s")
    async def handler(task, db):
        return Done(db)

    for expected in (0, 1):
        [result] = await attempts(worker)
        assert result.context.decode() == expected


async def test_providers_that_need_each_other_or_an_attempt_are_refused(worker):
    """O8: the error names them in their order."""

    async def a(b):
        yield

    async def b(a):
        yield

    for each in (a, b):
        worker.provide(each)
    worker.stage("t.s")(lambda task, a: Done())
    with pytest.raises(SettingsError, match="it needs itself: a → b → a"):
        await attempts(worker)

    for needs, words in ((lambda task: 1, "task"), (lambda session: 1, "session")):
        other = Worker(worker_gateway="http://gateway.example")

        @other.provide
        async def session():
            yield

        other.provide("once")(needs)
        other.stage("t.s")(lambda task, once: Done())
        with pytest.raises(SettingsError, match=f"called once, so it cannot need {words} of an attempt"):
            await attempts(other)


def test_what_is_no_provider_is_refused_at_registration(worker):
    """O8: each message names the provider."""

    def generator():
        yield 1

    worker.provide("taken", 1)
    for register, words in (
        (lambda: worker.provide("task", 1), "other than 'task'"),
        (lambda: worker.provide("no name", 1), "provide\\('no name'\\): give the name of a parameter"),
        (lambda: worker.provide(generator), "must be async here"),
        (lambda: worker.provide("x")(5), "5 is no function"),
        (lambda: worker.provide(5), "give the name of a parameter"),
        (lambda: worker.provide("taken")(lambda: 1), "the name has a provider already"),
        (lambda: worker.provide(lambda: 1), "give the name of a parameter"),
    ):
        with pytest.raises(SettingsError, match=words):
            register()


async def test_handlers_of_each_form_have_parameters(worker):
    """Methods, partial functions, and objects that are called."""
    worker.provide("db", "pool")

    class Handlers:
        async def method(self, task, db):
            return Done(db)

        def __call__(self, task, db):
            return Done(db)

    def function(prefix, task, db):
        return Done(prefix + db)

    def positional(task, db, /):
        return Done(db)

    worker.stage("t.method")(Handlers().method)
    worker.stage("t.object")(Handlers())
    worker.stage("t.partial")(partial(function, "a "))
    results = await attempts(worker, "method", "object", "partial")
    assert [result.context.decode() for result in results] == ["pool", "pool", "a pool"]
    worker.stage("t.positional")(positional)
    with pytest.raises(SettingsError, match=r"the parameter 'db' of .* cannot be given by name"):
        await attempts(worker)
