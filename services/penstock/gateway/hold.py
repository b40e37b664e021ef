"""Workers that speak HTTP: `POST /hold_task` claims a batch, `POST /set_task` reports one."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import asyncpg
from aiohttp import ClientError, web

from penstock.contracts.context import INLINE_LIMIT_BYTES
from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.inbound import read_result
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import RESULTS_PER_RECORD, Failure, StageResult, encode_results
from penstock.contracts.validation import problems
from penstock.core.completion import Outcome
from penstock.core.giving_back import Patience
from penstock.core.leases import Key
from penstock.core.task import IN_HAND, State
from penstock.errors import (
    Fatal,
    Invalid,
    InvalidRecord,
    PostgresUnavailable,
    TooLarge,
    Unavailable,
    UnknownType,
)
from penstock.gateway.access import grant_of
from penstock.gateway.audit import NOTHING_CHANGED
from penstock.gateway.backlog import Backlog
from penstock.gateway.broker import Broker
from penstock.gateway.intake import Intake
from penstock.gateway.openapi import conform, problems_in
from penstock.gateway.ownership import own
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.tasks import json_of
from penstock.http.server import respond
from penstock.kafka.topics import HEARTBEATS, STAGE_RESULTS
from penstock.objects import ObjectStore
from penstock.postgres import leases
from penstock.postgres.types import KnownTypes, TaskType

log = logging.getLogger(__name__)

# Well under the broker's limit of a megabyte a record.
RECORD_BYTES = 700_000

DEFAULT_WAIT_S = 20.0
DEFAULT_LEASE_MS = 300_000


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life: its position in the request, the attempt, and what it was claimed with (see `Heartbeat`)."""

    index: int
    key: Key
    lease_ms: int
    max_attempts: int | None


