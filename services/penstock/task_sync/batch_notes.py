"""The notes of released batches, from Kafka's confirmation to their deletion.

The statement that releases a batch writes its note. A note that a crash leaves makes the type's
next owner send the batch again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf

from penstock.contracts.task_type import TaskType
from penstock.postgres import release
from penstock.postgres.release import Batch
from penstock.postgres.session import Session

log = logging.getLogger(__name__)

# The next release deletes the notes of confirmed batches; without one, a statement of its own
# deletes them after this time.
DELETE_S = 0.5


class BatchNotes:
    """The notes of the batches that this process released.

    Args:
        session: the owner of the types.
        wake: called when a batch is confirmed after none was.

    Attributes:
        delete_at_s: when `delete` is due, on the loop's clock; infinity without a confirmed batch.
    """

    def __init__(self, session: Session, wake: Callable[[], None]) -> None:
        self._session = session
        self._wake = wake
        self._confirmed: list[int] = []
        self.delete_at_s = inf

    def confirm(self, release_id: int) -> None:
        """Kafka has all records of the batch."""
        if not self._confirmed:
            self.delete_at_s = asyncio.get_running_loop().time() + DELETE_S
            self._wake()
        self._confirmed.append(release_id)

    def take_confirmed(self) -> list[int]:
        """The batches that Kafka has; the caller deletes their notes."""
        taken, self._confirmed, self.delete_at_s = self._confirmed, [], inf
        return taken

    async def delete(self) -> None:
        """Deletes the notes of batches that Kafka has."""
        if confirmed := self.take_confirmed():
            await release.delete_notes(self._session, confirmed)

    async def unconfirmed(self, task_type: TaskType) -> list[Batch]:
        """The batches of a type that its last owner may not have written to Kafka."""
        # Batches of this process that Kafka has are not sent again.
        await self.delete()
        batches = await release.unconfirmed(self._session, task_type)
        for batch in batches:
            log.info(
                "Sending an unconfirmed batch again",
                extra={"event": "batch_resent", "task_type": task_type.name, "tasks": len(batch.tasks)},
            )
        return batches
