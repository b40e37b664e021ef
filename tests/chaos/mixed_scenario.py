"""A scenario that mixes faults: state faults, outages, frozen processes and neighbours that flood,
beside a bystander that none of them concerns."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson

from penstock.client import Client
from tests.chaos import bystander
from tests.chaos.bystander import BOUND_S, RETURN_S, TAKEOVER_S, Bystander, Span
from tests.chaos.run_report import RUN
from tests.chaos.scenario import SEED, TIMEOUT_S
from tests.chaos.state_scenario import StateScenario

# Above the inline limit: each stage reads and stores an object.
PADDING = "x" * 5_000
# The share of tasks with large contexts, and of tasks whose callback target fails for a while.
LARGE_SHARE, TROUBLED_SHARE = 0.3, 0.3


class Excuse(Enum):
    """Until when a fault excuses the delays of the bystander."""

    # It concerns only others: nothing is excused.
    NOTHING = "nothing"
    # It takes away what all share: until some seconds after the return.
    RETURN = "return"
    # It freezes a replica: until another one has taken over.
    TAKEOVER = "takeover"


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: its name in the table.
        inject: injects the fault, and returns when it is over.
        excuse: which delays of the bystander it excuses.
    """

    name: str
    inject: Callable[[], Awaitable[None]]
    excuse: Excuse


