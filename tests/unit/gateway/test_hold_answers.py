"""Answers to requests for tasks, which are kept until their workers have them."""

from __future__ import annotations

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.gateway.hold_answers import HoldAnswers, repeatable
from penstock.gateway.hold_requests import ClaimedTasks


def task(number: int, lease_ms: int = 60_000) -> ReadyTask:
    return ReadyTask(Fence(number, 0, "s", 0), "t", Context.encode(None), lease_ms)


def claimed(*numbers: int) -> ClaimedTasks:
    return ClaimedTasks([task(number) for number in numbers], 100.0)


def test_only_the_same_worker_type_and_key_get_an_answer_again():
    """T6: a request with another key shows that the worker has the answer."""
    answers = HoldAnswers()
    tasks = claimed(1)
    for other in (("w2", "t", "a"), ("w", "u", "a"), ("w", "t", "b"), ("w", "t", None)):
        answer, lost = answers.asked("w", "t", "a")
        assert lost is None
        answers.keep(answer, tasks, 10)
        assert answers.asked(*other)[1] is None
        expected = None if other[:2] == ("w", "t") else tasks
        assert answers.asked("w", "t", "a")[1] is expected
        answers.asked("w", "t", "end")


def test_a_request_that_was_repeated_meanwhile_delivers_nothing():
    """T6: its connection is gone, though the gateway does not know it yet. Its tasks are returned
    once: by it, or by the repetition that took them."""
    answers = HoldAnswers()
    first, _ = answers.asked("w", "t", "a")
    second, lost = answers.asked("w", "t", "a")
    assert (lost, first.asked_again, second.asked_again) == (None, True, False)
    answers.keep(second, claimed(1), 10)
    assert answers.asked("w", "t", "a")[1] == claimed(1)
    assert second.take() is None


def test_a_request_without_a_key_is_never_repeated():
    """T6: such a worker gets its tasks back by their leases."""
    answers = HoldAnswers()
    answer, _ = answers.asked("w", "t", None)
    answers.keep(answer, claimed(1), 10)
    assert answers.asked("w", "t", None)[1] is None
    assert answer.take() == claimed(1)


def test_memory_is_bounded():
    """T6: the oldest answers are dropped; the gateway still returns their tasks when it notices
    that they were lost."""
    answers = HoldAnswers(most=3, most_bytes=100)
    kept = []
    for worker in "abcde":
        answer, _ = answers.asked(worker, "t", "k")
        answers.keep(answer, claimed(1), 40)
        kept.append(answer)
    found = [answers.asked(worker, "t", "k")[1] is not None for worker in "edcba"]
    assert found == [True, True, False, False, False]
    assert kept[0].take() == claimed(1)


def test_a_repetition_has_the_tasks_that_can_still_be_renewed():
    """W6: a task whose lease is half over is returned, and so are those without room."""
    lost = ClaimedTasks([task(1), task(2, 10_000), task(3), task(4)], 100.0)
    again, stale = repeatable(lost, 2, 105.0)
    assert ([each.fence.id for each in again.tasks], again.claimed_s) == ([1, 3], 100.0)
    assert [each.fence.id for each in stale] == [2, 4]
