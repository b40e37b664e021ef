"""Locked tasks are left out for a while, and tried again."""

import pytest

from penstock.core.locked_tasks import FIRST_RETRY_S, MAX_RETRY_S, MAX_TASKS, LockedTasks


def test_locked_tasks_are_tried_again_soon():
    """S12: a task that was found locked is left out until the next attempt."""
    locked = LockedTasks()
    locked.add([1, 2], 10.0)
    locked.add([3], 10.01)
    assert set(locked.excluded(10.04)) == {1, 2, 3}
    assert locked.wait_s(10.0) == pytest.approx(FIRST_RETRY_S)
    assert not locked.excluded(10.001 + FIRST_RETRY_S)
    assert locked.wait_s(10.1) is None


def test_attempts_become_rarer_while_locks_last():
    """S12: a lock that lasts costs an attempt every half a second; a new one is tried again
    soon."""
    locked, now_s, waits = LockedTasks(), 0.0, []
    for _ in range(6):
        locked.excluded(now_s)
        locked.add([1], now_s)
        waits.append(locked.wait_s(now_s))
        now_s += waits[-1] + 0.001
    assert waits == pytest.approx([0.05, 0.1, 0.2, 0.4, MAX_RETRY_S, MAX_RETRY_S])
    locked.excluded(now_s)
    locked.add([], now_s)
    locked.add([1], now_s)
    assert locked.wait_s(now_s) == pytest.approx(FIRST_RETRY_S)


def test_the_number_of_tasks_is_bounded():
    """S12: a type with very many locked tasks waits for the next attempt."""
    locked = LockedTasks()
    locked.add(range(MAX_TASKS - 1), 0.0)
    assert not locked.full
    locked.add([MAX_TASKS], 0.0)
    assert locked.full
