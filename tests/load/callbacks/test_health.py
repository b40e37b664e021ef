"""Targets that are sometimes slow, and targets that alternate."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.load.callbacks.paced_load import LONG, Load, Stream, Targets, arrived, states_of
from tests.load.callbacks.run_report import RUN
from tests.support.callback_targets import Bench
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

SECONDS, CALLS = (60, 500) if LONG else (12, 80)


async def test_a_busy_target_with_few_slow_calls_is_not_diverted(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """C4a: a busy target with few slow calls is not diverted; with one slow call in sixteen
    it is."""
    # One slow call in 1,000 in the full form. The short form has fewer calls, so one in 50 is slow.
    slow_every = 1000 if LONG else 50
    slow = {"after_s": 0.005, "slow_s": 2.5}
    await targets.behave(busy={**slow, "slow_every": slow_every})
    (url,) = targets.urls("busy", 1)
    async with platform.process(tmp_path, callback_slow_s="2"):
        ids = await load.pace(SECONDS, Stream([url], CALLS))
        await wait_until(lambda: arrived(targets, ids))
        assert await states_of(platform, "busy") == {url: "normal"}
        assert "abnormal" not in (tmp_path / "service.log").read_text()
        await targets.behave(busy={**slow, "slow_every": 16})
        since_s = max(at_s for at_s, _name in targets.calls_of("busy"))
        for _ in range(10):
            await load.pace(3, Stream([url], CALLS))
            if await _abnormal(platform, url):
                break
        assert await _abnormal(platform, url)
        row = await platform.connection.fetchrow(
            "SELECT extract(epoch FROM now() - changed_at)::double precision AS ago_s FROM callback_target"
        )
        await targets.collect()
    now_s = time.monotonic()
    took_s = now_s - row["ago_s"] - since_s
    RUN.note(
        "3",
        calls_a_second=CALLS,
        one_in_so_many_slow=slow_every,
        of_calls=len(ids),
        then_diverted_after_s=round(took_s, 1),
    )
    assert 0 <= took_s <= 30


async def _abnormal(platform: Bench, url: str) -> bool:
    return (await states_of(platform, "busy")).get(url) == "abnormal"


async def test_a_target_that_alternates_does_not_flap(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """C4: a target that is slow and fast for half of the calm time each is diverted once
    and stays diverted."""
    calm_s, slow_s = (60.0, 3.0) if LONG else (6.0, 0.5)
    await targets.behave(turns={"after_s": 0.005, "slow_s": slow_s * 1.5, "turns_s": calm_s / 2})
    (url,) = targets.urls("turns", 1)
    settings = {
        "callback_slow_s": str(slow_s),
        "callback_calm_s": str(calm_s),
        "callback_probe_s": str(calm_s / 12),
    }
    async with platform.process(tmp_path, **settings):
        ids = await load.pace(5 * calm_s, Stream([url], 20))
        log = (tmp_path / "service.log").read_text()
        changes = log.count("is abnormal") + log.count("is normal again")
        assert await states_of(platform, "turns") == {url: "abnormal"}
        await targets.collect()
    RUN.note("4", calm_s=calm_s, of_calls=len(ids), called=len(set(targets.ids())), transitions=changes)
    # One transition, to abnormal.
    assert changes == 1
