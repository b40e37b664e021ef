"""Gone targets are forgotten, and callbacks that are held for too long end."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from aiohttp import web
from tests.support.callback_targets import Bench, Target, answering, make_callback
from tests.support.scraping import scrape
from tests.support.waiting import wait_until

from penstock.callbacks import held_expiry, target_cache, target_store
from penstock.contracts.event import Callback
from penstock.contracts.validation import conform
from penstock.core.target import TargetId
from penstock.kafka.topology.topics import CALLBACKS_DEAD, CALLBACKS_RESULTS
from penstock.local.ports import choose_port
from penstock.postgres import callback_ends, callbacks, targets
from penstock.postgres.queries import bound
from penstock.postgres.session import open_session

GONE = 200
DAY = timedelta(days=1)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service cleans and searches in small pages, without waiting between them."""
    monkeypatch.setattr(target_cache, "DISABLED_CAPACITY", 20)
    monkeypatch.setattr(target_cache, "DISABLED_KEPT_S", 0.5)
    monkeypatch.setattr(target_store, "SAVE_ATTEMPTS_EVERY_S", 0.5)
    monkeypatch.setattr(target_store, "SEARCH_EVERY_S", 0.5)
    monkeypatch.setattr(target_store, "SEARCHED", 7)
    monkeypatch.setattr(target_store, "CLEANED_ROWS", 50)
    monkeypatch.setattr(target_store, "CLEAN_EVERY_S", 0.0)
    monkeypatch.setattr(held_expiry, "ENDED_ROWS", 3)
    monkeypatch.setattr(held_expiry, "EXPIRE_EVERY_S", 0.0)
    monkeypatch.setattr("penstock.callbacks.requeuer.LONGEST_SLEEP_S", 0.1)


async def answer_by_path(request: web.Request) -> web.Response:
    return web.Response(status=410 if request.path.startswith("/gone") else 200)


def make_gone(target: Target, count: int, first: int = 1) -> list[Callback]:
    """Callbacks to as many URLs, which are gone."""
    return [make_callback(f"{target.url}/gone/{n}", n) for n in range(first, first + count)]


async def states_of(platform: Bench, path: str) -> list[str]:
    """The states of the targets whose URL has a path."""
    rows = await platform.connection.fetch(
        "SELECT state FROM callback_target WHERE url LIKE '%' || $1 || '%'", path
    )
    return [row["state"] for row in rows]


async def age_targets(platform: Bench, days: int) -> None:
    await platform.connection.execute(
        "UPDATE callback_target SET called_at = called_at - $1::interval, changed_at = changed_at - $1::interval",
        days * DAY,
    )


@pytest.mark.usefixtures("quick")
async def test_targets_that_are_gone_leave_memory_and_table(platform: Bench, target: Target) -> None:
    """C6, C8: URLs that answered 410 leave memory at once, and PostgreSQL after the stated time.

    A healthy target keeps its row. A callback that names a removed target brings it back.
    """
    target.answer = answer_by_path
    port = choose_port()
    async with platform.service(metrics_port=port):
        await platform.enqueue(*make_gone(target, GONE), make_callback(f"{target.url}/healthy", 1000))

        async def all_ended() -> bool:
            return await platform.states() == {"dead": GONE, "delivered": 1}

        await wait_until(all_ended)
        assert await states_of(platform, "/gone/") == ["disabled"] * GONE

        async def memory_is_free() -> bool:
            return (await scrape(port))["penstock_callback_targets", "disabled"] == 0

        await wait_until(memory_is_free)
        # A disabled target that left memory is still not called.
        await platform.enqueue(make_callback(f"{target.url}/gone/7", 2007))
        await wait_until(lambda: is_in_state(platform, 2007, "held"))
        assert len(target.calls) == GONE + 1
        await platform.connection.execute("DELETE FROM callback WHERE state = 'held'")

        await age_targets(platform, 6)
        await platform.enqueue(make_callback(f"{target.url}/healthy", 1001))
        await wait_until(lambda: is_in_state(platform, 1001, "delivered"))
        assert len(await states_of(platform, "/gone/")) == GONE
        await age_targets(platform, 2)

        async def rows_are_removed() -> bool:
            return await states_of(platform, "/gone/") == []

        await wait_until(rows_are_removed)
        calls = len(target.calls)
        await platform.enqueue(make_callback(f"{target.url}/gone/9", 2009))
        await wait_until(lambda: is_in_state(platform, 2009, "dead"))
        assert len(target.calls) == calls + 1
        assert await states_of(platform, "/gone/9") == ["disabled"]


