"""When attempts come back that exceed the limit of their stage."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.stage_pace import FIRST_S, LEAST_S, MOST_S, SHARE, StagePace

SECONDS = st.floats(0, 10_000)


@given(st.integers(1, 100), st.lists(SECONDS, max_size=5), SECONDS, SECONDS, st.floats(0, 0.999))
def test_each_delay_is_bounded(limit, ended, now_s, oldest_s, chance):
    """A stage whose attempts take hours hands its backlog back once a minute, and no attempt waits
    longer."""
    pace = StagePace(limit)
    for seconds in ended:
        pace.add_ended(seconds)
    for _ in range(50):
        assert LEAST_S <= pace.delay_s(now_s, oldest_s, chance) <= MOST_S


def test_attempts_return_one_after_another_at_the_pace_of_the_stage():
    """Two at once of 10 s each: one slot becomes free each 5 s, and attempts return four times as
    fast."""
    pace = StagePace(2)
    pace.add_ended(10.0)
    delays = [pace.delay_s(100.0, 0.0, 0.0) for _ in range(4)]
    assert delays == [1.25, 2.5, 3.75, 5.0]
    assert pace.delay_s(106.0, 0.0, 0.0) == 1.25, "those of before are back"


def test_an_attempt_that_still_runs_counts_for_its_age():
    """Before the first attempt has ended, its age is all that is known."""
    pace = StagePace(1)
    assert pace.delay_s(0.0, 0.0, 0.0) == max(LEAST_S, FIRST_S * SHARE)
    assert pace.delay_s(1_000.0, 40.0, 0.0) == 10.0
