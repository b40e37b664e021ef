"""The states of workers, by their records: running, lost or stopped."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.attempt import AttemptId
from penstock.core.worker_list import (
    HOLD_S,
    INTERVAL_S,
    KEEP_S,
    MISSED,
    OfType,
    WorkerList,
    WorkerStatus,
)

BEGIN_MS = 1_790_000_000_000
LOST_MS = int(MISSED * INTERVAL_S * 1000)


def status(worker="w", kind="worker", interval_s=INTERVAL_S, in_flight=0, **given):
    attempts = tuple(AttemptId(number + 1, 0, 0) for number in range(in_flight))
    of_type = OfType(("a",), in_flight, attempts)
    return WorkerStatus(id=worker, kind=kind, host="h", interval_s=interval_s, types={"t": of_type}, **given)


def states(workers, now_s):
    return {seen.status.id: seen.lost for seen in workers.by_type(now_s)["t"]}


def test_a_worker_is_lost_after_two_intervals_and_runs_again_with_a_record():
    """H5: judged by the broker's stamps; the record of any worker tells the time."""
    workers = WorkerList()
    workers.add([status("a"), status("b")], BEGIN_MS, 0.0)
    workers.add([status("b")], BEGIN_MS + LOST_MS - 1, 10.0)
    assert states(workers, 10.0) == {"a": False, "b": False}
    assert states(workers, 10.001) == {"a": True, "b": False}
    [lost] = [seen for seen in workers.by_type(10.001)["t"] if seen.lost]
    assert (lost.status.id, lost.seen_ms) == ("a", BEGIN_MS)
    workers.add([status("a")], BEGIN_MS + LOST_MS + 50, 10.05)
    assert states(workers, 10.05) == {"a": False, "b": False}


def test_no_worker_is_lost_while_no_record_comes():
    """H5: while Kafka is away the list stays as it was, and says how old it is."""
    workers = WorkerList()
    assert (workers.by_type(0.0), workers.age_s(0.0)) == ({}, None)
    workers.add([status("a")], BEGIN_MS, 0.0)
    # A worker that is due just now.
    workers.add([status("b")], BEGIN_MS + int(INTERVAL_S * 1000), 5.0)
    assert states(workers, 5.0 + 3600) == {"a": False, "b": False}
    assert (workers.age_s(65.0), workers.newest_ms) == (60.0, BEGIN_MS + int(INTERVAL_S * 1000))


def test_a_worker_that_stops_is_gone_at_once():
    """H5: it is never lost; a process with the same id is listed again."""
    workers = WorkerList()
    workers.add([status("a")], BEGIN_MS, 0.0)
    workers.add([status("a", stopped=True)], BEGIN_MS + 1, 0.0)
    assert states(workers, 0.0) == {}
    assert (workers.has_stopped("a"), workers.has_stopped("b")) == (True, False)
    workers.add([status("b")], BEGIN_MS + LOST_MS * 5, 50.0)
    assert states(workers, 50.0) == {"b": False}
    workers.add([status("a")], BEGIN_MS + LOST_MS * 5, 50.0)
    assert states(workers, 50.0) == {"a": False, "b": False}


def test_a_lost_worker_is_forgotten_after_an_hour():
    """H5: and not before."""
    workers = WorkerList()
    workers.add([status("a")], BEGIN_MS, 0.0)
    workers.add([status("b")], BEGIN_MS + int(KEEP_S * 1000), 0.0)
    assert states(workers, 0.0) == {"a": True, "b": False}
    workers.add([status("b")], BEGIN_MS + int(KEEP_S * 1000) + 1, 0.0)
    assert states(workers, 0.0) == {"b": False}


def test_a_silent_worker_over_http_is_lost_only_with_attempts():
    """H5: it cannot say that it ends. Of two gateways the one that it asked last counts."""
    workers = WorkerList()
    http = {"kind": "http", "interval_s": 45.0}
    workers.add([status("idle", **http), status("busy", in_flight=1, **http)], BEGIN_MS, 0.0)
    workers.add([status("busy", in_flight=2, silent_ms=4_000, **http)], BEGIN_MS + 3_000, 3.0)
    workers.add([status("w")], BEGIN_MS + 89_999, 90.0)
    assert states(workers, 90.0) == {"idle": False, "busy": False, "w": False}
    assert workers.by_type(90.0)["t"][1].status.types["t"].in_flight == 1
    workers.add([status("w")], BEGIN_MS + 90_000, 90.0)
    assert states(workers, 90.0) == {"busy": True, "w": False}


def test_memory_is_bounded():
    """H5: the worker that was silent for longest goes."""
    workers = WorkerList(most=3)
    for number in range(5):
        workers.add([status(f"w{number}")], BEGIN_MS + number, 0.0)
    workers.add([status("w2")], BEGIN_MS + 5, 0.0)
    workers.add([status("w5")], BEGIN_MS + 6, 0.0)
    assert set(states(workers, 0.0)) == {"w2", "w4", "w5"}


STEPS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["record", "stop"]),
        # Milliseconds until the step, by the broker and by the reader, which may be late.
        st.integers(0, 4 * LOST_MS),
        st.integers(0, 60_000),
    ),
    max_size=40,
)


@given(STEPS, st.integers(0, 10 * LOST_MS))
def test_states_follow_the_stamps_alone(steps, later_ms):
    """H5: delays of the reader count for nothing. A worker is listed unless it has stopped. It is
    lost if its last record is two intervals older than the time, and that is at most `HOLD_S`
    beyond the newest record."""
    workers = WorkerList()
    at_ms, now_s = BEGIN_MS, 0.0
    last: dict[str, tuple[str, int]] = {}
    for worker, kind, broker_ms, reader_ms in steps:
        at_ms, now_s = at_ms + broker_ms, now_s + reader_ms / 1000
        workers.add([status(worker, stopped=kind == "stop")], at_ms, now_s)
        last[worker] = kind, at_ms
    time_ms = at_ms + min(later_ms, HOLD_S * 1000)
    assert states(workers, now_s + later_ms / 1000) == {
        worker: (time_ms - seen_ms) / 1000 >= MISSED * INTERVAL_S
        for worker, (kind, seen_ms) in last.items()
        if kind == "record" and time_ms - seen_ms <= KEEP_S * 1000
    }


def test_records_have_a_bound_in_bytes():
    """O5: a worker that says much of itself pushes others out, and not more than a bound stays."""
    workers = WorkerList(most_bytes=100)
    workers.add([status("a")], BEGIN_MS, 0.0, 60)
    workers.add([status("b"), status("c")], BEGIN_MS, 0.0, 40)
    assert states(workers, 0.0).keys() == {"a", "b", "c"}
    workers.add([status("b")], BEGIN_MS, 0.0, 21)
    assert states(workers, 0.0).keys() == {"b", "c"}
    workers.add([status("d")], BEGIN_MS, 0.0, 101)
    assert not states(workers, 0.0)
