"""Targets that misbehave: diverted, held, probed, drained; and what operators and answers say about them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from tests.callback_targets import Bench, Target, answering, owed
from tests.waiting import wait_until

from penstock.callbacks import fates
from penstock.contracts.event import Callback
from penstock.contracts.validation import conform
from penstock.core.target import TargetId
from penstock.kafka.topics import CALLBACKS_RESULTS
from penstock.postgres import targets

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
    "callback_suspicion_share": 0.0,
    "callback_schedule_s": ("0.3",) * 50,
}


class Moody:
    """Hangs while it is told to, else answers at once."""

    def __init__(self) -> None:
        self.well = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.Response:
        if request.path.startswith("/moody"):
            await self.well.wait()
        return web.Response()


def many(target: Target, path: str, count: int, first: int = 1) -> list[Callback]:
    return [owed(f"{target.url}{path}", number) for number in range(first, first + count)]


async def row_of(platform: Bench, url: str) -> dict[str, Any]:
    row = await platform.connection.fetchrow("SELECT * FROM callback_target WHERE url = $1", url)
    return dict(row) if row else {}


async def has_state(platform: Bench, url: str, state: str) -> bool:
    return (await row_of(platform, url)).get("state") == state


async def test_a_hanging_target_is_diverted_and_comes_back(platform: Bench, target: Target) -> None:
    """C3, C4, C6: after three slow calls it is abnormal and its callbacks are held; probes find it well again, its
    backlog is drained, it is normal, and what comes then takes the normal path."""
    target.answer = moody = Moody()
    callbacks = many(target, "/moody", 40)
    url = callbacks[0].target.url
    async with platform.service(**HASTY):
        await platform.owe(*callbacks)
        await wait_until(lambda: has_state(platform, url, "abnormal"))
        await wait_until(lambda: _held(platform, 20))
        calls = len(target.calls)
        # While it hangs it is probed, one call at a time.
        await wait_until(lambda: len(target.calls) >= calls + 2)
        assert target.under_way["/moody"] <= 8
        moody.well.set()
        await wait_until(platform.all_delivered)
        await wait_until(lambda: has_state(platform, url, "normal"))
        later = many(target, "/moody", 5, 100)
        await platform.owe(*later)
        await wait_until(platform.all_delivered)
    rows = await platform.rows()
    assert sum(row["diverted"] for row in rows.values()) >= 20
    assert not any(rows[callback.id]["diverted"] for callback in later)
    assert set(target.ids()) == {*rows}


async def _held(platform: Bench, count: int) -> bool:
    return (await platform.states())["held"] >= count


async def test_many_targets_that_hang_do_not_keep_each_others_records(
    platform: Bench, target: Target
) -> None:
    """C5, O2a: thirty hang, one slot is theirs and the slow pool is full, so the last has its turn after a minute. Nobody's
    record waits for that, or the service would be taken for one that makes no progress and end."""
    target.answer = moody = Moody()
    callbacks = [owed(f"{target.url}/moody/{number}", number) for number in range(1, 31)]
    await platform.owe(*callbacks, publish=False, due_in_s=0)
    await platform.connection.execute("UPDATE callback SET diverted = true")
    settings = {
        **HASTY,
        "callback_diverted_slots": 1,
        "callback_slow_slots": 1,
        "callback_slow_target_slots": 1,
        "callback_timeout_s": 3.0,
        "callback_horizon_s": 6.0,
        "callback_patience_s": 1.0,
        "callback_postpone_s": 2.0,
        "stall_timeout_s": 12.0,
    }
    async with platform.service(**settings):
        # Three seconds each, so longer than the watchdog waits for a record.
        await wait_until(lambda: len(target.calls) >= 14, timeout=90)
        moody.well.set()
        await wait_until(platform.all_delivered, timeout=60)


async def test_a_target_that_hangs_for_longer_than_anybody_waits_is_probed_again_and_again(
    platform: Bench, target: Target
) -> None:
    """C4a: its calls take all of the patience and find no room in the slow pool; it is called on, and comes back."""
    target.answer = moody = Moody()
    settings = {
        **HASTY,
        "callback_patience_s": 0.5,
        "callback_slow_slots": 1,
        "callback_slow_target_slots": 1,
    }
    callbacks = many(target, "/moody", 30)
    async with platform.service(**settings):
        await platform.owe(*callbacks)
        await wait_until(lambda: has_state(platform, callbacks[0].target.url, "abnormal"))
        for _ in range(3):
            calls = len(target.calls)
            await wait_until(lambda calls=calls: len(target.calls) > calls)
        moody.well.set()
        await wait_until(platform.all_delivered)


async def test_what_waits_in_memory_stops_when_its_target_is_disabled(
    platform: Bench, target: Target
) -> None:
    """C8: an operator's word holds for what has its turn next, too."""
    url = f"{target.url}/hook"
    await targets.limit(platform.connection, TargetId("default", url), 2.0)
    async with platform.service(**HASTY):
        await platform.owe(*many(target, "/hook", 15))
        await wait_until(lambda: len(target.calls) >= 2)
        await targets.disable(platform.connection, TargetId("default", url), "maintenance")
        await wait_until(lambda: _held(platform, 8))

        async def all_others_are_held() -> bool:
            return len(target.calls) + (await platform.states())["held"] == 15

        await wait_until(all_others_are_held)
        assert await targets.enable(platform.connection, TargetId("default", url))
        await wait_until(platform.all_delivered)


