"""The reason why a task waits: one answer for any facts, and the first reason that must change."""

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.task import FINAL, State
from penstock.core.why import Ahead, Facts, GroupLag, RecordPosition, WaitReason, why

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SINCE = NOW - timedelta(seconds=30)
# A ready task without a reason to wait.
READY = Facts(now=NOW, state=State.READY, since=SINCE, owner="host-1", ahead=Ahead(0), group=GroupLag(2, 0))
QUEUED = dataclasses.replace(READY, state=State.QUEUED, ahead=None, group=GroupLag(2, 7))

# Reasons why a ready task waits, in the order in which they must change.
REASONS = (
    (WaitReason.TYPE_PAUSED, {"type_paused": True}, "type is paused"),
    (WaitReason.KEY_PAUSED, {"concurrency_key": "acme", "key_paused": True}, "acme, is paused"),
    (WaitReason.NO_OWNER, {"owner": None}, "no task-sync owns its type"),
    (WaitReason.NO_WORKER, {"group": GroupLag(0, 0)}, "no worker reads"),
    (
        WaitReason.KEY_TAKEN,
        {"concurrency_key": "acme", "key_limit": 2, "key_in_flight": 2},
        "2 tasks of its key, acme, are in flight",
    ),
    (
        WaitReason.LIMIT_IN_FLIGHT,
        {"max_in_flight": 5, "in_flight": 6},
        "6 tasks of its type are in flight, of at most 5",
    ),
    (
        WaitReason.LIMIT_IN_FLIGHT,
        {"max_in_flight": 1, "in_flight": 1},
        "1 task of its type is in flight, of at most 1",
    ),
    (WaitReason.LIMIT_STARTS, {"starts_per_s": 2.5}, "may start 2.5 tasks a second"),
    (WaitReason.AHEAD, {"ahead": Ahead(1_204)}, "1,204 tasks of its type are released before it"),
    (WaitReason.NEXT, {}, "next of its type"),
)


@pytest.mark.parametrize(("reason", "facts", "words"), REASONS)
def test_each_reason_of_a_ready_task_has_a_sentence(reason, facts, words):
    """S8: each reason has a word and a sentence with its values, and needs its cause."""
    answer = why(dataclasses.replace(READY, **facts))
    assert answer.reason is reason
    assert words in answer.sentence
    assert answer.figures.get("key") == facts.get("concurrency_key")
    for name in ("key_limit", "key_in_flight", "max_in_flight", "in_flight", "starts_per_s", "owner"):
        assert answer.figures.get(name) == {"owner": "host-1", **facts}.get(name)
    assert (why(READY).reason is reason) == (not facts)


@given(st.sets(st.integers(0, len(REASONS) - 1)))
def test_the_first_of_several_reasons_is_the_answer(chosen):
    """S8: the answer is the reason that must change first, for any set of reasons."""
    facts = READY
    for number in sorted(chosen):
        facts = dataclasses.replace(facts, **REASONS[number][1])
    assert why(facts).reason is REASONS[min(chosen, default=len(REASONS) - 1)][0]


def test_a_ready_task_waits_for_a_worker_with_its_stage():
    """W1: when all connected workers name their stages, and none names this one."""
    named = GroupLag(2, 0, stages=frozenset({"b", "a"}))
    answer = why(dataclasses.replace(READY, stage="z", group=named, max_in_flight=1, in_flight=1))
    assert answer.reason is WaitReason.NO_HANDLER
    assert answer.sentence.endswith("has a handler for its stage 'z'; they have: a, b")
    for stage, group in (("a", named), ("z", GroupLag(2, 0)), ("z", GroupLag(None, 0, stages=frozenset()))):
        assert why(dataclasses.replace(READY, stage=stage, group=group)).reason is WaitReason.NEXT


