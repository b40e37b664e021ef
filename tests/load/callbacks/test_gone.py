"""Many URLs that are gone cost healthy targets nothing, and no memory."""

from __future__ import annotations

from pathlib import Path

from tests.load.callbacks.paced_load import (
    FULL_FORM,
    Load,
    Stream,
    Targets,
    arrived,
    p99,
    rss_mb,
    slowdown,
    states_of,
)
from tests.load.callbacks.run_report import RUN
from tests.support.callback_targets import Bench
from tests.support.waiting import wait_until

pytestmark = FULL_FORM

# URLs that are gone, in all rounds together.
GONE = 20_000
ROUNDS = 2
HEALTHY, CALLS = 20, 60
# Each URL that is gone is called once in so many seconds.
SECONDS = 50


async def test_unique_urls_that_are_gone_do_not_slow_down_healthy_targets(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """C5, C6: unique URLs that answer 410 do not raise the p99 of healthy targets, compared with as
    many unique URLs that are healthy. They take less than 1 KB of memory each."""
    await targets.behave(healthy={"after_s": 0.02}, gone={"status": 410})
    stream = Stream(targets.urls("healthy", HEALTHY), CALLS / HEALTHY)
    gone, fresh = targets.urls("gone", GONE), targets.urls("fresh", GONE)
    alone, disturbed = [], []
    grown_mb = 0.0
    async with platform.process(tmp_path) as process:
        warm_up = await load.pace(SECONDS, stream)
        await wait_until(lambda: arrived(targets, warm_up))
        for number in range(ROUNDS):
            for urls, latencies in ((fresh, alone), (gone, disturbed)):
                before_mb = rss_mb(process.pid)
                part = urls[number * GONE // ROUNDS : (number + 1) * GONE // ROUNDS]
                ids = await load.pace(SECONDS, stream, Stream(part, 1.001 / SECONDS))
                await wait_until(lambda ids=ids: arrived(targets, ids))
                healthy = {name for name in ids if "/healthy/" in load.url[name]}
                latencies.append(load.latencies(targets, healthy))
                if urls is gone:
                    grown_mb += rss_mb(process.pid) - before_mb

        async def all_ended() -> bool:
            return (await platform.states())["pending"] == 0

        await wait_until(all_ended)
    assert set((await states_of(platform, "gone")).values()) == {"disabled"}
    assert (await platform.states())["dead"] == GONE
    RUN.note(
        "12",
        gone=GONE,
        beside_healthy_ones_p99_ms=[p99(found) for found in alone],
        beside_those_that_are_gone_p99_ms=[p99(found) for found in disturbed],
        memory_grown_mb=round(grown_mb, 1),
    )
    assert not slowdown(disturbed, alone)
    assert grown_mb <= max(GONE / 1024, 16)
