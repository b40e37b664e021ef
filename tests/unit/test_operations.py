"""What operators do to many tasks: what each verb makes of a task, and that pausing never lets two run one attempt."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.operations import AT_A_TIME, Standing, Verb, applied, batch, onward, reachable
from penstock.core.task import FINAL, Happening, State, after

STANDINGS = st.builds(Standing, st.sampled_from(State), st.integers(0, 5), st.booleans(), st.booleans())


@given(STANDINGS, st.sampled_from(Verb))
def test_doing_it_twice_changes_nothing_the_second_time(task, verb):
    """F5: pausing, resuming and cancelling are idempotent; what is recovered has not failed any more."""
    once = applied(verb, task)
    if once is not None and verb is not Verb.REPRIORITISE:
        assert applied(verb, once) is None


@given(STANDINGS)
def test_pausing_and_resuming_gives_back_what_there_was(task):
    """F5: resume puts a task back where it was with what it had; a queued one is at the gate again, as a new attempt."""
    paused = applied(Verb.PAUSE, task)
    if paused is None:
        assert task.state in {State.WAITING, State.PAUSED} | FINAL or task.pausing
        return
    resumed = applied(Verb.RESUME, paused)
    assert resumed is not None
    at_gate = State.SCHEDULED if task.due_ahead else State.READY
    if task.state is State.RUNNING:
        assert resumed == task
    elif task.state is State.QUEUED:
        assert resumed == Standing(at_gate, task.attempt + 1, pausing=False, due_ahead=task.due_ahead)
    else:
        assert resumed == Standing(at_gate, task.attempt, pausing=False, due_ahead=task.due_ahead)


def test_which_states_a_verb_reaches():
    """F5, O2c: nothing but recovering touches what has ended."""
    assert reachable(Verb.PAUSE) == {State.SCHEDULED, State.READY, State.QUEUED, State.RUNNING}
    assert reachable(Verb.RESUME) == set(State) - FINAL
    assert reachable(Verb.RECOVER) == {State.FAILED, State.QUARANTINED}
    assert reachable(Verb.CANCEL) == reachable(Verb.REPRIORITISE) == set(State) - FINAL


@given(st.floats(0.001, 1_000_000))
def test_batches_of_a_rate_are_small(rate):
    """O2c: ten batches a second, so that a rate is even; never more than a transaction should hold."""
    assert 1 <= batch(rate) <= AT_A_TIME
    assert batch(rate) == AT_A_TIME or (batch(rate) - 1) * 10 < rate
    assert batch(None) == AT_A_TIME


class Life(RuleBasedStateMachine):
    """One task whose records stay on Kafka for ever, with workers that take any of them at any time."""

    def __init__(self):
        super().__init__()
        self.task = Standing(State.READY)
        self.step = 0
        # Attempts whose records have been written, and those whose stages have taken effect.
        self.records = []
        self.effects = []
        # Somebody has asked for a pause, and nobody for an end of it.
        self.held = False

    def operate(self, verb):
        before = self.task
        found = applied(verb, before)
        if found is None:
            return
        self.task = found
        if before.state is State.PAUSED and found.state is not State.PAUSED:
            assert verb in (Verb.RESUME, Verb.CANCEL)
        self.held = verb is Verb.PAUSE or (self.held and verb is Verb.REPRIORITISE)

    @rule(verb=st.sampled_from(Verb))
    def asked(self, verb):
        self.operate(verb)

    @precondition(lambda self: self.task.state is State.READY)
    @rule()
    def released(self):
        assert not self.held
        self.task = self.task._replace(state=after(self.task.state, Happening.RELEASED), due_ahead=False)
        self.records.append((self.step, self.task.attempt))

    @precondition(lambda self: self.task.state is State.SCHEDULED)
    @rule()
    def due(self):
        self.task = self.task._replace(state=after(self.task.state, Happening.DUE), due_ahead=False)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def claimed(self, data):
        record = data.draw(st.sampled_from(self.records))
        if record == (self.step, self.task.attempt) and self.task.state in (State.QUEUED, State.RUNNING):
            self.task = self.task._replace(state=after(self.task.state, Happening.CLAIMED))

    @precondition(lambda self: self.records)
    @rule(data=st.data(), outcome=st.sampled_from(["next", "later", "retry", "done", "fail"]))
    def reported(self, data, outcome):
        record = data.draw(st.sampled_from(self.records))
        task = self.task
        if record != (self.step, task.attempt) or task.state not in (State.QUEUED, State.RUNNING):
            return
        happening, delayed = {
            "next": (Happening.ADVANCED, False),
            "later": (Happening.ADVANCED, True),
            "retry": (Happening.RETRIED, True),
            "done": (Happening.SUCCEEDED, False),
            "fail": (Happening.FAILED, False),
        }[outcome]
        state = after(task.state, happening)
        state = State.SCHEDULED if delayed and state is State.READY else state
        going = onward(state, pausing=task.pausing)
        if outcome in ("next", "later", "done"):
            self.effects.append(self.step)
        if outcome in ("next", "later"):
            self.step += 1
        attempt = {"retry": task.attempt + 1, "next": 0, "later": 0}.get(outcome, task.attempt)
        self.held = self.held and going not in FINAL
        self.task = Standing(going, attempt, pausing=False, due_ahead=delayed)

    @invariant()
    def every_stage_takes_effect_once(self):
        assert len(set(self.effects)) == len(self.effects)

    @invariant()
    def no_attempt_is_released_twice(self):
        """So a record that was left on Kafka when its task was paused is never the record of a living attempt."""
        assert len(set(self.records)) == len(self.records)

    @invariant()
    def what_is_held_runs_to_the_end_of_its_stage_at_most(self):
        if self.held:
            assert self.task.state is State.PAUSED or (self.task.state is State.RUNNING and self.task.pausing)

    @invariant()
    def a_mark_is_only_on_what_runs(self):
        assert not self.task.pausing or self.task.state is State.RUNNING


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