@pytest.mark.parametrize(
    ("facts", "reason", "words"),
    [
        ({"group": GroupLag(2, 7)}, WaitReason.ON_KAFKA, "at most 7 records before it"),
        ({"group": GroupLag(2, 1)}, WaitReason.ON_KAFKA, "at most 1 record before it"),
        ({"group": GroupLag(None, 7)}, WaitReason.ON_KAFKA, "at most 7 records"),
        ({"group": None}, WaitReason.ON_KAFKA, "Kafka did not answer"),
        (
            {"position": RecordPosition(3, "host-7", 12)},
            WaitReason.ON_KAFKA,
            "waits on partition 3 for worker host-7, with 12 records before it; if the worker stays busy",
        ),
        (
            {"position": RecordPosition(3, None, 1)},
            WaitReason.ON_KAFKA,
            "which no worker has now, with 1 record",
        ),
        ({"unrun": 1}, WaitReason.ON_KAFKA, "; 1 earlier attempt of its stage did not run"),
        ({"unrun": 2}, WaitReason.ON_KAFKA, "task-sync withdrew the record from a busy worker"),
        (
            {"group": GroupLag(0, 7)},
            WaitReason.NO_WORKER,
            "no worker reads its ready topic (7 records there)",
        ),
        ({"group": GroupLag(2, 0)}, WaitReason.TAKEN, "a worker has taken it"),
        (
            {"stage": "z", "group": GroupLag(2, 7, stages=frozenset("a"))},
            WaitReason.NO_HANDLER,
            "no worker of its type that is connected has a handler",
        ),
        ({"stage": "a", "group": GroupLag(2, 7, stages=frozenset("a"))}, WaitReason.ON_KAFKA, "at most 7"),
        # A worker with the stage may have taken it, and have left the group since.
        ({"stage": "z", "group": GroupLag(2, 0, stages=frozenset("a"))}, WaitReason.TAKEN, "has taken it"),
        # The worker has left the group since, but still has the task in flight.
        ({"group": GroupLag(0, 0)}, WaitReason.TAKEN, "a worker has taken it"),
        ({"group": GroupLag(2, 0), "noted": True}, WaitReason.ON_KAFKA, "on its way to Kafka"),
        (
            {"group": GroupLag(2, 7), "noted": True, "owner": None},
            WaitReason.NO_OWNER,
            "no task-sync owns its type",
        ),
        ({"type_paused": True, "owner": None}, WaitReason.ON_KAFKA, "at most 7 records"),
    ],
)
def test_a_released_task_waits_only_for_workers(facts, reason, words):
    """S8: pauses, limits and owners do not matter after the release, unless the record may not be
    on Kafka."""
    answer = why(dataclasses.replace(QUEUED, **facts))
    assert (answer.reason, words in answer.sentence) == (reason, True), answer


def test_a_delayed_task_has_its_due_time_and_retry():
    """S8: a task that is not due has a delay or the back-off of a retry. An overdue task waits for
    task-sync."""
    later = dataclasses.replace(READY, state=State.SCHEDULED, due_at=NOW + timedelta(seconds=12.5))
    assert (why(later).reason, why(later).sentence) == (WaitReason.NOT_DUE, "it is due in 12.5 s")
    assert why(later).figures["due_in_s"] == 12.5
    retry = why(dataclasses.replace(later, attempt=2, type_paused=True, owner=None))
    assert (retry.reason, retry.sentence) == (WaitReason.NOT_DUE, "it is tried again (attempt 2) in 12.5 s")
    unhandled = why(dataclasses.replace(later, attempt=2, unhandled="it has: start"))
    assert unhandled.reason is WaitReason.NO_HANDLER
    assert unhandled.sentence == (
        "the last worker that took it had no handler for its stage (it has: start); "
        "it is tried again (attempt 2) in 12.5 s"
    )
    bounded = dataclasses.replace(
        later, attempt=2, unhandled="it has: start", unhandled_s=40.0, no_handler_s=3600.0
    )
    assert why(bounded).sentence == (
        f"{unhandled.sentence}, and fails after 3,600 s of such delays (40 s so far)"
    )
    overdue = dataclasses.replace(later, due_at=SINCE)
    assert why(overdue).reason is WaitReason.NEXT
    assert why(dataclasses.replace(overdue, owner=None)).reason is WaitReason.NO_OWNER


