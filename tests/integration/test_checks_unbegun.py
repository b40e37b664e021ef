"""`penstock check` and callbacks that are published again and again without being begun: found when that is so, only then."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from tests.callback_targets import bench, owed, target_server
from tests.running import read
from tests.waiting import wait_until

from penstock.checks import moving, unbegun
from penstock.checks.app import Rule, check
from penstock.kafka.connection import create_topics
from penstock.kafka.outbox import redeliver
from penstock.kafka.topics import PLATFORM
from penstock.postgres import callbacks
from penstock.postgres.session import open_session
from penstock.settings import Platform

NOWHERE = "http://127.0.0.1:9/x"


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(moving, "SETTLE_S", 1.0)
    monkeypatch.setattr(moving, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(unbegun, "SKEW_S", 0.05)
    monkeypatch.setattr(unbegun, "COMMIT_S", 0.0)


@pytest.fixture
async def platform(kafka_servers, prefix, database):
    async with bench(kafka_servers, prefix, database) as found:
        await create_topics(found.kafka, PLATFORM)
        yield found


@pytest.fixture
async def target():
    async with target_server() as found:
        yield found


def checked(platform, **options):
    settings = Platform(kafka=platform.kafka.kafka, prefix=platform.kafka.prefix, postgres=platform.postgres)
    return check(settings, **options)


@asynccontextmanager
async def releasing(platform):
    """What the releaser does, each time that it is told to."""
    async with open_session(platform.postgres, "releaser") as session:

        async def release(times):
            for _ in range(times):
                await platform.connection.execute("UPDATE callback SET due_at = now() WHERE due_at > now()")
                rows = await callbacks.due(session, 100, horizon_s=60.0)
                await redeliver(platform.producer, platform.kafka, rows)

        yield release


async def columns(platform):
    return await platform.connection.fetchrow(
        "SELECT published, published_at IS NOT NULL AS told, waits_since IS NOT NULL AS waits FROM callback"
    )


async def test_one_whose_record_is_rejected_each_time(platform, target):
    """O2b: nothing ever comes of it, and it is due again each time; its target is called for others meanwhile."""
    # No such task: its records break their contract.
    lost, well = owed(f"{target.url}/x", 1, task_id=0), owed(f"{target.url}/x", 2)
    await platform.owe(lost, well, publish=False, due_in_s=0.0)
    async with platform.service(callback_republish_s=0.5):

        async def found():
            return (await checked(platform)).offenders

        [offender] = await wait_until(found, timeout=60)
        assert (offender.rule, offender.what, offender.id) == (Rule.UNBEGUN, "callback", lost.id)
        assert "times on end and read, and nothing came of it" in offender.lacks
        assert f"{platform.kafka.prefix}callbacks.rejected" in offender.lacks
    assert target.ids() == [well.id]


async def test_one_that_waits_for_its_targets_turn_is_none(platform, target):
    """However often its record is written meanwhile: the last one is not committed, because it waits in line."""
    free = asyncio.Event()

    async def hang(_request):
        await free.wait()
        return web.Response()

    target.answer = hang
    await platform.owe(*(owed(f"{target.url}/x", number) for number in (1, 2, 3)))
    settings = {
        "callback_republish_s": 0.2,
        "callback_target_slots": 1,
        "callback_timeout_s": 60.0,
        "callback_horizon_s": 120.0,
        "callback_slow_s": 60.0,
        "callback_patience_s": 100.0,
        "stall_timeout_s": 300.0,
    }
    async with platform.service(**settings):
        await platform.connection.execute("UPDATE callback SET due_at = now() WHERE attempt = 0")
        await callbacks.announce(platform.connection, 0.0)

        async def often():
            return await platform.connection.fetchval(
                "SELECT count(*) FROM callback WHERE published > $1", 2 * unbegun.OFTEN
            )

        await wait_until(often, timeout=60)
        assert (await checked(platform)).clean
        free.set()
        await wait_until(platform.all_delivered, timeout=60)
        assert not await platform.connection.fetchval("SELECT max(published) FROM callback")


async def test_one_that_nobody_has_read_yet_is_none(platform):
    """Lag is no limbo, and readers that stand still are another rule's."""
    await platform.owe(owed(NOWHERE), publish=False)
    async with releasing(platform) as release:
        await release(unbegun.OFTEN)
    assert (await checked(platform)).clean


async def test_fewer_publications_than_that_are_none(platform, monkeypatch):
    """The bound: a Kafka that did not take a few of them is not taken for it."""
    await platform.owe(owed(NOWHERE), publish=False)
    async with releasing(platform) as release:
        await release(unbegun.OFTEN - 1)
        await forget_records(platform, monkeypatch)
        assert (await checked(platform)).clean
        await release(1)
    assert (await checked(platform)).counts == {Rule.UNBEGUN: 1}


async def forget_records(platform, monkeypatch):
    """As if everything were read."""

    async def nothing(*_arguments):
        return {}

    monkeypatch.setattr("penstock.checks.kafka.Topics.unread", nothing)


@pytest.mark.parametrize(
    ("answer", "waits"),
    [
        (lambda pool: callbacks.begin(pool, [(owed(NOWHERE).id, 0)], horizon_s=60.0), False),
        (lambda pool: callbacks.begin_in_order(pool, [(owed(NOWHERE).id, 0)], horizon_s=60.0), False),
        (lambda pool: callbacks.hold(pool, [(owed(NOWHERE).id, 0)], [None]), False),
        (lambda pool: callbacks.postpone(pool, [(owed(NOWHERE).id, 0)], [5.0], [None]), True),
    ],
    ids=["begun", "begun in order", "held", "put back"],
)
async def test_whatever_comes_of_a_record_answers_it(platform, answer, waits):
    """Begun, put back, held: it is counted anew; what is put back goes on waiting for its target to be called."""
    await platform.owe(owed(NOWHERE), publish=False)
    async with releasing(platform) as release:
        await release(2)
        assert tuple(await columns(platform)) == (2, True, True)
        await answer(platform.connection)
        assert tuple(await columns(platform)) == (0, True, waits)


