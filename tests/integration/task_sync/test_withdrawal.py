"""Tasks that wait behind a busy worker go to one that has room, on the real Kafka and
PostgreSQL."""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from contextlib import AsyncExitStack, suppress
from itertools import pairwise

import pytest
from tests.support.gateways import running_gateway
from tests.support.pipeline import System
from tests.support.services import read, running_service
from tests.support.waiting import in_time, wait_until

from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.core.attempt import AttemptId
from penstock.core.task import Priority
from penstock.errors import SessionLost
from penstock.kafka.client import records
from penstock.postgres import concurrency_keys, release, tasks, types
from penstock.postgres.concurrency_keys import ConcurrencyKeyChange
from penstock.postgres.session import open_session
from penstock.task_sync import withdrawal
from penstock.worker import Done, Worker, WorkerSettings

TASK_TYPES = (types.TaskType(name="t", partitions=4, lease_ms=30_000),)

# Seconds that a quick task may wait while a slot is free, and as many for a machine that is busy.
WAIT_S = 2.0 + 2.0


class Slots(System):
    """A deployment with workers of a few slots each. The context of a task says what it does."""

    def __init__(self, *given):
        super().__init__(*given)
        self.task_sync = AsyncExitStack()
        self.end_long = asyncio.Event()
        self.runs = Counter()
        self.runs_of = defaultdict(Counter)
        self.attempts = {}
        self.began_s = {}
        self.ended_s = {}

    async def start_task_sync(self, **settings):
        self.task_sync = AsyncExitStack()
        own, self.stack = self.stack, self.task_sync
        await self.start("task-sync", **settings)
        self.stack = own
        self.stack.push_async_callback(self.task_sync.aclose)

    async def worker(self, name, slots=1):
        """Starts a worker; returns its stack, by which it is stopped before the others."""
        worker = Worker(
            WorkerSettings(**self.where, objects="memory:///", pool=slots, backlog=0, drain_timeout_s=0)
        )

        @worker.stage("t.start")
        async def start(task):
            self.runs[task.id] += 1
            self.runs_of[name][task.id] += 1
            self.attempts[task.id] = task.attempt
            self.began_s.setdefault(task.id, time.monotonic())
            if task.context == "long":
                await self.end_long.wait()
            else:
                await asyncio.sleep(task.context)
            self.ended_s[task.id] = time.monotonic()
            return Done()

        stack = AsyncExitStack()
        await stack.enter_async_context(running_service(worker.serve))
        self.stack.push_async_callback(stack.aclose)
        return stack

    async def add(self, count, context=0):
        """Submits tasks; returns their ids."""
        submission = Submission(type="t", context=Context.encode(context))
        return [found.id for found in await tasks.submit(self.pool, [submission] * count)]

    async def done(self, ids):
        await wait_until(lambda: self.ended_s.keys() >= set(ids), timeout=240, what="the tasks have run")

    async def warm(self, workers):
        """Waits until each worker reads its partitions."""
        while len(self.runs_of) < workers:
            await self.done(await self.add(8, 0.05))
        await self.become_over()

    async def overtaken(self, ids, urgent):
        """Whether tasks are withdrawn, their old records gone, and the urgent one is released."""
        moved = "SELECT count(*) >= 4 FROM task WHERE attempt = 1 AND id = ANY ($1)"
        if not await self.pool.fetchval(moved, ids):
            return False
        found = await read(self.where["kafka"], f"{self.where['prefix']}ready.t")
        attempts = {(record.get("id"), record.get("attempt")) for record in found}
        return any(id_ == urgent for id_, _attempt in attempts) and not attempts & {(id_, 0) for id_ in ids}

    async def become_over(self):
        async def over():
            return await self.pool.fetchval(
                "SELECT count(*) = 0 FROM task WHERE state NOT IN ('succeeded', 'running')"
            )

        await wait_until(over, what="no task waits")

    def waits_s(self, ids, submitted_s):
        return sorted(self.began_s[id_] - submitted_s for id_ in ids)


@pytest.fixture
async def resting(where, pool):
    """The deployment without services."""
    async with AsyncExitStack() as stack:
        yield Slots(where["kafka"], where["prefix"], where["postgres"], stack, pool)


@pytest.fixture
async def system(resting):
    await resting.start("heartbeats", "stages")
    await resting.start_task_sync()
    yield resting
    resting.end_long.set()


