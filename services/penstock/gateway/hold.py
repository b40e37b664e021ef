"""Routes of HTTP workers: `POST /hold_task` claims tasks, `POST /set_task` reports results."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

import asyncpg
from aiohttp import ClientError, web

from penstock.contracts.heartbeat import Heartbeat, Kind
from penstock.contracts.ready import ReadyTask
from penstock.contracts.result import RESULTS_PER_RECORD, StageResult, encode_results
from penstock.contracts.task_type import TaskType
from penstock.core.attempt import AttemptId
from penstock.core.idle_backoff import IdleBackoff
from penstock.core.task import IN_FLIGHT, State
from penstock.errors import (
    Fatal,
    InvalidRecord,
    PostgresUnavailable,
    TooLarge,
    Unavailable,
    UnknownType,
)
from penstock.gateway.access import grant_of
from penstock.gateway.audit import NOTHING_CHANGED
from penstock.gateway.background_producer import BackgroundProducer
from penstock.gateway.bodies import read_entries, read_json
from penstock.gateway.hold_answers import REQUEST_KEY, UnconfirmedTasks, repeatable
from penstock.gateway.hold_requests import ClaimedTasks
from penstock.gateway.http_workers import About, HttpWorkers
from penstock.gateway.openapi import conform
from penstock.gateway.ready_consumer import ReadyConsumer
from penstock.gateway.report_entries import BeatEntry, heartbeats_of, parse_entries
from penstock.gateway.report_limiter import ReportLimiter
from penstock.gateway.result_contexts import store_contexts
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.undelivered import UndeliveredTasks
from penstock.gateway.visibility import visible_ids
from penstock.http.server import body_bytes, respond
from penstock.objects import ObjectStore
from penstock.postgres import leases
from penstock.postgres.types import TypeCache

log = logging.getLogger(__name__)

# Well below the broker's limit of one megabyte a record.
MAX_RECORD_BYTES = 700_000

DEFAULT_WAIT_S = 20.0


class WorkerRoutes:
    """The routes of HTTP workers.

    Args:
        settings: limits and times.
        pool: the database, which knows the state of the attempts in heartbeats.
        types: the registered types.
        objects: stores contexts above the inline limit.
        producer: sends claims, heartbeats and results.
        unconfirmed: of this process.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        pool: asyncpg.Pool[asyncpg.Record],
        types: TypeCache,
        objects: ObjectStore,
        producer: BackgroundProducer,
        unconfirmed: UnconfirmedTasks,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._types = types
        self._objects = objects
        self._producer = producer
        self._reports = ReportLimiter(settings.gateway_queue_bytes)
        self._consumers: dict[str, ReadyConsumer] = {}
        self._backoffs: defaultdict[str, IdleBackoff] = defaultdict(
            lambda: IdleBackoff(settings.gateway_give_back_s)
        )
        self._running: set[asyncio.Task[None]] = set()
        self._answers = unconfirmed.answers
        self.undelivered = UndeliveredTasks(self._send, unconfirmed.undelivered)
        self.seen = HttpWorkers()

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [web.post("/hold_task", self.hold), web.post("/set_task", self.set)]

    async def close(self) -> None:
        """Answers the requests that wait, completes claims under way, and leaves all groups."""
        for consumer in self._consumers.values():
            consumer.close()
        if self._running:
            await asyncio.wait(self._running)

    async def hold(self, request: web.Request) -> web.Response:
        """POST /hold_task: answers once a task is available, or without tasks after `wait_s`."""
        raw = await read_json(request, unique=False)
        conform(raw, "HoldRequest")
        # A cached type needs no query, so idle workers cost the database nothing.
        await self._types.require([raw["type"]])
        task_type = self._types.get(raw["type"])
        if task_type is None or not grant_of(request).covers(raw["type"]):
            raise UnknownType(f"no task type {raw['type']!r} is registered", pointer="/type")

        self._reports.require_half_free()
        self.seen.asked(raw["worker"], raw["type"], _about(request, raw), datetime.now(UTC))

        # Raises before the gateway joins a group, since it cannot claim anything without a
        # producer.
        self._producer.ensure_connected()
        most = int(raw.get("max", 1))
        answer, lost = self._answers.asked(raw["worker"], raw["type"], request.headers.get(REQUEST_KEY))
        claimed, stale = repeatable(lost, most, asyncio.get_running_loop().time())
        self._return(raw["worker"], stale)
        if not claimed.tasks:
            claimed = await self._consumer(task_type).hold(
                raw["worker"],
                most,
                float(raw.get("wait_s", DEFAULT_WAIT_S)),
                lambda: _is_connected(request) and not answer.asked_again,
                {stage: int(limit) for stage, limit in raw.get("max_attempts", {}).items()},
            )
        if answer.asked_again:
            self._return(raw["worker"], claimed.tasks)
            claimed = ClaimedTasks.none()
        if not claimed.tasks:
            request[NOTHING_CHANGED] = True
            return respond({"tasks": []})
        age_s = asyncio.get_running_loop().time() - claimed.claimed_s
        body = {
            "tasks": [_without_token(task.to_wire()) for task in claimed.tasks],
            "claimed_ms_ago": math.ceil(age_s * 1000),
        }
        response = respond(body)
        self._answers.keep(answer, claimed, response.content_length or 0)
        # Before the response: its result may come while the rest of the response is written.
        self.seen.took(raw["worker"], claimed.tasks, datetime.now(UTC))
        if not await _write_response(request, response) and answer.take():
            self._return(raw["worker"], claimed.tasks)
        return response

    def _return(self, worker: str, tasks: Sequence[ReadyTask]) -> None:
        """Returns tasks that a worker did not receive."""
        self.undelivered.add(worker, tasks)
        ended = [task.fence.attempt_id for task in tasks]
        self.seen.reported(worker, datetime.now(UTC), ended=ended)

    async def set(self, request: web.Request) -> web.Response:
        """POST /set_task: sends valid entries to Kafka, and reports the faults of others."""
        raw = await read_entries(request, "results")
        with self._reports.reserve(body_bytes(request)):
            return await self._set(request, raw)

    async def _set(self, request: web.Request, raw: Any) -> web.Response:
        conform({**raw, "results": []} if isinstance(raw, dict) and "results" in raw else raw, "SetRequest")
        entries = raw["results"]
        if not isinstance(entries, list):
            raise InvalidRecord("must be an array", pointer="/results")
        limit = self._settings.gateway_batch_limit
        if len(entries) > limit:
            raise TooLarge(
                f"{len(entries):,} results, and {limit:,} are allowed: send several requests",
                pointer="/results",
            )
        worker = raw["worker"]
        beats, by_index, rejected = parse_entries(entries)
        # Before PostgreSQL is asked: in its outage no worker may count as lost.
        self.seen.reported(worker, datetime.now(UTC))
        foreign = await self._foreign_tasks(request, beats, by_index.values())
        # Tasks of other namespaces are handled like tasks that do not exist: results have no
        # effect, beats are answered "over".
        by_index = {index: result for index, result in by_index.items() if result.fence.id not in foreign}
        own = {beat.attempt_id: beat.lease_ms for beat in beats if beat.attempt_id.task_id not in foreign}
        lost, proven = await _judge_attempts(self._pool, worker, list(own))
        ended = [result.fence.attempt_id for result in by_index.values()]
        self.seen.proved(worker, request.remote or "", datetime.now(UTC), beats=own, types=proven)
        self.seen.reported(worker, datetime.now(UTC), beats=own, ended=ended)
        lost |= {beat.attempt_id: "over" for beat in beats if beat.attempt_id.task_id in foreign}
        results, waiting = await store_contexts(self._pool, self._objects, by_index, rejected)
        await self._send(worker, results, [beat for beat in beats if beat.attempt_id not in lost])
        if waiting is not None:
            # All other entries are accepted, and a repetition of them changes nothing.
            raise waiting
        gone = [
            {"index": beat.index, "why": lost[beat.attempt_id]} for beat in beats if beat.attempt_id in lost
        ]
        received = len(entries) - len(rejected) - len(gone)
        rejected.sort(key=itemgetter("index"))
        # `accepted` promises more than the gateway knows, and callers read it.
        return respond({"received": received, "accepted": received, "rejected": rejected, "gone": gone})

    async def _foreign_tasks(
        self, request: web.Request, beats: Sequence[BeatEntry], results: Iterable[StageResult]
    ) -> frozenset[int]:
        """The ids of tasks outside the namespaces of the request."""
        ids = {beat.attempt_id.task_id for beat in beats} | {result.fence.id for result in results}
        return frozenset(ids) - frozenset(await visible_ids(request, self._pool, sorted(ids)))

    @property
    def reading(self) -> list[str]:
        """The types that this gateway reads for its workers now."""
        return sorted(name for name, consumer in self._consumers.items() if not consumer.closed)

    def _consumer(self, task_type: TaskType) -> ReadyConsumer:
        consumer = self._consumers.get(task_type.name)
        if consumer is None or consumer.closed:
            backoff = self._backoffs[task_type.name]
            backoff.joining(asyncio.get_running_loop().time())
            consumer = ReadyConsumer(
                self._settings, self._producer, self._objects, task_type, backoff, self._return
            )
            self._consumers[task_type.name] = consumer
            running = asyncio.create_task(self._run(task_type.name, consumer))
            self._running.add(running)
            running.add_done_callback(self._running.discard)
        return consumer

    async def _run(self, name: str, consumer: ReadyConsumer) -> None:
        try:
            await consumer.run()
        except (Unavailable, Fatal) as error:
            # The consumer has answered its requests with the error; the next request starts another
            # one.
            log.warning(
                "The gateway left the group of a type after an error",
                extra={"event": "group_left", "task_type": name, "error": error},
            )
        finally:
            if self._consumers.get(name) is consumer:
                del self._consumers[name]

    async def _send(
        self, worker: str, results: Sequence[StageResult], beats: Sequence[BeatEntry] = ()
    ) -> None:
        heartbeats = list(heartbeats_of(worker, beats))
        await asyncio.gather(*(self._producer.send_results(worker, chunk) for chunk in _chunks(results)))
        if results:
            # After the results: a lease that ended before would let the task run again.
            ended = [result.fence.attempt_id for result in results]
            heartbeats.append(Heartbeat(Kind.RELEASE, worker, 0, ended))
        await self._producer.send_heartbeats(heartbeats)


