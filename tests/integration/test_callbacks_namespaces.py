"""Two namespaces that call one address: what one of them meets there is nothing to the other."""

from __future__ import annotations

import asyncio

import asyncpg
import orjson
from aiohttp import web
from tests.callback_targets import Bench, Target, owed
from tests.waiting import wait_until

from penstock.contracts.event import Callback
from penstock.core.target import TargetId
from penstock.postgres import callbacks, targets

# A slow call is one of a fifth of a second here, and three of them make a target abnormal.
HASTY = {
    "callback_slow_s": 0.2,
    "callback_timeout_s": 1.0,
    "callback_horizon_s": 4.0,
    "callback_abnormal_count": 3,
    "callback_abnormal_ceiling": 6,
    "callback_calm_s": 0.5,
    "callback_probe_s": 0.3,
    "callback_probe_most_s": 0.6,
    "callback_drain_rate": 50.0,
    "callback_schedule_s": ("0.3",) * 50,
}
ACME, BETA = "acme--order", "beta--order"


def many(target: Target, type_name: str, count: int, first: int) -> list[Callback]:
    return [owed(f"{target.url}/hook", number, type_name=type_name) for number in range(first, first + count)]


async def is_acmes(request: web.Request) -> bool:
    return ACME.encode() in await request.read()


async def states_of(platform: Bench, some: list[Callback]) -> set[str]:
    rows = await platform.rows()
    return {rows[callback.id]["state"] for callback in some}


async def are(platform: Bench, some: list[Callback], state: str) -> bool:
    return await states_of(platform, some) == {state}


async def targets_of(platform: Bench) -> dict[str, str]:
    """State by namespace."""
    rows = await platform.connection.fetch("SELECT namespace, state FROM callback_target")
    return {row["namespace"]: row["state"] for row in rows}


async def test_a_410_disables_the_target_of_its_namespace_only(platform: Bench, target: Target) -> None:
    """C6, O5: what is owed to the same address in another namespace is delivered before and after, and nothing of it is held."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=410 if await is_acmes(request) else 200)

    target.answer = answer
    [first], before = many(target, ACME, 1, 1), many(target, BETA, 5, 10)
    async with platform.service(**HASTY):
        await platform.owe(first, *before)
        await wait_until(lambda: are(platform, [first], "dead"))
        await wait_until(lambda: are(platform, before, "delivered"))
        assert await targets_of(platform) == {"acme": "disabled", "beta": "normal"}
        held, after = many(target, ACME, 5, 20), many(target, BETA, 5, 30)
        await platform.owe(*[one for pair in zip(held, after, strict=True) for one in pair])
        await wait_until(lambda: are(platform, after, "delivered"))
        await wait_until(lambda: are(platform, held, "held"))
        # An operator's word on the one is none on the other, either; and what is let go of the one leaves the other's held.
        assert await targets.disable(platform.connection, TargetId("beta", f"{target.url}/hook"), "test")
        last = many(target, BETA, 2, 40)
        await platform.owe(*last)
        await wait_until(lambda: are(platform, last, "held"))
        target.answer = None
        assert await targets.enable(platform.connection, TargetId("acme", f"{target.url}/hook"))
        await wait_until(lambda: are(platform, held, "delivered"))
        assert await states_of(platform, last) == {"held"}
    assert await targets_of(platform) == {"acme": "normal", "beta": "disabled"}
    shown = await platform.connection.fetchval(
        "SELECT attempts FROM callback_target WHERE namespace = 'acme'"
    )
    assert [one["status"] for one in orjson.loads(shown)] == [410, *[200] * 5], (
        "what disabled it is shown, too"
    )
    assert set(target.ids()) == {one.id for one in (first, *before, *held, *after)}


async def test_slow_calls_of_a_namespace_divert_its_own_callbacks_only(
    platform: Bench, target: Target
) -> None:
    """C3, C5, O5: an address hangs for one namespace, whose callbacks are held, probed and drained when it is well; those of
    another go the normal way all the while, and its target is charged with nothing."""
    well = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if await is_acmes(request):
            await well.wait()
        return web.Response()

    target.answer = answer
    slow, quick = many(target, ACME, 30, 1), many(target, BETA, 30, 100)
    async with platform.service(**HASTY):
        await platform.owe(*[one for pair in zip(slow, quick, strict=True) for one in pair])
        await wait_until(lambda: are(platform, quick, "delivered"))

        async def is_diverted() -> bool:
            return (await targets_of(platform)).get("acme") == "abnormal"

        await wait_until(is_diverted)
        later = many(target, BETA, 10, 200)
        await platform.owe(*later)
        await wait_until(lambda: are(platform, later, "delivered"))
        assert "held" in await states_of(platform, slow)
        well.set()
        await wait_until(lambda: are(platform, slow, "delivered"))
    rows = await platform.rows()
    assert not any(rows[one.id]["diverted"] or rows[one.id]["attempt"] > 1 for one in (*quick, *later))
    assert any(rows[one.id]["diverted"] for one in slow)
    count = "SELECT count FROM callback_target WHERE namespace = 'beta'"
    assert await platform.connection.fetchval(count) == 0


async def test_the_rate_of_a_target_is_its_namespaces_own(platform: Bench, target: Target) -> None:
    """C7, O5: limited to a call in a minute and more in one namespace, an address is called at full speed for the other."""
    await targets.limit(platform.connection, TargetId("acme", f"{target.url}/hook"), 0.01)
    slow, quick = many(target, ACME, 3, 1), many(target, BETA, 30, 100)
    async with platform.service(**HASTY):
        await platform.owe(*slow, *quick)
        await wait_until(lambda: are(platform, quick, "delivered"))

        async def one_is_called() -> bool:
            rows = await platform.rows()
            return [rows[one.id]["attempt"] for one in slow].count(1) == 1

        await wait_until(one_is_called)
    assert len(set(target.ids())) == 31


async def test_what_is_held_is_found_and_let_go_by_target(platform: Bench, target: Target) -> None:
    """C4, O5: what another namespace is owed at the same address stays held, however long it has waited."""
    theirs, ours = many(target, BETA, 3, 1), many(target, ACME, 3, 10)
    await platform.owe(*theirs, *ours, publish=False)
    await platform.connection.execute("UPDATE callback SET state = 'held'")
    acme, beta = ours[0].target, theirs[0].target
    assert acme.url == beta.url
    async with asyncpg.create_pool(
        platform.postgres, min_size=1, max_size=1, server_settings={"search_path": "penstock"}
    ) as pool:
        assert set(await targets.troubled(pool)) == {acme, beta}
        assert await callbacks.grant(pool, {acme: 2}) == {acme: 2}
        assert await callbacks.grant(pool, {acme: 10}) == {acme: 1}
        assert await targets.troubled(pool) == [beta]
    assert await states_of(platform, ours) == {"pending"}
    assert await states_of(platform, theirs) == {"held"}
