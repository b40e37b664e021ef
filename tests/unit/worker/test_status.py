"""The status of a worker."""

import penstock
from penstock.contracts.context import Context
from penstock.contracts.ready import ReadyTask
from penstock.core.completion import Fence
from penstock.worker import Done, Worker, WorkerSettings
from penstock.worker.in_flight import InFlight
from penstock.worker.status import MOST_ATTEMPTS, status_of


def test_a_worker_says_what_it_has_in_flight():
    """H5: by type, with the attempts that it has had for longest, and its room."""
    worker = Worker(WorkerSettings(kafka="localhost:1", objects="memory:///", pool=200))
    for name in ("t.b", "t.a", "u.a"):

        @worker.stage(name)
        async def handler(task):
            return Done()

    in_flight = InFlight(200)
    in_flight.add(
        ReadyTask(Fence(number, 0, "a", 0), "t" if number % 2 else "u", Context.encode(None), 1_000)
        for number in range(1, 151)
    )
    status = status_of(worker.registered, "w", in_flight, stopped=False)
    assert {name: (of_type.stages, of_type.in_flight) for name, of_type in status.types.items()} == {
        "t": (["a", "b"], 75),
        "u": (["a"], 75),
    }
    named = [each.task_id for of_type in status.types.values() for each in of_type.attempts]
    assert sorted(named) == list(range(1, MOST_ATTEMPTS + 1))
    assert (status.slots, status.room, status.version) == (200, 50, penstock.__version__)
    in_flight.block(blocked=True)
    assert status_of(worker.registered, "w", in_flight, stopped=True).room == 0
