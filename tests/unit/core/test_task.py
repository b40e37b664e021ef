"""The transition table and the decisions at the end of an attempt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.completion import FailureCounts, Fence, Outcome, conclude, conclude_unhandled
from penstock.core.retry import RetryPolicy
from penstock.core.task import FINAL, IN_FLIGHT, TRANSITIONS, Priority, State, Transition, after, sources
from penstock.errors import Conflict

FENCE = Fence(id=7, step=3, stage="transcode", attempt=2)


def test_a_final_task_moves_only_by_recovery_or_a_late_result():
    """H10: an operator or a late result brings back a task that failed or is quarantined. A task
    that succeeded or was cancelled never moves."""
    moves = {(state, transition) for state, transition in TRANSITIONS if state in FINAL}
    assert moves == {
        (state, transition)
        for state in (State.FAILED, State.QUARANTINED)
        for transition in (Transition.RECOVERED, Transition.ACCEPTED_LATE)
    }


def test_a_late_result_counts_while_its_stage_may_be_unfinished():
    """H10: a late result ends the attempt as if it had not expired, also before its successor runs.
    The stage of a task that waits is finished."""
    open_states = set(State) - FINAL - {State.WAITING}
    assert sources(Transition.ACCEPTED_LATE) == open_states | {State.FAILED, State.QUARANTINED}
    assert {after(state, Transition.ACCEPTED_LATE) for state in open_states} == {State.RUNNING}


def test_every_open_state_can_be_cancelled_and_left():
    """F5: every open task can be cancelled, and no open state is a dead end."""
    open_states = set(State) - FINAL
    assert sources(Transition.CANCELLED) == open_states
    # The result may never come late, so it is no way on.
    no_way_on = {Transition.CANCELLED, Transition.ACCEPTED_LATE}
    for state in open_states:
        assert any(t not in no_way_on for source, t in TRANSITIONS if source is state), state


def test_every_state_can_be_reached():
    """A state without a transition to it would be dead code."""
    assert set(TRANSITIONS.values()) | {State.SCHEDULED} == set(State)


def test_a_result_takes_effect_in_every_state_with_a_worker():
    """W4: claims are written late, so a result may find its task still queued."""
    for transition in (Transition.ADVANCED, Transition.RETRIED, Transition.SUCCEEDED, Transition.FAILED):
        assert sources(transition) == IN_FLIGHT


def test_an_impossible_transition_is_refused():
    """The error names the state and the transition."""
    with pytest.raises(Conflict, match="a task that is succeeded cannot be released"):
        after(State.SUCCEEDED, Transition.RELEASED)


def test_there_are_five_priorities_in_order():
    """S3: HIGHEST, HIGH, MEDIUM, LOW, LOWEST."""
    assert [p.name for p in sorted(Priority)] == ["HIGHEST", "HIGH", "MEDIUM", "LOW", "LOWEST"]


def test_next_starts_a_new_step_without_failures():
    """T3: the next stage starts at attempt 0, without the failures of the stage before."""
    conclusion = conclude(FENCE, Outcome.NEXT, next_stage="transcode", counts=FailureCounts(2, 1))
    assert (conclusion.state, conclusion.stage, conclusion.step, conclusion.attempt) == (
        State.READY,
        "transcode",
        4,
        0,
    )
    assert conclusion.counts == FailureCounts(0, 0)


@pytest.mark.parametrize("outcome", [Outcome.RETRY, Outcome.HANDED_BACK])
def test_a_requested_retry_is_no_failure(outcome):
    """T3, W1: a handler that polls a remote job may retry without a limit, and a worker may hand an
    attempt back."""
    conclusion = conclude(FENCE, outcome, delay_s=5, counts=FailureCounts(1, 1))
    assert (conclusion.state, conclusion.attempt, conclusion.delay_s, conclusion.counts) == (
        State.SCHEDULED,
        3,
        5,
        FailureCounts(1, 1),
    )


@pytest.mark.parametrize("delay_s", [None, 0.1, 20.0])
@pytest.mark.parametrize("no_handler_s", [1.0, 3600.0])
def test_a_stage_that_no_worker_handles_fails_its_task_within_the_bound_of_its_type(delay_s, no_handler_s):
    """O6: attempts that workers without the handler hand back add up their delays. The task fails
    once they reach the bound, also when a worker asks for no delay. It keeps its counts."""
    counts = FailureCounts(2, 1)
    fence, waited_s, unhandled_s = FENCE, 0.0, 0.0
    while waited_s <= no_handler_s + 20:
        ended = conclude_unhandled(
            fence, delay_s, counts=counts, unhandled_s=unhandled_s, no_handler_s=no_handler_s
        )
        assert (ended.counts, ended.stage, ended.step) == (counts, fence.stage, fence.step)
        if ended.state is State.FAILED:
            break
        assert (ended.state, ended.attempt) == (State.SCHEDULED, fence.attempt + 1)
        assert ended.delay_s >= 0.25
        fence, unhandled_s = fence._replace(attempt=ended.attempt), ended.unhandled_s
        waited_s += ended.delay_s
    assert no_handler_s <= waited_s == ended.unhandled_s < no_handler_s + 20
    assert ended.attempt == fence.attempt


def test_a_type_without_a_bound_never_fails_a_task_for_a_missing_handler():
    """O6: no_handler_s null."""
    ended = conclude_unhandled(FENCE, 20, counts=FailureCounts(), unhandled_s=1e9, no_handler_s=None)
    assert (ended.state, ended.delay_s) == (State.SCHEDULED, 20)


def test_a_permanent_failure_is_not_retried():
    """Fail(permanent=True) ends the task with attempts left."""
    conclusion = conclude(FENCE, Outcome.FAIL, permanent=True, delay_s=5, policy=RetryPolicy(max_attempts=9))
    assert conclusion.state is State.FAILED


@given(
    failures=st.integers(0, 10),
    losses=st.integers(0, 10),
    limit=st.integers(1, 12),
    max_losses=st.integers(1, 12),
    outcome=st.sampled_from([Outcome.FAIL, Outcome.EXPIRED]),
    chance=st.floats(0, 1),
)
def test_a_failure_or_loss_counts_once_and_the_last_one_ends_the_task(
    failures, losses, limit, max_losses, outcome, chance
):
    """H10, W8: attempt + 1 after back-off, failed when the attempts are used up, quarantined when
    too many workers were lost. Failures and losses have counts of their own, and each retry moves
    the fence."""
    policy = RetryPolicy(max_attempts=limit)
    conclusion = conclude(
        FENCE,
        outcome,
        counts=FailureCounts(failures, losses),
        policy=policy,
        max_losses=max_losses,
        chance=chance,
    )
    if outcome is Outcome.FAIL:
        assert conclusion.counts == FailureCounts(failures + 1, losses)
        expected = State.FAILED if failures + 1 >= limit else State.SCHEDULED
    else:
        assert conclusion.counts == FailureCounts(failures, losses + 1)
        used_up = failures + losses + 1 >= limit
        expected = State.FAILED if used_up else State.SCHEDULED
        if losses + 1 >= max_losses:
            expected = State.QUARANTINED
    assert conclusion.state is expected
    if expected is State.SCHEDULED:
        assert conclusion.attempt == FENCE.attempt + 1
        assert 0 <= conclusion.delay_s <= policy.max_s
    else:
        assert conclusion.attempt == FENCE.attempt


@given(failures=st.integers(1, 10_000), chance=st.floats(0, 1))
def test_the_delay_grows_within_its_bounds(failures, chance):
    """The delay stays between 0 and max_s for every number of failures."""
    policy = RetryPolicy(base_s=1, factor=2, max_s=300, jitter=0.5)
    delay = policy.delay_s(failures, chance)
    assert 0.5 <= delay <= 300
    assert policy.delay_s(failures + 1, chance) >= delay


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (RetryPolicy(max_attempts=0), "max_attempts=0"),
        (RetryPolicy(base_s=10, max_s=1), "base_s=10"),
        (RetryPolicy(factor=0.5), "factor=0.5"),
        (RetryPolicy(jitter=2), "jitter=2"),
    ],
)
def test_an_invalid_policy_names_the_field(policy, named):
    """An invalid policy is refused, and the problem names the field."""
    assert any(named in problem for problem in policy.problems())


@given(delay_s=st.floats(0, 1e6), failures=st.integers(0, 3), chance=st.floats(0, 1))
def test_the_delay_of_a_stage_takes_the_place_of_its_type(delay_s, failures, chance):
    """W1: it decides when the next attempt begins, and not whether there is one."""
    policy = RetryPolicy(max_attempts=3, base_s=50)
    conclusion = conclude(
        FENCE,
        Outcome.FAIL,
        delay_s=delay_s,
        counts=FailureCounts(failures, 0),
        policy=policy,
        chance=chance,
    )
    retried = failures + 1 < 3
    assert conclusion.state is (State.SCHEDULED if retried else State.FAILED)
    assert conclusion.delay_s == (delay_s if retried else 0.0)
