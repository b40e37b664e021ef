"""The workers of each type, the lost ones too, with what became of their tasks.

There is no register of workers. Each worker writes signs of life (`worker_tail`), and Kafka knows
the members of a group with their partitions. A worker that writes none is listed by its group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg
from aiohttp import web

from penstock.core.attempt import AttemptId, count_of
from penstock.core.worker_list import KEEP_S, Kind, OfType, Seen, WorkerList, WorkerStatus
from penstock.errors import KafkaUnavailable
from penstock.gateway.access import grant_of
from penstock.gateway.http_workers import HttpWorkers
from penstock.gateway.paging import page_size
from penstock.gateway.settings import GatewaySettings
from penstock.http.server import choice_parameter, refuse_unknown_parameters, respond, text_parameter
from penstock.kafka.topology.group_members import Member, members
from penstock.kafka.topology.topics import ready
from penstock.postgres import lost_attempts, types

# Types of a page, each of which takes requests to Kafka.
PAGE_SIZE = 20
MAX_PAGE_SIZE = 100
# Attempts of lost workers on a page. Those of further workers are null.
MOST_ATTEMPTS = 2_000

RUNNING, LOST, ANY = "running", "lost", "any"

Row = dict[str, Any]


class ListWorkersRoutes:
    """The route that lists workers.

    Args:
        settings: address of Kafka.
        pool: the database, which knows types and tasks.
        seen: the workers over HTTP of this gateway.
        workers: all workers that write signs of life.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        pool: asyncpg.Pool[asyncpg.Record],
        seen: HttpWorkers,
        workers: WorkerList,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._seen = seen
        self._workers = workers

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [web.get("/workers", self.find, allow_head=False)]

    async def find(self, request: web.Request) -> web.Response:
        """GET /workers."""
        refuse_unknown_parameters(request, "type", "state", "limit", "cursor")
        size = page_size(request, default=PAGE_SIZE, largest=MAX_PAGE_SIZE)
        name, cursor = text_parameter(request, "type"), text_parameter(request, "cursor")
        state = choice_parameter(request, "state", ANY, (ANY, RUNNING, LOST))
        covers = grant_of(request).covers
        names = sorted(found for found in await types.all_types(self._pool) if covers(found))
        if name is not None:
            if name not in names:
                raise types.not_found(name)
            names = [name]
        left = [found for found in names if cursor is None or found > cursor]
        page = left[:size]
        groups = await self._groups(page)
        now_s = asyncio.get_running_loop().time()
        by_type = self._workers.by_type(now_s)
        rows = {
            each: [
                row
                for row in self._rows(each, groups.get(each), by_type.get(each, ()))
                if state in (ANY, row["state"])
            ]
            for each in page
        }
        await self._add_tasks(rows)
        shared = {"as_of": _moment(self._workers.newest_ms), "age_s": self._workers.age_s(now_s)}
        return respond(
            {
                "types": [
                    {
                        "type": each,
                        "rebalancing": each in groups and groups[each] is None,
                        **shared,
                        "workers": rows[each],
                    }
                    for each in page
                ],
                "next": page[-1] if len(left) > size else None,
            }
        )

    async def _groups(self, page: Sequence[str]) -> Mapping[str, list[Member] | None]:
        """The groups of types; none while Kafka is away and signs of life are known.

        Raises:
            KafkaUnavailable: nothing is known of any worker.
        """
        try:
            return await members(self._settings, page)
        except KafkaUnavailable:
            if self._workers.newest_ms is None:
                raise
            return {}

    def _rows(self, type_name: str, group: list[Member] | None, seen: Sequence[Seen]) -> list[Row]:
        """The running workers of a type, then the lost ones."""
        by_id = {each.status.id: each for each in seen}
        topic = self._settings.prefix + ready(type_name, 1).name
        rows: dict[str, Row] = {}
        for member in group or ():
            worker = member.data.gateway or member.client
            # One that has ended may be a member for a moment.
            if not self._workers.has_stopped(worker):
                rows[worker] = _row_of_member(
                    worker, member, by_id.get(worker), type_name, sorted(member.partitions.get(topic, ()))
                )
        for worker, each in by_id.items():
            if worker not in rows:
                rows[worker] = _row_of_seen(each, type_name)
                if group is not None and each.status.kind != "http":
                    rows[worker]["partitions"] = []
        for row in self._over_http(type_name):
            rows[row["id"]] = row
        order = ("worker", "gateway", "http")
        return sorted(
            rows.values(), key=lambda row: (row["state"] == LOST, order.index(row["kind"]), row["id"])
        )

    def _over_http(self, type_name: str) -> Iterator[Row]:
        """The workers of this gateway, which are in memory before they are on Kafka."""
        now = datetime.now(UTC)
        for worker, found in self._seen.of_type(type_name, now):
            seen = Seen(found.status(worker, now), round(found.seen_at.timestamp() * 1000), lost=False)
            yield _row_of_seen(seen, type_name)

    async def _add_tasks(self, rows: Mapping[str, Sequence[Row]]) -> None:
        """Adds what became of the attempts of lost workers."""
        wanted: list[tuple[AttemptId, str, list[Row]]] = []
        for type_name, of_type in rows.items():
            for row in of_type:
                attempt_ids = row.pop("attempts")
                row["tasks"] = None
                if row["state"] == LOST and len(wanted) + len(attempt_ids) <= MOST_ATTEMPTS:
                    row["tasks"] = []
                    wanted += [(attempt_id, type_name, row["tasks"]) for attempt_id in attempt_ids]
        found = await lost_attempts.get(self._pool, sorted({attempt_id for attempt_id, *_ in wanted}))
        for attempt_id, type_name, tasks in wanted:
            lost = found.get(attempt_id)
            # Workers write these records, and one may name tasks of another namespace.
            if lost is not None and lost.type_name == type_name:
                tasks.append({**_attempt(attempt_id), "outcome": lost.outcome, "state": lost.state})


def _attempt(attempt_id: AttemptId) -> Mapping[str, int]:
    return {"id": attempt_id.task_id, "step": attempt_id.step, "attempt": count_of(attempt_id.attempt)}


def _row_of_member(
    worker: str, member: Member, seen: Seen | None, type_name: str, partitions: list[int]
) -> Row:
    """A member of a group, with its signs of life if it writes any."""
    if seen is not None:
        row = _row_of_seen(seen, type_name)
    else:
        kind: Kind = "worker" if member.data.gateway is None else "gateway"
        row = _row(
            WorkerStatus(id=worker, kind=kind, host=member.host, interval_s=KEEP_S, slots=member.data.slots),
            OfType(None if member.data.stages is None else sorted(member.data.stages)),
        )
        row["in_flight"] = None
    row["partitions"] = partitions
    return row


def _row_of_seen(seen: Seen, type_name: str) -> Row:
    row = _row(seen.status, seen.status.types.get(type_name, OfType()))
    row["state"] = LOST if seen.lost else RUNNING
    row["seen_at"] = _moment(seen.seen_ms)
    return row


def _row(status: WorkerStatus, of_type: OfType) -> Row:
    return {
        "id": status.id,
        "kind": status.kind,
        "host": status.host,
        "version": status.version,
        "state": RUNNING,
        "stages": None if of_type.stages is None else sorted(of_type.stages),
        "slots": status.slots,
        "room": status.room,
        # The workers of a gateway have in flight what it has taken.
        "in_flight": None if status.kind == "gateway" else of_type.in_flight,
        "attempts": of_type.attempts,
        "partitions": None,
        "seen_at": None,
    }


def _moment(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else datetime.fromtimestamp(at_ms / 1000, UTC)
