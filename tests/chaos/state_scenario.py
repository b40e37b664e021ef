"""A scenario whose faults change the state of Kafka and PostgreSQL while tasks and callbacks flow.

Each batch of submissions has a lock. A fault holds it at the moment that decides what may be lost,
so that the loss is known by name: submissions that ingest has not read when their log is changed,
and submissions that only the old primary has. Everything else must succeed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg
import orjson
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from penstock.checks.app import Report, check
from penstock.checks.report import Rule
from penstock.client import Client
from penstock.errors import PenstockError
from penstock.kafka.client.connection import make_consumer, running
from penstock.kafka.topology.topics import SUBMITTED, Topic
from penstock.settings import Platform
from tests.chaos import ledger, state_ledger
from tests.chaos.run_report import RUN, Row
from tests.chaos.scenario import SEED, TIMEOUT_S, Scenario
from tests.chaos.standby import Pair
from tests.load.callbacks.paced_load import Targets
from tests.support.services import producing_when_available, read

BATCH = 10
# Ids in the ready records of foreign writers.
FOREIGN_IDS = {1, 2, 3}
# A position of ingest that was moved: partition, reason, stored offset, offset where it resumed,
# deleted records.
Move = tuple[int, str, int, int, int]


class StateScenario(Scenario):
    """A scenario with state faults; its `pair` and `callback_targets` must be set before the first
    wave.

    Attributes:
        pair: the servers of the database.
        callback_targets: the process of the targets.
        worker_prefix: beginning of the command of a worker.
        lock: held by each batch of submissions.
        ends: what must become of a submission unless it must succeed, by key (`state_ledger`).
        wave_number: number of the current wave.
    """

    pair: Pair
    callback_targets: Targets
    worker_prefix: Sequence[str] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = asyncio.Lock()
        self.ends: dict[str, str] = {}
        self.wave_number = 0
        # Keys on the current log of `submitted`, by partition and offset.
        self._log: dict[tuple[int, int], str] = {}
        # Keys of each fault's submissions over HTTP that are acknowledged.
        self.over_http: list[str] = []
        self._drafts: dict[str, dict[str, Any]] = {}
        self._moves: list[Move] = []
        self._gone_back: set[int] = set()
        self._exits_before: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.missing: set[int] = set()
        self.statuses: Counter[int] = Counter()
        self._workers_pause = asyncio.Lock()

    @property
    def settings(self) -> Platform:
        """Settings that lead to the deployment."""
        return Platform.load(self.deployment.environment)

    def full_name(self, topic: str) -> str:
        """The name of a topic with the deployment's prefix."""
        return f"{self.settings.prefix}{topic}"

    # Submissions

    async def _submit(self, wave: int, count: int) -> None:
        self.wave_number = wave
        drafts = [self._draft(wave) for _ in range(count)]
        for number, begin in enumerate(range(0, count, BATCH)):
            async with self.lock:
                await self.send(wave, drafts[begin : begin + BATCH], over_http=number % 2 == 0)

    async def send(
        self, wave: int, drafts: Sequence[dict[str, Any]], *, over_http: bool, partition: int | None = None
    ) -> list[str]:
        """Submits one batch and returns its keys; the caller holds `lock`."""
        keys = [draft["context"]["key"] for draft in drafts]
        if over_http:
            async with Client(self.deployment.gateway_url, patience_s=TIMEOUT_S) as client:
                await client.submit_many(list(drafts))
            self.over_http += keys
            self._drafts |= dict(zip(keys, drafts, strict=True))
            self._acknowledged += [(key, wave) for key in keys]
            return keys
        for draft in drafts[::2]:
            # Without the idempotency key a record that is read twice becomes two tasks.
            del draft["idempotency_key"]
        topic = self.full_name(SUBMITTED.name)
        async with producing_when_available(self.settings, TIMEOUT_S) as producer:
            outcomes = await asyncio.gather(
                *(
                    producer.send_and_wait(topic, orjson.dumps(draft), partition=partition)
                    for draft in drafts
                ),
                return_exceptions=True,
            )
        for key, outcome in zip(keys, outcomes, strict=True):
            self._acknowledged.append((key, wave))
            if isinstance(outcome, KafkaError):
                self.ends[key] = "uncertain"
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                self._log[outcome.partition, outcome.offset] = key
        return keys

    async def submit_again(self, keys: Collection[str]) -> None:
        """Submits lost submissions once more, as clients do; they must succeed now."""
        for key in keys:
            self.ends.pop(key)
        drafts = [self._drafts[key] for key in keys]
        async with Client(self.deployment.gateway_url, patience_s=TIMEOUT_S) as client:
            await client.submit_many(drafts)
        self.over_http += keys

    async def _ended(self, count: int) -> bool:
        absent = sum(end in ("lost", "uncertain") for end in self.ends.values())
        counts = await self.fetch_value(
            "SELECT ARRAY[count(*) FILTER (WHERE finished_at IS NULL), count(*)] FROM penstock.task"
        )
        return counts[0] == 0 and counts[1] >= count - absent

    # Faults of logs and of the database

    @asynccontextmanager
    async def no_submissions(self) -> AsyncIterator[None]:
        """Holds all submissions back for the time of the block."""
        async with self.lock:
            yield

    async def fill_partitions(self) -> None:
        """Submits to each partition of the topic; the caller holds `lock`."""
        for partition in await self.submitted_ends():
            draft = self._draft(self.wave_number)
            await self.send(self.wave_number, [draft], over_http=False, partition=partition)

    @asynccontextmanager
    async def held(self, name: str) -> AsyncIterator[None]:
        """Stops all processes of a service for the time of the block."""
        supervisor = self.deployment._running
        replicas = [each for each in self.service_processes() if each.removesuffix("-2") == name]
        programs = [supervisor._supervised[each].program for each in replicas]
        self._exits_before.update({each: self.deployment.exits(each) for each in replicas})
        await asyncio.to_thread(supervisor.stop, *replicas)
        try:
            yield
        finally:
            for program in programs:
                supervisor.start(program)
        await self.deployment.wait_ready(replicas)

    def exits_by_process(self) -> Counter[str]:
        """How often each process of a service has ended, without those that a fault stopped."""
        return super().exits_by_process() + self._exits_before

    @property
    def database_server(self) -> Pair:
        """The pair: its primary goes away."""
        return self.pair

    @property
    def database_pid(self) -> int:
        """The process of the primary."""
        return self.pair.primary.pid

    @asynccontextmanager
    async def without_workers(self) -> AsyncIterator[None]:
        """Stops all workers of the type `count` for the time of the block."""
        async with self._workers_pause:
            leavers = [worker for worker in self.workers.running if self.workers.type_of(worker) == "count"]
            for worker in leavers:
                self.workers.leave(worker)
            for worker in leavers:
                await asyncio.to_thread(worker.wait, 60)
            try:
                yield
            finally:
                for worker in leavers:
                    self.workers.start_again(worker)

    def start_worker(self) -> None:
        """Starts a worker, with a clock of its own if this machine can step clocks."""
        self.workers.start(prefix=self.worker_prefix)

    def say(self, what: str) -> None:
        """Notes what the test does, beside the deployment's log."""
        with self.deployment.log_file.with_name("faults.log").open("a") as file:
            file.write(f"{datetime.now(UTC):%H:%M:%S} {what}\n")

    async def keep_workers(self) -> None:
        """Starts each worker again that ends, until cancelled."""
        while True:
            async with self._workers_pause:
                for worker in list(self.workers.running):
                    if (status := worker.poll()) is not None:
                        self.statuses[status] += 1
                        self.workers.kill(worker)
                        self.workers.start_again(worker)
            await asyncio.sleep(0.2)

    async def ingested(self) -> dict[int, int]:
        """The offset of `submitted` up to which each partition is in PostgreSQL."""
        connection = await asyncpg.connect(self.deployment.postgres)
        try:
            rows = await connection.fetch(
                "SELECT partition, next_offset FROM penstock.ingested WHERE topic = $1",
                self.full_name(SUBMITTED.name),
            )
        finally:
            await connection.close()
        return {row["partition"]: row["next_offset"] for row in rows}

    async def all_ingested(self) -> None:
        """Waits until ingest has read every record of `submitted`; the caller holds `lock`."""

        async def done() -> bool:
            ingested = await self.ingested()
            return all(ingested.get(n, 0) == end for n, end in (await self.submitted_ends()).items())

        await self.wait_until_true(done, "ingest has read every submission")

    async def bounds(self, *topics: Topic) -> dict[TopicPartition, tuple[int, int]]:
        """The begin and the end of each partition of topics."""
        async with running(make_consumer(self.settings, None)) as consumer:
            await consumer._client.force_metadata_update()
            names = [self.full_name(topic.name) for topic in topics]
            partitions = [
                TopicPartition(name, n) for name in names for n in consumer.partitions_for_topic(name) or ()
            ]
            begins = await consumer.beginning_offsets(partitions)
            ends = await consumer.end_offsets(partitions)
        return {tp: (begins[tp], ends[tp]) for tp in partitions}

    async def submitted_ends(self) -> dict[int, int]:
        """The end of each partition of `submitted`."""
        return {tp.partition: end for tp, (_, end) in (await self.bounds(SUBMITTED)).items()}

    async def lose_log(self, begins: dict[int, int], ends: dict[int, int]) -> None:
        """Notes that the records of `submitted` before `begins` and from `ends` on are gone while
        task-sync is stopped: a submission that ingest has not read is lost."""
        ingested = await self.ingested()
        for (partition, offset), key in list(self._log.items()):
            if begins.get(partition, 0) <= offset < ends.get(partition, 0):
                continue
            del self._log[partition, offset]
            if offset >= ingested.get(partition, 0):
                self.ends[key] = "lost"

    async def keys(self) -> set[str]:
        """The keys of all submissions over HTTP that have a task, and of others with small
        contexts."""
        key = "coalesce(idempotency_key, convert_from(coalesce(result, context), 'UTF8')::jsonb ->> 'key')"
        return set(await self.fetch_value(f"SELECT array_agg({key}) FROM penstock.task"))

    def gone_back(self) -> None:
        """Notes that the database goes back in this wave."""
        self._gone_back.add(self.wave_number)

    async def told(self, *moves: Move) -> None:
        """Waits until ingest has noted that it moved these positions."""
        self._moves += moves

        async def all_told() -> bool:
            return Counter(await self._read_moves()) >= Counter(self._moves)

        await self.wait_until_true(all_told, f"positions are moved: {moves}")

    async def _read_moves(self) -> list[Move]:
        connection = await asyncpg.connect(self.deployment.postgres)
        try:
            rows = await connection.fetch(
                "SELECT partition, reason, stored, resumed, deleted FROM penstock.position_reset"
                " WHERE topic = $1 AND (stored > 0 OR deleted > 0)",
                self.full_name(SUBMITTED.name),
            )
        finally:
            await connection.close()
        return [tuple(row) for row in rows]

    # The check

    async def mend(self) -> Report:
        """Runs `penstock check --repair`, and counts what it found by rule."""
        report = await check(self.settings, repair=True)
        self.missing |= set(report.missing) - FOREIGN_IDS
        assert self._gone_back or not self.missing, f"seed {SEED}: missing before the database went back"
        self.found.update({rule.value: count for rule, count in report.counts.items()})
        return report

    async def mended(self) -> None:
        """Repairs until the check is clean."""

        async def clean() -> bool:
            try:
                return (await self.mend()).clean
            except PenstockError:
                return False

        await self.wait_until_true(clean, "penstock check is clean after repairs")

    # Verification

    async def verify(self) -> None:
        """Compares the ledger with PostgreSQL, the callbacks with their targets, and what was told
        with what was done."""
        await self._verify_told()
        await self._verify_callbacks()
        connection = await asyncpg.connect(self.deployment.postgres)
        try:
            await state_ledger.load(connection, self._file, self._acknowledged, self.ends)
            for wave, (fault, tasks, seconds, exits) in enumerate(self._waves):
                counts = await ledger.count_wave(connection, wave)
                RUN.rows.append(Row(self._name, fault, tasks, counts, round(seconds, 1), exits))
            found = await state_ledger.violations(connection, self._gone_back)
        finally:
            await connection.close()
        RUN.note(found)
        lost = sum(end == "lost" for end in self.ends.values())
        RUN.add_sentence(
            f"state: {lost:,} of {len(self._acknowledged):,} acknowledged submissions were removed by a fault, each known by name; "
            f"penstock check found {dict(self.found)} and {len(self.missing):,} missing tasks; workers ended with {dict(self.statuses)}"
        )
        broken = {claim: offenders[:5] for claim, offenders in found.items() if offenders}
        assert not broken, f"seed {SEED}, {self._name}: {broken}; {self.deployment.log_file}"
        await self._verify_clean()
        await self._verify_published()

    async def _verify_told(self) -> None:
        """Positions moved exactly as the faults explain, and the check told the deleted records."""
        moves = Counter(await self._read_moves())
        assert moves == Counter(self._moves), (
            f"seed {SEED}: moved {moves - Counter(self._moves)} without a fault"
        )
        deleted = sum(1 for *_, count in self._moves if count)
        assert (self.found[Rule.LOST.value] > 0) == (deleted > 0), f"seed {SEED}: {self.found}, {deleted}"

    async def _verify_published(self) -> None:
        """Each task in PostgreSQL has an event of its end, and the outbox is empty."""

        async def outbox_empty() -> bool:
            return await self.fetch_value("SELECT count(*) FROM penstock.outbox") == 0

        await self.wait_until_true(outbox_empty, "the outbox is empty")
        events = await read(self.deployment.kafka, self.full_name("events"))
        ended = {
            event["task"]["id"]
            for event in events
            if event["event"] in ("task.succeeded", "task.quarantined")
        }
        tasks = set(await self.fetch_value("SELECT array_agg(id) FROM penstock.task"))
        assert tasks <= ended, f"seed {SEED}: C1: {len(tasks - ended)} tasks without an event"

    async def _verify_callbacks(self) -> None:
        """Each callback in PostgreSQL was received and is delivered."""

        async def settled() -> bool:
            left = "SELECT count(*) FROM penstock.callback WHERE finished_at IS NULL"
            return await self.fetch_value(left) == 0

        await self.wait_until_true(settled, "every callback is settled")
        await self.callback_targets.collect()
        received = set(self.callback_targets.ids())
        enqueued = set(await self.fetch_value("SELECT array_agg(id) FROM penstock.callback"))
        undelivered = "SELECT count(*) FROM penstock.callback WHERE state <> 'delivered'"
        tasks = "SELECT count(*) FROM penstock.task t WHERE NOT EXISTS (SELECT FROM penstock.callback c WHERE c.task_id = t.id)"
        counts = {
            "callbacks not received": len(enqueued - received),
            "callbacks not delivered": await self.fetch_value(undelivered),
            "tasks without a callback": await self.fetch_value(tasks),
        }
        assert not any(counts.values()), f"seed {SEED}: {counts}"
