"""Signs of life of what a worker has in hand, and what it does when the platform no longer hears them.

Drives `core.beats`, a queue for each length of lease and limit of tries. Beats of a step travel as one record. Who is not heard of for
`CUT_OFF` of a lease stops by itself: a moment later somebody else may begin the same attempt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.core.beats import Answer, BeatPolicy, BeatQueue
from penstock.core.leases import Key
from penstock.errors import Fatal, Throttled, Unavailable
from penstock.worker.hand import Hand

log = logging.getLogger(__name__)

# The share of a lease after which a worker that is not heard gives its attempts up (W6).
CUT_OFF = 0.8
# Beats of so many attempts go into one record.
BEATS_PER_RECORD = 1_000
# What the platform takes from one worker; many beats a record make that cheap.
LIMIT_PER_S = 10_000.0
# Longer steps make fewer and fuller records.
LONGEST_STEP_S = 5.0


class Terms(NamedTuple):
    """What attempts have in common whose beats go into one record (see `Heartbeat`)."""

    lease_ms: int
    max_attempts: int | None


class Hearing(Protocol):
    """Whoever hears beats: Kafka, or a gateway."""

    async def try_heartbeat(self, heartbeat: Heartbeat) -> Mapping[Key, Answer]:
        """Sends once; what came of each attempt's beat.

        Raises:
            Throttled: nobody heard it, and nobody wants to hear more for a while.
            Unavailable: nobody heard it.
        """


class Heart:
    """Beats for the attempts of one worker.

    Args:
        link: the way to whoever hears beats.
        worker_id: who beats.
        clock: seconds that only grow.
        give_up: told of attempts that are beaten no more: nobody has heard of them for too long, or they are gone.
    """

    def __init__(
        self,
        link: Hearing,
        worker_id: str,
        clock: Callable[[], float],
        give_up: Callable[[list[Key]], object],
    ) -> None:
        self._link = link
        self._worker_id = worker_id
        self._clock = clock
        self._give_up = give_up
        self._queues: dict[Terms, BeatQueue[Key]] = {}
        self._next_s: dict[Terms, float] = {}
        self._another = asyncio.Event()
        self._freed = asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()
        self._vain = 0
        self._broken: Fatal | None = None

    @property
    def room(self) -> float:
        """How many more attempts can be kept alive, whatever the length of their leases."""
        return min((queue.room for queue in self._queues.values()), default=math.inf)

    async def wait_room(self) -> None:
        """Waits until one more attempt can be kept alive."""
        while self.room <= 0:
            self._freed.clear()
            await self._freed.wait()

    def take(self, claims: Iterable[Heartbeat], heard_s: float) -> None:
        """Attempts whose claims were sent at `heard_s`; they are beaten on the same terms."""
        for claim in claims:
            terms = Terms(claim.lease_ms, claim.max_attempts)
            queue = self._queues.get(terms)
            if queue is None:
                policy = _policy(claim.lease_ms / 1000)
                queue = self._queues[terms] = BeatQueue(policy, heard_s)
                self._next_s[terms] = heard_s + policy.step_s
                self._another.set()
            for key in claim.tasks:
                queue.add(key, heard_s)

    def let_go(self, keys: list[Key]) -> None:
        """Nothing more is to be said of these."""
        for queue in self._queues.values():
            queue.discard(keys)
        self._freed.set()

    async def run(self) -> None:
        """Beats until cancelled.

        Raises:
            Fatal: nothing can be sent any more.
        """
        try:
            while True:
                due_s = min(self._next_s.values(), default=math.inf)
                wait_s = None if due_s == math.inf else max(0.0, due_s - self._clock())
                # Woken for a lease shorter than all before.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._another.wait(), wait_s)
                self._another.clear()
                if self._broken is not None:
                    raise self._broken
                self.step()
        finally:
            for sending in self._sending:
                sending.cancel()

    def step(self) -> None:
        """A step of every queue whose turn it is."""
        now_s = self._clock()
        for terms, queue in self._queues.items():
            if now_s < self._next_s[terms]:
                continue
            self._next_s[terms] = now_s + queue.policy.step_s
            self._cut_off(queue, now_s)
            due = queue.step(now_s)
            for begin in range(0, len(due), BEATS_PER_RECORD):
                sending = asyncio.create_task(
                    self._send(queue, terms, due[begin : begin + BEATS_PER_RECORD], now_s)
                )
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)

    def cut_off(self, keys: Collection[Key]) -> None:
        """Gives up those of the attempts that were not heard of for too long, now and not at the next step.

        For whoever is about to speak of them: after a standstill all that is overdue comes in any order.
        """
        now_s = self._clock()
        for queue in self._queues.values():
            self._cut_off(queue, now_s, keys)

    def _cut_off(self, queue: BeatQueue[Key], now_s: float, among: Collection[Key] | None = None) -> None:
        most_s = CUT_OFF * queue.policy.timeout_s
        lost = queue.silent(now_s, most_s, among)
        if lost:
            log.error(
                "cut off: %d attempts were not heard of for %g s of their %g: giving them up",
                len(lost),
                most_s,
                queue.policy.timeout_s,
            )
            queue.discard(lost)
            self._freed.set()
            self._give_up(lost)

    async def _send(self, queue: BeatQueue[Key], terms: Terms, keys: list[Key], sent_s: float) -> None:
        # Whoever is away is no attempt's fault: they come first again at the next step.
        answers: Mapping[Key, Answer] = dict.fromkeys(keys, Answer.THROTTLED)
        try:
            beat = Heartbeat(Kind.BEAT, self._worker_id, terms.lease_ms, keys, terms.max_attempts)
            answers = await self._link.try_heartbeat(beat)
            self._vain = 0
        except Throttled as error:
            log.warning("%d beats wait %g s: %s", len(keys), error.retry_after_s, error)
            # Of every length of lease: it is the hearer who is busy.
            for each in self._queues.values():
                each.hold_back(self._clock(), error.retry_after_s)
        except Unavailable as error:
            self._vain += 1
            log.warning("%d beats in a row were not heard: %s", self._vain, error)
        except Fatal as error:
            self._broken = error
            self._another.set()
        finally:
            for key in keys:
                queue.answer(key, answers[key], sent_s)
        gone = [key for key in keys if answers[key] is Answer.GONE]
        if gone:
            log.info("%d attempts are gone: %s", len(gone), gone[:5])
            self._freed.set()
            self._give_up(gone)


async def wait_room(hand: Hand, heart: Heart, timeout_s: float) -> bool:
    """Waits until there is room in both, at most `timeout_s` seconds; returns whether there is."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            # While one is waited for, another type's puller may fill the other.
            while not (hand.room > 0 and heart.room > 0):
                await hand.wait_room(timeout_s)
                await heart.wait_room()
    return hand.room > 0 and heart.room > 0


def _policy(timeout_s: float) -> BeatPolicy:
    usual = BeatPolicy.within(timeout_s, limit_per_s=LIMIT_PER_S)
    step_s = min(LONGEST_STEP_S, timeout_s / 30)
    return dataclasses.replace(usual, step_s=step_s, rate_per_s=1 / step_s)
