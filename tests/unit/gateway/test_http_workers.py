"""Workers over HTTP, as a gateway remembers them."""

from datetime import UTC, datetime, timedelta

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
