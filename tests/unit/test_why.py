"""Why a task is waiting: one answer for whatever is known, and what has to change first comes first."""

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.task import FINAL, State
from penstock.core.why import Ahead, Facts, Readers, Reason, why

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SINCE = NOW - timedelta(seconds=30)
# Ready, and nothing holds it.
FREE = Facts(now=NOW, state=State.READY, since=SINCE, owner="host-1", ahead=Ahead(0), readers=Readers(2, 0))
QUEUED = dataclasses.replace(FREE, state=State.QUEUED, ahead=None, readers=Readers(2, 7))

# What holds a ready task, from what has to change first.
HELD = (
    (Reason.TYPE_PAUSED, {"type_paused": True}, "type is paused"),
    (Reason.KEY_PAUSED, {"key": "acme", "key_paused": True}, "acme, is paused"),
    (Reason.NO_OWNER, {"owner": None}, "no task-sync has its type"),
    (Reason.NO_WORKER, {"readers": Readers(0, 0)}, "no worker reads"),
    (
        Reason.KEY_TAKEN,
        {"key": "acme", "key_limit": 2, "key_in_flight": 2},
        "2 tasks of its key, acme, are in flight",
    ),
    (Reason.LIMIT_IN_FLIGHT, {"max_in_flight": 5, "in_flight": 6}, "6 tasks of its type are in flight, of 5"),
    (Reason.LIMIT_STARTS, {"starts_per_s": 2.5}, "may start 2.5 tasks a second"),
    (Reason.AHEAD, {"ahead": Ahead(1_204)}, "1,204 tasks of its type are released before it"),
    (Reason.NEXT, {}, "next of its type"),
)


@pytest.mark.parametrize(("reason", "facts", "words"), HELD)
def test_each_reason_that_holds_a_ready_task(reason, facts, words):
    """S8: each has a word and a sentence with its figures, and is not given without its cause."""
    told = why(dataclasses.replace(FREE, **facts))
    assert told.reason is reason
    assert words in told.sentence
    for name in ("key", "key_limit", "key_in_flight", "max_in_flight", "in_flight", "starts_per_s", "owner"):
        assert told.figures.get(name) == {"owner": "host-1", **facts}.get(name)
    assert (why(FREE).reason is reason) == (not facts)


@given(st.sets(st.integers(0, len(HELD) - 1)))
def test_of_many_reasons_the_one_that_has_to_change_first_is_told(true):
    """S8: one answer, whatever else would be true as well."""
    facts = FREE
    for number in sorted(true):
        facts = dataclasses.replace(facts, **HELD[number][1])
    assert why(facts).reason is HELD[min(true, default=len(HELD) - 1)][0]


@pytest.mark.parametrize(
    ("facts", "reason", "words"),
    [
        ({"readers": Readers(2, 7)}, Reason.ON_KAFKA, "at most 7 records for workers"),
        ({"readers": Readers(2, 1)}, Reason.ON_KAFKA, "at most 1 record for workers"),
        ({"readers": Readers(None, 7)}, Reason.ON_KAFKA, "at most 7 records"),
        ({"readers": None}, Reason.ON_KAFKA, "Kafka does not tell"),
        ({"readers": Readers(0, 7)}, Reason.NO_WORKER, "no worker reads its ready topic (7 records there)"),
        ({"readers": Readers(2, 0)}, Reason.TAKEN, "a worker has taken it"),
        # Who took it has left the group since: what it has in hand is still its own.
        ({"readers": Readers(0, 0)}, Reason.TAKEN, "a worker has taken it"),
        ({"readers": Readers(2, 0), "noted": True}, Reason.ON_KAFKA, "on its way to Kafka"),
        (
            {"readers": Readers(2, 7), "noted": True, "owner": None},
            Reason.NO_OWNER,
            "no task-sync has its type",
        ),
        ({"type_paused": True, "owner": None}, Reason.ON_KAFKA, "at most 7 records"),
    ],
)
def test_what_was_released_waits_for_workers_alone(facts, reason, words):
    """S8: pauses, limits and owners play no part any more, unless its record may not be on Kafka."""
    told = why(dataclasses.replace(QUEUED, **facts))
    assert (told.reason, words in told.sentence) == (reason, True), told


