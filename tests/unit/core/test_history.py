"""History: when a task moves, and the steps in which a day is retired."""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.history import Part, Policy, Step, day_of, next_step, rest_s, span_of
from penstock.errors import SettingsError
from penstock.task_sync.settings import TaskSyncSettings

DAY = date(2026, 11, 21)
MOMENTS = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001 (their bounds)


@given(MOMENTS, st.integers(-12, 14))
def test_a_moment_belongs_to_one_day_in_any_time_zone(moment, hours):
    """O6: a day is a UTC day, from its start to the start of the next, exclusive, in any time
    zone."""
    begin, end = span_of(day_of(moment))
    assert begin <= moment < end
    assert day_of(moment.astimezone(timezone(timedelta(hours=hours)))) == begin.date()
    assert end - begin == timedelta(days=1)
    assert day_of(end) == day_of(begin) + timedelta(days=1)


@given(st.timedeltas(timedelta(0), timedelta(days=1000)), MOMENTS)
def test_a_day_is_expired_when_its_last_task_has_been_retained(retain, now):
    """O6: no task is dropped before its retention has passed, counted from the end of the task."""
    policy = Policy(timedelta(0), retain, archive=True)
    day = day_of(now - retain)
    assert not policy.is_expired(day, now)
    assert policy.is_expired(day - timedelta(days=1), now)
    assert span_of(day - timedelta(days=1))[1] + retain <= now


def test_unlimited_retention_never_expires():
    """O6: without a limit no part is sealed or dropped."""
    for part in (Part(DAY, 1, 5), Part(DAY, 1, 5, sealed=True, archived=True)):
        assert (
            next_step(part, Policy(timedelta(0), None, archive=True), datetime.max.replace(tzinfo=UTC))
            is None
        )


@given(st.booleans(), st.booleans(), st.booleans())
def test_a_part_is_sealed_then_archived_then_dropped(archive, sealed, archived):
    """O6: from any state, the steps end with the drop. A part is dropped only when it is sealed,
    and archived if required."""
    policy = Policy(timedelta(0), timedelta(0), archive=archive)
    part = Part(DAY, 1, 5, sealed=sealed or archived, archived=archived)
    now = span_of(DAY)[1]
    taken = []
    while (step := next_step(part, policy, now)) is not Step.DROP:
        taken.append(step)
        part = replace(
            part, sealed=part.sealed or step is Step.SEAL, archived=part.archived or step is Step.ARCHIVE
        )
        assert len(taken) < 3
    assert part.sealed
    assert part.archived or not archive
    assert taken == [
        *([] if sealed or archived else [Step.SEAL]),
        *([Step.ARCHIVE] if archive and not archived else []),
    ]


@given(st.integers(0, 10_000), st.floats(0, 100), st.floats(0.1, 1e6))
def test_moving_pauses_as_long_as_it_works(tasks, took_s, rate):
    """O6: moving takes at most half of the time, and keeps to its rate, for any cost of a batch."""
    rest = rest_s(tasks, took_s, rate)
    assert rest >= took_s
    assert tasks <= rate * (took_s + rest) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"history_keep_days": -1.0}, "PENSTOCK_HISTORY_KEEP_DAYS=-1.0 must be 0 or more"),
        (
            {"history_keep_days": 8.0, "history_retain_days": 7.0},
            "PENSTOCK_HISTORY_RETAIN_DAYS=7.0 at least as many, or 0",
        ),
        ({"history_retain_days": 1e6}, "at most 36,500"),
        ({"history_rate": 0.0}, "PENSTOCK_HISTORY_RATE=0.0"),
        ({"history_every_s": 0.0}, "PENSTOCK_HISTORY_EVERY_S=0.0"),
    ],
)
def test_invalid_history_settings_are_refused(given, words):
    """O8: an invalid setting is refused by name before any task is moved or dropped."""
    with pytest.raises(SettingsError, match=words.replace(".", r"\.")):
        TaskSyncSettings.load({}, **given)
    assert TaskSyncSettings.load({}, history_keep_days=0.0, history_retain_days=0.0)
