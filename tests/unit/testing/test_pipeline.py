"""A pipeline in memory: its clock, what it shows of a task, and how it fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

import pytest
import uvloop

from penstock.errors import (
    InvalidRecord,
    NotFound,
    NotSucceeded,
    PenstockError,
    SettingsError,
    UnknownType,
)
from penstock.testing import NoEnd, Pipeline
from penstock.worker import (
    Backoff,
    Done,
    Fail,
    Next,
    RetryAfter,
    Wait,
    Worker,
    WorkerSettings,
    current_task,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def collected():
    """A pipeline that an earlier test has not closed gives the level of the root logger back when
    it is collected, which must not be in the middle of this test."""
    gc.collect()


@pytest.fixture
def worker():
    return Worker(WorkerSettings())


def handler(worker, name, **options):
    """Registers a handler whose outcomes are the items of a list; an exception is raised."""
    outcomes = []

    @worker.stage(name, **options)
    async def handle(task):
        outcome = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return outcomes


async def test_run_stage_runs_one_attempt_of_one_stage(worker):
    handler(worker, "order.reserve")[:] = [Next("charge", {"reserved": 5})]
    handler(worker, "order.charge")[:] = [ValueError("no"), Done("paid")]
    handler(worker, "order.ask")[:] = [Wait("approved", then="charge")]
    async with Pipeline(worker) as pipeline:
        run = await pipeline.run_stage("order.reserve", {"amount": 5})
        assert (run.outcomes, run.stage, run.context) == (["next"], "charge", {"reserved": 5})
        assert run.attempts[0].context == {"amount": 5}
        failed = await pipeline.run_stage("order.charge")
        assert (failed.outcomes, failed.attempts[0].error["message"]) == (["fail"], "no")
        await pipeline.step(days=1)
        assert (run.outcomes, failed.outcomes) == (["next"], ["fail"])
        assert await pipeline.resume(run)
        assert run.result == "paid"
        assert (await pipeline.run_stage("order.ask")).outcomes == ["wait"]
        done = await pipeline.run_stage("order.charge")
        assert done.result == "paid"
        with pytest.raises(NoEnd, match="'nowhere' of order"):
            await pipeline.run_stage("order.nowhere")
        with pytest.raises(SettingsError, match="type and stage"):
            await pipeline.run_stage("order")


async def test_back_off_moves_the_clock_and_costs_no_time(worker):
    handler(worker, "order.charge")[:] = [ValueError("no"), ValueError("no"), Done(1)]
    types = {"order": {"max_attempts": 3, "retry_base_ms": 60_000, "retry_factor": 2}}
    async with Pipeline(worker, types=types, now=NOW) as pipeline:
        run = await pipeline.run("order")
        assert run.outcomes == ["fail", "fail", "done"]
        assert pipeline.now == NOW + timedelta(minutes=3)
        assert [attempt.finished_at - NOW for attempt in run.attempts] == [
            timedelta(minutes=minutes) for minutes in (0, 1, 3)
        ]


async def test_the_jitter_follows_the_given_chance(worker):
    handler(worker, "order.charge")[:] = [ValueError("no"), Done(1)]
    types = {"order": {"retry_base_ms": 10_000, "retry_jitter": 0.5}}
    async with Pipeline(worker, types=types, now=NOW, chance=lambda: 0.5) as pipeline:
        await pipeline.run("order")
        assert pipeline.now == NOW + timedelta(seconds=7.5)


async def test_steps_stop_at_every_moment_in_between(worker):
    """A retry that is asked for each hour runs each hour, in one step of a day."""
    handler(worker, "poll.look")[:] = [RetryAfter(3600, "not yet")]
    async with Pipeline(worker, now=NOW) as pipeline:
        run = await pipeline.submit("poll")
        assert len(run.attempts) == 1
        await pipeline.step(minutes=59)
        assert len(run.attempts) == 1
        await pipeline.step(timedelta(minutes=1))
        assert len(run.attempts) == 2
        await pipeline.step(days=1)
        assert len(run.attempts) == 26
        assert pipeline.now == NOW + timedelta(hours=25)


async def test_time_does_not_go_back(worker):
    handler(worker, "order.charge")[:] = [Done()]
    async with Pipeline(worker) as pipeline:
        with pytest.raises(ValueError, match="does not go back"):
            await pipeline.step(seconds=-1)


async def test_submit_leaves_the_clock_alone_and_run_at_waits(worker):
    handler(worker, "order.charge")[:] = [Done(1)]
    async with Pipeline(worker, now=NOW) as pipeline:
        run = await pipeline.submit("order", run_at=NOW + timedelta(hours=2))
        assert run.state == "scheduled"
        await pipeline.step(hours=1)
        assert run.state == "scheduled"
        await pipeline.step(hours=1)
        assert run.result == 1


@pytest.mark.parametrize("sync", [False, True])
async def test_a_timeout_of_a_handler_follows_the_steps(worker, sync):
    blocker = threading.Event()

    async def asynchronous(task):
        await asyncio.sleep(1e6)

    def synchronous(task):
        blocker.wait()

    worker.stage("order.charge", timeout_s=600)(synchronous if sync else asynchronous)
    try:
        async with Pipeline(worker, types={"order": {"max_attempts": 1}}) as pipeline:
            run = await pipeline.submit("order")
            await pipeline.step(seconds=570)
            assert run.state == "running"
            await pipeline.step(seconds=31)
            assert run.error["kind"] == "Timeout"
    finally:
        blocker.set()


async def test_a_sleep_of_a_handler_follows_the_steps(worker):
    times = []

    @worker.stage("order.charge", timeout_s=10_000)
    async def charge(task):
        for _ in range(3):
            await asyncio.sleep(600)
            times.append(pipeline.now)
        return Done()

    async with Pipeline(worker, now=NOW) as pipeline:
        run = await pipeline.submit("order")
        await pipeline.step(hours=1)
        assert run.ended
        assert [(each - NOW).total_seconds() for each in times] == pytest.approx([600, 1200, 1800], abs=60)


async def test_run_moves_the_clock_while_all_handlers_sleep(worker):
    @worker.stage("order.charge", timeout_s=3600)
    async def charge(task):
        if task.attempt == 0:
            await asyncio.sleep(1e6)
        await asyncio.sleep(1800)
        return Done()

    async with Pipeline(worker, types={"order": {"retry_base_ms": 0}}, now=NOW) as pipeline:
        run = await pipeline.run("order")
        assert run.outcomes == ["fail", "done"]
        assert run.attempts[0].error["kind"] == "Timeout"
        assert (pipeline.now - NOW).total_seconds() == pytest.approx(5400, abs=60)


async def test_a_handler_that_polls_has_real_time(worker):
    """Otherwise its patience of ten seconds would end before a thread of milliseconds."""
    done = threading.Event()

    @worker.stage("order.charge")
    async def charge(task):
        threading.Timer(0.05, done.set).start()
        for _ in range(1_000):
            if done.is_set():
                return Done()
            await asyncio.sleep(0.01)
        return Fail("too late", permanent=True)

    async with Pipeline(worker, now=NOW) as pipeline:
        run = await pipeline.run("order")
        assert run.state == "succeeded"
        assert pipeline.now - NOW < timedelta(seconds=5)


async def test_settle_waits_for_handlers_but_not_for_the_test(worker):
    opened = asyncio.Event()

    @worker.stage("order.charge")
    async def charge(task):
        await opened.wait()
        return Done()

    async with Pipeline(worker) as pipeline:
        run = await pipeline.submit("order")
        assert run.state == "running"
        opened.set()
        await pipeline.settle()
        assert run.ended


async def test_run_waits_for_a_handler_that_waits_for_another_task(worker):
    opened = asyncio.Event()

    @worker.stage("order.charge")
    async def charge(task):
        if task.context == "second":
            opened.set()
        else:
            await opened.wait()
        return Done()

    async with Pipeline(worker) as pipeline:
        first, second = await asyncio.gather(pipeline.run("order", "first"), pipeline.run("order", "second"))
        assert first.ended
        assert second.ended


async def test_a_failed_run_says_why_in_full(worker):
    @worker.stage("order.charge", permanent=ValueError)
    def charge(task):
        raise ValueError("no such card")

    async with Pipeline(worker) as pipeline:
        run = await pipeline.run("order")
        assert run.state == "failed"
        assert run.error["message"] == "no such card"
        assert len(run.attempts) == 1
        assert repr(run) == "<Run order 1: failed in 'charge', ValueError: no such card>"
        with pytest.raises(NotSucceeded, match=r"(?s)'charge' of order: ValueError: no such card\nTraceback"):
            _ = run.result


async def test_logs_prints_and_progress_are_shown_by_attempt(worker):
    go_on = asyncio.Event()

    @worker.stage("order.charge")
    async def charge(task):
        task.log.info("charging", amount=5)
        print("printed s3cr3t-value")
        logging.getLogger("shop").info("logged %s", task.attempt)
        logging.getLogger("shop").debug("too detailed")
        current_task().progress(0.5, "half")
        if task.attempt:
            await go_on.wait()
        return Done() if task.attempt else Fail("later")

    worker.redact("s3cr3t-value")
    async with Pipeline(worker) as pipeline:
        run = await pipeline.submit("order")
        await pipeline.step(seconds=1)
        # The second attempt still runs.
        expected = [
            ("task", "charging"),
            ("stdout", "printed [redacted]"),
            ("shop", "logged 1"),
            ("progress", "50 %, half"),
        ]
        assert [(line.source, line.text) for line in run.log][-4:] == expected
        assert [report.fraction for report in run.progress] == [0.5, 0.5]
        go_on.set()
        await pipeline.settle()
        first, second = run.attempts
        assert [(line.source, line.text) for line in second.log] == expected
        assert second.log[0].fields == {"amount": 5}
        assert "Fail: later" in first.log[-1].text
        assert [report.message for report in first.progress] == ["half"]


async def test_a_stage_has_its_own_delays_middleware_and_providers(worker):
    seen = []

    @worker.middleware
    async def around(task, call_next):
        seen.append("before")
        return await call_next(task)

    @worker.provide
    async def connection():
        yield "opened"
        seen.append("closed")

    @worker.stage("order.charge", backoff=Backoff(base_s=3600, max_s=3600), max_attempts=2)
    async def charge(task, connection):
        seen.append(connection)
        return Done() if task.attempt else Fail("no")

    async with Pipeline(worker, now=NOW) as pipeline:
        run = await pipeline.run("order")
        assert run.outcomes == ["fail", "done"]
        assert pipeline.now == NOW + timedelta(hours=1)
        assert seen == ["before", "opened", "closed"] * 2


async def test_a_stage_with_a_concurrency_runs_so_many_at_once(worker):
    running = most = 0

    @worker.stage("order.charge", concurrency=2)
    async def charge(task):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Done()

    async with Pipeline(worker) as pipeline:
        at = pipeline.now + timedelta(hours=1)
        runs = [await pipeline.submit("order", run_at=at) for _ in range(20)]
        for run in runs:
            await pipeline.until(run, lambda run: run.ended)
        assert most == 2


async def test_the_root_logger_is_as_before(worker):
    handler(worker, "order.charge")[:] = [Done()]
    root = logging.getLogger()
    before = (root.level, list(root.handlers), sys.stdout)
    async with Pipeline(worker) as pipeline:
        await pipeline.run("order")
    assert (root.level, list(root.handlers), sys.stdout) == before


async def test_a_stage_without_a_handler_raises_and_names_it(worker):
    handler(worker, "order.reserve")[:] = [Next("chrage")]
    handler(worker, "order.charge")[:] = [Done()]
    async with Pipeline(worker) as pipeline:
        with pytest.raises(NoEnd, match="no handler for stage 'chrage' of order; it has: charge, reserve"):
            await pipeline.run("order")


@pytest.mark.parametrize("delay_s", [0, 60])
async def test_a_task_that_asks_for_retries_without_end_raises(worker, delay_s):
    handler(worker, "poll.look")[:] = [RetryAfter(delay_s)]
    async with Pipeline(worker) as pipeline:
        with pytest.raises(NoEnd, match=r"1,000 attempts.*, the last in 'look'"):
            await pipeline.run("poll")


async def test_submissions_are_checked_as_by_the_gateway(worker):
    handler(worker, "order.charge")[:] = [Done()]
    async with Pipeline(worker) as pipeline:
        with pytest.raises(UnknownType) as unknown:
            await pipeline.run("ordre")
        assert unknown.value.pointer == "/type"
        with pytest.raises(InvalidRecord) as invalid:
            await pipeline.run("order", labels={"n": 5})
        assert invalid.value.pointer == "/labels/n"
        with pytest.raises(TypeError):
            await pipeline.run("order", stagee="charge")
        with pytest.raises(NotFound):
            await pipeline.get(7)
    with pytest.raises(InvalidRecord) as wrong:
        Pipeline(worker, types={"order": {"lease_ms": 1}})
    assert wrong.value.pointer == "/lease_ms"


async def test_a_lost_worker_costs_an_attempt_when_its_lease_is_over(worker):
    @worker.stage("order.charge")
    async def charge(task):
        if task.attempt == 0:
            await asyncio.sleep(1e6)
        return Done(task.tries)

    async with Pipeline(worker, types={"order": {"retry_base_ms": 0}}) as pipeline:
        run = await pipeline.submit("order")
        await pipeline.lose_worker()
        await pipeline.step(seconds=299)
        assert run.state == "running"
        await pipeline.step(seconds=1)
        assert run.outcomes == ["expired", "done"]
        assert run.result == 1
        first, second = run.attempts
        assert first.worker != second.worker
        assert "no heartbeat" in first.error["message"]


async def test_run_goes_on_after_a_worker_that_dies_in_its_handler(worker):
    @worker.stage("order.charge")
    async def charge(task):
        if task.tries < 2:
            await pipeline.lose_worker()
            await asyncio.sleep(1e6)
        return Done(task.tries)

    async with Pipeline(worker) as pipeline:
        run = await pipeline.run("order")
        assert (run.result, run.outcomes) == (2, ["expired", "expired", "done"])
        assert pipeline.now >= NOW + timedelta(seconds=600)


async def test_a_task_that_kills_its_workers_is_quarantined(worker):
    @worker.stage("order.charge")
    async def charge(task):
        await pipeline.lose_worker()
        await asyncio.sleep(1e6)

    async with Pipeline(worker, types={"order": {"max_attempts": 10, "max_losses": 3}}) as pipeline:
        run = await pipeline.run("order")
        assert (run.state, run.outcomes) == ("quarantined", ["expired"] * 3)


@pytest.mark.parametrize(
    ("late_results", "outcomes"), [("accept", ["expired", "done"]), ("refuse", ["expired"])]
)
async def test_a_late_result_counts_while_its_stage_is_not_finished(worker, late_results, outcomes):
    finish = asyncio.Event()
    ran = []

    @worker.stage("order.charge")
    async def charge(task):
        ran.append(task.attempt)
        if task.attempt == 0:
            await finish.wait()
        else:
            await asyncio.sleep(1e6)
        return Done(task.attempt)

    types = {"order": {"late_results": late_results, "retry_base_ms": 0}}
    async with Pipeline(worker, types=types) as pipeline:
        run = await pipeline.submit("order")
        await pipeline.cut_off_worker()
        finish.set()
        await pipeline.step(seconds=299)
        assert run.state == "running"
        await pipeline.step(seconds=1)
        assert ran == [0, 1]
        await pipeline.reconnect_worker()
        assert run.outcomes == outcomes
        assert run.ended is (late_results == "accept")


async def test_connections_open_before_the_first_handler_and_close_with_the_pipeline(worker):
    seen = []
    worker.on_start(lambda: seen.append("start"))
    worker.on_stop(lambda: seen.append("stop"))

    @worker.stage("order.charge")
    async def charge(task):
        seen.append("handler")
        return Done()

    async with Pipeline(worker) as pipeline:
        await pipeline.run("order")
    assert seen == ["start", "handler", "stop"]
    with pytest.raises(PenstockError, match="closed"):
        await pipeline.run("order")


async def test_priorities_decide_who_goes_first(worker):
    begun = []

    @worker.stage("order.charge")
    async def charge(task):
        begun.append(task.context)
        return Done()

    async with Pipeline(worker, now=NOW) as pipeline:
        at = NOW + timedelta(hours=1)
        for level in ("LOW", "HIGHEST", "MEDIUM"):
            await pipeline.submit("order", level, priority=level, run_at=at)
        await pipeline.step(hours=1)
    assert begun == ["HIGHEST", "MEDIUM", "LOW"]


async def test_until_runs_a_task_up_to_a_condition(worker):
    handler(worker, "order.reserve")[:] = [Next("charge", delay_s=3600)]
    handler(worker, "order.charge")[:] = [Done()]
    async with Pipeline(worker) as pipeline:
        run = await pipeline.submit("order", run_at=pipeline.now + timedelta(hours=1))
        await pipeline.until(run, lambda run: run.stage == "charge")
        assert run.state == "scheduled"
        with pytest.raises(NoEnd, match="nothing more happens"):
            await pipeline.until(run, lambda run: run.state == "failed")


def test_a_pipeline_whose_loop_is_closed_already_leaves_the_process_as_it_was(worker):
    handler(worker, "order.charge")[:] = [Done(1)]
    root = logging.getLogger()
    before = (root.level, list(root.handlers), sys.stdout)

    async def main():
        pipeline = Pipeline(worker)
        await pipeline.run("order")
        return pipeline

    asyncio.run(main()).close_with_loop()
    assert (root.level, list(root.handlers), sys.stdout) == before


def test_the_loop_of_uvloop_can_be_used(worker):
    """Its time cannot jump, so that of handlers is real; that of the platform is stepped."""
    handler(worker, "order.charge")[:] = [RetryAfter(3600), Done(1)]

    async def main():
        async with Pipeline(worker) as pipeline:
            run = await pipeline.submit("order")
            await pipeline.step(hours=1)
            return run.result

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == 1


def test_the_loop_is_restored_unless_its_time_has_jumped(worker):
    handler(worker, "order.charge")[:] = [Done(1)]

    async def main():
        loop = asyncio.get_running_loop()
        async with Pipeline(worker) as pipeline:
            await pipeline.run("order")
            assert "time" in vars(loop)
        assert "time" not in vars(loop)

    asyncio.run(main())


def test_the_plugin_imports_nothing_before_a_fixture_is_asked_for():
    """The fixtures are in each run of pytest of each project that has the package."""
    code = "import sys, penstock.pytest_plugin; print([m for m in sys.modules if m.startswith('penstock.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["['penstock.pytest_plugin']"]


def exits():
    sys.exit(0)


@pytest.mark.parametrize("loops", [asyncio.SelectorEventLoop, uvloop.Loop], ids=["asyncio", "uvloop"])
def test_an_exit_of_a_task_of_a_handler_fails_its_attempt(loops):
    """W1: as in a worker process. It would end the test, and with it all others of a script."""
    worker = Worker(worker_gateway="http://gateway.example")

    async def child():
        exits()

    @worker.stage("t.group")
    async def group(task):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(child())

    @worker.stage("t.callback")
    async def callback(task):
        asyncio.get_running_loop().call_soon(exits)
        await asyncio.sleep(0)
        return Done()

    async def work():
        async with Pipeline(worker, types={"t": {"max_attempts": 1}}) as pipeline:
            failed = await pipeline.run("t")
            succeeded = await pipeline.run("t", stage="callback")
            # An exit of the test itself is none of a handler.
            own = asyncio.get_running_loop().create_task(child())
            with pytest.raises(SystemExit):
                await own
        assert "call_soon" not in vars(asyncio.get_running_loop())
        return failed.error["kind"], succeeded.state

    with asyncio.Runner(loop_factory=loops) as runner:
        task = runner.get_loop().create_task(work())
        with pytest.raises(SystemExit):
            runner.get_loop().run_until_complete(task)
        assert runner.get_loop().run_until_complete(task) == ("SystemExit", "succeeded")
