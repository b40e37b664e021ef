"""Unresponsive targets do not slow down other targets, from the first
second on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.kafka.processing.outbox import partition_of
from penstock.kafka.topology.topic_config import partitions_of
from penstock.kafka.topology.topics import CALLBACKS
from penstock.settings import Kafka
from tests.load.callbacks.paced_load import LONG, Load, Stream, Targets, arrived, p99, slowdown, states_of
from tests.load.callbacks.run_report import RUN
from tests.support.callback_targets import Bench
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

HEALTHY, UNRESPONSIVE = (1000, 50) if LONG else (120, 5)
# Calls to all healthy targets per second: as many as two cores can do beside servers and load.
CALLS = int(os.environ.get("PENSTOCK_LOAD_CALLS", "500")) if LONG else 60
# Half of the time alone, and half of the time with unresponsive targets, of each round, in seconds.
SECONDS = 10 if LONG else 3
ROUNDS = 3 if LONG else 2
SLOW_S = 3.0
# Without retries during the measurement.
SETTINGS = {"callback_schedule_s": "600"}


async def test_unresponsive_targets_do_not_slow_down_healthy_ones(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """C5: unresponsive targets do not raise the p99 of healthy targets. Unresponsive targets are
    diverted within ten seconds of their tenth slow call."""
    healthy = targets.urls("healthy", HEALTHY)
    async with platform.process(tmp_path, **SETTINGS):
        found = await compare(
            platform, targets, load, healthy, [targets.urls(f"hang{n}", UNRESPONSIVE) for n in range(ROUNDS)]
        )
    RUN.note("1", healthy=HEALTHY, unresponsive=f"{ROUNDS} times {UNRESPONSIVE}", **found)


async def test_unresponsive_targets_do_not_slow_down_their_partition(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """C5: the same holds with all targets in one partition, and the group does not
    rebalance."""

    def in_one(group: str, count: int) -> list[str]:
        urls = targets.urls(group, 100 * count)
        return [url for url in urls if partition_of(url.encode(), partitions_of(Kafka(), CALLBACKS)) == 3][
            :count
        ]

    # Off, since ten of thirty targets within half a minute would activate self-check mode.
    async with platform.process(tmp_path, **SETTINGS, callback_suspicion_share="0"):
        unresponsive = [in_one(f"hang{n}", 5) for n in range(ROUNDS)]
        found = await compare(platform, targets, load, in_one("healthy", 20), unresponsive)
    generations = (tmp_path / "service.log").read_text().count("event=generation_begun")
    RUN.note("2", **found, generations=generations)
    assert generations == 1


@pytest.mark.skipif(not LONG, reason="integration/callbacks/test_hosts shows the same without the load")
async def test_a_url_per_callback_bounds_hosts_that_hang(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """C5: the same holds when each callback has a URL of its own: 200 a second to five hosts that
    hang are bounded by their hosts, and most are held."""
    healthy = targets.urls("healthy", 20, hosts=20)
    # On addresses of their own, from 127.0.0.51 on.
    unresponsive = [
        [url.replace("//127.0.0.", f"//127.0.0.{n + 5}") for url in targets.urls(f"hang{n}", 5, hosts=5)]
        for n in range(ROUNDS)
    ]
    async with platform.process(tmp_path, **SETTINGS):
        found = await compare(platform, targets, load, healthy, unresponsive, unique_rate=200 if LONG else 60)
    hung = sum("/hang" in url for url in load.url.values())
    called = sum(len(calls) for path, calls in targets.calls.items() if path.startswith("/hang"))
    RUN.note("1, a URL each", **found, of_hung=hung, called=called)
    # Sixteen slots of each host, its share of the slow pool, and probes.
    assert 5 * 8 <= called <= ROUNDS * 5 * (16 + 25 + 10)


async def compare(
    platform: Bench,
    targets: Targets,
    load: Load,
    healthy: list[str],
    unresponsive: list[list[str]],
    unique_rate: float = 0.0,
) -> dict[str, object]:
    """Runs the load of healthy targets alone and with unresponsive targets, in turn; returns the
    results. With `unique_rate`, each callback has a URL of its own, and so many per second hang.

    Compares the first half with unresponsive targets separately: before the service has
    diverted them.
    """
    behaviours = {f"hang{n}": {"kind": "hang"} for n in range(len(unresponsive))}
    await targets.behave(healthy={"after_s": 0.02}, **behaviours)
    stream = Stream(healthy, CALLS / len(healthy), unique=bool(unique_rate))
    # The first call of each target loads it, opens a connection and warms up the broker.
    warm_up = await load.pace(max(5.0, 1 / stream.rate), stream)
    await wait_until(lambda: arrived(targets, warm_up))
    alone: list[list[float]] = []
    first: list[list[float]] = []
    later: list[list[float]] = []
    diverted_after_s: list[float] = []
    for number, urls in enumerate(unresponsive):
        undisturbed = await load.pace(2 * SECONDS, stream)
        # Earlier callbacks must have arrived, since the next measurement would wait for them.
        await wait_until(lambda ids=undisturbed: arrived(targets, ids))
        rate = unique_rate / len(urls) or 2.0
        disturbed = await load.pace(2 * SECONDS, stream, Stream(urls, rate, stream.unique))
        disturbed = {name for name in disturbed if "/healthy/" in load.url[name]}
        await wait_until(lambda ids=disturbed: arrived(targets, ids))
        alone.append(load.latencies(targets, undisturbed))
        for found, ids in zip((first, later), load.halves(disturbed), strict=True):
            found.append(load.latencies(targets, ids))
        if not unique_rate:
            diverted_after_s.append(await _diverted_after_s(platform, targets, f"hang{number}"))
    found = {
        "healthy_calls_a_second": CALLS,
        "alone_p99_ms": [p99(found) for found in alone],
        f"first_{SECONDS}_s_of_unresponsive_ones_p99_ms": [p99(found) for found in first],
        f"next_{SECONDS}_s_p99_ms": [p99(found) for found in later],
        "diverted_after_the_tenth_slow_call_s_at_most": round(max(diverted_after_s, default=0.0), 2),
        "load_late_by_s": round(load.behind_s, 2),
    }
    print(found)
    assert not slowdown(first, alone)
    assert not slowdown(later, alone)
    assert max(diverted_after_s, default=0.0) <= 10
    return found


async def _diverted_after_s(platform: Bench, targets: Targets, group: str) -> float:
    """The longest time from the tenth slow call of a target until it is abnormal in PostgreSQL."""

    async def all_abnormal() -> bool:
        states = await states_of(platform, group)
        return bool(states) and set(states.values()) == {"abnormal"}

    await wait_until(all_abnormal)
    await targets.collect()
    rows = await platform.connection.fetch(
        "SELECT url, extract(epoch FROM changed_at)::double precision AS at_s FROM callback_target WHERE url LIKE $1",
        f"%/{group}/%",
    )
    clock_offset_s = time.time() - time.monotonic()
    diverted_after_s = []
    for row in rows:
        calls = targets.calls[row["url"].removeprefix(targets.url)]
        diverted_after_s.append(row["at_s"] - clock_offset_s - (calls[9][0] + SLOW_S))
    return max(diverted_after_s)
