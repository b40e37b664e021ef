"""The targets whose callbacks come here: their health, kept in PostgreSQL, and what is let go of what is held for them.

A target belongs to one partition, so one process judges it, however many there are (C7b). Its judgement is in memory and
written down soon after it changes; whoever has the partition next goes on from there. A process that has lost a
target without knowing writes nothing (`keep` compares the owner), and lets go of it.

In doubt a target is what was kept of it: a crash forgets what its last second has counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import asyncpg

from penstock.callbacks.batching import persevere
from penstock.callbacks.known import Attempt, Known, Target
from penstock.callbacks.settings import CallbacksSettings
from penstock.contracts.event import origin_of
from penstock.core.health import Suspicion
from penstock.core.target import TargetId
from penstock.errors import PostgresUnavailable
from penstock.postgres import callbacks, targets
from penstock.postgres.targets import Kept

log = logging.getLogger(__name__)

TICK_S = 0.25
# Snapshots of targets that are charged with something are written this often; the ones that cross the threshold at the
# next tick, and the others, whose last attempts are all there is to see, seldom.
KEEP_EVERY_S = 1.0
KEEP_QUIET_EVERY_S = 15.0
KEPT_AT_ONCE = 200
# What a stop may take to write them.
LAST_KEEP_S = 3.0
# How often all that is held is looked for, beside what is known of it.
LOOK_EVERY_S = 30.0
# Beyond this many, those that are well and quiet are forgotten; so many are looked at for each that is loaded.
REMEMBERED = 50_000
LOOKS = 2


class _Load:
    """A load under way, with what PostgreSQL told of meanwhile: the load may have read it before that."""

    def __init__(self) -> None:
        self.outdated: set[TargetId] = set()


class Targets:
    """All targets of the partitions that are this process's.

    Args:
        settings: of the service.
        pool: of the database.
        owner: this process, unlike any other.
        partition_of: the partition of the records of an address: one for all namespaces, so one process judges all its targets.
        room: how many more may be let go now, for all targets together.
        waiting: how many of a target's wait for its turn on the diverted path.
        changed: told of a target of which somebody has said something.
        in_hand: whether a target is called, or something in hand waits for it.

    Attributes:
        granted: how many held callbacks have been let go.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        owner: str,
        *,
        partition_of: Callable[[str], int],
        room: Callable[[], int],
        waiting: Callable[[TargetId], int],
        changed: Callable[[TargetId], None],
        in_hand: Callable[[TargetId], bool],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._owner = owner
        self._partition_of = partition_of
        self._room = room
        self._waiting = waiting
        self._told = changed
        self._in_hand = in_hand
        self._targets = Known()
        self._loads: set[_Load] = set()
        # Those for which something may be held, the one to be given something next first.
        self._held: dict[TargetId, None] = {}
        # Those to be written soon, and those to be written some time.
        self._changed: set[TargetId] = set()
        self._seen: set[TargetId] = set()
        self._partitions: frozenset[int] = frozenset()
        self._suspicion = Suspicion(settings.health)
        self._outdated: set[TargetId] = set()
        self._urgent = asyncio.Event()
        self._look_at_s = 0.0
        self._clock = asyncio.get_running_loop().time
        self.granted = 0

    def __len__(self) -> int:
        return len(self._targets)

    def get(self, which: TargetId) -> Target | None:
        """What is known of a target; None when it has to be loaded, or is another process's."""
        return self._targets.use(which)

    def is_hanging(self, which: TargetId) -> bool:
        """Whether its latest call was slow."""
        target = self._targets.get(which)
        return target is not None and target.hanging

    def rate_of(self, which: TargetId) -> float | None:
        """The most calls a second it is to get."""
        target = self._targets.get(which)
        own = target.rate if target is not None else None
        return own or self._settings.callback_rate or None

    def drain_rate_of(self, which: TargetId) -> float | None:
        """The most calls a second it is to get on the diverted path: while it is abnormal, and while it is drained."""
        target = self._targets.get(which)
        drained = target is not None and (
            which in self._held or target.drain.under_way(self._clock()) or self.abnormal(target)
        )
        return self._settings.drain.rate if drained else None

    def abnormal(self, target: Target) -> bool:
        """Whether its callbacks are to be diverted."""
        return target.window.verdict(time.time())

    def states(self) -> Iterator[str]:
        """The state of each target that is known here."""
        now_s = time.time()
        for target in self._targets.values():
            abnormal = target.window.verdict(now_s)
            yield "disabled" if target.disabled else "abnormal" if abnormal else "normal"

    @property
    def suspicious(self) -> bool:
        """Whether this process is suspected, or was until a moment ago, so that no target may pay for failures."""
        return self._suspicion.suspected(time.monotonic())

    def judges(self, partition: int) -> bool:
        """Whether the targets of a partition are this process's."""
        return partition in self._partitions

    def stop(self, which: TargetId) -> None:
        """Nothing more is to be sent to it; `gone` writes that down."""
        if (target := self._targets.get(which)) is not None:
            target.disabled = True

    def assigned(self, partitions: Iterable[int]) -> None:
        """These partitions are this process's now, and may have been another's before."""
        self._partitions |= set(partitions)
        self._look_at_s = 0.0
        self._urgent.set()

    def revoked(self, partitions: frozenset[int]) -> None:
        """These may be another's: what is known of their targets is worth nothing any more."""
        self._partitions -= partitions
        self._targets.drop_all_of(partitions)
        self._held = {which: None for which in self._held if which in self._targets}

    def outdated(self, payload: str) -> None:
        """Somebody has changed a target in PostgreSQL (`postgres.targets.notified`)."""
        if (which := targets.notified(payload)) is None:
            return
        self._outdated.add(which)
        for load in self._loads:
            load.outdated.add(which)
        self._urgent.set()

    async def load(self, partitions: Mapping[TargetId, int]) -> None:
        """Takes targets over, each with the partition of its records, and reads what was kept of them."""
        # Of partitions that have gone meanwhile nothing is taken from their new owner.
        some = [which for which, partition in partitions.items() if partition in self._partitions]
        while some:
            # What changes while it is read is read again: nobody tells of it twice.
            for kept in await self._read(load := _Load(), some):
                partition = partitions[kept.target]
                # It may have gone meanwhile.
                if partition in self._partitions:
                    self._targets.put(kept.target, Target(kept, partition, self._settings))
            some = [which for which in some if which in load.outdated]
        self._targets.forget(REMEMBERED, LOOKS * len(partitions), self._in_use)

    async def _read(self, load: _Load, some: Sequence[TargetId]) -> Sequence[Kept]:
        self._loads.add(load)
        try:
            return await persevere(
                lambda: targets.own(self._pool, some, self._owner), f"the health of {len(some)} targets"
            )
        finally:
            self._loads.remove(load)

    def called(self, which: TargetId, *, slow: bool, failed: bool = False) -> bool:
        """A call turned out slow, or ended before that; True when this has changed whether it is abnormal."""
        target = self._targets.get(which)
        if target is None:
            return False
        target.hanging = slow
        if self._suspicion.suspects(time.monotonic()):
            return False
        now_s = time.time()
        before, charged = target.window.verdict(now_s), target.window.charged
        target.window.record(slow=slow, failed=failed, now_s=now_s)
        after = target.window.verdict(now_s)
        if charged or target.window.charged:
            self._changed.add(which)
        if after == before:
            return False
        self._urgent.set()
        if after:
            log.warning(
                "a target at %s is abnormal: its callbacks are diverted",
                _where(which),
                extra={"target": origin_of(which.url)},
            )
            self._forgive(self._suspicion.trip(which, time.monotonic(), self._targets.addresses))
        else:
            log.info("a target at %s is normal again", _where(which), extra={"target": origin_of(which.url)})
        return target.window.verdict(now_s) != before

    def attempted(self, which: TargetId, attempt: Attempt) -> None:
        """Keeps an attempt to be shown."""
        if (target := self._targets.get(which)) is not None:
            target.attempts.append(attempt)
            self._seen.add(which)

    def holding(self, some: Iterable[TargetId]) -> None:
        """Something is held for these now."""
        self._held.update(dict.fromkeys(some))

    async def gone(self, which: TargetId, why: str) -> None:
        """It has asked for nothing more to be sent to it."""
        where = _where(which)
        log.warning("a target at %s is disabled: %s", where, why, extra={"target": origin_of(which.url)})
        self.stop(which)
        await persevere(
            lambda: targets.disable(self._pool, which, why, answered=True),
            f"a target at {where}, gone,",
        )

    async def run(self, scheduled: Callable[[float], Awaitable[None]]) -> None:
        """Keeps what changes, and lets go of what is held, until cancelled.

        Args:
            scheduled: told that something is due in so many seconds.
        """
        try:
            await self._run(scheduled)
        finally:
            with suppress(TimeoutError, PostgresUnavailable):
                await asyncio.wait_for(self._keep(self._changed | self._seen), LAST_KEEP_S)

    async def _run(self, scheduled: Callable[[float], Awaitable[None]]) -> None:
        clock = self._clock
        keep_at_s, keep_all_at_s = clock() + KEEP_EVERY_S, clock() + KEEP_QUIET_EVERY_S
        while True:
            # Not `wait_for`: with Python 3.11 it may swallow a cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._urgent.wait()
                    self._urgent.clear()
                    keep_at_s = 0.0
            now_s = clock()
            try:
                await self._reload()
                if now_s >= keep_all_at_s:
                    await self._keep(self._changed | self._seen)
                    keep_at_s, keep_all_at_s = now_s + KEEP_EVERY_S, now_s + KEEP_QUIET_EVERY_S
                elif now_s >= keep_at_s:
                    await self._keep(self._changed)
                    keep_at_s = now_s + KEEP_EVERY_S
                if now_s >= self._look_at_s:
                    self._look_at_s = now_s + LOOK_EVERY_S
                    await self._look()
                if await self._let_go(now_s):
                    await scheduled(0.0)
            except PostgresUnavailable as error:
                log.warning("the health of targets waits: %s", error)
                await asyncio.sleep(KEEP_EVERY_S)

    async def _reload(self) -> None:
        outdated, self._outdated = self._outdated, set()
        known = {
            which: target.partition if (target := self._targets.get(which)) else self._partition_of(which.url)
            for which in outdated
            # One in hand that is unknown was let go of because of this very word (`_keep_few`).
            if which in self._targets or self._in_hand(which)
        }
        if known:
            # What has been counted since it was kept last is lost: somebody has decided otherwise.
            await self.load(known)
            for which in known:
                self._told(which)
        if outdated:
            # Also an unknown one that was enabled: something may be held for it.
            self._look_at_s = 0.0

    async def _keep(self, some: Iterable[TargetId]) -> None:
        """Writes down what is known of some, a few at a time: calls go on between."""
        some = list(some)
        for at in range(0, len(some), KEPT_AT_ONCE):
            await self._keep_few(some[at : at + KEPT_AT_ONCE])

    async def _keep_few(self, some: Iterable[TargetId]) -> None:
        now_s = time.time()
        snapshots = [
            target.kept(which, now_s) for which in some if (target := self._targets.get(which)) is not None
        ]
        if not snapshots:
            return
        told = {kept.target for kept in snapshots}
        # Before: what changes while it is written is written again.
        self._changed -= told
        self._seen -= told
        kept = None
        try:
            kept = await targets.keep(self._pool, snapshots, self._owner)
        finally:
            if kept is None:  # No server, or a stop.
                self._changed |= told
        for which in told - kept:
            log.info("a target at %s was changed by somebody else: it is read again", _where(which))
            self._targets.drop(which)
            self._look_at_s = 0.0

    async def _look(self) -> None:
        """Finds targets in trouble that nobody has called since they are this process's."""
        found = [
            one for one in await targets.troubled(self._pool) if self.judges(self._partition_of(one.url))
        ]
        unknown = {which: self._partition_of(which.url) for which in found if which not in self._targets}
        if unknown:
            await self.load(unknown)
        self.holding(found)
        # Nobody calls it, so nothing else would write down that it has decayed.
        self._changed.update(
            which for which in found if (target := self.get(which)) and not self.abnormal(target)
        )

    async def _let_go(self, now_s: float) -> bool:
        room = self._room()
        wanted: dict[TargetId, int] = {}
        for which in self._held:
            target = self._targets.get(which)
            if target is None or target.disabled:
                continue
            if room <= 0:
                break
            allowed = target.drain.allow(now_s, hanging=target.hanging, waiting=self._waiting(which))
            if allowed := min(allowed, room):
                wanted[which] = allowed
                room -= allowed
        if not wanted:
            return False
        # Before: what is held while they are let go says so itself.
        for which in wanted:
            del self._held[which]
        granted = await callbacks.grant(self._pool, wanted)
        self.granted += sum(granted.values())
        # Where there were as many as wanted there may be more; the others have their turn first.
        self.holding(which for which, most in wanted.items() if granted.get(which, 0) >= most)
        return bool(granted)

    def _forgive(self, some: Sequence[TargetId]) -> None:
        if not some:
            return
        log.error(
            "%d of %d targets have become abnormal within %g s: this process or its network is suspected; "
            "nothing is charged to targets for as long",
            len(some),
            len(self._targets),
            self._settings.health.suspicion_s,
        )
        for which in some:
            if (target := self._targets.get(which)) is not None:
                target.window.forgive()
                self._changed.add(which)

    def _in_use(self, which: TargetId, target: Target) -> bool:
        return (
            which in self._held
            or which in self._changed
            or which in self._seen
            or target.disabled
            or target.window.charged
            or self._in_hand(which)
        )


def _where(which: TargetId) -> str:
    """As much of a target as a log may have."""
    return str(TargetId(which.namespace, origin_of(which.url)))
