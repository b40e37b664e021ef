"""Losses of workers are charged to killers: random killers on simulated workers."""

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.attempt import AttemptId
from penstock.core.completion import FailureCounts, Fence, Outcome, conclude
from penstock.core.retry import RetryPolicy
from penstock.core.suspects import Isolation, LostAttempt, SuspectQueue, charged, isolation_of, suspects_of
from penstock.core.task import State


class SimulatedTask:
    def __init__(self, number, kills, steps):
        self.number, self.kills, self.steps = number, kills, steps
        self.state, self.counts, self.attempt = State.READY, FailureCounts(), 0

    def lose(self, *, is_charged, begun, max_losses):
        fence = Fence(self.number, 0, "s", self.attempt)
        # Attempts are no limit here, so that only losses end a task.
        policy = RetryPolicy(max_attempts=1_000)
        concluded = conclude(
            fence,
            Outcome.EXPIRED,
            counts=self.counts,
            policy=policy,
            max_losses=max_losses,
            charged=is_charged,
            begun=begun,
        )
        self.state, self.counts, self.attempt = concluded.state, concluded.counts, concluded.attempt


class SimulatedWorker:
    """A process that claims tasks, and runs them by the rules of the handler pool."""

    def __init__(self, size):
        self.size = size
        self.queue, self.backlog, self.running = SuspectQueue(), deque(), {}
        self.waiting = {}

    def claim(self, task, max_losses):
        isolation = isolation_of(task.counts.losses, max_losses)
        if isolation is None:
            self.backlog.append(task)
        else:
            self.waiting[task.number] = task
            self.queue.add(task.number, isolation)

    def fill(self):
        if len(self.running) >= self.size:
            return
        while len(self.running) < self.size and (number := self.queue.take(len(self.running))) is not None:
            self._begin(self.waiting.pop(number))
        while self.backlog and len(self.running) < self.size and not self.queue.blocks_others:
            self._begin(self.backlog.popleft())

    def _begin(self, task):
        self.running[task.number] = [task, task.steps]

    @property
    def held(self):
        begun = [(task, True) for task, _left in self.running.values()]
        # The platform does not learn which other tasks of a claim wait for a handler.
        return begun + [(task, False) for task in self.waiting.values()] + [(t, True) for t in self.backlog]


def lose_worker(held, losses, max_losses, random):
    """Expires the leases of a lost worker in two parts and in any order, and counts the charges."""
    random.shuffle(held)
    cut = random.randrange(len(held) + 1)
    left = [LostAttempt(task, task.counts.losses, begun) for task, begun in held]
    suspected = False
    for part in (left[:cut], left[cut:]):
        charges = charged(left, suspects_charged=suspected)
        suspected = suspected or bool(suspects_of(left))
        for one in part:
            is_charged = one.key in charges
            losses[one.key.number] += is_charged
            one.key.lose(is_charged=is_charged, begun=one.begun, max_losses=max_losses)
            left.remove(one)


KILLS = st.lists(st.booleans(), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    kills=KILLS,
    steps=st.lists(st.integers(1, 4), min_size=30, max_size=30),
    workers=st.integers(1, 3),
    size=st.integers(1, 12),
    poll=st.integers(1, 12),
    max_losses=st.integers(2, 4),
    random=st.randoms(use_true_random=True),
)
def test_each_killer_is_quarantined_and_each_healthy_task_succeeds(
    kills, steps, workers, size, poll, max_losses, random
):
    """W8: only killers are quarantined, for all kinds of killers and neighbours. A killer needs at
    most `max_losses` charged losses, and no healthy task is charged as often."""
    tasks = [SimulatedTask(number, kill, steps[number]) for number, kill in enumerate(kills)]
    ready = list(tasks)
    fleet = [SimulatedWorker(size) for _ in range(workers)]
    losses = Counter()
    for _ in range(20_000):
        if not any(task.state not in (State.SUCCEEDED, State.QUARANTINED) for task in tasks):
            break
        index = random.randrange(workers)
        worker = fleet[index]
        random.shuffle(ready)
        for _ in range(min(poll, len(ready))):
            worker.claim(ready.pop(), max_losses)
        worker.fill()
        if not worker.running:
            continue
        entry = random.choice(list(worker.running.values()))
        entry[1] -= 1
        task = entry[0]
        if entry[1]:
            # Suspects that run alone keep their turn.
            if isolation_of(task.counts.losses, max_losses) is Isolation.ONE and random.random() < 0.3:
                worker.queue.end_turn(task.number, outlived=True)
            continue
        if not task.kills:
            del worker.running[task.number]
            worker.queue.end_turn(task.number)
            task.state = State.SUCCEEDED
            continue
        held = worker.held
        lose_worker(held, losses, max_losses, random)
        ready += [held_task for held_task, _begun in held if held_task.state is State.SCHEDULED]
        fleet[index] = SimulatedWorker(size)
    for task in tasks:
        assert task.state is (State.QUARANTINED if task.kills else State.SUCCEEDED)
        assert losses[task.number] == max_losses if task.kills else losses[task.number] < max_losses