class Hold:
    """The routes of HTTP workers.

    Args:
        settings: limits and times.
        pool: of the database, asked what became of the attempts that workers beat.
        types: which types there are.
        objects: for contexts above the inline limit.
        broker: for claims, beats, results and releases.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        pool: asyncpg.Pool[asyncpg.Record],
        types: KnownTypes,
        objects: ObjectStore,
        broker: Broker,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._types = types
        self._objects = objects
        self._broker = broker
        self._backlog = Backlog(settings.gateway_queue_bytes)
        self._intakes: dict[str, Intake] = {}
        self._patience: defaultdict[str, Patience] = defaultdict(
            lambda: Patience(settings.gateway_give_back_s)
        )
        self._running: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        """What this class answers."""
        return [web.post("/hold_task", self.hold), web.post("/set_task", self.set)]

    async def close(self) -> None:
        """Answers who waits, finishes what is being claimed, and leaves all groups."""
        for intake in self._intakes.values():
            intake.close()
        if self._running:
            await asyncio.wait(self._running)

    async def hold(self, request: web.Request) -> web.Response:
        """POST /hold_task: answers as soon as there is anything, or with nothing after `wait_s`."""
        raw = await json_of(request, self._settings.gateway_body_limit_bytes)
        conform(raw, "HoldRequest")
        # Without a query while the type is known: idle workers cost the database nothing.
        await self._types.require([raw["type"]])
        task_type = self._types.get(raw["type"])
        if task_type is None or not grant_of(request).covers(raw["type"]):
            raise UnknownType(f"no task type {raw['type']!r} is registered", pointer="/type")

        self._backlog.require_calm()

        # Before anybody joins a group: without a producer nothing could be claimed.
        _ = self._broker.producer
        held = await self._intake(task_type).hold(
            raw["worker"],
            int(raw.get("max", 1)),
            float(raw.get("wait_s", DEFAULT_WAIT_S)),
            lambda: _waits(request),
            {stage: int(limit) for stage, limit in raw.get("max_attempts", {}).items()},
        )
        if not held.tasks:
            request[NOTHING_CHANGED] = True
            return respond({"tasks": []})
        age_s = asyncio.get_running_loop().time() - held.claimed_s
        response = respond(
            {"tasks": [task.to_wire() for task in held.tasks], "claimed_ms_ago": math.ceil(age_s * 1000)}
        )
        if not await _written(request, response):
            await self._hand_back(raw["worker"], held.tasks)
        return response

    async def _hand_back(self, worker: str, tasks: Sequence[ReadyTask]) -> None:
        """Another worker shall have what this one was claimed for and was never told: at once, and not as a vain try."""
        why = Failure(kind="HandedBack", message="its worker had gone before it was told")
        log.info("%s went before it was told of %d tasks: handed back", worker, len(tasks))
        results = [StageResult(fence=task.fence, outcome=Outcome.RETRY, error=why) for task in tasks]
        try:
            await self._write(worker, [], results)
        except Unavailable as error:
            log.warning("not handed back: their leases run out: %s", error)

    async def set(self, request: web.Request) -> web.Response:
        """POST /set_task: writes what is sound, and says what is not, entry by entry."""
        raw = await json_of(request, self._settings.gateway_body_limit_bytes)
        # The body is kept by the request: this is its length, and no second reading.
        with self._backlog.place(len(await request.read())):
            return await self._set(request, raw)

    async def _set(self, request: web.Request, raw: Any) -> web.Response:
        conform({**raw, "results": []} if isinstance(raw, dict) and "results" in raw else raw, "SetRequest")
        entries = raw["results"]
        if not isinstance(entries, list):
            raise InvalidRecord("must be an array", pointer="/results")
        limit = self._settings.gateway_batch_limit
        if len(entries) > limit:
            raise TooLarge(
                f"{len(entries):,} results; {limit:,} is the limit: send several", pointer="/results"
            )
        worker = raw["worker"]
        beats, results, rejected = _sort_out(entries)
        foreign = await self._foreign(request, beats, results)
        # As with tasks that are not there: of results nothing is heard, and beats are answered that it is over.
        results = [result for result in results if result.fence.id not in foreign]
        gone = await self._gone(worker, [beat.key for beat in beats if beat.key[0] not in foreign])
        gone |= {beat.key: "over" for beat in beats if beat.key[0] in foreign}
        results = [await self._checked_in(result) for result in results]
        await self._write(worker, [beat for beat in beats if beat.key not in gone], results)
        told = [{"index": beat.index, "why": gone[beat.key]} for beat in beats if beat.key in gone]
        accepted = len(entries) - len(rejected) - len(told)
        return respond({"accepted": accepted, "rejected": rejected, "gone": told})

    async def _foreign(
        self, request: web.Request, beats: Sequence[Beat], results: Sequence[StageResult]
    ) -> frozenset[int]:
        """The tasks that are not this worker's namespaces'; asked for only where it is confined to some."""
        ids = {beat.key[0] for beat in beats} | {result.fence.id for result in results}
        return frozenset(ids) - frozenset(await own(request, self._pool, sorted(ids)))

    async def _gone(self, worker: str, keys: Sequence[Key]) -> dict[Key, str]:
        """Those of the attempts that are not this worker's to go on with, and why."""
        if not keys:
            return {}
        try:
            held = await leases.holders(self._pool, keys)
        except PostgresUnavailable:
            # A lease must not end because nobody can say whether it should.
            return {}
        gone = {}
        for key in keys:
            found = held.get(key)
            if found is None:
                gone[key] = "over"
            elif found.state == State.CANCELLED:
                gone[key] = "cancelled"
            elif found.state not in IN_HAND:
                gone[key] = "over"
            elif found.worker not in (None, worker):
                gone[key] = "taken over"
        return gone

    def _intake(self, task_type: TaskType) -> Intake:
        intake = self._intakes.get(task_type.name)
        if intake is None or intake.closed:
            patience = self._patience[task_type.name]
            patience.ask(asyncio.get_running_loop().time())
            intake = Intake(self._settings, self._broker, self._objects, task_type, patience)
            self._intakes[task_type.name] = intake
            running = asyncio.create_task(self._run(task_type.name, intake))
            self._running.add(running)
            running.add_done_callback(self._running.discard)
        return intake

    async def _run(self, name: str, intake: Intake) -> None:
        try:
            await intake.run()
        except (Unavailable, Fatal) as error:
            # Its waiters have been told; the next request joins again.
            log.warning("ready.%s: left the group: %s", name, error)
        finally:
            if self._intakes.get(name) is intake:
                del self._intakes[name]

    async def _checked_in(self, result: StageResult) -> StageResult:
        if result.context is None or result.context.size <= INLINE_LIMIT_BYTES:
            return result
        return dataclasses.replace(result, context=await self._objects.check_in(result.context))

    async def _write(self, worker: str, beats: Sequence[Beat], results: Sequence[StageResult]) -> None:
        key = worker.encode()
        alike: defaultdict[tuple[int, int | None], list[Key]] = defaultdict(list)
        for beat in beats:
            alike[beat.lease_ms, beat.max_attempts].append(beat.key)
        signs = [
            Heartbeat(Kind.BEAT, worker, lease_ms, keys, limit) for (lease_ms, limit), keys in alike.items()
        ]
        await self._broker.send(
            STAGE_RESULTS, [(key, encode_results(worker, chunk)) for chunk in _chunks(results)]
        )
        if results:
            # After the results: a lease must not end before Kafka has what it was held for.
            ended = [(r.fence.id, r.fence.step, r.fence.attempt) for r in results]
            signs.append(Heartbeat(Kind.RELEASE, worker, 0, ended))
        await self._broker.send(HEARTBEATS, [(key, sign.encode()) for sign in signs])


