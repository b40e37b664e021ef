"""The callbacks service killed, stopped, cut off and replicated: nothing lost, and one id for all attempts."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web
from aiokafka import TopicPartition
from tests.callback_targets import Bench, Target, owed
from tests.waiting import wait_until

from penstock.errors import SessionLost
from penstock.kafka.connection import admin_client, make_consumer, running
from penstock.kafka.declared import partitions_of
from penstock.kafka.topics import CALLBACKS
from penstock.settings import Kafka

QUICK = {
    "callback_timeout_s": "1",
    "callback_horizon_s": "2",
    "callback_republish_s": "2",
    "callback_schedule_s": "0.3,0.3,0.3,0.3,0.3,0.3",
}


@pytest.mark.slow
async def test_kill_9_with_calls_under_way_loses_nothing(
    platform: Bench, target: Target, tmp_path: Path
) -> None:
    """O1, guarantees 5 and 6: killed twice with calls under way, every callback is delivered, each under its own id."""
    release = asyncio.Event()

    async def answer(_request: web.Request) -> web.Response:
        await release.wait()
        return web.Response()

    target.answer = answer
    callbacks = [owed(f"{target.url}/h{number % 20}", number) for number in range(1, 401)]
    await platform.owe(*callbacks)
    for kill in range(2):
        async with platform.process(tmp_path, callback_slots="60", **QUICK) as process:
            await wait_until(
                lambda kill=kill: len(target.calls) >= 60 + 60 * kill and target.under_way.total()
            )
            process.send_signal(signal.SIGKILL)
            await process.wait()
        await wait_until(lambda: not target.under_way.total())
    release.set()
    before = Counter(target.ids())
    async with platform.process(tmp_path, callback_slots="60", **QUICK) as process:
        await wait_until(platform.all_delivered, timeout=60)
    ids = Counter(target.ids())
    assert set(ids) == {callback.id for callback in callbacks}
    # What came again was under way at a kill, or not answered in time: nothing else was called twice.
    assert not [name for name, count in ids.items() if count > 1 and name not in before]
    rows = await platform.rows()
    assert all(rows[name]["attempt"] >= count for name, count in ids.items())


async def test_sigterm_hands_back_what_has_not_begun(platform: Bench, target: Target, tmp_path: Path) -> None:
    """O1: a stop waits for the calls under way, hands the rest back, and the next process delivers them at once."""
    release = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/slow":
            await release.wait()
        return web.Response()

    target.answer = answer
    callbacks = [owed(f"{target.url}/slow", number) for number in range(1, 101)]
    async with platform.process(tmp_path) as process:
        # Not due for long: only those handed back are due earlier.
        await platform.owe(*callbacks, due_in_s=1000)
        # Last in the same partition: when it is delivered, all before it are in hand.
        last = owed(f"{target.url}/last", 101)
        await platform.owe(last, publish=False)
        await platform.send(last.encode(), callbacks[0].target.url.encode())
        await wait_until(lambda: target.under_way.total() == 8 and last.id in target.ids())
        process.send_signal(signal.SIGTERM)
        await wait_until(lambda: _handed_back(platform, 92))
        release.set()
        assert await asyncio.wait_for(process.wait(), 20) == 0
    assert await platform.states() == Counter(delivered=9, pending=92)
    async with platform.process(tmp_path):
        await wait_until(platform.all_delivered)
    assert Counter(target.ids()) == Counter(callback.id for callback in [*callbacks, last])


async def _handed_back(platform: Bench, count: int) -> bool:
    rows = await platform.rows()
    return sum(row["attempt"] == 0 and row["due_in_s"] < 100 for row in rows.values()) == count


async def test_a_lost_session_ends_the_process(platform: Bench, target: Target) -> None:
    """S7, O2: when the releaser's lock goes with its session, the service ends rather than release on."""

    async def lose_it() -> None:
        async with platform.service():
            await wait_until(lambda: _owners(platform))
            await platform.connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = 'penstock callbacks releaser'"
            )
            await wait_until(lambda: _no_service(platform))

    with pytest.raises(SessionLost):
        await lose_it()


async def _owners(platform: Bench) -> int:
    return await platform.connection.fetchval(
        "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' "
        "AND a.datname = current_database() AND a.application_name = 'penstock callbacks releaser'"
    )


async def _no_service(platform: Bench) -> bool:
    return not await platform.connection.fetchval(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'penstock callbacks%'"
    )


@pytest.mark.slow
async def test_replicas_share_the_work_and_call_once(platform: Bench, target: Target, tmp_path: Path) -> None:
    """O3, C7b: a second replica joins, the first is stopped: one releases at a time, and each callback is made once."""

    async def answer(_request: web.Request) -> web.Response:
        await asyncio.sleep(0.02)
        return web.Response()

    target.answer = answer
    batches = [
        [owed(f"{target.url}/h{number % 40}", number) for number in range(start, start + 600)]
        for start in (1, 1001, 2001)
    ]
    async with platform.process(tmp_path) as first:
        await platform.owe(*batches[0], due_in_s=1000)
        await wait_until(lambda: target.calls)
        async with platform.process(tmp_path):
            assert await _owners(platform) == 1
            await platform.owe(*batches[1], due_in_s=1000)
            await wait_until(lambda: len(target.calls) > 700)
            first.send_signal(signal.SIGTERM)
            await platform.owe(*batches[2], due_in_s=1000)
            assert await asyncio.wait_for(first.wait(), 30) == 0
            await wait_until(platform.all_delivered, timeout=60)
    assert Counter(target.ids()) == Counter(callback.id for batch in batches for callback in batch)


async def test_another_replicas_retry_is_not_late(platform: Bench, target: Target, tmp_path: Path) -> None:
    """C6: a retry scheduled by one replica is released on time by the other, which it wakes."""
    failed = False

    async def answer(_request: web.Request) -> web.Response:
        nonlocal failed
        if not failed:
            failed = True
            return web.Response(status=500)
        return web.Response()

    async with platform.process(tmp_path, **QUICK) as owner:
        await wait_until(lambda: _owners(platform))
        async with platform.process(tmp_path, **QUICK):
            # Whoever gets which partition, one of these is called by the replica that does not release.
            for number in range(1, 9):
                failed = False
                target.answer = answer
                await platform.owe(owed(f"{target.url}/h{number}", number), due_in_s=1000)
                await wait_until(platform.all_delivered, timeout=10, what=f"retry {number}")
        assert owner.returncode is None
    assert len(target.calls) == 16


async def test_records_are_acknowledged(platform: Bench, target: Target, tmp_path: Path) -> None:
    """W3 for callbacks: what was settled before a clean stop is not delivered again after it."""
    async with platform.process(tmp_path) as process:
        await platform.owe(*(owed(f"{target.url}/h{number}", number) for number in range(1, 51)))
        await wait_until(platform.all_delivered)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    assert await _committed(platform) == await _written(platform) > 0


async def _written(platform: Bench) -> int:
    async with running(make_consumer(platform.kafka, None)) as consumer:
        name = platform.kafka.prefix + CALLBACKS.name
        partitions = [TopicPartition(name, number) for number in range(partitions_of(Kafka(), CALLBACKS))]
        return sum((await consumer.end_offsets(partitions)).values())


async def _committed(platform: Bench) -> int:
    async with admin_client(platform.kafka) as client:
        offsets = await client.list_consumer_group_offsets(f"{platform.kafka.prefix}callbacks")
    name = platform.kafka.prefix + CALLBACKS.name
    return sum(meta.offset for tp, meta in offsets.items() if tp.topic == name and meta.offset > 0)
