"""Operations on tasks by filter, over HTTP on the real PostgreSQL: each verb, dry run, rate, audit, and what a crash leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import orjson
import pytest
from tests.gateways import Caller, running_gateway
from tests.running import read
from tests.waiting import wait_until

from penstock.core.operations import Standing, Verb, applied, onward, reachable
from penstock.core.task import FINAL, Priority, State
from penstock.kafka.connection import create_topics
from penstock.kafka.topics import PLATFORM
from penstock.postgres import operations
from penstock.postgres.connection import connect
from penstock.postgres.queries import query
from penstock.settings import Kafka

# What the 10,000 tasks of `crowd` are in; beside them are 1,000 of another tenant and 1,000 of another type.
OPEN = {"scheduled": 1_500, "ready": 6_500, "queued": 1_000, "running": 1_000}
ENDED = {"failed": 9_000, "quarantined": 1_000}
PAUSED = {"paused": 10_000}


@pytest.fixture
async def environment(kafka_servers: str, prefix: str, database: str, tmp_path: Path) -> dict[str, Any]:
    await create_topics(Kafka(kafka=kafka_servers, prefix=prefix), PLATFORM)
    return {
        "kafka": kafka_servers,
        "prefix": prefix,
        "postgres": database,
        "objects": f"file://{tmp_path}",
    }


@pytest.fixture
async def gateway(environment: dict[str, Any]) -> AsyncIterator[Caller]:
    async with running_gateway(**environment) as caller:
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
    """Tasks in a state, with some columns as SQL has them; `n` is the number of each."""
    given = {
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
        f"INSERT INTO task ({', '.join(given)}) SELECT {', '.join(given.values())}"
        f" FROM generate_series(1, {count}) n RETURNING id"
    )
    return [row["id"] for row in rows]


async def crowd(db: Any, states: dict[str, int]) -> None:
    """The tasks that are meant, in a mix of states, and beside them those that are not."""
    for state, count in states.items():
        await insert(db, count, state)
        await insert(db, count // 10, state, labels="""'{"tenant": "zeta"}'""")
        await insert(db, count // 10, state, "other")


async def standing(db: Any, where: str = "true") -> dict[int, tuple[Any, ...]]:
    rows = await db.fetch(
        f"SELECT id, state, attempt, pausing, priority, due_at, updated_at FROM task WHERE {where}"
    )
    return {row["id"]: tuple(row)[1:] for row in rows}


async def ended(gateway: Caller, operation_id: str) -> dict[str, Any]:
    async def so() -> dict[str, Any] | None:
        found = await gateway.get(f"/operations/{operation_id}")
        assert found.status == 200, found.body
        body: dict[str, Any] = found.body
        return body if body["state"] != "running" else None

    return await wait_until(so, timeout=90, what=f"operation {operation_id} ends")  # type: ignore[return-value] # never None


async def operate(gateway: Caller, verb: str, which: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = await gateway.post("/operations", {"verb": verb, "filter": which, "by": "ann@ops", **more})
    assert answer.status == 201, answer.body
    return await ended(gateway, answer.body["id"])


MEANT = {"type": "media", "labels": {"tenant": "acme"}}
UNMEANT = """NOT (type = 'media' AND labels @> '{"tenant": "acme"}')"""

CASES = [
    ("cancel", OPEN, {}, {"cancelled": 10_000}),
    ("pause", OPEN, {}, {"paused": 9_000, "running": 1_000}),
    ("resume", PAUSED, {}, {"ready": 10_000}),
    ("reprioritise", OPEN, {"priority": "HIGHEST"}, OPEN),
    ("recover", ENDED, {}, {"ready": 10_000}),
]


@pytest.mark.parametrize(("verb", "before", "more", "after"), CASES, ids=[case[0] for case in CASES])
async def test_each_verb_by_filter(
    gateway: Caller, db: Any, verb: str, before: dict[str, int], more: dict[str, Any], after: dict[str, int]
) -> None:
    """F5, O2c: of 12,000 tasks the 10,000 that match are changed, queued and running ones among them, each counted once
    in the audit; a dry run before says so and changes nothing; the same afterwards finds nothing."""
    await crowd(db, before)
    first = await standing(db)
    rehearsal = await gateway.post("/operations", {"verb": verb, "filter": MEANT, "dry_run": True, **more})
    assert (rehearsal.status, rehearsal.body["count"], rehearsal.body["more"]) == (200, 10_000, False)
    assert rehearsal.body["found_in"] == before
    assert [task["labels"] for task in rehearsal.body["examples"]] == [{"tenant": "acme"}] * 5
    assert await standing(db) == first
    assert (await gateway.get("/operations")).body["operations"] == []

    told = await operate(gateway, verb, MEANT, **more)
    assert (told["state"], told["changed"], told["found_in"]) == ("done", 10_000, before)
    now = await standing(db)
    others = await standing(db, UNMEANT)
    assert others == {one: first[one] for one in others}
    meant = {one: row for one, row in now.items() if one not in others}
    assert Counter(row[0] for row in meant.values()) == after
    for one, (state, attempt, pausing, priority, due_at, _at) in meant.items():
        was = first[one]
        expected = applied(Verb(verb), Standing(State(was[0]), was[1], was[2], bool(was[4])))
        assert expected is not None
        assert (state, attempt, pausing) == (expected.state, expected.attempt, expected.pausing)
        assert priority == (Priority.HIGHEST if verb == "reprioritise" else was[3])
        assert due_at == (None if verb in ("cancel", "recover") else was[4])
    [entry] = (await gateway.get("/operations")).body["operations"]
    assert entry == told
    assert (entry["by"], entry["filter"], entry["verb"]) == ("ann@ops", MEANT, verb)

    again = await operate(gateway, verb, MEANT, **more)
    assert (again["state"], again["changed"], again["found_in"]) == ("done", 0, {})
    assert await standing(db) == now


async def test_sql_does_what_the_core_decides(gateway: Caller, db: Any) -> None:
    """F5: for every state, mark, delay and verb the statements make of a task what `core.operations` says."""
    for verb in Verb:
        wanted: dict[int, Standing | None] = {}
        first: dict[int, tuple[Any, ...]] = {}
        for state in State:
            for pausing in (False, True):
                for due_ahead in (False, True):
                    # An old process may have left the mark where it does not belong: who resumes takes it away.
                    stray = pausing and state is not State.RUNNING
                    if (stray and (verb is not Verb.RESUME or state in FINAL)) or (
                        state is State.SCHEDULED and not due_ahead
                    ):
                        continue
                    due = "now() + interval '1 hour'" if due_ahead else "now() - interval '1 hour'"
                    [one] = await insert(
                        db, 1, state.value, attempt="3", pausing=str(pausing), due_at=due, priority="4"
                    )
                    wanted[one] = applied(verb, Standing(state, 3, pausing, due_ahead))
        first = await standing(db)
        more = {"priority": "HIGH"} if verb is Verb.REPRIORITISE else {}
        told = await operate(gateway, verb, {"ids": [*wanted]}, **more)
        changed = {one: expected for one, expected in wanted.items() if expected is not None}
        assert told["changed"] == len(changed)
        assert set(told["found_in"]) <= {state.value for state in reachable(verb)}
        now = await standing(db)
        for one, expected in wanted.items():
            if expected is None:
                assert now[one] == first[one]
            else:
                assert now[one][:3] == (expected.state, expected.attempt, expected.pausing), verb
                assert (now[one][3] == Priority.HIGH) is (verb is Verb.REPRIORITISE)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("to", ["ready", "scheduled", "succeeded", "failed"])
async def test_what_is_to_be_paused_is_where_its_stage_ends(db: Any, to: str, late: bool) -> None:
    """F5: a running task that is paused ends its stage, and takes effect, but does not go on; a late result (H10) of one
    that is paused meanwhile ends its stage too. The delay it would have had is kept."""
    [one] = await insert(db, 1, "paused" if late else "running", pausing=str(not late))
    outcome = {"ready": "next", "scheduled": "retry", "succeeded": "done", "failed": "fail"}[to]
    # As `advance._columns` gives them.
    values = [one, 0, "s", 0, to, "t", 1, 0, None, None, 3600.0 if to == "scheduled" else None]
    values += ["json", b"2", None, None, outcome, "w", None, None]
    rows = await db.fetch(query("advance.advance"), *([value] for value in values), late)
    assert len(rows) == 1
    row = await db.fetchrow("SELECT *, due_at > now() AS ahead FROM task WHERE id = $1", one)
    assert row["state"] == onward(State(to), pausing=True)
    assert (row["stage"], row["step"], row["pausing"]) == ("t", 1, False)
    assert (row["ahead"] is True) is (to == "scheduled")


async def test_filters_select(gateway: Caller, db: Any) -> None:
    """O2c: by type, stage, key, state, priority, time of creation and end, and text of the error, alone and together."""
    many = {
        "plain": await insert(db, 1, "failed"),
        "stage": await insert(db, 1, "failed", stage="'cut'"),
        "key": await insert(db, 1, "failed", key="'acme'"),
        "state": await insert(db, 1, "quarantined"),
        "priority": await insert(db, 1, "failed", priority="0"),
        "type": await insert(db, 1, "failed", "other"),
        "created": await insert(db, 1, "failed", created_at="'2020-01-01'"),
        "finished": await insert(db, 1, "failed", finished_at="'2020-01-01'"),
        # An error may hold what PostgreSQL's JSON cannot.
        "error": await insert(
            db,
            1,
            "failed",
            error="""'{"kind":"Net","message":"Reset by PEER \\u0000","traceback":"disk full"}'""",
        ),
        "none": await insert(db, 1, "failed", error="NULL"),
        "labels": await insert(db, 1, "failed", labels="""'{"tenant": "zeta", "a": "b"}'"""),
    }
    everything = {one for ids in many.values() for one in ids}

    async def found(**which: Any) -> set[int]:
        answer = await gateway.post("/operations", {"verb": "recover", "filter": which, "dry_run": True})
        assert answer.status == 200, answer.body
        ids = {task["id"] for task in answer.body["examples"]}
        assert answer.body["count"] == len(ids) or len(ids) == 5
        return ids if answer.body["count"] == len(ids) else everything

    only = {name: set(ids) for name, ids in many.items()}
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
    ({"verb": "pause", "filter": {}, "by": "a"}, 422),
    ({"verb": "pause", "filter": {"type": "media"}}, 422),
    ({"verb": "pause", "filter": {"type": "media"}, "dry_run": False}, 422),
    ({"verb": "erase", "filter": {"type": "media"}, "by": "a"}, 422),
    ({"verb": "pause", "filter": {"typ": "media"}, "by": "a"}, 422),
    ({"verb": "pause", "filter": {"type": "me\0dia"}, "by": "a"}, 422),
    ({"verb": "pause", "filter": {"key": ""}, "by": "a"}, 422),
    ({"verb": "pause", "filter": {"states": ["succeeded", "paused"]}, "by": "a"}, 422),
    ({"verb": "pause", "filter": {"type": "media"}, "priority": "LOW", "by": "a"}, 422),
    ({"verb": "reprioritise", "filter": {"type": "media"}, "by": "a"}, 422),
    ({"verb": "recover", "filter": {"created_since": "2016-12-31T23:59:60Z"}, "by": "a"}, 422),
    ({"verb": "recover", "filter": {"created_since": "0001-01-01T00:00:00+23:59"}, "by": "a"}, 422),
    ({"verb": "recover", "filter": {"created_until": "9999-12-31T23:59:59-23:59"}, "by": "a"}, 422),
    ({"verb": "recover", "filter": {"type": "media"}, "rate": 0, "by": "a"}, 422),
    ({"verb": "recover", "filter": {"type": "media"}, "id": "a b", "by": "a"}, 422),
]


@pytest.mark.parametrize(("body", "status"), WRONG)
async def test_what_is_wrong_is_refused_and_not_written_down(
    gateway: Caller, db: Any, body: dict[str, Any], status: int
) -> None:
    """Habit: a misspelt or empty filter never matches everything."""
    answer = await gateway.post("/operations", body)
    assert answer.status == status, answer.body
    assert answer.pointers or answer.body["detail"]
    assert await db.fetchval("SELECT count(*) FROM audit") == 0


async def test_the_same_id_is_the_same_operation(gateway: Caller, db: Any) -> None:
    """An answer that was lost: asked again under its id the operation is found, and another one under it refused."""
    await insert(db, 5)
    body = {"id": "mine", "verb": "pause", "filter": {"type": "media"}, "by": "ann"}
    first = await gateway.post("/operations", body)
    assert (first.status, first.body["state"], first.body["changed"]) == (201, "done", 5)
    await insert(db, 5)
    again = await gateway.post("/operations", body)
    assert (again.status, again.body) == (200, first.body)
    assert (await gateway.post("/operations", {**body, "filter": {"type": "other"}})).status == 409
    assert (await gateway.get("/operations/theirs")).status == 404
    assert (await gateway.post("/operations/theirs/stop", {"by": "x"})).status == 404


async def test_a_rate_is_held_and_can_be_stopped(gateway: Caller, db: Any) -> None:
    """O2c: 50 and 400 tasks a second within 10 %, over the whole and beside each other; stopped, it changes no more."""

    async def off() -> list[float]:
        """How far from its time each of the two ended, as a share of it."""
        await insert(db, 250)
        await insert(db, 2_000, "failed", "other")
        slow, quick = await asyncio.gather(
            operate(gateway, "cancel", {"type": "media"}, rate=50),
            operate(gateway, "recover", {"type": "other"}, rate=400),
        )
        found = []
        # The first batch goes at once.
        for operation, count, rate, first in ((slow, 250, 50, 5), (quick, 2_000, 400, 40)):
            assert operation["changed"] == count
            took_s = await db.fetchval(
                "SELECT extract(epoch FROM finished_at - created_at)::float FROM audit WHERE id = $1",
                operation["id"],
            )
            found.append(took_s * rate / (count - first) - 1)
        return found

    # A machine that stands still makes it late, and never early.
    for _ in range(5):
        shares = await off()
        assert min(shares) > -0.1
        if max(shares) < 0.1:
            break
    assert max(shares) < 0.1
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


async def test_all_that_a_gateway_left_is_gone_on_with_by_the_next(
    environment: dict[str, Any], db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2c: also what is behind as many operations as are looked for at a time, and that take long themselves."""
    monkeypatch.setattr(operations, "AT_ONCE", 2)
    for number in range(5):
        await insert(db, 2, labels=f"""'{{"n": "{number}"}}'""")
        filter_json = f'{{"labels": {{"n": "{number}"}}, "type": "media"}}'
        await operations.begin(
            db, f"left-{number}", Verb.CANCEL, "ann", filter_json, None, 0.001 if number < 4 else None
        )
    async with running_gateway(**environment) as gateway:
        assert (await ended(gateway, "left-4"))["changed"] == 2


