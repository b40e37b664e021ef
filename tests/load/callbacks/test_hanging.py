"""Issue 5, numbers 1 and 2: what hangs is not felt by others, from the first second on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.kafka.declared import partitions_of
from penstock.kafka.outbox import partition_of
from penstock.kafka.topics import CALLBACKS
from penstock.settings import Kafka
from tests.callback_targets import Bench
from tests.load.callbacks.arena import LONG, Load, Stream, Targets, arrived, felt, p99, states_of
from tests.load.callbacks.figures import RUN
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

HEALTHY, HANGING = (1000, 50) if LONG else (120, 5)
# Of all healthy ones together, a second: what two cores take beside the servers and the load itself.
CALLS = int(os.environ.get("PENSTOCK_LOAD_CALLS", "500")) if LONG else 60
# Each round is two such times alone and two beside what hangs, the first of which is judged by itself.
SECONDS = 10 if LONG else 4
ROUNDS = 3
SLOW_S = 3.0
# Retries are not what is measured.
SETTINGS = {"callback_schedule_s": "600"}


async def test_hanging_targets_are_not_felt(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """Number 1: the healthy ones' p99 with hanging targets beside them is what it is without, and these are diverted
    within ten seconds of their tenth slow call."""
    healthy = targets.urls("healthy", HEALTHY)
    async with platform.process(tmp_path, **SETTINGS):
        found = await compare(
            platform, targets, load, healthy, [targets.urls(f"hang{n}", HANGING) for n in range(ROUNDS)]
        )
    RUN.note("1", healthy=HEALTHY, hanging=f"{ROUNDS} times {HANGING}", **found)


async def test_hanging_targets_in_one_partition(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """Number 2: the same with all of them in one partition, and the group's generation stays."""

    def in_one(group: str, count: int) -> list[str]:
        urls = targets.urls(group, 100 * count)
        return [url for url in urls if partition_of(url.encode(), partitions_of(Kafka(), CALLBACKS)) == 3][
            :count
        ]

    # Ten of thirty within half a minute would make the service suspect itself.
    async with platform.process(tmp_path, **SETTINGS, callback_suspicion_share="0"):
        hanging = [in_one(f"hang{n}", 5) for n in range(ROUNDS)]
        found = await compare(platform, targets, load, in_one("healthy", 20), hanging)
    generations = (tmp_path / "service.log").read_text().count(": generation ")
    RUN.note("2", **found, generations=generations)
    assert generations == 1


async def compare(
    platform: Bench, targets: Targets, load: Load, healthy: list[str], hanging: list[list[str]]
) -> dict[str, object]:
    """Runs the healthy ones' load alone and with hanging ones beside it, in turn; returns the figures.

    Judges the first moments with hanging ones by themselves: that is when nobody knows yet that they hang.
    """
    manners = {f"hang{n}": {"kind": "hang"} for n in range(len(hanging))}
    await targets.behave(healthy={"after_s": 0.02}, **manners)
    stream = Stream(healthy, CALLS / len(healthy))
    # The first of each target loads it, opens a connection and warms the broker.
    warm = await load.pace(max(5.0, 1 / stream.rate), stream)
    await wait_until(lambda: arrived(targets, warm), timeout=120)
    alone: list[list[float]] = []
    first: list[list[float]] = []
    later: list[list[float]] = []
    late_s: list[float] = []
    for number, urls in enumerate(hanging):
        quiet = await load.pace(2 * SECONDS, stream)
        # What is owed before is there, so that it is not they who are waited for.
        await wait_until(lambda ids=quiet: arrived(targets, ids), timeout=120)
        loud = await load.pace(2 * SECONDS, stream, Stream(urls, 2.0))
        loud = {name for name in loud if "/healthy/" in load.url[name]}
        await wait_until(lambda ids=loud: arrived(targets, ids), timeout=120)
        alone.append(load.latencies(targets, quiet))
        for found, ids in zip((first, later), load.halves(loud), strict=True):
            found.append(load.latencies(targets, ids))
        late_s.append(await _diverted_after_s(platform, targets, f"hang{number}"))
    found = {
        "healthy_calls_a_second": CALLS,
        "alone_p99_ms": [p99(found) for found in alone],
        f"first_{SECONDS}_s_of_hanging_ones_p99_ms": [p99(found) for found in first],
        f"next_{SECONDS}_s_p99_ms": [p99(found) for found in later],
        "diverted_after_the_tenth_slow_call_s_at_most": round(max(late_s), 2),
        "load_late_by_s": round(load.behind_s, 2),
    }
    print(found)
    assert not felt(first, alone)
    assert not felt(later, alone)
    assert max(late_s) <= 10
    return found


async def _diverted_after_s(platform: Bench, targets: Targets, group: str) -> float:
    """The longest of any: from the moment its tenth call turned out slow until PostgreSQL said abnormal."""

    async def all_abnormal() -> bool:
        states = await states_of(platform, group)
        return bool(states) and set(states.values()) == {"abnormal"}

    await wait_until(all_abnormal, timeout=60)
    await targets.collect()
    rows = await platform.connection.fetch(
        "SELECT url, extract(epoch FROM changed_at)::double precision AS at_s FROM callback_target WHERE url LIKE $1",
        f"%/{group}/%",
    )
    ahead_s = time.time() - time.monotonic()
    late_s = []
    for row in rows:
        calls = targets.calls[row["url"].removeprefix(targets.url)]
        late_s.append(row["at_s"] - ahead_s - (calls[9][0] + SLOW_S))
    return max(late_s)
