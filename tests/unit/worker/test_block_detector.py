"""A handler that blocks the event loop is named."""

import asyncio
import logging
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from tests.support.waiting import wait_until
from tests.support.worker_platform import RecordingPlatform

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.core.redaction import Redactor
from penstock.worker import Done, block_detector
from penstock.worker.block_detector import BlockDetector
from penstock.worker.execution import Execution, Stage
from penstock.worker.handler_pool import HandlerPool
from penstock.worker.log_buffer import LogBuffer
from penstock.worker.loop_thread import loop_thread

SHORT_S = (0.1, 0.02)


class Warned(logging.Handler):
    """Sets an event at each warning of the detector."""

    def __init__(self):
        super().__init__()
        self.records, self.event = [], threading.Event()

    def emit(self, record):
        self.records.append(record)
        self.event.set()


@pytest.fixture
def warned():
    handler = Warned()
    block_detector.log.addHandler(handler)
    yield handler
    block_detector.log.removeHandler(handler)


def blocks_until(event):
    """The line that the warning names."""
    assert event.wait(60)


async def run(handlers, logs=None, again=1):
    """Runs attempts of each stage, one after another, beside a detector."""
    platform = RecordingPlatform()
    results = platform.results
    stages = {("t", name): Stage(handler, 60, None) for name, handler in handlers}
    pool = HandlerPool(Execution(stages, None, 1, logs), platform, 1)
    async with loop_thread("watches") as other:
        detector = BlockDetector(asyncio.get_running_loop(), lambda: pool.is_busy, *SHORT_S)
        watching = asyncio.ensure_future(other.run(detector.run()))
        for number, (name, _handler) in enumerate(handlers * again, 1):
            pool.start_all([ReadyTask(Fence(number, 2, name, 1), "t", Context.encode(None), 60_000)])
            await wait_until(lambda number=number: len(results) == number, every=0.001)
        watching.cancel()
        await asyncio.wait({watching})
    assert [result.error for result in results] == [None] * len(handlers) * again
    return detector


@pytest.mark.parametrize("in_subtask", [False, True])
async def test_a_handler_that_blocks_the_loop_is_named(warned, in_subtask):
    """W1: one line has stage, task and the line of the handler, also where a task that the handler
    has created blocks; the task's own log has it, too."""
    buffer = LogBuffer("w", Redactor({}), lambda _urgent: None)

    async def blocks():
        blocks_until(warned.event)

    async def handler(task):
        await (asyncio.create_task(blocks()) if in_subtask else blocks())
        return Done()

    detector = await run([("slow", handler)], buffer)
    [record] = warned.records
    assert record.levelname == "WARNING"
    assert record.event == "handler_blocks_loop"
    assert (record.task, record.step, record.stage, record.attempt) == (1, 2, "slow", 1)
    assert record.task_type == "t"
    assert record.where.startswith(__file__)
    assert record.where.endswith("in blocks_until: assert event.wait(60)")
    assert "blocks_until(warned.event)" in record.traceback
    assert detector.blocked == {("t", "slow"): 1}
    [line] = [line for chunk in buffer.take(10**9) for line in chunk.lines]
    assert line[1] == logging.WARNING
    assert "has blocked the event loop" in line[3]
    assert "blocks_until" in line[3]


async def test_a_stage_is_warned_about_once_in_a_while(warned, monkeypatch):
    """The log of a stage that blocks at each attempt stays readable; the metric has them all."""
    counted = threading.Event()

    class Counts(Counter):
        def __setitem__(self, stage, count):
            super().__setitem__(stage, count)
            counted.set()

    monkeypatch.setattr(block_detector, "Counter", Counts)

    async def blocks(task):
        counted.clear()
        blocks_until(counted)
        return Done()

    detector = await run([("a", blocks), ("b", blocks)], again=3)
    assert [record.stage for record in warned.records] == ["a", "b"]
    assert detector.blocked == {("t", "a"): 3, ("t", "b"): 3}


async def test_handlers_that_wait_or_have_threads_are_not_warned_about(warned):
    """W1: a synchronous handler may block its thread."""

    def on_thread(task):
        time.sleep(0.3)
        return Done()

    async def waits(task):
        await asyncio.sleep(0.3)
        return Done()

    detector = await run([("sync", on_thread), ("async", waits)])
    assert (warned.records, detector.blocked) == ([], {})


def test_many_short_steps_in_one_turn_of_the_loop_are_nobodys_fault(monkeypatch):
    """W1: a worker that begins with many attempts at once accuses none of them; one step that lasts
    too long among them is at fault."""
    steps = [SimpleNamespace() for _ in range(5)]
    turn = [*steps, steps[0], steps[0]]
    monkeypatch.setattr(block_detector.asyncio, "current_task", lambda _loop: turn[0])
    loop = SimpleNamespace(call_soon_threadsafe=lambda _answer: None)
    detector = BlockDetector(loop, lambda: True, *SHORT_S)
    found = []
    for check in range(7):
        detector._check(check * block_detector.BLOCKED_S)
        found.append(detector._reported)
        turn.pop(0)
    assert found == [False] * 6 + [True]


def test_a_pause_of_the_whole_process_is_no_fault_of_a_handler(warned, monkeypatch):
    """A process that was stopped, or whose interpreter was held, checks late itself."""
    monkeypatch.setattr(block_detector.asyncio, "current_task", lambda _loop: None)
    calls = []
    loop = SimpleNamespace(call_soon_threadsafe=calls.append, is_closed=lambda: False)
    detector = BlockDetector(loop, lambda: True, *SHORT_S)
    detector._check(100.0)
    assert calls == [detector._answer]
    detector._since_s = 150.0  # as `run` sets it after a late check
    detector._check(150.05)
    assert not detector._reported