def test_what_is_not_due_tells_until_when_and_whether_it_is_a_retry():
    """S8: not due: a delay, or the back-off of a retry; what is overdue waits for task-sync."""
    later = dataclasses.replace(FREE, state=State.SCHEDULED, due_at=NOW + timedelta(seconds=12.5))
    assert (why(later).reason, why(later).sentence) == (Reason.NOT_DUE, "it is due in 12.5 s")
    assert why(later).figures["due_in_s"] == 12.5
    retry = why(dataclasses.replace(later, attempt=2, type_paused=True, owner=None))
    assert (retry.reason, retry.sentence) == (Reason.NOT_DUE, "it is tried again (attempt 2) in 12.5 s")
    overdue = dataclasses.replace(later, due_at=SINCE)
    assert why(overdue).reason is Reason.NEXT
    assert why(dataclasses.replace(overdue, owner=None)).reason is Reason.NO_OWNER


def test_what_does_not_wait_for_the_gate_says_what_it_does():
    """S8: paused, waiting, running and ended tasks have an answer, too, whatever is paused or limited around them."""
    around = dataclasses.replace(FREE, type_paused=True, owner=None, readers=Readers(0, 5))
    paused = dataclasses.replace(around, state=State.PAUSED, due_at=NOW + timedelta(seconds=60))
    assert (why(paused).reason, "60 s of its delay are left" in why(paused).sentence) == (
        Reason.TASK_PAUSED,
        True,
    )
    assert "delay" not in why(dataclasses.replace(paused, due_at=SINCE)).sentence
    assert why(dataclasses.replace(around, state=State.WAITING)).reason is Reason.WAITING
    running = why(dataclasses.replace(around, state=State.RUNNING, worker="w-1", lease_s=60.0, pausing=True))
    assert (running.reason, running.figures["worker"], running.figures["lease_s"]) == (
        Reason.RUNNING,
        "w-1",
        60.0,
    )
    assert "w-1; it is to be paused" in running.sentence
    for state in FINAL:
        ended = why(dataclasses.replace(around, state=state))
        assert (ended.reason, ended.sentence) == (Reason.ENDED, f"it has ended: {state}")


def test_a_rate_is_told_only_where_it_holds():
    """S8: where workers leave a second of starts on their topic, it is they who are waited for."""
    rated = dataclasses.replace(FREE, starts_per_s=3.0, ahead=Ahead(5))
    assert why(dataclasses.replace(rated, readers=Readers(2, 2))).reason is Reason.LIMIT_STARTS
    assert why(dataclasses.replace(rated, readers=None)).reason is Reason.LIMIT_STARTS
    assert why(dataclasses.replace(rated, readers=Readers(2, 3))).reason is Reason.AHEAD
    full = why(dataclasses.replace(rated, readers=Readers(2, 3), ahead=Ahead(0)))
    assert (full.reason, "some of the 3 records" in full.sentence) == (Reason.NEXT, True)


@given(st.integers(1, 10_000), st.booleans(), st.booleans())
def test_what_is_ahead_is_said_as_exactly_as_it_is_known(tasks, more, about):
    """S8: N ahead; more than N where not all were counted, about N where keys take turns."""
    told = why(dataclasses.replace(FREE, ahead=Ahead(tasks, more, about)))
    assert told.reason is Reason.AHEAD
    assert told.sentence.startswith("more than" if more else "about" if about else f"{tasks:,} task")
    assert (told.figures["ahead"], told.figures.get("ahead_more"), told.figures.get("ahead_about")) == (
        tasks,
        more or None,
        about or None,
    )


READERS = st.none() | st.builds(Readers, st.none() | st.integers(0, 3), st.integers(0, 9))


@given(
    st.builds(
        Facts,
        now=st.just(NOW),
        since=st.just(SINCE),
        state=st.sampled_from(State),
        attempt=st.integers(0, 3),
        due_at=st.none() | st.just(NOW) | st.just(NOW + timedelta(hours=1)),
        owner=st.none() | st.just("host-1"),
        noted=st.booleans(),
        type_paused=st.booleans(),
        ahead=st.none() | st.builds(Ahead, st.integers(0, 3)),
        readers=READERS,
    )
)
def test_whatever_is_known_there_is_one_answer(facts):
    """S8: a sentence and figures without holes, of whatever could be found out."""
    told = why(facts)
    assert told.sentence
    assert None not in told.figures.values()
    assert told.figures["since"] == SINCE
