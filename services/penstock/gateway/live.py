"""The live stream of the console: server-sent events that name what has changed.

What this module guarantees: PostgreSQL is asked once for all streams, and only for what a stream
watches. A stream of some namespaces learns nothing of others: it names its lists every five
seconds, whether they have changed or not. A stream ends with its session or key. It waits for its
client alone. While PostgreSQL is away streams stay open, and send `resync` afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import lru_cache

import asyncpg
import orjson
from aiohttp import web

from penstock.core.live_topics import Pending, ids_of, interval_s, parse_topics
from penstock.core.worker_list import WorkerList
from penstock.errors import PostgresUnavailable, Throttled
from penstock.gateway.access import grant_of, visible_types
from penstock.gateway.visibility import visible_ids
from penstock.http.problems import BadParameter
from penstock.http.server import refuse_unknown_parameters
from penstock.postgres import live
from penstock.postgres.read_pool import reading

log = logging.getLogger(__name__)

# Seconds between two looks at what is due.
TICK_S = 0.25
KEEP_ALIVE_S = 15.0
# Seconds between two checks of a stream's session or key.
CHECK_S = 10.0
# Lists of a stream of some namespaces are named so often, whether they have changed or not.
LIMITED_S = 5.0
# A list without a change is named so often, because its version does not contain everything.
SILENT_S = 10.0
MOST_STREAMS = 4_000
# Each browser has one. A page that leaks streams must not take those of others.
MOST_OF_ACTOR = 100


class Stream:
    """One open stream.

    Args:
        topics: that its client watches.
        request: of its client.
        is_limited: whether its client sees some namespaces only.
    """

    def __init__(self, topics: frozenset[str], request: web.Request, *, is_limited: bool) -> None:
        self.topics = topics
        self._request = request
        self.is_limited = is_limited
        self.pending = Pending()
        self.changed = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether the client is still connected."""
        transport = self._request.transport
        return transport is not None and not transport.is_closing()

    def tell(self, topics: Iterable[str]) -> None:
        """Topics have changed."""
        self.pending.add(topics)
        if self.pending:
            self.changed.set()

    def resync(self) -> None:
        """Everything may have changed."""
        self.pending.resync()
        self.changed.set()


