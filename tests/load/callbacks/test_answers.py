"""Issue 5, numbers 6 and 10: bodies without end, and answers that ask for something."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.callback_targets import Bench
from tests.load.callbacks.arena import LONG, Load, Targets, arrived, rss_mb, states_of
from tests.load.callbacks.figures import RUN
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


async def test_a_body_without_end_frees_its_slot(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """Number 6: a byte a second, and a gigabyte: the call is over by its deadline, and memory stays where it was."""
    calls, timeout_s = (200, 10.0) if LONG else (40, 2.0)
    await targets.behave(drip={"kind": "drip"}, huge={"kind": "huge"})
    settings = {"callback_timeout_s": str(timeout_s), "callback_schedule_s": "600"}
    async with platform.process(tmp_path, **settings) as process:
        warm = [load.make(url) for url in targets.urls("healthy", 10)]
        await load.owe(warm)
        await wait_until(lambda: arrived(targets, {c.id for c in warm}))
        before = most = rss_mb(process.pid)
        for group in ("drip", "huge"):
            ours = [load.make(url) for url in targets.urls(group, calls)]
            await load.owe(ours)

            async def all_ended(group: str = group) -> bool:
                nonlocal most
                most = max(most, rss_mb(process.pid))
                return len(set(await _ended(targets, group))) == calls

            await wait_until(all_ended, timeout=120, every=0.05)
        held_s = {
            group: max(
                end - at
                for path in list(targets.broken)
                if path.startswith(f"/{group}/")
                for _name, at, end in targets.broken[path]
            )
            for group in ("drip", "huge")
        }
        await wait_until(platform.all_delivered)
    RUN.note(
        "6",
        calls_at_once=calls,
        deadline_s=timeout_s,
        drip_held_s=round(held_s["drip"], 2),
        huge_held_s=round(held_s["huge"], 2),
        memory_before_mb=round(before),
        memory_at_most_mb=round(most),
    )
    assert max(held_s.values()) <= timeout_s + 0.5
    assert most - before <= 64


async def _ended(targets: Targets, group: str) -> list[str]:
    await targets.collect()
    return [
        name
        for path, broken in targets.broken.items()
        if path.startswith(f"/{group}/")
        for name, _at, _end in broken
    ]


async def test_retry_after_and_gone_are_honoured(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """Number 10: asked for two minutes it comes in two minutes; asked never to come again it does not."""
    await targets.behave(later={"status": 503, "headers": ["Retry-After: 120"]}, gone={"status": 410})
    (later,), (gone,) = targets.urls("later", 1), targets.urls("gone", 1)
    async with platform.process(tmp_path):
        first = [load.make(later), load.make(gone)]
        await load.owe(first)

        async def settled() -> bool:
            rows = await platform.rows()
            return rows[first[0].id]["error"] is not None and rows[first[1].id]["state"] == "dead"

        await wait_until(settled)
        due_s = float((await platform.rows())[first[0].id]["due_in_s"])
        assert await states_of(platform, "gone") == {gone: "disabled"}
        second = load.make(gone)
        await load.owe([second])

        async def held() -> bool:
            return (await platform.rows())[second.id]["state"] == "held"

        await wait_until(held)
        await targets.collect()
    RUN.note("10", due_again_in_s=round(due_s, 1), calls_to_the_gone=len(targets.of("gone")))
    assert 100 < due_s <= 121
    assert len(targets.of("gone")) == 1
