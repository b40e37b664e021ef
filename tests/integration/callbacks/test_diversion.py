"""Diversion of slow targets: callbacks are held, targets probed, and held callbacks drained.

Operators' changes and answers such as 410 hold callbacks, too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from tests.support.callback_targets import Answer, Bench, Target, answering, make_callback, target_server
from tests.support.waiting import wait_until

from penstock.callbacks import outcomes
from penstock.contracts.event import Callback
from penstock.contracts.validation import conform
from penstock.core.target import TargetId
from penstock.kafka.topology.topics import CALLBACKS_RESULTS
from penstock.postgres import targets

# A call of 0.2 s is slow, and three slow calls make a target abnormal.
FAST = {
    "callback_slow_s": 0.2,
    "callback_timeout_s": 1.0,
    "callback_abnormal_count": 3,
    "callback_calm_s": 0.5,
    "callback_drain_rate": 50.0,
    "callback_suspicion_share": 0.0,
    "callback_schedule_s": ("0.3",) * 50,
}
# The slow pool has two fifths of the slots.
ONE_SLOW_SLOT = {"callback_slots": 2, "callback_target_slots": 2}


class BlockingAnswer:
    """Blocks calls of paths that begin with `/blocked` until `unblocked` is set."""

    def __init__(self) -> None:
        self.unblocked = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.Response:
        if request.path.startswith("/blocked"):
            await self.unblocked.wait()
        return web.Response()


def make_callbacks(target: Target, path: str, count: int, first: int = 1) -> list[Callback]:
    return [make_callback(f"{target.url}{path}", number) for number in range(first, first + count)]


async def target_row(platform: Bench, url: str) -> dict[str, Any]:
    row = await platform.connection.fetchrow("SELECT * FROM callback_target WHERE url = $1", url)
    return dict(row) if row else {}


async def has_state(platform: Bench, url: str, state: str) -> bool:
    return (await target_row(platform, url)).get("state") == state


async def test_an_unresponsive_target_is_diverted_and_recovers(platform: Bench, target: Target) -> None:
    """C3, C4, C6: three slow calls make a target abnormal, and its callbacks are held.

    A quick probe drains the held callbacks. Then the target is normal, and new callbacks take the
    normal path.
    """
    target.answer = blocking = BlockingAnswer()
    callbacks = make_callbacks(target, "/blocked", 40)
    url = callbacks[0].target.url
    async with platform.service(**FAST):
        await platform.enqueue(*callbacks)
        await wait_until(lambda: has_state(platform, url, "abnormal"))
        await wait_until(lambda: _held(platform, 20))
        calls = len(target.calls)
        # Probes go on while the target hangs, one call at a time.
        await wait_until(lambda: len(target.calls) >= calls + 2)
        assert target.under_way["/blocked"] <= 8
        blocking.unblocked.set()
        await wait_until(platform.all_delivered)
        await wait_until(lambda: has_state(platform, url, "normal"))
        later = make_callbacks(target, "/blocked", 5, 100)
        await platform.enqueue(*later)
        await wait_until(platform.all_delivered)
    rows = await platform.rows()
    assert sum(row["diverted"] for row in rows.values()) >= 20
    assert not any(rows[callback.id]["diverted"] for callback in later)
    assert set(target.ids()) == {*rows}


async def _held(platform: Bench, count: int) -> bool:
    return (await platform.states())["held"] >= count


async def test_unresponsive_targets_do_not_keep_records_of_each_other(
    platform: Bench, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5, O2a: no record waits for calls of unresponsive targets.

    Thirty targets hang and share one slot, and the slow pool is full. The last call starts after a
    minute. A record that waited so long would make the stall detector end the service.
    """
    target.answer = blocking = BlockingAnswer()
    callbacks = [make_callback(f"{target.url}/blocked/{number}", number) for number in range(1, 31)]
    await platform.enqueue(*callbacks, publish=False, due_in_s=0)
    await platform.connection.execute("UPDATE callback SET diverted = true")
    settings = {
        **FAST,
        "callback_diverted_slots": 1,
        **ONE_SLOW_SLOT,
        "callback_timeout_s": 3.0,
        "stall_timeout_s": 12.0,
    }
    monkeypatch.setattr("penstock.callbacks.settings.LONGEST_WAIT_S", 1.0)
    monkeypatch.setattr("penstock.callbacks.router.POSTPONE_S", 2.0)
    async with platform.service(**settings):
        # Each call takes 3 s, so fourteen calls take longer than the stall timeout.
        await wait_until(lambda: len(target.calls) >= 14)
        blocking.unblocked.set()
        await wait_until(platform.all_delivered)