async def test_a_task_that_somebody_holds_is_waited_for_alone(
    gateway: Caller, db: Any, database: str
) -> None:
    """None is missed because another service was at it, and while an operation waits it holds no other task."""
    ids = await insert(db, 300)
    other = await connect(database, "other")
    async with other.transaction():
        await other.execute("SELECT FROM task WHERE id = $1 FOR UPDATE", ids[100])
        begun = await gateway.post("/operations", {"verb": "pause", "filter": {"type": "media"}, "by": "ann"})
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        await wait_until(lambda: db.fetchval(waiting), what="the operation waits for the task")
        # What it has passed is committed; what comes after is free.
        assert await db.fetchval("SELECT count(*) FROM task WHERE state = 'paused'") == 100
        await db.execute("SELECT FROM task WHERE id = ANY ($1) FOR UPDATE NOWAIT", ids[101:])
        await other.execute("UPDATE task SET state = 'queued' WHERE id = $1", ids[100])
    told = await ended(gateway, begun.body["id"])
    await other.close()
    assert told["found_in"] == {"ready": 299, "queued": 1}
    assert await db.fetchval("SELECT attempt FROM task WHERE id = $1", ids[100]) == 1


async def test_a_batch_that_can_never_succeed_ends_its_operation_and_says_why(
    gateway: Caller, db: Any
) -> None:
    """Poison: the operation fails with PostgreSQL's words, and the gateway and other operations go on."""
    await insert(db, 1, "failed", error="'no JSON'")
    told = await operate(gateway, "recover", {"type": "media", "error": "x"})
    assert (told["state"], told["changed"]) == ("failed", 0)
    assert "json" in told["error"]
    assert (await operate(gateway, "recover", {"type": "media"}))["changed"] == 1


