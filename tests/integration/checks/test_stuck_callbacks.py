"""`penstock check` finds stuck callbacks: published repeatedly, and never started."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from tests.support.callback_targets import bench, make_callback
from tests.support.services import read
from tests.support.waiting import wait_until

from penstock.checks import stuck_callbacks
from penstock.checks.app import Rule, check
from penstock.checks.rule import System
from penstock.kafka.processing.outbox import redeliver
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import PLATFORM
from penstock.postgres import callbacks
from penstock.postgres.session import open_session
from penstock.settings import Platform

NOWHERE = "http://127.0.0.1:9/x"


@pytest.fixture(autouse=True)
def _short_skew(monkeypatch):
    monkeypatch.setattr(stuck_callbacks, "SKEW_S", 0.05)
    monkeypatch.setattr(stuck_callbacks, "COMMIT_S", 0.0)


@pytest.fixture
async def platform(kafka_servers, prefix, database):
    async with bench(kafka_servers, prefix, database) as found:
        await create_topics(found.kafka, PLATFORM)
        yield found


def run_check(platform, **options):
    settings = Platform(kafka=platform.kafka.kafka, prefix=platform.kafka.prefix, postgres=platform.postgres)
    return check(settings, **options)


@asynccontextmanager
async def requeuing(platform):
    """Publishes due callbacks, as the requeuer does, at each call."""
    async with open_session(platform.postgres, "requeuer") as session:

        async def requeue(times):
            for _ in range(times):
                await platform.connection.execute("UPDATE callback SET due_at = now() WHERE due_at > now()")
                rows = await callbacks.take_due(session, 100, horizon_s=60.0)
                await redeliver(platform.producer, platform.kafka, rows)

        yield requeue


async def publication_columns(platform):
    return await platform.connection.fetchrow(
        "SELECT published, published_at IS NOT NULL AS is_published, waits_since IS NOT NULL AS waits FROM callback"
    )


async def test_a_callback_whose_records_are_rejected_is_stuck(platform, target, monkeypatch):
    """O2b: a callback whose records are always rejected is stuck.

    The service calls its target for other callbacks meanwhile.
    """
    # The id 0 breaks the contract, so the service rejects the record.
    stuck, delivered = make_callback(f"{target.url}/x", 1, task_id=0), make_callback(f"{target.url}/x", 2)
    await platform.enqueue(stuck, delivered, publish=False, due_in_s=0.0)
    monkeypatch.setattr("penstock.callbacks.settings.REPUBLISH", 0.1)
    monkeypatch.setattr("penstock.callbacks.settings.LEAST_REPUBLISH_S", 0.0)
    async with platform.service():

        async def find_offenders():
            return (await run_check(platform)).offenders

        [offender] = await wait_until(find_offenders)
        assert (offender.rule, offender.what, offender.id) == (Rule.UNBEGUN, "callback", stuck.id)
        assert "times and read, but no attempt was claimed" in offender.lacks
        assert f"{platform.kafka.prefix}callbacks.rejected" in offender.lacks
    assert target.ids() == [delivered.id]


async def test_a_callback_that_waits_for_a_slot_is_not_stuck(platform, target, monkeypatch):
    """The last of its many records is not committed, because the callback waits for a slot."""
    monkeypatch.setattr("penstock.callbacks.settings.LONGEST_WAIT_S", 100.0)
    monkeypatch.setattr("penstock.callbacks.settings.REPUBLISH", 0.003)
    monkeypatch.setattr("penstock.callbacks.settings.LEAST_REPUBLISH_S", 0.0)
    unblocked = asyncio.Event()

    async def answer(_request):
        await unblocked.wait()
        return web.Response()

    target.answer = answer
    await platform.enqueue(*(make_callback(f"{target.url}/x", number) for number in (1, 2, 3)))
    settings = {
        "callback_target_slots": 1,
        "callback_timeout_s": 60.0,
        "callback_slow_s": 60.0,
        "stall_timeout_s": 300.0,
    }
    async with platform.service(**settings):
        await platform.connection.execute("UPDATE callback SET due_at = now() WHERE attempt = 0")
        await callbacks.notify_due(platform.connection, 0.0)

        async def published_often():
            return await platform.connection.fetchval(
                "SELECT count(*) FROM callback WHERE published > $1", 2 * stuck_callbacks.LEAST_PUBLICATIONS
            )

        await wait_until(published_often)
        assert (await run_check(platform)).clean
        unblocked.set()
        await wait_until(platform.all_delivered)
        assert not await platform.connection.fetchval("SELECT max(published) FROM callback")


async def test_a_callback_whose_records_are_unread_is_not_stuck(platform):
    """Lag makes no callback stuck; another rule finds readers without progress."""
    await platform.enqueue(make_callback(NOWHERE), publish=False)
    async with requeuing(platform) as requeue:
        await requeue(stuck_callbacks.LEAST_PUBLICATIONS)
    assert (await run_check(platform)).clean


async def test_a_callback_with_few_publications_is_not_stuck(platform, monkeypatch):
    """Fewer than `LEAST_PUBLICATIONS` publications make no callback stuck."""
    await platform.enqueue(make_callback(NOWHERE), publish=False)
    async with requeuing(platform) as requeue:
        await requeue(stuck_callbacks.LEAST_PUBLICATIONS - 1)
        await ignore_unread_records(platform, monkeypatch)
        assert (await run_check(platform)).clean
        await requeue(1)
    assert (await run_check(platform)).counts == {Rule.UNBEGUN: 1}


async def ignore_unread_records(platform, monkeypatch):
    """Makes the check see no unread record."""

    async def no_unread(*_arguments):
        return {}

    monkeypatch.setattr("penstock.checks.kafka.Topics.unread", no_unread)


@pytest.mark.parametrize(
    ("outcome", "waits"),
    [
        (lambda pool: callbacks.claim(pool, [(make_callback(NOWHERE).id, 0)], horizon_s=60.0), False),
        (
            lambda pool: callbacks.claim_in_order(pool, [(make_callback(NOWHERE).id, 0)], horizon_s=60.0),
            False,
        ),
        (lambda pool: callbacks.hold(pool, [(make_callback(NOWHERE).id, 0)], [None]), False),
        (lambda pool: callbacks.postpone(pool, [(make_callback(NOWHERE).id, 0)], [5.0], [None]), True),
    ],
    ids=["claimed", "claimed in order", "held", "postponed"],
)
async def test_each_outcome_of_a_record_resets_the_count(platform, outcome, waits):
    """A claim, a hold and a postponement reset the count of publications.

    A postponed callback keeps the time since when it waits.
    """
    await platform.enqueue(make_callback(NOWHERE), publish=False)
    async with requeuing(platform) as requeue:
        await requeue(2)
        assert tuple(await publication_columns(platform)) == (2, True, True)
        await outcome(platform.connection)
        assert tuple(await publication_columns(platform)) == (0, True, waits)


async def test_a_callback_that_waits_for_its_predecessor_is_reset(platform):
    """C9: waiting for an earlier callback resets the count and the waiting time."""
    first, second = (make_callback(NOWHERE, n, task_id=1, ordered=True) for n in (1, 2))
    await platform.enqueue(first, second, publish=False)
    async with requeuing(platform) as requeue:
        await requeue(2)
    assert not (await callbacks.claim_in_order(platform.connection, [(second.id, 0)], horizon_s=60.0)).granted
    rows = await platform.rows()
    assert [(rows[c.id]["published"], rows[c.id]["waits_since"] is None) for c in (first, second)] == [
        (2, False),
        (0, True),
    ]


async def test_publications_before_a_pause_do_not_count(platform, monkeypatch):
    """Publications without a claim before a pause of the service are not counted after it."""
    await platform.enqueue(make_callback(NOWHERE), publish=False)
    await ignore_unread_records(platform, monkeypatch)
    monkeypatch.setattr(stuck_callbacks, "UNCALLED_S", 600.0)
    async with requeuing(platform) as requeue:
        await requeue(stuck_callbacks.LEAST_PUBLICATIONS)
        await platform.connection.execute(
            "UPDATE callback SET published = 4, due_at = now() - interval '6 minutes', waits_since = now() - interval '1 hour'"
        )
        report = await run_check(platform)
        assert report.counts == {Rule.UNDELIVERED: 1}, "during the pause the callback is undelivered"
        await requeue(1)
    assert tuple(await publication_columns(platform)) == (1, True, True)
    assert (await run_check(platform)).clean


async def enqueue_postponed(platform, *, called, rate=None):
    """Enqueues two callbacks postponed for an hour; their target was called `called` ago."""
    await platform.enqueue(make_callback(NOWHERE, 1), make_callback(NOWHERE, 2), publish=False, due_in_s=30.0)
    await platform.connection.execute("UPDATE callback SET waits_since = now() - interval '1 hour'")
    if called is not None:
        await platform.connection.execute(
            "INSERT INTO callback_target (url, called_at, rate) VALUES ($1, now() - $2::text::interval, $3)",
            NOWHERE,
            called,
            rate,
        )


@pytest.mark.parametrize(
    ("called", "rate"),
    [(None, None), ("31 minutes", None), ("59 minutes", 0.001)],
    ids=["never", "long ago", "by rate"],
)
async def test_callbacks_of_a_target_without_calls_are_stuck(platform, called, rate):
    """O2b: the check names the first of the postponed callbacks and counts all of them."""
    await enqueue_postponed(platform, called=called, rate=rate)
    report = await run_check(platform)
    assert report.counts == {Rule.UNBEGUN: 2}
    [offender] = report.offenders
    assert offender.id == make_callback(NOWHERE, 1).id
    assert "and 1 more are published" in offender.lacks
    assert "that target was not called" in offender.lacks


@pytest.mark.parametrize(
    ("called", "rate"),
    [("1 second", None), ("29 minutes", None), ("59 minutes", 0.0005)],
    ids=["just now", "lately", "by rate"],
)
async def test_callbacks_of_a_called_target_are_not_stuck(platform, called, rate):
    """Callbacks of a busy or limited target may wait while the target is called at its rate."""
    await enqueue_postponed(platform, called=called, rate=rate)
    assert (await run_check(platform)).clean


async def test_callbacks_behind_old_records_are_not_stuck(platform, monkeypatch):
    """A service that catches up with a backlog will reach the target."""
    await enqueue_postponed(platform, called="31 minutes")
    await platform.publish(make_callback(NOWHERE))
    monkeypatch.setattr(stuck_callbacks, "UNCALLED_S", 0.0)
    assert (await run_check(platform)).clean


async def test_repair_publishes_stuck_callbacks_on_the_diverted_topic(platform, monkeypatch):
    """O2b: repair makes a stuck callback due at once on the diverted path, in the same attempt."""
    await platform.enqueue(make_callback(NOWHERE), publish=False)
    async with requeuing(platform) as requeue:
        await requeue(stuck_callbacks.LEAST_PUBLICATIONS)
        with monkeypatch.context() as patched:
            await ignore_unread_records(platform, patched)
            report = await run_check(platform, repair=True)
        assert (report.counts, report.repaired, report.remaining) == (
            {Rule.UNBEGUN: 1},
            {Rule.UNBEGUN: 1},
            {},
        )
        await requeue(1)
    [record] = await read(platform.kafka.kafka, f"{platform.kafka.prefix}callbacks.diverted")
    assert (record["id"], record["attempt"]) == (make_callback(NOWHERE).id, 0)
    assert tuple(await publication_columns(platform)) == (1, True, True)


async def test_repair_delivers_callbacks_of_a_target_without_calls(platform, target):
    """O2b: repair notifies the requeuer, and the diverted path delivers the callbacks."""
    await platform.enqueue(
        *(make_callback(f"{target.url}/x", number) for number in (1, 2, 3)), publish=False, due_in_s=100.0
    )
    await platform.connection.execute("UPDATE callback SET waits_since = now() - interval '1 hour'")
    async with platform.service():
        report = await run_check(platform, repair=True)
        assert (report.counts, report.repaired, report.remaining) == (
            {Rule.UNBEGUN: 3},
            {Rule.UNBEGUN: 3},
            {},
        )
        await wait_until(platform.all_delivered)


async def test_repair_leaves_callbacks_that_start_after_the_check(platform):
    """Repair compares the attempt and its count of publications with those of the check."""
    await platform.enqueue(make_callback(NOWHERE), publish=False)
    async with requeuing(platform) as requeue:
        await requeue(stuck_callbacks.LEAST_PUBLICATIONS)
    system = System(platform.settings(), platform.connection, None, 1)
    found = stuck_callbacks.StuckCallbacks(system)
    found._unclaimed = [(make_callback(NOWHERE).id, 0, stuck_callbacks.LEAST_PUBLICATIONS)]
    await callbacks.claim(platform.connection, [(make_callback(NOWHERE).id, 0)], horizon_s=60.0)
    assert await found.repair(None) == 0
    assert not await platform.connection.fetchval("SELECT diverted FROM callback")
