"""Issue 5, numbers 5 and 8: targets that come back with a backlog, and a way out that comes back."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import pytest

from tests.callback_targets import Bench
from tests.load.callbacks.arena import LONG, Load, Stream, Targets, arrived, felt, p99, states_of
from tests.load.callbacks.figures import RUN
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

BACK, HELD = (50, 2000) if LONG else (6, 60)
# Fifty times this, a second, is what two cores take on this path beside the servers and the load itself; at 50 times 20 it is
# they that limit, at about 400 a second in all.
RATE = 5.0 if LONG else 20.0
CALLS = 100 if LONG else 40
# Latencies are looked at for so long at a time, in seconds.
SECONDS = 10 if LONG else 5


async def test_a_backlog_is_drained_at_the_limit(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """Number 5: no target gets more than the rate it may, others do not feel it, nothing is lost, order is kept."""
    await targets.behave(healthy={"after_s": 0.02}, back={"kind": "hang"})
    healthy = Stream(targets.urls("healthy", 40), CALLS / 40)
    back = targets.urls("back", BACK)
    held = []
    for url in back:
        # The first target asked for order: tasks of four callbacks each.
        held += [
            load.make(url, ordered=True, task_id=1_000_000 + number // 4)
            if url == back[0]
            else load.make(url)
            for number in range(HELD)
        ]
    for at in range(0, len(held), 2000):
        await platform.owe(*held[at : at + 2000], publish=False, due_in_s=0)
    await platform.connection.execute("UPDATE callback SET state = 'held', diverted = true")
    await platform.connection.execute(
        "INSERT INTO callback_target (url, state, count, slow_at, called_at)"
        " SELECT url, 'abnormal', 20, now(), now() FROM unnest($1::text[]) AS i (url)",
        back,
    )
    ids = {callback.id for callback in held}
    settings = {
        "callback_drain_rate": str(RATE),
        # Slots for all of them, so that it is the rate that limits and not the pool of the diverted path.
        "callback_diverted_slots": str(BACK + 10),
        # Soon found well again, once they are.
        "callback_probe_s": "1",
        "callback_probe_most_s": "2",
        "callback_slow_s": "1",
        "callback_timeout_s": "2",
        # None that is tried while its target hangs dies of it.
        "callback_schedule_s": ",".join(["1"] * 60),
    }
    async with platform.process(tmp_path, **settings):
        warm = await load.pace(5, healthy)
        await wait_until(lambda: arrived(targets, warm), timeout=60)
        alone = [await load.pace(SECONDS, healthy) for _ in range(3)]
        await targets.behave(back={"after_s": 0.02})
        back_s = time.monotonic()
        beside = [await load.pace(SECONDS, healthy)]
        # At the limit, and as long again.
        for _ in range(int((2 * HELD / RATE + 60) / SECONDS)):
            if await arrived(targets, ids):
                break
            beside.append(await load.pace(SECONDS, healthy))
        assert await arrived(targets, ids)
        await wait_until(lambda: arrived(targets, set().union(*alone, *beside)), timeout=120)
        await wait_until(platform.all_delivered, timeout=120)
    took_s = max(at_s for at_s, _name in targets.of("back")) - back_s
    order = defaultdict(list)
    seq = {callback.id: number for number, callback in enumerate(held)}
    task = {callback.id: callback.task_id for callback in held}
    for _at_s, name in targets.calls[back[0].removeprefix(targets.url)]:
        # One that was a probe comes more than once.
        if seq[name] not in order[task[name]]:
            order[task[name]].append(seq[name])
    most = max(_most_in_a_second(targets.calls[url.removeprefix(targets.url)]) for url in back)
    with_ms = [load.latencies(targets, some) for some in beside]
    alone_ms = [load.latencies(targets, some) for some in alone]
    RUN.note(
        "5",
        targets=BACK,
        held=len(held),
        drained_in_s=round(took_s, 1),
        most_in_one_second=most,
        limit=RATE,
        healthy_p99_ms=[p99(found) for found in alone_ms],
        healthy_p99_meanwhile_ms=[p99(found) for found in with_ms][:6],
    )
    assert all(numbers == sorted(numbers) for numbers in order.values())
    # One call at a time, begun 1 / RATE seconds after the one before: of those that arrive within a second only the first
    # can have begun before that second.
    assert most <= RATE + 2
    assert not felt(with_ms, alone_ms)
    # At the limit: not much slower than it allows either, the wait for the probe that found each well again included.
    assert took_s <= 1.5 * HELD / RATE + 15


def _most_in_a_second(calls: list[tuple[float, str]]) -> int:
    at_s = [at for at, _name in calls]
    return max(
        (sum(begin <= other < begin + 1 for other in at_s[n : n + 500]) for n, begin in enumerate(at_s)),
        default=0,
    )


async def test_a_way_out_that_is_shut_is_nobodys_fault(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """Number 8: every target hangs at once: they are not diverted for it, and the full rate is there soon after they are."""
    shut_s, slow_s, count = (60, 3.0, 100) if LONG else (10, 1.0, 100)
    await targets.behave(far={"after_s": 0.02})
    stream = Stream(targets.urls("far", count), 2.0)
    settings = {
        "callback_slow_s": str(slow_s),
        "callback_timeout_s": str(3 * slow_s),
        "callback_calm_s": "10",
    }
    # As many must be abnormal, and as many may be for a moment, until the guard sees that they are too many.
    few = count // 10
    abnormal: list[int] = []
    async with platform.process(tmp_path, **settings):
        ids = await load.pace(5, stream)
        await wait_until(lambda: arrived(targets, ids), timeout=60)
        targets.process.suspend()
        try:
            for _ in range(shut_s):
                ids |= await load.pace(1, stream)
                abnormal.append(list((await states_of(platform, "far")).values()).count("abnormal"))
        finally:
            targets.process.resume()
        back_s = time.monotonic()
        after = await load.pace(30 if LONG else 10, stream)
        await wait_until(lambda: arrived(targets, after), timeout=60)
        await wait_until(lambda: arrived(targets, ids), timeout=120)
        abnormal.append(list((await states_of(platform, "far")).values()).count("abnormal"))
    at_s = sorted(at for at, name in targets.of("far") if name in after)
    # The full rate: from then on what is owed arrives within a second.
    late_s = [targets_at - load.owed_s[name] for targets_at, name in targets.of("far") if name in after]
    last_late = [at for at, name in targets.of("far") if name in after and at - load.owed_s[name] > 1.0]
    full_s = max((at - back_s for at in last_late), default=0.0)
    RUN.note(
        "8",
        targets=count,
        shut_for_s=shut_s,
        abnormal_at_most=max(abnormal),
        abnormal_after=abnormal[-1],
        full_rate_after_s=round(full_s, 1),
        arrived=len(at_s),
        latest_ms=p99(late_s),
    )
    assert (tmp_path / "service.log").read_text().count("is suspected")
    assert max(abnormal) <= few
    assert not abnormal[-1]
    assert full_s <= 30
