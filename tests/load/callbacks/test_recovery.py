"""Targets that recover with a backlog, and an egress failure that
ends."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import pytest

from tests.load.callbacks.paced_load import (
    LONG,
    Load,
    Stream,
    Targets,
    arrived,
    p99,
    slowdown,
    states_of,
)
from tests.load.callbacks.run_report import RUN
from tests.support.callback_targets import Bench
from tests.support.waiting import wait_until

# The integration tests of callbacks show the same, without the load.
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not LONG, reason="PENSTOCK_LOAD_LONG=1 is needed: under full load only"),
]

BACK, HELD = 50, 2000
# Calls per second to each target. With 50 targets, two cores can do this on the diverted path
# beside servers and load. With a rate of 20 the cores would be the limit, at about 400 calls a
# second.
RATE = 5.0
CALLS = 100
# Length of one measurement of latencies, in seconds.
SECONDS = 10


async def test_a_backlog_drains_at_the_rate_limit(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """C10: the drain keeps to the rate of each target and to the order, does not slow down
    other targets, and loses no callback."""
    await targets.behave(healthy={"after_s": 0.02}, back={"kind": "hang"})
    healthy = Stream(targets.urls("healthy", 40), CALLS / 40, unique=True)
    back = targets.urls("back", BACK)
    held = []
    for url in back:
        # The first target has ordered callbacks, four for each task.
        held += [
            load.make(url, ordered=True, task_id=1_000_000 + number // 4)
            if url == back[0]
            else load.make(url)
            for number in range(HELD)
        ]
    for at in range(0, len(held), 2000):
        await platform.enqueue(*held[at : at + 2000], publish=False, due_in_s=0)
    await platform.connection.execute("UPDATE callback SET state = 'held', diverted = true")
    await platform.connection.execute(
        "INSERT INTO callback_target (url, state, count, slow_at, called_at)"
        " SELECT url, 'abnormal', 20, now(), now() FROM unnest($1::text[]) AS i (url)",
        back,
    )
    ids = {callback.id for callback in held}
    settings = {
        "callback_drain_rate": str(RATE),
        # There are slots for all targets, so that the rate limits the drain and not the pool.
        "callback_diverted_slots": str(BACK + 10),
        "callback_slow_s": "1",
        "callback_timeout_s": "2",
        # A long schedule, so that no callback is dead before its target recovers.
        "callback_schedule_s": ",".join(["1"] * 60),
    }
    async with platform.process(tmp_path, **settings):
        warm_up = await load.pace(5, healthy)
        await wait_until(lambda: arrived(targets, warm_up))
        alone = [await load.pace(SECONDS, healthy) for _ in range(3)]
        await targets.behave(back={"after_s": 0.02})
        back_s = time.monotonic()
        during_drain = [await load.pace(SECONDS, healthy)]
        # Twice the time that the limit allows.
        for _ in range(int((2 * HELD / RATE + 60) / SECONDS)):
            if await arrived(targets, ids):
                break
            during_drain.append(await load.pace(SECONDS, healthy))
        assert await arrived(targets, ids)
        await wait_until(lambda: arrived(targets, set().union(*alone, *during_drain)))
        await wait_until(platform.all_delivered)
    took_s = max(at_s for at_s, _name in targets.calls_of("back")) - back_s
    order = defaultdict(list)
    seq = {callback.id: number for number, callback in enumerate(held)}
    task = {callback.id: callback.task_id for callback in held}
    for _at_s, name in targets.calls[back[0].removeprefix(targets.url)]:
        # The callback of a probe may arrive several times.
        if seq[name] not in order[task[name]]:
            order[task[name]].append(seq[name])
    peak_rate = max(_peak_calls_per_second(targets.calls[url.removeprefix(targets.url)]) for url in back)
    during_drain_s = [load.latencies(targets, ids_of_round) for ids_of_round in during_drain]
    alone_s = [load.latencies(targets, ids_of_round) for ids_of_round in alone]
    RUN.note(
        "5",
        targets=BACK,
        held=len(held),
        drained_in_s=round(took_s, 1),
        most_in_one_second=peak_rate,
        limit=RATE,
        healthy_p99_ms=[p99(found) for found in alone_s],
        healthy_p99_meanwhile_ms=[p99(found) for found in during_drain_s][:6],
    )
    assert all(numbers == sorted(numbers) for numbers in order.values())
    # Calls to a target start 1 / RATE seconds apart, one at a time. Of the calls that arrive within
    # a second, only the first can have started before that second.
    assert peak_rate <= RATE + 2
    assert not slowdown(during_drain_s, alone_s)
    # Not much slower than the limit either, including the wait for the probe of each target.
    assert took_s <= 1.5 * HELD / RATE + 15


def _peak_calls_per_second(calls: list[tuple[float, str]]) -> int:
    at_s = [at for at, _name in calls]
    return max(
        (sum(begin <= other < begin + 1 for other in at_s[n : n + 500]) for n, begin in enumerate(at_s)),
        default=0,
    )


async def test_an_egress_failure_diverts_no_target(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """C4a: when all targets hang at once, no target stays diverted. The service reaches its
    full rate soon after they recover."""
    outage_s, slow_s, count = 60, 3.0, 100
    await targets.behave(far={"after_s": 0.02})
    stream = Stream(targets.urls("far", count, hosts=count), 2.0)
    settings = {
        "callback_slow_s": str(slow_s),
        "callback_timeout_s": str(3 * slow_s),
        "callback_calm_s": "10",
    }
    # Self-check mode starts at this number of abnormal targets, so no more may become abnormal.
    max_abnormal = count // 10
    abnormal: list[int] = []
    async with platform.process(tmp_path, **settings):
        ids = await load.pace(5, stream)
        await wait_until(lambda: arrived(targets, ids))
        targets.process.suspend()
        try:
            for _ in range(outage_s):
                ids |= await load.pace(1, stream)
                abnormal.append(list((await states_of(platform, "far")).values()).count("abnormal"))
        finally:
            targets.process.resume()
        back_s = time.monotonic()
        after = await load.pace(30, stream)
        await wait_until(lambda: arrived(targets, after))
        await wait_until(lambda: arrived(targets, ids))
        abnormal.append(list((await states_of(platform, "far")).values()).count("abnormal"))
    at_s = sorted(at for at, name in targets.calls_of("far") if name in after)
    # The full rate: callbacks arrive within a second from then on.
    late_s = [
        targets_at - load.written_s[name] for targets_at, name in targets.calls_of("far") if name in after
    ]
    last_late = [
        at for at, name in targets.calls_of("far") if name in after and at - load.written_s[name] > 1.0
    ]
    full_s = max((at - back_s for at in last_late), default=0.0)
    RUN.note(
        "8",
        targets=count,
        shut_for_s=outage_s,
        abnormal_at_most=max(abnormal),
        abnormal_after=abnormal[-1],
        full_rate_after_s=round(full_s, 1),
        arrived=len(at_s),
        latest_ms=p99(late_s),
    )
    assert (tmp_path / "service.log").read_text().count("event=self_check_entered")
    assert max(abnormal) <= max_abnormal
    assert not abnormal[-1]
    assert full_s <= 30
