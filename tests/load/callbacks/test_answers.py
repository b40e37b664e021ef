"""Endless bodies, and answers with instructions."""

from __future__ import annotations

from pathlib import Path

from tests.load.callbacks.paced_load import FULL_FORM, Load, Targets, arrived, rss_mb
from tests.load.callbacks.run_report import RUN
from tests.support.callback_targets import Bench
from tests.support.waiting import wait_until

pytestmark = FULL_FORM


async def test_a_call_with_an_endless_body_frees_its_slot(
    platform: Bench, targets: Targets, load: Load, tmp_path: Path
) -> None:
    """C7a: calls whose answers send a byte a second, or a gigabyte, end by their deadline.
    Memory grows by at most 64 MB."""
    calls, timeout_s = 200, 10.0
    await targets.behave(drip={"kind": "drip"}, huge={"kind": "huge"})
    settings = {"callback_timeout_s": str(timeout_s), "callback_schedule_s": "600"}
    async with platform.process(tmp_path, **settings) as process:
        warm_up = [load.make(url) for url in targets.urls("healthy", 10)]
        await load.enqueue_and_write(warm_up)
        await wait_until(lambda: arrived(targets, {c.id for c in warm_up}))
        before_mb = peak_mb = rss_mb(process.pid)
        for group in ("drip", "huge"):
            callbacks = [load.make(url) for url in targets.urls(group, calls)]
            await load.enqueue_and_write(callbacks)

            async def all_ended(group: str = group) -> bool:
                nonlocal peak_mb
                peak_mb = max(peak_mb, rss_mb(process.pid))
                return len(set(await _ended(targets, group))) == calls

            await wait_until(all_ended, every=0.05)
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
        memory_before_mb=round(before_mb),
        memory_at_most_mb=round(peak_mb),
    )
    assert max(held_s.values()) <= timeout_s + 0.5
    assert peak_mb - before_mb <= 64


async def _ended(targets: Targets, group: str) -> list[str]:
    await targets.collect()
    return [
        name
        for path, broken in targets.broken.items()
        if path.startswith(f"/{group}/")
        for name, _at, _end in broken
    ]
