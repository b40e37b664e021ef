"""The loop of the owner: owns shards of flows, and applies the messages of their flows."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress

import asyncpg

from penstock.contracts.context import Context
from penstock.core.flow.transaction_size import TransactionSize
from penstock.errors import Fatal, LockConflict, PenstockError, Unavailable
from penstock.flow_owner.batch import Batch
from penstock.flow_owner.contents import Contents
from penstock.flow_owner.definitions import Definitions
from penstock.flow_owner.held_families import HeldFamilies
from penstock.flow_owner.metrics import Metrics
from penstock.flow_owner.rounds import apply
from penstock.flow_owner.settings import FlowsSettings
from penstock.flow_owner.shard_work import ShardWork
from penstock.kafka.processing.outbox import Publisher
from penstock.postgres.flow_starts import CHANNEL, match_events, match_runs
from penstock.postgres.flows import SHARDS, FlowsLocked
from penstock.postgres.ownership import Group, Ownership
from penstock.postgres.queries import fetch
from penstock.postgres.session import Session

# The replicas of `flows`, and the shards that they own.
GROUP = Group("penstock.flows", "penstock_flow_replicas", "flows")

# How long a transaction waits for a row that another one locks, such as a task, while the flows of
# other families wait for it.
LOCK_TIMEOUT = "250ms"
# Errors of one family's data; an outage, or a lost session, concerns all.
_FAULTS = (PenstockError, asyncpg.PostgresError, ValueError, TypeError, LookupError, AssertionError)
_ALL = [str(shard) for shard in range(SHARDS)]


class _Postponed(Exception):  # noqa: N818 (ends a transaction without effect)
    """Families need objects or lists that this process does not have, or has not stored."""

    def __init__(self, batch: Batch, missing: dict[int, list[Context]]) -> None:
        super().__init__()
        self.missing = missing
        self.unstored = batch.unstored
        self.uncollected = batch.uncollected


class Owner:
    """Advances the flows of the shards that this replica owns.

    Args:
        settings: of the service.
        session: holds the locks of the owned shards; every transaction goes through it.
        contents: fetches and stores objects.
        publisher: publishes events.

    Attributes:
        metrics: counters since the process began.
        held: families that wait for an object, or that cannot be advanced, by root flow.
    """

    def __init__(
        self, settings: FlowsSettings, session: Session, contents: Contents, publisher: Publisher
    ) -> None:
        self._settings = settings
        self._session = session
        self._contents = contents
        self._publisher = publisher
        self._definitions = Definitions()
        self._wake = asyncio.Event()
        self._ownership = Ownership(session, GROUP, settings.flow_own_retry_s, self._wake.set)
        self._work = ShardWork(session)
        self._families = HeldFamilies(contents, session.fetch, self._wake.set)
        self._steps = 0
        self._size = TransactionSize(settings.flow_batch)
        # Root flows of the last transaction.
        self._touched: set[int] = set()
        self._busy = False
        self.metrics = Metrics()
        self.held = self._families.reasons

    def _on_notified(self, payload: str) -> None:
        if (shard := int(payload)) in self._work.owned:
            self._work.mark([shard])
            self._wake.set()

    @property
    def owned(self) -> int:
        """Number of shards that this replica owns."""
        return len(self._work.owned)

    def progress(self) -> dict[str, Hashable]:
        """Work in progress and its value, for the stall detector; empty at rest."""
        return {"advancing flows": (self._steps, self._session.lock_conflicts)} if self._busy else {}

    async def run(self, stopping: asyncio.Event) -> None:
        """Advances flows until `stopping` is set.

        Raises:
            SessionLost: the locks are lost; another replica may own the shards by now.
            PostgresUnavailable: nothing of the last transaction took effect.
        """
        await self._session.listen(CHANNEL, self._on_notified)
        async with self._ownership.membership(stopping):
            try:
                await self._run_until(stopping)
            finally:
                await self._families.stop()

    async def _run_until(self, stopping: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        sweep_at_s = loop.time()
        while not stopping.is_set():
            self._wake.clear()
            self._session.ensure()
            if self._ownership.due:
                await self._assign()
            if loop.time() >= sweep_at_s:
                await self._sweep()
                sweep_at_s = loop.time() + self._settings.flow_sweep_s
            if resumed := self._families.take_resumed():
                self._work.put_back((root % SHARDS for root in resumed), is_due=True)
            if self._work:
                await self._advance()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(self._ownership.next_s, sweep_at_s, self._work.due_at_s)):
                    await self._wake.wait()

    async def _assign(self) -> None:
        """Acquires free shards and transfers surplus ones."""
        changes = await self._ownership.step(_ALL)
        self._work.owned.difference_update(map(int, changes.surplus))
        await self._ownership.transfer(changes.surplus)
        if acquired := [int(name) for name in changes.acquired]:
            self._work.owned.update(acquired)
            await self._work.find(acquired)

    async def _sweep(self) -> None:
        """Finds what a lost notification, or the crash of another process, left."""
        if self._work.owned:
            await self._work.find(self._work.owned)
            await _match(self._session)

    async def _advance(self) -> None:
        """One transaction over the shards with messages."""
        shards, is_due = self._work.take()
        self._busy, self._steps = True, self._steps + 1
        try:
            await self._transact(shards, is_due=is_due)
        except (LockConflict, FlowsLocked, _Postponed) as reason:
            self._work.put_back(shards, is_due=is_due)
            if isinstance(reason, _Postponed):
                self._families.hold_postponed(reason.missing, reason.unstored, reason.uncollected)
            elif isinstance(reason, FlowsLocked):
                self._families.hold_locked(reason.roots)
            else:
                await self._apply_singly(shards)
        except (Unavailable, Fatal):
            raise
        except _FAULTS as error:
            # Fails closed: one family cannot be advanced. It is found, and held; all others go on.
            self._work.put_back(shards, is_due=is_due)
            await self._find_faulty(shards, error)
        finally:
            self._busy = False

    async def _transact(self, shards: Sequence[int], *, is_due: bool, limit: int = 0) -> set[int]:
        """Applies rows of the inbox and limits; returns the root flows that were touched."""
        began_s = time.perf_counter()
        self._touched = set()
        if self._families.narrow:
            limit = 1
        most, each = limit or self._size.rows, limit or self._size.rows_of_each(len(shards))
        owned, held = sorted(self._work.owned), list(self.held)
        each_due = limit or max(1, self._size.rows // max(1, len(owned)))
        async with self._session.connection() as connection, connection.transaction():
            wanted = {"shards": shards, "each": each, "held": held, "most": most}
            inbox = await fetch(connection, "flows.take", **wanted) if shards else []
            due = await fetch(connection, "flows.due", owned, each_due, held) if is_due else []
            roots = self._touched = {row["root_id"] for row in (*inbox, *due)}
            source = self._settings.event_source
            batch = Batch(connection, self._definitions, self._contents, source, self._size.decisions)
            missing = await apply(batch, inbox, due)
            if missing or batch.unstored:
                raise _Postponed(batch, missing)
        took_s = time.perf_counter() - began_s
        self._families.advanced(roots)
        if not limit:
            self._size.adapt(max(len(inbox) + len(due), batch.work), took_s)
        self._work.note_rest(shards, Counter(row["shard"] for row in inbox), each, most)
        await self._follow(batch, is_due=is_due)
        self.metrics.advanced(len(inbox) + len(due), took_s)
        return roots

    async def _follow(self, batch: Batch, *, is_due: bool) -> None:
        """Publishes, and notes the work that follows from a commit."""
        for entry in batch.outbox:
            self._publisher.enqueue(entry)
        self._work.mark(batch.noted & self._work.owned)
        if batch.first_limit is not None and batch.now is not None:
            self._work.note_limit((batch.first_limit - batch.now).total_seconds())
        if is_due:
            await self._work.find_limit()
        await _match(self._session, sorted(batch.waiting), sorted(batch.waiting_runs | batch.ended_runs))

    async def _find_faulty(self, shards: Sequence[int], error: Exception) -> None:
        """Applies one row at a time, until it finds the family that cannot be advanced.

        Raises:
            Exception: the statement that reads the rows fails, so no family is at fault.
        """
        if len(self._touched) > 1:
            found = await self._apply_singly(shards)
            if found is None:
                return
            error = found
        if not self._touched:
            # No family is at fault: the statement is. A repetition would fail again, without end.
            raise error
        self._families.hold_faulty(self._touched, error)

    async def _apply_singly(self, shards: Sequence[int]) -> Exception | None:
        """Returns the first fault; `_touched` has its family. None when all rows were applied."""
        touched = {root % SHARDS for root in self._touched}
        shards = [shard for shard in shards if shard in touched] or shards
        rounds = [*(([shard], False) for shard in shards), ([], True)]
        while rounds:
            one, is_due = rounds[0]
            try:
                if not await self._transact(one, is_due=is_due, limit=1):
                    rounds.pop(0)
            except _Postponed as reason:
                # The family is held until its objects are here, so that the next row is another's.
                self._families.hold_postponed(reason.missing, reason.unstored, reason.uncollected)
            except FlowsLocked as locked:
                self._families.hold_locked(locked.roots)
            except LockConflict:
                # A row of another kind, such as a task.
                self._families.hold_locked(self._touched)
                if not self._touched:
                    return None
            except (Unavailable, Fatal):
                raise
            except _FAULTS as fault:
                return fault
        return None


async def _match(
    session: Session, waiting: Sequence[int] | None = None, runs: Sequence[int] | None = None
) -> None:
    """Ends waits for events and runs that are there; of these flows only, and None is all."""
    async with session.connection() as connection:
        if waiting != []:
            await match_events(connection, flow_ids=waiting)
        if runs != []:
            await match_runs(connection, runs)