async def test_others_do_not_feel_a_hanging_target(platform: Bench, target: Target) -> None:
    """C5: before the verdict and after it, a healthy target's callbacks arrive while another hangs."""
    target.answer = Moody()
    async with platform.service(**HASTY, callback_slots=12):
        await platform.owe(*many(target, "/moody", 60))
        for part in range(5):
            healthy = many(target, "/well", 20, 100 + 20 * part)
            await platform.owe(*healthy)
            await wait_until(lambda healthy=healthy: _all_delivered(platform, healthy))
        assert await has_state(platform, f"{target.url}/moody", "abnormal")
        assert await has_state(platform, f"{target.url}/well", "normal")


async def _all_delivered(platform: Bench, callbacks: list[Callback]) -> bool:
    rows = await platform.rows()
    return all(rows[callback.id]["state"] == "delivered" for callback in callbacks)


async def test_a_call_that_hangs_holds_back_no_records(platform: Bench, target: Target) -> None:
    """C5: forty records may be in hand; behind one whose call hangs, in the same partition, four hundred are delivered."""
    target.answer = moody = Moody()
    hanging = owed(f"{target.url}/moody")
    healthy = many(target, "/well", 400, 100)
    settings = {
        "callback_horizon_s": 28.0,
        "max_in_flight": 40,
        "callback_slots": 20,
        "callback_timeout_s": 14.0,
    }
    async with platform.service(**settings):
        await platform.owe(hanging)
        await wait_until(lambda: target.calls)
        await platform.owe(*healthy, publish=False)
        for callback in healthy:
            await platform.send(callback.encode(), hanging.target.url.encode())
        await wait_until(lambda: _all_delivered(platform, healthy))
        assert len(target.ids("/moody")) == 1
        moody.well.set()
        await wait_until(platform.all_delivered)


async def test_attempts_written_down_ahead_of_a_target_that_turns_abnormal_cost_nothing(
    platform: Bench, target: Target
) -> None:
    """C3, C6: they are held and not made; their numbers are used up, their places in the schedule are not."""
    target.answer = moody = Moody()
    moody.well.set()
    quick = many(target, "/moody", 40)
    async with platform.service(**HASTY):
        await platform.owe(*quick)
        await wait_until(platform.all_delivered)
        moody.well.clear()
        late = many(target, "/moody", 40, 100)
        await platform.owe(*late)

        async def ahead() -> list[str]:
            rows = (await platform.rows()).values()
            return [r["id"] for r in rows if r["state"] == "held" and r["attempt"] == 1 == r["spent"]]

        await wait_until(ahead)
        assert not set(await ahead()) & set(target.ids())
        moody.well.set()
        await wait_until(platform.all_delivered)
        assert set(target.ids()) == {callback.id for callback in (*quick, *late)}