async def test_one_that_waits_for_an_earlier_one_is_answered(platform):
    """C9: it waits in order, for as long as that takes."""
    first, second = (owed(NOWHERE, n, task_id=1, ordered=True) for n in (1, 2))
    await platform.owe(first, second, publish=False)
    async with releasing(platform) as release:
        await release(2)
    assert not (await callbacks.begin_in_order(platform.connection, [(second.id, 0)], horizon_s=60.0)).turns
    rows = await platform.rows()
    assert [(rows[c.id]["published"], rows[c.id]["waits_since"] is None) for c in (first, second)] == [
        (2, False),
        (0, True),
    ]


async def test_nothing_is_counted_of_the_time_when_nobody_released(platform, monkeypatch):
    """Just restarted: what was published in vain before a pause of the service says nothing about it now."""
    await platform.owe(owed(NOWHERE), publish=False)
    await forget_records(platform, monkeypatch)
    monkeypatch.setattr(unbegun, "LONG_S", 600.0)
    async with releasing(platform) as release:
        await release(unbegun.OFTEN)
        await platform.connection.execute(
            "UPDATE callback SET published = 4, due_at = now() - interval '6 minutes', waits_since = now() - interval '1 hour'"
        )
        report = await checked(platform)
        assert report.counts == {Rule.UNDELIVERED: 1}, "before the service is back, that is what it lacks"
        await release(1)
    assert tuple(await columns(platform)) == (1, True, True)
    assert (await checked(platform)).clean


async def uncalled(platform, *, called, rate=None):
    """Two that have been put back for an hour, and a target that was called `called` ago."""
    await platform.owe(owed(NOWHERE, 1), owed(NOWHERE, 2), publish=False, due_in_s=30.0)
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
async def test_those_whose_target_nobody_calls(platform, called, rate):
    """O2b: put back again and again, and nothing moves; the first is named and all are counted."""
    await uncalled(platform, called=called, rate=rate)
    report = await checked(platform)
    assert report.counts == {Rule.UNBEGUN: 2}
    [offender] = report.offenders
    assert offender.id == owed(NOWHERE, 1).id
    assert "and 1 more are published" in offender.lacks
    assert "nobody has called that target" in offender.lacks


@pytest.mark.parametrize(
    ("called", "rate"),
    [("1 second", None), ("29 minutes", None), ("59 minutes", 0.0005)],
    ids=["just now", "lately", "by rate"],
)
async def test_those_that_wait_behind_others_of_their_target_are_none(platform, called, rate):
    """A busy or a limited target: as long as it is called at its pace, its backlog is only long."""
    await uncalled(platform, called=called, rate=rate)
    assert (await checked(platform)).clean


async def test_those_behind_old_records_are_none(platform, monkeypatch):
    """The service catches up with a backlog: that target's turn comes."""
    await uncalled(platform, called="31 minutes")
    await platform.publish(owed(NOWHERE))
    monkeypatch.setattr(unbegun, "LONG_S", 0.0)
    assert (await checked(platform)).clean


async def test_repair_sends_them_by_the_other_way(platform, monkeypatch):
    """O2b: due at once on callbacks.diverted, in the same attempt; what moves meanwhile is left alone."""
    await platform.owe(owed(NOWHERE), publish=False)
    async with releasing(platform) as release:
        await release(unbegun.OFTEN)
        with monkeypatch.context() as patched:
            await forget_records(platform, patched)
            report = await checked(platform, repair=True)
        assert (report.counts, report.repaired, report.remaining) == (
            {Rule.UNBEGUN: 1},
            {Rule.UNBEGUN: 1},
            {},
        )
        await release(1)
    [record] = await read(platform.kafka.kafka, f"{platform.kafka.prefix}callbacks.diverted")
    assert (record["id"], record["attempt"]) == (owed(NOWHERE).id, 0)
    assert tuple(await columns(platform)) == (1, True, True)


async def test_repair_calls_those_whose_target_nobody_called(platform, target):
    """O2b: the releaser is told, and the diverted way delivers them."""
    await platform.owe(
        *(owed(f"{target.url}/x", number) for number in (1, 2, 3)), publish=False, due_in_s=100.0
    )
    await platform.connection.execute("UPDATE callback SET waits_since = now() - interval '1 hour'")
    async with platform.service():
        report = await checked(platform, repair=True)
        assert (report.counts, report.repaired, report.remaining) == (
            {Rule.UNBEGUN: 3},
            {Rule.UNBEGUN: 3},
            {},
        )
        await wait_until(platform.all_delivered, timeout=60)


async def test_repair_leaves_what_has_begun_meanwhile(platform):
    """By comparison with the very attempt that was found, and with how often it was published."""
    await platform.owe(owed(NOWHERE), publish=False)
    async with releasing(platform) as release:
        await release(unbegun.OFTEN)
    found = unbegun.Unbegun(platform.settings(), platform.connection, None, 1)
    found._unanswered = [(owed(NOWHERE).id, 0, unbegun.OFTEN)]
    await callbacks.begin(platform.connection, [(owed(NOWHERE).id, 0)], horizon_s=60.0)
    assert await found.divert() == 0
    assert not await platform.connection.fetchval("SELECT diverted FROM callback")
