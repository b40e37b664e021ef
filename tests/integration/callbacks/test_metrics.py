"""The metrics of the callbacks service, scraped over HTTP as Prometheus does."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web
from tests.support.callback_targets import Bench, Target, make_callback
from tests.support.scraping import Scraped, scrape
from tests.support.waiting import wait_until

from penstock import metrics
from penstock.callbacks import callback_counts
from penstock.errors import CannotStart, SettingsError
from penstock.local.ports import choose_port
from penstock.metrics.serving import serving
from penstock.postgres import targets


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
        "stall_timeout_s": 200.0,
        "callback_slots": 8,
        "callback_target_slots": 4,
        "callback_abnormal_count": 3,
        "callback_calm_s": 0.0,
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
            # One namespace may have two calls in the slow pool; the others keep their slots.
            slow = metrics_found["penstock_callback_slots_used", "slow"] == 2
            return metrics_found if slow and metrics_found["penstock_callback_held_total",] >= 4 else None

        during = await wait_until(find_held)
        assert during["penstock_callback_targets", "abnormal"] == 1
        assert during["penstock_callback_targets", "normal"] == 2
        assert during["penstock_callback_slots", "slow"] == 3
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


async def test_callbacks_are_counted_by_state(
    platform: Bench, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C8, O4: one process counts pending, overdue, held and dead callbacks, no further than a
    bound, and exports when its loops completed a round."""
    monkeypatch.setattr(callback_counts, "COUNT_EVERY_S", 0.0)
    monkeypatch.setattr(callback_counts, "MOST", 4)
    monkeypatch.setattr("penstock.callbacks.requeuer.LONGEST_SLEEP_S", 0.1)
    made = [make_callback(f"{target.url}/hook", number) for number in range(1, 15)]
    await platform.enqueue(*made, publish=False)
    await platform.connection.execute(
        "UPDATE callback SET due_at = now() + interval '1 hour', "
        "waits_since = CASE WHEN task_id <= 2 THEN now() - interval '6 min' WHEN task_id = 3 THEN now() END"
    )
    await targets.disable(platform.connection, made[0].target, "maintenance")
    await platform.connection.execute(
        "UPDATE callback SET state = CASE WHEN task_id < 7 THEN 'held' ELSE 'dead' END, "
        "held_since = now() - task_id * interval '1 hour', "
        "finished_at = CASE WHEN task_id >= 7 THEN now() END WHERE task_id BETWEEN 4 AND 12"
    )
    port = choose_port()
    began_s = time.time()
    async with platform.service(metrics_port=port):

        async def counted(**expected: int) -> Scraped | None:
            found = await scrape(port)
            return (
                found if all(found.get(("penstock_callbacks", s)) == n for s, n in expected.items()) else None
            )

        found = await wait_until(lambda: counted(pending=4, overdue=2, held=3, dead=4))
        assert 6 * 3600 <= found["penstock_callback_held_oldest_seconds",] < 7 * 3600
        for loop in ("requeuer", "results_sweeper", "held_expiry", "target_cleaner"):
            assert found["penstock_last_round_timestamp_seconds", loop] > 0
            assert found["penstock_round_interval_seconds", loop] > 0

        async def requeuer_runs() -> bool:
            return (await scrape(port))["penstock_last_round_timestamp_seconds", "requeuer"] > began_s

        await wait_until(requeuer_runs)
        await platform.connection.execute("DELETE FROM callback")
        await wait_until(lambda: counted(pending=0, overdue=0, held=0, dead=0))


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
    monkeypatch.setattr("penstock.metrics.server.listen", lambda *arguments: started_sites.append(arguments))
    async with serving(platform.settings(), "callbacks", lambda: (), {}):
        assert started_sites == []
