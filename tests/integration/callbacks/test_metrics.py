"""The metrics of the callbacks service, scraped over HTTP as Prometheus does."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from tests.support.callback_targets import Bench, Target, make_callback
from tests.support.scraping import Scraped, scrape
from tests.support.waiting import wait_until

from penstock import metrics
from penstock.errors import CannotStart, SettingsError
from penstock.local.ports import choose_port
from penstock.metrics.serving import serving


async def test_the_metrics_of_both_paths_match_the_calls(platform: Bench, target: Target) -> None:
    """C8: every declared callback metric is exported, and its value matches the calls.

    The metrics cover calls by path and outcome, durations, used slots, waiting and held callbacks,
    and targets by state.
    """
    unblocked = asyncio.Event()
    failures_left = 1

    async def answer(request: web.Request) -> web.Response:
        nonlocal failures_left
        if request.path == "/blocked":
            await unblocked.wait()
        if request.path == "/fails" and failures_left:
            failures_left -= 1
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
        await platform.enqueue(*[make_callback(f"{target.url}/healthy", number) for number in range(1, 4)])
        await platform.enqueue(make_callback(f"{target.url}/fails", 10))
        await wait_until(platform.all_delivered)
        await platform.enqueue(*[make_callback(f"{target.url}/blocked", number) for number in range(20, 30)])

        async def find_held() -> Scraped | None:
            metrics_found = await scrape(port)
            # Two calls fill the slow pool, so the target's other calls keep their slots.
            slow = metrics_found["penstock_callback_slots_used", "slow"] == 2
            return metrics_found if slow and metrics_found["penstock_callback_held_total",] >= 4 else None

        during = await wait_until(find_held)
        assert during["penstock_callback_targets", "abnormal"] == 1
        assert during["penstock_callback_targets", "normal"] == 2
        assert during["penstock_callback_slots", "slow"] == 2
        assert during["penstock_callback_slots_used", "normal"] >= 1
        assert during["penstock_callback_self_check",] == 0
        assert during["penstock_callback_calls_total", "delivered", "normal"] == 3
        assert during["penstock_callback_calls_total", "retried", "normal"] == 1
        assert during["penstock_callback_calls_total", "delivered", "diverted"] == 1
        assert during["penstock_callback_slow_calls_total", "normal"] == 0
        unblocked.set()
        await wait_until(platform.all_delivered)
        after = await scrape(port)
    calls = {path: after["penstock_callback_call_seconds_count", path] for path in ("normal", "diverted")}
    assert sum(calls.values()) == 15 == len(target.calls)
    assert after["penstock_callback_call_seconds_bucket", "+Inf", "normal"] == calls["normal"]
    assert after["penstock_callback_call_seconds_bucket", "0.005", "normal"] <= calls["normal"] - 2
    assert after["penstock_callback_call_seconds_sum", "normal"] >= 1.0
    assert after["penstock_callback_slow_calls_total", "normal"] >= 3
    assert after["penstock_callback_requeued_total",] >= after["penstock_callback_held_total",] >= 4
    assert after["penstock_callback_received_total", "normal"] == 14
    assert after["penstock_callback_received_total", "diverted"] >= 5
    assert after["penstock_callback_waiting", "normal"] == after["penstock_callback_waiting", "diverted"] == 0
    assert sum(after["penstock_callback_slots_used", pool] for pool in ("normal", "diverted", "slow")) == 0
    names = {key[0] for key in after}
    assert {
        one.name + ("_sum" if one.kind == "histogram" else "")
        for one in metrics.ALL
        if "_callback_" in one.name
    } <= names


async def test_metrics_are_off_by_default(
    platform: Bench, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O5: by default no port is open; the default host is the loopback address.

    The service rejects an invalid port and a port in use.
    """
    assert platform.settings().metrics_port == 0
    assert platform.settings().metrics_host == "127.0.0.1"
    with pytest.raises(SettingsError, match="PENSTOCK_METRICS_PORT=65536"):
        platform.settings(metrics_port=65_536)
    used_port = int(target.url.rpartition(":")[2])
    with pytest.raises(CannotStart, match="PENSTOCK_METRICS_PORT"):
        async with platform.service(metrics_port=used_port):
            pass
    started_sites = []
    monkeypatch.setattr(
        "penstock.metrics.serving.web.TCPSite", lambda *arguments: started_sites.append(arguments)
    )
    async with serving(platform.settings(), "callbacks", lambda: (), {}):
        assert started_sites == []
