"""Bulk operations: the changes of each verb, and that no attempt is released twice."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.operations import (
    BATCH_SIZE,
    TaskSnapshot,
    Verb,
    apply,
    batch_size,
    reachable,
    state_after_attempt,
)
from penstock.core.task import FINAL, State, Transition, after

SNAPSHOTS = st.builds(TaskSnapshot, st.sampled_from(State), st.integers(0, 5), st.booleans(), st.booleans())


@given(SNAPSHOTS, st.sampled_from(Verb))
def test_a_verb_applied_twice_changes_nothing_the_second_time(task, verb):
    """F5: pausing, resuming, cancelling and recovering are idempotent."""
    once = apply(verb, task)
    if once is not None and verb is not Verb.REPRIORITISE:
        assert apply(verb, once) is None


@given(SNAPSHOTS)
def test_resuming_restores_a_paused_task(task):
    """F5: resume restores state and delay. A queued task becomes ready, as a new attempt."""
    paused = apply(Verb.PAUSE, task)
    if paused is None:
        assert task.state in {State.WAITING, State.PAUSED} | FINAL or task.pausing
        return
    resumed = apply(Verb.RESUME, paused)
    assert resumed is not None
    restored = State.SCHEDULED if task.due_ahead else State.READY
    if task.state is State.RUNNING:
        assert resumed == task
    elif task.state is State.QUEUED:
        assert resumed == TaskSnapshot(restored, task.attempt + 1, pausing=False, due_ahead=task.due_ahead)
    else:
        assert resumed == TaskSnapshot(restored, task.attempt, pausing=False, due_ahead=task.due_ahead)


def test_which_states_a_verb_reaches():
    """F5, O2c: only `recover` reaches tasks that have ended."""
    assert reachable(Verb.PAUSE) == {State.SCHEDULED, State.READY, State.QUEUED, State.RUNNING}
    assert reachable(Verb.RESUME) == {State.PAUSED, State.RUNNING}
    assert reachable(Verb.RECOVER) == {State.FAILED, State.QUARANTINED}
    assert reachable(Verb.CANCEL) == reachable(Verb.REPRIORITISE) == set(State) - FINAL


@given(st.floats(0.001, 1_000_000))
def test_a_rate_makes_small_batches(rate):
    """O2c: ten batches a second keep the rate even, and no batch exceeds the limit."""
    assert 1 <= batch_size(rate) <= BATCH_SIZE
    assert batch_size(rate) == BATCH_SIZE or (batch_size(rate) - 1) * 10 < rate
    assert batch_size(None) == BATCH_SIZE


class TaskLifecycle(RuleBasedStateMachine):
    """One task whose records stay on Kafka forever. Workers claim any record at any time."""

    def __init__(self):
        super().__init__()
        self.task = TaskSnapshot(State.READY)
        self.step = 0
        # The attempts with a record on Kafka, and the stages that have taken effect.
        self.records = []
        self.effects = []
        # Whether the last verb that pauses or resumes the task was `pause`.
        self.paused = False

    def operate(self, verb):
        before = self.task
        changed = apply(verb, before)
        if changed is None:
            return
        self.task = changed
        if before.state is State.PAUSED and changed.state is not State.PAUSED:
            assert verb in (Verb.RESUME, Verb.CANCEL)
        self.paused = verb is Verb.PAUSE or (self.paused and verb is Verb.REPRIORITISE)

    @rule(verb=st.sampled_from(Verb))
    def operator_request(self, verb):
        self.operate(verb)

    @precondition(lambda self: self.task.state is State.READY)
    @rule()
    def released(self):
        assert not self.paused
        self.task = self.task._replace(state=after(self.task.state, Transition.RELEASED), due_ahead=False)
        self.records.append((self.step, self.task.attempt))

    @precondition(lambda self: self.task.state is State.SCHEDULED)
    @rule()
    def due(self):
        self.task = self.task._replace(state=after(self.task.state, Transition.DUE), due_ahead=False)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def claimed(self, data):
        record = data.draw(st.sampled_from(self.records))
        if record == (self.step, self.task.attempt) and self.task.state in (State.QUEUED, State.RUNNING):
            self.task = self.task._replace(state=after(self.task.state, Transition.CLAIMED))

    @precondition(lambda self: self.records)
    @rule(data=st.data(), outcome=st.sampled_from(["next", "later", "retry", "done", "fail"]))
    def reported(self, data, outcome):
        record = data.draw(st.sampled_from(self.records))
        task = self.task
        if record != (self.step, task.attempt) or task.state not in (State.QUEUED, State.RUNNING):
            return
        transition, delayed = {
            "next": (Transition.ADVANCED, False),
            "later": (Transition.ADVANCED, True),
            "retry": (Transition.RETRIED, True),
            "done": (Transition.SUCCEEDED, False),
            "fail": (Transition.FAILED, False),
        }[outcome]
        state = after(task.state, transition)
        state = State.SCHEDULED if delayed and state is State.READY else state
        next_state = state_after_attempt(state, pausing=task.pausing)
        if outcome in ("next", "later", "done"):
            self.effects.append(self.step)
        if outcome in ("next", "later"):
            self.step += 1
        attempt = {"retry": task.attempt + 1, "next": 0, "later": 0}.get(outcome, task.attempt)
        self.paused = self.paused and next_state not in FINAL
        self.task = TaskSnapshot(next_state, attempt, pausing=False, due_ahead=delayed)

    @invariant()
    def every_stage_takes_effect_once(self):
        assert len(set(self.effects)) == len(self.effects)

    @invariant()
    def no_attempt_is_released_twice(self):
        """A record that stays on Kafka after a pause never belongs to a current attempt."""
        assert len(set(self.records)) == len(self.records)

    @invariant()
    def a_paused_task_runs_at_most_to_the_end_of_its_stage(self):
        if self.paused:
            assert self.task.state is State.PAUSED or (self.task.state is State.RUNNING and self.task.pausing)

    @invariant()
    def only_a_running_task_is_pausing(self):
        assert not self.task.pausing or self.task.state is State.RUNNING


TestTaskLifecycle = TaskLifecycle.TestCase
TestTaskLifecycle.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