async def is_in_state(platform: Bench, number: int, state: str) -> bool:
    rows = await platform.rows()
    return bool(rows[make_callback("http://t/", number).id]["state"] == state)


async def test_only_targets_that_are_gone_are_deleted(platform: Bench) -> None:
    """C6, C8: a disabled target stays if an operator disabled it, it has a rate or held callbacks,
    or the 410 is recent."""
    await platform.connection.execute(
        "INSERT INTO callback_target (namespace, url, state, rate, gone_at, called_at, changed_at) "
        "SELECT namespace, 'https://' || name || '.example/', 'disabled', rate, now() - gone * interval '1 day', "
        "now() - called * interval '1 day', now() - interval '8 days' FROM (VALUES "
        "('gone', NULL, 8, 8), ('operator', NULL, NULL, 8), ('limited', 5.0, 8, 8), ('owed', NULL, 8, 8), "
        "('recent', NULL, 6, 6)) AS i (name, rate, gone, called), (VALUES ('acme'), ('default')) AS n (namespace)"
    )
    owed = make_callback("https://owed.example/", 1)
    await platform.enqueue(owed, publish=False)
    await platform.connection.execute("UPDATE callback SET state = 'held'")
    async with open_session(platform.postgres, "test") as session:
        deleted = await targets.delete_unused(session, None, limit=100, unused_s=7 * DAY.total_seconds())
    # The namespace `acme` owes no callback to the target of the same URL.
    assert deleted == (3, None)
    rows = await platform.connection.fetch("SELECT namespace, url FROM callback_target")
    names = {
        (row["namespace"], row["url"].removeprefix("https://").removesuffix(".example/")) for row in rows
    }
    kept = {"operator", "limited", "recent"}
    assert names == {(n, name) for n in ("acme", "default") for name in kept} | {("default", "owed")}


async def test_an_operator_takes_over_a_target_that_is_gone(platform: Bench) -> None:
    """C6: a target that is gone and disabled by an operator stays disabled without end. Enabled, it
    is not gone any more."""
    target_id, connection = TargetId("default", "https://gone.example/"), platform.connection

    async def row() -> tuple[Any, ...]:
        [found] = await targets.get(connection, target_id.url)
        gone_at = await connection.fetchval("SELECT gone_at FROM callback_target")
        return found["state"], found["why"], gone_at is not None

    await targets.disable_gone(connection, {target_id: "it answered 410 to msg_1"}, "me")
    assert await row() == ("disabled", "it answered 410 to msg_1", True)
    assert await targets.disable(connection, target_id, "ticket 4711")
    assert await row() == ("disabled", "ticket 4711", False)
    assert not await targets.disable(connection, target_id, "again")
    # A call under way that ends with 410 does not change the operator's decision.
    await targets.disable_gone(connection, {target_id: "it answered 410 to msg_2"}, "me")
    assert await row() == ("disabled", "ticket 4711", False)
    assert await targets.enable(connection, target_id)
    await targets.disable_gone(connection, {target_id: "it answered 410 to msg_3"}, "me")
    assert await targets.enable(connection, target_id)
    assert await row() == ("normal", None, False)


@pytest.mark.usefixtures("quick")
async def test_enabled_targets_are_drained_among_many_gone_ones(platform: Bench, target: Target) -> None:
    """C4, C6: held callbacks of an enabled target are found behind pages of disabled ones."""
    target.answer = answering(200)
    owed = [make_callback(f"{target.url}/hook/{n}", n) for n in range(1, 31)]
    await platform.enqueue(*owed, publish=False)
    await platform.connection.execute("UPDATE callback SET state = 'held', diverted = true")
    for callback in owed:
        await targets.disable(platform.connection, callback.target, "maintenance")
    async with platform.service():
        await targets.enable(platform.connection, owed[29].target)
        await wait_until(lambda: is_in_state(platform, 30, "delivered"))
        assert await platform.states() == {"held": 29, "delivered": 1}
        for callback in owed[:29]:
            await targets.enable(platform.connection, callback.target)
        await wait_until(platform.all_delivered)


