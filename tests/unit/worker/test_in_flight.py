"""The room that the pullers of a worker share."""

import asyncio
from contextlib import AsyncExitStack

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.worker.in_flight import InFlight

NEVER_S = 3600


def task(number, type_name="t"):
    return ReadyTask(Fence(number, 0, "s", 0), type_name, Context.encode(None), 60_000)


async def claim(in_flight, type_name, most, numbers):
    """Reserves and claims once; returns the attempts."""
    async with in_flight.reserve(type_name, most, NEVER_S) as reservation:
        claimed = [task(next(numbers), type_name) for _ in range(reservation.size)]
        in_flight.add(claimed, reservation)
    return [ready.fence.attempt_id for ready in claimed]


@given(
    capacity=st.integers(1, 12),
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 6), st.booleans()), max_size=40
    ),
)
@settings(max_examples=200, deadline=None)
def test_the_types_together_never_exceed_the_capacity(capacity, steps):
    """W2: for any order of reservations, claims and ends, what is in flight and reserved fits, and
    no room is lost."""

    async def run():
        in_flight, number, held = InFlight(capacity), 0, []
        async with AsyncExitStack() as stack:
            for type_number, most, used, keeps in steps:
                name = f"t{type_number}"
                before = in_flight.room
                async with AsyncExitStack() as one:
                    reservation = await (stack if keeps else one).enter_async_context(
                        in_flight.reserve(name, most, 0)
                    )
                    assert reservation.size == min(most, max(0, before))
                    claimed = [task(number + n, name) for n in range(min(used, reservation.size))]
                    number += len(claimed)
                    in_flight.add(claimed, reservation)
                    held += [ready.fence.attempt_id for ready in claimed]
                    assert in_flight.room == before - reservation.size - len(claimed)
                if len(held) % 3 == 0:
                    in_flight.remove([held.pop() for _ in range(len(held) // 2)])
                assert len(in_flight) == len(held)
                assert 0 <= in_flight.room <= capacity - len(held)
        assert in_flight.room == capacity - len(held)
        in_flight.remove(held)
        assert in_flight.room == capacity

    asyncio.run(run())


async def test_free_room_goes_to_the_waiting_type_that_has_the_least():
    """W2: a type that fills the worker does not keep the others of the same worker waiting."""
    numbers = iter(range(100))
    in_flight = InFlight(10)
    busy = await claim(in_flight, "busy", 100, numbers)
    assert len(busy) == 10
    waiting = {
        name: asyncio.ensure_future(claim(in_flight, name, 100, numbers)) for name in ("busy", "one", "two")
    }
    await asyncio.sleep(0)
    for name in ("one", "two", "busy"):
        in_flight.remove([busy.pop()])
        await waiting[name]
        assert sum(future.done() for future in waiting.values()) == ("one", "two", "busy").index(name) + 1


async def test_room_is_shared_among_the_types_that_wait():
    """W2: room that becomes free at once is divided among the waiting types."""
    numbers = iter(range(100))
    in_flight = InFlight(9)
    first = await claim(in_flight, "a", 100, numbers)
    waiting = [asyncio.ensure_future(claim(in_flight, name, 100, numbers)) for name in "abc"]
    await asyncio.sleep(0)
    in_flight.remove(first)
    assert sorted(len(claimed) for claimed in await asyncio.gather(*waiting)) == [3, 3, 3]


async def test_a_reservation_that_is_not_used_is_free_again():
    """W2: neither a poll without records, nor one that is cancelled or waits too long, costs
    room."""
    in_flight = InFlight(4)
    async with in_flight.reserve("a", 3, NEVER_S) as reservation:
        assert (reservation.size, in_flight.room) == (3, 1)
        async with in_flight.reserve("b", 3, NEVER_S) as other:
            assert (other.size, in_flight.room) == (1, 0)
            async with in_flight.reserve("c", 1, 0) as refused:
                assert refused.size == 0
            waiting = asyncio.ensure_future(claim(in_flight, "d", 1, iter([1])))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
    assert in_flight.room == 4


async def test_the_room_for_heartbeats_bounds_reservations():
    """H2: a worker claims no more attempts than it can keep alive."""
    in_flight = InFlight(10, lambda: 3)
    async with in_flight.reserve("a", 100, NEVER_S) as reservation:
        assert reservation.size == 3


async def test_a_held_worker_has_no_room():
    """S13, W8: while the worker holds, a puller gets no room. It gets some when the worker goes
    on."""
    in_flight = InFlight(10)
    in_flight.block(blocked=True)
    async with in_flight.reserve("t", 5, 0) as reservation:
        assert reservation.size == 0
    async with asyncio.TaskGroup() as group:

        async def reserve():
            async with in_flight.reserve("t", 5, 60) as reservation:
                return reservation.size

        reserving = group.create_task(reserve())
        await asyncio.sleep(0)
        assert not reserving.done()
        in_flight.block(blocked=False)
    assert reserving.result() == 5