async def test_only_queued_tasks_of_the_attempt_are_withdrawn(resting):
    """S13: a task that is running, over, in another attempt, or locked by another transaction stays
    as it is; the locked one is named, so that its record stays, too. No failure or loss is
    counted."""
    ids = await resting.add(5)
    for id_, state, attempt in zip(
        ids, ["queued"] * 3 + ["running", "cancelled"], [0, 1, 0, 0, 0], strict=True
    ):
        await resting.pool.execute(
            "UPDATE task SET state = $2, attempt = $3 WHERE id = $1", id_, state, attempt
        )
    before = dict(await resting.pool.fetch("SELECT id, attempt FROM task"))
    async with open_session(resting.database, "test") as session, resting.pool.acquire() as other:
        async with other.transaction():
            await other.execute("SELECT FROM task WHERE id = $1 FOR UPDATE", ids[2])
            withdrawn, locked = await release.withdraw(session, [AttemptId(id_, 0, 0) for id_ in ids])
        assert withdrawn == {AttemptId(ids[0], 0, 0)}
        assert locked == {AttemptId(ids[2], 0, 0)}
    rows = await resting.pool.fetch("SELECT id, state, attempt, failures, losses FROM task ORDER BY id")
    assert [row["state"] for row in rows] == ["ready", "queued", "queued", "running", "cancelled"]
    assert [row["attempt"] - before[row["id"]] for row in rows] == [1, 0, 0, 0, 0]
    assert {(row["failures"], row["losses"]) for row in rows} == {(0, 0)}


async def test_quick_tasks_do_not_wait_behind_a_long_one(system, caplog):
    """S13: two workers with one slot each, one of them in a long task: 300 quick tasks run on the
    other meanwhile, and each waits at most about two seconds for its turn. No task runs twice, also
    not after the long one has ended."""
    caplog.set_level(logging.INFO, logger="penstock.task_sync")
    await system.worker("a")
    await system.worker("b")
    await system.warm(2)
    [long] = await system.add(1, "long")
    await wait_until(lambda: long in system.began_s)
    busy = next(name for name, runs in system.runs_of.items() if long in runs)
    submitted_s = time.monotonic()
    quick = await system.add(300)
    await system.done(quick)
    assert long not in system.ended_s
    # How quick one worker is with all of them is another matter: it must never be without work.
    began_s = sorted(system.began_s[id_] for id_ in quick)
    idle_s = max(after - before for before, after in pairwise([submitted_s, *began_s]))
    print(f"\n300 quick tasks in {began_s[-1] - submitted_s:.2f} s, at most {idle_s:.2f} s without work")
    assert idle_s < WAIT_S
    assert not system.runs_of[busy].keys() & set(quick)
    before = system.runs_of[busy].copy()
    system.end_long.set()
    await system.become(succeeded=len(system.runs))
    # Both take part again, and nothing that was withdrawn runs now.
    while system.runs_of[busy] == before:
        await system.done(await system.add(8, 0.05))
    assert set(system.runs.values()) == {1}


async def test_nothing_moves_while_all_workers_are_busy(system):
    """S13: while no worker has a free slot, tasks stay where they are."""
    await system.worker("a")
    await system.worker("b")
    await system.warm(2)
    longs = await system.add(8, "long")
    await wait_until(lambda: sum(id_ in system.began_s for id_ in longs) == 2)
    waiting = await system.add(5)

    async def queued():
        return await system.pool.fetchval(
            "SELECT count(*) = 11 FROM task WHERE state = 'queued' AND now() - updated_at > interval '4 s'"
        )

    await wait_until(queued)
    # One worker may have been free before both had begun, and may be free earlier afterwards.
    assert (
        await system.pool.fetchval("SELECT max(attempt) FROM task WHERE id = ANY ($1)", longs + waiting) <= 1
    )
    system.end_long.set()
    await system.done([*longs, *waiting])
    await system.become(succeeded=len(system.runs))


async def test_slow_tasks_run_side_by_side(system):
    """S13: 16 tasks of one second run side by side on four workers with one slot each."""
    for name in "abcd":
        await system.worker(name)
    await system.warm(4)
    # Short tasks go to one partition together, a few at a time: also the next, which are not short.
    await system.done(await system.add(100))
    slow = await system.add(16, 1)
    await system.done(slow)
    doubles = sum(system.runs[task] for task in slow) - len(slow)
    began_s, ended_s = ([moments[task] for task in slow] for moments in (system.began_s, system.ended_s))
    # Running tasks at each begin: one where all wait behind one worker.
    side_by_side = [sum(b <= at_s < e for b, e in zip(began_s, ended_s, strict=True)) for at_s in began_s]
    print(f"\n16 tasks of 1 s on 4 slots: {sorted(side_by_side)} at a time, {doubles} run twice")
    assert max(side_by_side) >= 3
    # A withdrawal may meet a task that was just taken. It runs twice, and has one result.
    assert doubles <= 2