async def test_attempts_written_down_ahead_are_not_made_once_their_target_is_gone(
    platform: Bench, target: Target
) -> None:
    """C6: after its 410 only what was under way meets another; the rest is held, and its schedule is whole."""
    answer = web.Response
    target.answer = moody = Moody()
    moody.well.set()
    quick, late = many(target, "/moody", 40), many(target, "/moody", 40, 100)
    async with platform.service(**HASTY):
        await platform.owe(*quick)
        await wait_until(platform.all_delivered)

        async def gone(_request: web.Request) -> web.StreamResponse:
            return answer(status=410)

        target.answer = gone
        await platform.owe(*late)
        await wait_until(lambda: has_state(platform, f"{target.url}/moody", "disabled"))

        async def at_rest() -> bool:
            return not (await platform.states())["pending"]

        await wait_until(at_rest)
        rows = await platform.rows()
    states = Counter(rows[callback.id]["state"] for callback in late)
    # So many calls may be under way to one target.
    assert 1 <= states["dead"] <= 8
    assert states["held"] == 40 - states["dead"]
    assert len(target.ids()) == 40 + states["dead"]
    assert all(row["attempt"] == (row["spent"] or 0) for row in rows.values() if row["state"] == "held")


async def test_a_stop_does_not_call_what_a_slow_target_has_ahead(platform: Bench, target: Target) -> None:
    """O1, C6: a service that stops calls what it has begun, but not behind calls that hang: those are found by the next."""
    target.answer = moody = Moody()
    moody.well.set()
    quick, late = many(target, "/moody", 40), many(target, "/moody", 40, 100)
    async with platform.service(
        **{**HASTY, "callback_abnormal_count": 1000, "callback_abnormal_ceiling": 1000}
    ):
        await platform.owe(*quick)
        await wait_until(platform.all_delivered)
        moody.well.clear()
        await platform.owe(*late)
        await wait_until(lambda: len(target.ids()) > 40)
    called = set(target.ids())
    rows = [row for row in (await platform.rows()).values() if row["id"] not in called]
    assert rows
    # Their numbers are used up and not their places, and nothing waits for the horizon of an attempt that was not made.
    assert all(row["attempt"] == (row["spent"] or 0) for row in rows)
    moody.well.set()
    async with platform.service(**HASTY):
        await wait_until(platform.all_delivered)


async def test_a_slow_call_is_not_cancelled(platform: Bench, target: Target) -> None:
    """C7a: at the slow moment the call leaves its slot, goes on and is delivered: one call each, no duplicate."""

    async def answer(_request: web.Request) -> web.Response:
        await asyncio.sleep(0.6)
        return web.Response()

    target.answer = answer
    callbacks = many(target, "/slow", 12)
    settings = {**HASTY, "callback_abnormal_count": 100, "callback_abnormal_ceiling": 100}
    async with platform.service(**settings, callback_slots=4, callback_target_slots=4):
        await platform.owe(*callbacks)
        await wait_until(platform.all_delivered)
    # More than there are slots: those that turned out slow held none.
    assert target.most_under_way["/slow"] > 4
    assert Counter(target.ids()) == Counter(callback.id for callback in callbacks)


async def test_a_quick_failure_is_retried_aside_and_is_not_abnormal(platform: Bench, target: Target) -> None:
    """C2, C6: twenty quick failures charge nothing; each is retried, on the diverted path, and delivered."""
    left = Counter({callback.id: 1 for callback in many(target, "/fails", 20)})

    async def answer(request: web.Request) -> web.Response:
        name = request.headers["webhook-id"]
        left[name] -= 1
        return web.Response(status=503 if left[name] >= 0 else 200)

    target.answer = answer
    async with platform.service(**HASTY):
        await platform.owe(*many(target, "/fails", 20))
        await wait_until(platform.all_delivered)
    row = await row_of(platform, f"{target.url}/fails")
    assert (row["state"], row["count"]) == ("normal", 0)


