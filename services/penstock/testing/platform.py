"""The services of a pipeline, in memory: they commit results and expire leases.

Results take the way of real ones: they are encoded and read again, large contexts go to the object
store, and `penstock.core` decides where a task goes. Flows are advanced by the code of the service
`flows`. One module, because all of these services change the same rows.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from penstock.contracts.context import INLINE_LIMIT_BYTES, Context
from penstock.contracts.context_digest import with_digest
from penstock.contracts.inbound import decode_results
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import Failure, StageResult, encode_results
from penstock.contracts.submission import Submission
from penstock.contracts.task_type import TaskType
from penstock.core.access import namespace_of
from penstock.core.attempt import AttemptId
from penstock.core.completion import NO_HANDLER, SUSPENDING, Outcome
from penstock.core.endings import (
    GOOD,
    ExpiredLease,
    conclude_expired,
    conclude_result,
    counts_failures,
    expiry_reason,
)
from penstock.core.leases import Lease, LeaseWheel
from penstock.postgres.advance import Ending, cancel_within, end_event
from penstock.postgres.outbox import PendingEvent, enqueue
from penstock.testing.clock import Clock
from penstock.testing.flows import Flows, at_once
from penstock.testing.hosts import Host, Records
from penstock.testing.models import NoEnd
from penstock.testing.objects import KeptObjects
from penstock.testing.published import Published
from penstock.testing.tables import Tasks
from penstock.testing.task_rows import TaskRow
from penstock.testing.task_statements import columns_of, has_events
from penstock.worker.contexts import ResultContexts
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
        published: events and callbacks.
        objects: large contexts.
        records: logs and progress.
        started: attempts that have been claimed.
        changes: grows with each change.
        changed: set by each change.
        missing: why the current stage of a task has no handler, by task id.
    """

    def __init__(
        self,
        clock: Clock,
        types: Mapping[str, TaskType],
        registered: Registered,
        chance: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._types = types
        self._registered = registered
        self._chance = chance
        self.objects = KeptObjects()
        self.published = Published()
        self.tasks = Tasks(clock, types, lambda row, before: self.flows.tables.end_task(row, before))  # noqa: PLW0108 (the flows follow)
        self.flows = Flows(clock, types, self.tasks, self.objects, self._cancel, self.published.add)
        self.records = Records()
        self.started: dict[AttemptId, Started] = {}
        self.changes = 0
        self.changed = asyncio.Event()
        self.missing: dict[int, str] = {}
        self._leases = LeaseWheel(_TICK_S)
        self._suspected: frozenset[str | None] = frozenset()
        # Attempts whose results wait for the object store.
        self._storing: dict[AttemptId, asyncio.Task[None]] = {}
        self._failed: BaseException | None = None
        # Attempts that began in the present moment, by task.
        self._begun: Counter[int] = Counter()
        self._counted_s = 0.0
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

    async def submit(self, submission: Submission) -> tuple[TaskRow, bool]:
        """Inserts a task as the gateway does; returns it, and whether it is new.

        Raises:
            UnknownType: its type is not registered.
            IdempotencyConflict: an earlier task with its idempotency key has another context.
        """
        task_type = self._types.get(submission.type)
        if task_type is not None and task_type.is_strict:
            submission = with_digest(submission)
        context = await self.objects.check_in(submission.context, namespace_of(submission.type))
        found = self.tasks.insert(dataclasses.replace(submission, context=context))
        self.note_change()
        return found

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
        attempt_id = ready.fence.attempt_id
        if self._counted_s != self._clock.elapsed_s:
            self._counted_s = self._clock.elapsed_s
            self._begun.clear()
        self._begun[attempt_id.task_id] += 1
        if self._begun[attempt_id.task_id] > MOST_ATTEMPTS:
            raise NoEnd(
                f"task {attempt_id.task_id} has begun {MOST_ATTEMPTS:,} attempts in one moment, the last in "
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
            if (reason := self.missing.get(row.id)) is not None:
                return f"task {row.id} cannot end: {reason}"
            if len(row.attempts) >= MOST_ATTEMPTS:
                return f"task {row.id} has had {MOST_ATTEMPTS:,} attempts, the last in {row.stage!r}"
        return None

    def running(self) -> dict[AttemptId, asyncio.Task[None]]:
        """The handlers that run, without those of a worker that is cut off."""
        if self._failed is not None:
            raise self._failed
        found = dict(self._storing)
        for host in self._hosts.values():
            host.require_healthy()
            if not host.silent:
                found |= host.running()
        return found

    def cancel(self, task_id: int) -> bool:
        """Cancels a task and its handler; returns False if it was final."""
        cancelled, entry = at_once(cancel_within(self.flows.connection, [task_id]))
        self.published.add(entry)
        return bool(cancelled)

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
        host, self._host = self._host, self._new_host()
        now_s = self._clock.elapsed_s
        for attempt_id in host.held:
            self._leases.beat(attempt_id, host.id, now_s, begun=host.has_begun(attempt_id))
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
        context = result.context
        if context is None or context.data is None or len(context.data) <= INLINE_LIMIT_BYTES:
            self._arrive(host, result)
            return

        async def store() -> None:
            stored = await ResultContexts(self.objects, lambda _attempt_id: ready.type).stored(result)
            if stored is not None and host.id in self._hosts:
                self._arrive(host, stored)

        task = asyncio.ensure_future(store())
        self._storing[result.fence.attempt_id] = task
        task.add_done_callback(partial(self._stored, result.fence.attempt_id))

    def _stored(self, attempt_id: AttemptId, task: asyncio.Task[None]) -> None:
        del self._storing[attempt_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = error
            self.note_change()

    def _arrive(self, host: Host, result: StageResult) -> None:
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
            fence = fence._replace(attempt=current)
        counted = counts_failures(result.outcome, handed_back=result.handed_back)
        conclusion = conclude_result(
            fence,
            result.outcome,
            self.tasks.retry_state(fence.id) if counted else None,
            next_stage=result.next_stage,
            delay_s=None if result.delay_ms is None else result.delay_ms / 1000,
            permanent=result.permanent,
            max_attempts=result.max_attempts,
            no_handler=result.no_handler,
            chance=self._chance,
        )
        started = self.started.get(result.fence.attempt_id)
        ending = Ending(
            fence=fence,
            outcome=result.outcome,
            conclusion=conclusion,
            worker=worker,
            context=result.context,
            next_stage=result.next_stage,
            terms=result.terms,
            error=result.error_of(conclusion),
        )
        row = self._commit_ending(ending, started.at if started is not None and result.started_ms else None)
        if result.error is not None and result.error.kind == NO_HANDLER:
            self.missing[row.id] = result.error.message

    def _commit_ending(self, ending: Ending, started_at: datetime | None) -> TaskRow:
        """Moves a task whose attempt has ended, with its events (`postgres.advance`)."""
        row = self.tasks.end(ending, started_at)
        if ending.outcome in SUSPENDING:
            self.flows.tables.suspend(row, ending)
        if has_events(row):
            columns = columns_of(row)
            pending = PendingEvent(end_event(columns, ending), row.callbacks, row.events, None)
            self.published.add(at_once(enqueue(self.flows.connection, [pending])))
        return row

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
        found = [self.tasks.retry_state(lease.attempt_id.task_id) for lease in (*expired, *others)]
        states = {
            lease.attempt_id.task_id: state
            for lease, state in zip((*expired, *others), found, strict=True)
            if state is not None
        }
        ended, suspects = conclude_expired(
            [_expired(lease) for lease in expired],
            states,
            others=[_expired(lease) for lease in others],
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
        for storing in [*self._storing.values()]:
            storing.cancel()


def _expired(lease: Lease) -> ExpiredLease:
    reason = expiry_reason(lease.worker, lease.timeout_s)
    return ExpiredLease(lease.attempt_id, lease.worker, reason, lease.max_attempts, lease.begun)
