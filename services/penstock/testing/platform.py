"""The services of a pipeline, in memory: they commit results and expire leases.

Results take the way of real ones: they are encoded and read again, large contexts go to the object
store, and `penstock.core` decides where a task goes. Flows are advanced by the code of the service
`flows`. One module, because all of these services change the same rows.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from penstock.client.models import Task
from penstock.contracts.context import Context
from penstock.contracts.event import OutboxEntry
from penstock.contracts.inbound import decode_results
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import Failure, StageResult, encode_results
from penstock.contracts.task_type import TaskType
from penstock.core.access import namespace_of
from penstock.core.attempt import AttemptId
from penstock.core.completion import SUSPENDING, Outcome
from penstock.core.endings import (
    GOOD,
    ExpiredLease,
    conclude_expired,
    counts_failures,
)
from penstock.core.leases import Lease, LeaseWheel
from penstock.postgres import documents
from penstock.postgres.advance import cancel_within, end_event
from penstock.postgres.ending import Ending
from penstock.postgres.outbox import enqueue
from penstock.submission import TaskKind
from penstock.testing.clock import Clock
from penstock.testing.flows import Flows, at_once
from penstock.testing.hosts import Host, Records
from penstock.testing.models import NoEnd
from penstock.testing.objects import KeptObjects
from penstock.testing.published import SentCallback
from penstock.testing.tables import Tasks
from penstock.testing.task_rows import TaskRow, columns_of, result_columns
from penstock.worker.registered import Registered

# Width of a slot of the wheel in seconds. A lease expires at its deadline, not a slot later.
_TICK_S = 1e-6
# A task that asks for another attempt each time has no end.
MOST_ATTEMPTS = 1_000


@dataclass(slots=True)
class Started:
    """An attempt that a worker has claimed: when, and with which context."""

    at: datetime
    context: Context


class _Types(dict[str, TaskType]):
    """The registered types, as a submission looks them up."""

    async def require(self, names: Iterable[str]) -> None:
        """Returns at once: all types are here."""


class Platform:
    """The services.

    Args:
        clock: of the pipeline.
        types: the registered types, by name.
        registered: what is registered with the worker.
        chance: random numbers from 0 to 1, for jitter.

    Attributes:
        tasks: all tasks.
        flows: all flows.
        events: records of the topic `events`, in the order of their transitions.
        callbacks: callbacks, in the same order.
        objects: large contexts.
        records: logs and progress.
        started: attempts that have been claimed.
        changes: grows with each change.
        changed: set by each change.
    """

    def __init__(
        self,
        clock: Clock,
        types: Mapping[str, TaskType],
        registered: Registered,
        chance: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._registered = registered
        self._chance = chance
        self.objects = KeptObjects()
        self._submissions = TaskKind(_Types(types), self.objects)
        self.events: list[Mapping[str, Any]] = []
        self.callbacks: list[SentCallback] = []
        self.tasks = Tasks(clock, types, lambda row, before: self.flows.tables.end_task(row, before))  # noqa: PLW0108 (the flows follow)
        self.flows = Flows(clock, types, self.tasks, self.objects, self._cancel, self._publish)
        self.records = Records()
        self.started: dict[AttemptId, Started] = {}
        self.changes = 0
        self.changed = asyncio.Event()
        self._leases = LeaseWheel(_TICK_S)
        self._suspected: frozenset[str | None] = frozenset()
        self._workers = 0
        # Workers that live, by id. Those that were cut off, and are back, get no further tasks.
        self._hosts: dict[str, Host] = {}
        self._host = self._new_host()

    def _new_host(self) -> Host:
        self._workers += 1
        host = Host(self._workers, self._registered, self.objects, self.records, self._receive)
        self._hosts[host.id] = host
        return host

    def note_change(self) -> None:
        """Wakes the pipeline."""
        self.changes += 1
        self.changed.set()

    def submit(self, entry: bytes) -> tuple[TaskRow, bool]:
        """Inserts a task as the gateway does; returns it, and whether it is new.

        Args:
            entry: JSON, as in `submitted.schema.json`.

        Raises:
            Invalid, Faults: the submission is refused; the pointer is the field at fault.
        """
        submission = at_once(self._submissions.read(entry))
        found = self.tasks.insert(at_once(self._submissions.store(submission)))
        self.note_change()
        return found

    def get(self, task_id: int) -> Task:
        """A task, as the client reads it from the gateway."""
        row = self.tasks.get(task_id)
        context = self.objects.value_of(row.context)
        columns = columns_of(row)
        columns |= {"content_type": context.content_type, "context": context.data}
        columns |= result_columns(row.result and self.objects.value_of(row.result))
        document = orjson.dumps(documents.detail(columns), option=orjson.OPT_UTC_Z)
        return Task.from_wire(orjson.loads(document))

    async def work(self) -> bool:
        """Does what is due, and starts ready tasks; returns whether there was anything."""
        before = self.changes
        self._expire()
        self.tasks.promote()
        while await self.flows.advance():
            self.note_change()
        ready = self.tasks.release()
        for each in ready:
            self._claim(each)
        if ready:
            self._host.start(ready)
            self.note_change()
        return self.changes > before

    def _claim(self, ready: ReadyTask) -> None:
        attempt_id = ready.attempt_id
        ended = self.tasks.get(attempt_id.task_id).attempts[-MOST_ATTEMPTS:]
        if len(ended) == MOST_ATTEMPTS and ended[0]["finished_at"] == self._clock.now:
            raise NoEnd(
                f"task {attempt_id.task_id} has had {MOST_ATTEMPTS:,} attempts in one moment, the last in "
                f"{ready.fence.stage!r}"
            )
        self.started[attempt_id] = Started(self._clock.now, self.objects.value_of(ready.context))
        self.tasks.claim(attempt_id, self._host.id)
        limit = self._registered.limits.get(ready.type, {}).get(ready.fence.stage)
        lease = Lease(
            attempt_id, self._host.id, ready.lease_ms / 1000, self._clock.elapsed_s, 0, limit, begun=True
        )
        self._leases.grant(lease)

    def next_s(self) -> float | None:
        """When the next thing is due, on the scale of `Clock.elapsed_s`; None if nothing is."""
        moments = [lease.deadline_s for lease in self._leases if self._is_silent(lease.worker)]
        due = (self.tasks.next_due(), self.flows.tables.next_due())
        moments += [self._clock.seconds_of(each) for each in due if each is not None]
        return min(moments, default=None)

    def _is_silent(self, worker: str) -> bool:
        host = self._hosts.get(worker)
        return host is None or host.silent

    def why_endless(self, root_id: int) -> str | None:
        """Why a task, or a flow, cannot end; None if it can.

        Args:
            root_id: of its family: the task or flow at the top.
        """
        for row in self.tasks.unfinished:
            if root_id != (row.id if row.flow is None else row.flow.root_id):
                continue
            if row.error is not None and row.unhandled_s:
                return f"task {row.id} cannot end: {row.error.message}"
            if len(row.attempts) >= MOST_ATTEMPTS:
                return f"task {row.id} has had {MOST_ATTEMPTS:,} attempts, the last in {row.stage!r}"
        return None

    def running(self) -> dict[AttemptId, asyncio.Task[None]]:
        """The handlers that run, without those of a worker that is cut off."""
        found: dict[AttemptId, asyncio.Task[None]] = {}
        for host in self._hosts.values():
            host.require_healthy()
            if not host.silent:
                found |= host.running()
        return found

    def cancel(self, task_id: int) -> bool:
        """Cancels a task and its handler; returns False if it was final."""
        cancelled, entry = at_once(cancel_within(self.flows.connection, [task_id]))
        self._publish(entry)
        return bool(cancelled)

    def _publish(self, entry: OutboxEntry) -> None:
        """Adds the events and callbacks of an entry of the outbox."""
        self.events += map(orjson.loads, entry.events)
        self.callbacks += [
            SentCallback(each.target.url, orjson.loads(each.body), each.headers or {})
            for each in entry.callbacks
        ]

    def _cancel(self, ids: Sequence[int]) -> list[TaskRow]:
        """Answers the statement `tasks.cancel`."""
        cancelled = self.tasks.cancel(ids)
        self.revoke([row.attempt_id for row in cancelled])
        self.note_change()
        return cancelled

    def revoke(self, attempt_ids: Sequence[AttemptId]) -> None:
        """Ends attempts on the workers that run them; one that is cut off does not learn it."""
        for host in self._hosts.values():
            for attempt_id in attempt_ids:
                self._leases.end(attempt_id, host.id)
            if not host.silent:
                host.drop(attempt_ids)

    def lose_worker(self) -> None:
        """The worker dies: its handlers end, and nothing reports it."""
        lost = self._replace_host()
        del self._hosts[lost.id]
        lost.drop(list(lost.held))

    def cut_off_worker(self) -> None:
        """Nothing of the worker arrives any more; its handlers go on."""
        self._replace_host().silent = True

    def _replace_host(self) -> Host:
        self._beat()
        host, self._host = self._host, self._new_host()
        self.note_change()
        return host

    def reconnect_workers(self) -> None:
        """Commits results of workers that were cut off, and ends the attempts that they lost."""
        for host in [host for host in self._hosts.values() if host.silent]:
            host.silent = False
            results, host.results = host.results, []
            for result in results:
                self._commit(host.id, result)
            host.drop([one for one, ready in host.held.items() if not self.tasks.is_current(ready.fence)])
        self.note_change()

    def _receive(self, host: Host, result: StageResult) -> None:
        """Takes a result of a worker; large contexts are stored first, as the worker does."""
        ready = host.held.pop(result.fence.attempt_id, None)
        if ready is None or host.id not in self._hosts:
            return
        if result.context is not None:
            context = self.objects.keep(result.context, namespace_of(ready.type))
            result = dataclasses.replace(result, context=context)
        if host.silent:
            host.results.append(result)
            return
        self._commit(host.id, result)
        self.note_change()

    def _commit(self, worker: str, result: StageResult) -> None:
        """Commits a result as the stage processor reads it from Kafka."""
        _worker, results, _faults = decode_results(encode_results(worker, [result]))
        for each in results:
            self._end(worker, each)

    def _end(self, worker: str, result: StageResult) -> None:
        fence = result.fence
        self._leases.end(fence.attempt_id, worker)
        if not self.tasks.is_current(fence):
            current = self.tasks.late_attempt(fence) if result.outcome in GOOD else None
            if current is None:
                return
            # A worker may run the attempt that the late result ends.
            self.revoke([self.tasks.get(fence.id).attempt_id])
            result = dataclasses.replace(result, fence=fence._replace(attempt=current))
        state = self.tasks.retry_state(fence.id) if counts_failures(result.outcome) else None
        started = self.started.get(fence.attempt_id)
        ending = Ending.of(worker, result, state, self._chance)
        self._commit_ending(ending, started.at if started is not None and result.started_ms else None)

    def _commit_ending(self, ending: Ending, started_at: datetime | None) -> None:
        """Moves a task whose attempt has ended, with its events (`postgres.advance`)."""
        row = self.tasks.end(ending, started_at)
        if ending.outcome in SUSPENDING:
            self.flows.tables.suspend(row, ending)
        self._publish(at_once(enqueue(self.flows.connection, [end_event(columns_of(row), ending)])))

    def _beat(self) -> None:
        """Heartbeats of all workers but those that are lost or cut off."""
        now_s = self._clock.elapsed_s
        for host in self._hosts.values():
            if not host.silent:
                for attempt_id in host.held:
                    self._leases.beat(attempt_id, host.id, now_s, begun=host.has_begun(attempt_id))

    def _expire(self) -> None:
        self._beat()
        expired = self._leases.expired(self._clock.elapsed_s + 2 * _TICK_S)
        if not expired:
            return
        lost = {lease.worker for lease in expired}
        others = [lease for lease in self._leases if lease.worker in lost]
        ids = {lease.attempt_id.task_id for lease in (*expired, *others)}
        states = {one: state for one in ids if (state := self.tasks.retry_state(one)) is not None}
        ended, suspects = conclude_expired(
            list(map(ExpiredLease.of, expired)),
            states,
            others=list(map(ExpiredLease.of, others)),
            suspected=self._suspected,
            chance=self._chance,
        )
        for each in ended:
            if self.tasks.is_current(each.fence):
                ending = Ending(
                    fence=each.fence,
                    outcome=Outcome.EXPIRED,
                    conclusion=each.conclusion,
                    worker=each.lease.worker,
                    error=Failure(kind="LeaseExpired", message=each.lease.reason),
                )
                self._commit_ending(ending, None)
        holders = self._leases.holders()
        self._suspected = frozenset(one for one in self._suspected | suspects if one in holders)
        for lease in expired:
            if (silent := self._hosts.get(lease.worker)) is not None:
                # It knows the end of its lease by its own clock.
                silent.drop([lease.attempt_id])
        self.note_change()

    async def close(self) -> None:
        """Ends all handlers."""
        for host in self._hosts.values():
            await host.close()