async def test_health_survives_a_restart_and_a_kill(platform: Bench, target: Target, tmp_path: Path) -> None:
    """C7b: counted to five before a kill -9, three more calls make eight; an abnormal target is held from the first
    record on by whoever comes next."""
    target.answer = Moody()
    url = f"{target.url}/moody"
    settings = {name: str(value) for name, value in HASTY.items() if not isinstance(value, tuple)} | {
        "callback_calm_s": "600",
        "callback_abnormal_count": "8",
        "callback_abnormal_ceiling": "12",
        "callback_schedule_s": "600",
        "callback_target_slots": "5",
        "callback_decay_s": "0",
        # The attempts whose fate the kill hides shall not come again, and be counted, while this looks.
        "callback_horizon_s": "600",
    }
    async with platform.process(tmp_path, **settings) as process:
        await platform.owe(*many(target, "/moody", 5))
        await wait_until(lambda: _counts(platform, url, 5))
        process.kill()
        await process.wait()
    async with platform.process(tmp_path, **settings):
        await platform.owe(*many(target, "/moody", 3, 10))
        await wait_until(lambda: has_state(platform, url, "abnormal"))
        assert await _counts(platform, url, 8)
    calls = len(target.calls)
    settings |= {"callback_probe_s": "500", "callback_probe_most_s": "600"}
    async with platform.process(tmp_path, **settings):
        await platform.owe(*many(target, "/moody", 4, 20))
        await wait_until(lambda: _held(platform, 3))
    # One probe at most was made of them.
    assert len(target.calls) <= calls + 1


async def _counts(platform: Bench, url: str, count: int) -> bool:
    return (await row_of(platform, url)).get("count") == count


async def test_replicas_count_once_together(platform: Bench, target: Target) -> None:
    """C7b: with three replicas a target belongs to one: it is abnormal at the third slow call, not at the ninth."""
    target.answer = Moody()
    settings = {
        **HASTY,
        "callback_target_slots": 1,
        "callback_slow_target_slots": 1,
        "callback_timeout_s": 2.0,
    }
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(platform.service(**settings))
        paths = [f"/moody{number}" for number in range(8)]
        for at, path in enumerate(paths):
            await platform.owe(*many(target, path, 12, 1 + 100 * at))
        for path in paths:
            await wait_until(lambda path=path: has_state(platform, f"{target.url}{path}", "abnormal"))
            assert len(target.ids(path)) <= 6
        owners = await platform.connection.fetch("SELECT DISTINCT owner FROM callback_target")
        assert len(owners) > 1


async def test_410_disables_the_target(platform: Bench, target: Target) -> None:
    """C6: the callback it answered is dead, later ones are held, and nobody calls until an operator enables it."""
    target.answer = answering(410, 200)
    url = f"{target.url}/hook"
    async with platform.service(**HASTY):
        await platform.owe(owed(url, 1))
        await wait_until(lambda: has_state(platform, url, "disabled"))
        await platform.owe(*many(target, "/hook", 5, 10))
        await wait_until(lambda: _held(platform, 5))
        row = await row_of(platform, url)
        assert "410" in row["why"]
        assert row["called_at"] == row["changed_at"]
        assert len(target.calls) == 1
        assert await targets.enable(platform.connection, TargetId("default", url))
        await wait_until(lambda: _states_are(platform, {"dead": 1, "delivered": 5}))


async def _states_are(platform: Bench, expected: dict[str, int]) -> bool:
    return await platform.states() == Counter(expected)


async def test_an_operator_disables_and_enables(platform: Bench, target: Target) -> None:
    """C8: disabled while it is being called, its callbacks are held within a moment, and go on when it is enabled."""
    url = f"{target.url}/hook"
    async with platform.service(**HASTY):
        await platform.owe(owed(url, 1))
        await wait_until(platform.all_delivered)
        assert await targets.disable(platform.connection, TargetId("default", url), "maintenance")
        await wait_until(lambda: _is_held_at_once(platform, url))
        calls = len(target.calls)
        assert await targets.enable(platform.connection, TargetId("default", url))
        await wait_until(platform.all_delivered)
        assert len(target.calls) > calls
        assert not await targets.enable(platform.connection, TargetId("default", url))


async def _is_held_at_once(platform: Bench, url: str) -> bool:
    number = 1000 + len(await platform.rows())
    await platform.owe(owed(url, number))
    name = owed(url, number).id
    state = await wait_until(lambda: _decided(platform, name))
    return state == "held"


async def _decided(platform: Bench, name: str) -> str | None:
    state = (await platform.rows())[name]["state"]
    return state if state != "pending" else None


