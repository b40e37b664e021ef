"""Many schedules of the same minute, and a backfill."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

from benchmarks.flows.bench import Bench, Claims, Figures
from penstock.postgres import backfills, schedules

_PUT = """INSERT INTO penstock.schedule
    (name, flow, cron, zone, priority, catch_up, catch_up_limit, catch_up_rate, overlap, paused, position, next_tick, next_at)
    SELECT 'every-' || n, 'tick', '* * * * *', 'UTC', 2, 'latest', 1, 1, 'allow', false, $2::timestamptz,
           $2::timestamptz + '1 minute'::interval, $2::timestamptz + '1 minute'::interval
    FROM generate_series(1, $1) AS n"""
_END = (
    "UPDATE penstock.schedule SET paused = true, next_tick = NULL, next_at = NULL WHERE name LIKE 'every-%'"
)
# The schedules are written so long before their minute.
_LEAD = timedelta(seconds=5)
_MINUTE = timedelta(minutes=1)


async def measure_schedules(bench: Bench, count: int) -> tuple[Figures, Claims]:
    """Schedules whose tick is the same minute: each starts one flow."""
    now = await schedules.clock(bench.pool)
    position = now.replace(second=0, microsecond=0)
    if position + _MINUTE < now + _LEAD:
        await asyncio.sleep((position + _MINUTE - now).total_seconds())
        position += _MINUTE
    await bench.pool.execute(_PUT, count, position)
    await bench.pool.execute(f"NOTIFY {schedules.CHANNEL}, 'every-1'")
    tick = position + _MINUTE
    of_tick = "FROM penstock.flow WHERE tick = $1 AND schedule LIKE 'every-%'"
    await bench.until(f"SELECT count(*) >= $2 {of_tick}", tick, count)
    await bench.until(f"SELECT bool_and(status = 'succeeded') {of_tick}", tick)
    await bench.pool.execute(_END)
    row = await bench.pool.fetchrow(
        f"""SELECT count(*) AS flows, count(DISTINCT schedule) AS schedules,
                   extract(epoch FROM max(created_at) - $1)::float AS started_s,
                   extract(epoch FROM max(finished_at) - $1)::float AS ended_s {of_tick}""",
        tick,
    )
    assert row is not None
    figures = {
        "schedules": float(count),
        "flows": row["flows"],
        "last start s": row["started_s"],
        "last end s": row["ended_s"],
    }
    once = row["flows"] == row["schedules"] == count
    claims = {
        "schedules: each starts one flow": (f"{row['flows']:,} of {row['schedules']:,}", once),
        "schedules: all within 10 s of the tick": (f"{row['started_s']:.1f}", row["started_s"] <= 10),
    }
    return {"schedules of one minute": figures}, claims


async def measure_backfill(bench: Bench, runs: int) -> tuple[Figures, Claims]:
    """A backfill over so many minutes."""
    now = await schedules.clock(bench.pool)
    last = now.replace(second=0, microsecond=0) - _MINUTE
    first = last - (runs - 1) * _MINUTE
    await bench.pool.execute(
        """INSERT INTO penstock.schedule
           (name, flow, cron, zone, priority, catch_up, catch_up_limit, catch_up_rate, overlap, paused, position)
           VALUES ('past', 'tick', '* * * * *', 'UTC', 2, 'latest', 1, 1, 'allow', true, $1)""",
        now,
    )
    begin = time.perf_counter()
    created = await backfills.create(
        bench.pool,
        schedule="past",
        since=first,
        until=last,
        total=runs,
        position=first - timedelta(microseconds=1),
        rate=None,
        max_running=None,
        rerun=False,
        asked_by="benchmark",
        actor=None,
    )
    of_backfill = "FROM penstock.backfill WHERE id = $1"
    started = await bench.until(f"SELECT started = total {of_backfill}", created["id"]) - begin
    of_flows = "FROM penstock.flow WHERE backfill = $1 AND status = 'succeeded'"
    ended = await bench.until(f"SELECT count(*) = $2 {of_flows}", created["id"], runs) - begin
    figures = {"runs": float(runs), "started/s": runs / started, "ended/s": runs / ended}
    rate = runs / started
    return {"backfill": figures}, {"backfill: starts 1,000 runs/s": (f"{rate:,.0f}", rate >= 1_000)}
