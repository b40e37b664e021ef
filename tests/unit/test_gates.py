"""What a gate lets wait on its ready topic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError
from aiokafka.structs import OffsetAndMetadata
from hypothesis import given
from hypothesis import strategies as st

from penstock import metrics
from penstock.core.window import Window, WindowPolicy
from penstock.errors import KafkaUnavailable
from penstock.postgres import release
from penstock.postgres.types import TaskType
from penstock.task_sync.figures import samples
from penstock.task_sync.gates import Gate, Looking


def test_limits_and_pauses_are_metrics() -> None:
    """S5: what a type may have is told beside what it has; a limit that it has not is not told."""

    def told(task_type: TaskType) -> dict[tuple[str, ...], float]:
        gate = Gate(task_type, "ready.t", Window(WindowPolicy(100, 1_000)))
        found = samples(cast(Any, SimpleNamespace(gates=lambda: [gate])))
        return {one.labels: one.value for one in found if one.metric in (metrics.LIMIT, metrics.PAUSED)}

    assert told(TaskType(name="t")) == {("t",): 0}
    limited = TaskType(name="t", max_in_flight=5, starts_per_s=2.5, max_per_key=1, paused=True)
    assert told(limited) == {
        ("t",): 1,
        ("t", "in_flight"): 5,
        ("t", "starts_per_s"): 2.5,
        ("t", "per_key"): 1,
    }


async def test_a_rate_caps_the_window_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2, S5: of a type with a rate no more than a second's starts may wait, its metrics tell that, and the little that is
    left of them is no hunger; a rate above the window changes nothing."""

    async def nothing(*_arguments: Any) -> set[Any]:
        return set()

    monkeypatch.setattr(Looking, "look", nothing)
    monkeypatch.setattr(release, "under_way", nothing)
    looking = Looking(cast(Any, None), cast(Any, None), cast(Any, None))
    gate = Gate(TaskType(name="t", starts_per_s=19.5), "ready.t", Window(WindowPolicy(100, 1_000)), written=1)

    def told() -> tuple[float, str]:
        found = samples(cast(Any, SimpleNamespace(gates=lambda: [gate])))
        return next((one.value, one.labels[1]) for one in found if one.metric is metrics.WINDOW_SIZE)

    await looking.look_at_full([gate])
    assert told() == (20, "rate") == gate.sized()
    gate.type = TaskType(name="t", starts_per_s=200)
    assert told() == (100, "floor") == gate.sized(), "nobody was hungry"
    await looking.look_at_full([gate])
    assert told() == (200, "hunger")


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(1, 100))
def test_a_full_window_is_filled_again_once_half_of_it_is_taken(takes: list[int], size: int) -> None:
    """S2, S6: the window is never more than full; what workers take from a full one is made up for in one batch of at least
    half of it, and never while more than half waits, so many are released at once however few are taken at a time."""
    gate = Gate(TaskType(name="t"), "ready.t", Window(WindowPolicy(size, size)))
    gate.written += gate.room()
    assert (gate.lag, gate.room()) == (size, 0)
    for take in takes:
        gate.taken += min(take, gate.lag)
        room = gate.room()
        assert room == (size - gate.lag if gate.lag * 2 <= size else 0)
        gate.written += room
        assert not room or gate.room() == 0


def test_a_window_that_was_not_full_takes_what_there_is() -> None:
    """S1: a task waits for no others: as long as there is room it is released at once."""
    gate = Gate(TaskType(name="t"), "ready.t", Window(WindowPolicy(10, 10)))
    for waiting in range(10):
        assert gate.room() == 10 - waiting
        gate.written += 1
    assert gate.room() == 0
    gate.taken += 4
    assert gate.room() == 0
    gate.taken += 1
    assert gate.room() == 5


class Groups:
    """The part of an admin client that reads a group's offsets: one broker keeps them, the others say nothing."""

    def __init__(self) -> None:
        self.coordinator = 1
        self.away: set[int] = set()
        self.searches = 0

    async def find_coordinator(self, _group: str) -> int:
        """Whoever keeps them now."""
        self.searches += 1
        return self.coordinator

    async def list_consumer_group_offsets(
        self, _group: str, broker: int
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """As aiokafka answers: nothing for "not coordinator", an error for a broker that is away."""
        if broker in self.away:
            raise KafkaConnectionError
        return {TopicPartition("ready.t", 0): OffsetAndMetadata(7, "")} if broker == self.coordinator else {}


async def test_a_groups_coordinator_is_asked_for_once_and_again_when_it_has_moved() -> None:
    """S6: looking at what workers have taken is one request; a broker that keeps the offsets no more, or is away, is noticed
    and never taken for workers who took nothing."""
    groups = Groups()
    settings = SimpleNamespace(prefix="", lag_poll_s=0.05)
    looking = Looking(cast(Any, settings), cast(Any, None), cast(Any, groups))

    async def taken() -> int:
        gate = Gate(TaskType(name="t"), "ready.t", Window(WindowPolicy(100, 1_000)))
        await looking.look(gate)
        return gate.taken

    assert [await taken(), await taken(), groups.searches] == [7, 7, 1]
    groups.coordinator = 2
    assert [await taken(), await taken(), groups.searches] == [7, 7, 2]
    groups.away, groups.coordinator = {2}, 1
    assert [await taken(), await taken(), groups.searches] == [7, 7, 3]
    groups.away = {1}
    with pytest.raises(KafkaUnavailable):
        await taken()