def _without_token(task: dict[str, Any]) -> dict[str, Any]:
    """The task for a worker over HTTP, whose reports the gateway proves."""
    task.pop("token", None)
    task.pop("goes_on", None)
    return task


def _about(request: web.Request, raw: Mapping[str, Any]) -> About:
    """The description of a worker in its request for tasks."""
    stages = tuple(raw["stages"]) if "stages" in raw else None
    return About(raw.get("host") or request.remote or "", raw.get("version"), stages)


async def _judge_attempts(
    pool: asyncpg.Pool[asyncpg.Record], worker: str, attempt_ids: Sequence[AttemptId]
) -> tuple[dict[AttemptId, str], dict[AttemptId, str]]:
    """The attempts that the worker must stop, each with the reason; the types of those it holds."""
    if not attempt_ids:
        return {}, {}
    try:
        holders = await leases.holders(pool, attempt_ids)
    except PostgresUnavailable:
        # Fail open: the worker keeps its leases while PostgreSQL is unavailable.
        return {}, {}
    lost, held = {}, {}
    for attempt_id in attempt_ids:
        holder = holders.get(attempt_id)
        if holder is None:
            lost[attempt_id] = "over"
        elif holder.state == State.CANCELLED:
            lost[attempt_id] = "cancelled"
        elif holder.state not in IN_FLIGHT:
            lost[attempt_id] = "over"
        elif holder.worker not in (None, worker):
            lost[attempt_id] = "taken over"
        elif holder.worker == worker:
            held[attempt_id] = holder.type_name
    return lost, held


def _is_connected(request: web.Request) -> bool:
    """Whether the client is still connected, as far as the operating system knows."""
    return request.transport is not None and not request.transport.is_closing()


async def _write_response(request: web.Request, response: web.Response) -> bool:
    """Writes a response; returns whether the system accepted it before the client disconnected.

    The end of a long response may still be in the buffers of the process.
    """
    try:
        await response.prepare(request)
        await response.write_eof()
    except (ConnectionError, ClientError):
        return False
    return _is_connected(request)


def _chunks(results: Sequence[StageResult]) -> Iterator[list[StageResult]]:
    """Splits results into chunks that fit a record; tracebacks can make results large."""
    chunk: list[StageResult] = []
    size = 0
    for result in results:
        length = len(encode_results("", [result]))
        if chunk and (len(chunk) == RESULTS_PER_RECORD or size + length > MAX_RECORD_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(result)
        size += length
    if chunk:
        yield chunk
