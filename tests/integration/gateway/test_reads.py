"""Reads beside writes: connections, bounds of readers, and what a search costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.support.api_keys import gateway_with_keys, make_key, sent
from tests.support.gateways import Caller, running_gateway
from tests.support.waiting import in_time, wait_until

from penstock.core.access import Role
from penstock.gateway import openapi
from penstock.gateway.rules import RULES
from penstock.postgres import read_pool, task_search
from penstock.postgres.connection import open_pool

TASKS = 100_000
# A value of each documented filter of lists that matches nothing.
NOTHING = {
    "/tasks": {
        "type": "rare",
        "state": "waiting",
        "stage": "none",
        "key": "none",
        "label": "no:ne",
        "idempotency_key": "none",
        "flow": "7",
        "since": "2999-01-01T00:00:00Z",
        "error": "none",
    },
    "/flows": {
        "name": "none",
        "status": "failed",
        "label": "no:ne",
        "idempotency_key": "none",
        "since": "2999-01-01T00:00:00Z",
        "family": "7",
        "schedule": "none",
    },
}


async def insert(connection: Any, count: int) -> None:
    await connection.execute(
        "INSERT INTO penstock.task (type, state, stage, content_type, context, finished_at, labels, key, idempotency_key) "
        "SELECT 'media', 'succeeded', 'probe', 'json', '1', now(), '{\"a\": \"b\"}', 'k' || n % 100, 'i' || n "
        "FROM generate_series(1, $1::integer) n",
        count,
    )
    await connection.execute("ANALYZE penstock.task")


@pytest.fixture
async def db(database: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


@pytest.fixture
async def gateway(where: dict[str, Any]) -> AsyncIterator[Caller]:
    async with running_gateway(**where) as caller:
        for name in ("media", "rare"):
            assert (await caller.post("/types", {"name": name})).status == 201
        yield caller


@asynccontextmanager
async def blocked_reads(database: str) -> AsyncIterator[None]:
    """Reads of callbacks and targets wait while the block runs; submissions use neither."""
    connection = await asyncpg.connect(database)
    try:
        async with connection.transaction():
            await connection.execute(
                "LOCK TABLE penstock.callback, penstock.callback_target IN ACCESS EXCLUSIVE MODE"
            )
            yield
    finally:
        await connection.close()


async def test_reads_that_hang_delay_no_write_and_no_read_by_id(
    gateway: Caller, database: str, db: Any
) -> None:
    """S6: thirty lists that get no answer from PostgreSQL leave connections to submissions and to
    reads by id. Each list ends: PostgreSQL ends its statement, or it is refused."""
    task = (await gateway.post("/tasks", {"type": "media"})).body["id"]
    async with blocked_reads(database):
        began_s = time.monotonic()
        lists = [asyncio.ensure_future(gateway.get(path)) for path in ("/callbacks", "/targets") * 15]

        async def waits() -> bool:
            return await db.fetchval(
                "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )

        await wait_until(waits)
        for _ in range(20):
            assert (await in_time(gateway.post("/tasks", {"type": "media"}))).status == 201
            assert (await in_time(gateway.get("/types/media"))).status == 200
            assert (await in_time(gateway.get(f"/tasks/{task}/why"))).status == 200
        # Otherwise the reads have not hung meanwhile.
        if time.monotonic() - began_s < read_pool.STATEMENT_S:
            assert not any(each.done() for each in lists)
        answers = await in_time(asyncio.gather(*lists))
    assert {answer.status for answer in answers} <= {429, 503}
    assert all("Retry-After" in answer.headers for answer in answers)
    assert (await gateway.get("/callbacks")).status == 200


async def test_one_reader_leaves_room_for_others(
    kafka_servers: str, prefix: str, database: str, tmp_path: Path
) -> None:
    """S6: lists of one key use one connection, so those of another key are answered meanwhile."""
    async with gateway_with_keys(kafka_servers, prefix, database, tmp_path) as caller:
        greedy, modest = [sent((await make_key(database, Role.READER))[1]) for _ in range(2)]

        async def is_accepted() -> bool:
            return (await caller.get("/types", headers=modest)).status == 200

        await wait_until(is_accepted)
        async with blocked_reads(database):
            lists = [asyncio.ensure_future(caller.get("/callbacks", headers=greedy)) for _ in range(10)]
            for _ in range(5):
                assert (await in_time(caller.get("/tasks", headers=modest))).status == 200
            assert {answer.status for answer in await in_time(asyncio.gather(*lists))} <= {429, 503}


async def test_dry_runs_are_reads(gateway: Caller, database: str) -> None:
    """S6: dry runs that hang leave connections to submissions."""
    async with blocked_reads(database):
        body = {"target": "http://127.0.0.1:9/", "dry_run": True}
        runs = [asyncio.ensure_future(gateway.post("/callbacks/replay", body)) for _ in range(10)]
        for _ in range(10):
            assert (await in_time(gateway.post("/tasks", {"type": "media"}))).status == 201
        assert {answer.status for answer in await in_time(asyncio.gather(*runs))} <= {429, 503}


async def test_a_search_that_matches_nothing_is_short(gateway: Caller, db: Any) -> None:
    """S12: by each documented filter a search reads some ten thousand rows at a time, and ends with
    an empty page and the place to continue. Submissions are answered meanwhile."""
    await insert(db, TASKS)
    documented = {path: parameters_of(path) for path in NOTHING}
    assert {path: set(filters) for path, filters in NOTHING.items()} == documented
    ended = asyncio.Event()

    async def search(path: str, name: str, value: str) -> None:
        cursor: Any = ""
        while cursor is not None:
            answer = await gateway.get(path, params={name: value, **({"cursor": cursor} if cursor else {})})
            if answer.status != 429:
                assert answer.status == 200, (path, name, answer.body)
                assert not next(iter(answer.body.values())), (path, name)
                cursor = answer.body["next"]

    async def submit() -> int:
        submitted = 0
        while not ended.is_set():
            assert (await gateway.post("/tasks", {"type": "media"})).status == 201
            submitted += 1
        return submitted

    submitting = asyncio.ensure_future(submit())
    searches = [search(path, *each) for path, filters in NOTHING.items() for each in filters.items()]
    await in_time(asyncio.gather(*searches))
    ended.set()
    assert await submitting > 0


async def test_statements_of_a_search_are_bounded(database: str, db: Any) -> None:
    """S12: no statement of a search examines more than a part, unless an index has its rows."""
    await insert(db, TASKS)
    async with open_pool(database, "test") as pool:
        for filters in (
            {"type_name": "rare"},
            {"stage": "none"},
            {"concurrency_key": "none"},
            {"visible_types": ["rare"]},
            {"states": ["ready"]},
        ):
            found = await task_search.find(pool, **filters, within_s=0)
            assert found.rows == []
            # A first part, after which the time was over.
            examined = await db.fetchval(
                "SELECT count(*) FROM penstock.task WHERE id >= $1", found.searched_to
            )
            assert examined == task_search.FIRST_PART, filters
        for filters in (
            {"labels": {"no": "ne"}},
            {"idempotency_key": "none"},
            {"flow_id": 7},
            {"states": ["running"]},
        ):
            found = await task_search.find(pool, **filters, within_s=60)
            assert (found.rows, found.searched_to) == ([], None), filters
        explained = await db.fetchval(
            "EXPLAIN (ANALYZE, FORMAT JSON) SELECT t.* FROM penstock.task t WHERE t.idempotency_key = 'i7' "
            "AND t.type = ANY (ARRAY(SELECT name FROM penstock.task_type)) ORDER BY id DESC LIMIT 50"
        )
        assert "task_idempotency" in explained


def parameters_of(path: str) -> set[str]:
    assert f"GET {path}" in RULES
    found = set()
    for parameter in openapi.document()["paths"][path]["get"]["parameters"]:
        reference = parameter.get("$ref", "").rpartition("/")[2]
        described = openapi.document()["components"]["parameters"][reference] if reference else parameter
        if described["in"] == "query":
            found.add(described["name"])
    return found - {"limit", "cursor", "sort", "order"}
