"""What runs before the first handler and after the last one."""

import asyncio
import logging
import sys

import pytest

from penstock.errors import CannotStart
from penstock.worker.lifecycle import Lifecycle


@pytest.fixture
def order():
    return []


def hooks(order, *names):
    """A lifecycle whose functions note their names; the second kind is async."""
    found = Lifecycle()
    for name in names:

        async def stop(name=name):
            order.append(f"stop {name}")

        found.starts.append(lambda name=name: order.append(f"start {name}"))
        found.stops.append(stop)
    return found


async def test_connections_open_in_order_and_close_in_reverse(order):
    """W1: each connection may need those that were opened before it."""
    async with hooks(order, "a", "b").running():
        order.append("work")
    assert order == ["start a", "start b", "work", "stop b", "stop a"]


async def test_a_start_that_fails_ends_the_worker_before_any_task(order):
    """Fails closed, and closes what was opened."""
    found = hooks(order, "a")
    found.starts.append(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        async with found.running():
            order.append("work")
    assert order == ["start a", "stop a"]
    found.starts[-1] = lambda: sys.exit(0)
    with pytest.raises(CannotStart, match=r"SystemExit\(0\)"):
        async with found.running():
            order.append("work")
    assert order == ["start a", "stop a"] * 2


async def test_a_stop_that_fails_or_hangs_delays_no_other_for_long(order, caplog):
    """The worker has a limited time to end."""
    found = hooks(order, "a")
    found.stops += [lambda: 1 / 0, lambda: sys.exit(0)]
    with caplog.at_level(logging.ERROR):
        async with found.running():
            pass
    assert order == ["start a", "stop a"]
    unresponsive = Lifecycle(stop_s=0.05)
    unresponsive.stops.append(asyncio.Event().wait)
    async with unresponsive.running():
        pass
    assert [record.event for record in caplog.records] == ["on_stop_failed"] * 3
