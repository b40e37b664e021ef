"""Advances flows without a service: the tests end the tasks."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import orjson
from tests.support.random_flows import definition
from tests.support.services import running_service

from penstock.contracts.context import Context
from penstock.flow_owner.app import create_app
from penstock.flow_owner.batch import Batch
from penstock.flow_owner.contents import Contents
from penstock.flow_owner.definitions import Definitions
from penstock.flow_owner.rounds import apply
from penstock.objects import ObjectStore
from penstock.postgres.connection import translated
from penstock.postgres.flow_starts import FlowStart, match_events, match_runs, start
from penstock.postgres.queries import fetch, query
from penstock.stages import app as stages
from penstock.stages.settings import StagesSettings
from penstock.task_sync import app as task_sync
from penstock.task_sync.settings import TaskSyncSettings

SHARDS = list(range(64))


@asynccontextmanager
async def running_with(settings, worker):
    """Runs the service, those of tasks, and a worker."""
    where = {"kafka": settings.kafka, "prefix": settings.prefix, "postgres": settings.postgres}
    async with AsyncExitStack() as stack:
        for service in (
            create_app(settings),
            task_sync.create_app(TaskSyncSettings(**where, objects=settings.objects)),
            stages.create_app(StagesSettings(**where)),
            worker.serve,
        ):
            await stack.enter_async_context(running_service(service))
        yield


class CrashError(Exception):
    """The process, or the server, is gone."""


class _Missing(Exception):  # noqa: N818 (ends a transaction without effect)
    """Families need lists that are not collected."""


class FragileConnection:
    """A connection that ends before or after one of its statements, `BEGIN` and `COMMIT` included.

    Args:
        connection: that runs the statements.
        last: number of the statement at which it ends, from 1; 0 for none.
        runs_last: whether the server runs that statement, so that only its answer is lost.
        kill: ends the server's session; without it, an open transaction is rolled back.

    Attributes:
        statements: those that were begun, in their order.
    """

    def __init__(self, connection, last=0, *, runs_last=False, kill=None):
        self._connection = connection
        self._last = last
        self._runs_last = runs_last
        self._kill = kill
        self.statements = []

    def __getattr__(self, name):
        found = getattr(self._connection, name)
        if name not in ("fetch", "fetchrow", "fetchval", "execute", "executemany"):
            return found
        return partial(self._run, found)

    @asynccontextmanager
    async def transaction(self):
        transaction = self._connection.transaction()
        await self._run(transaction.start, text="BEGIN")
        try:
            yield
            await self._run(transaction.commit, text="COMMIT")
        except BaseException:
            if not self._connection.is_closed() and self._connection.is_in_transaction():
                await transaction.rollback()
            raise

    async def _run(self, call, *arguments, text=None, **named):
        self.statements.append(text or arguments[0])
        is_last = len(self.statements) == self._last
        if is_last and not self._runs_last:
            await self._crash()
        result = await call(*arguments, **named)
        if is_last:
            await self._crash()
        return result

    async def _crash(self):
        if self._kill is not None:
            await self._kill()
        raise CrashError


class Owner:
    """One owner of all shards.

    Args:
        pool: of the database.
        objects: URL of the object store.
        budget: see `Batch`.
    """

    def __init__(self, pool, objects="memory:///", budget=sys.maxsize):
        self.pool = pool
        self.budget = budget
        self.definitions = Definitions()
        self.contents = Contents(ObjectStore(objects))

    async def define(self, *documents):
        """Stores definitions, without their validation."""
        for document in documents:
            await self.pool.execute(
                "INSERT INTO flow_definition (name, version, definition) VALUES ($1, $2, $3)",
                document["flow"],
                document["version"],
                orjson.dumps(document).decode(),
            )

    async def start(self, document, inputs=None, versions=None, **fields):
        """Starts a flow; returns its id."""
        given = FlowStart(
            name=document["flow"],
            version=document["version"],
            unfinished=len(document["nodes"]),
            inputs=Context.encode(inputs or {}),
            versions=versions,
            **fields,
        )
        [started] = await start(self.pool, [given])
        return started.id

    async def command(self, flow_id, kind, **detail):
        """Writes a command to the inbox."""
        await self.pool.execute(
            "INSERT INTO flow_inbox (root_id, flow_id, kind, detail) SELECT root_id, id, $2, $3 FROM flow WHERE id = $1",
            flow_id,
            kind,
            orjson.dumps(detail).decode() if detail else None,
        )

    async def advance(self, limit=2_000):
        """Applies the inbox until it is empty, and what is due."""
        while await self.advance_once(limit):
            pass

    async def advance_once(self, limit=2_000, connection=None):
        """One transaction; False when nothing was to be done."""
        if connection is None:
            async with self.pool.acquire() as connection:
                return await self.advance_once(limit, connection)
        with translated(), suppress(_Missing):
            async with connection.transaction():
                inbox = await fetch(
                    connection, "flows.take", shards=SHARDS, each=limit, held=[], most=limit * len(SHARDS)
                )
                due = await connection.fetch(query("flows.due"), SHARDS, limit, [])
                batch = Batch(connection, self.definitions, self.contents, "urn:test", self.budget)
                missing = await apply(batch, inbox, due)
                for unstored in batch.unstored.values():
                    await self.contents.store(unstored.values())
                if missing:
                    raise _Missing
        if missing:
            assert not any(missing.values())
            for lists in batch.uncollected.values():
                for each in lists:
                    await self.contents.lists.collect(each, partial(fetch, self.pool))
            return True
        await match_events(self.pool, flow_ids=sorted(batch.waiting))
        await match_runs(self.pool, sorted(batch.waiting_runs | batch.ended_runs))
        return bool(inbox or due)

    async def tasks(self, flow_id=None):
        """Live tasks of flows, by id."""
        return await self.pool.fetch(
            "SELECT * FROM task WHERE state = 'ready' AND ($1::bigint IS NULL OR flow_id = $1) ORDER BY id",
            flow_id,
        )

    async def end(self, task, state="succeeded", result=None):
        """Ends a task as any service of any release does."""
        error = None if state == "succeeded" else orjson.dumps({"kind": "E", "message": "it broke"}).decode()
        await self.pool.execute(
            """UPDATE task SET state = $2, finished_at = now(), result_type = 'json', result = $3, error = $4
               WHERE id = $1""",
            task["id"],
            state,
            orjson.dumps(result),
            error,
        )

    async def run(self, decide=lambda task: ("succeeded", None)):
        """Advances flows and ends their tasks until nothing moves; returns the ended tasks."""
        ended = []
        await self.advance()
        while tasks := await self.tasks():
            for task in tasks:
                await self.end(task, *decide(task))
                ended.append(task)
            await self.advance()
        return ended

    async def flow(self, flow_id):
        """The row of a flow."""
        return await self.pool.fetchrow("SELECT * FROM flow WHERE id = $1", flow_id)

    async def nodes(self, flow_id):
        """The states of the nodes that have a row."""
        rows = await self.pool.fetch("SELECT name, status FROM flow_node WHERE flow_id = $1", flow_id)
        return {row["name"]: row["status"] for row in rows}


def task(*after, **fields):
    """A node with a task."""
    return {"kind": "task", "type": "a", **({"after": list(after)} if after else {}), **fields}


__all__ = ["CrashError", "FragileConnection", "Owner", "definition", "task"]
