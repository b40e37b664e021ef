"""Operations on tasks by filter, over HTTP on the real PostgreSQL: verbs, dry run, rate, audit, and
recovery after a kill."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import asyncpg
import orjson
import pytest
from tests.support.gateways import Caller, running_gateway
from tests.support.services import read
from tests.support.waiting import wait_until

from penstock.core.operations import TaskSnapshot, Verb, apply, reachable, state_after_attempt
from penstock.core.task import Priority, State
from penstock.postgres import operations
from penstock.postgres.columns import LISTS
from penstock.postgres.connection import connect
from penstock.postgres.queries import bound

# States of the 10,000 matching tasks of `insert_mixed`.
OPEN = {"scheduled": 1_500, "ready": 6_500, "queued": 1_000, "running": 1_000}
ENDED = {"failed": 9_000, "quarantined": 1_000}
PAUSED = {"paused": 10_000}


@pytest.fixture
async def gateway(where: dict[str, Any]) -> AsyncIterator[Caller]:
    async with running_gateway(**where) as caller:
        yield caller


@pytest.fixture
async def db(database: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await connect(database, "test")
    await connection.execute("INSERT INTO task_type (name) VALUES ('media'), ('other')")
    yield connection
    await connection.close()


async def insert(
    db: Any, count: int, state: str = "ready", type_: str = "media", **columns: str
) -> list[int]:
    """Inserts tasks in a state. Columns are SQL expressions, in which `n` is the number of the
    task."""
    expressions = {
        "type": f"'{type_}'",
        "state": f"'{state}'",
        "stage": "'s'",
        "content_type": "'json'",
        "context": "'1'",
        "labels": """'{"tenant": "acme"}'""",
        "due_at": "now() + interval '1 hour'" if state == "scheduled" else "NULL",
        "finished_at": "now()" if state in ("failed", "quarantined", "succeeded", "cancelled") else "NULL",
        "error": """'{"kind":"Boom","message":"disk full"}'""" if state in ENDED else "NULL",
        **columns,
    }
    rows = await db.fetch(
        f"INSERT INTO task ({', '.join(expressions)}) SELECT {', '.join(expressions.values())}"
        f" FROM generate_series(1, {count}) n RETURNING id"
    )
    return [row["id"] for row in rows]


async def insert_mixed(db: Any, states: dict[str, int]) -> None:
    """Inserts the matching tasks, and a tenth as many of another tenant and of another type."""
    for state, count in states.items():
        await insert(db, count, state)
        await insert(db, count // 10, state, labels="""'{"tenant": "zeta"}'""")
        await insert(db, count // 10, state, "other")


async def task_rows(db: Any, where: str = "true") -> dict[int, tuple[Any, ...]]:
    rows = await db.fetch(
        f"SELECT id, state, attempt, pausing, priority, due_at, updated_at FROM task WHERE {where}"
    )
    return {row["id"]: tuple(row)[1:] for row in rows}


async def wait_for_end(gateway: Caller, operation_id: str) -> dict[str, Any]:
    async def finished() -> dict[str, Any] | None:
        found = await gateway.get(f"/operations/{operation_id}")
        assert found.status == 200, found.body
        body: dict[str, Any] = found.body
        return body if body["state"] != "running" else None

    return await wait_until(finished, what=f"operation {operation_id} ends")  # type: ignore[return-value] # never None


async def operate(gateway: Caller, verb: str, task_filter: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = await gateway.post("/operations", {"verb": verb, "filter": task_filter, "by": "ann@ops", **more})
    assert answer.status == 201, answer.body
    return await wait_for_end(gateway, answer.body["id"])


MATCHING = {"type": "media", "labels": {"tenant": "acme"}}
NOT_MATCHING = """NOT (type = 'media' AND labels @> '{"tenant": "acme"}')"""

CASES = [
    ("cancel", OPEN, {}, {"cancelled": 10_000}),
    ("pause", OPEN, {}, {"paused": 9_000, "running": 1_000}),
    ("resume", PAUSED, {}, {"ready": 10_000}),
    ("reprioritise", OPEN, {"priority": "HIGHEST"}, OPEN),
    ("recover", ENDED, {}, {"ready": 10_000}),
]


@pytest.mark.parametrize(("verb", "before", "more", "after"), CASES, ids=[case[0] for case in CASES])
async def test_each_verb_changes_the_matching_tasks_once(
    gateway: Caller, db: Any, verb: str, before: dict[str, int], more: dict[str, Any], after: dict[str, int]
) -> None:
    """F5, O2c: of 12,000 tasks the verb changes the 10,000 that match, including queued and running
    ones, and the audit counts each once. A dry run reports the same count and changes nothing. A
    repetition finds nothing."""
    await insert_mixed(db, before)
    first = await task_rows(db)
    preview = await gateway.post("/operations", {"verb": verb, "filter": MATCHING, "dry_run": True, **more})
    assert (preview.status, preview.body["count"], preview.body["more"]) == (200, 10_000, False)
    assert preview.body["found_in"] == before
    assert [task["labels"] for task in preview.body["examples"]] == [{"tenant": "acme"}] * 5
    assert await task_rows(db) == first
    assert (await gateway.get("/operations")).body["operations"] == []

    operation = await operate(gateway, verb, MATCHING, **more)
    assert (operation["state"], operation["changed"], operation["found_in"]) == ("done", 10_000, before)
    now = await task_rows(db)
    unmatched = await task_rows(db, NOT_MATCHING)
    assert unmatched == {one: first[one] for one in unmatched}
    matched = {one: row for one, row in now.items() if one not in unmatched}
    assert Counter(row[0] for row in matched.values()) == after
    for one, (state, attempt, pausing, priority, due_at, _at) in matched.items():
        previous = first[one]
        expected = apply(
            Verb(verb), TaskSnapshot(State(previous[0]), previous[1], previous[2], bool(previous[4]))
        )
        assert expected is not None
        assert (state, attempt, pausing) == (expected.state, expected.attempt, expected.pausing)
        assert priority == (Priority.HIGHEST if verb == "reprioritise" else previous[3])
        assert due_at == (None if verb in ("cancel", "recover") else previous[4])
    [entry] = (await gateway.get("/operations")).body["operations"]
    assert entry == operation
    assert (entry["by"], entry["filter"], entry["verb"]) == ("ann@ops", MATCHING, verb)

    again = await operate(gateway, verb, MATCHING, **more)
    assert (again["state"], again["changed"], again["found_in"]) == ("done", 0, {})
    assert await task_rows(db) == now


async def test_sql_does_what_the_core_decides(gateway: Caller, db: Any) -> None:
    """F5: for every state, mark, delay and verb, the SQL changes a task as `core.operations`
    decides."""
    for verb in Verb:
        wanted: dict[int, TaskSnapshot | None] = {}
        first: dict[int, tuple[Any, ...]] = {}
        for state in State:
            for pausing in (False, True):
                for due_ahead in (False, True):
                    if (pausing and state is not State.RUNNING) or (
                        state is State.SCHEDULED and not due_ahead
                    ):
                        continue
                    due = "now() + interval '1 hour'" if due_ahead else "now() - interval '1 hour'"
                    [one] = await insert(
                        db, 1, state.value, attempt="3", pausing=str(pausing), due_at=due, priority="4"
                    )
                    wanted[one] = apply(verb, TaskSnapshot(state, 3, pausing, due_ahead))
        first = await task_rows(db)
        more = {"priority": "HIGH"} if verb is Verb.REPRIORITISE else {}
        operation = await operate(gateway, verb, {"ids": [*wanted]}, **more)
        changed = {one: expected for one, expected in wanted.items() if expected is not None}
        assert operation["changed"] == len(changed)
        assert set(operation["found_in"]) <= {state.value for state in reachable(verb)}
        now = await task_rows(db)
        for one, expected in wanted.items():
            if expected is None:
                assert now[one] == first[one]
            else:
                assert now[one][:3] == (expected.state, expected.attempt, expected.pausing), verb
                assert (now[one][3] == Priority.HIGH) is (verb is Verb.REPRIORITISE)


async def test_a_marked_task_is_paused_at_the_end_of_its_stage(db: Any) -> None:
    """F5: a running task with the mark ends its stage with effect, and then is paused. A late
    result (H10) of a paused task also ends its stage. The task keeps its delay."""
    ends = {"ready": "next", "scheduled": "retry", "succeeded": "done", "failed": "fail"}
    for (to, outcome), late in itertools.product(ends.items(), (False, True)):
        [one] = await insert(db, 1, "paused" if late else "running", pausing=str(not late))
        end = {"id": one, "step": 0, "stage": "s", "attempt": 0, "to_state": to, "to_stage": "t"}
        end |= {"to_step": 1, "to_attempt": 0, "delay_s": 3600.0 if to == "scheduled" else None}
        end |= {"content_type": "json", "context": b"2", "outcome": outcome, "worker": "w"}
        columns = {name: [end.get(name)] for name in LISTS["ended_attempt"]}
        columns |= dict.fromkeys(LISTS["chained_attempt"])
        rows = await db.fetch(*bound("advance.advance", **columns, late=late, alone=False))
        assert len(rows) == 1, (to, late)
        row = await db.fetchrow("SELECT *, due_at > now() AS ahead FROM task WHERE id = $1", one)
        assert row["state"] == state_after_attempt(State(to), pausing=True), (to, late)
        assert (row["stage"], row["step"], row["pausing"]) == ("t", 1, False), (to, late)
        assert (row["ahead"] is True) is (to == "scheduled"), (to, late)


async def test_each_filter_selects_its_tasks(gateway: Caller, db: Any) -> None:
    """O2c: filters select by type, stage, key, state, priority, times of creation and end, and text
    of the error, alone and together."""
    ids_by_name = {
        "plain": await insert(db, 1, "failed"),
        "stage": await insert(db, 1, "failed", stage="'cut'"),
        "key": await insert(db, 1, "failed", key="'acme'"),
        "state": await insert(db, 1, "quarantined"),
        "priority": await insert(db, 1, "failed", priority="0"),
        "type": await insert(db, 1, "failed", "other"),
        "created": await insert(db, 1, "failed", created_at="'2020-01-01'"),
        "finished": await insert(db, 1, "failed", finished_at="'2020-01-01'"),
        # An error may contain a character that PostgreSQL's JSON rejects.
        "error": await insert(
            db,
            1,
            "failed",
            error="""'{"kind":"Net","message":"Reset by PEER \\u0000","traceback":"disk full"}'""",
        ),
        "none": await insert(db, 1, "failed", error="NULL"),
        "labels": await insert(db, 1, "failed", labels="""'{"tenant": "zeta", "a": "b"}'"""),
    }
    all_ids = {one for ids in ids_by_name.values() for one in ids}

    async def found(**task_filter: Any) -> set[int]:
        answer = await gateway.post(
            "/operations", {"verb": "recover", "filter": task_filter, "dry_run": True}
        )
        assert answer.status == 200, answer.body
        ids = {task["id"] for task in answer.body["examples"]}
        assert answer.body["count"] == len(ids) or len(ids) == 5
        return ids if answer.body["count"] == len(ids) else all_ids

    only = {name: set(ids) for name, ids in ids_by_name.items()}
    assert await found(stage="cut") == only["stage"]
    assert await found(key="acme") == only["key"]
    assert await found(key="acme", type="other") == set()
    assert await found(states=["quarantined"]) == only["state"]
    assert await found(priorities=["HIGHEST", "LOW"]) == only["priority"]
    assert await found(type="other") == only["type"]
    assert await found(created_until="2020-06-01T00:00:00Z") == only["created"]
    assert await found(finished_until="2020-06-01T00:00:00Z") == only["finished"]
    assert await found(error="net: reset by peer") == only["error"]
    assert await found(error="full", type="other") == only["type"]
    assert await found(error="traceback") == set()
    assert await found(error="%") == set()
    assert await found(labels={"a": "b", "tenant": "zeta"}) == only["labels"]
    assert await found(ids=[*only["plain"], 10**15], type="media") == only["plain"]
    assert await found(type="media", stage="cut", finished_since="2020-01-01T00:00:00Z") == only["stage"]
    assert await found(type="media", created_since="2100-01-01T00:00:00Z") == set()


WRONG = [
    {"verb": "pause", "filter": {}, "by": "a"},
    {"verb": "pause", "filter": {"type": "media"}},
    {"verb": "pause", "filter": {"type": "media"}, "dry_run": False},
    {"verb": "erase", "filter": {"type": "media"}, "by": "a"},
    {"verb": "pause", "filter": {"typ": "media"}, "by": "a"},
    {"verb": "pause", "filter": {"type": "me\0dia"}, "by": "a"},
    {"verb": "pause", "filter": {"key": ""}, "by": "a"},
    {"verb": "pause", "filter": {"states": ["succeeded", "paused"]}, "by": "a"},
    {"verb": "pause", "filter": {"type": "media"}, "priority": "LOW", "by": "a"},
    {"verb": "reprioritise", "filter": {"type": "media"}, "by": "a"},
    {"verb": "recover", "filter": {"created_since": "2016-12-31T23:59:60Z"}, "by": "a"},
    {"verb": "recover", "filter": {"created_since": "0001-01-01T00:00:00+23:59"}, "by": "a"},
    {"verb": "recover", "filter": {"created_until": "9999-12-31T23:59:59-23:59"}, "by": "a"},
    {"verb": "recover", "filter": {"type": "media"}, "rate": 0, "by": "a"},
    {"verb": "recover", "filter": {"type": "media"}, "id": "a b", "by": "a"},
]


async def test_a_wrong_request_is_rejected_and_not_audited(gateway: Caller, db: Any) -> None:
    """O8: a misspelt or empty filter is rejected and never matches everything."""
    for body in WRONG:
        answer = await gateway.post("/operations", body)
        assert answer.status == 422, (body, answer.body)
        assert answer.pointers or answer.body["detail"], body
    assert await db.fetchval("SELECT count(*) FROM audit") == 0


async def test_a_repeated_id_finds_the_same_operation(gateway: Caller, db: Any) -> None:
    """A request that is repeated after a lost answer finds its operation. Another request under the
    same id is rejected."""
    await insert(db, 5)
    body = {"id": "chosen", "verb": "pause", "filter": {"type": "media"}, "by": "ann"}
    first = await gateway.post("/operations", body)
    assert (first.status, first.body["state"], first.body["changed"]) == (201, "done", 5)
    await insert(db, 5)
    again = await gateway.post("/operations", body)
    assert (again.status, again.body) == (200, first.body)
    assert (await gateway.post("/operations", {**body, "filter": {"type": "other"}})).status == 409
    assert (await gateway.get("/operations/unknown")).status == 404
    assert (await gateway.post("/operations/unknown/stop", {"by": "x"})).status == 404


@pytest.mark.alone
async def test_an_operation_keeps_its_rate_and_can_be_stopped(gateway: Caller, db: Any) -> None:
    """O2c: two concurrent operations keep 50 and 400 tasks a second within 10 %. A stopped
    operation changes no more tasks."""

    async def measure_deviations() -> list[float]:
        """The relative deviation of each operation's duration from its rate."""
        await insert(db, 250)
        await insert(db, 2_000, "failed", "other")
        slow, quick = await asyncio.gather(
            operate(gateway, "cancel", {"type": "media"}, rate=50),
            operate(gateway, "recover", {"type": "other"}, rate=400),
        )
        found = []
        # The first batch is not delayed.
        for operation, count, rate, first in ((slow, 250, 50, 5), (quick, 2_000, 400, 40)):
            assert operation["changed"] == count
            took_s = await db.fetchval(
                "SELECT extract(epoch FROM finished_at - created_at)::float FROM audit WHERE id = $1",
                operation["id"],
            )
            found.append(took_s * rate / (count - first) - 1)
        return found

    # A stalled machine makes an operation late, but never early.
    for _ in range(5):
        deviations = await measure_deviations()
        assert min(deviations) > -0.1
        if max(deviations) < 0.1:
            break
    assert max(deviations) < 0.1
    await insert(db, 100)
    begun = await gateway.post(
        "/operations", {"verb": "pause", "filter": {"type": "media"}, "rate": 1, "by": "ann"}
    )
    path = f"/operations/{begun.body['id']}"
    assert (await gateway.get("/operations?state=running")).body["operations"][0]["id"] == begun.body["id"]
    stopped = (await gateway.post(f"{path}/stop", {"by": "ben"})).body
    assert (stopped["state"], stopped["stopped_by"], stopped["by"]) == ("stopped", "ben", "ann")
    paused = await db.fetchval("SELECT count(*) FROM task WHERE state = 'paused'")
    assert paused == stopped["changed"] < 100
    assert (await gateway.post(f"{path}/stop", {"by": "cy"})).body == stopped


