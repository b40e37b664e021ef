"""The metrics of the callbacks service, read as Prometheus reads them."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from tests.callback_targets import Bench, Target, owed
from tests.scraping import Scraped, scrape
from tests.waiting import wait_until

from penstock import metrics
from penstock.errors import CannotStart, SettingsError
from penstock.local.ports import choose_port
from penstock.metrics.serving import serving


async def test_metrics_tell_of_both_paths(platform: Bench, target: Target) -> None:
    """Issue 5, C8: calls by path and outcome, their seconds, slots taken while calls hang, what waits, what is held and
    let go, targets by state: each figure is what was done. No metric that is described of callbacks is missing."""
    well = asyncio.Event()
    fails = 1

    async def answer(request: web.Request) -> web.Response:
        nonlocal fails
        if request.path == "/moody":
            await well.wait()
        if request.path == "/fails" and fails:
            fails -= 1
            return web.Response(status=500)
        return web.Response()

    target.answer = answer
    port = choose_port()
    settings = {
        "metrics_port": port,
        "callback_slow_s": 0.5,
        "callback_timeout_s": 60.0,
        "callback_horizon_s": 200.0,
        "stall_timeout_s": 200.0,
        "callback_slow_slots": 2,
        "callback_target_slots": 4,
        "callback_abnormal_count": 3,
        "callback_abnormal_ceiling": 6,
        "callback_calm_s": 0.0,
        "callback_probe_s": 0.2,
        "callback_probe_most_s": 0.2,
        "callback_drain_rate": 50.0,
        "callback_suspicion_share": 0.0,
        "callback_schedule_s": ("0.1",) * 5,
    }
    async with platform.service(**settings):
        await platform.owe(*[owed(f"{target.url}/well", number) for number in range(1, 4)])
        await platform.owe(owed(f"{target.url}/fails", 10))
        await wait_until(platform.all_delivered)
        await platform.owe(*[owed(f"{target.url}/moody", number) for number in range(20, 30)])

        async def is_held() -> Scraped | None:
            found = await scrape(port)
            # Two calls have moved to the slow pool, which has no room for the others of this target.
            slow = found["penstock_callback_slots_used", "slow"] == 2
            return found if slow and found["penstock_callback_held_total",] >= 4 else None

        hanging = await wait_until(is_held)
        assert hanging["penstock_callback_targets", "abnormal"] == 1
        assert hanging["penstock_callback_targets", "normal"] == 2
        assert hanging["penstock_callback_slots", "slow"] == 2
        assert hanging["penstock_callback_slots_used", "normal"] >= 1
        assert hanging["penstock_callback_suspicion",] == 0
        assert hanging["penstock_callback_calls_total", "delivered", "normal"] == 3
        assert hanging["penstock_callback_calls_total", "retried", "normal"] == 1
        assert hanging["penstock_callback_calls_total", "delivered", "diverted"] == 1
        assert hanging["penstock_callback_slow_calls_total", "normal"] == 0
        well.set()
        await wait_until(platform.all_delivered)
        after = await scrape(port)
    calls = {path: after["penstock_callback_call_seconds_count", path] for path in ("normal", "diverted")}
    assert sum(calls.values()) == 15 == len(target.calls)
    assert after["penstock_callback_call_seconds_bucket", "+Inf", "normal"] == calls["normal"]
    assert after["penstock_callback_call_seconds_bucket", "0.005", "normal"] <= calls["normal"] - 2
    assert after["penstock_callback_call_seconds_sum", "normal"] >= 1.0
    assert after["penstock_callback_slow_calls_total", "normal"] >= 3
    assert after["penstock_callback_granted_total",] >= after["penstock_callback_held_total",] >= 4
    assert after["penstock_callback_taken_total", "normal"] == 14
    assert after["penstock_callback_taken_total", "diverted"] >= 5
    assert after["penstock_callback_waiting", "normal"] == after["penstock_callback_waiting", "diverted"] == 0
    assert sum(after["penstock_callback_slots_used", pool] for pool in ("normal", "diverted", "slow")) == 0
    names = {key[0] for key in after}
    assert {
        one.name + ("_sum" if one.kind == "histogram" else "")
        for one in metrics.ALL
        if "_callback_" in one.name
    } <= names


async def test_metrics_are_off_unless_asked_for(
    platform: Bench, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O5: by default nothing listens; with a port it is on the loopback; a taken or impossible port is refused."""
    assert platform.settings().metrics_port == 0
    assert platform.settings().metrics_host == "127.0.0.1"
    with pytest.raises(SettingsError, match="metrics_port=65536"):
        platform.settings(metrics_port=65_536)
    taken = int(target.url.rpartition(":")[2])
    with pytest.raises(CannotStart, match="PENSTOCK_METRICS_PORT"):
        async with platform.service(metrics_port=taken):
            pass
    started = []
    monkeypatch.setattr("penstock.metrics.serving.web.TCPSite", lambda *where: started.append(where))
    async with serving(platform.settings(), "callbacks", lambda: (), {}):
        assert started == []
