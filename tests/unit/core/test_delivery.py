"""Outcomes of calls and Retry-After."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.delivery import Dead, DeadReason, Delivered, DeliveryPolicy, RetryIn, parse_retry_after

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)

POLICIES = st.builds(
    DeliveryPolicy,
    schedule_s=st.lists(st.floats(0, 1e6), max_size=8).map(tuple),
    jitter=st.floats(0, 1),
    retry_after_max_s=st.floats(0, 1e6),
)
FAILING = st.none() | st.integers(100, 599).filter(lambda status: not 200 <= status < 300 and status != 410)
CHANCE = st.floats(0, 1, exclude_max=True)


@given(policy=POLICIES, status=st.integers(200, 299), attempt=st.integers(1, 20), random_share=CHANCE)
def test_any_2xx_delivers(policy, status, attempt, random_share):
    """C6: every 2xx means delivered, at any attempt."""
    assert policy.decide(status, attempt, None, random_share) == Delivered()


@given(
    policy=POLICIES,
    attempt=st.integers(1, 20),
    retry_after=st.none() | st.floats(0, 1e9),
    random_share=CHANCE,
)
def test_410_is_dead_at_once(policy, attempt, retry_after, random_share):
    """C6: a target that answers 410 is not called again, also with a Retry-After."""
    assert policy.decide(410, attempt, retry_after, random_share) == Dead(DeadReason.GONE)


@given(policy=POLICIES, status=FAILING, retry_after=st.none() | st.floats(0, 1e9), random_share=CHANCE)
def test_a_schedule_gives_one_attempt_more_than_it_has_delays(policy, status, retry_after, random_share):
    """C6: other answers and timeouts are retried until the schedule is exhausted."""
    for attempt in range(1, policy.attempts):
        assert isinstance(policy.decide(status, attempt, retry_after, random_share), RetryIn)
    for attempt in (policy.attempts, policy.attempts + 1):
        assert policy.decide(status, attempt, retry_after, random_share) == Dead(DeadReason.EXHAUSTED)


@given(
    policy=POLICIES.filter(lambda policy: policy.schedule_s),
    status=FAILING,
    retry_after=st.none() | st.floats(0, 1e9),
    random_share=CHANCE,
    data=st.data(),
)
def test_a_delay_is_scheduled_jittered_and_floored(policy, status, retry_after, random_share, data):
    """C6: jitter shortens by at most its share; Retry-After lengthens up to its limit."""
    attempt = data.draw(st.integers(1, len(policy.schedule_s)))
    outcome = policy.decide(status, attempt, retry_after, random_share)
    scheduled = policy.schedule_s[attempt - 1]
    floor = min(retry_after or 0, policy.retry_after_max_s)
    assert outcome.seconds >= floor
    assert outcome.seconds >= scheduled * (1 - policy.jitter) * (1 - 1e-9)
    assert outcome.seconds <= max(scheduled, floor)


@given(
    policy=POLICIES, status=st.none() | st.integers(100, 599), attempt=st.integers(1, 20), random_share=CHANCE
)
def test_what_cannot_be_called_is_dead(policy, status, attempt, random_share):
    """C6: a target with an invalid URL is dead at once."""
    outcome = policy.decide(status, attempt, None, random_share, callable_target=False)
    assert outcome == Dead(DeadReason.UNCALLABLE)


@given(seconds=st.integers(0, 10**9))
def test_retry_after_in_seconds_and_as_a_date(seconds):
    """C6: both forms of RFC 9110 give the same delay."""
    assert parse_retry_after(f" {seconds} ", NOW) == seconds
    moment = NOW + timedelta(seconds=seconds)
    assert parse_retry_after(moment.strftime("%a, %d %b %Y %H:%M:%S GMT"), NOW) == seconds


def test_a_date_in_the_past_asks_for_nothing():
    """C6: a date in the past gives no negative delay."""
    assert parse_retry_after("Sat, 21 Nov 2026 11:00:00 GMT", NOW) == 0


@given(
    text=st.none()
    | st.text()
    | st.sampled_from(["", "-1", "1.5", "soon", "9" * 400, "²", "Sat, 99 Nov 2026"])
)
def test_any_retry_after_is_read_or_ignored(text):
    """C6: any header gives a finite number of seconds or None."""
    seconds = parse_retry_after(text, NOW)
    assert seconds is None or 0 <= seconds < float("inf")


def test_the_default_schedule():
    """C5, C6: eight attempts without configuration, after 5 s, 5 min, 30 min, 2 h, 5 h, 10 h and
    10 h, about 27 hours in all."""
    policy = DeliveryPolicy()
    assert policy.schedule_s == (5, 300, 1800, 7200, 18_000, 36_000, 36_000)
    assert policy.attempts == 8
