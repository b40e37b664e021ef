"""Two namespaces call one address: the health of one target does not affect the other."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import asyncpg
import orjson
import pytest
from aiohttp import web
from tests.support.callback_targets import Bench, Target, make_callback, target_server
from tests.support.waiting import wait_until

from penstock.contracts.event import Callback
from penstock.core.target import TargetId
from penstock.postgres import callbacks, targets

# An unresponsive target is abnormal after three calls of a second. On a busy machine a call of a
# target that answers at once takes tenths of a second.
FAST = {
    "callback_slow_s": 1.0,
    "callback_timeout_s": 2.0,
    "callback_abnormal_count": 3,
    "callback_calm_s": 0.5,
    "callback_drain_rate": 50.0,
    "callback_schedule_s": ("0.3",) * 50,
}
# No target hangs, and no call counts as slow.
PATIENT = {
    **FAST,
    "callback_slow_s": 20.0,
    "callback_timeout_s": 30.0,
}
ACME, BETA = "acme--order", "beta--order"


def make_callbacks(target: Target, type_name: str, count: int, first: int) -> list[Callback]:
    return [
        make_callback(f"{target.url}/hook", number, type_name=type_name)
        for number in range(first, first + count)
    ]


async def is_from_acme(request: web.Request) -> bool:
    return ACME.encode() in await request.read()


async def callback_states(platform: Bench, wanted: list[Callback]) -> set[str]:
    rows = await platform.rows()
    return {rows[callback.id]["state"] for callback in wanted}


async def have_state(platform: Bench, wanted: list[Callback], state: str) -> bool:
    return await callback_states(platform, wanted) == {state}


async def target_states(platform: Bench) -> dict[str, str]:
    """The targets' states by namespace."""
    rows = await platform.connection.fetch("SELECT namespace, state FROM callback_target")
    return {row["namespace"]: row["state"] for row in rows}


async def test_a_410_disables_the_target_of_its_namespace_only(platform: Bench, target: Target) -> None:
    """C6, O5: another namespace's callbacks to the same address are delivered, and none is held."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=410 if await is_from_acme(request) else 200)

    target.answer = answer
    [first], before = make_callbacks(target, ACME, 1, 1), make_callbacks(target, BETA, 5, 10)
    async with platform.service(**PATIENT):
        await platform.enqueue(first, *before)
        await wait_until(lambda: have_state(platform, [first], "dead"))
        await wait_until(lambda: have_state(platform, before, "delivered"))
        assert await target_states(platform) == {"acme": "disabled", "beta": "normal"}
        held, after = make_callbacks(target, ACME, 5, 20), make_callbacks(target, BETA, 5, 30)
        await platform.enqueue(*[one for pair in zip(held, after, strict=True) for one in pair])
        await wait_until(lambda: have_state(platform, after, "delivered"))
        await wait_until(lambda: have_state(platform, held, "held"))
        # An operator disables one target and enables the other: each affects one namespace only.
        assert await targets.disable(platform.connection, TargetId("beta", f"{target.url}/hook"), "test")
        last = make_callbacks(target, BETA, 2, 40)
        await platform.enqueue(*last)
        await wait_until(lambda: have_state(platform, last, "held"))
        target.answer = None
        assert await targets.enable(platform.connection, TargetId("acme", f"{target.url}/hook"))
        await wait_until(lambda: have_state(platform, held, "delivered"))
        assert await callback_states(platform, last) == {"held"}
    assert await target_states(platform) == {"acme": "normal", "beta": "disabled"}
    shown = await platform.connection.fetchval(
        "SELECT attempts FROM callback_target WHERE namespace = 'acme'"
    )
    assert [one["status"] for one in orjson.loads(shown)] == [410, *[200] * 5], (
        "the attempt that disabled the target is shown, too"
    )
    assert set(target.ids()) == {one.id for one in (first, *before, *held, *after)}


async def test_slow_calls_of_a_namespace_divert_its_own_callbacks_only(
    platform: Bench, target: Target
) -> None:
    """C3, C5, O5: an address that hangs for one namespace has no effect on another namespace.

    The first namespace's callbacks are held, probed and drained. The second
    namespace's callbacks take the normal path.
    """
    unblocked = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if await is_from_acme(request):
            await unblocked.wait()
        return web.Response()

    target.answer = answer
    slow, fast = make_callbacks(target, ACME, 30, 1), make_callbacks(target, BETA, 30, 100)
    # A busy machine makes no call of the second namespace so slow.
    patient = {"callback_slow_s": 5.0, "callback_timeout_s": 10.0}
    async with platform.service(**{**FAST, **patient}):
        await platform.enqueue(*[one for pair in zip(slow, fast, strict=True) for one in pair])
        await wait_until(lambda: have_state(platform, fast, "delivered"))

        async def is_diverted() -> bool:
            return (await target_states(platform)).get("acme") == "abnormal"

        await wait_until(is_diverted)
        later = make_callbacks(target, BETA, 10, 200)
        await platform.enqueue(*later)
        await wait_until(lambda: have_state(platform, later, "delivered"))

        async def some_are_held() -> bool:
            return "held" in await callback_states(platform, slow)

        await wait_until(some_are_held)
        unblocked.set()
        await wait_until(lambda: have_state(platform, slow, "delivered"))
    rows = await platform.rows()
    assert not any(rows[one.id]["diverted"] or rows[one.id]["attempt"] > 1 for one in (*fast, *later))
    assert any(rows[one.id]["diverted"] for one in slow)
    count = "SELECT count FROM callback_target WHERE namespace = 'beta'"
    assert await platform.connection.fetchval(count) == 0


async def test_the_rate_limit_of_a_target_counts_in_its_namespace_only(
    platform: Bench, target: Target
) -> None:
    """C7, O5: a rate limit for one namespace does not slow calls of another to the same address."""
    await targets.limit(platform.connection, TargetId("acme", f"{target.url}/hook"), 0.01)
    slow, fast = make_callbacks(target, ACME, 3, 1), make_callbacks(target, BETA, 30, 100)
    async with platform.service(**PATIENT):
        await platform.enqueue(*slow, *fast)
        await wait_until(lambda: have_state(platform, fast, "delivered"))

        async def exactly_one_is_called() -> bool:
            rows = await platform.rows()
            return [rows[one.id]["attempt"] for one in slow].count(1) == 1

        await wait_until(exactly_one_is_called)
    assert len(set(target.ids())) == 31


async def test_held_callbacks_are_found_and_drained_by_target(platform: Bench, target: Target) -> None:
    """C4, O5: draining one target leaves another namespace's callbacks to the address held."""
    of_beta, of_acme = make_callbacks(target, BETA, 3, 1), make_callbacks(target, ACME, 3, 10)
    await platform.enqueue(*of_beta, *of_acme, publish=False)
    await platform.connection.execute("UPDATE callback SET state = 'held'")
    acme, beta = of_acme[0].target, of_beta[0].target
    assert acme.url == beta.url
    async with asyncpg.create_pool(
        platform.postgres, min_size=1, max_size=1, server_settings={"search_path": "penstock"}
    ) as pool:
        assert set((await targets.find_held(pool, None, limit=10)).targets) == {acme, beta}
        assert await callbacks.drain_held(pool, {acme: 2}) == {acme: 2}
        assert await callbacks.drain_held(pool, {acme: 10}) == {acme: 1}
        assert (await targets.find_held(pool, None, limit=10)).targets == [beta]
    assert await callback_states(platform, of_acme) == {"pending"}
    assert await callback_states(platform, of_beta) == {"held"}