async def test_a_rate_is_kept(platform: Bench, target: Target) -> None:
    """Issue 5: thirty callbacks to a target that may have ten a second take three seconds; another's go at once."""
    await targets.limit(platform.connection, TargetId("default", f"{target.url}/hook"), 10.0)
    async with platform.service(**HASTY):
        await platform.owe(*many(target, "/hook", 30), *many(target, "/other", 30, 100))
        await wait_until(platform.all_delivered)
    at_s = [call.at_s for call in target.calls if call.path == "/hook"]
    other_s = [call.at_s for call in target.calls if call.path == "/other"]
    # The first call may have taken longer to arrive than the last.
    assert at_s[-1] - at_s[0] >= 2.5
    assert other_s[-1] - other_s[0] < 2.0


async def test_results_say_what_became_of_each(platform: Bench, target: Target) -> None:
    """Issue 5: one record on `callbacks.results` for each callback that ended, with its attempts and status."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=200 if request.path == "/hook" else 500)

    target.answer = answer
    async with platform.service(callback_schedule_s=("0.1",)):
        await platform.owe(owed(f"{target.url}/hook", 1), owed(f"{target.url}/fails", 2))
        await wait_until(lambda: _states_are(platform, {"delivered": 1, "dead": 1}))
        results = await platform.records(CALLBACKS_RESULTS.name, 2)
    for result in results:
        conform(result, "callback-result")
    found = {
        result["task_id"]: (result["outcome"], result["attempts"], result["status"]) for result in results
    }
    assert found == {1: ("delivered", 1, 200), 2: ("dead", 2, 500)}


async def test_callbacks_of_a_task_are_delivered_in_order(platform: Bench, target: Target) -> None:
    """Issue 5: while the first fails the second waits, though it comes earlier; another task's does not."""
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
        owed(url, 7, id=f"msg_7-{name}", ordered=True)
        for name in ("a-first", "b-second", "c-third", "d-last")
    ]
    other = owed(url, 8, ordered=True)
    async with platform.service(**HASTY):
        await platform.owe(*ordered, other)
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
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails while we are suspected is tried again within a second, and not within ten."""
    monkeypatch.setattr(fates, "WHILE_SUSPICIOUS_S", 1.0)


# They hang, twenty and twelve of them: no round of attempts shall wait for slots.
ROOMY = {**HASTY, "callback_suspicion_share": 0.1, "callback_diverted_slots": 24}


@pytest.mark.usefixtures("_impatient")
async def test_when_all_are_slow_at_once_it_is_us(platform: Bench, target: Target) -> None:
    """C4a: every target hangs at once: they are forgiven, nothing is held, nothing dies, all is delivered after."""
    target.answer = moody = Moody()
    callbacks = [owed(f"{target.url}/moody{number}", number) for number in range(1, 21)]
    settings = {**ROOMY, "callback_schedule_s": ("0.2", "0.2")}
    async with platform.service(**settings):
        await platform.owe(*callbacks)
        # Once more than the schedule has.
        await wait_until(lambda: _all_tried(platform, 4), timeout=120)
        await wait_until(lambda: _all_normal(platform))
        moody.well.set()
        await wait_until(platform.all_delivered, timeout=120)


@pytest.mark.usefixtures("_impatient")
async def test_attempts_made_while_we_are_suspected_do_not_count(platform: Bench, target: Target) -> None:
    """C4a, C6: an outage of ours takes more attempts than the schedule has; the process ends, and the next one, which
    suspects nobody, goes on with the schedule where it was; a target that goes on failing exhausts it."""
    target.answer = Moody()
    callbacks = [owed(f"{target.url}/moody{number}", number) for number in range(1, 13)]
    settings = {
        **ROOMY,
        # The first slow call of each: we are suspected before an attempt has ended.
        "callback_abnormal_count": 1,
        "callback_schedule_s": ("0.2", "0.2"),
    }
    async with platform.service(**settings):
        await platform.owe(*callbacks)
        await wait_until(lambda: _all_tried(platform, 5), timeout=120)
    failed: set[str] = set()

    async def answer(request: web.Request) -> web.Response:
        name = request.headers["webhook-id"]
        fails = request.path == "/moody7" or name not in failed
        failed.add(name)
        return web.Response(status=500 if fails else 200)

    target.answer = answer
    async with platform.service(**settings):
        await wait_until(lambda: _states_are(platform, {"dead": 1, "delivered": 11}), timeout=60)


async def test_what_takes_long_because_we_stood_still_is_not_slow(
    platform: Bench, target: Target, tmp_path: Path
) -> None:
    """C4a: the service is stopped for a while with calls under way that are answered meanwhile: nobody is charged."""
    settings = {name: str(value) for name, value in HASTY.items() if not isinstance(value, tuple)} | {
        "callback_timeout_s": "10",
        "callback_horizon_s": "20",
        "callback_calm_s": "600",
        "callback_slow_s": "2",
    }
    stopped = asyncio.Event()

    async def answer(_request: web.Request) -> web.Response:
        await stopped.wait()
        return web.Response()

    target.answer = answer
    async with platform.process(tmp_path, **settings) as process:
        await platform.owe(*many(target, "/hook", 8))
        await wait_until(lambda: target.under_way["/hook"] == 8)
        process.send_signal(signal.SIGSTOP)
        stopped.set()
        # Longer than what is slow.
        await asyncio.sleep(2.5)
        process.send_signal(signal.SIGCONT)
        await wait_until(platform.all_delivered)
        await platform.owe(owed(f"{target.url}/hook", 100))
        await wait_until(platform.all_delivered)
        process.send_signal(signal.SIGTERM)
        await process.wait()
    assert (await row_of(platform, f"{target.url}/hook"))["count"] == 0


async def _all_normal(platform: Bench) -> bool:
    states = await platform.connection.fetch("SELECT state FROM callback_target")
    return {row["state"] for row in states} == {"normal"}


async def _all_tried(platform: Bench, times: int) -> bool:
    rows = await platform.rows()
    return all(row["attempt"] >= times for row in rows.values())


async def test_a_target_that_decays_while_nobody_calls_it_is_shown_as_normal(platform: Bench) -> None:
    """C4a, C8: abnormal an hour ago, with nothing held and nothing to send: its row says normal again."""
    url = "https://gone.example/hook"
    await platform.connection.execute(
        "INSERT INTO callback_target (url, state, count, slow_at, called_at) "
        "VALUES ($1, 'abnormal', 6, now() - interval '1 hour', now() - interval '1 hour')",
        url,
    )
    async with platform.service(**HASTY):
        await wait_until(lambda: has_state(platform, url, "normal"))
    assert (await row_of(platform, url))["count"] == 0


async def test_no_log_has_more_of_a_url_than_its_origin(
    platform: Bench, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """C7: path and query may be secrets; whatever befalls a target (failure, death, verdict, recovery, 410, nobody there, an
    operator's word, a record that is none), no message of ours has them, and none of a library that is shown by default."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "penstock")
    secret = "s3cr3t-p4th"
    moody, gone, fails = (f"/{kind}/{secret}?token={secret}" for kind in ("moody", "gone", "fails"))
    well = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path.startswith("/moody"):
            await well.wait()
        return web.Response(status={"g": 410, "f": 500}.get(request.path[1], 200))

    target.answer = answer
    nobody = [owed(f"http://127.0.0.1:9/{secret}", 300), owed(f"http://a..b/{secret}?{secret}", 301)]
    async with platform.service(**{**HASTY, "callback_schedule_s": ("0.3",), "callback_decay_s": 0.0}):
        await platform.send(orjson.dumps({"target": f"{target.url}/{secret}", "id": 7}))
        await platform.owe(*many(target, gone, 1, 100), *many(target, fails, 1, 200), *nobody)
        await wait_until(lambda: _states_are(platform, {"dead": 4}))
        await platform.owe(*many(target, moody, 12))
        await wait_until(lambda: has_state(platform, f"{target.url}{moody}", "abnormal"))
        # Its owner finds that somebody else has it now.
        await platform.connection.execute("UPDATE callback_target SET owner = NULL")
        well.set()
        await wait_until(lambda: "was changed by somebody else" in caplog.text)
        numbers = itertools.count(1000)

        async def is_normal_again() -> bool:
            another = owed(f"{target.url}{moody}", next(numbers))
            await platform.owe(another)
            await wait_until(lambda: _all_delivered(platform, [another]))
            return "is normal again" in caplog.text

        await wait_until(is_normal_again, timeout=60)
    for said in ("is abnormal", "is normal again", "is disabled", "is dead", "again in", "rejected"):
        assert said in caplog.text
    assert target.url in caplog.text
    assert secret not in caplog.text
