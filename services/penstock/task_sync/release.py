"""Release: opens the gate for each type it owns, as far as the window allows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Sequence
from datetime import datetime

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from penstock.kafka.connection import create_topics, send_in_batches, translated
from penstock.kafka.topics import ready
from penstock.postgres import release
from penstock.postgres.session import Session
from penstock.postgres.types import KnownTypes, TaskType
from penstock.task_sync.gates import Gate, Looking
from penstock.task_sync.limits import Limits
from penstock.task_sync.owning import Owning
from penstock.task_sync.settings import TaskSyncSettings
from penstock.task_sync.spans import traced
from penstock.tracing import Span

log = logging.getLogger(__name__)

# Notes of confirmed batches are struck out by the next release; a statement of their own is for when none comes.
FORGET_S = 0.5
# While something is scheduled, the database is asked at least this often when it will be due.
ASK_AGAIN_S = 10.0
# When what was due and could not be made ready is tried again.
LEFT_S = 0.05


class Release:
    """The loop that owns types and opens their gates.

    Args:
        settings: of the service.
        session: whose locks are the ownership, and through which every release goes.
        producer: acks=all.
        types: what is registered.
        admin: reads the workers' offsets.
        offsets: reads where the ready topics end.
    """

    def __init__(
        self,
        settings: TaskSyncSettings,
        session: Session,
        producer: AIOKafkaProducer,
        types: KnownTypes,
        admin: AIOKafkaAdminClient,
        offsets: AIOKafkaConsumer,
    ) -> None:
        self._settings = settings
        self._session = session
        self._producer = producer
        self._types = types
        self._looking = Looking(settings, session, admin)
        self._owning = Owning(settings, session)
        self._offsets = offsets
        self._gates: dict[str, Gate] = {}
        self._wake = asyncio.Event()
        self._limits = Limits(session, self.heard_ready)
        self._types_changed = True
        self._owners_changed = True
        # Names of types that were told of, until their gates know.
        self._changed: set[str] = set()
        self._due_unknown = True
        self._confirmed: list[int] = []
        self._confirmed_s = 0.0
        self._confirming: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        # What the loop does now, empty while it sleeps; how often it has gone on to something else; confirmed batches.
        self._doing = ""
        self._steps = 0
        self._confirmations = 0
        self._asked: tuple[Sequence[str], asyncio.Future[dict[str, datetime]]] | None = None
        # Set while something of an owned type may be queued.
        self.some_queued = asyncio.Event()

    def heard_ready(self, type_name: str) -> None:
        """A notification: something of this type became ready."""
        gate = self._gates.get(type_name)
        if gate is not None:
            gate.dirty = True
        self._wake.set()

    def heard_due(self, _type_name: str) -> None:
        """A notification: something of this type was scheduled, perhaps for earlier than all else."""
        self._due_unknown = True
        self._wake.set()

    def heard_types(self, name: str) -> None:
        """A notification: a type, or what is said of its keys, was registered or changed."""
        self._types.outdated()
        self._changed.add(name)
        self._types_changed = True
        self._wake.set()

    def heard_replicas(self, _nothing: str) -> None:
        """A notification: a replica has come or gone, or has given types up."""
        self._owners_changed = True
        self._wake.set()

    def gates(self) -> list[Gate]:
        """Of the types that are owned now."""
        return list(self._gates.values())

    def queued_types(self) -> list[TaskType]:
        """Owned types of which something may be queued."""
        return [gate.type for gate in self._gates.values() if gate.queued]

    def under_way(self) -> dict[str, Hashable]:
        """What is at hand now, with a mark that changes as it moves; empty at rest.

        A full window is rest: it is the workers who do not move then.
        """
        marks: dict[str, Hashable] = {self._doing: self._steps} if self._doing else {}
        if self._confirming:
            marks["bringing released tasks to Kafka"] = self._confirmations
        return marks

    def _go_on(self, doing: str) -> None:
        self._doing = doing
        self._steps += 1

    async def cuts(self, type_names: Sequence[str]) -> dict[str, datetime]:
        """See `release.cuts`; asked between two releases, and one question at a time."""
        future: asyncio.Future[dict[str, datetime]] = asyncio.get_running_loop().create_future()
        self._asked = (type_names, future)
        self._wake.set()
        return await future

    def recount(self, type_name: str, written: int) -> None:
        """A ready topic was replaced by another, of which nobody has taken anything."""
        gate = self._gates.get(type_name)
        if gate is not None:
            gate.written, gate.taken, gate.patience_s, gate.dirty = written, 0, 0.0, True
            self._wake.set()

    def marked(self, type_name: str, records: int) -> None:
        """Records that are no tasks were written to a ready topic."""
        gate = self._gates.get(type_name)
        if gate is not None:
            gate.written += records

    async def run(self, stopping: asyncio.Event) -> None:
        """Releases until `stopping` is set; then waits until Kafka has what was released.

        Raises:
            SessionLost: the locks are gone; another process may be releasing by now.
            PostgresUnavailable, KafkaUnavailable: what was released and not confirmed is sent by the next owner.
        """
        await self._owning.join()
        wakers = [asyncio.create_task(self._wake_on(event)) for event in (stopping, self._session.lost)]
        try:
            await self._release_until(stopping)
        finally:
            for waker in wakers:
                waker.cancel()
            self._limits.close()
        if self._confirming:
            await asyncio.gather(*self._confirming)
        if self._confirmed:
            await release.forget(self._session, self._take_confirmed())
        # Others need not find out by themselves.
        await release.leave(self._session)

    async def _release_until(self, stopping: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        own_at_s = due_at_s = loop.time()
        sweep_at_s = loop.time() + self._settings.sweep_s
        while not stopping.is_set():
            self._wake.clear()
            self._session.ensure()
            if self._failure is not None:
                raise self._failure
            now_s = loop.time()
            if now_s >= sweep_at_s:
                self._go_on("looking for what was not heard")
                await self._sweep()
                sweep_at_s = now_s + self._settings.sweep_s
            if self._types_changed or self._owners_changed or now_s >= own_at_s:
                self._go_on("owning types")
                own_at_s = await self._own()
            if self._due_unknown or now_s >= due_at_s:
                self._go_on("making ready what is due")
                due_at_s = await self._promote()
            look_again_s = await self._pump()
            self._go_on("asking what is queued")
            await self._answer()
            forget_at_s = self._confirmed_s + FORGET_S if self._confirmed else float("inf")
            if loop.time() >= forget_at_s:
                await release.forget(self._session, self._take_confirmed())
                forget_at_s = float("inf")
            if any(gate.dirty and gate.room() > 0 for gate in self._gates.values()):
                continue
            await self._sleep(min(own_at_s, due_at_s, look_again_s, forget_at_s, sweep_at_s))

    async def _sweep(self) -> None:
        """Finds what a notification that was lost would have told."""
        self._types.outdated()
        self._types_changed = self._due_unknown = True
        for name in await release.waiting(self._session, list(self._gates)):
            self._gates[name].dirty = True

    async def _answer(self) -> None:
        if self._asked is None:
            return
        (asked, future), self._asked = self._asked, None
        # Of what was given up meanwhile, another process may be releasing just now.
        names = [name for name in asked if name in self._gates]
        cuts = await release.cuts(self._session, names)
        for name in names:
            gate = self._gates.get(name)
            if gate is not None:
                gate.queued = name in cuts
        if not self.queued_types():
            self.some_queued.clear()
        if not future.done():
            future.set_result(cuts)

    async def _sleep(self, until_s: float) -> None:
        self._go_on("")
        loop = asyncio.get_running_loop()
        timer = None if until_s == float("inf") else loop.call_at(until_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _wake_on(self, event: asyncio.Event) -> None:
        await event.wait()
        self._wake.set()

    async def _own(self) -> float:
        """Takes types that nobody owns, up to its share, and gives up what is more; when to look again."""
        if self._types_changed:
            self._types_changed = False
            changed, self._changed = self._changed, set()
            await self._types.load()
            await self._limits.load()
            for gate in self._gates.values():
                gate.type = self._types.get(gate.type.name) or gate.type
                # What its limits held back may go.
                gate.dirty = gate.dirty or gate.type.name in changed
        self._owners_changed = False
        plan = await self._owning.plan([task_type.name for task_type in self._types])
        if plan.give:
            await self._give_up(plan.give)
        taken: list[TaskType] = []
        for name in plan.take:
            if len(taken) == plan.most:
                break
            self._go_on(f"owning {name}")
            task_type = self._types.get(name)
            if task_type is not None and await release.own(self._session, name):
                taken.append(task_type)
        if taken:
            await create_topics(self._settings, [ready(one.name, one.partitions) for one in taken])
            self._go_on(f"beginning with {', '.join(one.name for one in taken)}")
            for gate in await self._looking.open(taken, self._offsets):
                await self._begin(gate)
        if taken and not self._owning.alone:
            # Whoever gave these up may have more.
            await release.tell_replicas(self._session)
        return self._owning.again_s

    async def _give_up(self, names: Sequence[str]) -> None:
        """Leaves types to other replicas, with nothing under way that they would send again."""
        self._go_on(f"giving up {', '.join(names)}")
        if self._confirming:
            await asyncio.gather(*self._confirming)
        if self._failure is not None:
            raise self._failure
        if self._confirmed:
            await release.forget(self._session, self._take_confirmed())
        for name in names:
            log.info("%s: given up, for another process to own", name, extra={"type": name})
            del self._gates[name]
            self._limits.forget(name)
            await release.disown(self._session, name)
        await release.tell_replicas(self._session)

    async def _begin(self, gate: Gate) -> None:
        task_type = gate.type
        self._gates[task_type.name] = gate
        self.some_queued.set()
        ids = {"type": task_type.name}
        for batch in await release.unconfirmed(self._session, task_type):
            log.info("%s: sending %d released tasks again", task_type.name, len(batch.tasks), extra=ids)
            await self._send(gate, batch)
        log.info("%s: owned, %d records waiting for workers", task_type.name, gate.lag, extra=ids)

    async def _promote(self) -> float:
        """Makes ready what is due; returns when something will be, on the loop's clock."""
        self._due_unknown = False
        limit = self._settings.release_batch
        promoted = await release.promote(self._session, limit)
        for name in promoted.keys() & self._gates.keys():
            # Sooner than the notification is here.
            self._gates[name].dirty = True
        now_s = asyncio.get_running_loop().time()
        if sum(promoted.values()) == limit:
            # More may be due; other types must not wait until all of it is ready.
            return now_s
        wait_s = await release.next_due_s(self._session)
        if wait_s is None:
            return float("inf")
        # What is due and was left is at hand elsewhere, which may come to nothing.
        least_s = 0.001 if promoted else LEFT_S
        # Not for ever by what the database's clock was when it was asked: it may be put right meanwhile.
        return now_s + min(max(wait_s, least_s), ASK_AGAIN_S)

    async def _pump(self) -> float:
        """Releases one batch of each type that wants it; returns when to look at a full window again."""
        look_at_s = float("inf")
        now_s = asyncio.get_running_loop().time()
        if full := [gate for gate in self._gates.values() if gate.wants_look(now_s)]:
            self._go_on("looking at full windows")
            await self._looking.look_at_full(full)
        for gate in self._gates.values():
            if not gate.dirty:
                continue
            self._go_on(f"releasing {gate.type.name}")
            room = gate.room()
            if room <= 0:
                look_at_s = min(look_at_s, gate.looked_s + gate.patience_s)
                continue
            limit = min(room, self._settings.release_batch)
            # Before the statement: what becomes ready while it runs must be seen by the next one.
            gate.dirty = False
            released = await self._limits.release(gate.type, limit, self._take_confirmed)
            gate.dirty = gate.dirty or released.more
            if released.batch is not None:
                gate.queued = True
                self.some_queued.set()
                await self._send(gate, released.batch)
        return look_at_s

    async def _send(self, gate: Gate, batch: release.Batch) -> None:
        """Writes a batch's records, each partition a slice of the order, and confirms in the background."""
        tasks = batch.tasks
        spans = traced(tasks)
        count = gate.type.partitions
        size = -(-len(tasks) // count)
        pending = []
        for begin in range(0, len(tasks), max(size, 1)):
            partition = gate.next_partition % count
            records = ((None, task.encode()) for task in tasks[begin : begin + size])
            pending += await send_in_batches(self._producer, gate.topic, partition, records)
            gate.next_partition += 1
        now_s = asyncio.get_running_loop().time()
        if not gate.lag:
            # Nothing was there to be taken: how long nothing was taken says nothing of these.
            gate.moved_s, gate.patience_s = now_s, self._settings.lag_poll_s
        gate.written += len(tasks)
        gate.released += len(tasks)
        keys = [(task.fence.id, task.fence.step, task.fence.attempt) for task in tasks]
        gate.window.released(keys, now_s)
        confirming = asyncio.create_task(self._confirm(batch.release_id, pending, spans))
        self._confirming.add(confirming)
        confirming.add_done_callback(self._confirming.discard)

    async def _confirm(
        self, release_id: int, pending: Sequence[asyncio.Future[object]], spans: Sequence[Span]
    ) -> None:
        try:
            with translated():
                await asyncio.gather(*pending)
        except Exception as error:  # noqa: BLE001 (kept for the loop, which ends with it)
            self._failure = error
            self._wake.set()
        else:
            if not self._confirmed:
                self._confirmed_s = asyncio.get_running_loop().time()
                self._wake.set()
            self._confirmed.append(release_id)
            self._confirmations += 1
            for span in spans:
                span.end()

    def _take_confirmed(self) -> list[int]:
        taken, self._confirmed = self._confirmed, []
        return taken