@pytest.mark.long
async def test_quick_tasks_beside_long_tasks(system):
    """S13: a hundred quick tasks beside long ones of their type, on four workers with two slots
    each. One slot after the other becomes busy for long, until one is left. A slot is free whenever
    a quick task is submitted, and at most one in a hundred waits longer than two seconds."""
    for name in "abcd":
        await system.worker(name, slots=2)
    await system.warm(4)
    longs: list[int] = []
    waits_s = []
    for turn in range(100):
        if turn % 14 == 0 and len(longs) < 7:
            longs += await system.add(1, "long")
            await wait_until(lambda long=longs[-1]: long in system.began_s)
        submitted_s = time.monotonic()
        ids = await system.add(1, 0.05)
        await system.done(ids)
        waits_s.append(system.began_s[ids[0]] - submitted_s)
    waits_s.sort()
    p50_s, p99_s, max_s = waits_s[50], waits_s[98], waits_s[99]
    print(f"\nwaits beside long tasks: p50 {p50_s:.2f}, p99 {p99_s:.2f}, max {max_s:.2f} s")
    assert len(longs) == 7
    assert not system.ended_s.keys() & set(longs)
    assert p99_s <= WAIT_S


async def test_quick_tasks_do_not_wait_behind_a_suspect_that_runs_alone(resting):
    """S13, W8: a suspect runs alone for long on one of two workers. Quick tasks run on the other,
    also those that the first worker had taken."""
    [long] = await resting.add(1, "long")
    await resting.pool.execute("UPDATE task SET losses = 2 WHERE id = $1", long)
    await resting.start("heartbeats", "stages")
    await resting.start_task_sync()
    await resting.worker("a", slots=4)
    await wait_until(lambda: long in resting.began_s)
    quick = await resting.add(20)
    await resting.worker("b", slots=4)
    await resting.done(quick)
    assert long not in resting.ended_s
    assert not resting.runs_of["a"].keys() & set(quick)
    resting.end_long.set()
    await resting.become(succeeded=21)


async def test_a_new_replica_withdraws_what_another_has_released(system):
    """S7, S13: a replica of task-sync that takes over finds the records behind a busy worker."""
    await system.worker("a")
    await system.warm(1)
    [long] = await system.add(1, "long")
    await wait_until(lambda: long in system.began_s)
    quick = await system.add(20)

    async def queued():
        return await system.pool.fetchval("SELECT count(*) = 20 FROM task WHERE state = 'queued'")

    await wait_until(queued)
    await system.task_sync.aclose()
    await system.start_task_sync()
    await system.worker("b")
    await system.done(quick)
    assert long not in system.ended_s
    assert {system.runs[id_] for id_ in quick} == {1}


async def test_records_of_a_gateway_without_a_worker_go_to_a_worker(system):
    """S13: an HTTP worker went away, and its gateway keeps its partitions. Their tasks run on a
    Kafka worker. The gateway offers none of them when the HTTP worker comes back."""
    gateway = await system.stack.enter_async_context(
        running_gateway(
            **system.where,
            postgres=system.database,
            objects="memory:///",
            gateway_linger_s=600.0,
            gateway_give_back_s=600.0,
        )
    )
    await wait_until(gateway.is_ready)
    await system.worker("a")
    request = {"worker": "w", "type": "t", "wait_s": 1, "max": 1}

    async def held():
        await system.add(2)
        return (await gateway.post("/hold_task", request)).body["tasks"]

    [first] = await wait_until(held, what="the gateway has partitions")
    result = {name: first[name] for name in ("id", "step", "stage", "attempt")}
    await gateway.post("/set_task", {"worker": "w", "results": [{**result, "outcome": "done"}]})
    await system.become_over()
    tasks_ = await system.add(40)
    await system.done(tasks_)
    assert (await gateway.post("/hold_task", request)).body["tasks"] == []
    assert {system.runs[id_] for id_ in tasks_} == {1}


@pytest.mark.parametrize("full", [False, True], ids=["in the window", "behind a full window"])
@pytest.mark.parametrize("partitions", [1, 8])
async def test_an_urgent_task_overtakes_slow_ones(resting, partitions, full):
    """S3: five LOWEST tasks wait for an HTTP worker that is in a long one. A HIGHEST task that
    comes then is the next that it gets. With one partition the others keep their order."""
    await resting.pool.execute("UPDATE task_type SET partitions = $1", partitions)
    settings = {"window_floor": 5 if full else 100, "window": 1_000}
    await resting.start("heartbeats", "stages")
    await resting.start_task_sync(**settings)
    gateway = await resting.stack.enter_async_context(
        running_gateway(**resting.where, postgres=resting.database, objects="memory:///")
    )
    await wait_until(gateway.is_ready)

    async def submit(priority, count):
        submission = Submission(type="t", context=Context.encode(0), priority=priority)
        return [found.id for found in await tasks.submit(resting.pool, [submission] * count)]

    async def hold():
        answer = await gateway.post("/hold_task", {"worker": "w", "type": "t", "wait_s": 30, "max": 1})
        assert answer.status == 200, answer.body
        [held] = answer.body["tasks"]
        return held["id"]

    lows = await submit(Priority.LOWEST, 6)
    lows.remove(await hold())
    [urgent] = await submit(Priority.HIGHEST, 1)

    await wait_until(lambda: resting.overtaken(lows, urgent), what="the others are withdrawn")
    held = [await hold() for _ in range(6)]
    assert (held[0], sorted(held[1:])) == (urgent, lows)
    assert partitions > 1 or held[1:] == lows