def test_tasks_in_other_states_have_an_answer():
    """S8: paused, waiting, running and ended tasks have an answer, regardless of pauses and
    limits."""
    base = dataclasses.replace(READY, type_paused=True, owner=None, group=GroupLag(0, 5))
    paused = dataclasses.replace(base, state=State.PAUSED, due_at=NOW + timedelta(seconds=60))
    assert (why(paused).reason, "60 s of its delay are left" in why(paused).sentence) == (
        WaitReason.TASK_PAUSED,
        True,
    )
    assert "delay" not in why(dataclasses.replace(paused, due_at=SINCE)).sentence
    assert why(dataclasses.replace(base, state=State.WAITING)).reason is WaitReason.WAITING
    running = why(dataclasses.replace(base, state=State.RUNNING, worker="w-1", lease_s=60.0, pausing=True))
    assert (running.reason, running.figures["worker"], running.figures["lease_s"]) == (
        WaitReason.RUNNING,
        "w-1",
        60.0,
    )
    assert "w-1; it is to be paused" in running.sentence
    for state in FINAL:
        ended = why(dataclasses.replace(base, state=state))
        assert (ended.reason, ended.sentence) == (WaitReason.ENDED, f"it has ended: {state}")
    failed = why(Facts(now=NOW, state=State.FAILED, since=NOW, error="Fail: there is nothing to count"))
    assert failed.sentence == "it has ended: Fail: there is nothing to count"


def test_the_last_failure_has_its_log():
    """S8, L2: an answer about a task whose last attempt failed, also while it waits for the next
    one, has the end of the traceback and the path of the log."""
    facts = Facts(now=NOW, state=State.FAILED, since=NOW, attempt=1, traceback="…", log="/tasks/7/logs/0/0")
    shown = {"traceback": "…", "log": "/tasks/7/logs/0/0"}
    assert why(facts).figures.items() >= shown.items()
    retried = dataclasses.replace(facts, state=State.SCHEDULED, due_at=NOW + timedelta(seconds=5))
    assert why(retried).figures.items() >= shown.items()
    for other in (
        dataclasses.replace(retried, attempt=0),
        dataclasses.replace(facts, state=State.SUCCEEDED),
    ):
        assert "log" not in why(other).figures


def test_a_rate_is_the_reason_only_if_it_limits():
    """S8: the task waits for workers, not for the rate, while a second of starts is on the ready
    topic."""
    rated = dataclasses.replace(READY, starts_per_s=3.0, ahead=Ahead(5))
    assert why(dataclasses.replace(rated, group=GroupLag(2, 2))).reason is WaitReason.LIMIT_STARTS
    assert why(dataclasses.replace(rated, group=None)).reason is WaitReason.LIMIT_STARTS
    assert why(dataclasses.replace(rated, group=GroupLag(2, 3))).reason is WaitReason.AHEAD
    full = why(dataclasses.replace(rated, group=GroupLag(2, 3), ahead=Ahead(0)))
    assert (full.reason, "some of the 3 records" in full.sentence) == (WaitReason.NEXT, True)


@given(st.integers(1, 10_000), st.booleans(), st.booleans())
def test_the_count_of_tasks_ahead_has_its_precision(tasks, more, about):
    """S8: the sentence has N, "more than N" if the count is capped, or "about N" with fair
    queueing."""
    answer = why(dataclasses.replace(READY, ahead=Ahead(tasks, more, about)))
    assert answer.reason is WaitReason.AHEAD
    assert answer.sentence.startswith("more than" if more else "about" if about else f"{tasks:,} task")
    assert (answer.figures["ahead"], answer.figures.get("ahead_more"), answer.figures.get("ahead_about")) == (
        tasks,
        more or None,
        about or None,
    )


READERS = st.none() | st.builds(GroupLag, st.none() | st.integers(0, 3), st.integers(0, 9))


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
        group=READERS,
    )
)
def test_any_facts_have_one_answer(facts):
    """S8: any facts give a complete sentence and complete values."""
    answer = why(facts)
    assert answer.sentence
    assert None not in answer.figures.values()
    assert answer.figures["since"] == SINCE
