"""The first stage: decodes records, and finds the target of each callback.

receive (`receiver`) → look up the target (`target_cache`, `target_store`) → `turn`. Namespaces take
turns while their targets are loaded. When the service stops, callbacks return to PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.callbacks.receiver import InFlight, Receiver
from penstock.callbacks.recorder import Recorder
from penstock.callbacks.router import Deferral
from penstock.callbacks.target_cache import TargetCache
from penstock.callbacks.target_store import TargetStore
from penstock.callbacks.turn import Turn
from penstock.concurrency.batcher import Batcher
from penstock.core.target import TargetId
from penstock.kafka.processing.processor import Delivery

# Targets that one statement loads: new ones of one namespace delay those of another by it.
MOST_LOADED = 250


class Intake:
    """Takes records in.

    Args:
        cache: the targets in memory.
        receiver: decodes records, and keeps callbacks whose target is not in memory.
        targets: loads targets.
        turn: the next stage.
        recorder: the last stage, for callbacks that arrive while the service stops.
    """

    def __init__(
        self,
        cache: TargetCache,
        receiver: Receiver,
        targets: TargetStore,
        turn: Turn,
        recorder: Recorder,
    ) -> None:
        self._cache = cache
        self._receiver = receiver
        self._targets = targets
        self._turn = turn
        self._recorder = recorder
        self._loads = Batcher(self._load, max_size=MOST_LOADED, turn_of=lambda load: load[0].namespace)

    async def receive(self, delivery: Delivery) -> int:
        """Takes a record in; returns how many callbacks it has.

        It is settled once PostgreSQL has each of its callbacks as claimed, held or postponed.

        Raises:
            InvalidRecord: the record as a whole breaks its contract.
            KafkaUnavailable: an invalid part was not rejected, and nothing was received.
        """
        received = await self._receiver.receive(delivery)
        if self._receiver.closed:
            self._return(received)
            return len(received)
        for in_flight in received:
            target_id = in_flight.callback.target
            if (target := self._cache.get(target_id)) is not None:
                self._turn.queue(in_flight, target)
            elif self._receiver.wait_for_target(in_flight):
                self._loads.add((target_id, in_flight.record.partition))
        self._turn.admit()
        return len(received)

    async def run(self) -> None:
        """Loads targets until cancelled.

        Raises:
            Exception: any error but those of unavailable servers.
        """
        await self._loads.run()

    def close(self) -> None:
        """Returns the callbacks that wait for their targets, and all that arrive from now on."""
        self._return(self._receiver.close())

    def _return(self, callbacks: Sequence[InFlight]) -> None:
        self._recorder.defer(Deferral(in_flight, 0.0) for in_flight in callbacks)

    async def _load(self, batch: Sequence[tuple[TargetId, int]]) -> None:
        await self._targets.load(dict(batch))
        for in_flight, target in self._receiver.resolve(target_id for target_id, _partition in batch):
            self._turn.queue(in_flight, target)
        self._turn.admit()