async def test_a_new_gateway_continues_every_unfinished_operation(
    where: dict[str, Any], db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2c: a new gateway continues all unfinished operations, even if there are more than it runs
    at a time and some are slow."""
    monkeypatch.setattr(operations, "MAX_RUNNING", 2)
    for number in range(5):
        await insert(db, 2, labels=f"""'{{"n": "{number}"}}'""")
        filter_json = f'{{"labels": {{"n": "{number}"}}, "type": "media"}}'
        await operations.create(
            db, f"left-{number}", Verb.CANCEL, "ann", filter_json, None, 0.001 if number < 4 else None
        )
    async with running_gateway(**where) as gateway:
        assert (await wait_for_end(gateway, "left-4"))["changed"] == 2


async def test_an_operation_waits_for_a_locked_task_and_locks_no_other(
    gateway: Caller, db: Any, database: str
) -> None:
    """An operation waits for a task that another service has locked, and locks no other task
    meanwhile."""
    ids = await insert(db, 300)
    other = await connect(database, "other")
    async with other.transaction():
        await other.execute("SELECT FROM task WHERE id = $1 FOR UPDATE", ids[100])
        begun = await gateway.post("/operations", {"verb": "pause", "filter": {"type": "media"}, "by": "ann"})
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        await wait_until(lambda: db.fetchval(waiting), what="the operation waits for the task")
        # Earlier tasks are committed, and later tasks are not locked.
        assert await db.fetchval("SELECT count(*) FROM task WHERE state = 'paused'") == 100
        await db.execute("SELECT FROM task WHERE id = ANY ($1) FOR UPDATE NOWAIT", ids[101:])
        await other.execute("UPDATE task SET state = 'queued' WHERE id = $1", ids[100])
    operation = await wait_for_end(gateway, begun.body["id"])
    await other.close()
    assert operation["found_in"] == {"ready": 299, "queued": 1}
    assert await db.fetchval("SELECT attempt FROM task WHERE id = $1", ids[100]) == 1


async def test_an_operation_with_a_failing_batch_ends_with_the_error(gateway: Caller, db: Any) -> None:
    """Poison: an operation with a batch that always fails ends with PostgreSQL's error. The gateway
    and other operations continue."""
    await insert(db, 1, "failed", error="'no JSON'")
    operation = await operate(gateway, "recover", {"type": "media", "error": "x"})
    assert (operation["state"], operation["changed"]) == ("failed", 0)
    assert "json" in operation["error"]
    assert (await operate(gateway, "recover", {"type": "media"}))["changed"] == 1


async def test_an_operation_runs_in_bounded_statements(
    gateway: Caller, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation with a rarely matching filter runs in statements of bounded size, and a dry run
    says when it stopped early."""
    monkeypatch.setattr(operations, "ROWS_PER_STATEMENT", 100)
    await insert(db, 950)
    [one] = await insert(db, 1, stage="'rare'")
    await insert(db, 49)
    operation = await operate(gateway, "pause", {"stage": "rare"})
    assert (operation["changed"], operation["state"]) == (1, "done")
    assert await db.fetchval("SELECT state FROM task WHERE id = $1", one) == "paused"
    monkeypatch.setattr("penstock.gateway.operations.MAX_ROWS_EXAMINED", 500)
    body = {"verb": "resume", "filter": {"stage": "rare"}, "dry_run": True}
    answer = (await gateway.post("/operations", body)).body
    assert (answer["count"], answer["more"]) == (0, True)
    monkeypatch.setattr("penstock.gateway.operations.MAX_ROWS_EXAMINED", 5_000)
    answer = (await gateway.post("/operations", body)).body
    assert (answer["count"], answer["more"]) == (1, False)


@asynccontextmanager
async def gateway_process(where: dict[str, Any]) -> AsyncIterator[tuple[Any, Caller]]:
    """A gateway in a process of its own, which can be killed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "run", "gateway"),
        env={
            **os.environ,
            **{f"PENSTOCK_{name.upper()}": value for name, value in where.items()},
            "PENSTOCK_GATEWAY_PORT": "0",
        },
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        url = ""
        while not url:
            line = (await process.stderr.readline()).decode()
            assert line, "the gateway ended"
            url = line.partition(" url=")[2].strip()
        async with aiohttp.ClientSession() as session:
            yield process, Caller(url.split()[0], session)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


@pytest.mark.parametrize("verb", ["cancel", "recover"])
async def test_kill_9_neither_repeats_nor_misses_a_task(where: dict[str, Any], db: Any, verb: str) -> None:
    """O1, O2c: after each of two kills the next gateway continues the operation by itself. It
    changes each of 10,000 tasks once, the audit counts each once, and each cancellation has an
    event."""
    await insert(db, 10_000, "ready" if verb == "cancel" else "failed")
    done = {"cancel": "state = 'cancelled'", "recover": "attempt = 1"}[verb]
    operation_id = ""
    for part in (1, 2):
        async with gateway_process(where) as (process, gateway):
            if not operation_id:
                begun = await gateway.post(
                    "/operations", {"verb": verb, "filter": {"type": "media"}, "rate": 2_500, "by": "ann"}
                )
                operation_id = begun.body["id"]

            async def has_changed(minimum: int = part * 2_500) -> bool:
                return bool(await db.fetchval("SELECT changed >= $1 FROM audit", minimum))

            await wait_until(has_changed, what="the operation changes its share of the tasks")
            process.send_signal(signal.SIGKILL)
            await process.wait()
        row = await db.fetchrow(f"SELECT *, (SELECT count(*) FROM task WHERE {done}) AS done FROM audit")
        assert row["state"] == "running"
        assert part * 2_500 <= row["changed"] == row["done"] < 10_000
        # A task that fails again after its recovery is not recovered twice.
        await db.execute("UPDATE task SET state = 'failed' WHERE state = 'ready' AND attempt = 1")
    async with gateway_process(where) as (_process, gateway):
        operation = await wait_for_end(gateway, operation_id)
    assert (operation["state"], operation["changed"]) == ("done", 10_000)
    assert await db.fetchval("SELECT count(*) FROM audit") == 1
    assert await db.fetchval(f"SELECT count(*) FROM task WHERE {done}") == 10_000
    if verb == "cancel":
        events = await read(where["kafka"], f"{where['prefix']}events")
        outbox_rows = await db.fetch("SELECT records FROM outbox")
        events += [orjson.loads(record) for row in outbox_rows for record in row["records"]]
        ids = await db.fetch("SELECT id FROM task")
        assert {event["id"] for event in events} == {f"{row['id']}-0-0-cancelled" for row in ids}


async def test_two_gateways_share_one_operation(where: dict[str, Any], db: Any) -> None:
    """S7: two gateways run one operation at one rate, and count each task once."""
    await insert(db, 500)
    async with running_gateway(**where) as first:
        begun = await first.post(
            "/operations", {"verb": "pause", "filter": {"type": "media"}, "rate": 100, "by": "ann"}
        )
        async with running_gateway(**where) as second:
            operation = await wait_for_end(second, begun.body["id"])
    assert operation["changed"] == 500
    row = await db.fetchrow("SELECT extract(epoch FROM finished_at - created_at)::float AS took_s FROM audit")
    # Two gateways that each kept the rate would need half as long.
    assert row["took_s"] >= 4.4


async def test_the_audit_is_paged_and_filtered(gateway: Caller, db: Any) -> None:
    """Audit: operations are listed latest first, over pages of two, by verb and state."""
    await insert(db, 3)
    for verb in ("pause", "resume", "pause", "resume", "cancel"):
        await operate(gateway, verb, {"type": "media"})
    found: list[str] = []
    cursor = ""
    while True:
        page = (await gateway.get(f"/operations?limit=2{cursor}")).body
        found += [one["verb"] for one in page["operations"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert found == ["cancel", "resume", "pause", "resume", "pause"]
    listed = (await gateway.get("/operations?verb=pause&state=done")).body["operations"]
    assert [one["changed"] for one in listed] == [3, 3]
    assert (await gateway.get("/operations?verb=erase")).status == 422