@pytest.fixture
async def everywhere() -> AsyncIterator[Target]:
    """Targets on all addresses of this machine, each of them a server of its own."""
    async with target_server("0.0.0.0") as target:
        yield target


@pytest.mark.parametrize("answered", [False, True], ids=["never answered", "answered before"])
async def test_hanging_addresses_of_a_namespace_leave_slots(
    platform: Bench, everywhere: Target, answered: bool
) -> None:
    """C5, O5: addresses of one namespace hang with more callbacks than there are slots. Another
    namespace's callbacks arrive meanwhile, and so do their retries. No call ends or counts as
    slow."""
    unblocked = asyncio.Event()
    refused: set[str] = set()

    async def answer(request: web.Request) -> web.Response:
        if await is_from_acme(request):
            await unblocked.wait()
            return web.Response()
        first = request.headers["webhook-id"] not in refused
        refused.add(request.headers["webhook-id"])
        return web.Response(status=500 if first else 200)

    endless = {"callback_slow_s": 300.0, "callback_timeout_s": 300.0}
    port = everywhere.url.rpartition(":")[2]
    hosts = itertools.cycle(f"http://127.0.1.{number}:{port}" for number in range(1, 17))
    # A URL per task, as most platforms have.
    before, hanging = (
        [
            make_callback(f"{next(hosts)}/cb?n={number}", number, type_name=ACME)
            for number in range(first, first + count)
        ]
        for first, count in ((1, 16), (1000, 200))
    )
    everywhere.answer = answer
    slots = {"callback_slots": 60}
    async with platform.service(**{**FAST, **endless, **slots}):
        if answered:
            everywhere.answer = None
            await platform.enqueue(*before)
            await wait_until(lambda: have_state(platform, before, "delivered"))
            everywhere.answer = answer
        await platform.enqueue(*hanging)
        most = 52  # seven eighths of the slots
        await wait_until(lambda: sum(everywhere.under_way.values()) == most)
        others = make_callbacks(everywhere, BETA, 20, 5000)
        await platform.enqueue(*others)
        await wait_until(lambda: have_state(platform, others, "delivered"))
        assert sum(everywhere.under_way.values()) == most
        unblocked.set()
        await wait_until(lambda: have_state(platform, hanging, "delivered"))
