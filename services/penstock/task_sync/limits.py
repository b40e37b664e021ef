"""Limits and order: how many tasks of a type may be released now, and which.

A type without limits, order and keys is released by one statement (`postgres.release`). Other types
pay for what they use: a count of the tasks in flight, and a scan of the keys for types that are
released by key.

A count holds until the release that follows it. Only the owner of a type releases its tasks,
through the session that holds the lock, so meanwhile the tasks in flight can only become fewer. The
transaction that ends a tracked task notifies the owner (`penstock_ready`); a slow poll covers lost
notifications.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.contracts.task_type import TaskType
from penstock.core.fair_queueing import Cursor
from penstock.core.locked_tasks import FIRST_RETRY_S, LockedTasks
from penstock.core.release_order import START, Position, first
from penstock.core.task import Priority
from penstock.core.token_bucket import TokenBucket
from penstock.postgres import limits, release
from penstock.postgres.limits import TypeVersion
from penstock.postgres.release import Batch, Released
from penstock.postgres.session import Session
from penstock.task_sync.key_scan import KeyScan, KeySelection, Round

# Most tasks that one statement examines to set their empty key, or to track them.
EMPTY_KEYS_PER_STATEMENT = 5_000
TRACKED_PER_STATEMENT = 5_000
# Most pages of concurrency keys that one release reads beyond the first of each level: keys without
# room must not delay other types.
PAGES_PER_RELEASE = 4
# Tasks submitted before their type had keys are found by scans of all ready tasks, each as many
# statements as that takes. The first scan runs without a pause; later scans begin after the first
# time and run a statement each of the second.
EMPTY_KEYS_SCAN_S = 10.0
EMPTY_KEYS_STATEMENT_S = 0.5
# The slow poll of a full type, in case the notification of a task's end was lost.
FULL_POLL_S = 10.0
# Starts that a rate did not use are saved up for this long only, so that a type that was idle does
# not start them all at once.
SAVED_STARTS_S = 0.1
# A rate releases the starts of this many seconds together; a high rate would otherwise cost a
# statement for each start.
STARTS_BATCH_S = 0.02
# A type that was not loaded is not released: no row has this version.
UNKNOWN = TypeVersion("0", keyed=False)


@dataclass(slots=True)
class ReleaseResult:
    """The result of one release.

    Attributes:
        batch: the released tasks; None when there are none.
        more: further tasks may be released at once.
    """

    batch: Batch | None = None
    more: bool = False


@dataclass(slots=True)
class _TypeState:
    """The state of a type between two releases.

    Attributes:
        all_tracked: all tasks in flight are tracked.
        begun_tracked: so are all tasks of later stages, except ready tasks behind `begun_position`.
        begun_position: the next position to track ready tasks of later stages from; None when all
            are tracked.
        bucket: starts a second; None without a rate.
        empty_keys_at_s: when to scan for tasks without a key, on the loop's clock.
        empty_keys_position: where that scan continues.
        empty_keys_set: the first such scan is complete.
        empty_keys_locked: that scan met tasks that other transactions lock.
        cursors: the round robin of each effective level.
        round: where the next release continues with the keys of a level; None at their end.
        woken: the type was woken since that round began.
    """

    all_tracked: bool = False
    begun_tracked: bool = False
    begun_position: Position | None = None
    bucket: TokenBucket | None = None
    empty_keys_at_s: float = float("-inf")
    empty_keys_position: Position = START
    empty_keys_set: bool = False
    empty_keys_locked: bool = False
    cursors: dict[Priority, Cursor] = field(default_factory=dict)
    round: Round | None = None
    woken: bool = False


@dataclass(frozen=True, slots=True)
class _Timer:
    """Wakes a type.

    Attributes:
        at_s: when, on the loop's clock. uvloop's handle does not know it: for a wait of less than
            half a millisecond it is no timer.
        handle: cancels it.
    """

    at_s: float
    handle: asyncio.Handle


class ReleaseLimiter:
    """Releases tasks of types as their limits allow.

    Args:
        session: the owner of the types.
        wake: called with a type's name when it is worth trying again.
    """

    def __init__(self, session: Session, wake: Callable[[str], None]) -> None:
        self._session = session
        self._wake = wake
        self._versions: dict[str, TypeVersion] = {}
        self._states: dict[str, _TypeState] = {}
        self._locked: dict[str, LockedTasks] = {}
        # A timer leaves when it wakes its type.
        self._timers: dict[str, _Timer] = {}

    async def load(self) -> None:
        """Loads the versions of types; call it when types change, before their settings are loaded.

        A type whose settings are newer than its version is not released until the next call, which
        the notification of the change causes.

        Raises:
            SessionLost, PostgresUnavailable: nothing was loaded.
        """
        versions = await limits.versions(self._session)
        for name in [name for name in self._locked if versions.get(name) != self._versions.get(name)]:
            # A release by an outdated version found all its tasks locked.
            del self._locked[name]
        self._versions = versions

    def remove(self, type_name: str) -> None:
        """Removes the state of a type that this replica no longer owns."""
        self._states.pop(type_name, None)
        self._locked.pop(type_name, None)
        if (timer := self._timers.pop(type_name, None)) is not None:
            timer.handle.cancel()

    def on_ready(self, type_name: str) -> None:
        """A task of the type may have become ready, or a limit may have room."""
        if (state := self._states.get(type_name)) is not None:
            state.woken = True

    def close(self) -> None:
        """Cancels all timers."""
        for timer in self._timers.values():
            timer.handle.cancel()
        self._timers.clear()

    async def release(
        self, task_type: TaskType, limit: int, take_confirmed: Callable[[], list[int]]
    ) -> ReleaseResult:
        """Releases tasks of a type, at most `limit`.

        Args:
            task_type: with its current settings.
            limit: the room in the window.
            take_confirmed: returns the batches that Kafka has; their notes are deleted with the
                release.

        A type that has changed since it was loaded is not released: the notification of the change
        wakes it.

        Raises:
            SessionLost: the ownership is lost, and this call released nothing.
            PostgresUnavailable: nothing was released, or the batch note is left for the next owner.
        """
        name = task_type.name
        if task_type.paused:
            return ReleaseResult()
        version, keyed = self._versions.get(name, UNKNOWN)
        if not (
            keyed
            or task_type.ordered
            or task_type.max_in_flight is not None
            or task_type.starts_per_s is not None
        ):
            self._states.pop(name, None)
            released = await release.release(
                self._session,
                task_type,
                limit,
                take_confirmed(),
                excluded=self._excluded(name),
                version=version,
                goes_on=True,
            )
            return self._result(name, released, limit)
        state = self._states.setdefault(name, _TypeState())
        if not keyed:
            # When the type has keys again, tasks submitted without a key meanwhile are found by a
            # new first scan.
            state.empty_keys_set = False
            state.empty_keys_at_s, state.empty_keys_position = float("-inf"), START
        untracked = await self._track(task_type, state, keyed=keyed)
        if untracked is not None:
            return untracked
        allowed = limit
        for room in (await self._room(task_type), self._starts(task_type, state)):
            allowed = allowed if room is None else min(allowed, room)
        if allowed <= 0:
            return ReleaseResult()
        if keyed:
            result = await self._release_by_key(task_type, state, allowed, take_confirmed)
        elif task_type.ordered:
            result = await self._release_in_order(task_type, state, allowed, take_confirmed)
        else:
            released = await release.release(
                self._session,
                task_type,
                allowed,
                take_confirmed(),
                tracked=state.all_tracked,
                excluded=self._excluded(name),
                version=version,
            )
            result = self._result(name, released, allowed)
        if state.bucket is not None and result.batch is not None:
            state.bucket.take(len(result.batch.tasks))
        return result

    def _version(self, name: str) -> str:
        return self._versions.get(name, UNKNOWN).version

    def _excluded(self, name: str) -> list[int]:
        """Tasks that the last releases found locked, which the next one leaves out."""
        locked = self._locked.get(name)
        return [] if locked is None else list(locked.excluded(asyncio.get_running_loop().time()))

    def _result(self, name: str, released: Released, limit: int) -> ReleaseResult:
        """The result of a release of at most `limit` tasks."""
        batch, locked_ids = released
        full = batch is not None and len(batch.tasks) == limit
        if not locked_ids and name not in self._locked:
            return ReleaseResult(batch, full)
        locked = self._locked.setdefault(name, LockedTasks())
        now_s = asyncio.get_running_loop().time()
        locked.add(locked_ids, now_s)
        wait_s = locked.wait_s(now_s)
        if wait_s is None:
            del self._locked[name]
        else:
            self._wake_after(name, wait_s)
        # The tasks behind locked ones may be released at once.
        return ReleaseResult(batch, (full or bool(locked_ids)) and not locked.full)

    async def _release_in_order(
        self,
        task_type: TaskType,
        state: _TypeState,
        limit: int,
        take_confirmed: Callable[[], list[int]],
    ) -> ReleaseResult:
        if state.begun_tracked and state.begun_position is not None:
            # Only the order depends on these tasks, so the release does not wait until all of them
            # are tracked.
            state.begun_position = await limits.track_ready(
                self._session, task_type.name, state.begun_position, TRACKED_PER_STATEMENT
            )
        name = task_type.name
        heads = await limits.heads(self._session, task_type, limit, self._excluded(name))
        levels = first(heads, limit, task_type.ageing_s)
        released = Released(None, [])
        if levels:
            released = await limits.release_selected(
                self._session, task_type, levels, take_confirmed, self._version(name)
            )
        result = self._result(name, released, limit)
        if not result.more and state.begun_position is not None:
            self._wake_after(name, FIRST_RETRY_S)
        return result

    async def _track(self, task_type: TaskType, state: _TypeState, *, keyed: bool) -> ReleaseResult | None:
        """Tracks tasks in flight, one batch a call; a release needs all of them tracked."""
        counted = task_type.max_in_flight is not None or keyed
        begun = task_type.finish_first
        if (counted and not state.all_tracked) or (begun and not state.begun_tracked):
            found, done = await limits.track(
                self._session, task_type.name, TRACKED_PER_STATEMENT, begun=begun
            )
            if found and not done:
                self._wake_after(task_type.name, FIRST_RETRY_S)
            if found:
                return ReleaseResult(None, bool(done))
        if begun and not state.begun_tracked:
            state.begun_position = START
        state.all_tracked, state.begun_tracked = counted or begun, begun
        return None

    async def _room(self, task_type: TaskType) -> int | None:
        """How many tasks the limit in flight allows; None without a limit."""
        if task_type.max_in_flight is None:
            return None
        most = task_type.max_in_flight
        room = most - await limits.in_flight(self._session, task_type.name, most)
        if room <= 0:
            self._wake_after(task_type.name, FULL_POLL_S)
        return room

    def _starts(self, task_type: TaskType, state: _TypeState) -> int | None:
        """How many tasks the rate allows; None without a rate."""
        rate = task_type.starts_per_s
        if rate is None:
            state.bucket = None
            return None
        now_s = asyncio.get_running_loop().time()
        if state.bucket is None:
            # Empty, since the previous owner may have used the starts of this moment.
            state.bucket = TokenBucket(rate, now_s, capacity_s=SAVED_STARTS_S, full=False)
        elif state.bucket.rate != rate:
            state.bucket.set_rate(rate, now_s)
        allowed = state.bucket.available(now_s)
        if allowed <= 0:
            self._wake_after(task_type.name, state.bucket.wait_s(STARTS_BATCH_S))
        return allowed

    def _wake_after(self, type_name: str, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        at_s = loop.time() + wait_s
        if (timer := self._timers.get(type_name)) is not None:
            if timer.at_s <= at_s:
                return
            timer.handle.cancel()
        self._timers[type_name] = _Timer(at_s, loop.call_later(wait_s, self._wake_now, type_name))

    def _wake_now(self, type_name: str) -> None:
        del self._timers[type_name]
        self._wake(type_name)

    async def _release_by_key(
        self,
        task_type: TaskType,
        state: _TypeState,
        limit: int,
        take_confirmed: Callable[[], list[int]],
    ) -> ReleaseResult:
        more = await self._set_empty_keys(task_type, state)
        name, unfinished = task_type.name, False
        selected = KeySelection(self._session, task_type, limit, PAGES_PER_RELEASE, self._excluded(name))
        if task_type.ageing_s is not None:
            oldest = await limits.heads(self._session, task_type, 1, selected.excluded)
            selected.oldest_s = {head.level: head.waited_s for head in oldest}
        continued, state.round = state.round, None
        if continued is None:
            state.woken = False
        for level in Priority:
            if continued is not None and level < continued.level:
                continue
            scan = KeyScan(selected, level, state.cursors.get(level, Cursor()))
            unfinished = await scan.select(
                continued if continued is not None and continued.level == level else None
            )
            state.cursors[level], state.round = scan.cursor, scan.round
            if scan.full:
                self._wake_after(name, FULL_POLL_S)
            if unfinished or selected.left <= 0:
                break
        # A key that this round has passed may have got room since.
        more = more or unfinished or (continued is not None and state.woken)
        released = Released(None, [])
        if selected.levels:
            released = await limits.release_selected(
                self._session, task_type, selected.levels, take_confirmed, self._version(name)
            )
        result = self._result(name, released, limit)
        return ReleaseResult(result.batch, more or result.more or selected.left <= 0)

    async def _set_empty_keys(self, task_type: TaskType, state: _TypeState) -> bool:
        """Sets the empty key on tasks without a key; True until the first scan is complete."""
        now_s = asyncio.get_running_loop().time()
        if now_s < state.empty_keys_at_s:
            # Tasks that were submitted meanwhile may have no key: their producer may not know yet
            # that the type has keys.
            self._wake_after(task_type.name, state.empty_keys_at_s - now_s)
            return False
        position, locked = await limits.set_empty_keys(
            self._session, task_type.name, state.empty_keys_position, EMPTY_KEYS_PER_STATEMENT
        )
        state.empty_keys_locked = state.empty_keys_locked or bool(locked)
        state.empty_keys_position = position or START
        if position is None:
            state.empty_keys_set = True
            pause_s = EMPTY_KEYS_STATEMENT_S if state.empty_keys_locked else EMPTY_KEYS_SCAN_S
            state.empty_keys_at_s, state.empty_keys_locked = now_s + pause_s, False
            if locked:
                self._wake_after(task_type.name, pause_s)
        elif state.empty_keys_set:
            state.empty_keys_at_s = now_s + EMPTY_KEYS_STATEMENT_S
            self._wake_after(task_type.name, EMPTY_KEYS_STATEMENT_S)
        return not state.empty_keys_set