class MixedScenario(StateScenario):
    """A state scenario with a bystander; services have two replicas.

    Attributes:
        bystander: measures the delays of the type `bystander`.
        killed: how often a fault has killed a process of a service.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bystander = Bystander(
            self.deployment.gateway_url, self.deployment.postgres, self._bystander_draft, self._passed
        )
        self.killed: Counter[str] = Counter()
        self._bystanders = 0

    # Submissions

    def _draft(self, wave: int) -> dict[str, Any]:
        draft = super()._draft(wave)
        if self.rng.random() < LARGE_SHARE:
            draft["context"]["padding"] = PADDING
        group = "troubled" if self.rng.random() < TROUBLED_SHARE else "quick"
        draft["callbacks"] = [self.rng.choice(self.callback_targets.urls(group, 10))]
        return draft

    def draft_of(self, type_name: str, key: str, **context: Any) -> dict[str, Any]:
        """A task of another type, with a quick callback target of its own type."""
        return {
            "type": type_name,
            "context": {"n": 0, "by": [], "wave": self.wave_number, "fails": None, "key": key, **context},
            "events": "all",
            "idempotency_key": key,
            "callbacks": self.callback_targets.urls(type_name, 1),
        }

    def _bystander_draft(self, key: str) -> dict[str, Any]:
        return self.draft_of(bystander.TYPE, key)

    def _passed(self, key: str, draft: dict[str, Any]) -> None:
        self._bystanders += 1
        self._note_submission(key, draft)

    def _note_submission(self, key: str, draft: dict[str, Any]) -> None:
        self._acknowledged.append((key, draft["context"]["wave"]))
        self.over_http.append(key)
        self._drafts[key] = draft

    async def submit_at_once(self, drafts: Sequence[dict[str, Any]], *, clients: int) -> None:
        """Submits over HTTP with several clients, without regard to others."""
        async with Client(self.deployment.gateway_url, patience_s=TIMEOUT_S) as client:
            shares = [drafts[number::clients] for number in range(clients)]
            await asyncio.gather(*(client.submit_many(share) for share in shares if share))
        for draft in drafts:
            self._note_submission(draft["idempotency_key"], draft)
            self._bystanders += draft["type"] == bystander.TYPE

    @asynccontextmanager
    async def no_submissions(self) -> AsyncIterator[None]:
        """Holds all submissions back for the time of the block."""
        async with super().no_submissions(), self.bystander.held():
            yield

    async def _ended(self, count: int) -> bool:
        """Whether all tasks have ended but those of the bystander, which go on."""
        own = [end for key, end in self.ends.items() if not key.startswith(f"{bystander.TYPE}-")]
        absent = sum(end in ("lost", "uncertain") for end in own)
        counts = await self.fetch_value(
            "SELECT ARRAY[count(*) FILTER (WHERE finished_at IS NULL), count(*)] FROM penstock.task "
            f"WHERE type <> '{bystander.TYPE}'"
        )
        return counts[0] == 0 and counts[1] >= len(self._acknowledged) - self._bystanders - absent

    # Faults

    async def mixed_wave(self, kinds: Sequence[Kind], *, tasks: int) -> None:
        """One wave with several faults at the same time, beside the bystander."""
        name = " + ".join(kind.name for kind in kinds)

        async def inject() -> None:
            async with asyncio.TaskGroup() as group:
                for kind in kinds:
                    group.create_task(self._inject(kind))

        self.say(f"wave {name}")
        begin_s = time.monotonic()
        async with self.bystander.passing(lambda key: self.ends.get(key) == "lost"):
            await self.wave(name, inject, tasks=tasks)
        sys.stderr.write(f"\n{name}: {time.monotonic() - begin_s:.0f} s; ended {self.ended_by_itself()}")
        await self.mended()
        self.bystander.recovered()

    async def _inject(self, kind: Kind) -> None:
        self.say(kind.name)
        span = Span(kind.name, time.monotonic())
        if kind.excuse is Excuse.NOTHING:
            span.excused_s = span.begin_s
        elif kind.excuse is Excuse.TAKEOVER:
            span.excused_s = span.begin_s + TAKEOVER_S
        self.bystander.spans.append(span)
        await kind.inject()
        span.over_s = time.monotonic()
        if kind.excuse is Excuse.RETURN:
            span.excused_s = span.over_s + RETURN_S
        self.say(f"over: {kind.name}")

    def ended_by_itself(self) -> dict[str, int]:
        """How often each process of a service has ended, without those that a fault killed."""
        return dict(self.exits_by_process() - self.killed)

    async def warm_up(self) -> None:
        """Waits until every type has a worker that works."""
        await self.submit_at_once(
            [self.draft_of(name, f"first-{name}") for name in (bystander.TYPE, "flood")], clients=1
        )
        running = "SELECT count(*) FROM penstock.task WHERE finished_at IS NULL"

        async def ended() -> bool:
            return await self.fetch_value(running) == 0

        await self.wait_until_true(ended, "a first task of each type has ended")

    def workers_of(self, type_name: str) -> list[Any]:
        """The workers of a type."""
        return [worker for worker in self.workers.running if self.workers.type_of(worker) == type_name]

    # Verification

    async def verify(self) -> None:
        """As the other state scenarios; and nothing delayed the bystander, and no service ended
        again and again."""
        ended = self.ended_by_itself()
        RUN.add_sentence(
            f"mixed: services ended by themselves: {ended}; killed by faults: {dict(self.killed)}"
        )
        try:
            await super().verify()
        finally:
            for sentence in self.bystander.figures():
                RUN.add_sentence(sentence)
        late = [each for each in self.bystander.delays() if each.counted_s > BOUND_S]
        assert not late, (
            f"seed {SEED}: {len(late)} delayed by others: {late[:10]}; {self.deployment.log_file}"
        )
        assert max(ended.values(), default=0) <= 1, f"seed {SEED}: {ended}; {self.deployment.log_file}"

    async def _verify_callbacks(self) -> None:
        await super()._verify_callbacks()
        keys = await self.fetch_value(
            "SELECT json_object_agg(c.id, t.idempotency_key) FROM penstock.callback c JOIN penstock.task t ON t.id = c.task_id "
            f"WHERE t.idempotency_key LIKE '{bystander.TYPE}-%' AND c.id LIKE '%-succeeded-%'"
        )
        calls = self.callback_targets.calls_of(bystander.TYPE)
        self.bystander.called(first_arrivals(calls, orjson.loads(keys)))


def first_arrivals(calls: Sequence[tuple[float, str]], keys: dict[str, str]) -> dict[str, float]:
    """When the first call of each task's callback arrived, by key."""
    arrivals: dict[str, float] = {}
    for at_s, name in calls:
        if name in keys:
            arrivals.setdefault(keys[name], at_s)
    return arrivals
