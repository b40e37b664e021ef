"""Topics of the live stream: their names, and the changes that a stream has not sent. Pure.

A stream says that something has changed, not how. So a topic that changes often waits once, and a
slow reader costs no more memory than the names of its topics.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# Seconds between two looks at each topic.
INTERVALS_S: Mapping[str, float] = {
    "task": 0.25,
    "flow": 0.25,
    "overview": 1.0,
    "types": 1.0,
    "tasks": 1.0,
    "flows": 1.0,
    "operations": 1.0,
    "targets": 2.0,
    "workers": 5.0,
    "schedules": 10.0,
    "keys": 10.0,
}
MOST_TOPICS = 100
_ID = re.compile(r"(task|flow):([1-9][0-9]{0,18})")
_MAX_ID = 2**63 - 1


def parse_topics(text: str) -> frozenset[str]:
    """The topics of a request.

    Args:
        text: their names with commas between them.

    Raises:
        ValueError: a name is unknown, or there are too many or none.
    """
    topics = frozenset(name for name in text.split(",") if name)
    for topic in topics:
        if not is_topic(topic):
            plain = ", ".join(name for name in INTERVALS_S if name not in ("task", "flow"))
            raise ValueError(f"{topic[:50]!r} is no topic: use {plain}, task:ID or flow:ID")
    if not 0 < len(topics) <= MOST_TOPICS:
        raise ValueError(f"name 1 to {MOST_TOPICS} topics, with commas between them")
    return topics


def is_topic(topic: str) -> bool:
    """Whether a name is that of a topic."""
    found = _ID.fullmatch(topic)
    return int(found[2]) <= _MAX_ID if found else topic in INTERVALS_S and topic not in ("task", "flow")


def ids_of(kind: str, topics: Iterable[str]) -> list[int]:
    """The ids of the topics of one kind, `task` or `flow`, in order."""
    return sorted(int(topic.partition(":")[2]) for topic in topics if topic.startswith(f"{kind}:"))


def interval_s(topic: str) -> float:
    """Seconds between two looks at a topic."""
    return INTERVALS_S[topic.partition(":")[0]]


class Pending:
    """The changes that a stream has not sent: each topic once, in the order of the first ones."""

    def __init__(self) -> None:
        self._topics: dict[str, None] = {}
        self._resync = False

    def __bool__(self) -> bool:
        return self._resync or bool(self._topics)

    def add(self, topics: Iterable[str]) -> None:
        """Adds topics that have changed."""
        if not self._resync:
            self._topics.update(dict.fromkeys(topics))

    def resync(self) -> None:
        """Everything may have changed."""
        self._resync = True
        self._topics.clear()

    def take(self) -> list[str] | None:
        """The topics to send now; None for all of them."""
        topics = None if self._resync else list(self._topics)
        self._topics.clear()
        self._resync = False
        return topics
