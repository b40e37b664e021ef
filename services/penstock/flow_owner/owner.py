"""The loop of the owner: owns shards of flows, and applies the messages of their flows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from functools import partial

import asyncpg

from penstock.concurrency.retry import retry_until_available
from penstock.contracts.context import Context
from penstock.errors import Fatal, LockConflict, PenstockError, Unavailable
from penstock.flow_owner.batch import Batch
from penstock.flow_owner.contents import Contents
from penstock.flow_owner.definitions import Definitions
from penstock.flow_owner.metrics import Metrics
from penstock.flow_owner.rounds import apply
from penstock.flow_owner.settings import FlowsSettings
from penstock.kafka.processing.outbox import Publisher
from penstock.postgres import flows
from penstock.postgres.flow_starts import CHANNEL, match_events, match_runs
from penstock.postgres.flows import SHARDS, FlowsLocked
from penstock.postgres.ownership import Group, Ownership, lock, unlock
from penstock.postgres.queries import fetch
from penstock.postgres.session import Session

log = logging.getLogger(__name__)

REPLICAS_CHANNEL = "penstock_flow_replicas"
GROUP = Group("penstock.flows", REPLICAS_CHANNEL, "flows")

# Seconds that a transaction should take: others wait for the flows that it locks, and the ends of
# tasks wait for the next one. The number of rows that the next one takes, and of the decisions that
# it makes, follows from the last.
_TRANSACTION_S = 0.07
_MIN_ROWS = 100
_FIRST_ROWS = 500
# Each shard in a statement gets at least so many rows of its inbox.
_ROWS_PER_SHARD = 32
# Seconds until a family is tried again that cannot be advanced.
_HELD_S = 60.0
# How long a transaction waits for a row that another one locks, such as a task, while the flows of
# other families wait for it.
LOCK_TIMEOUT = "250ms"
# Seconds until a family is tried again whose rows another transaction locks.
_LOCKED_S = 0.5
_LOCKED = "waits for a transaction that locks its rows"
# Errors of one family's data; an outage, or a lost session, concerns all.
_FAULTS = (PenstockError, asyncpg.PostgresError, ValueError, TypeError, LookupError, AssertionError)
_ALL = [str(shard) for shard in range(SHARDS)]


class _Postponed(Exception):  # noqa: N818 (ends a transaction without effect)
    """Families need objects that this process does not have, or has not stored."""

    def __init__(self, batch: Batch, missing: dict[int, list[Context]]) -> None:
        super().__init__()
        self.missing = missing
        self.unstored = batch.unstored


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
        self._ownership = Ownership(session, GROUP, settings.flow_own_retry_s)
        self._owned: set[int] = set()
        # Shards with messages, in the order of their turns.
        self._dirty: dict[int, None] = {}
        self._owners_changed = True
        self._wake = asyncio.Event()
        self._due_at_s = float("inf")
        self._fetching: set[asyncio.Task[None]] = set()
        self._steps = 0
        # Rows that the next transaction takes, and decisions that it makes.
        self._rows = min(_FIRST_ROWS, settings.flow_batch)
        # Root flows of the last transaction.
        self._touched: set[int] = set()
        self._busy = False
        # Families whose rows are applied one at a time, because they need too many objects.
        self._narrow: set[int] = set()
        self.metrics = Metrics()
        self.held: dict[int, str] = {}

    async def listen(self) -> None:
        """Subscribes to the notifications of flows and replicas."""
        await self._session.listen(CHANNEL, self._on_notified)
        await self._session.listen(REPLICAS_CHANNEL, self._on_replicas_changed)

    def _on_notified(self, payload: str) -> None:
        shard = int(payload)
        if shard in self._owned:
            self._dirty[shard] = None
            self._wake.set()

    def _on_replicas_changed(self, _payload: str) -> None:
        self._owners_changed = True
        self._wake.set()

    @property
    def owned(self) -> int:
        """Number of shards that this replica owns."""
        return len(self._owned)

    def progress(self) -> dict[str, Hashable]:
        """Work in progress and its value, for the stall detector; empty at rest."""
        return {"advancing flows": (self._steps, self._session.lock_conflicts)} if self._busy else {}

    async def run(self, stopping: asyncio.Event) -> None:
        """Advances flows until `stopping` is set.

        Raises:
            SessionLost: the locks are lost; another replica may own the shards by now.
            PostgresUnavailable: nothing of the last transaction took effect.
        """
        await self._ownership.join()
        wakers = [asyncio.create_task(self._wake_on(event)) for event in (stopping, self._session.lost)]
        try:
            await self._run_until(stopping)
        finally:
            for task in (*wakers, *self._fetching):
                task.cancel()
            await asyncio.gather(*wakers, *self._fetching, return_exceptions=True)
        await self._ownership.leave()

    async def _run_until(self, stopping: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        assign_at_s = sweep_at_s = loop.time()
        while not stopping.is_set():
            self._wake.clear()
            self._session.ensure()
            if self._owners_changed or loop.time() >= assign_at_s:
                assign_at_s = await self._assign()
            if loop.time() >= sweep_at_s:
                await self._sweep()
                sweep_at_s = loop.time() + self._settings.flow_sweep_s
            if self._dirty or loop.time() >= self._due_at_s:
                await self._advance()
                continue
            until_s = min(assign_at_s, sweep_at_s, self._due_at_s)
            try:
                async with asyncio.timeout_at(until_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _wake_on(self, event: asyncio.Event) -> None:
        await event.wait()
        self._wake.set()

    async def _assign(self) -> float:
        """Acquires free shards and transfers surplus ones; returns when to run again."""
        self._owners_changed = False
        plan = await self._ownership.plan(_ALL)
        for name in plan.transfer:
            self._owned.discard(int(name))
            await unlock(self._session, GROUP, name)
        acquired: list[int] = []
        for name in plan.acquire:
            if len(acquired) == plan.max_acquired:
                break
            if await lock(self._session, GROUP, name):
                acquired.append(int(name))
        if acquired:
            self._owned.update(acquired)
            await self._find_work(acquired)
        if plan.transfer or (acquired and not self._ownership.alone):
            await self._ownership.notify_replicas()
        return self._ownership.next_plan_s

    async def _sweep(self) -> None:
        """Finds what a lost notification, or the crash of another process, left."""
        if self._owned:
            await self._find_work(self._owned)
            await self._match()

    async def _find_work(self, shards: Iterable[int]) -> None:
        self._mark(await flows.shards_with_inbox(self._session, shards))
        due_s = await flows.next_due_s(self._session, self._owned)
        self._due_at_s = (
            float("inf") if due_s is None else asyncio.get_running_loop().time() + max(0.0, due_s)
        )

    async def _match(self) -> None:
        async with self._session.connection() as connection:
            await match_events(connection)
            await match_runs(connection)

    def _mark(self, shards: Iterable[int]) -> None:
        self._dirty.update(dict.fromkeys(shards))

    def _next_shards(self) -> list[int]:
        """Takes the shards of the next transaction, so many that each gets its rows."""
        owned = [shard for shard in self._dirty if shard in self._owned]
        count = max(1, self._rows // _ROWS_PER_SHARD)
        self._dirty = dict.fromkeys(owned[count:])
        return owned[:count]

    async def _advance(self) -> None:
        """One transaction over the shards with messages."""
        loop = asyncio.get_running_loop()
        shards = self._next_shards()
        is_due = loop.time() >= self._due_at_s
        if is_due:
            # Until the next limit is known.
            self._due_at_s = float("inf")
        self._busy, self._steps = True, self._steps + 1
        try:
            await self._transact(shards, is_due=is_due)
        except (LockConflict, FlowsLocked, _Postponed) as reason:
            self._mark(shards)
            if is_due:
                self._due_at_s = loop.time()
            if isinstance(reason, _Postponed):
                self._postpone(reason)
            elif isinstance(reason, FlowsLocked):
                self._hold_locked(reason.roots)
            else:
                await self._apply_singly(shards)
        except (Unavailable, Fatal):
            raise
        except _FAULTS as error:
            # Fails closed: one family cannot be advanced. It is found, and held; all others go on.
            self._mark(shards)
            if is_due:
                self._due_at_s = loop.time()
            await self._find_faulty(shards, error)
        finally:
            self._busy = False

    async def _transact(self, shards: Sequence[int], *, is_due: bool, limit: int = 0) -> set[int]:
        """Applies rows of the inbox and limits; returns the root flows that were touched."""
        began_s = time.perf_counter()
        self._touched = set()
        if self._narrow - self.held.keys():
            limit = 1
        each = limit or max(_ROWS_PER_SHARD, self._rows // max(1, len(shards)))
        each_due = limit or max(1, self._rows // max(1, len(self._owned)))
        held = list(self.held)
        async with self._session.connection() as connection, connection.transaction():
            inbox = await fetch(connection, "flows.take", shards, each, held) if shards else []
            due = []
            if is_due:
                due = await fetch(connection, "flows.due", sorted(self._owned), each_due, held)
            roots = self._touched = {row["root_id"] for row in (*inbox, *due)}
            source = self._settings.event_source
            batch = Batch(connection, self._definitions, self._contents, source, self._rows)
            missing = await apply(batch, inbox, due)
            if missing or batch.unstored:
                raise _Postponed(batch, missing)
        took_s = time.perf_counter() - began_s
        self._contents.unpin(roots)
        self._narrow -= roots
        if max(len(inbox) + len(due), batch.work) > _MIN_ROWS // 2 and not limit:
            rows = int(self._rows * min(2.0, _TRANSACTION_S / took_s))
            self._rows = max(_MIN_ROWS, min(rows, self._settings.flow_batch))
        await self._follow(batch, inbox, each, is_due=is_due)
        self.metrics.advanced(len(inbox) + len(due), took_s)
        return roots

    async def _follow(
        self, batch: Batch, inbox: Sequence[asyncpg.Record], each: int, *, is_due: bool
    ) -> None:
        """Publishes, and notes the work that follows from a commit."""
        for entry in batch.outbox:
            self._publisher.enqueue(entry)
        taken = Counter(row["shard"] for row in inbox)
        self._mark(shard for shard, rows in taken.items() if rows >= each)
        self._mark(batch.noted & self._owned)
        loop = asyncio.get_running_loop()
        if batch.first_limit is not None and batch.now is not None:
            first_s = (batch.first_limit - batch.now).total_seconds()
            self._due_at_s = min(self._due_at_s, loop.time() + max(0.0, first_s))
        if is_due:
            due_s = await flows.next_due_s(self._session, self._owned)
            if due_s is not None:
                self._due_at_s = min(self._due_at_s, loop.time() + max(0.0, due_s))
        runs = batch.waiting_runs | batch.ended_runs
        if batch.waiting or runs:
            async with self._session.connection() as connection:
                if batch.waiting:
                    await match_events(connection, flow_ids=sorted(batch.waiting))
                if runs:
                    await match_runs(connection, sorted(runs))

    def _postpone(self, postponed: _Postponed) -> None:
        for root in {*postponed.missing, *postponed.unstored}:
            contexts = postponed.missing.get(root, [])
            if not self._contents.pin(root, contexts):
                if root in self._narrow:
                    # One row, and its decision needs more than this process keeps.
                    self._contents.refuse(root, contexts)
                else:
                    # Its rows may need little each.
                    self._contents.unpin([root])
                    self._narrow.add(root)
            unstored = list(postponed.unstored.get(root, {}).values())
            self._hold(root, "waits for the object store", partial(self._exchange, contexts, unstored))

    async def _exchange(self, contexts: list[Context], unstored: list[tuple[Context, str]]) -> None:
        await retry_until_available(lambda: self._contents.fetch(contexts), waiting_for="contents of flows")
        await retry_until_available(
            lambda: self._contents.store(unstored), waiting_for="storing the contents of flows"
        )

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
        for root in self._touched:
            log.error(
                "A flow cannot be advanced, and is tried again in a minute",
                exc_info=error,
                extra={"event": "flow_held", "flow": root},
            )
            self._hold(root, str(error), partial(asyncio.sleep, _HELD_S))

    async def _apply_singly(self, shards: Sequence[int]) -> Exception | None:
        """Returns the first fault; `_touched` has its family. None when all rows were applied."""
        rounds = [*(([shard], False) for shard in shards), ([], True)]
        while rounds:
            one, is_due = rounds[0]
            try:
                if not await self._transact(one, is_due=is_due, limit=1):
                    rounds.pop(0)
            except _Postponed as reason:
                # The family is held until its objects are here, so that the next row is another's.
                self._postpone(reason)
            except FlowsLocked as locked:
                self._hold_locked(locked.roots)
            except LockConflict:
                # A row of another kind, such as a task.
                self._hold_locked(self._touched)
                if not self._touched:
                    return None
            except (Unavailable, Fatal):
                raise
            except _FAULTS as fault:
                return fault
        return None

    def _hold_locked(self, roots: Iterable[int]) -> None:
        for root in roots:
            self._hold(root, _LOCKED, partial(asyncio.sleep, _LOCKED_S))

    def _hold(self, root: int, why: str, until: Callable[[], Awaitable[None]]) -> None:
        if root in self.held:
            return
        self.held[root] = why

        async def hold() -> None:
            try:
                await until()
            finally:
                del self.held[root]
                self._mark([root % SHARDS])
                self._due_at_s = asyncio.get_running_loop().time()
                self._wake.set()

        task = asyncio.create_task(hold())
        self._fetching.add(task)
        task.add_done_callback(self._fetching.discard)
