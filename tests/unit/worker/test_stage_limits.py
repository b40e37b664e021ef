"""The most attempts of one stage at once on a worker."""

import asyncio

import pytest
from tests.support.waiting import wait_until
from tests.support.worker_platform import RecordingPlatform

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence, Outcome
from penstock.core.suspects import Isolation
from penstock.core.task import Priority
from penstock.worker import Done
from penstock.worker.backlog import Backlog
from penstock.worker.execution import Execution, Stage
from penstock.worker.handler_pool import HandlerPool


def ready(number, stage="limited", priority=Priority.MEDIUM, isolation=None):
    fence = Fence(number, 0, stage, 0)
    return ReadyTask(fence, "t", Context.encode(None), 60_000, priority=priority, isolation=isolation)


class Rig:
    """A pool whose handlers run until the test ends them; `limited` has two at once."""

    def __init__(self, size=10, limit=2, **times):
        platform = RecordingPlatform()
        self.results, self.announced = platform.results, platform.announced
        self.running, self.most = {}, 0
        self.lingers = asyncio.Event()
        self.lingers.set()

        async def handler(task):
            self.running[task.id] = asyncio.Event()
            self.most = max(self.most, len([id_ for id_ in self.running if id_ < 100]))
            try:
                await self.running[task.id].wait()
            finally:
                await self.lingers.wait()
                del self.running[task.id]
            return Done()

        stages = {("t", "limited"): Stage(handler, 60, None), ("t", "free"): Stage(handler, 60, None)}
        self.pool = HandlerPool(
            Execution(stages, None, 1), platform, size, {("t", "limited"): limit}, **times
        )

    async def become(self, *running):
        await wait_until(lambda: sorted(self.running) == sorted(running), every=0)

    def finish(self, *numbers):
        for number in numbers:
            self.running[number].set()

    @property
    def handed_back(self):
        return {result.fence.id: result for result in self.results if result.outcome is Outcome.HANDED_BACK}


@pytest.fixture
async def rig():
    return Rig()


async def test_no_more_attempts_of_a_stage_run_than_it_allows(rig):
    """W1: others wait, or go back with a delay; a stage without a limit is not delayed."""
    rig.pool.start_all([*(ready(number) for number in range(1, 8)), ready(100, "free"), ready(101, "free")])
    await rig.become(1, 2, 100, 101)
    assert sorted(rig.handed_back) == [5, 6, 7]
    assert all(result.delay_ms >= 100 for result in rig.handed_back.values())
    rig.finish(1, 100)
    await rig.become(2, 3, 101)
    rig.finish(2, 3)
    await rig.become(4, 101)
    assert rig.most == 2


async def test_the_more_urgent_of_a_stage_run_first(rig):
    """S3: also where the limit of the stage makes them wait; the least urgent go back."""
    rig.pool.start_all([ready(1), ready(2)])
    rig.pool.start_all([ready(3, priority=Priority.LOW), ready(4), ready(5, priority=Priority.HIGHEST)])
    await rig.become(1, 2)
    assert [*rig.handed_back] == [3]
    rig.finish(1)
    await rig.become(2, 5)


async def test_an_urgent_attempt_of_any_stage_takes_the_next_handler():
    """S3: of all stages with room, the most urgent and then the oldest attempt begins."""
    rig = Rig(size=1)
    rig.pool.start_all([ready(100, "free")])
    await rig.become(100)
    rig.pool.start_all([ready(1), ready(101, "free", Priority.HIGH), ready(2, priority=Priority.HIGH)])
    for running, following in ((100, 101), (101, 2), (2, 1)):
        rig.finish(running)
        await rig.become(following)


async def test_attempts_that_wait_for_long_go_back_with_a_delay():
    """Another worker may be idle; without a delay the same worker would take them again at once."""
    rig = Rig(stuck_s=0.01)
    rig.pool.start_all([*(ready(number) for number in range(1, 5)), ready(100, "free")])
    await rig.become(1, 2, 100)
    await wait_until(lambda: sorted(rig.handed_back) == [3, 4])
    assert all(result.delay_ms >= 100 for result in rig.handed_back.values())
    assert not rig.pool.waits(ready(3).fence.attempt_id)
    rig.finish(1)
    await rig.become(2, 100)


async def test_a_revoked_handler_keeps_its_slot_until_it_has_ended(rig):
    """Two processes on one GPU are two processes, although the task of one was cancelled."""
    rig.pool.start_all([ready(1), ready(2), ready(3)])
    await rig.become(1, 2)
    rig.lingers.clear()
    rig.pool.drop([ready(1).fence.attempt_id])
    rig.finish(2)
    await asyncio.sleep(0)
    assert sorted(rig.running) == [1, 2]
    rig.lingers.set()
    await rig.become(3)
    assert rig.most == 2


async def test_an_attempt_that_is_dropped_before_it_begins_frees_its_slot(rig):
    """A coroutine that is cancelled before its first step runs nothing, not even `finally`."""
    rig.pool.start_all([ready(1), ready(2), ready(3)])
    rig.pool.drop([ready(number).fence.attempt_id for number in (1, 2)])
    await rig.become(3)


async def test_a_suspect_counts_for_the_limit_of_its_stage(rig):
    """W8: it takes the next slot, before those that wait, and keeps it from its announcement on."""
    rig.pool.start_all([ready(1), ready(2), ready(3)])
    await rig.become(1, 2)
    rig.pool.start_all([ready(4, isolation=Isolation.ONE), ready(5, isolation=Isolation.ONE)])
    assert not rig.announced
    rig.finish(1)
    await wait_until(lambda: rig.announced, every=0)
    assert [announced.task_id for announced in rig.announced] == [4]
    rig.pool.begin(rig.announced[0])
    await rig.become(2, 4)
    rig.finish(2)
    await rig.become(3, 4)
    rig.pool.drop([ready(4).fence.attempt_id])
    await wait_until(lambda: len(rig.announced) == 2, every=0)
    rig.pool.drop([ready(5).fence.attempt_id])
    rig.pool.start_all([ready(6)])
    await rig.become(3, 6)
    assert rig.most == 2


async def test_a_drain_hands_back_waiting_attempts_of_a_full_stage_at_once(rig):
    """They begin on another worker without a delay."""
    rig.pool.start_all([ready(number) for number in range(1, 5)])
    await rig.become(1, 2)
    draining = asyncio.ensure_future(rig.pool.drain(60))
    await wait_until(lambda: sorted(rig.handed_back) == [3, 4], every=0)
    assert all(result.delay_ms is None for result in rig.handed_back.values())
    rig.finish(1, 2)
    await draining
    assert [r.fence.id for r in rig.results if r.outcome is Outcome.DONE] == [1, 2]


def test_a_quick_stage_keeps_as_many_waiting_as_it_will_soon_run():
    """A worker that runs hundreds a second in one slot hands few of them back."""
    backlog = Backlog({("t", "limited"): 1})
    for number in range(50):
        backlog.begin(ready(number), 1.0)
        backlog.end(ready(number), 1.001)
    backlog.begin(ready(100), 1.002)
    for number in range(200, 300):
        backlog.add(ready(number), 1.002)
    back = [each.fence.id for each, _delay_ms in backlog.take_surplus(1.002)]
    assert back == [*range(250, 300)]
    assert len(backlog) == 50
