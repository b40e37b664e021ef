"""The transition table and the decisions at the end of an attempt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.completion import Fence, Outcome, Tally, conclude
from penstock.core.retry import RetryPolicy
from penstock.core.task import FINAL, IN_HAND, TRANSITIONS, Happening, Priority, State, after, sources
from penstock.errors import Conflict

FENCE = Fence(id=7, step=3, stage="transcode", attempt=2)


def test_a_final_task_moves_only_when_somebody_recovers_it():
    """Design, state of a task: nothing but a human brings a final task back."""
    moves = {(state, what) for state, what in TRANSITIONS if state in FINAL}
    assert moves == {(State.FAILED, Happening.RECOVERED), (State.QUARANTINED, Happening.RECOVERED)}


def test_every_open_state_can_be_cancelled_and_left():
    """F5: whatever has not ended can be cancelled, and no open state is a dead end."""
    open_states = set(State) - FINAL
    assert sources(Happening.CANCELLED) == open_states
    for state in open_states:
        assert any(what is not Happening.CANCELLED for where, what in TRANSITIONS if where is state), state


def test_every_state_can_be_reached():
    """A state that no transition leads to is a word without a meaning."""
    assert set(TRANSITIONS.values()) | {State.SCHEDULED} == set(State)


def test_a_result_is_taken_in_every_state_in_which_a_worker_may_hold_the_task():
    """W4: claims are written late, so a result may find its task still queued."""
    for happening in (Happening.ADVANCED, Happening.RETRIED, Happening.SUCCEEDED, Happening.FAILED):
        assert sources(happening) == IN_HAND


def test_what_cannot_happen_is_refused_in_words():
    """The error names state and happening."""
    with pytest.raises(Conflict, match="a task that is succeeded cannot be released"):
        after(State.SUCCEEDED, Happening.RELEASED)


def test_priorities_are_five_and_smaller_goes_first():
    """S3: HIGHEST, HIGH, MEDIUM, LOW, LOWEST."""
    assert [p.name for p in sorted(Priority)] == ["HIGHEST", "HIGH", "MEDIUM", "LOW", "LOWEST"]


def test_next_enters_a_new_step_with_everything_at_zero():
    """T3: the next stage starts at attempt 0, and what failed before does not count against it."""
    verdict = conclude(FENCE, Outcome.NEXT, next_stage="transcode", tally=Tally(2, 1))
    assert (verdict.state, verdict.stage, verdict.step, verdict.attempt) == (State.READY, "transcode", 4, 0)
    assert verdict.tally == Tally(0, 0)


def test_a_retry_that_was_asked_for_is_not_counted_as_a_failure():
    """T3: a handler that polls a remote job may do so for ever."""
    verdict = conclude(FENCE, Outcome.RETRY, delay_s=5, tally=Tally(1, 1))
    assert (verdict.state, verdict.attempt, verdict.delay_s, verdict.tally) == (
        State.SCHEDULED,
        3,
        5,
        Tally(1, 1),
    )


def test_a_permanent_failure_does_not_wait_for_its_tries():
    """Fail(permanent=True) ends the task at once."""
    verdict = conclude(FENCE, Outcome.FAIL, permanent=True, policy=RetryPolicy(max_attempts=9))
    assert verdict.state is State.FAILED


@given(
    failures=st.integers(0, 10),
    losses=st.integers(0, 10),
    limit=st.integers(1, 12),
    max_losses=st.integers(1, 12),
    outcome=st.sampled_from([Outcome.FAIL, Outcome.EXPIRED]),
    chance=st.floats(0, 1),
)
def test_a_vain_try_is_counted_once_and_the_last_one_ends_the_task(
    failures, losses, limit, max_losses, outcome, chance
):
    """H10, W8: attempt + 1 after back-off, failed when the tries are used up, quarantined when too many workers
    were lost; failures and losses are counted apart, and the fence always moves on retry."""
    policy = RetryPolicy(max_attempts=limit)
    verdict = conclude(
        FENCE, outcome, tally=Tally(failures, losses), policy=policy, max_losses=max_losses, chance=chance
    )
    if outcome is Outcome.FAIL:
        assert verdict.tally == Tally(failures + 1, losses)
        expected = State.FAILED if failures + 1 >= limit else State.SCHEDULED
    else:
        assert verdict.tally == Tally(failures, losses + 1)
        used_up = failures + losses + 1 >= limit
        expected = State.FAILED if used_up else State.SCHEDULED
        if losses + 1 >= max_losses:
            expected = State.QUARANTINED
    assert verdict.state is expected
    if expected is State.SCHEDULED:
        assert verdict.attempt == FENCE.attempt + 1
        assert 0 <= verdict.delay_s <= policy.max_s
    else:
        assert verdict.attempt == FENCE.attempt


@given(tries=st.integers(1, 10_000), chance=st.floats(0, 1))
def test_the_delay_grows_and_stays_within_its_bounds(tries, chance):
    """However long a task is retried, the delay is a number between nothing and max_s."""
    policy = RetryPolicy(base_s=1, factor=2, max_s=300, jitter=0.5)
    delay = policy.delay_s(tries, chance)
    assert 0.5 <= delay <= 300
    assert policy.delay_s(tries + 1, chance) >= delay


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (RetryPolicy(max_attempts=0), "max_attempts=0"),
        (RetryPolicy(base_s=10, max_s=1), "base_s=10"),
        (RetryPolicy(factor=0.5), "factor=0.5"),
        (RetryPolicy(jitter=2), "jitter=2"),
    ],
)
def test_a_policy_that_makes_no_sense_says_which_field(policy, named):
    """Settings refuse nonsense and name the field."""
    assert any(named in problem for problem in policy.problems())