@settings(max_examples=50, deadline=None)
@given(healthy=st.integers(1, 60), size=st.integers(1, 60), claims=st.integers(1, 61), random=st.randoms())
def test_a_task_has_at_most_three_attempts_with_one_killer(healthy, size, claims, random):
    """W8: a healthy task is lost with the killer once beside it and once behind it. Then the killer
    runs alone, and after all that wait with it."""
    tasks = [SimulatedTask(number, number == 0, 1) for number in range(healthy + 1)]
    while any(task.state not in (State.SUCCEEDED, State.QUARANTINED) for task in tasks):
        worker = SimulatedWorker(size)
        ready = [task for task in tasks if task.state in (State.READY, State.SCHEDULED)]
        random.shuffle(ready)
        # Waiting attempts that are no suspects are not claimed when their worker is lost.
        ready = [task for task in ready if task.counts.losses] + [
            task for task in ready if not task.counts.losses
        ][:size]
        for task in ready[:claims]:
            worker.claim(task, 3)
        worker.fill()
        while worker.running:
            task = random.choice([entry[0] for entry in worker.running.values()])
            if task.kills:
                lose_worker(worker.held, Counter(), 3, random)
                break
            del worker.running[task.number]
            worker.queue.end_turn(task.number)
            task.state = State.SUCCEEDED
            worker.fill()
    assert tasks[0].state is State.QUARANTINED
    assert max(task.attempt + 1 for task in tasks[1:]) <= 3


def test_a_loss_is_charged_to_the_suspect_that_had_begun():
    """W8: waiting suspects and other attempts are charged nothing; without a begun suspect all
    others are."""
    suspect, waiting = LostAttempt("suspect", 1, begun=True), LostAttempt("waiting", 2, begun=False)
    fresh, unknown = LostAttempt("fresh", 0, begun=True), LostAttempt("unknown", 1, None)
    assert charged([suspect, waiting, fresh, unknown]) == {"suspect"}
    assert charged([waiting, fresh, unknown]) == {"fresh"}
    assert charged([waiting, fresh, unknown], suspects_charged=True) == set()
    assert charged([LostAttempt("restored", 0, None), LostAttempt("queued", 0, begun=False)]) == {"restored"}


def test_suspects_that_run_for_long_double_their_number():
    """W8, O1: the tasks of a lost host begin again soon, and quick suspects still begin one at a
    time."""
    queue = SuspectQueue()
    for number in range(100):
        queue.add(number, Isolation.ONE)
    begun = []
    while len(queue):
        begun.append([])
        while (number := queue.take(0)) is not None:
            begun[-1].append(number)
        for number in begun[-1]:
            queue.end_turn(number, outlived=True)
    assert [len(turn) for turn in begun] == [1, 2, 4, 8, 16, 32, 37]
    queue.add(100, Isolation.ONE)
    queue.end_turn(queue.take(0))
    queue.add(101, Isolation.ONE)
    queue.add(102, Isolation.ONE)
    assert [queue.take(0), queue.take(0)] == [101, None]


def test_a_suspect_runs_alone_before_the_last_loss():
    """W8: the loss that would quarantine a task is caused by no other."""
    assert [isolation_of(losses, 4) for losses in range(4)] == [
        None,
        Isolation.ONE,
        Isolation.ONE,
        Isolation.ALONE,
    ]
    assert isolation_of(1, 1) is Isolation.ALONE


def test_an_attempt_that_never_began_uses_no_attempt():
    """W8, T3: a task that may be tried once is tried again only if it had not begun."""
    states = {
        begun: conclude(
            Fence(1, 0, "s", 0),
            Outcome.EXPIRED,
            policy=RetryPolicy(max_attempts=1),
            charged=False,
            begun=begun,
        )
        for begun in (False, True)
    }
    assert states[False].state is State.SCHEDULED
    assert states[False].counts.losses == 0
    assert states[True].state is State.FAILED
    assert AttemptId(1, 0, states[False].attempt) == (1, 0, 1)
