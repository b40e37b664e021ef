"""A worker runs suspects one at a time, and tells the platform before each begins."""

import asyncio

import orjson
import pytest
from tests.support.waiting import wait_until
from tests.support.worker_platform import RecordingPlatform

from penstock.contracts.context import Context
from penstock.contracts.heartbeat import Kind, claims_of
from penstock.contracts.inbound import decode_heartbeat
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence, Outcome
from penstock.core.heartbeat_queue import Answer
from penstock.core.suspects import Isolation
from penstock.errors import KafkaUnavailable
from penstock.worker.execution import Execution, Stage
from penstock.worker.handler_pool import HandlerPool
from penstock.worker.heartbeat_sender import HeartbeatSender
from penstock.worker.outcomes import Done


def ready(number, isolation=None):
    return ReadyTask(Fence(number, 0, "s", 0), "t", Context.encode(None), 60_000, isolation=isolation)


def ids(attempt_ids):
    return [attempt_id.task_id for attempt_id in attempt_ids]


class Rig:
    """A pool whose handlers run until the test ends them."""

    def __init__(self, **times):
        platform = RecordingPlatform()
        self.announced, self.ended = platform.announced, platform.turns_ended
        self.results, self.blocks, self.running = platform.results, platform.blocks, {}

        async def handler(task):
            self.running[task.id] = asyncio.Event()
            try:
                await self.running[task.id].wait()
            finally:
                del self.running[task.id]
            return Done()

        execution = Execution({("t", "s"): Stage(handler, 60, None)}, None, 1)
        self.pool = HandlerPool(execution, platform, 10, **times)

    async def become(self, *running):
        await wait_until(lambda: sorted(self.running) == sorted(running), every=0)

    def finish(self, number):
        self.running[number].set()


@pytest.fixture
async def rig():
    return Rig()


async def test_suspects_begin_one_at_a_time_and_others_at_once(rig):
    """W8: a suspect begins once the platform knows it, and the next once the last one's result is
    stored."""
    rig.pool.start_all([ready(1, Isolation.ONE), ready(2, Isolation.ONE), ready(3), ready(4)])
    await rig.become(3, 4)
    assert ids(rig.announced) == [1]
    rig.pool.begin(rig.announced[0])
    await rig.become(1, 3, 4)
    rig.finish(1)
    await rig.become(3, 4)
    await wait_until(lambda: rig.ended, every=0)
    assert ids(rig.announced) == [1], "the result of the first may still be lost"
    rig.pool.end_turn(rig.ended[0])
    assert ids(rig.announced) == [1, 2]
    rig.pool.begin(rig.announced[1])
    await rig.become(2, 3, 4)


async def test_a_suspect_that_runs_for_long_lets_the_next_one_begin():
    """W8: the loss of a host with long tasks does not hold them up for days."""
    rig = Rig(turn_s=0.0)
    rig.pool.start_all([ready(1, Isolation.ONE), ready(2, Isolation.ONE)])
    rig.pool.begin(rig.announced[0])
    await wait_until(lambda: ids(rig.announced) == [1, 2], every=0)


async def test_nothing_runs_beside_a_suspect_that_runs_alone(rig):
    """W8: no other attempt can cause the loss that quarantines a task."""
    rig.pool.start_all([ready(1)])
    await rig.become(1)
    rig.pool.start_all([ready(2, Isolation.ALONE), ready(3)])
    assert rig.announced == []
    rig.finish(1)
    await wait_until(lambda: rig.announced, every=0)
    rig.pool.begin(rig.announced[0])
    await rig.become(2)
    rig.pool.start_all([ready(4)])
    rig.finish(2)
    await wait_until(lambda: rig.ended, every=0)
    assert rig.running == {}
    rig.pool.end_turn(rig.ended[0])
    await rig.become(3, 4)


@pytest.mark.parametrize("isolation", list(Isolation))
async def test_a_dropped_suspect_holds_up_no_other(rig, isolation):
    """W5: a suspect that is revoked while it waits, is announced or runs, gives its turn to the
    next."""
    suspects = [ready(number, isolation) for number in range(1, 5)]
    rig.pool.start_all(suspects)
    rig.pool.drop([suspects[1].fence.attempt_id])
    rig.pool.drop([rig.announced[0]])
    rig.pool.begin(rig.announced[0])
    assert ids(rig.announced) == [1, 3]
    rig.pool.begin(rig.announced[1])
    await rig.become(3)
    rig.pool.drop([suspects[2].fence.attempt_id])
    await rig.become()
    assert ids(rig.announced) == [1, 3, 4]
    assert rig.results == []


async def test_a_drain_returns_suspects_that_have_not_begun(rig):
    """W1: a worker that stops returns waiting suspects, and begins none that was announced."""
    rig.pool.start_all([ready(1, Isolation.ONE), ready(2, Isolation.ONE)])
    await rig.pool.drain(0)
    rig.pool.begin(rig.announced[0])
    assert [(result.fence.id, result.outcome) for result in rig.results] == [
        (1, Outcome.HANDED_BACK),
        (2, Outcome.HANDED_BACK),
    ]
    await rig.become()


