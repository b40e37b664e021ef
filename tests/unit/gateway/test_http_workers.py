"""Workers over HTTP, as a gateway remembers them."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

from penstock.contracts.context import Context
from penstock.contracts.inbound_workers import decode_statuses
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.core.worker_list import KEEP_S
from penstock.errors import KafkaUnavailable
from penstock.gateway import http_workers
from penstock.gateway.http_workers import FORGET, INTERVAL_S, About, HttpWorkers
from penstock.gateway.worker_tail import status_sender

NOW = datetime(2026, 11, 24, tzinfo=UTC)


def asked(seen, worker, type_name, host, now, **about):
    seen.asked(worker, type_name, About(host, **about), now)


def ids(seen, type_name, now):
    return [worker for worker, _found in seen.of_type(type_name, now)]


def test_a_worker_is_listed_under_each_type_that_it_asked_for():
    """W1: until it has been silent for too long; a busy worker only reports."""
    seen = HttpWorkers()
    asked(seen, "b", "t", "10.0.0.1", NOW)
    asked(seen, "a", "t", "10.0.0.2", NOW)
    asked(seen, "a", "u", "10.0.0.3", NOW)
    assert (ids(seen, "t", NOW), ids(seen, "u", NOW), ids(seen, "v", NOW)) == (["a", "b"], ["a"], [])
    seen.reported("b", NOW + FORGET)
    later = NOW + FORGET + timedelta(seconds=1)
    [(worker, found)] = seen.of_type("t", later)
    assert (worker, found.host, found.seen_at) == ("b", "10.0.0.1", NOW + FORGET)
    seen.reported("unknown", later)
    assert ids(seen, "t", later + FORGET) == []


def test_memory_is_bounded(monkeypatch):
    """Worker ids, types and stages come from outside. The one that was silent longest goes."""
    seen = HttpWorkers(most=3, most_types=2)
    for number in range(5):
        asked(seen, f"w{number}", "t", "", NOW + timedelta(seconds=number))
    assert ids(seen, "t", NOW) == ["w2", "w3", "w4"]
    for number in range(4):
        asked(seen, "w4", f"u{number}", "", NOW + timedelta(seconds=number))
    [(_, found)] = seen.of_type("u3", NOW)
    assert len(found.types) == 2
    monkeypatch.setattr(http_workers, "MOST_CHARACTERS", 20)
    for number in range(5):
        # Each says it twice, and counts once.
        for _ in range(2):
            asked(seen, f"w{number}", "t", "", NOW + timedelta(seconds=number), stages=("x" * 9,))
    assert ids(seen, "t", NOW) == ["w3", "w4"]


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
    asked(seen, "a", "t", "10.0.0.1", NOW)
    seen.took("a", [task(1), task(2), task(3, "u")], NOW)
    assert in_flight(seen, NOW) == {"t": (2, [1, 2]), "u": (1, [3])}
    seen.reported("a", NOW, ended=[task(1).fence.attempt_id])
    later = NOW + timedelta(seconds=29)
    seen.reported("a", later, beats={task(2).fence.attempt_id: 30_000, task(9).fence.attempt_id: 30_000})
    assert in_flight(seen, NOW + timedelta(seconds=31)) == {"t": (1, [2])}
    assert in_flight(seen, NOW + timedelta(seconds=60)) == {"t": (0, [])}


def test_a_heartbeat_adds_only_attempts_that_are_proven():
    """H5: after the begin of a gateway a busy worker only reports. It is listed for the attempts
    that PostgreSQL has under it, and for nothing that it only names."""
    seen = HttpWorkers()
    own, other = task(1).fence.attempt_id, task(2).fence.attempt_id
    seen.reported("a", NOW, beats={own: 30_000, other: 30_000}, ended=[task(3).fence.attempt_id])
    seen.proved("a", "10.0.0.1", NOW, beats={own: 30_000, other: 30_000}, types={})
    assert ids(seen, "t", NOW) == []
    seen.proved("a", "10.0.0.1", NOW, beats={own: 30_000, other: 30_000}, types={own: "t"})
    assert in_flight(seen, NOW) == {"t": (1, [1])}
    assert in_flight(seen, NOW + timedelta(seconds=31)) == {"t": (0, [])}


def test_a_worker_says_what_it_is():
    """W1, H5: an older worker says nothing, and is listed. What it says once stays, as far as it
    fits a record."""
    seen = HttpWorkers()

    def described():
        [(worker, found)] = seen.of_type("t", NOW)
        status = found.status(worker, NOW)
        return status.host, status.version, {name: each.stages for name, each in status.types.items()}

    asked(seen, "a", "t", "10.0.0.1", NOW)
    assert described() == ("10.0.0.1", None, {"t": None})
    asked(seen, "a", "t", "php-3", NOW, version="2.4", stages=("start", "sign"))
    asked(seen, "a", "u", "php-3", NOW, stages=("x" * http_workers.MOST_STAGE_CHARACTERS,))
    assert described() == ("php-3", "2.4", {"t": ("start", "sign"), "u": None})
    asked(seen, "a", "t", "10.0.0.1", NOW)
    assert described() == ("10.0.0.1", "2.4", {"t": ("start", "sign"), "u": None})


def test_a_worker_with_long_leases_is_not_lost_before_they_end():
    """H5: with a lease of five minutes a busy worker beats every 100 s."""
    seen = HttpWorkers()
    asked(seen, "a", "t", "10.0.0.1", NOW)
    [(worker, found)] = seen.since(NOW - FORGET)
    assert found.status(worker, NOW).interval_s == INTERVAL_S
    seen.took("a", [task(1)], NOW)
    assert found.status(worker, NOW).interval_s == INTERVAL_S
    seen.reported("a", NOW, beats={task(1).fence.attempt_id: 300_000})
    assert found.status(worker, NOW).interval_s == 150
    seen.reported("a", NOW, beats={task(1).fence.attempt_id: 2**31 - 1})
    assert found.status(worker, NOW).interval_s == 3600


def test_attempts_in_memory_are_bounded(monkeypatch):
    """H5: the newest stay."""
    monkeypatch.setattr(http_workers, "MOST_IN_FLIGHT", 2)
    seen = HttpWorkers()
    asked(seen, "a", "t", "10.0.0.1", NOW)
    seen.took("a", [task(number) for number in (1, 2, 3)], NOW)
    assert in_flight(seen, NOW) == {"t": (2, [2, 3])}


def test_a_record_has_the_workers_since_the_last_one():
    """H5: others have not been seen, so a record need not repeat them."""
    seen = HttpWorkers()
    for number in range(3):
        asked(seen, f"w{number}", "t", "", NOW + timedelta(seconds=number))
    assert [worker for worker, _ in seen.since(NOW)] == ["w2", "w1"]
    [(worker, found)] = seen.since(NOW + timedelta(seconds=1))
    status = found.status(worker, NOW + timedelta(seconds=5))
    assert (status.id, status.kind, status.silent_ms) == ("w2", "http", 3_000)


async def test_workers_are_written_again_until_kafka_has_them():
    """H5: a record that was not written says nothing, and its workers may not ask again soon."""
    seen = HttpWorkers()
    now = datetime.now(UTC)
    asked(seen, "a", "t", "", now - timedelta(seconds=KEEP_S + 60))
    asked(seen, "b", "t", "", now - timedelta(seconds=60))
    answers = iter((KafkaUnavailable("away"), None, None))
    written = []

    async def try_status(_worker, value):
        written.append([each.id for each in decode_statuses(value)[1:]])
        if error := next(answers):
            raise error

    sender = status_sender(SimpleNamespace(try_status=try_status), SimpleNamespace(seen=seen, reading=["t"]))
    for _ in range(3):
        await sender.say_stopped()
    assert written == [["b"], ["b"], []]