async def test_a_task_whose_key_is_paused_overtakes_nothing(resting):
    """S3: no release takes it, so the same records would be withdrawn for it without end."""
    submission = Submission(type="t", context=Context.encode(0), key="k", priority=Priority.HIGHEST)
    await tasks.submit(resting.pool, [submission])
    async with open_session(resting.database, "test") as session:
        assert await release.first_ready(session, "t") is Priority.HIGHEST
        await concurrency_keys.change(resting.pool, "t", "k", ConcurrencyKeyChange(paused=True))
        assert await release.first_ready(session, "t") is None


async def test_an_urgent_task_is_the_next_of_a_busy_worker(system):
    """S3: the same for a worker on Kafka with one slot, which reads four partitions."""
    await system.worker("a")
    await system.warm(1)
    [long] = await system.add(1, "long")
    await wait_until(lambda: long in system.began_s)
    lows = await system.add(8)
    urgent = Submission(type="t", context=Context.encode(0), priority=Priority.HIGHEST)
    [found] = await tasks.submit(system.pool, [urgent])

    await wait_until(lambda: system.overtaken(lows, found.id), what="the others are withdrawn")
    system.end_long.set()
    await system.done([*lows, found.id])
    assert min((*lows, found.id), key=system.began_s.__getitem__) == found.id


class SlowBroker:
    """Holds the reads of records until it is let go."""

    def __init__(self, monkeypatch):
        self.asked = asyncio.Event()
        self.goes_on = asyncio.Event()
        make = records.make_consumer

        def make_slow(*given, **named):
            consumer = make(*given, **named)
            end_offsets = consumer.end_offsets

            async def slow(partitions):
                self.asked.set()
                await self.goes_on.wait()
                return await end_offsets(partitions)

            consumer.end_offsets = slow
            return consumer

        monkeypatch.setattr(records, "make_consumer", make_slow)
        monkeypatch.setattr(withdrawal, "READ_S", 300.0)


async def wait_behind(system, slow):
    """Puts tasks behind a busy worker; returns them once their records are being read."""
    await system.worker("a")
    await system.worker("b")
    await system.warm(2)
    [long] = await system.add(1, "long")
    await wait_until(lambda: long in system.began_s)
    waiting = []
    while not slow.asked.is_set():
        waiting += await system.add(8)
        with suppress(TimeoutError):
            await in_time(slow.asked.wait(), 5)
    return waiting


async def test_a_slow_withdrawal_delays_no_release(system, monkeypatch):
    """S13: while the broker is slow to return the records that are to be withdrawn, task-sync
    releases tasks of other types, and of this one."""
    slow = SlowBroker(monkeypatch)
    await types.register(system.pool, types.TaskType(name="u"))
    waiting = await wait_behind(system, slow)
    [other] = await tasks.submit(system.pool, [Submission(type="u", context=Context.encode(0))])

    async def released():
        return await system.pool.fetchval("SELECT state = 'queued' FROM task WHERE id = $1", other.id)

    await wait_until(released, what="the other type is released")
    further = await system.add(8)
    await wait_until(lambda: system.began_s.keys() & set(further), what="the type is released")
    assert not slow.goes_on.is_set()
    slow.goes_on.set()
    await system.done([*waiting, *further])


async def test_a_withdrawal_ends_with_the_ownership(system, monkeypatch):
    """S7, S13: task-sync loses its session while it reads records that are to be withdrawn. It
    ends, and neither moves a task nor deletes a record afterwards."""
    slow = SlowBroker(monkeypatch)
    waiting = await wait_behind(system, slow)
    deleted = []
    monkeypatch.setattr(withdrawal, "delete_before", lambda *given: deleted.append(given))
    await system.pool.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name LIKE 'penstock task-sync gate %' AND datname = current_database()"
    )
    await wait_until(system.services["task-sync"].done, what="task-sync has ended")
    with pytest.raises(SessionLost):
        await system.task_sync.aclose()
    assert not slow.goes_on.is_set()
    slow.goes_on.set()
    attempts = await system.pool.fetch("SELECT DISTINCT attempt FROM task WHERE id = ANY ($1)", waiting)
    assert [row["attempt"] for row in attempts] == [0]
    assert not deleted
