"""The state faults of the chaos scenario, by kind. Each knows what it removes and what must be
told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson

from penstock.checks.report import Rule
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.topology.topics import (
    CALLBACKS,
    CALLBACKS_DIVERTED,
    HEARTBEATS,
    REVOKED,
    STAGE_RESULTS,
    SUBMITTED,
    ready,
    service_group,
    workers_group,
)
from penstock.local.deployment import SERVICES
from tests.chaos.clocks import Clocks
from tests.chaos.scenario import STAGES
from tests.chaos.state_scenario import BATCH, FOREIGN_IDS, StateScenario
from tests.support.state_faults import cut_tail, delete_records, expire_group_offsets, recreate_topic

Inject = Callable[[], Awaitable[None]]

CLOCK_STEP_S = 7200
READY = ready("count", 8)
# Topics whose records follow from PostgreSQL: what is lost with them is done again.
DERIVED = (READY, HEARTBEATS, STAGE_RESULTS, CALLBACKS, CALLBACKS_DIVERTED, REVOKED)
# Submissions that are acknowledged by Kafka and not read when their log is changed.
UNREAD = 2 * BATCH


class StateFaults:
    """Makes the faults of one scenario.

    Args:
        scenario: the running scenario.
        clock: the clocks of its processes; None when this machine cannot step them.
    """

    def __init__(self, scenario: StateScenario, clock: Clocks | None) -> None:
        self._scenario = scenario
        self._clock = clock
        self._rng = scenario.rng

    def kinds(self) -> dict[str, Inject]:
        """Every kind, by its name in the table."""
        kinds: dict[str, Inject] = {
            "topics recreated": self._recreate,
            "tails cut": self._cut,
            "offsets expired": self._expire,
            "records deleted": self._delete,
            "foreign records": self._foreign,
            "standby promoted": self._promote,
            "killers": self._killers,
        }
        if self._clock is not None:
            kinds["clocks"] = self._clocks
        return kinds

    async def _unread(self) -> None:
        """Submits to the topic while task-sync is stopped; the caller holds the lock."""
        scenario = self._scenario
        for _ in range(UNREAD // BATCH):
            drafts = [scenario._draft(scenario.wave_number) for _ in range(BATCH)]
            await scenario.send(scenario.wave_number, drafts, over_http=False)

    async def _recreate(self) -> None:
        """`submitted` under a running or a stopped task-sync, and one topic of the others under its
        readers."""
        scenario = self._scenario
        await recreate_topic(scenario.settings, self._rng.choice(DERIVED))
        async with scenario.lock:
            if self._rng.random() < 0.5:
                await scenario.all_ingested()
                stored = await self._recreate_submitted()
            else:
                async with scenario.held("task-sync"):
                    await self._unread()
                    stored = await self._recreate_submitted()
                    await self._unread()
            # A running reader notices at the next record of each partition.
            await scenario.fill_partitions()
            await scenario.told(*((number, "replaced", at, 0, 0) for number, at in stored.items() if at))

    async def _recreate_submitted(self) -> dict[int, int]:
        scenario = self._scenario
        stored = await scenario.ingested()
        await scenario.lose_log({}, {})
        await recreate_topic(scenario.settings, SUBMITTED)
        return stored

    async def _cut(self) -> None:
        """Every log of a stopped broker, `submitted` included: at random places, some unread
        records with it."""
        scenario = self._scenario
        kafka = scenario.deployment.embedded_kafka
        assert kafka is not None
        data = scenario.deployment.data_dir / "kafka" / "data"
        async with scenario.lock:
            async with scenario.held("task-sync"):
                await self._unread()
                stored = await scenario.ingested()
                bounds = await scenario.bounds(SUBMITTED, *DERIVED)
                await kafka.stop()
                for partition, (begin, end) in bounds.items():
                    if end > begin:
                        cut_tail(data, partition, self._rng.randint(begin, end))
                await kafka.start(timeout_s=300.0)
                left = await scenario.submitted_ends()
                await scenario.lose_log({}, left)
                await self._unread()
            moved = [(n, "cut", at, left[n], 0) for n, at in stored.items() if at > left[n]]
            await scenario.told(*moved)

    async def _delete(self) -> None:
        """Unread records of `submitted`, and all records of one of the other topics."""
        scenario = self._scenario
        topic = self._rng.choice(DERIVED)
        await delete_records(
            scenario.settings, topic.name, {tp.partition: -1 for tp in await scenario.bounds(topic)}
        )
        async with scenario.lock:
            async with scenario.held("task-sync"):
                await self._unread()
                stored = await scenario.ingested()
                ends = await scenario.submitted_ends()
                begins = {n: self._rng.randint(min(stored.get(n, 0), end), end) for n, end in ends.items()}
                await delete_records(scenario.settings, SUBMITTED.name, begins)
                await scenario.lose_log(begins, ends)
            deleted = {n: begins[n] - at for n, at in stored.items() if begins[n] > at}
            await scenario.told(
                *((n, "deleted", stored[n], begins[n], count) for n, count in deleted.items())
            )

    async def _expire(self) -> None:
        """The offsets of the workers, or of one service."""
        scenario = self._scenario
        prefix = scenario.settings.prefix
        name = self._rng.choice(["workers", "heartbeats", "stages", "callbacks"])
        if name == "workers":
            async with scenario.without_workers():
                await expire_group_offsets(scenario.settings, workers_group(prefix, "count"))
            return
        async with scenario.held(name):
            await expire_group_offsets(scenario.settings, service_group(prefix, name))

    async def _promote(self) -> None:
        """A standby that lags: submissions over HTTP that only the old primary has are lost."""
        scenario, pair = self._scenario, self._scenario.pair
        scenario.gone_back()
        async with scenario.no_submissions():
            kept = set(scenario.over_http)
            await pair.detach()
        # The standby lags by these, and by what the platform does meanwhile.
        for number in range(UNREAD // BATCH):
            drafts = [scenario._draft(scenario.wave_number) for _ in range(BATCH)]
            async with scenario.lock:
                await scenario.send(scenario.wave_number, drafts, over_http=number % 2 == 0)
        async with scenario.no_submissions():
            await pair.promote()
            # No submission over HTTP can arrive before the end of the block.
            present = await scenario.keys()
            expected = {key for key in kept if scenario.ends.get(key) != "lost"}
            assert expected <= present, f"S11: the standby lacks {len(expected - present)} acknowledged tasks"
            lost = [key for key in scenario.over_http if key not in present and key not in scenario.ends]
            scenario.ends |= dict.fromkeys(lost, "lost")
        # Clients that submit again with their idempotency keys get new tasks.
        await scenario.submit_again(lost[::2])
        await pair.follow()

    async def _foreign(self) -> None:
        """Records of another deployment, and records that break their contracts, at every topic of
        ours."""
        scenario = self._scenario
        # Not quarantined tasks: each writer of the topic may report late on a lost attempt (H10).
        ids = await scenario.fetch_value(
            "SELECT array_agg(id) FROM (SELECT id FROM penstock.task WHERE state = 'succeeded' LIMIT 50) AS t"
        )
        junk = [None, b"", b"\xff", b"null", b"[]", b"{}", b"NaN", b"[" * 5_000, b" " * 1_000_000]
        forged = {"n": 3, "by": ["forged"] * 3, "wave": scenario.wave_number, "fails": None, "key": "forged"}
        results, beats, ready_records = [], [], []
        for task in [*FOREIGN_IDS, *(ids or [])]:
            for step, attempt in ((0, 0), (STAGES - 1, 0), (STAGES - 1, 1), (STAGES, 0)):
                stage = ("one", "two", "three", "four")[step]
                fence = {"id": task, "step": step, "stage": stage, "attempt": attempt}
                results.append({**fence, "outcome": "done", "context": forged})
                beats.append([task, step, attempt])
            ready_records.append(
                {"id": task, "type": "count", "step": 0, "stage": "one", "attempt": 0, "lease_ms": 3_000}
                | {"content_type": "json", "context": forged}
            )
        records: list[tuple[str, bytes | None]] = [
            (topic.name, value)
            for topic in (SUBMITTED, HEARTBEATS, STAGE_RESULTS, READY, REVOKED)
            for value in junk
        ]
        records.append((STAGE_RESULTS.name, orjson.dumps({"worker": "foreign", "results": results})))
        for kind in ("claim", "beat", "release"):
            beat = {"kind": kind, "worker": "foreign", "lease_ms": 3_000, "tasks": beats}
            records.append((HEARTBEATS.name, orjson.dumps(beat)))
        records += [
            (READY.name, orjson.dumps(value)) for value in ready_records if value["id"] in FOREIGN_IDS
        ]
        records.append((SUBMITTED.name, orjson.dumps({"type": "unknown", "context": forged})))
        self._rng.shuffle(records)
        async with scenario.lock, running(make_producer(scenario.settings)) as producer:
            for topic, value in records:
                await producer.send_and_wait(scenario.full_name(topic), value, key=b"k")

    async def _killers(self) -> None:
        """Two tasks that kill their worker, at a stage of their own."""
        scenario = self._scenario
        drafts = [scenario._draft(scenario.wave_number) for _ in range(2)]
        for draft in drafts:
            draft["context"] |= {"kills": self._rng.randrange(STAGES), "fails": None}
            # The ledger reads the key from the context of a task without a result.
            draft["context"].pop("padding", None)
        async with scenario.lock:
            keys = await scenario.send(scenario.wave_number, drafts, over_http=True)
        scenario.ends |= dict.fromkeys(keys, "quarantined")

    async def _clocks(self) -> None:
        """The clock of PostgreSQL, two hours ahead while back-offs begin: check finds what is due
        too late. And the clock of one other process, ahead or behind."""
        scenario, clock = self._scenario, self._clock
        assert clock is not None
        other = self._rng.choice([*SERVICES, "worker", "java"])
        clock.step(other, self._rng.choice([CLOCK_STEP_S, -CLOCK_STEP_S]))
        clock.step("postgres", CLOCK_STEP_S)
        ahead = "SELECT count(*) FROM penstock.task WHERE state = 'scheduled'"

        async def some_are_scheduled() -> bool:
            done = "SELECT count(*) FROM penstock.task WHERE finished_at IS NULL"
            return await scenario.fetch_value(ahead) > 0 or await scenario.fetch_value(done) == 0

        await scenario.wait_until_true(some_are_scheduled, "a task is scheduled by the clock ahead")
        clock.step("postgres", 0)
        clock.step(other, 0)

        async def none_is_ahead() -> bool:
            return not (await scenario.mend()).counts.get(Rule.AHEAD)

        # Another fault of the wave may lock rows, which a repair leaves out.
        await scenario.wait_until_true(none_is_ahead, "no time is ahead")