async def test_the_walk_is_bounded(gateway: Caller, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that hardly anything matches walks on in statements of bounded size, and a dry run says when it gave up."""
    monkeypatch.setattr(operations, "LOOKED_AT", 100)
    await insert(db, 950)
    [one] = await insert(db, 1, stage="'rare'")
    await insert(db, 49)
    told = await operate(gateway, "pause", {"stage": "rare"})
    assert (told["changed"], told["state"]) == (1, "done")
    assert await db.fetchval("SELECT state FROM task WHERE id = $1", one) == "paused"
    monkeypatch.setattr("penstock.gateway.operations.LOOKED_AT", 500)
    body = {"verb": "resume", "filter": {"stage": "rare"}, "dry_run": True}
    answer = (await gateway.post("/operations", body)).body
    assert (answer["count"], answer["more"]) == (0, True)
    monkeypatch.setattr("penstock.gateway.operations.LOOKED_AT", 5_000)
    answer = (await gateway.post("/operations", body)).body
    assert (answer["count"], answer["more"]) == (1, False)


@asynccontextmanager
async def gateway_process(environment: dict[str, Any]) -> AsyncIterator[tuple[Any, Caller]]:
    """A gateway that can be killed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "run", "gateway"),
        env={
            **os.environ,
            **{f"PENSTOCK_{name.upper()}": value for name, value in environment.items()},
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
            url = line.partition("listening on ")[2].strip()
        async with aiohttp.ClientSession() as session:
            yield process, Caller(url.split()[0], session)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


@pytest.mark.parametrize("verb", ["cancel", "recover"])
async def test_kill_9_in_the_middle_neither_repeats_nor_misses_a_task(
    environment: dict[str, Any], db: Any, verb: str
) -> None:
    """O1, O2c: the gateway is killed twice in the middle; whichever starts next goes on by itself. Each of 10,000 tasks is
    changed once, each is one of the audit's total, and each cancellation is told."""
    await insert(db, 10_000, "ready" if verb == "cancel" else "failed")
    done = {"cancel": "state = 'cancelled'", "recover": "attempt = 1"}[verb]
    operation_id = ""
    for part in (1, 2):
        async with gateway_process(environment) as (process, gateway):
            if not operation_id:
                begun = await gateway.post(
                    "/operations", {"verb": verb, "filter": {"type": "media"}, "rate": 2_500, "by": "ann"}
                )
                operation_id = begun.body["id"]

            async def come(to: int = part * 2_500) -> bool:
                return bool(await db.fetchval("SELECT changed >= $1 FROM audit", to))

            await wait_until(come, what="it has come some way")
            process.send_signal(signal.SIGKILL)
            await process.wait()
        row = await db.fetchrow(f"SELECT *, (SELECT count(*) FROM task WHERE {done}) AS done FROM audit")
        assert row["state"] == "running"
        assert part * 2_500 <= row["changed"] == row["done"] < 10_000
        # What has failed again since it was recovered is not recovered twice.
        await db.execute("UPDATE task SET state = 'failed' WHERE state = 'ready' AND attempt = 1")
    async with gateway_process(environment) as (_process, gateway):
        told = await ended(gateway, operation_id)
    assert (told["state"], told["changed"]) == ("done", 10_000)
    assert await db.fetchval("SELECT count(*) FROM audit") == 1
    assert await db.fetchval(f"SELECT count(*) FROM task WHERE {done}") == 10_000
    if verb == "cancel":
        events = await read(environment["kafka"], f"{environment['prefix']}events")
        owed = await db.fetch("SELECT records FROM outbox")
        events += [orjson.loads(record) for row in owed for record in row["records"]]
        assert {event["id"] for event in events} == {f"{n}-0-0-cancelled" for n in range(1, 10_001)}


async def test_two_gateways_at_one_operation_take_turns(environment: dict[str, Any], db: Any) -> None:
    """S7: both go on with it, the rate is one, and each task is counted once."""
    await insert(db, 500)
    async with running_gateway(**environment) as first:
        begun = await first.post(
            "/operations", {"verb": "pause", "filter": {"type": "media"}, "rate": 100, "by": "ann"}
        )
        async with running_gateway(**environment) as second:
            told = await ended(second, begun.body["id"])
    assert told["changed"] == 500
    row = await db.fetchrow("SELECT extract(epoch FROM finished_at - created_at)::float AS took_s FROM audit")
    assert row["took_s"] == pytest.approx(4.9, rel=0.1)


async def test_the_audit_is_paged_and_filtered(gateway: Caller, db: Any) -> None:
    """Audit: latest first, over pages of two, by verb and state."""
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
