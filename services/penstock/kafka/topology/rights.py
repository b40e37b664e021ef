"""The words of Kafka's access lists, and one right on topics or groups.

Read and Write include Describe. An idempotent producer needs only Write on its topics.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.kafka.topology.topics import READY, Topic

TOPIC = "topic"
GROUP = "group"
LITERAL = "literal"
PREFIXED = "prefixed"

READ = "Read"
WRITE = "Write"
CREATE = "Create"
DELETE = "Delete"
DESCRIBE = "Describe"
ALTER = "Alter"
DESCRIBE_CONFIGS = "DescribeConfigs"
ALTER_CONFIGS = "AlterConfigs"


@dataclass(frozen=True, slots=True)
class Right:
    """A service's permission on one topic or group, or on all whose names begin alike.

    Attributes:
        kind: TOPIC or GROUP.
        name: without the deployment's prefix, in full or its beginning.
        pattern: LITERAL or PREFIXED.
        operations: Kafka's own names.
    """

    kind: str
    name: str
    pattern: str
    operations: tuple[str, ...]


def on_topics(*operations: str, of: Iterable[Topic]) -> tuple[Right, ...]:
    """A right for each of these topics."""
    return tuple(Right(TOPIC, topic.name, LITERAL, operations) for topic in of)


def on_group(name: str, *operations: str) -> Right:
    """A right on one consumer group."""
    return Right(GROUP, name, LITERAL, operations)


def on_all(kind: str, begin: str, *operations: str) -> Right:
    """A right on all topics or groups whose names begin with `begin`."""
    return Right(kind, begin, PREFIXED, operations)


def on_ready_topics(*operations: str) -> Right:
    """A right on the ready topics of all types."""
    return on_all(TOPIC, f"{READY}.", *operations)


def on_workers_groups(*operations: str) -> Right:
    """A right on the groups of the workers of all types."""
    return on_all(GROUP, "workers.", *operations)
