"""Records as they come: taken apart, and each callback handed on once its target is known here.

Guarantees: what breaks its contract is parked alone. A record is taken in only while its partition is this process's; what
is taken waits here for PostgreSQL at most, never for a target.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from penstock.callbacks.batching import Batches
from penstock.callbacks.hand import Waiting, parts_of
from penstock.callbacks.known import Target
from penstock.callbacks.settings import CallbacksSettings
from penstock.callbacks.targets import Targets
from penstock.contracts.inbound import decode_callbacks
from penstock.core.target import TargetId
from penstock.errors import Invalid
from penstock.kafka.processor import Delivery

# So many callbacks are taken in at once, then the loop has its turn: the calls under way would else be held back by a burst, and
# how long they took, from which it is reckoned what may wait for a target, would be our doing.
AT_ONCE = 50


class Intake:
    """Takes records in.

    Args:
        settings: of the service.
        targets: those of this process.
        reject: parks an entry of a record that breaks its contract.
        route: given each callback with its target.
        taken: told of each record how many callbacks it has.
        loaded: told when targets have become known, and their callbacks were handed on.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        targets: Targets,
        *,
        reject: Callable[[Delivery, Invalid, bytes], Awaitable[None]],
        route: Callable[[Waiting, Target], None],
        taken: Callable[[Delivery, int], None],
        loaded: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._targets = targets
        self._reject = reject
        self._route = route
        self._taken = taken
        self._loaded = loaded
        # What waits until its target is known, by target; how many they are in all; set when they have become fewer.
        self._strangers: dict[TargetId, list[Waiting]] = {}
        self._unknown = 0
        self._eased = asyncio.Event()
        self._load = Batches(self._load_all)
        # Callbacks taken in since the loop had its turn.
        self._taken_in = 0
        self._closed = False

    def waits_for(self, which: TargetId) -> bool:
        """Whether something waits until this target is known."""
        return which in self._strangers

    async def take(self, delivery: Delivery) -> list[Waiting]:
        """Takes a record in, once there is room; returns what is to be put back, since the intake is closed.

        Raises:
            InvalidRecord: it breaks its contract, as a whole.
            KafkaUnavailable: what does so in part is not parked; nothing was taken in.
        """
        callbacks, faults = decode_callbacks(delivery.value)
        for fault, entry in faults:
            await self._reject(delivery, fault, entry)
        if not callbacks:
            delivery.settle()
            return []
        self._taken_in += len(callbacks)
        if self._taken_in >= AT_ONCE:
            self._taken_in = 0
            await asyncio.sleep(0)
        while self._unknown >= self._settings.callback_in_hand and not self._closed:
            self._eased.clear()
            await self._eased.wait()
        if not self._targets.judges(delivery.partition):
            # It went to another process meanwhile, and the record with it.
            return []
        self._taken(delivery, len(callbacks))
        parts = parts_of(delivery, len(callbacks))
        some = [Waiting(callback, part) for callback, part in zip(callbacks, parts, strict=True)]
        if self._closed:
            return some
        for waiting in some:
            self._hand_on(waiting)
        return []

    def revoked(self, partitions: frozenset[int]) -> None:
        """Lets go of what waits of partitions that are another process's now."""
        self._strangers = {
            which: kept
            for which, some in self._strangers.items()
            if (kept := [waiting for waiting in some if waiting.record.partition not in partitions])
        }
        self._count()

    def close(self) -> list[Waiting]:
        """Takes nothing more in; returns what waits."""
        self._closed = True
        left = [waiting for some in self._strangers.values() for waiting in some]
        self._strangers = {}
        self._count()
        return left

    async def run(self) -> None:
        """Makes targets known until cancelled.

        Raises:
            Exception: what no absent server explains.
        """
        await self._load.run()

    def _hand_on(self, waiting: Waiting) -> None:
        which = waiting.callback.target
        if (target := self._targets.get(which)) is not None:
            self._route(waiting, target)
            return
        if which not in self._strangers:
            self._load.add((which, waiting.record.partition))
        self._strangers.setdefault(which, []).append(waiting)
        self._unknown += 1

    async def _load_all(self, batch: Sequence[tuple[TargetId, int]]) -> None:
        await self._targets.load(dict(batch))
        for which, _partition in batch:
            some = self._strangers.pop(which, [])
            target = self._targets.get(which)
            # Without a target its partition has gone to another process, and its records with it.
            if target is not None:
                for waiting in some:
                    self._route(waiting, target)
        self._count()
        self._loaded()

    def _count(self) -> None:
        self._unknown = sum(map(len, self._strangers.values()))
        self._eased.set()