class FakeTransport:
    def __init__(self, **times):
        self.sent, self.failures, self.answer = [], 0, Answer.CONFIRMED

    async def try_heartbeat(self, heartbeat):
        if self.failures:
            self.failures -= 1
            raise KafkaUnavailable("connection refused")
        self.sent.append((heartbeat.begun, ids(heartbeat.tasks)))
        return dict.fromkeys(heartbeat.tasks, self.answer)


async def test_heartbeats_say_which_suspects_wait(monkeypatch):
    """W8: claims and heartbeats of waiting suspects say so, and the announcement of one is repeated
    until the platform has it."""
    monkeypatch.setattr("penstock.concurrency.retry.asyncio.sleep", lambda _seconds: asyncio.tasks.sleep(0))
    transport, lost = FakeTransport(), []
    sender = HeartbeatSender(transport, "w", lambda: 0.0, lost.extend)
    claimed = [ready(1), ready(2, Isolation.ONE), ready(3, Isolation.ALONE)]
    claims = claims_of("w", claimed, {})
    assert [(claim.begun, ids(claim.tasks)) for claim in claims] == [(True, [1]), (False, [2, 3])]
    sender.add(claims, 0.0)
    sender.send_waiting()
    await wait_until(lambda: transport.sent == [(False, [2, 3])], every=0)
    transport.failures = 2
    assert await sender.announce(claimed[1].fence.attempt_id)
    sender.send_waiting()
    await wait_until(lambda: transport.sent[1:] == [(True, [2]), (False, [3])], every=0)
    transport.answer = Answer.GONE
    assert not await sender.announce(claimed[2].fence.attempt_id)
    assert ids(lost) == [3]
    assert not await sender.announce(claimed[2].fence.attempt_id), "it is not this worker's any more"


def test_records_of_earlier_versions_are_read():
    """O6: a ready record without `isolation` is of no suspect, a claim without `begun` has
    begun."""
    assert ReadyTask.decode(ready(1).encode()).isolation is None
    assert b"isolation" not in ready(1).encode()
    for isolation in Isolation:
        assert ReadyTask.decode(ready(1, isolation).encode()).isolation is isolation
    later = orjson.dumps({**ready(1).to_wire(), "isolation": "in a later version"})
    assert ReadyTask.decode(later).isolation is None
    [claim] = claims_of("w", [ready(1)], {})
    assert b"begun" not in claim.encode()
    [waiting] = claims_of("w", [ready(1, Isolation.ONE)], {})
    decoded, faults = decode_heartbeat(waiting.encode())
    assert (decoded.begun, decoded.kind, faults) == (False, Kind.CLAIM, [])
    [by_gateway] = claims_of("w", [ready(1, Isolation.ONE)], {}, isolates=False)
    assert by_gateway.begun


async def test_a_worker_is_blocked_while_a_suspect_runs_alone_for_long():
    """S13, W8: after its turn, what waits beside a suspect that runs alone goes back to other
    workers, also what comes later. The worker takes no attempts until the suspect has ended."""
    rig = Rig(turn_s=0.0)
    rig.pool.start_all([ready(1, Isolation.ALONE)])
    rig.pool.begin(rig.announced[0])
    rig.pool.start_all([ready(2), ready(3, Isolation.ONE)])
    await wait_until(lambda: rig.blocks == [True], every=0)
    rig.pool.start_all([ready(4), ready(5, Isolation.ONE)])
    assert [result.fence.id for result in rig.results] == [2, 3, 4, 5]
    assert {result.outcome for result in rig.results} == {Outcome.HANDED_BACK}
    await rig.become(1)
    rig.finish(1)
    await wait_until(lambda: rig.ended, every=0)
    assert rig.blocks == [True]
    rig.pool.end_turn(rig.ended[0])
    assert rig.blocks == [True, False]
    rig.pool.start_all([ready(6)])
    await rig.become(6)


async def test_a_suspect_that_waits_to_run_alone_keeps_its_place():
    """S13, W8: while a suspect that is to run alone waits for a long attempt to end, what waits
    behind it goes back. The suspect stays, and begins next."""
    rig = Rig(turn_s=0.0)
    rig.pool.start_all([ready(1)])
    await rig.become(1)
    rig.pool.start_all([ready(2, Isolation.ALONE), ready(3, Isolation.ALONE), ready(4)])
    await wait_until(lambda: rig.blocks == [True], every=0)
    assert sorted(result.fence.id for result in rig.results) == [3, 4]
    rig.finish(1)
    await wait_until(lambda: ids(rig.announced) == [2], every=0)
    rig.pool.begin(rig.announced[0])
    await rig.become(2)


async def test_a_suspect_that_ends_in_time_holds_up_no_worker():
    """S13: a suspect that ends within its turn causes no hand-back."""
    rig = Rig(turn_s=60.0)
    rig.pool.start_all([ready(1, Isolation.ALONE), ready(2)])
    rig.pool.begin(rig.announced[0])
    await rig.become(1)
    rig.finish(1)
    await wait_until(lambda: rig.ended, every=0)
    rig.pool.end_turn(rig.ended[0])
    await rig.become(2)
    assert rig.blocks == []
    assert [result.fence.id for result in rig.results] == [1]
