"""The window of a ready topic, and the polls of its lag."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError
from aiokafka.structs import OffsetAndMetadata
from hypothesis import given
from hypothesis import strategies as st
from tests.support.waiting import wait_until

from penstock import metrics
from penstock.core.window import Window, WindowPolicy
from penstock.errors import KafkaUnavailable
from penstock.postgres import release
from penstock.postgres.types import TaskType
from penstock.task_sync.lag_poller import LagPoller
from penstock.task_sync.metrics import release_samples
from penstock.task_sync.ready_topics import ReadyTopic


def test_limits_and_pauses_are_metrics() -> None:
    """S5: each limit of a type is a metric; a limit that is not set is left out."""

    def samples(task_type: TaskType) -> dict[tuple[str, ...], float]:
        topic = ReadyTopic(task_type, "ready.t", Window(WindowPolicy(100, 1_000)))
        found = release_samples(cast(Any, SimpleNamespace(ready_topics=lambda: [topic], held=dict)))
        return {one.labels: one.value for one in found if one.metric in (metrics.LIMIT, metrics.PAUSED)}

    assert samples(TaskType(name="t")) == {("t",): 0}
    limited = TaskType(name="t", max_in_flight=5, starts_per_s=2.5, max_per_key=1, paused=True)
    assert samples(limited) == {
        ("t",): 1,
        ("t", "in_flight"): 5,
        ("t", "starts_per_s"): 2.5,
        ("t", "per_key"): 1,
    }


async def test_a_rate_caps_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2, S5: with a rate, the window has at most a second of starts, which the metrics show. A
    small rest does not count as starved. A rate above the window has no effect."""

    async def nothing(*_arguments: Any) -> set[Any]:
        return set()

    async def take_almost_all(_poller: LagPoller, topic: ReadyTopic) -> None:
        topic.partitions.take({0: topic.partitions.written - 1}, 0.0)

    monkeypatch.setattr(LagPoller, "poll", take_almost_all)
    monkeypatch.setattr(release, "in_flight", nothing)
    poller = LagPoller(cast(Any, None), cast(Any, None), cast(Any, None))
    topic = ReadyTopic(TaskType(name="t", starts_per_s=19.5), "ready.t", Window(WindowPolicy(100, 1_000)))

    async def polled() -> None:
        topic.partitions.add(0, topic.room(), 0.0)
        poller.begin(topic)
        await wait_until(lambda: "t" not in poller)

    def samples() -> tuple[float, str]:
        found = release_samples(cast(Any, SimpleNamespace(ready_topics=lambda: [topic], held=dict)))
        return next((one.value, one.labels[1]) for one in found if one.metric is metrics.WINDOW_SIZE)

    await polled()
    assert samples() == (20, "rate") == topic.size_and_reason()
    topic.type = TaskType(name="t", starts_per_s=200)
    assert samples() == (100, "floor") == topic.size_and_reason(), "the window was not starved"
    await polled()
    assert samples() == (200, "hunger")


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(1, 100))
def test_a_full_window_is_refilled_when_half_empty(takes: list[int], size: int) -> None:
    """S2, S6: the window never exceeds its size. A full window is refilled in one batch once at
    most half of it is left, so that batches are large also if workers take few records at a
    time."""
    topic = ReadyTopic(TaskType(name="t"), "ready.t", Window(WindowPolicy(size, size)))
    topic.partitions.add(0, topic.room(), 0.0)
    assert (topic.lag, topic.room()) == (size, 0)
    for take in takes:
        topic.partitions.take({0: topic.partitions.taken + min(take, topic.lag)}, 0.0)
        room = topic.room()
        assert room == (size - topic.lag if topic.lag * 2 <= size else 0)
        topic.partitions.add(0, room, 0.0)
        assert not room or topic.room() == 0


def test_a_window_with_room_takes_single_tasks() -> None:
    """S1: a task is released at once while the window has room, without waiting for a batch."""
    topic = ReadyTopic(TaskType(name="t"), "ready.t", Window(WindowPolicy(10, 10)))
    for waiting in range(10):
        assert topic.room() == 10 - waiting
        topic.partitions.add(0, 1, 0.0)
    assert topic.room() == 0
    topic.partitions.take({0: 4}, 0.0)
    assert topic.room() == 0
    topic.partitions.take({0: 5}, 0.0)
    assert topic.room() == 5


class Groups:
    """The part of an admin client that reads the offsets of a group from its coordinator."""

    def __init__(self) -> None:
        self.coordinator = 1
        self.unavailable: set[int] = set()
        self.searches = 0

    async def find_coordinator(self, _group: str) -> int:
        """Returns the current coordinator."""
        self.searches += 1
        return self.coordinator

    async def list_consumer_group_offsets(
        self, _group: str, broker: int
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Like aiokafka: no offsets for "not coordinator", an error for an unavailable broker."""
        if broker in self.unavailable:
            raise KafkaConnectionError
        return {TopicPartition("ready.t", 0): OffsetAndMetadata(7, "")} if broker == self.coordinator else {}


async def test_the_coordinator_is_looked_up_again_after_it_moved() -> None:
    """S6: a poll is one request. A former or unavailable coordinator is detected and does not look
    like workers without progress."""
    groups = Groups()
    settings = SimpleNamespace(prefix="", lag_poll_s=0.05)
    poller = LagPoller(cast(Any, settings), cast(Any, None), cast(Any, groups))

    async def taken() -> int:
        topic = ReadyTopic(TaskType(name="t"), "ready.t", Window(WindowPolicy(100, 1_000)))
        await poller.poll(topic)
        return topic.partitions.taken

    assert [await taken(), await taken(), groups.searches] == [7, 7, 1]
    groups.coordinator = 2
    assert [await taken(), await taken(), groups.searches] == [7, 7, 2]
    groups.unavailable, groups.coordinator = {2}, 1
    assert [await taken(), await taken(), groups.searches] == [7, 7, 3]
    groups.unavailable = {1}
    with pytest.raises(KafkaUnavailable):
        await taken()
