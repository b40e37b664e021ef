"""The user data by which a member of a type's group of workers describes itself.

Kafka returns user data with the description of a group, so it needs no topic and no table. Other
clients may have none, or anything: unreadable data is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.protocol import (
    ConsumerProtocolMemberAssignment,
    ConsumerProtocolMemberMetadata,
)

# Kafka keeps user data with each generation of the group.
MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class MemberData:
    """A member, as it describes itself.

    Attributes:
        stages: of the type that it has handlers for; None when it does not say.
        slots: handlers that it runs at once; None when it does not say.
        gateway: the gateway that reads for workers over HTTP; None for a worker.
    """

    stages: frozenset[str] | None = None
    slots: int | None = None
    gateway: str | None = None

    @classmethod
    def of_worker(cls, stages: Collection[str], slots: int) -> MemberData:
        """A worker; without its stages when they are too long."""
        data = cls(frozenset(stages), slots)
        return data if len(data.encode()) <= MAX_BYTES else cls(None, slots)

    def encode(self) -> bytes:
        """The user data."""
        stages = None if self.stages is None else sorted(self.stages)
        return orjson.dumps({"stages": stages, "slots": self.slots, "gateway": self.gateway})

    @classmethod
    def decode(cls, raw: bytes | None) -> MemberData:
        """The member of user data."""
        try:
            found = orjson.loads(raw or b"{}")
        except orjson.JSONDecodeError:
            return cls()
        if not isinstance(found, dict):
            return cls()
        stages, slots, gateway = found.get("stages"), found.get("slots"), found.get("gateway")
        named = stages if isinstance(stages, list) and all(isinstance(s, str) for s in stages) else None
        return cls(
            None if named is None else frozenset(named),
            slots if isinstance(slots, int) else None,
            gateway if isinstance(gateway, str) else None,
        )


def assignor(
    data: MemberData | None, on_assignment: Callable[[int | None], None]
) -> type[RoundRobinPartitionAssignor]:
    """The assignor of the client library, which sends user data and counts the members as well.

    It has the same name, so members with and without user data are in one group.

    Args:
        data: of the member; None for none.
        on_assignment: called in each generation, before its first heartbeat, with the number of
            members; None if another member has made the assignment, so that there are several.
    """
    encoded = b"" if data is None else data.encode()
    counted: int | None = None

    class Assignor(RoundRobinPartitionAssignor):  # type: ignore[misc]  # aiokafka has no types
        @classmethod
        def metadata(cls, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
            # A request to join: what an earlier one came to is over.
            nonlocal counted
            counted = None
            return ConsumerProtocolMemberMetadata(cls.version, list(topics), encoded)

        @classmethod
        def assign(
            cls, cluster: Any, members: Mapping[str, ConsumerProtocolMemberMetadata]
        ) -> dict[str, ConsumerProtocolMemberAssignment]:
            nonlocal counted
            counted = len(members)
            assignments: dict[str, ConsumerProtocolMemberAssignment] = super().assign(cluster, members)
            return assignments

        @classmethod
        def on_assignment(cls, assignment: ConsumerProtocolMemberAssignment) -> None:
            nonlocal counted
            super().on_assignment(assignment)
            members, counted = counted, None
            on_assignment(members)

    return Assignor