async def test_an_abnormal_target_is_probed_without_new_callbacks(
    platform: Bench, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4a: as long as a target is abnormal, its held callbacks are tried one by one, at a low rate.
    That needs no new callback, and goes on in the next process. Calls last longer than
    callbacks wait, and the slow pool has no free slot."""
    monkeypatch.setattr("penstock.callbacks.settings.LONGEST_WAIT_S", 0.5)
    target.answer = BlockingAnswer()
    # No retry within the test: each further call is a probe, by another callback.
    settings = {
        **FAST,
        "callback_schedule_s": ("600",) * 3,
        **ONE_SLOW_SLOT,
    }
    callbacks = make_callbacks(target, "/blocked", 40)
    url = callbacks[0].target.url
    probes = 4
    async with platform.service(**settings):
        await platform.enqueue(*callbacks)
        await wait_until(lambda: has_state(platform, url, "abnormal"))
        await wait_until(lambda: _held(platform, 20))
        # The calls of the normal path have ended.
        await wait_until(lambda: target.under_way["/blocked"] == 0)
        before = len(target.calls)
        await wait_until(lambda: len(target.calls) >= before + probes)
    async with platform.service(**settings):
        stopped = len(target.calls)
        await wait_until(lambda: len(target.calls) >= stopped + probes)
        assert await has_state(platform, url, "abnormal")
    found = [call.at_s for call in target.calls[stopped + 1 : stopped + probes]]
    # Half of the second interval between two probes, since a busy machine delays calls.
    assert found[-1] - found[0] >= (len(found) - 1) * FAST["callback_slow_s"]  # type: ignore[operator]
    assert len(set(target.ids())) == len(target.calls)


async def test_disabling_a_target_holds_callbacks_that_wait_in_memory(
    platform: Bench, target: Target
) -> None:
    """C8: an operator's change affects callbacks that wait in memory, too."""
    url = f"{target.url}/hook"
    await targets.limit(platform.connection, TargetId("default", url), 2.0)
    async with platform.service(**FAST):
        await platform.enqueue(*make_callbacks(target, "/hook", 15))
        await wait_until(lambda: len(target.calls) >= 2)
        await targets.disable(platform.connection, TargetId("default", url), "maintenance")
        await wait_until(lambda: _held(platform, 8))

        async def all_other_callbacks_are_held() -> bool:
            return len(target.calls) + (await platform.states())["held"] == 15

        await wait_until(all_other_callbacks_are_held)
        assert await targets.enable(platform.connection, TargetId("default", url))
        await wait_until(platform.all_delivered)


async def test_an_unresponsive_target_does_not_delay_a_healthy_target(
    platform: Bench, target: Target
) -> None:
    """C5: callbacks of a healthy target arrive while another target hangs.

    They arrive before and after the unresponsive target becomes abnormal.
    """
    target.answer = BlockingAnswer()
    async with platform.service(**FAST, callback_slots=12):
        await platform.enqueue(*make_callbacks(target, "/blocked", 60))
        for batch in range(5):
            healthy = make_callbacks(target, "/healthy", 20, 100 + 20 * batch)
            await platform.enqueue(*healthy)
            await wait_until(lambda healthy=healthy: _all_delivered(platform, healthy))
        assert await has_state(platform, f"{target.url}/blocked", "abnormal")
        assert await has_state(platform, f"{target.url}/healthy", "normal")


async def _all_delivered(platform: Bench, callbacks: list[Callback]) -> bool:
    rows = await platform.rows()
    return all(rows[callback.id]["state"] == "delivered" for callback in callbacks)


async def test_an_unresponsive_call_holds_back_no_records(platform: Bench, target: Target) -> None:
    """C5: four hundred callbacks are delivered behind an unresponsive call in the same partition.

    Forty records may be in flight.
    """
    target.answer = blocking = BlockingAnswer()
    unresponsive = make_callback(f"{target.url}/blocked")
    healthy = make_callbacks(target, "/healthy", 400, 100)
    settings = {
        "max_in_flight": 40,
        "callback_slots": 20,
        # Longer than the healthy callbacks take on a busy machine.
        "callback_timeout_s": 60.0,
    }
    async with platform.service(**settings):
        await platform.enqueue(unresponsive)
        await wait_until(lambda: target.calls)
        await platform.enqueue(*healthy, publish=False)
        for callback in healthy:
            await platform.send(callback.encode(), unresponsive.target.url.encode())
        await wait_until(lambda: _all_delivered(platform, healthy))
        assert len(target.ids("/blocked")) == 1
        blocking.unblocked.set()
        await wait_until(platform.all_delivered)


async def test_prerecorded_attempts_of_an_abnormal_target_use_no_schedule(
    platform: Bench, target: Target
) -> None:
    """C3, C6: attempts recorded ahead are held when their target becomes abnormal.

    They keep their attempt numbers and use none of the retry schedule.
    """
    target.answer = blocking = BlockingAnswer()
    blocking.unblocked.set()
    quick = make_callbacks(target, "/blocked", 40)
    async with platform.service(**FAST):
        await platform.enqueue(*quick)
        await wait_until(platform.all_delivered)
        blocking.unblocked.clear()
        late = make_callbacks(target, "/blocked", 40, 100)
        await platform.enqueue(*late)

        async def find_prerecorded() -> list[str]:
            rows = (await platform.rows()).values()
            return [r["id"] for r in rows if r["state"] == "held" and r["attempt"] == 1 == r["spent"]]

        await wait_until(find_prerecorded)
        assert not set(await find_prerecorded()) & set(target.ids())
        blocking.unblocked.set()
        await wait_until(platform.all_delivered)
        assert set(target.ids()) == {callback.id for callback in (*quick, *late)}


async def test_prerecorded_attempts_are_not_made_after_a_410(platform: Bench, target: Target) -> None:
    """C6: after a 410 only calls in progress end; the other callbacks are held.

    The held callbacks keep their whole retry schedule.
    """
    target.answer = blocking = BlockingAnswer()
    blocking.unblocked.set()
    quick, late = make_callbacks(target, "/blocked", 40), make_callbacks(target, "/blocked", 40, 100)
    # On a busy machine a quick target must be neither slow nor called twice.
    async with platform.service(**FAST | {"callback_slow_s": 10.0, "callback_timeout_s": 30.0}):
        await platform.enqueue(*quick)
        await wait_until(platform.all_delivered)

        async def answer_gone(_request: web.Request) -> web.StreamResponse:
            return web.Response(status=410)

        target.answer = answer_gone
        await platform.enqueue(*late)
        await wait_until(lambda: has_state(platform, f"{target.url}/blocked", "disabled"))

        async def none_is_pending() -> bool:
            return not (await platform.states())["pending"]

        await wait_until(none_is_pending)
        rows = await platform.rows()
    states = Counter(rows[callback.id]["state"] for callback in late)
    # One target has at most eight calls at once.
    assert 1 <= states["dead"] <= 8
    assert states["held"] == 40 - states["dead"]
    assert len(target.ids()) == 40 + states["dead"]
    assert all(row["attempt"] == (row["spent"] or 0) for row in rows.values() if row["state"] == "held")


async def test_a_stop_leaves_prerecorded_attempts_of_a_slow_target(platform: Bench, target: Target) -> None:
    """O1, C6: a stopping service makes no recorded attempt that waits behind unresponsive calls.

    The next process makes these attempts.
    """
    target.answer = blocking = BlockingAnswer()
    blocking.unblocked.set()
    quick, late = make_callbacks(target, "/blocked", 40), make_callbacks(target, "/blocked", 40, 100)
    async with platform.service(**{**FAST, "callback_abnormal_count": 1000}):
        await platform.enqueue(*quick)
        await wait_until(platform.all_delivered)
        blocking.unblocked.clear()
        await platform.enqueue(*late)
        await wait_until(lambda: len(target.ids()) > 40)
    called = set(target.ids())
    rows = [row for row in (await platform.rows()).values() if row["id"] not in called]
    assert rows
    # The attempts use no schedule, and no callback waits for the horizon of an attempt never made.
    assert all(row["attempt"] == (row["spent"] or 0) for row in rows)
    blocking.unblocked.set()
    async with platform.service(**FAST):
        await wait_until(platform.all_delivered)


async def test_a_slow_call_is_not_cancelled(platform: Bench, target: Target) -> None:
    """C7a: a call that becomes slow leaves its slot and goes on; each callback is called once."""

    async def answer(_request: web.Request) -> web.Response:
        await asyncio.sleep(0.6)
        return web.Response()

    target.answer = answer
    callbacks = make_callbacks(target, "/slow", 12)
    settings = {**FAST, "callback_abnormal_count": 100}
    async with platform.service(**settings, callback_slots=20, callback_target_slots=4):
        await platform.enqueue(*callbacks)
        await wait_until(platform.all_delivered)
    # More calls than slots of a target ran at once, because slow calls hold no slot.
    assert target.most_under_way["/slow"] > 4
    assert Counter(target.ids()) == Counter(callback.id for callback in callbacks)


async def test_quick_failures_are_retried_on_the_diverted_path(platform: Bench, target: Target) -> None:
    """C2, C6: twenty quick failures leave a target normal; each retry is delivered."""
    failures_left = Counter({callback.id: 1 for callback in make_callbacks(target, "/fails", 20)})

    async def answer(request: web.Request) -> web.Response:
        name = request.headers["webhook-id"]
        failures_left[name] -= 1
        return web.Response(status=503 if failures_left[name] >= 0 else 200)

    target.answer = answer
    async with platform.service(**FAST):
        await platform.enqueue(*make_callbacks(target, "/fails", 20))
        await wait_until(platform.all_delivered)
    row = await target_row(platform, f"{target.url}/fails")
    assert (row["state"], row["count"]) == ("normal", 0)


async def test_the_health_of_a_target_survives_a_kill_and_a_restart(
    platform: Bench, target: Target, tmp_path: Path
) -> None:
    """C7b: the count of slow calls survives a kill: five before and three after make eight.

    The next process holds the callbacks of the abnormal target from the first record on.
    """
    target.answer = BlockingAnswer()
    url = f"{target.url}/blocked"
    settings = {name: str(value) for name, value in FAST.items() if not isinstance(value, tuple)} | {
        "callback_calm_s": "600",
        "callback_abnormal_count": "8",
        "callback_schedule_s": "600",
        "callback_target_slots": "5",
        "callback_guards_off": "decay",
        # Attempts with an unknown outcome are not repeated and counted during the test.
        "callback_timeout_s": "200",
    }
    async with platform.process(tmp_path, **settings) as process:
        await platform.enqueue(*make_callbacks(target, "/blocked", 5))
        await wait_until(lambda: _has_count(platform, url, 5))
        process.kill()
        await process.wait()
    async with platform.process(tmp_path, **settings):
        await platform.enqueue(*make_callbacks(target, "/blocked", 3, 10))
        await wait_until(lambda: has_state(platform, url, "abnormal"))
        assert await _has_count(platform, url, 8)
    calls = len(target.calls)
    settings |= {"callback_slow_s": "300"}
    async with platform.process(tmp_path, **settings):
        await platform.enqueue(*make_callbacks(target, "/blocked", 4, 20))
        await wait_until(lambda: _held(platform, 3))
    # At most one callback was called, as a probe.
    assert len(target.calls) <= calls + 1


async def _has_count(platform: Bench, url: str, count: int) -> bool:
    return (await target_row(platform, url)).get("count") == count


async def test_410_disables_the_target(platform: Bench, target: Target) -> None:
    """C6: a callback answered with 410 is dead, and later callbacks are held.

    The target receives no call until an operator enables it.
    """
    target.answer = answering(410, 200)
    url = f"{target.url}/hook"
    async with platform.service(**FAST):
        await platform.enqueue(make_callback(url, 1))
        await wait_until(lambda: has_state(platform, url, "disabled"))
        await platform.enqueue(*make_callbacks(target, "/hook", 5, 10))
        await wait_until(lambda: _held(platform, 5))
        row = await target_row(platform, url)
        assert "410" in row["why"]
        assert row["called_at"] == row["changed_at"]
        assert len(target.calls) == 1
        assert await targets.enable(platform.connection, TargetId("default", url))
        await wait_until(lambda: _states_are(platform, {"dead": 1, "delivered": 5}))


async def _states_are(platform: Bench, expected: dict[str, int]) -> bool:
    return await platform.states() == Counter(expected)


async def test_a_rate_limit_slows_only_its_target(platform: Bench, target: Target) -> None:
    """C10: two calls a second delay the limited target's callbacks, and no other target's."""
    await targets.limit(platform.connection, TargetId("default", f"{target.url}/hook"), 2.0)
    # On a busy machine a call takes tenths of a second; it must not make its target abnormal.
    patient = {"callback_slow_s": 20.0, "callback_timeout_s": 30.0}
    async with platform.service(**{**FAST, **patient}):
        await platform.enqueue(
            *make_callbacks(target, "/hook", 60), *make_callbacks(target, "/other", 30, 100)
        )
        await wait_until(lambda: len(target.ids("/other")) == 30)
        # All calls of the limited target take half a minute.
        assert len(target.ids("/hook")) < 60
        await wait_until(lambda: len(target.ids("/hook")) >= 8)
    at_s = [call.at_s for call in target.calls if call.path == "/hook"]
    # A second less: the first call may have taken longer to arrive than the last.
    assert at_s[-1] - at_s[0] >= (len(at_s) - 1) / 2.0 - 1.0


async def test_each_ended_callback_has_one_result_record(platform: Bench, target: Target) -> None:
    """C12: `callbacks.results` has attempts and status of each callback that ended."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=200 if request.path == "/hook" else 500)

    target.answer = answer
    async with platform.service(callback_schedule_s=("0.1",)):
        await platform.enqueue(
            make_callback(f"{target.url}/hook", 1), make_callback(f"{target.url}/fails", 2)
        )
        await wait_until(lambda: _states_are(platform, {"delivered": 1, "dead": 1}))
        results = await platform.records(CALLBACKS_RESULTS.name, 2)
    for result in results:
        conform(result, "callback-result")
    found = {
        result["task_id"]: (result["outcome"], result["attempts"], result["status"]) for result in results
    }
    assert found == {1: ("delivered", 1, 200), 2: ("dead", 2, 500)}


async def test_callbacks_of_a_task_are_delivered_in_order(platform: Bench, target: Target) -> None:
    """C11: a callback waits while its predecessor fails; another task's callback does not."""
    fails = 3

    async def answer(request: web.Request) -> web.Response:
        nonlocal fails
        if request.headers["webhook-id"].endswith("-first") and fails:
            fails -= 1
            return web.Response(status=500)
        return web.Response()

    target.answer = answer
    url = f"{target.url}/hook"
    ordered = [
        make_callback(url, 7, id=f"msg_7-{name}", ordered=True)
        for name in ("a-first", "b-second", "c-third", "d-last")
    ]
    other = make_callback(url, 8, ordered=True)
    async with platform.service(**FAST):
        await platform.enqueue(*ordered, other)
        await wait_until(platform.all_delivered)
    ids = target.ids()
    assert [name for name in ids if name.startswith("msg_7")] == [
        *["msg_7-a-first"] * 4,
        "msg_7-b-second",
        "msg_7-c-third",
        "msg_7-d-last",
    ]
    assert ids.index(other.id) < ids.index("msg_7-b-second")


@pytest.fixture
def _short_self_check_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries calls that fail in self-check mode after 1 s instead of 10 s."""
    monkeypatch.setattr(outcomes, "SELF_CHECK_RETRY_S", 1.0)


# Up to twenty targets hang: each needs a slot, so that no round of attempts waits for one.
SELF_CHECK = {**FAST, "callback_suspicion_share": 0.1, "callback_diverted_slots": 24}


@asynccontextmanager
async def hosts(count: int, answer: Answer) -> AsyncIterator[list[Callback]]:
    """Independent hosts with the same answer; yields a callback for each."""
    async with AsyncExitStack() as stack:
        made = []
        for number in range(1, count + 1):
            server = await stack.enter_async_context(target_server())
            server.answer = answer
            made.append(make_callback(f"{server.url}/blocked{number}", number))
        yield made


@pytest.mark.usefixtures("_short_self_check_retry")
async def test_self_check_mode_starts_when_all_hosts_are_slow(platform: Bench) -> None:
    """C4a: when all hosts hang at once, they stay normal and all callbacks are delivered.

    No callback is held, and none exhausts its schedule.
    """
    blocking = BlockingAnswer()
    # Ten targets must become abnormal by their third attempt before any has ended its last one.
    settings = {**SELF_CHECK, "callback_schedule_s": ("0.2",) * 5}
    async with hosts(20, blocking) as callbacks, platform.service(**settings):
        await platform.enqueue(*callbacks)
        # One attempt more than the schedule allows.
        await wait_until(lambda: _all_tried(platform, 7))
        await wait_until(lambda: _all_normal(platform))
        blocking.unblocked.set()
        await wait_until(platform.all_delivered)


@pytest.mark.usefixtures("_short_self_check_retry")
async def test_attempts_in_self_check_mode_use_no_schedule(platform: Bench) -> None:
    """C4a, C6: attempts in self-check mode leave the retry schedule as it is.

    An outage of this process takes more attempts than the schedule allows. The next process is not
    in self-check mode and continues the schedule. A target that goes on failing exhausts it.
    """
    settings = {
        **SELF_CHECK,
        # One slow call of each target starts self-check mode before an attempt ends.
        "callback_abnormal_count": 1,
        "callback_schedule_s": ("0.2", "0.2"),
    }
    failed: set[str] = set()
    blocking, outage = BlockingAnswer(), True

    async def answer(request: web.Request) -> web.Response:
        if outage:
            return await blocking(request)
        name = request.headers["webhook-id"]
        fails = request.path == "/blocked7" or name not in failed
        failed.add(name)
        return web.Response(status=500 if fails else 200)

    async with hosts(12, answer) as callbacks:
        async with platform.service(**settings):
            await platform.enqueue(*callbacks)
            await wait_until(lambda: _all_tried(platform, 5))
        outage = False
        async with platform.service(**settings):
            await wait_until(lambda: _states_are(platform, {"dead": 1, "delivered": 11}))


async def test_one_host_that_hangs_starts_no_self_check(
    platform: Bench, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """C4a: a host that hangs is one failure, by however many URLs it is called."""
    target.answer = blocking = BlockingAnswer()
    callbacks = [make_callback(f"{target.url}/blocked{number}", number) for number in range(1, 41)]
    async with platform.service(**SELF_CHECK):
        await platform.enqueue(*callbacks)
        await wait_until(lambda: _held(platform, 20))
        blocking.unblocked.set()
        await wait_until(platform.all_delivered)
    assert "self-check mode" not in caplog.text


async def test_a_pause_of_the_process_makes_no_call_slow(
    platform: Bench, target: Target, tmp_path: Path
) -> None:
    """C4a: calls that are answered during a pause of the service do not count as slow."""
    settings = {name: str(value) for name, value in FAST.items() if not isinstance(value, tuple)} | {
        "callback_timeout_s": "10",
        "callback_calm_s": "600",
        "callback_slow_s": "2",
    }
    stopped = asyncio.Event()

    async def answer(_request: web.Request) -> web.Response:
        await stopped.wait()
        return web.Response()

    target.answer = answer
    async with platform.process(tmp_path, **settings) as process:
        await platform.enqueue(*make_callbacks(target, "/hook", 8))
        await wait_until(lambda: target.under_way["/hook"] == 8)
        process.send_signal(signal.SIGSTOP)
        stopped.set()
        # Longer than `callback_slow_s`.
        await asyncio.sleep(2.5)
        process.send_signal(signal.SIGCONT)
        await wait_until(platform.all_delivered)
        await platform.enqueue(make_callback(f"{target.url}/hook", 100))
        await wait_until(platform.all_delivered)
        process.send_signal(signal.SIGTERM)
        await process.wait()
    assert (await target_row(platform, f"{target.url}/hook"))["count"] == 0


async def _all_normal(platform: Bench) -> bool:
    states = await platform.connection.fetch("SELECT state FROM callback_target")
    return {row["state"] for row in states} == {"normal"}


async def _all_tried(platform: Bench, times: int) -> bool:
    rows = await platform.rows()
    return all(row["attempt"] >= times for row in rows.values())


async def test_an_idle_abnormal_target_becomes_normal(platform: Bench) -> None:
    """C4a, C8: the row of an abnormal target without calls and callbacks becomes normal."""
    url = "https://gone.example/hook"
    await platform.connection.execute(
        "INSERT INTO callback_target (url, state, count, slow_at, called_at) "
        "VALUES ($1, 'abnormal', 6, now() - interval '1 hour', now() - interval '1 hour')",
        url,
    )
    async with platform.service(**FAST):
        await wait_until(lambda: has_state(platform, url, "normal"))
    assert (await target_row(platform, url))["count"] == 0


async def test_logs_contain_only_the_origin_of_a_url(
    platform: Bench, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """C7: no log entry contains the path or the query of a URL, because they may be secrets.

    The test causes failures, dead callbacks, a diversion, a recovery, a 410, a refused connection,
    a lost target and a rejected record. It reads the service's entries and those of libraries.
    """
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "penstock")
    secret = "s3cr3t-p4th"
    blocked_path, gone_path, failing_path = (
        f"/{kind}/{secret}?token={secret}" for kind in ("blocked", "gone", "fails")
    )
    unblocked = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path.startswith("/blocked"):
            await unblocked.wait()
        return web.Response(status={"g": 410, "f": 500}.get(request.path[1], 200))

    target.answer = answer
    unreachable = [
        make_callback(f"http://127.0.0.1:9/{secret}", 300),
        make_callback(f"http://a..b/{secret}?{secret}", 301),
    ]

    def events() -> set[str]:
        return {getattr(record, "event", "") for record in caplog.records}

    async with platform.service(
        **{**FAST, "callback_schedule_s": ("0.3",), "callback_guards_off": ("decay",)}
    ):
        await platform.send(orjson.dumps({"target": f"{target.url}/{secret}", "id": 7}))
        await platform.enqueue(
            *make_callbacks(target, gone_path, 1, 100),
            *make_callbacks(target, failing_path, 1, 200),
            *unreachable,
        )
        await wait_until(lambda: _states_are(platform, {"dead": 4}))
        await platform.enqueue(*make_callbacks(target, blocked_path, 12))
        await wait_until(lambda: has_state(platform, f"{target.url}{blocked_path}", "abnormal"))
        # The owner finds that it has lost the target.
        await platform.connection.execute("UPDATE callback_target SET owner = NULL")
        unblocked.set()
        await wait_until(lambda: "target_dropped" in events())
        numbers = itertools.count(1000)

        async def is_normal_again() -> bool:
            another = make_callback(f"{target.url}{blocked_path}", next(numbers))
            await platform.enqueue(another)
            await wait_until(lambda: _all_delivered(platform, [another]))
            return "target_recovered" in events()

        await wait_until(is_normal_again)
    assert events() >= {
        "target_diverted",
        "target_recovered",
        "target_disabled",
        "callback_died",
        "callback_retried",
    }
    assert "rejected" in caplog.text.lower()
    text = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert target.url in text
    assert secret not in text
