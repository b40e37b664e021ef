"""A target that is slow, but not abnormal, costs what it delivers (C5)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from aiohttp import web
from tests.integration.callbacks.test_diversion import FAST, make_callbacks
from tests.support.callback_targets import Bench, Target
from tests.support.waiting import wait_until

from penstock.callbacks.ledger import Claimed, Ledger
from penstock.callbacks.receiver import InFlight

# A stall of the machine makes no call slow, and none that is made again.
PATIENT = {**FAST, "callback_slow_s": 5.0, "callback_timeout_s": 10.0}
COUNT = """
CREATE TABLE row_update (id text);
CREATE FUNCTION count_update() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN INSERT INTO penstock.row_update VALUES (new.id); RETURN NULL; END $$;
CREATE TRIGGER count_update AFTER UPDATE ON callback FOR EACH ROW EXECUTE FUNCTION count_update();
"""


async def test_a_slow_target_costs_three_updates_a_delivery(
    platform: Bench, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5: callbacks that cannot be called soon are held, and return at the pace of the target.

    They are called nearly in the order in which they were created.
    """

    async def answer(_request: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return web.Response()

    target.answer = answer
    callbacks = make_callbacks(target, "/slow", 400)
    await platform.connection.execute(COUNT)
    # In a second the target answers 40 calls; it was owed the others for several seconds.
    monkeypatch.setattr("penstock.callbacks.settings.LONGEST_WAIT_S", 1.0)
    monkeypatch.setattr("penstock.callbacks.router.POSTPONE_S", 1.0)
    settings = {**PATIENT, "callback_target_slots": 4}
    async with platform.service(**settings):
        await platform.enqueue(*callbacks)
        await wait_until(lambda: len(target.calls) > 40)
        states = await platform.states()
        assert states["held"] > 200
        await wait_until(platform.all_delivered)
    updates = await platform.connection.fetchval("SELECT count(*) FROM row_update")
    assert updates <= 3 * len(callbacks)
    assert len(target.calls) == len(callbacks)
    assert not any(row["diverted"] for row in (await platform.rows()).values())
    numbers = [int(call.id.split("_")[1].split("-")[0]) for call in target.calls]
    # Calls that begin together may arrive in another order, and a stall holds some of a lane again.
    # In random order they would be displaced by 133 in the mean.
    displaced = [abs(number - at) for at, number in enumerate(numbers, 1)]
    assert sum(displaced) <= 80 * len(callbacks), numbers


async def test_held_callbacks_of_a_slow_target_survive_a_restart(
    platform: Bench, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1, C5: the next process finds what waits for a target, and calls each once."""

    async def answer(_request: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return web.Response()

    target.answer = answer
    monkeypatch.setattr("penstock.callbacks.settings.LONGEST_WAIT_S", 0.5)
    callbacks = make_callbacks(target, "/slow", 200)
    settings = {**PATIENT, "callback_target_slots": 4}
    async with platform.service(**settings):
        await platform.enqueue(*callbacks)
        await wait_until(lambda: len(target.calls) > 40)
    async with platform.service(**settings):
        await wait_until(platform.all_delivered)
    assert sorted(target.ids()) == sorted(callback.id for callback in callbacks)


async def test_a_stop_waits_for_claims_of_held_callbacks(
    platform: Bench, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: a stop leaves no attempt that is claimed and not called, which would be made again only
    after the horizon."""
    claim, stop = Ledger.claim, asyncio.Event()

    async def claim_slowly(self: Ledger, batch: Sequence[InFlight]) -> Claimed:
        claimed = await claim(self, batch)
        if len(target.calls) > 20:
            stop.set()
            # A stop that does not wait ends meanwhile.
            await asyncio.sleep(0.5)
        return claimed

    async def answer(_request: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return web.Response()

    monkeypatch.setattr(Ledger, "claim", claim_slowly)
    target.answer = answer
    monkeypatch.setattr("penstock.callbacks.settings.LONGEST_WAIT_S", 0.5)
    # One at a time: no other call is under way during a claim.
    settings = {**PATIENT, "callback_target_slots": 1}
    async with platform.service(**settings):
        await platform.enqueue(*make_callbacks(target, "/slow", 100))
        await stop.wait()
    claimed = "SELECT count(*) FROM callback WHERE state = 'pending' AND attempt > 0"
    assert await platform.connection.fetchval(claimed) == 0
    delivered = (await platform.states())["delivered"]
    assert len(target.calls) == len(set(target.ids())) == delivered < 100