@pytest.mark.usefixtures("quick")
async def test_callbacks_that_are_held_for_too_long_become_dead_letters(
    platform: Bench, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """C6: a callback that was held for the longest time is dead, with a letter and a result. It can
    be replayed, and then begins a new time."""
    caplog.set_level(logging.WARNING)
    overdue = [make_callback(f"{target.url}/hook", n, ordered=n % 2 == 0) for n in range(1, 11)]
    recent = make_callback(f"{target.url}/hook", 11)
    await targets.disable(platform.connection, recent.target, "maintenance")
    async with platform.service():
        await platform.enqueue(*overdue, recent)

        async def all_held() -> bool:
            return await platform.states() == {"held": 11}

        await wait_until(all_held)
        await platform.connection.execute(
            "UPDATE callback SET held_since = now() - interval '8 days' WHERE task_id <= 10"
        )

        async def overdue_are_dead() -> bool:
            return await platform.states() == {"dead": 10, "held": 1}

        await wait_until(overdue_are_dead)
        letters = await platform.records(CALLBACKS_DEAD.name, 10)
        results = await platform.records(CALLBACKS_RESULTS.name, 10)
        assert {letter["id"] for letter in letters} == {callback.id for callback in overdue}
        assert {result["id"] for result in results} == {callback.id for callback in overdue}
        for letter in letters:
            conform(letter, "callback-dead")
            assert letter["error"]["kind"] == "held"
            assert letter["attempt"] == 0
        for result in results:
            conform(result, "callback-result")
            assert (result["outcome"], result["attempts"], result["took_ms"]) == ("dead", 0, None)
        assert target.calls == []
        # Replayed while the target is still disabled: held for a new time.
        await replay(platform, overdue[:1])
        await wait_until(lambda: is_in_state(platform, 1, "held"))
        await targets.enable(platform.connection, recent.target)
        await replay(platform, overdue[1:])
        await wait_until(platform.all_delivered)
    assert len(target.calls) == 11
    assert any(record.__dict__.get("event") == "held_callbacks_ended" for record in caplog.records)


async def replay(platform: Bench, dead: list[Callback]) -> None:
    rows = await platform.connection.fetch(
        *bound(
            "replay.replay",
            id=[callback.id for callback in dead],
            due_in=[0.0] * len(dead),
            state="dead",
            namespace=[callback.target.namespace for callback in dead],
            target=[callback.target.url for callback in dead],
        )
    )
    assert len(rows) == len(dead)


async def test_a_claim_ends_the_time_for_which_a_callback_is_held(platform: Bench) -> None:
    """C6: a callback that is drained and held again was held all the time; one that was called
    was not."""
    callback = make_callback("https://t.example/", 1)
    await platform.enqueue(callback, publish=False)

    async def held_since() -> Any:
        return await platform.connection.fetchval("SELECT held_since FROM callback")

    async with asyncpg.create_pool(
        platform.postgres, min_size=1, max_size=1, server_settings={"search_path": "penstock"}
    ) as pool:
        await callbacks.hold(pool, [(callback.id, 0)], [None])
        await platform.connection.execute("UPDATE callback SET held_since = held_since - interval '1 day'")
        first = await held_since()
        await callbacks.drain_held(pool, {callback.target: 1})
        assert await held_since() == first
        await callbacks.hold(pool, [(callback.id, 0)], [None])
        assert await held_since() == first
        await callbacks.drain_held(pool, {callback.target: 1})
        assert await callbacks.claim(pool, [(callback.id, 0)], horizon_s=60.0)
        assert await held_since() is None
        await callbacks.hold(pool, [(callback.id, 1)], [None])
        assert await held_since() > first + DAY / 2


async def test_held_callbacks_end_in_batches(platform: Bench) -> None:
    """C6: a statement ends a limited number of callbacks that were held for too long, and no
    others."""
    made = [make_callback("https://t.example/", n) for n in range(1, 6)]
    await platform.enqueue(*made, publish=False)
    await platform.connection.execute("UPDATE callback SET state = 'held', held_since = now()")
    async with open_session(platform.postgres, "test") as session:
        assert await callback_ends.end_held(session, limit=3, longest_s=60.0) == 0
        await platform.connection.execute("UPDATE callback SET held_since = now() - interval '61 s'")
        assert [await callback_ends.end_held(session, limit=3, longest_s=60.0) for _ in range(3)] == [3, 2, 0]
