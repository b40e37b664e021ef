"""What a worker has in hand, and the signs of life it gives of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.ready import ReadyTask
from penstock.core.leases import Key
from penstock.worker.link import Link

# Beats go out in batches this often; a lease is beaten at a third of its timeout.
BEAT_EVERY_S = 1.0
BEATS_A_LEASE = 3


def key_of(ready: ReadyTask) -> Key:
    """(task id, step, attempt)."""
    fence = ready.fence
    return (fence.id, fence.step, fence.attempt)


@dataclass(slots=True)
class Held:
    """A claimed attempt.

    Attributes:
        ready: what was claimed.
        heard_s: when a sign of life was last sent, on the loop's clock.
    """

    ready: ReadyTask
    heard_s: float


class Hand:
    """Every claimed attempt whose result is not on Kafka yet.

    Args:
        room: most attempts in hand.
    """

    def __init__(self, room: int) -> None:
        self._most = room
        self._held: dict[Key, Held] = {}
        self._freed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
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

    def take(self, ready: ReadyTask, now_s: float) -> None:
        """An attempt was claimed."""
        self._held[key_of(ready)] = Held(ready, now_s)

    def let_go(self, keys: list[Key]) -> None:
        """Results of these are on Kafka."""
        for key in keys:
            self._held.pop(key, None)
        self._freed.set()

    def due(self, now_s: float) -> dict[int, list[Key]]:
        """What must give a sign of life now, by lease in milliseconds; it counts as given."""
        due: defaultdict[int, list[Key]] = defaultdict(list)
        for key, held in self._held.items():
            lease_ms = held.ready.lease_ms
            if now_s - held.heard_s >= lease_ms / 1000 / BEATS_A_LEASE - BEAT_EVERY_S:
                held.heard_s = now_s
                due[lease_ms].append(key)
        return due


async def beat(hand: Hand, link: Link, worker_id: str) -> None:
    """Gives signs of life until cancelled.

    Raises:
        KafkaUnavailable: never; beats that cannot be sent now are superseded by the next.
    """
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(BEAT_EVERY_S)
        for lease_ms, keys in hand.due(loop.time()).items():
            await link.send_heartbeat(Heartbeat(Kind.BEAT, worker_id, lease_ms, keys))
