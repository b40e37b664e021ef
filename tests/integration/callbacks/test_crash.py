"""Kills, stops, lost sessions and replicas of the callbacks service lose no callback."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web
from tests.support.callback_targets import Bench, Target, make_callback
from tests.support.waiting import in_time, wait_until

from penstock.errors import SessionLost

QUICK = {
    "callback_timeout_s": "1",
    "callback_schedule_s": "0.3,0.3,0.3,0.3,0.3,0.3",
}


async def test_kill_9_during_calls_loses_no_callback(platform: Bench, target: Target, tmp_path: Path) -> None:
    """O1, guarantees 5 and 6: two kills during calls lose no callback; each keeps its own id."""
    unblocked = asyncio.Event()

    async def answer(_request: web.Request) -> web.Response:
        await unblocked.wait()
        return web.Response()

    target.answer = answer
    callbacks = [make_callback(f"{target.url}/h{number % 20}", number) for number in range(1, 401)]
    await platform.enqueue(*callbacks)
    for kill in range(2):
        async with platform.process(tmp_path, callback_slots="60", **QUICK) as process:
            await wait_until(
                lambda kill=kill: len(target.calls) >= 60 + 60 * kill and target.under_way.total()
            )
            process.send_signal(signal.SIGKILL)
            await process.wait()
        await wait_until(lambda: not target.under_way.total())
    unblocked.set()
    called_before = Counter(target.ids())
    # A call that times out may be repeated. On a busy machine an answer may take over a second.
    unhurried = {**QUICK, "callback_timeout_s": "10"}
    async with platform.process(tmp_path, callback_slots="60", **unhurried):
        await wait_until(platform.all_delivered)
    ids = Counter(target.ids())
    assert set(ids) == {callback.id for callback in callbacks}
    # Only a call that a kill interrupted, or that timed out before, may be repeated.
    assert not [name for name, count in ids.items() if count > 1 and name not in called_before]
    rows = await platform.rows()
    assert all(rows[name]["attempt"] >= count for name, count in ids.items())


async def test_sigterm_requeues_callbacks_that_have_not_started(
    platform: Bench, target: Target, tmp_path: Path
) -> None:
    """O1: a stop waits for the calls in progress and requeues the other callbacks.

    The next process delivers them at once.
    """
    unblocked = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/slow":
            await unblocked.wait()
        return web.Response()

    target.answer = answer
    callbacks = [make_callback(f"{target.url}/slow", number) for number in range(1, 101)]
    async with platform.process(tmp_path) as process:
        # Only a requeued callback is due earlier than this.
        await platform.enqueue(*callbacks, due_in_s=1000)
        # The marker is the last record of the partition: its delivery shows that all are in flight.
        marker = make_callback(f"{target.url}/last", 101)
        await platform.enqueue(marker, publish=False)
        await platform.send(marker.encode(), callbacks[0].target.url.encode())
        await wait_until(lambda: target.under_way.total() == 8 and marker.id in target.ids())
        process.send_signal(signal.SIGTERM)
        await wait_until(lambda: _requeued(platform, 92))
        unblocked.set()
        assert await in_time(process.wait()) == 0
    assert await platform.states() == Counter(delivered=9, pending=92)
    async with platform.process(tmp_path):
        await wait_until(platform.all_delivered)
    assert Counter(target.ids()) == Counter(callback.id for callback in [*callbacks, marker])


async def _requeued(platform: Bench, count: int) -> bool:
    rows = await platform.rows()
    return sum(row["attempt"] == 0 and row["due_in_s"] < 100 for row in rows.values()) == count


async def test_a_lost_session_ends_the_process(platform: Bench, target: Target) -> None:
    """S7, O2: when the requeuer's lock is lost with its session, the service ends."""

    async def lose_session() -> None:
        async with platform.service():
            await wait_until(lambda: _count_lock_owners(platform))
            await platform.connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = 'penstock callbacks requeuer'"
            )
            await wait_until(lambda: _has_no_connections(platform))

    with pytest.raises(SessionLost):
        await lose_session()


async def _count_lock_owners(platform: Bench) -> int:
    return await platform.connection.fetchval(
        "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' "
        "AND a.datname = current_database() AND a.application_name = 'penstock callbacks requeuer' "
        "AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended('penstock.sweep.callbacks', 0)"
    )


async def _has_no_connections(platform: Bench) -> bool:
    return not await platform.connection.fetchval(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'penstock callbacks%'"
    )


async def test_replicas_share_the_work_and_make_each_call_once(
    platform: Bench, target: Target, tmp_path: Path
) -> None:
    """O3, C7b: a second replica joins, then the first stops; each callback is called once.

    Only one replica requeues at a time.
    """

    async def answer(_request: web.Request) -> web.Response:
        await asyncio.sleep(0.02)
        return web.Response()

    target.answer = answer
    batches = [
        [make_callback(f"{target.url}/h{number % 40}", number) for number in range(start, start + 600)]
        for start in (1, 1001, 2001)
    ]
    async with platform.process(tmp_path) as first:
        await platform.enqueue(*batches[0], due_in_s=1000)
        await wait_until(lambda: target.calls)
        async with platform.process(tmp_path):
            assert await _count_lock_owners(platform) == 1
            await platform.enqueue(*batches[1], due_in_s=1000)
            await wait_until(lambda: len(target.calls) > 700)
            first.send_signal(signal.SIGTERM)
            await platform.enqueue(*batches[2], due_in_s=1000)
            assert await in_time(first.wait()) == 0
            await wait_until(platform.all_delivered)
    assert Counter(target.ids()) == Counter(callback.id for batch in batches for callback in batch)


async def test_a_replica_requeues_the_retries_of_another_replica_on_time(
    platform: Bench, target: Target, tmp_path: Path
) -> None:
    """C6: a replica that schedules a retry wakes the replica that requeues."""
    has_failed = False

    async def answer(_request: web.Request) -> web.Response:
        nonlocal has_failed
        if not has_failed:
            has_failed = True
            return web.Response(status=500)
        return web.Response()

    async with platform.process(tmp_path, **QUICK) as owner:
        await wait_until(lambda: _count_lock_owners(platform))
        async with platform.process(tmp_path, **QUICK):
            # Several targets, so that the replica without the requeuer makes at least one call.
            for number in range(1, 9):
                has_failed = False
                target.answer = answer
                await platform.enqueue(make_callback(f"{target.url}/h{number}", number), due_in_s=1000)
                await wait_until(platform.all_delivered, what=f"retry {number}")
        assert owner.returncode is None
    assert len(target.calls) == 16
