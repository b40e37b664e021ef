"""Sends heartbeats for the attempts in flight, and stops attempts that are cut off.

Drives `core.heartbeat_queue`, with a queue for each length of lease and limit of attempts. The
heartbeats of one step are one record. After `CUT_OFF` of a lease without a confirmed heartbeat the
worker stops the attempt itself, because another worker may begin it a moment later.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from penstock.concurrency.retry import WORKER_BACKOFF, retry_until_available
from penstock.contracts.heartbeat import Heartbeat, Kind, LeaseTerms
from penstock.contracts.progress import Progress, in_parts
from penstock.core.attempt import AttemptId
from penstock.core.heartbeat_queue import Answer, HeartbeatPolicy, HeartbeatQueue
from penstock.errors import Fatal, Throttled, Unavailable

log = logging.getLogger(__name__)

# The share of a lease without a confirmed heartbeat after which a worker stops its attempts (W6).
CUT_OFF = 0.8
# Most attempts of one heartbeat record.
HEARTBEATS_PER_RECORD = 1_000
# Most heartbeats a second of one worker; they are cheap, because a record has many.
LIMIT_PER_S = 10_000.0
# Longer steps make fewer and fuller records.
MAX_STEP_S = 5.0


class HeartbeatTransport(Protocol):
    """Sends heartbeats to Kafka or to a gateway."""

    async def try_heartbeat(self, heartbeat: Heartbeat) -> Mapping[AttemptId, Answer]:
        """Sends once; returns the answer for each attempt.

        Raises:
            Throttled: it was not accepted, and the receiver asks for a pause.
            Unavailable: it was not accepted.
        """


class HeartbeatSender:
    """Sends heartbeats for the attempts of one worker.

    Args:
        transport: sends them.
        worker_id: of the worker.
        clock: seconds on a monotonic clock.
        on_lost: called with attempts that this worker has lost: cut off, or gone by the platform's
            answer.
    """

    def __init__(
        self,
        transport: HeartbeatTransport,
        worker_id: str,
        clock: Callable[[], float],
        on_lost: Callable[[list[AttemptId]], object],
    ) -> None:
        self._transport = transport
        self._worker_id = worker_id
        self._clock = clock
        self._on_lost = on_lost
        self._queues: dict[LeaseTerms, HeartbeatQueue[AttemptId]] = {}
        self._next_step_s: dict[LeaseTerms, float] = {}
        # Suspects that wait for their turn, with the terms of their claims.
        self._waiting: dict[AttemptId, LeaseTerms] = {}
        self._wake = asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._fatal: Fatal | None = None

    @property
    def room(self) -> float:
        """How many more attempts can be kept alive, with any length of lease."""
        return min((queue.room for queue in self._queues.values()), default=math.inf)

    def add(self, claims: Iterable[Heartbeat], claimed_s: float) -> None:
        """Adds the attempts of claims sent at `claimed_s`; heartbeats have the claims' terms."""
        for claim in claims:
            terms = claim.terms
            queue = self._queues.get(terms)
            if queue is None:
                policy = _policy(claim.lease_ms / 1000)
                queue = self._queues[terms] = HeartbeatQueue(policy, claimed_s)
                self._next_step_s[terms] = claimed_s + policy.step_s
                self._wake.set()
            for attempt_id in claim.tasks:
                queue.add(attempt_id, claimed_s)
                if not claim.begun:
                    self._waiting[attempt_id] = terms

    def send_waiting(self) -> None:
        """Tells the platform now which attempts wait: a gateway claims them as begun."""
        by_terms: dict[LeaseTerms, list[AttemptId]] = {}
        for attempt_id, terms in self._waiting.items():
            by_terms.setdefault(terms, []).append(attempt_id)
        for terms, attempt_ids in by_terms.items():
            self._start_sending(self._queues[terms], terms, attempt_ids, self._clock())

    async def announce(self, attempt_id: AttemptId) -> bool:
        """Tells the platform that a suspect begins; tries again while the platform is unavailable.

        Returns False for an attempt that this worker has lost.

        Raises:
            Fatal: no heartbeat can be sent any more.
        """
        terms = self._waiting.get(attempt_id)
        if terms is None:
            return False
        answers = await retry_until_available(
            lambda: self._transport.try_heartbeat(self._beat(terms, [attempt_id])),
            waiting_for="begin of a suspect",
            backoff=WORKER_BACKOFF,
        )
        if self._waiting.pop(attempt_id, None) is None:
            return False
        if answers[attempt_id] is Answer.GONE:
            self.remove([attempt_id])
            self._on_lost([attempt_id])
            return False
        return True

    def keeps_alive(self, attempt_id: AttemptId) -> bool:
        """Whether heartbeats are sent for an attempt."""
        return any(attempt_id in queue for queue in self._queues.values())

    async def report(self, reports: Mapping[AttemptId, Progress]) -> dict[AttemptId, Progress]:
        """Sends reports of progress, which count as heartbeats; returns those to send again.

        A report that is refused is dropped, and its attempt gets its heartbeat as usual.

        Raises:
            Fatal: no heartbeat can be sent any more.
        """
        again: dict[AttemptId, Progress] = {}
        for terms, queue in list(self._queues.items()):
            of_terms = ((each, report) for each, report in reports.items() if each in queue)
            for part in in_parts(of_terms):
                if not await self._send_reports(queue, terms, part):
                    again |= part
        return again

    async def _send_reports(
        self, queue: HeartbeatQueue[AttemptId], terms: LeaseTerms, reports: dict[AttemptId, Progress]
    ) -> bool:
        """Sends one record of reports; False when it must be sent again."""
        sent_s = self._clock()
        try:
            answers = await self._transport.try_heartbeat(self._beat(terms, list(reports), progress=reports))
        except Throttled as error:
            self._pause(error, len(reports))
            return False
        except Unavailable:
            # The next heartbeat logs an outage that lasts.
            return False
        for attempt_id, answer in answers.items():
            if answer is Answer.CONFIRMED:
                queue.add_contact(attempt_id, sent_s)
        self._stop_gone(answers)
        return True

    def remove(self, attempt_ids: list[AttemptId]) -> None:
        """Ends the heartbeats of attempts."""
        for queue in self._queues.values():
            queue.discard(attempt_ids)
        if self._waiting:
            for attempt_id in attempt_ids:
                self._waiting.pop(attempt_id, None)

    async def run(self) -> None:
        """Sends heartbeats until cancelled.

        Raises:
            Fatal: no heartbeat can be sent any more.
        """
        try:
            while True:
                due_s = min(self._next_step_s.values(), default=math.inf)
                wait_s = None if due_s == math.inf else max(0.0, due_s - self._clock())
                # Woken when a queue is new: its lease may be shorter than all others.
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
                self._wake.clear()
                if self._fatal is not None:
                    raise self._fatal
                self.step()
        finally:
            for sending in self._sending:
                sending.cancel()

    def step(self) -> None:
        """Runs the step of every queue that is due."""
        now_s = self._clock()
        for terms, queue in list(self._queues.items()):
            if now_s < self._next_step_s[terms]:
                continue
            if not len(queue):
                # Each task may have a lease of its own.
                del self._queues[terms], self._next_step_s[terms]
                continue
            self._next_step_s[terms] = now_s + queue.policy.step_s
            self._drop_cut_off(queue, now_s)
            due = queue.step(now_s)
            for begin in range(0, len(due), HEARTBEATS_PER_RECORD):
                self._start_sending(queue, terms, due[begin : begin + HEARTBEATS_PER_RECORD], now_s)

    def _start_sending(
        self,
        queue: HeartbeatQueue[AttemptId],
        terms: LeaseTerms,
        attempt_ids: list[AttemptId],
        now_s: float,
    ) -> None:
        waiting = [attempt_id for attempt_id in attempt_ids if attempt_id in self._waiting]
        begun = attempt_ids
        if waiting:
            begun = [attempt_id for attempt_id in attempt_ids if attempt_id not in self._waiting]
        for of_kind, has_begun in ((begun, True), (waiting, False)):
            if of_kind:
                sending = asyncio.create_task(self._send(queue, terms, of_kind, now_s, begun=has_begun))
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)

    def drop_cut_off(self, attempt_ids: Collection[AttemptId]) -> None:
        """Drops those of the attempts that are cut off, now instead of at the next step.

        Before results are sent: after a stall of the process, results and overdue steps run in any
        order, and a result must not be sent for an attempt that another worker may have begun.
        """
        now_s = self._clock()
        for queue in self._queues.values():
            self._drop_cut_off(queue, now_s, attempt_ids)

    def _drop_cut_off(
        self, queue: HeartbeatQueue[AttemptId], now_s: float, among: Collection[AttemptId] | None = None
    ) -> None:
        limit_s = CUT_OFF * queue.policy.timeout_s
        lost = queue.silent(now_s, limit_s, among)
        if lost:
            log.error(
                "Heartbeats did not reach the platform for too long; stopping their attempts",
                extra={
                    "event": "attempts_cut_off",
                    "attempts": len(lost),
                    "silent_s": limit_s,
                    "lease_s": queue.policy.timeout_s,
                },
            )
            self.remove(lost)
            self._on_lost(lost)

    async def _send(
        self,
        queue: HeartbeatQueue[AttemptId],
        terms: LeaseTerms,
        attempt_ids: list[AttemptId],
        sent_s: float,
        *,
        begun: bool,
    ) -> None:
        # An unavailable server counts as throttling: these attempts come first at the next step,
        # without a retry count.
        answers: Mapping[AttemptId, Answer] = dict.fromkeys(attempt_ids, Answer.THROTTLED)
        try:
            answers = await self._transport.try_heartbeat(self._beat(terms, attempt_ids, begun=begun))
            self._failures = 0
        except Throttled as error:
            self._pause(error, len(attempt_ids))
        except Unavailable as error:
            self._failures += 1
            log.warning(
                "Heartbeats did not reach the platform",
                extra={"event": "heartbeats_failed", "failures": self._failures, "error": error},
            )
        except Fatal as error:
            self._fatal = error
            self._wake.set()
        finally:
            for attempt_id in attempt_ids:
                queue.answer(attempt_id, answers[attempt_id], sent_s)
        self._stop_gone(answers)

    def _beat(self, terms: LeaseTerms, attempt_ids: list[AttemptId], **fields: Any) -> Heartbeat:
        return Heartbeat(
            Kind.BEAT, self._worker_id, terms.lease_ms, attempt_ids, terms.max_attempts, **fields
        )

    def _pause(self, error: Throttled, attempts: int) -> None:
        log.warning(
            "Heartbeats are throttled",
            extra={
                "event": "heartbeats_throttled",
                "attempts": attempts,
                "delay_s": error.retry_after_s,
                "error": error,
            },
        )
        # All queues: the receiver requests a pause of the whole worker.
        for paused in self._queues.values():
            paused.pause(self._clock(), error.retry_after_s)

    def _stop_gone(self, answers: Mapping[AttemptId, Answer]) -> None:
        gone = [attempt_id for attempt_id, answer in answers.items() if answer is Answer.GONE]
        if not gone:
            return
        log.info(
            "Attempts are gone by the platform's answer; stopping them",
            extra={
                "event": "attempts_gone",
                "attempts": len(gone),
                "tasks": [g.task_id for g in gone[:5]],
            },
        )
        self.remove(gone)
        self._on_lost(gone)


def _policy(timeout_s: float) -> HeartbeatPolicy:
    policy = HeartbeatPolicy.within(timeout_s, limit_per_s=LIMIT_PER_S)
    step_s = min(MAX_STEP_S, timeout_s / 30)
    return dataclasses.replace(policy, step_s=step_s, rate_per_s=1 / step_s)
