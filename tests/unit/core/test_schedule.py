"""Ticks of schedules: strictly growing in UTC, the same from every beginning."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.schedule import latest_ticks
from penstock.cron import parse_cron
from penstock.errors import InvalidRecord

MINUTE = timedelta(minutes=1)


def utc(*moment):
    return datetime(*moment, tzinfo=UTC)


# Before a change of the clocks: the gap and the repeat of each zone, that at midnight in Santiago,
# and that of half an hour on Lord Howe.
CHANGES = {
    "Europe/Berlin": (utc(2026, 3, 28, 12), utc(2026, 10, 24, 12)),
    "Australia/Lord_Howe": (utc(2026, 10, 3, 12), utc(2026, 4, 4, 12)),
    "America/Santiago": (utc(2026, 9, 5, 12), utc(2026, 4, 4, 12)),
}


def local(ticks, zone):
    return [tick.astimezone(ZoneInfo(zone)).strftime("%d %H:%M %z") for tick in ticks]


@pytest.mark.parametrize(
    ("cron", "zone", "after", "expected"),
    [
        # A skipped time runs once, after the gap.
        ("15,30 2 * * *", "Europe/Berlin", utc(2026, 3, 28, 12), ["29 03:00 +0200", "30 02:15 +0200"]),
        ("10 2 * * *", "Australia/Lord_Howe", utc(2026, 10, 3, 5), ["04 02:30 +1100", "05 02:10 +1100"]),
        ("0 0 * * *", "America/Santiago", utc(2026, 9, 5, 12), ["06 01:00 -0300", "07 00:00 -0300"]),
        # A repeated time runs once, the first time.
        ("30 2 * * *", "Europe/Berlin", utc(2026, 10, 24, 12), ["25 02:30 +0200", "26 02:30 +0100"]),
        ("45 1 * * *", "Australia/Lord_Howe", utc(2026, 4, 4, 5), ["05 01:45 +1100", "06 01:45 +1030"]),
        ("30 23 * * *", "America/Santiago", utc(2026, 4, 4, 12), ["04 23:30 -0300", "05 23:30 -0400"]),
        # An hourly schedule follows the time that passes.
        (
            "0 * * * *",
            "Europe/Berlin",
            utc(2026, 10, 24, 23),
            ["25 02:00 +0200", "25 02:00 +0100", "25 03:00 +0100"],
        ),
        ("0 * * * *", "Europe/Berlin", utc(2026, 3, 29, 0), ["29 03:00 +0200", "29 04:00 +0200"]),
        # Steps of hours, where the library's own zones skip three ticks.
        (
            "*/10 */2 * * *",
            "Australia/Lord_Howe",
            utc(2026, 4, 4, 13, 50),
            ["05 02:00 +1030", "05 02:10 +1030"],
        ),
    ],
)
def test_days_on_which_the_clocks_change(cron, zone, after, expected):
    """F4: a named time runs once, however the clocks change; each passing hour runs once."""
    assert local(islice(parse_cron(cron, zone).after(after), len(expected)), zone) == expected


fields = st.tuples(
    st.sampled_from(["*", "*/7", "0", "30", "5,35", "10-50/20"]),
    st.sampled_from(["*", "*/2", "0", "2", "1-3", "23", "*/5"]),
    st.sampled_from(["*", "*", "1", "L", "29", "*/9"]),
    st.sampled_from(["*", "*", "2", "3,4,9,10"]),
    st.sampled_from(["*", "*", "SUN", "1-5", "MON#2"]),
)
zones = st.sampled_from([*CHANGES, "UTC", "America/St_Johns", "Africa/Casablanca"])
moments = st.integers(0, 3 * 365 * 24 * 60).map(lambda minutes: utc(2025, 1, 1) + minutes * MINUTE)
near_changes = st.builds(
    lambda begin, minutes: begin + minutes * MINUTE,
    st.sampled_from([begin for both in CHANGES.values() for begin in both]),
    st.integers(0, 36 * 60),
)


@settings(max_examples=200, deadline=None)
@given(fields, zones, moments | near_changes, st.integers(0, 40))
def test_ticks_grow_and_do_not_depend_on_the_beginning(parts, zone, begin, cut):
    """F4: UTC grows strictly, and a restart at or between any two ticks gives the same ticks."""
    ticks = parse_cron(" ".join(parts), zone)
    found = list(islice(ticks.after(begin), 41))
    assert all(earlier < later for earlier, later in zip([begin, *found], found, strict=False))
    if len(found) > cut:
        at = found[cut]
        assert list(islice(ticks.after(at), 40 - cut)) == found[cut + 1 :]
        previous = [begin, *found][cut]
        between = previous + (at - previous) / 2
        assert list(islice(ticks.after(between), 41 - cut)) == found[cut:]


@settings(max_examples=60, deadline=None)
@given(fields, st.sampled_from([*CHANGES]), st.booleans())
def test_ticks_are_those_of_a_clock_that_is_read_each_minute(parts, zone, repeats):
    """F4: against a model that looks at the wall clock each minute of a day with a change."""
    ticks = parse_cron(" ".join(parts), zone)
    since = CHANGES[zone][repeats]
    minutes = [since + minute * MINUTE for minute in range(1, 30 * 60)]
    walls = [minute.astimezone(ZoneInfo(zone)).replace(tzinfo=None, fold=0) for minute in minutes]
    matches = set(takewhile(lambda wall: wall <= walls[-1], CronSim(" ".join(parts), walls[0] - MINUTE)))
    expected, seen, previous = [], set(), walls[0] - MINUTE
    for minute, wall in zip(minutes, walls, strict=True):
        # After a gap the clock has passed times that it did not show.
        gap = int((wall - previous) / MINUTE)
        skipped = any(previous + number * MINUTE in matches for number in range(1, gap))
        is_named = (wall in matches and wall not in seen) or skipped
        if wall in matches if ticks.every_hour else is_named:
            expected.append(minute)
        seen.add(wall)
        previous = wall
    assert list(ticks.between(since, minutes[-1])) == expected


@settings(max_examples=100, deadline=None)
@given(fields, zones, moments, st.integers(0, 40 * 24 * 60), st.integers(1, 50))
def test_the_latest_ticks_of_a_span(parts, zone, begin, length, limit):
    """F4: as if all ticks were enumerated, for any span."""
    ticks = parse_cron(" ".join(parts), zone)
    until = begin + length * MINUTE
    every = list(ticks.between(begin, until))
    assert latest_ticks(ticks, begin, until, limit) == (every[-limit:], len(every) > limit)


def test_the_twenty_ninth_of_february():
    """F4: the years without it are left out, also 2100."""
    ticks = parse_cron("0 12 29 2 *", "Europe/Berlin")
    assert [tick.year for tick in islice(ticks.after(utc(2090, 1, 1)), 3)] == [2092, 2096, 2104]


@pytest.mark.parametrize(
    ("cron", "zone", "pointer"),
    [
        ("61 * * * *", "UTC", "/cron"),
        ("* * * *", "UTC", "/cron"),
        ("0 0 0 1 1 *", "UTC", "/cron"),
        ("0 0 30 2 *", "UTC", "/cron"),
        ("0 0 * * FRI-MON", "UTC", "/cron"),
        ("0 0 * * *", "Mars/Olympus", "/zone"),
        ("0 0 * * *", "../../etc/passwd", "/zone"),
        ("0 0 * * *", "Europe", "/zone"),
        ("0 0 * * *", "", "/zone"),
    ],
)
def test_wrong_expressions_and_zones_are_named(cron, zone, pointer):
    """F4: with the field at fault."""
    with pytest.raises(InvalidRecord) as refused:
        parse_cron(cron, zone)
    assert refused.value.pointer == pointer


def test_a_schedule_may_have_no_tick():
    """F4: the last working day of a month is no Sunday. Such a schedule is refused where it is
    created."""
    assert parse_cron("0 0 LW * */8", "UTC").first_after(utc(2026, 1, 1)) is None
