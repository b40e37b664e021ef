"""What a worker has in hand, and what its claims say of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.ready import ReadyTask
from penstock.core.leases import Key


def key_of(ready: ReadyTask) -> Key:
    """(task id, step, attempt)."""
    fence = ready.fence
    return (fence.id, fence.step, fence.attempt)


def claims_of(worker_id: str, claimed: Iterable[ReadyTask], limits: Mapping[str, int]) -> list[Heartbeat]:
    """The claims of one poll: a record for each length of lease and limit of tries, which is one record as a rule.

    Args:
        worker_id: who claims.
        claimed: tasks of one type.
        limits: tries, the first included, by stage, where a stage has its own limit.
    """
    alike: defaultdict[tuple[int, int | None], list[Key]] = defaultdict(list)
    for ready in claimed:
        alike[ready.lease_ms, limits.get(ready.fence.stage)].append(key_of(ready))
    return [
        Heartbeat(Kind.CLAIM, worker_id, lease_ms, keys, limit) for (lease_ms, limit), keys in alike.items()
    ]


class Hand:
    """Every claimed attempt whose result is not on Kafka yet.

    Args:
        room: most attempts in hand.
    """

    def __init__(self, room: int) -> None:
        self._most = room
        self._held: set[Key] = set()
        self._freed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    @property
    def room(self) -> int:
        """How many more may be claimed."""
        return self._most - len(self._held)

    async def wait_room(self, timeout_s: float) -> bool:
        """Waits until there is room, at most `timeout_s` seconds; returns whether there is."""
        if self.room <= 0:
            self._freed.clear()
            try:
                await asyncio.wait_for(self._freed.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    def take(self, claimed: Iterable[ReadyTask]) -> None:
        """Attempts were claimed."""
        self._held.update(key_of(ready) for ready in claimed)

    def let_go(self, keys: Iterable[Key]) -> None:
        """Results of these are on Kafka, or nobody wants them any more."""
        self._held.difference_update(keys)
        self._freed.set()
