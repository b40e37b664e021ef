"""Workers over HTTP, as a gateway remembers them."""

from datetime import UTC, datetime, timedelta

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.gateway import http_workers
from penstock.gateway.http_workers import FORGET, HttpWorkers

NOW = datetime(2026, 11, 24, tzinfo=UTC)


def ids(seen, type_name, now):
    return [worker for worker, _found in seen.of_type(type_name, now)]


def test_a_worker_is_listed_under_each_type_that_it_asked_for():
    """W1: until it has been silent for too long; a busy worker only reports."""
    seen = HttpWorkers()
    seen.asked("b", "t", "10.0.0.1", NOW)
    seen.asked("a", "t", "10.0.0.2", NOW)
    seen.asked("a", "u", "10.0.0.3", NOW)
    assert (ids(seen, "t", NOW), ids(seen, "u", NOW), ids(seen, "v", NOW)) == (["a", "b"], ["a"], [])
    seen.reported("b", NOW + FORGET)
    later = NOW + FORGET + timedelta(seconds=1)
    [(worker, found)] = seen.of_type("t", later)
    assert (worker, found.host, found.seen_at) == ("b", "10.0.0.1", NOW + FORGET)
    seen.reported("unknown", later)
    assert ids(seen, "t", later + FORGET) == []


def test_memory_is_bounded():
    """Worker ids and types come from outside. The one that was silent longest goes."""
    seen = HttpWorkers(most=3, most_types=2)
    for number in range(5):
        seen.asked(f"w{number}", "t", "", NOW + timedelta(seconds=number))
    assert ids(seen, "t", NOW) == ["w2", "w3", "w4"]
    for number in range(4):
        seen.asked("w4", f"u{number}", "", NOW + timedelta(seconds=number))
    [(_, found)] = seen.of_type("u3", NOW)
    assert len(found.types) == 2


def task(number, type_name="t"):
    return ReadyTask(Fence(number, 0, "start", 0), type_name, Context.encode(None), lease_ms=30_000)


def in_flight(seen, now):
    [(worker, found)] = seen.of_type("t", now)
    types = found.status(worker, now).types
    return {
        name: (of_type.in_flight, [each.task_id for each in of_type.attempts])
        for name, of_type in types.items()
    }


def test_attempts_are_in_flight_until_their_result_or_the_end_of_their_lease():
    """H5: a result may reach another gateway; heartbeats renew the lease."""
    seen = HttpWorkers()
    seen.took("a", [task(1)], NOW)
    seen.asked("a", "t", "10.0.0.1", NOW)
    seen.took("a", [task(1), task(2), task(3, "u")], NOW)
    assert in_flight(seen, NOW) == {"t": (2, [1, 2]), "u": (1, [3])}
    seen.reported("a", NOW, ended=[task(1).fence.attempt_id])
    later = NOW + timedelta(seconds=29)
    seen.reported("a", later, beats={task(2).fence.attempt_id: 30_000, task(9).fence.attempt_id: 30_000})
    assert in_flight(seen, NOW + timedelta(seconds=31)) == {"t": (1, [2])}
    assert in_flight(seen, NOW + timedelta(seconds=60)) == {"t": (0, [])}


def test_attempts_in_memory_are_bounded(monkeypatch):
    """H5: the newest stay."""
    monkeypatch.setattr(http_workers, "MOST_IN_FLIGHT", 2)
    seen = HttpWorkers()
    seen.asked("a", "t", "10.0.0.1", NOW)
    seen.took("a", [task(number) for number in (1, 2, 3)], NOW)
    assert in_flight(seen, NOW) == {"t": (2, [2, 3])}


def test_a_record_has_the_workers_since_the_last_one():
    """H5: others have not been seen, so a record need not repeat them."""
    seen = HttpWorkers()
    for number in range(3):
        seen.asked(f"w{number}", "t", "", NOW + timedelta(seconds=number))
    assert [worker for worker, _ in seen.since(NOW)] == ["w2", "w1"]
    [(worker, found)] = seen.since(NOW + timedelta(seconds=1))
    status = found.status(worker, NOW + timedelta(seconds=5))
    assert (status.id, status.kind, status.silent_ms) == ("w2", "http", 3_000)
