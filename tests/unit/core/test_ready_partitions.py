"""The choice of partitions that get the next records, and of those that give theirs up."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.ready_partitions import LATE_S, OVERTAKE_S, Plan, ReadyPartitions
from penstock.core.task import Priority

# Two readers of two partitions each.
READERS = {0: "a", 1: "a", 2: "b", 3: "b"}


def made(lags, readers=None, now_s=0.0):
    """Partitions with untaken records that were written at `now_s`."""
    partitions = ReadyPartitions(len(lags))
    partitions.take(dict.fromkeys(range(len(lags)), 0), now_s)
    for number, lag in enumerate(lags):
        partitions.add(number, lag, now_s)
    partitions.set_readers(readers or {}, now_s)
    return partitions


def poll(partitions, now_s, taken=(), readers=None, *, more_ready=False):
    """One poll of the offsets, and its plan."""
    partitions.take(dict(taken), now_s)
    partitions.set_readers(READERS if readers is None else readers, now_s)
    return partitions.plan(now_s, more_ready=more_ready)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12),
    st.integers(0, 500),
    st.integers(1, 16),
    st.data(),
)
def test_every_task_gets_a_partition(lags, count, bundle, data):
    """S2: each task of a batch goes to a partition that exists, with and without known rates."""
    partitions = made(lags)
    number = st.integers(0, len(lags) - 1)
    for at in data.draw(st.lists(number, max_size=3)):
        partitions.add_marker(at, partitions[at].end, 0.0, withdrawn=data.draw(st.booleans()))
    readers = data.draw(st.dictionaries(number, st.sampled_from("ab")))
    partitions.set_readers(readers, 0.0)
    chosen = partitions.share(count, data.draw(st.floats(0, 5)), bundle)
    assert len(chosen) == count
    assert set(chosen) <= set(range(len(lags)))


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.integers(1, 60))
def test_partitions_are_filled_evenly(lags, count):
    """S2: without rates, records go where the fewest wait: no partition that got some has more than
    one record more than any other."""
    added = Counter(made(lags).share(count, 0.0))
    after = [lag + added[number] for number, lag in enumerate(lags)]
    for number, records in added.items():
        assert records == 0 or after[number] <= min(after) + 1


def test_a_slow_worker_gets_few_records():
    """S13: a worker that takes one record a second gets few beside one that takes a hundred."""
    partitions = made([200, 300], {0: "slow", 1: "quick"})
    for second in range(1, 3):
        for tenth in range(10):
            now_s = second + tenth / 10
            partitions.take({0: second, 1: round(now_s * 100) - 90}, now_s)
    partitions.withdraw(0, 200)
    partitions.take({0: 200, 1: 210}, 3.0)
    added = Counter(partitions.share(100, 3.0))
    assert added[0] <= 10


def test_few_short_tasks_go_to_one_partition():
    """S6: tasks that are short go together, to the partition with the fewest records; others go one
    to each partition."""
    assert made([3, 0, 3, 3]).share(4, 0.0, bundle=4) == [1] * 4
    assert sorted(made([0, 0, 0, 0]).share(4, 0.0)) == [0, 1, 2, 3]


def test_a_busy_worker_is_relieved_when_another_has_room():
    """S13: records that wait for a second are withdrawn once another worker has taken a marker. The
    busy one gets no more until it takes its own marker, and the worker gets one marker only."""
    partitions = made([5, 5, 0, 0], READERS)
    assert poll(partitions, 0.5) == Plan()
    assert poll(partitions, 1.1) == Plan(probe=(2,))
    partitions.add_marker(2, 0, 1.1, withdrawn=False)
    assert poll(partitions, 1.15) == Plan(), "one marker an episode"
    assert poll(partitions, 1.2, {2: 1}) == Plan(withdraw=(0, 1))
    for number in (0, 1):
        partitions.withdraw(number, 5)
        partitions.add_marker(number, 5, 1.2, withdrawn=True)
    assert partitions.lag == 0
    assert set(partitions.share(100, 1.3)) == {2, 3}
    assert poll(partitions, 9.0) == Plan(), "only markers wait"
    poll(partitions, 9.1, {0: 6})
    assert set(partitions.share(100, 9.2)) == {2, 3}, "the marker of its other partition is left"
    poll(partitions, 9.3, {1: 6})
    assert set(partitions.share(100, 9.4)) == {0, 1, 2, 3}


def test_nothing_is_withdrawn_while_no_worker_takes_its_mark():
    """S13: while all workers are busy, nothing moves, and each gets at most one marker."""
    partitions = made([5, 5, 0, 0], READERS)
    assert poll(partitions, 1.1) == Plan(probe=(2,))
    partitions.add_marker(2, 0, 1.1, withdrawn=False)
    for tenth in range(12, 600):
        assert poll(partitions, tenth / 10) == Plan()
    # No worker has room, so the tasks go everywhere.
    assert set(partitions.share(100, 60.0)) == {0, 1, 2, 3}


@given(st.lists(st.integers(1, 50), min_size=4, max_size=4), st.floats(0, 1_000), st.booleans())
def test_nothing_moves_where_all_are_stuck(lags, now_s, more_ready):
    """S13: where every worker has records and takes none, nothing is withdrawn and no marker is
    written."""
    assert poll(made(lags, READERS), now_s, more_ready=more_ready) == Plan()


def test_equally_slow_workers_keep_their_records():
    """S13: workers that each take a record every few seconds, in turns, are all slow: nothing
    moves."""
    partitions = made([100, 0, 100, 0], READERS)
    taken = {0: 0, 2: 0}
    for tenth in range(1, 300):
        if tenth % 30 == 0:
            taken[0] += 1
        if tenth % 30 == 15:
            taken[2] += 1
        assert poll(partitions, tenth / 10, taken, more_ready=True) == Plan()


def test_records_of_a_frozen_worker_are_withdrawn_beside_a_moving_one():
    """S13: the records of a worker that takes nothing are withdrawn while another takes records all
    the time, also when the other has records left."""
    partitions = made([50, 0, 500, 0], READERS)
    plans = [poll(partitions, tenth / 10, {2: tenth}, more_ready=True) for tenth in range(1, 15)]
    assert plans[0] == Plan()
    assert plans[-1] == Plan(withdraw=(0,))


@given(st.dictionaries(st.integers(0, 3), st.sampled_from("ab"), max_size=3))
def test_nothing_moves_in_a_rebalance(readers):
    """S13: while it is not known which worker reads each partition, nothing is withdrawn."""
    assert poll(made([5, 5, 0, 0], readers), 2.0, readers=readers) == Plan()


def test_late_records_of_a_moving_worker_go_to_one_without_work():
    """S13: a worker that still takes records, but not soon enough, gives them up to one that has
    room, unless tasks wait for their release anyway."""

    def plan_of(*, more_ready):
        partitions = made([9, 0, 0, 0], READERS)
        partitions.add_marker(2, 0, 1.5, withdrawn=False)
        poll(partitions, 1.6, {0: 1})
        return poll(partitions, LATE_S + 0.1, {0: 2, 2: 1}, more_ready=more_ready)

    assert plan_of(more_ready=False) == Plan(withdraw=(0,))
    assert plan_of(more_ready=True) == Plan()


def test_a_mark_of_another_process_counts_as_one():
    """S7: a replica that takes over finds a marker, and writes no other."""
    partitions = ReadyPartitions(4)
    partitions.start({0: 8, 1: 0, 2: 0, 3: 0}, 0.0)
    assert poll(partitions, 0.0, {0: 7}) == Plan()
    plan = poll(partitions, 1.1, {0: 7})
    assert plan == Plan(probe=(2,))
    partitions.add_marker(2, 0, 1.1, withdrawn=False)
    assert poll(partitions, 1.2, {0: 7, 2: 1}) == Plan(withdraw=(0,))
    partitions.find_marker(0, 8, 1.3)
    assert partitions.lag == 0
    assert poll(partitions, 3.0) == Plan()
    assert set(partitions.share(50, 3.0)) == {2, 3}


def test_a_mark_that_was_just_written_excludes_no_worker():
    """S13: tasks that are released while workers are asked for room go to all of them, not to the
    one that has records."""
    partitions = made([2, 0, 0, 0], READERS)
    partitions.add_marker(2, 0, 0.4, withdrawn=False)
    poll(partitions, 0.45, {0: 1})
    assert set(partitions.share(16, 0.5)) == {0, 1, 2, 3}


def test_an_urgent_task_overtakes_what_a_slow_worker_leaves():
    """S3, S13: low tasks wait for a second on the only partition of a worker that takes nothing. An
    urgent one behind them withdraws them all, once in five seconds; another low one does not."""
    partitions = ReadyPartitions(1)
    partitions.take({0: 0}, 0.0)
    partitions.add(0, 5, 0.0, [Priority.LOW, Priority.LOWEST])
    partitions.add(0, 1, 1.5, [Priority.LOWEST])
    assert poll(partitions, 1.6, readers={0: "a"}) == Plan()
    partitions.add(0, 1, 1.7, [Priority.HIGH])
    assert poll(partitions, 1.8, readers={0: "a"}) == Plan(withdraw=(0,))
    assert poll(partitions, 1.9, readers={0: "a"}) == Plan(), "one of them may be locked"
    assert poll(partitions, 1.9 + OVERTAKE_S, readers={0: "a"}) == Plan(withdraw=(0,))


def test_an_urgent_task_overtakes_on_all_partitions_of_slow_workers():
    """S3: what is less urgent is withdrawn everywhere, or the urgent task would come behind it on
    another partition. More urgent tasks stay."""
    partitions = ReadyPartitions(3)
    partitions.take(dict.fromkeys(range(3), 0), 0.0)
    for number, priority in enumerate((Priority.LOW, Priority.MEDIUM, Priority.HIGHEST)):
        partitions.add(number, 2, 0.0, [priority])
    partitions.add(0, 1, 0.5, [Priority.HIGH])
    readers = {0: "a", 1: "b", 2: "c"}
    assert poll(partitions, 0.9, readers=readers) == Plan()
    assert poll(partitions, 1.1, readers=readers) == Plan(withdraw=(0, 1))


def test_a_worker_that_takes_records_keeps_those_that_are_overtaken():
    """S3: a worker that takes a record every half a second reaches the urgent one by itself."""
    partitions = ReadyPartitions(1)
    partitions.add(0, 20, 0.0, [Priority.LOWEST])
    partitions.add(0, 1, 0.1, [Priority.HIGHEST])
    for half in range(1, 20):
        assert poll(partitions, half / 2, {0: half}, {0: "a"}) == Plan()


def test_an_urgent_task_that_a_full_window_keeps_from_release_overtakes():
    """S3: the same holds for a task that is not released, since late records fill the window."""
    partitions = ReadyPartitions(1)
    partitions.add(0, 100, 0.0, [Priority.MEDIUM])
    assert partitions.plan(2.0, more_ready=True, first_ready=Priority.MEDIUM) == Plan()
    assert partitions.plan(2.0, more_ready=True, first_ready=Priority.HIGH) == Plan(withdraw=(0,))


def test_records_of_an_earlier_owner_may_be_overtaken():
    """S3, S7: their priorities are not known, and count as MEDIUM."""
    partitions = ReadyPartitions(1)
    partitions.start({0: 5}, 0.0)
    partitions.take({0: 0}, 0.0)
    partitions.add(0, 1, 0.5, [Priority.MEDIUM])
    assert poll(partitions, 1.5, readers={0: "a"}) == Plan()
    partitions.add(0, 1, 1.6, [Priority.HIGH])
    assert poll(partitions, 1.7, readers={0: "a"}) == Plan(withdraw=(0,))


def overtaken_by_high():
    """A slow worker of four partitions: LOWEST tasks on three, and a HIGH one beside them, which
    has overtaken them."""
    partitions = ReadyPartitions(4)
    partitions.take(dict.fromkeys(range(4), 0), 0.0)
    readers = dict.fromkeys(range(4), "a")
    for number in range(3):
        partitions.add(number, 2, 0.0, [Priority.LOWEST])
    assert poll(partitions, 1.5, readers=readers) == Plan()
    partitions.add(3, 1, 1.6, [Priority.HIGH])
    assert poll(partitions, 1.7, readers=readers) == Plan(withdraw=(0, 1, 2))
    for number in range(3):
        partitions.withdraw(number, 2)
        partitions.add_marker(number, 2, 1.8, withdrawn=True)
    return partitions


def test_nothing_waits_beside_an_urgent_task_that_has_overtaken():
    """S3: a worker takes from its partitions in any order. When it has taken the urgent task, it
    gets the others again."""
    partitions = overtaken_by_high()
    assert partitions.narrow_room() == 0
    poll(partitions, 5.0, {3: 1}, dict.fromkeys(range(4), "a"))
    assert partitions.narrow_room() is None


def test_a_slow_worker_keeps_no_records_from_others():
    """S13: of a batch, a narrow worker gets one record, and another one the rest."""
    partitions = overtaken_by_high()
    readers = {0: "a", 1: "a", 2: "a", 3: "b"}
    partitions.set_readers(readers, 8.9)
    poll(partitions, 9.0, {0: 3, 1: 3, 2: 3, 3: 1}, readers)
    assert partitions.narrow_room() is None
    chosen = Counter(partitions.share(20, 9.0))
    assert chosen[3] == 19