class LiveRoutes:
    """The route of the stream, and the loop that asks for all streams.

    Args:
        pool: the database.
        workers: all workers that write signs of life.
        is_valid: whether the credentials of a request are still valid.
    """

    def __init__(
        self,
        pool: asyncpg.Pool[asyncpg.Record],
        workers: WorkerList,
        is_valid: Callable[[web.Request], Awaitable[bool]],
    ) -> None:
        self._pool = pool
        self._workers = workers
        self._is_valid = is_valid
        self._streams: set[Stream] = set()
        self._actors: Counter[str] = Counter()
        self._opened = asyncio.Event()
        self._closed = asyncio.Event()
        self._versions: dict[str, str] = {}
        # When each topic is due, and when it was named last.
        self._due_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}
        self._limited_due_s: dict[str, float] = {}

    def routes(self) -> list[web.RouteDef]:
        """The routes of this class."""
        return [web.get("/live", self.stream, allow_head=False)]

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """GET /live."""
        refuse_unknown_parameters(request, "topics")
        try:
            topics = parse_topics(request.query.get("topics", ""))
        except ValueError as error:
            raise BadParameter(str(error), parameter="topics") from error
        actor = grant_of(request).actor
        if len(self._streams) >= MOST_STREAMS or (actor and self._actors[actor] >= MOST_OF_ACTOR):
            raise Throttled("too many open streams: close some", retry_after_s=KEEP_ALIVE_S)
        # Not among the lists of its actor: a check of its session must not wait for them.
        with reading(actor, lists=False):
            return await self._serve(request, topics, actor)

    async def _serve(self, request: web.Request, topics: frozenset[str], actor: str) -> web.StreamResponse:
        visible = await self._visible(request, topics)
        stream = Stream(visible, request, is_limited=grant_of(request).namespaces is not None)
        self._streams.add(stream)
        self._actors[actor] += 1
        self._opened.set()
        try:
            return await self._write(request, stream)
        finally:
            self._streams.discard(stream)
            self._actors[actor] -= 1
            if not self._actors[actor]:
                del self._actors[actor]

    async def _visible(self, request: web.Request, topics: frozenset[str]) -> frozenset[str]:
        """The topics without tasks and flows that the client may not see."""
        if visible_types(request) is None:
            return topics
        tasks = await visible_ids(request, self._pool, ids_of("task", topics))
        covers = grant_of(request).covers
        names = await live.flow_names(self._pool, ids_of("flow", topics))
        flows = [flow for flow, name in names.items() if covers(name)]
        plain = {topic for topic in topics if ":" not in topic}
        return frozenset(plain | {f"task:{each}" for each in tasks} | {f"flow:{each}" for each in flows})

    async def _write(self, request: web.Request, stream: Stream) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        await response.prepare(request)
        await response.write(b": open\n\n")
        loop = asyncio.get_running_loop()
        checked_s = written_s = loop.time()
        while not self._closed.is_set() and stream.is_open:
            try:
                async with asyncio.timeout_at(min(checked_s + CHECK_S, written_s + KEEP_ALIVE_S)):
                    await stream.changed.wait()
            except TimeoutError:
                pass
            stream.changed.clear()
            if loop.time() >= checked_s + CHECK_S:
                checked_s = loop.time()
                if not await self._is_valid(request):
                    break
            if stream.pending:
                topics = stream.pending.take()
                written_s = loop.time()
                await response.write(RESYNC if topics is None else _changed(tuple(topics)))
            elif loop.time() >= written_s + KEEP_ALIVE_S:
                written_s = loop.time()
                await response.write(b": waiting\n\n")
        return response

    def close(self) -> None:
        """Ends all streams."""
        self._closed.set()
        for stream in self._streams:
            stream.changed.set()

    async def run(self) -> None:
        """Asks what the streams watch, until cancelled."""
        away = False
        while True:
            if not self._streams:
                self._versions.clear()
                self._due_s.clear()
                self._told_s.clear()
                self._opened.clear()
                await self._opened.wait()
            begin_s = _now_s()
            try:
                with reading("live", lists=False):
                    await self._look(begin_s)
                if away:
                    away = False
                    for stream in self._streams:
                        stream.resync()
            except (PostgresUnavailable, Throttled) as error:
                if not away:
                    log.warning(
                        "The live streams cannot be served; trying again",
                        extra={"event": "live_delayed", "error": error},
                    )
                away = True
            await asyncio.sleep(max(TICK_S, 2 * (_now_s() - begin_s)))

    async def _look(self, now_s: float) -> None:
        watched = frozenset[str]().union(*(stream.topics for stream in self._streams))
        for gone in self._due_s.keys() - watched:
            for known in (self._due_s, self._told_s, self._versions):
                known.pop(gone, None)
        due = {topic for topic in watched if self._due_s.get(topic, 0.0) <= now_s}
        found = await self._read(due)
        changed = set()
        for topic in due:
            self._due_s[topic] = now_s + interval_s(topic) - TICK_S / 2
            before, version = self._versions.get(topic), found.get(topic, "")
            self._versions[topic] = version
            # The first look is named, too: the change may have come after the client has read.
            silent = now_s - self._told_s.setdefault(topic, now_s) >= SILENT_S and ":" not in topic
            if silent or before != version:
                self._told_s[topic] = now_s
                changed.add(topic)
        lists = {topic for topic in due if ":" not in topic and self._limited_due_s.get(topic, 0.0) <= now_s}
        self._limited_due_s |= dict.fromkeys(lists, now_s + LIMITED_S)
        for stream in self._streams:
            if not stream.is_open:
                # Otherwise its place would be taken until the next change.
                stream.changed.set()
            named = {topic for topic in changed if ":" in topic} | lists if stream.is_limited else changed
            wanted = stream.topics & named
            if wanted:
                stream.tell(sorted(wanted))

    async def _read(self, due: set[str]) -> Mapping[str, str]:
        names = set(due)
        if "overview" in due:
            names |= {"tasks", "types", "targets", "operations"}
        found = await live.versions(self._pool, [topic for topic in live.TOPICS if topic in names])
        found |= await live.versions_by_id(self._pool, "task", ids_of("task", due))
        found |= await live.versions_by_id(self._pool, "flow", ids_of("flow", due))
        if "workers" in due or "overview" in due:
            found["workers"] = self._workers_version()
        if "overview" in due:
            parts = ("tasks", "types", "targets", "operations", "workers")
            found["overview"] = " / ".join(found[part] for part in parts)
        return found

    def _workers_version(self) -> str:
        by_type = self._workers.by_type(_now_s())
        seen = {(each.status.id, each.lost, each.status.room) for rows in by_type.values() for each in rows}
        return str(hash(frozenset(seen)))


RESYNC = b"event: resync\ndata: {}\n\n"


@lru_cache(maxsize=4096)
def _changed(topics: tuple[str, ...]) -> bytes:
    return b"event: changed\ndata: " + orjson.dumps({"topics": topics}) + b"\n\n"


def _now_s() -> float:
    return asyncio.get_running_loop().time()
