"""An event loop that exits of user code do not end."""

import asyncio
import signal
import sys

import pytest
import uvloop

from penstock.concurrency import exits
from penstock.concurrency.exits import event_loop, run_to_end
from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence, Outcome
from penstock.worker import Done
from penstock.worker.execution import Execution, Stage


@pytest.fixture(params=[asyncio.SelectorEventLoop, uvloop.Loop], ids=["asyncio", "uvloop"], autouse=True)
def _loops(request, monkeypatch):
    """SIGINT does not raise, as in a process whose loop receives it."""
    monkeypatch.setattr(exits, "event_loop_factory", lambda: request.param)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def run(work):
    with event_loop() as loop:
        return run_to_end(loop, loop.create_task(work))


async def call_exit(error=SystemExit):
    await asyncio.sleep(0)
    raise error(0)


async def child(_task):
    await asyncio.create_task(call_exit())


async def interrupted_child(_task):
    await asyncio.create_task(call_exit(KeyboardInterrupt))


async def group(_task):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(call_exit())
        tasks.create_task(asyncio.Event().wait())


async def gathered(_task):
    await asyncio.gather(call_exit(), call_exit(KeyboardInterrupt))


async def limited(_task):
    await asyncio.wait_for(call_exit(), 60)


async def generator(_task):
    async def items():
        yield await call_exit()

    async for _each in items():
        pass


async def thread(_task):
    await asyncio.to_thread(sys.exit, 0)


async def executor(_task):
    await asyncio.get_running_loop().run_in_executor(None, sys.exit, 0)


def synchronous(_task):
    sys.exit(0)


def synchronous_loop(_task):
    asyncio.run(call_exit())


HANDLERS = {
    function.__name__: Stage(function, 60, None)
    for function in (
        child,
        interrupted_child,
        group,
        gathered,
        limited,
        generator,
        thread,
        executor,
        synchronous,
        synchronous_loop,
    )
}


def test_an_exit_in_a_handler_fails_its_attempt_alone(caplog):
    """W1: with its name, wherever in the handler it is raised. A neighbour goes on."""

    async def neighbour(_task):
        await others_ended.wait()
        return Done("the neighbour")

    stages = {("t", name): stage for name, stage in HANDLERS.items()}
    stages["t", "neighbour"] = Stage(neighbour, 60, None)

    def attempt(number, stage):
        ready = ReadyTask(Fence(number, 0, stage, 0), "t", Context.encode(None), 60_000)
        return execution.run(ready, pytest.fail)

    async def work():
        beside = asyncio.create_task(attempt(0, "neighbour"))
        results = {name: await attempt(number, name) for number, name in enumerate(HANDLERS, 1)}
        others_ended.set()
        return results, await beside

    execution, others_ended = Execution(stages, None, 4), asyncio.Event()
    results, beside = run(work())
    assert beside.outcome is Outcome.DONE
    for name, result in results.items():
        expected = {"KeyboardInterrupt"} if name == "interrupted_child" else {"SystemExit"}
        if name == "gathered":
            expected = {"SystemExit", "KeyboardInterrupt"}
        assert result.outcome is Outcome.FAIL, name
        assert result.error.kind in expected, name
    assert {record.event for record in caplog.records} == {"exit_refused"}


def test_an_exit_in_a_callback_is_logged_as_any_other_error_of_it(caplog):
    """W1: timers, callbacks and tasks that nothing awaits. None of the others is lost."""

    async def work():
        loop, called = asyncio.get_running_loop(), []
        loop.call_soon(sys.exit, 0)
        loop.call_soon(called.append, "soon")
        loop.call_later(0.001, sys.exit, 0)
        loop.call_later(0.001, called.append, "later")
        loop.call_soon_threadsafe(sys.exit, 0)
        forgotten = asyncio.create_task(call_exit())
        ended = loop.create_future()
        ended.add_done_callback(sys.exit)
        loop.call_later(0.002, ended.set_result, None)
        await ended
        await asyncio.sleep(0)
        return set(called), str(forgotten.exception())

    # While the first exit is logged, the timers may become due.
    assert run(work()) == ({"soon", "later"}, "0")
    # uvloop raises one for all exits of a turn of the loop.
    assert {record.event for record in caplog.records} == {"exit_refused"}


def test_an_exit_of_the_service_itself_and_ctrl_c_end_the_loop():
    """Only the service decides, and a user at a terminal before it receives signals."""
    with pytest.raises(SystemExit):
        run(call_exit())
    signal.signal(signal.SIGINT, signal.default_int_handler)

    async def interrupted():
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        run(interrupted())


def test_an_exit_of_a_task_that_outlives_the_service_changes_no_status(caplog):
    """W1: a status of 0 in place of a failure would keep a supervisor from the restart."""

    async def outlive():
        try:
            await asyncio.Event().wait()
        finally:
            sys.exit(0)

    async def work():
        left.append(asyncio.create_task(outlive()))
        await asyncio.sleep(0)
        return 1

    left = []
    assert run(work()) == 1
    assert str(left[0].exception()) == "0"
    assert [record.event for record in caplog.records] == ["exit_refused"]


async def exit_behind(loop):
    loop.call_soon(sys.exit, 0)


async def exit_before(loop):
    loop.call_soon(sys.exit, 0)
    await asyncio.sleep(0)


async def exit_between(loop):
    asyncio.current_task().add_done_callback(lambda _task: sys.exit(0))


@pytest.mark.parametrize("work", [exit_behind, exit_before, exit_between])
def test_an_exit_at_the_end_of_the_service_changes_no_status(work):
    """W1: the cleanup ran into the stop of the loop that the exit had left, and failed."""
    with event_loop() as loop:
        left = loop.create_task(asyncio.Event().wait())
        assert run_to_end(loop, loop.create_task(work(loop))) is None
    assert left.cancelled()
