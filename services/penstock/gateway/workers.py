"""The workers of each type: members of its consumer group, and workers over HTTP.

There is no register of workers. Kafka knows the members of a group, with what each says of itself,
and this gateway knows the workers over HTTP that it has answered lately. Another gateway is listed
as a member of the group, without the workers behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import asyncpg
from aiohttp import web

from penstock.gateway.access import grant_of
from penstock.gateway.http_workers import HttpWorkers
from penstock.gateway.paging import page_size
from penstock.gateway.settings import GatewaySettings
from penstock.http.server import refuse_unknown_parameters, respond, text_parameter
from penstock.kafka.topology.group_members import Member, members
from penstock.kafka.topology.topics import ready
from penstock.postgres import types

# Types of a page, each of which takes requests to Kafka.
PAGE_SIZE = 20
MAX_PAGE_SIZE = 100


class ListWorkersRoutes:
    """The route that lists workers.

    Args:
        settings: address of Kafka.
        pool: the database, which knows the types.
        seen: the workers over HTTP.
    """

    def __init__(
        self, settings: GatewaySettings, pool: asyncpg.Pool[asyncpg.Record], seen: HttpWorkers
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._seen = seen

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [web.get("/workers", self.find, allow_head=False)]

    async def find(self, request: web.Request) -> web.Response:
        """GET /workers."""
        refuse_unknown_parameters(request, "type", "limit", "cursor")
        size = page_size(request, default=PAGE_SIZE, largest=MAX_PAGE_SIZE)
        name, cursor = text_parameter(request, "type"), text_parameter(request, "cursor")
        covers = grant_of(request).covers
        names = sorted(found for found in await types.all_types(self._pool) if covers(found))
        if name is not None:
            if name not in names:
                raise types.not_found(name)
            names = [name]
        left = [found for found in names if cursor is None or found > cursor]
        page = left[:size]
        groups = await members(self._settings, page)
        now = datetime.now(UTC)
        return respond(
            {
                "types": [
                    {
                        "type": each,
                        "rebalancing": groups[each] is None,
                        "workers": [
                            *self._of_group(each, groups[each] or ()),
                            *self._over_http(each, now),
                        ],
                    }
                    for each in page
                ],
                "next": page[-1] if len(left) > size else None,
            }
        )

    def _of_group(self, type_name: str, group: Iterator[Member] | Any) -> Iterator[Mapping[str, Any]]:
        topic = self._settings.prefix + ready(type_name, 1).name
        for member in sorted(group, key=lambda each: (each.data.gateway is not None, each.client, each.id)):
            data = member.data
            yield {
                "id": data.gateway or member.client,
                "kind": "worker" if data.gateway is None else "gateway",
                "host": member.host,
                "stages": None if data.stages is None else sorted(data.stages),
                "slots": data.slots,
                "partitions": sorted(member.partitions.get(topic, ())),
                "seen_at": None,
            }

    def _over_http(self, type_name: str, now: datetime) -> Iterator[Mapping[str, Any]]:
        for worker, found in self._seen.of_type(type_name, now):
            yield {
                "id": worker,
                "kind": "http",
                "host": found.host,
                "stages": None,
                "slots": None,
                "partitions": None,
                "seen_at": found.seen_at,
            }