def _waits(request: web.Request) -> bool:
    """Whether the client is still there, as far as the system knows."""
    return request.transport is not None and not request.transport.is_closing()


async def _written(request: web.Request, response: web.Response) -> bool:
    """Writes an answer; whether the system took it (of a long one all but the end) before the client went."""
    try:
        await response.prepare(request)
        await response.write_eof()
    except (ConnectionError, ClientError):
        return False
    return _waits(request)


def _sort_out(
    entries: Sequence[Any],
) -> tuple[list[Beat], list[StageResult], list[dict[str, Any]]]:
    """Beats, results, and what is wrong with the others."""
    beats: list[Beat] = []
    results: list[StageResult] = []
    rejected: list[dict[str, Any]] = []
    for index, raw in enumerate(entries):
        try:
            if isinstance(raw, dict) and raw.get("outcome") == "progress":
                found = problems_in(raw, "Progress")
                if not found:
                    key = (int(raw["id"]), int(raw["step"]), int(raw["attempt"]))
                    limit = int(raw["max_attempts"]) if "max_attempts" in raw else None
                    beats.append(Beat(index, key, int(raw.get("lease_ms", DEFAULT_LEASE_MS)), limit))
            else:
                found = _faults_of_result(raw)
                if not found:
                    results.append(read_result(raw))
        except Invalid as error:
            found = [InvalidRecord(error.reason, pointer=error.pointer)]
        if found:
            errors = [{"pointer": f"/results/{index}{f.pointer}", "detail": f.reason} for f in found]
            rejected.append({"index": index, "errors": errors})
    return beats, results, rejected


def _faults_of_result(raw: Any) -> list[InvalidRecord]:
    around = "/results/0"
    found = problems({"worker": "worker", "results": [raw]}, "stage-results")
    return [InvalidRecord(one.reason, pointer=one.pointer.removeprefix(around)) for one in found]


def _chunks(results: Sequence[StageResult]) -> Iterator[list[StageResult]]:
    """Batches that fit a record; tracebacks can make a few results as long as many."""
    chunk: list[StageResult] = []
    size = 0
    for result in results:
        length = len(encode_results("", [result]))
        if chunk and (len(chunk) == RESULTS_PER_RECORD or size + length > RECORD_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(result)
        size += length
    if chunk:
        yield chunk
